"""The contract that every step is the linear map: four numbers, applied in double precision by the reference."""

from typing import Any

import torch
from torch import Tensor

from torchbelay.belay.cohort import compounded, inertias
from torchbelay.belay.options import Options
from torchbelay.belay.rules import as_rule
from torchbelay.ops import reference
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Method, Remembers

from .bench import Bench, Run
from .comparison import Violation, can_average, widen

REST = Coupling(0.0, 0.0, 1.0, 0.0)  # a step that `every` leaves out


def check_linear_map(bench: Bench) -> None:
    """Check every step against the four numbers; a twin without `Belay` gives the update of the optimizer alone."""
    bench.require_repeats()
    options, rule = Options(**bench.options), as_rule(bench.method)
    run, twin = bench.run(bench.method), bench.run()
    methods: dict[str, Method | None] = {}
    for step in range(bench.steps):
        rates = _rates(run)
        before = _positions(run)
        with torch.no_grad():
            for name, p in twin.named().items():
                p.copy_(run.named()[name])
        run.step(step)
        twin.step(step)
        after = _positions(run)
        for name, p in twin.named().items():
            method = methods.setdefault(
                name, _without_memory(rule(name, p) if can_average(p) and name in rates else None)
            )
            if method is not None and name not in before and step >= options.start:
                raise Violation(f"{name!r} is not averaged")
            if method is None or name not in before:  # not averaged, or not yet
                _require_near(name, "w1", step, widen(run.named()[name]), widen(p), _slack(p, widen(p)))
                if name in after:
                    _require_near(name, "w2", step, after[name]["w2"], widen(_begun(run, name)), 0.0)
                continue
            age = int(before[name]["age"]) + 1
            coupling = REST if age % options.every else compounded(method, age, rates[name], options.every)
            _compare_step(name, step, before[name], after[name], widen(p), coupling, method, run)
    if not any(methods.values()):
        raise Violation("nothing is averaged")


def _compare_step(
    name: str,
    step: int,
    before: dict[str, Any],
    after: dict[str, Any],
    stepped: Tensor,
    coupling: Coupling,
    method: Method,
    run: Run,
) -> None:
    """Compare one parameter after a step with the map applied to it before the step."""
    w1, w2 = before["w1"], before["w2"]
    u = stepped - w1
    new1, new2 = reference.couple(w1, w2, u, a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)
    expected = {"w1": new1, "w2": new2}
    for key, at, apart, inertia in zip(("v1", "v2"), ("w1", "w2"), (w2 - w1, w1 - w2), inertias(method), strict=True):
        if inertia is not None and coupling != REST:
            carry, stay, stiffness, push = inertia
            expected[at] = expected[at] + carry * before[key]
            expected[key] = stay * before[key] + stiffness * apart + push * u
    if coupling.meets and "v2" in before:  # where the average arrives with its velocity
        expected["w1"] = expected["w2"]
    p = run.named()[name]
    average = run.average()["weights"][name]
    largest = max(1.0, *(abs(x) for x in (coupling.a, coupling.b, coupling.p, coupling.q)))
    added = sum(x.abs() for key, x in before.items() if key != "age") + u.abs()
    # Allow a few roundings of the terms of the sum in float32 or wider, then one rounding to the dtype of the result.
    wide = torch.promote_types(torch.promote_types(p.dtype, average.dtype), torch.float32)
    roundings = 4 * torch.finfo(wide).eps * largest * added
    for key, value in expected.items():
        slack = _slack(p if key == "w1" else average, value)
        if key == "w2" and run.attached._options.bits is not None:
            slack = 2.0**-15 * value.abs() + torch.finfo(torch.float32).tiny  # rounded at random, to either neighbour
        _require_near(name, key, step, after[key], value, roundings + slack)


def _positions(run: Run) -> dict[str, dict[str, Any]]:
    """Return w1, w2, velocities and age of every averaged parameter, in double precision, by name."""
    average, named = run.average(), run.named()
    out: dict[str, dict[str, Any]] = {}
    if not run.attached.state_dict()["began"]:
        return out
    for name, w2 in average["weights"].items():
        if name not in named:
            raise Violation(f"the average has {name!r}, which the model does not have")
        out[name] = {"w1": widen(named[name]), "w2": widen(w2), "age": average["ages"][name]}
        for key, kind in (("v1", "velocities1"), ("v2", "velocities2")):
            if name in average[kind]:
                out[name][key] = widen(average[kind][name])
    return out


def _begun(run: Run, name: str) -> Tensor:
    """Return the average of a parameter that has begun at its weights just now."""
    return run.kept(run.named()[name], run.average()["weights"][name])


def _rates(run: Run) -> dict[str, float]:
    """Return the learning rate of every parameter of the optimizer, by name."""
    rates = {id(p): float(g.get("lr") or 0.0) for g in run.optimizer.param_groups for p in g["params"]}
    return {name: rates[id(p)] for name, p in run.named().items() if id(p) in rates}


def _without_memory(method: Method | None) -> Method | None:
    """Return the method as at the start of a run."""
    return method.fresh() if isinstance(method, Remembers) else method


def _require_near(name: str, which: str, step: int, ours: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    """Raise a `Violation` if a tensor is further from the expected one than allowed."""
    off = (ours - expected).abs()
    far = ~(off <= allowed)
    if bool(far.any()):
        raise Violation(
            f"{which} of {name!r} after step {step + 1} is off by {off[far].max().item():.3g} in {int(far.sum())} of "
            f"{off.numel()} places"
        )


def _slack(stored: Tensor, value: Tensor) -> Tensor:
    """Return the largest error of rounding `value` to the dtype of `stored`."""
    if not can_average(stored):
        return torch.zeros(())
    return 0.5 * torch.finfo(stored.dtype).eps * value.abs() + torch.finfo(stored.dtype).tiny

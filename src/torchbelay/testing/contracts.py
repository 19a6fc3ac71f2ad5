"""The contracts: each takes a `Bench`, and raises `Violation` if its promise does not hold."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from torchbelay.belay import modules
from torchbelay.physics.spring import Spring

from .bench import Bench, InjectedFault, Skip
from .comparison import Violation, abridge, can_average, differences, local, reload, require_unchanged, same
from .linear_map import check_linear_map

WATCHING = Spring.ema(decay=0.9)


def check_swap(bench: Bench) -> None:
    """Check that `averaged()` gives every bit back, nested and after an exception."""
    run = bench.example()
    before, average = run.state(), {name: local(w2).clone() for name, w2 in run.average()["weights"].items()}

    def inside() -> None:
        for name, p in run.named().items():
            if name in average and not same(local(p), average[name].to(p.device, p.dtype)):
                raise Violation(f"inside averaged() {name!r} is not the average")

    with run.attached.averaged():
        inside()
        with run.attached.averaged():
            inside()
        inside()
    require_unchanged(before, run.state(), "averaged()")
    try:
        with run.attached.averaged():
            inside()
            raise InjectedFault
    except InjectedFault:
        pass
    require_unchanged(before, run.state(), "an exception inside averaged()")


def check_refused_step(bench: Bench) -> None:
    """Check that an optimizer step inside `averaged()` raises and changes nothing."""
    run = bench.example()
    before = run.state()
    arguments: tuple[Any, ...] = (lambda: torch.zeros(()),) if bench.closure else ()
    try:
        with run.attached.averaged():
            run.optimizer.step(*arguments)
    except RuntimeError as said:
        if "averaged" not in str(said):
            raise Violation(f"an optimizer step inside averaged() raised {said!r}") from said
    else:
        raise Violation("an optimizer step inside averaged() was not refused")
    require_unchanged(before, run.state(), "a refused step")


def check_resume(bench: Bench) -> None:
    """Check that a run that is stopped half-way ends as the run that was not."""
    bench.require_repeats()
    if bench.resumes:
        raise Skip(bench.resumes)
    bench.example()
    half, other = bench.run(bench.method), bench.run(bench.method, seed=1)
    half.train(bench.first_half)
    other.model.load_state_dict(copy.deepcopy(half.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
    other.attached.load_state_dict(reload(half.attached.state_dict()))
    other.train(bench.second_half)
    if differing := differences(bench.finished, other.state()):
        raise Violation(
            f"a run that was stopped after {len(bench.first_half)} steps ends with other values: {abridge(differing)}"
        )


def check_watching(bench: Bench) -> None:
    """Check that an average that never pulls leaves the training as it is without `Belay`."""
    bench.require_repeats()
    run = bench.finish(WATCHING)
    if differing := differences(bench.plain, run.state("model", "optimizer") | run.gradients()):
        raise Violation(f"{WATCHING} changed the training: {abridge(differing)}")


def check_export(bench: Bench) -> None:
    """Check that the exported average loads into a new model with the same weights and loss."""
    run = bench.example()
    exported = run.attached.average_state_dict()
    fresh = bench.model(seed=1)
    _, _, inner = next(modules.walk(fresh))
    try:
        inner.load_state_dict(exported, strict=True)
    except (RuntimeError, ValueError, TypeError) as said:
        raise Violation(f"average_state_dict() does not load into a new model: {said}") from said
    loaded, average = modules.named_parameters(fresh), run.average()["weights"]
    for name, p in run.named().items():
        expected = average[name].to(p.device, p.dtype) if name in average else p
        if name not in loaded or not same(local(loaded[name]), local(expected)):
            raise Violation(f"average_state_dict() does not hold the average of {name!r}")
    if bench.repeats:
        return
    values = []
    for model in (run.model, fresh):
        with run.attached.averaged() if model is run.model else nullcontext(), torch.no_grad():
            torch.manual_seed(0)
            values.append(bench.loss(model.eval(), bench.batches(0)))
    if not same(*map(local, values)):
        raise Violation(
            f"a new model with the exported average has the loss {float(values[1])}, and the model inside averaged() "
            f"{float(values[0])}: the loss depends on something that its state_dict() does not hold"
        )


def check_refused_states(bench: Bench) -> None:
    """Check that states that do not fit are refused and change nothing."""
    state = copy.deepcopy(bench.example().attached.state_dict())
    other = bench.run(Spring.ema(decay=0.123456))
    before = other.state()
    for what, damaged in (("of another method", state), ("without averages", {"format": 1}), ("that is empty", {})):
        try:
            other.attached.load_state_dict(damaged)
        except ValueError:
            require_unchanged(before, other.state(), f"a refused state {what}")
        else:
            raise Violation(f"a state {what} was loaded")


def check_retry(bench: Bench) -> None:
    """Check that steps that raise once and are repeated end as steps that did not raise."""
    bench.require_repeats()
    bench.example()
    if differing := differences(bench.finished, bench.finish(bench.method, failing=True).state()):
        raise Violation(f"steps that raised in a hook and were repeated end with other values: {abridge(differing)}")


def check_copy(bench: Bench) -> None:
    """Check that `copy_to_model()` makes the average the weights."""
    run = bench.example()
    average = {name: local(w2).clone() for name, w2 in run.average()["weights"].items()}
    run.attached.copy_to_model()
    for name, w2 in average.items():
        p = run.named()[name]
        if not same(local(p), w2.to(p.device, p.dtype)):
            raise Violation(f"after copy_to_model() {name!r} is not the average")


def check_reset(bench: Bench) -> None:
    """Check that `reset()` restarts the average at the weights."""
    run = bench.example()
    with torch.no_grad():
        for p in run.named().values():
            if can_average(p):
                p.mul_(0.5)
    run.attached.reset()
    named = run.named()
    for name, w2 in run.average()["weights"].items():
        if not same(local(w2), local(run.kept(named[name], w2))):
            raise Violation(f"after reset() the average of {name!r} is not its weight")


def check_detach(bench: Bench) -> None:
    """Check that `detach()` removes the hooks and leaves the average as it is."""
    plain, run = bench.run(), bench.example()
    run.attached.detach()
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if len(getattr(run.optimizer, hooks)) != len(getattr(plain.optimizer, hooks)):
            raise Violation(f"after detach() the optimizer has other {hooks} than without Belay")
    before = run.state("belay")
    run.train(range(1))
    require_unchanged(before, run.state("belay"), "training after detach()")


# The order matters: the last three contracts change the example that all share.
CONTRACTS: dict[str, Callable[[Bench], None]] = {
    "every step is the linear map": check_linear_map,
    "averaged() puts the average in and gives every bit back": check_swap,
    "a step inside averaged() is refused and changes nothing": check_refused_step,
    "a run goes on from a checkpoint bit for bit": check_resume,
    "an average that watches changes no bit of the training": check_watching,
    "the export loads strictly into a new model": check_export,
    "a state that does not fit is refused and changes nothing": check_refused_states,
    "a step that raised and is taken again counts once": check_retry,
    "copy_to_model() makes the average the weights": check_copy,
    "reset() begins again at the weights": check_reset,
    "detach() leaves no hook, and the average as it is": check_detach,
}
"""The contracts that `check` checks, by what each promises."""

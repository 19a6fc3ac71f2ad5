"""One contract suite for any model and any optimizer: run it on your own before a long training.

It needs no test framework: `check(...)` raises a `ContractError` that says what does not hold, or returns a `Report`.
"""

import copy
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.belay import Belay, modules
from torchbelay.belay.average import MAIN, Rule, as_rule
from torchbelay.belay.cohort import compounded, inertias
from torchbelay.belay.options import OptionArguments, Options
from torchbelay.ops import reference
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Method, Remembers
from torchbelay.physics.spring import Spring
from torchbelay.physics.warnings import BelayWarning

__all__ = ["ContractError", "Report", "check"]

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Holds = dict[str, Any]  # all that some objects hold, flat, by name

DEFAULT = Spring(k=1.0, m1=10.0, m2=20.0)
WATCHING = Spring.ema(decay=0.9)
REST = Coupling(0.0, 0.0, 1.0, 0.0)


class ContractError(AssertionError):
    """What does not hold, a line each."""


@dataclass(frozen=True)
class Report:
    """What `check` found to hold, and what it could not look at, with the reason."""

    passed: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        skipped = [f"  --  {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*(f"  ok  {name}" for name in self.passed), *skipped])


def check(
    model_factory: Callable[[], nn.Module],
    optimizer_factory: Callable[[nn.Module], Optimizer],
    *,
    batch: Batch | Callable[[int], Batch],
    loss: Loss | None = None,
    method: Method | Rule = DEFAULT,
    steps: int = 6,
    closure: bool = False,
    **options: Unpack[OptionArguments],
) -> Report:
    """Hold a model and an optimizer of yours to all that `Belay` promises; raises `ContractError` where it fails.

    Args:
        model_factory: makes a new model, wrapped or not, each time that it is called.
        optimizer_factory: makes the optimizer of such a model.
        batch: what the loss is given; a function of the number of the step (from 0), or one batch for all of them.
        loss: (model, batch) -> a number to minimise. By default the mean square of what the model returns, when called
            with the batch (with `*batch` for a tuple, `**batch` for a dict), or its `.loss` if it has one.
        method: as for `Belay`.
        steps: how long each of a dozen short trainings is.
        closure: let the optimizer evaluate the loss itself, as LBFGS needs.
        **options: as for `Belay`.

    Randomness (dropout, say) is seeded before every step, and your own generators are as they were afterwards. What
    can only be said of a training that repeats itself bit for bit is skipped for one that does not, and the report
    says so.

    >>> report = check(
    ...     lambda: nn.Linear(3, 1),
    ...     lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    ...     batch=lambda step: torch.linspace(-1, step, 12).reshape(4, 3),
    ... )
    >>> report.skipped
    {}
    >>> print(report)
      ok  every step is the linear map
      ...
    """
    if steps < 2:
        raise ValueError(f"steps={steps!r}: it takes 2 at the least to stop in the middle")
    batches = batch if callable(batch) else lambda step: batch
    with _undisturbed():
        bench = _Bench(model_factory, optimizer_factory, batches, loss or mean_square, method, steps, closure, options)
        bench.look()
        passed: list[str] = []
        skipped: dict[str, str] = {}
        broken: dict[str, str] = {}
        cause: Exception | None = None
        for name, contract in CONTRACTS.items():
            try:
                contract(bench)
            except _Skipped as why:
                skipped[name] = str(why)
            except Exception as why:
                broken[name] = str(why) if isinstance(why, _Broken) else f"raised {type(why).__name__}: {why}"
                cause = cause or why
                bench.forget_example()
            else:
                passed.append(name)
    if broken:
        lines = "\n".join(f"  {name}: {why}" for name, why in broken.items())
        raise ContractError(f"{len(broken)} of {len(CONTRACTS)} contracts do not hold:\n{lines}") from cause
    return Report(tuple(passed), skipped)


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of nobody in particular: the mean square of all that the model returns; or its own `.loss`."""
    match batch:
        case Mapping():
            out = model(**batch)
        case tuple():
            out = model(*batch)
        case _:
            out = model(batch)
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [t for _, t in _leaves("", out) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    if not found:
        raise ValueError(f"the model returned {type(out).__name__}, with no number to minimise in it; give a loss=")
    return torch.stack([t.abs().square().mean().float() for t in found]).sum()


class _Broken(Exception):  # noqa: N818  # a finding, not a fault of the program
    pass


class _Skipped(Exception):  # noqa: N818
    pass


class _Injected(Exception):  # noqa: N818
    pass


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the caller's generators alone, and do not repeat warnings about a method that was chosen knowingly."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", BelayWarning)
        yield


# A training ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    bench: "_Bench"
    model: nn.Module
    optimizer: Optimizer
    belay: Belay | None

    def train(self, steps: Iterable[int], *, failing: bool = False) -> None:
        for step in steps:
            self.step(step, failing=failing)

    def step(self, step: int, *, failing: bool = False) -> None:
        """Train on the batch of a step; if `failing`, the optimizer's step raises first and is then taken again."""
        torch.manual_seed(1000 + step)
        self.model.train()
        batch = self.bench.batches(step)

        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.bench.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        arguments: tuple[Any, ...] = (evaluate,)
        if not self.bench.closure:
            evaluate()
            arguments = ()
        if failing:
            handle = self.optimizer.register_step_pre_hook(_fail)
            try:
                self.optimizer.step(*arguments)
            except _Injected:
                pass
            finally:
                handle.remove()
        self.optimizer.step(*arguments)

    @property
    def attached(self) -> Belay:
        assert self.belay is not None
        return self.belay

    def named(self) -> dict[str, nn.Parameter]:
        return modules.named_parameters(self.model)

    def average(self) -> dict[str, Any]:
        """The saved form of the main average: weights, velocities1, velocities2, ages, …"""
        state: dict[str, Any] = self.attached.state_dict()["averages"][MAIN]
        return state

    def gradients(self) -> Holds:
        return {f"gradient/{name}": _local(p.grad) for name, p in self.named().items() if p.grad is not None}

    def holds(self, *parts: str) -> Holds:
        """Copies of all that these parts hold; by default of all there are."""
        chosen = parts or ("model", "optimizer", *(["belay"] if self.belay is not None else []))
        return {
            name: _copy(leaf)
            for part in chosen
            for name, leaf in _leaves(part, getattr(self, part).state_dict())
            if not callable(leaf)
        }


def _fail(*_: object) -> None:
    raise _Injected


@dataclass(eq=False)
class _Bench:
    """Makes one short training after the other, all from the same weights."""

    model_factory: Callable[[], nn.Module]
    optimizer_factory: Callable[[nn.Module], Optimizer]
    batches: Callable[[int], Batch]
    loss: Loss
    method: Method | Rule
    steps: int
    closure: bool
    options: OptionArguments
    repeats: str | None = None  # why bits cannot be compared, if they cannot
    resumes: str | None = None  # why the training cannot go on from a checkpoint even without us, if it cannot
    plain: Holds = field(default_factory=dict)  # what model and optimizer, and the gradients, are without us in the end
    finished: Holds = field(default_factory=dict)  # what everything is in the end, with the method in question
    _example: _Run | None = None
    _start: dict[str, Any] | None = None
    _made: list[nn.Module] = field(default_factory=list)

    def model(self, seed: int = 0) -> nn.Module:
        """A new model; that of seed 0 is always the same."""
        torch.manual_seed(seed)
        model = self.model_factory()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model_factory() returned {type(model).__name__}; it must return a torch.nn.Module")
        if any(model is other for other in self._made):
            raise ValueError("model_factory() returned the same model twice; it must make a new one at every call")
        self._made = [*self._made[-1:], model]
        if seed == 0:
            if self._start is None:
                self._start = copy.deepcopy(model.state_dict())
            else:
                model.load_state_dict(self._start)
        return model

    def run(self, method: Method | Rule | None = None, *, seed: int = 0) -> _Run:
        """A new training, with a Belay if there is a method."""
        model = self.model(seed)
        optimizer = self.optimizer_factory(model)
        belay = None if method is None else Belay(model, optimizer, method, **self.options)
        return _Run(self, model, optimizer, belay)

    def trained(self, method: Method | Rule | None = None, *, failing: bool = False) -> _Run:
        """The same, after all its steps."""
        run = self.run(method)
        run.train(range(self.steps), failing=failing)
        return run

    def example(self) -> _Run:
        """One that has been trained by the method in question; whoever changes it must be at the end of the list."""
        if self._example is None:
            self._example = self.trained(self.method)
            self.finished = self._example.holds()
        return self._example

    def forget_example(self) -> None:
        """Something went wrong with it."""
        self._example = None

    def look(self) -> None:
        """Find out, without any Belay, what can be expected of this training at all."""
        run = self.run()
        before = run.holds("model")
        run.train(range(self.steps))
        after, self.plain = run.holds(), run.holds() | run.gradients()
        if not _different(before, {name: after[name] for name in before}):
            raise ValueError(
                f"the training moves nothing: no weight has changed after {self.steps} steps; give a batch and a loss "
                "that train the model, and an optimizer that holds its parameters"
            )
        if endless := [n for n in before if isinstance(after[n], Tensor) and not after[n].isfinite().all()]:
            raise ValueError(
                f"the training breaks down without Belay: {_some(endless)} is not finite after {self.steps} steps; "
                "give a smaller learning rate, or (for float16 weights) a larger eps"
            )
        again = self.trained()
        if differing := _different(after, again.holds()):
            self.repeats = (
                f"the training does not repeat itself bit for bit, even without Belay ({_some(differing)} differs); "
                "try torch.use_deterministic_algorithms(True)"
            )
            return
        half, other = self.run(), self.run(seed=1)
        half.train(self.first_half)
        other.model.load_state_dict(copy.deepcopy(half.model.state_dict()))
        other.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
        other.train(self.second_half)
        if differing := _different(after, other.holds()):
            self.resumes = f"the training does not resume bit for bit, even without Belay ({_some(differing)} differs)"

    @property
    def first_half(self) -> range:
        return range(self.steps // 2)

    @property
    def second_half(self) -> range:
        return range(self.steps // 2, self.steps)

    def needs_repeats(self) -> None:
        if self.repeats:
            raise _Skipped(self.repeats)


# The contracts ---------------------------------------------------------------------------------------------------


def _follows_the_map(bench: _Bench) -> None:
    """A twin without Belay says what the optimizer alone would do at each step; the rest is four numbers."""
    bench.needs_repeats()
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
            method = methods.setdefault(name, _own(rule(name, p) if _averageable(p) and name in rates else None))
            if method is not None and name not in before and step >= options.start:
                raise _Broken(f"{name!r} is not averaged")
            if method is None or name not in before:  # not averaged, or not yet
                _near(name, "w1", step, _wide(run.named()[name]), _wide(p), _slack(p, _wide(p)))
                if name in after:
                    _near(name, "w2", step, after[name]["w2"], _wide(run.named()[name]), 0.0)
                continue
            age = int(before[name]["age"]) + 1
            coupling = REST if age % options.every else compounded(method, age, rates[name], options.every)
            _one_step(name, step, before[name], after[name], _wide(p), coupling, method, run)
    if not any(methods.values()):
        raise _Broken("nothing is averaged")


def _one_step(
    name: str,
    step: int,
    before: dict[str, Any],
    after: dict[str, Any],
    stepped: Tensor,
    coupling: Coupling,
    method: Method,
    run: _Run,
) -> None:
    w1, w2 = before["w1"], before["w2"]
    u = stepped - w1
    new1, new2 = reference.couple(w1, w2, u, a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)
    expected = {"w1": new1, "w2": new2}
    for key, at, apart, inertia in zip(("v1", "v2"), ("w1", "w2"), (w2 - w1, w1 - w2), inertias(method), strict=True):
        if inertia is not None:
            carry, stay, stiffness, push = inertia
            expected[at] = expected[at] + carry * before[key]
            expected[key] = stay * before[key] + stiffness * apart + push * u
    p = run.named()[name]
    average = run.average()["weights"][name]
    largest = max(1.0, *(abs(x) for x in (coupling.a, coupling.b, coupling.p, coupling.q)))
    added = sum(x.abs() for key, x in before.items() if key != "age") + u.abs()
    # a handful of roundings of what is added up, in float32 or wider; then each is rounded to its own dtype
    wide = torch.promote_types(torch.promote_types(p.dtype, average.dtype), torch.float32)
    handful = 4 * torch.finfo(wide).eps * largest * added
    for key, value in expected.items():
        _near(name, key, step, after[key], value, handful + _slack(p if key == "w1" else average, value))


def _positions(run: _Run) -> dict[str, dict[str, Any]]:
    """w1, w2, velocities and age of all that is averaged, in double precision, by name."""
    average, named = run.average(), run.named()
    out: dict[str, dict[str, Any]] = {}
    if not run.attached.state_dict()["began"]:
        return out
    for name, w2 in average["weights"].items():
        if name not in named:
            raise _Broken(f"the average has {name!r}, which the model does not have")
        out[name] = {"w1": _wide(named[name]), "w2": _wide(w2), "age": average["ages"][name]}
        for key, kind in (("v1", "velocities1"), ("v2", "velocities2")):
            if name in average[kind]:
                out[name][key] = _wide(average[kind][name])
    return out


def _rates(run: _Run) -> dict[str, float]:
    """The learning rates of all that the optimizer holds, by name."""
    rates = {id(p): float(g.get("lr") or 0.0) for g in run.optimizer.param_groups for p in g["params"]}
    return {name: rates[id(p)] for name, p in run.named().items() if id(p) in rates}


def _own(method: Method | None) -> Method | None:
    return method.fresh() if isinstance(method, Remembers) else method


def _near(name: str, which: str, step: int, ours: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    off = (ours - expected).abs()
    far = ~(off <= allowed)
    if bool(far.any()):
        raise _Broken(
            f"{which} of {name!r} after step {step + 1} is off by {off[far].max().item():.3g} in {int(far.sum())} of "
            f"{off.numel()} places"
        )


def _slack(stored: Tensor, value: Tensor) -> Tensor:
    """What rounding to a tensor's own dtype may cost."""
    if not _averageable(stored):
        return torch.zeros(())
    return 0.5 * torch.finfo(stored.dtype).eps * value.abs() + torch.finfo(stored.dtype).tiny


def _swaps(bench: _Bench) -> None:
    run = bench.example()
    before, average = run.holds(), {name: _local(w2).clone() for name, w2 in run.average()["weights"].items()}

    def inside() -> None:
        for name, p in run.named().items():
            if name in average and not _same(_local(p), average[name].to(p.device, p.dtype)):
                raise _Broken(f"inside averaged() {name!r} is not the average")

    with run.attached.averaged():
        inside()
        with run.attached.averaged():
            inside()
        inside()
    _unchanged(before, run.holds(), "averaged()")
    try:
        with run.attached.averaged():
            inside()
            raise _Injected
    except _Injected:
        pass
    _unchanged(before, run.holds(), "an exception inside averaged()")


_ZERO: tuple[Any, ...] = (lambda: torch.zeros(()),)  # a closure that evaluates nothing


def _refuses_steps_inside(bench: _Bench) -> None:
    run = bench.example()
    before = run.holds()
    try:
        with run.attached.averaged():
            run.optimizer.step(*_ZERO[: int(bench.closure)])
    except RuntimeError as said:
        if "averaged" not in str(said):
            raise _Broken(f"an optimizer step inside averaged() raised {said!r}") from said
    else:
        raise _Broken("an optimizer step inside averaged() was not refused")
    _unchanged(before, run.holds(), "a refused step")


def _resumes(bench: _Bench) -> None:
    bench.needs_repeats()
    if bench.resumes:
        raise _Skipped(bench.resumes)
    bench.example()
    half, other = bench.run(bench.method), bench.run(bench.method, seed=1)
    half.train(bench.first_half)
    other.model.load_state_dict(copy.deepcopy(half.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
    other.attached.load_state_dict(_through_a_file(half.attached.state_dict()))
    other.train(bench.second_half)
    if differing := _different(bench.finished, other.holds()):
        raise _Broken(f"a run that was stopped after {len(bench.first_half)} steps ends elsewhere: {_some(differing)}")


def _watches(bench: _Bench) -> None:
    bench.needs_repeats()
    run = bench.trained(WATCHING)
    if differing := _different(bench.plain, run.holds("model", "optimizer") | run.gradients()):
        raise _Broken(f"{WATCHING} changed the training: {_some(differing)}")


def _exports(bench: _Bench) -> None:
    run = bench.example()
    exported = run.attached.average_state_dict()
    fresh = bench.model(seed=1)
    _, _, inner = next(modules.walk(fresh))
    try:
        inner.load_state_dict(exported, strict=True)
    except (RuntimeError, ValueError, TypeError) as said:
        raise _Broken(f"average_state_dict() does not load into a new model: {said}") from said
    loaded, average = modules.named_parameters(fresh), run.average()["weights"]
    for name, p in run.named().items():
        expected = average[name].to(p.device, p.dtype) if name in average else p
        if name not in loaded or not _same(_local(loaded[name]), _local(expected)):
            raise _Broken(f"average_state_dict() does not hold the average of {name!r}")
    if bench.repeats:
        return
    values = []
    for model in (run.model, fresh):
        with run.attached.averaged() if model is run.model else _nothing(), torch.no_grad():
            torch.manual_seed(0)
            values.append(bench.loss(model.eval(), bench.batches(0)))
    if not _same(*map(_local, values)):
        raise _Broken(
            f"a new model with the exported average has the loss {float(values[1])}, and the model inside averaged() "
            f"{float(values[0])}: something that is no part of its state_dict() takes part in it"
        )


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _refuses_other_states(bench: _Bench) -> None:
    state = copy.deepcopy(bench.example().attached.state_dict())
    other = bench.run(Spring.ema(decay=0.123456))
    before = other.holds()
    for what, damaged in (("of another method", state), ("that is none", {"format": 1}), ("that is empty", {})):
        try:
            other.attached.load_state_dict(damaged)
        except ValueError:
            _unchanged(before, other.holds(), f"a refused state {what}")
        else:
            raise _Broken(f"a state {what} was loaded")


def _retries(bench: _Bench) -> None:
    bench.needs_repeats()
    bench.example()
    if differing := _different(bench.finished, bench.trained(bench.method, failing=True).holds()):
        raise _Broken(f"steps that raised in a hook and were taken again end elsewhere: {_some(differing)}")


def _copies(bench: _Bench) -> None:
    run = bench.example()
    average = {name: _local(w2).clone() for name, w2 in run.average()["weights"].items()}
    run.attached.copy_to_model()
    for name, w2 in average.items():
        p = run.named()[name]
        if not _same(_local(p), w2.to(p.device, p.dtype)):
            raise _Broken(f"after copy_to_model() {name!r} is not the average")


def _resets(bench: _Bench) -> None:
    run = bench.example()
    with torch.no_grad():
        for p in run.named().values():
            if _averageable(p):
                p.mul_(0.5)
    run.attached.reset()
    named = run.named()
    for name, w2 in run.average()["weights"].items():
        if not _same(_local(w2), _local(named[name]).to(w2.device, w2.dtype)):
            raise _Broken(f"after reset() the average of {name!r} is not its weight")


def _detaches(bench: _Bench) -> None:
    plain, run = bench.run(), bench.example()
    run.attached.detach()
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if len(getattr(run.optimizer, hooks)) != len(getattr(plain.optimizer, hooks)):
            raise _Broken(f"after detach() the optimizer has other {hooks} than before")
    before = run.holds("belay")
    run.train(range(1))
    _unchanged(before, run.holds("belay"), "training after detach()")


CONTRACTS: dict[str, Callable[[_Bench], None]] = {
    "every step is the linear map": _follows_the_map,
    "averaged() puts the average in and gives every bit back": _swaps,
    "a step inside averaged() is refused and changes nothing": _refuses_steps_inside,
    "a run goes on from a checkpoint bit for bit": _resumes,
    "an average that watches changes no bit of the training": _watches,
    "the export loads strictly into a new model": _exports,
    "a state that does not fit is refused and changes nothing": _refuses_other_states,
    "a step that raised and is taken again counts once": _retries,
    "copy_to_model() makes the average the weights": _copies,
    "reset() begins again at the weights": _resets,
    "detach() leaves no hook, and the average as it is": _detaches,
}


# Comparing -------------------------------------------------------------------------------------------------------


def _leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | list | tuple):
        for key, branch in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(f"{path}/{key}", branch)
    else:
        yield path, tree


def _local(t: Tensor) -> Tensor:
    """A tensor, or of one that is spread over several processes the part that is here."""
    t = t.detach()
    return t.to_local() if hasattr(t, "to_local") else t


def _copy(leaf: Any) -> Any:
    return _local(leaf).clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _wide(t: Tensor) -> Tensor:
    return _local(t).to("cpu", torch.promote_types(t.dtype, torch.float64), copy=True)


def _averageable(p: Tensor) -> bool:
    return p.is_floating_point() or p.is_complex()


def _same(x: Any, y: Any) -> bool:
    """To the last bit: nan equals nan, 0 and −0 differ."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y.to(x.device)))
    return type(x) is type(y) and bool(x == y)


def _bits(t: Tensor) -> Tensor:
    dense = t.to_dense() if t.is_sparse else t
    flat = dense.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8)


def _different(one: Holds, other: Holds) -> list[str]:
    """Names under which two do not have the same bits."""
    return [name for name in {**one, **other} if not (name in one and name in other and _same(one[name], other[name]))]


def _unchanged(before: Holds, after: Holds, what: str) -> None:
    if differing := _different(before, after):
        raise _Broken(f"{what} changed {_some(differing)}")


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint would: saved, and loaded with weights_only; copied where a part of it is in other processes."""
    if any(hasattr(leaf, "to_local") for _, leaf in _leaves("", state)):
        return copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded

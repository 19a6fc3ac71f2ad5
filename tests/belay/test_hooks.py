"""Belay's hooks run exactly once per step: exceptions, subclasses, hooks within hooks, copies, compilation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.problems import MLP, advance, copies, different, everything, f32, f64, same
from helpers.small import WHERE
from torchbelay.ops import reference

BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.Spring.ema(decay=0.9)
METHODS = {
    "belay": BELAY,
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "ema": EMA,
    "ema, lagged": tb.Spring(k=0.2, m1=inf, m2=1.0),
    "swa": tb.methods.swa(),
    "lookahead": tb.methods.lookahead(k=3),
    "heavy ball": tb.methods.heavy_ball(0.5),  # remembers learning rates
    "schedule-free": tb.methods.schedule_free(0.9),
}
every_method = pytest.mark.parametrize("how", METHODS)


class Stop(Exception):  # noqa: N818 (not an error: what a user's own code might raise)
    pass


class Run:
    def __init__(
        self, method: Any, kind: type[Optimizer] = torch.optim.AdamW, dtype: torch.dtype = f32, **options: Any
    ) -> None:
        self.model = MLP.model(dtype).to(WHERE if options.get("impl") == "triton" else "cpu")
        self.optimizer = kind(self.model.parameters(), lr=0.02)
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def train(self, steps: range) -> None:
        advance(self.model, self.optimizer, MLP, steps)

    def everything(self) -> dict[str, Any]:
        return everything(model=self.model, optimizer=self.optimizer, belay=self.belay)


def stop(*_: Any) -> None:
    raise Stop


class Passing(torch.optim.AdamW):
    """An optimizer whose step calls its parent's: both fire hooks once the parent class has an instance."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class PassingOn(Passing):
    """The same, one level deeper."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture(autouse=True)
def parents_have_instances() -> None:
    for kind in (torch.optim.AdamW, Passing):
        kind([nn.Parameter(torch.zeros(1))])


every_depth = pytest.mark.parametrize("kind", [torch.optim.AdamW, Passing, PassingOn])


# A step that raises


@every_method
@every_depth
@pytest.mark.parametrize("times", [1, 3])
def test_a_step_that_raised_and_is_taken_again_counts_once(how: str, kind: type[Optimizer], times: int) -> None:
    run, other = Run(METHODS[how], kind), Run(METHODS[how])
    other.train(range(8))
    run.train(range(4))
    for _ in range(times):
        with pytest.raises(Stop):
            run.optimizer.step(stop)
    assert run.belay.step == 4
    run.train(range(4, 8))
    assert run.belay.step == 8
    assert different(run.everything(), other.everything()) == []


def test_the_first_step_may_raise() -> None:
    run, other = Run(METHODS["ema, lagged"]), Run(METHODS["ema, lagged"])
    with pytest.raises(Stop):
        run.optimizer.step(stop)
    run.train(range(5))
    other.train(range(5))
    assert different(run.everything(), other.everything()) == []


@every_method
def test_it_may_be_taken_again_while_the_exception_is_still_handled(how: str) -> None:
    run, other = Run(METHODS[how], PassingOn), Run(METHODS[how])
    run.train(range(3))
    run.optimizer.zero_grad()
    MLP.loss(run.model, 3).backward()
    try:
        run.optimizer.step(stop)
    except Stop:
        run.optimizer.step()
    other.train(range(4))
    assert different(run.everything(), other.everything()) == []


@every_method
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_a_hook_of_the_users_own_may_raise(how: str, first: str) -> None:
    run, other = Run(METHODS[how]), Run(METHODS[how])
    run.train(range(3))
    handle = run.optimizer.register_step_pre_hook(stop)
    if first == "theirs":
        run.optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
    with pytest.raises(Stop):
        run.train(range(3, 4))
    handle.remove()
    run.train(range(3, 6))
    other.train(range(6))
    assert different(run.everything(), other.everything()) == []


@every_method
def test_a_step_refused_inside_averaged_leaves_nothing_behind(how: str) -> None:
    run, other = Run(METHODS[how]), Run(METHODS[how])
    run.train(range(3))
    before = run.everything()
    with run.belay.averaged(), pytest.raises(RuntimeError, match="inside averaged"):
        run.optimizer.step()
    assert different(run.everything(), before) == []
    run.train(range(3, 6))
    other.train(range(6))
    assert different(run.everything(), other.everything()) == []


# Steps within steps


@every_method
@every_depth
def test_a_step_within_a_step_counts_once(how: str, kind: type[Optimizer]) -> None:
    run, other = Run(METHODS[how], kind), Run(METHODS[how])
    run.train(range(6))
    other.train(range(6))
    assert run.belay.step == 6
    assert different(run.everything(), other.everything()) == []


class Twice(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step(closure)


class Shrinking(torch.optim.AdamW):
    """An optimizer that moves the weights itself, before its parent's step and after it."""

    def step(self, closure: Any = None) -> Any:
        self.shrink()
        loss = super().step(closure)
        self.shrink()
        return loss

    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)


@pytest.mark.parametrize("kind", [Twice, Shrinking])
def test_all_that_a_step_does_is_one_update_to_the_spring(kind: type[Optimizer]) -> None:
    run, model = Run(BELAY, kind, f64), MLP.model(f64)
    plain = kind(model.parameters(), lr=0.02)
    w2 = copies(model.parameters())
    for step in range(3):
        run.train(range(step, step + 1))
        before = copies(model.parameters())
        advance(model, plain, MLP, range(step, step + 1))
        for i, (old, p) in enumerate(zip(before, model.parameters(), strict=True)):
            u = p.detach() - old
            p.data, w2[i] = reference.algorithm1(old, w2[i], u, k=1.0, m1=10.0, m2=20.0)
    # three steps, a few roundings each, of numbers around 1
    torch.testing.assert_close(copies(run.model.parameters()), copies(model.parameters()), rtol=0, atol=1e-14)
    torch.testing.assert_close(list(averages(run.belay).values()), w2, rtol=0, atol=1e-14)
    assert run.belay.step == 3


def averages(belay: tb.Belay) -> dict[str, Tensor]:
    return belay.state_dict()["averages"]["average"]["weights"]


@every_method
def test_a_subclass_may_swallow_what_its_parents_step_raised(how: str) -> None:
    class Stubborn(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            try:
                return super().step(closure)
            except Stop:
                return super().step()

    run, other = Run(METHODS[how], Stubborn), Run(METHODS[how])
    for step in range(6):
        run.optimizer.zero_grad()
        MLP.loss(run.model, step).backward()
        run.optimizer.step(stop if step in (2, 3) else None)
        assert run.belay.step == step + 1
    other.train(range(6))
    assert different(run.everything(), other.everything()) == []


@every_method
def test_a_subclass_may_raise_before_its_parents_step(how: str) -> None:
    class Nervous(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            return super().step()

    run, other = Run(METHODS[how], Nervous), Run(METHODS[how])
    run.train(range(3))
    with pytest.raises(Stop):
        run.optimizer.step(stop)
    run.train(range(3, 6))
    other.train(range(6))
    assert different(run.everything(), other.everything()) == []


def test_hooks_of_the_users_own_see_the_weights_of_their_place_in_the_line() -> None:
    seen: dict[str, list[Tensor]] = {}
    model, plain = MLP.model(f32), MLP.model(f32)
    optimizer, alone = (torch.optim.AdamW(m.parameters(), lr=0.02) for m in (model, plain))
    optimizer.register_step_post_hook(lambda *_: seen.update(stepped=copies(model.parameters())))
    belay = tb.Belay(model, optimizer, BELAY)
    optimizer.register_step_post_hook(lambda *_: seen.update(coupled=copies(model.parameters())))
    advance(model, optimizer, MLP, range(1))
    advance(plain, alone, MLP, range(1))
    assert all(map(same, seen["stepped"], copies(plain.parameters())))
    assert all(map(same, seen["coupled"], copies(model.parameters())))
    assert not all(map(same, seen["stepped"], seen["coupled"]))
    assert belay.step == 1


@every_depth
def test_a_hook_may_step_another_optimizer(kind: type[Optimizer]) -> None:
    outer, inner, alone = Run(BELAY, kind), Run(EMA, kind), Run(EMA)
    outer.optimizer.register_step_pre_hook(lambda *_: inner.train(range(1)))
    advance(outer.model, outer.optimizer, MLP, range(1))  # fires it at every level of the step
    alone.train(range(1))
    fired = inner.belay.step
    assert fired == [torch.optim.AdamW, Passing, PassingOn].index(kind) + 1
    assert outer.belay.step == 1
    for _ in range(fired - 1):
        alone.train(range(1))
    assert different(inner.everything(), alone.everything()) == []


@every_method
def test_a_closure_may_look_at_the_average(how: str) -> None:
    run, other = Run(METHODS[how]), Run(METHODS[how])
    losses = []
    for step in range(5):

        def closure(step: int = step) -> Tensor:
            with run.belay.averaged():
                losses.append(MLP.loss(run.model, step).item())
            run.optimizer.zero_grad()
            loss = MLP.loss(run.model, step)
            loss.backward()
            return loss

        run.optimizer.step(closure)
    other.train(range(5))
    assert len(losses) == 5
    assert different(run.everything(), other.everything()) == []


# Copies


def test_a_copy_of_the_optimizer_carries_no_hooks() -> None:
    run, other = Run(BELAY), Run(BELAY)
    run.train(range(3))
    before = everything(belay=run.belay)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    advance(model, optimizer, MLP, range(3, 6))
    assert different(everything(belay=run.belay), before) == []
    run.train(range(3, 6))
    other.train(range(6))
    assert different(run.everything(), other.everything()) == []


def test_a_copy_may_have_a_belay_of_its_own_and_go_on() -> None:
    run = Run(BELAY)
    run.train(range(3))
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    belay = tb.Belay(model, optimizer, BELAY)
    belay.load_state_dict(copy.deepcopy(run.belay.state_dict()))
    advance(model, optimizer, MLP, range(3, 6))
    run.train(range(3, 6))
    assert different(everything(model=model, optimizer=optimizer, belay=belay), run.everything()) == []


# Compilation


class Counting:
    """A backend that runs a graph as it is and counts what it is asked to compile."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.sizes.append(len(graph.graph.nodes))
        return graph.forward


@contextmanager
def fresh_compiler() -> Iterator[Counting]:
    torch._dynamo.reset()
    torch.set_default_dtype(f64)  # a compiled AdamW counts steps in a tensor of it, and works out powers of β there
    try:
        yield Counting()
    finally:
        torch.set_default_dtype(f32)
        torch._dynamo.reset()


# torch's compiler imports parts of torch that torch itself has deprecated
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("how", ["belay", "velocities", "lookahead"])
@every_depth
def test_a_compiled_step_gives_the_same_numbers_and_compiles_once(how: str, kind: type[Optimizer]) -> None:
    run, other = Run(METHODS[how], kind, f64), Run(METHODS[how], dtype=f64)
    with fresh_compiler() as backend:
        step = torch.compile(run.optimizer.step, backend=backend)
        compiled = []
        for t in range(6):
            run.optimizer.zero_grad()
            MLP.loss(run.model, t).backward()
            step()
            compiled.append(len(backend.sizes))
    other.train(range(6))
    assert max(backend.sizes) > 4 * 10  # four parameters, and a step of AdamW is more than ten operations on each
    assert compiled[-1] == compiled[1]  # the first step makes the optimizer's state: it may look different
    assert run.belay.step == 6
    agree(run, other)


@pytest.mark.parametrize("how", ["belay", "lookahead"])
def test_a_compiled_model_gives_the_same_numbers_and_names_and_compiles_once(how: str) -> None:
    run, other = (Run(METHODS[how], dtype=f64) for _ in range(2))
    run.belay.detach()
    with fresh_compiler() as backend:
        wrapped = torch.compile(run.model, backend=backend)
        run.belay = tb.Belay(wrapped, run.optimizer, METHODS[how])
        for t in range(6):
            advance(wrapped, run.optimizer, MLP, [t])
        with run.belay.averaged():
            inside = MLP.loss(wrapped, 0)
    other.train(range(6))
    assert len(backend.sizes) == 1
    agree(run, other)
    with other.belay.averaged():
        torch.testing.assert_close(inside, MLP.loss(other.model, 0), rtol=0, atol=1e-14)


def agree(run: Run, other: Run) -> None:
    """The compiler may order operations differently: equal but for rounding, of numbers around 1, over six steps."""
    ours, theirs = (everything(model=each.model, belay=each.belay) for each in (run, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-14)
        else:
            assert value == theirs[name]


# What a closure sees, and may not do


@every_method
@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_inside_a_closure_the_average_is_that_of_the_last_step(how: str, impl: str) -> None:
    """Trainers evaluate the loss inside `optimizer.step(closure)`, and a teacher with it."""
    if impl == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    run = Run(METHODS[how], impl=impl)
    run.train(range(3))
    outside, seen = dict(run.belay.average_state_dict()), []

    def closure() -> Tensor:
        seen.append((dict(run.belay.average_state_dict()), run.belay.step))
        with run.belay.averaged():
            seen.append((dict(run.model.state_dict()), run.belay.step))
            seen[-1] = copy.deepcopy(seen[-1])
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, 3)
        loss.backward()
        return loss

    run.optimizer.step(closure)
    for average, step in seen:
        assert different(average, outside) == []
        assert step == 3
    other = Run(METHODS[how], impl=impl)
    other.train(range(4))
    assert different(run.everything(), other.everything()) == []


@pytest.mark.parametrize("what", ["reset", "copy_to_model", "load_state_dict"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, tb.optim.AdamW], ids=["torch", "ours"])
def test_what_rewrites_averages_or_weights_is_refused_inside_a_step(what: str, kind: type[Optimizer]) -> None:
    run = Run(BELAY, kind)
    run.train(range(3))
    before = run.everything()
    arguments = [copy.deepcopy(run.belay.state_dict())] if what == "load_state_dict" else []

    def closure() -> Tensor:
        getattr(run.belay, what)(*arguments)
        raise AssertionError("it was not refused")

    with pytest.raises(RuntimeError, match=rf"{what}\(\) inside optimizer\.step\(\).*between two steps"):
        run.optimizer.step(closure)
    assert different(run.everything(), before) == []
    with pytest.raises(Stop):
        run.optimizer.step(stop)
    getattr(run.belay, what)(*arguments)  # after a step that raised it is allowed
    run.train(range(3, 5))


def test_a_belay_that_is_made_inside_a_step_begins_with_the_next() -> None:
    run, made = Run(BELAY), []

    def closure() -> Tensor:
        made.append(tb.Belay(run.model, run.optimizer, EMA))
        loss = MLP.loss(run.model, 0)
        loss.backward()
        return loss

    run.optimizer.step(closure)
    run.train(range(1, 3))
    assert (run.belay.step, made[0].step) == (3, 2)


# A step that is stopped in the middle


@pytest.mark.parametrize("how", ["belay", "ema"])
@pytest.mark.parametrize("cure", ["reset", "load_state_dict"])
def test_a_step_that_is_stopped_while_averages_move_is_not_built_upon(how: str, cure: str, monkeypatch) -> None:
    run = Run(METHODS[how], spectators={"short": tb.Spring.ema(decay=0.5)})
    run.train(range(3))
    good = copy.deepcopy(run.belay.state_dict())
    lerp, calls = torch._foreach_lerp_, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("in the middle")
        lerp(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_lerp_", failing)
        with pytest.raises(MemoryError):
            run.train(range(3, 4))
    weights = copies(run.model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stopped while weights and averages moved.*load_state_dict.*reset"):
            run.train(range(4, 5))
    assert all(map(same, copies(run.model.parameters()), weights))
    getattr(run.belay, cure)(*([good] if cure == "load_state_dict" else []))
    run.train(range(4, 6))


def test_a_block_that_a_closure_enters_and_does_not_leave_is_told() -> None:
    """The optimizer updates what is in the model, and that is the average."""
    run = Run(EMA)
    run.train(range(3))
    weights = copies(run.model.parameters())
    with ExitStack() as stack:

        def closure() -> Tensor:
            stack.enter_context(run.belay.averaged())
            loss = MLP.loss(run.model, 3)
            loss.backward()
            return loss

        with pytest.raises(RuntimeError, match=r"averaged\('average'\) was entered inside the step and not left"):
            run.optimizer.step(closure)
    assert all(map(same, copies(run.model.parameters()), weights))
    with pytest.raises(RuntimeError, match="stopped while weights and averages moved"):
        run.train(range(3, 4))
    run.belay.reset()
    run.train(range(3, 4))


def test_what_is_left_of_a_step_that_was_stopped_is_not_saved_without_a_word(monkeypatch) -> None:
    run = Run(BELAY)
    run.train(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_lerp_", stop)
        with pytest.raises(Stop):
            run.train(range(3, 4))
    for use in (run.belay.state_dict, run.belay.average_state_dict):
        with pytest.warns(tb.BelayWarning, match=r"have moved and some have not.*load_state_dict\(\)"):
            use()

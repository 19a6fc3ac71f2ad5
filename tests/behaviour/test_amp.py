"""Mixed precision: a step that GradScaler skips has not happened, by whichever way it is skipped.

Ordinary optimizers are not called for such a step. Fused ones are, hooks and all, and skip it themselves by a flag that
stays on the device. The scale is a power of two and so changes no bit of a gradient: whole runs can be compared bit for
bit with runs that never had a scaler.
"""

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import torchbelay as tb
from helpers import seams
from helpers.operations import Reading
from helpers.problems import MLP, NORMALISED, Problem, advance, different, everything, f32, no_waiting

LAGGED = tb.Spring(k=0.2, m1=inf, m2=1.0)
CONSTANT = {
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "belay, after": tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after"),
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "ema": tb.Spring.ema(decay=0.9),
    "ema, lagged": LAGGED,
    "primal averaging": tb.methods.primal_averaging(mu_x=0.9, mu_y=0.5),
}
COUNTING = {
    "ema, warming up": tb.methods.ema(0.9, warmup="ratio"),
    "ema, scheduled": tb.methods.ema(tb.schedules.linear(0.1, 0.9, steps=6)),
    "centred, scheduled": tb.methods.centred(tb.schedules.linear(0.5, -0.3, steps=6), 0.2),
    "hard sync": tb.methods.hard_sync(3),
    "swa": tb.methods.swa(),
    "lookahead": tb.methods.lookahead(k=3),
    "schedule-free": tb.methods.schedule_free(0.9),
    "heavy ball": tb.methods.heavy_ball(0.5),
}
METHODS = CONSTANT | COUNTING

INNER = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}),
}

pytestmark = pytest.mark.usefixtures("skipping")

every_method = pytest.mark.parametrize("how", METHODS)
every_inner = pytest.mark.parametrize("inner", INNER)
every_way = pytest.mark.parametrize("way", ["plain", "foreach", "fused"])


class Run:
    """Training with a scaler; at the steps named in `infs` one number of one gradient is infinite."""

    def __init__(
        self,
        method: Any,
        inner: str = "AdamW",
        way: str = "plain",
        *,
        problem: Problem = MLP,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.problem = problem
        self.model = problem.model(f32).to(device)
        kind, arguments = INNER[inner]
        self.optimizer = kind(self.model.parameters(), **arguments, **({} if way == "plain" else {way: True}))
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)
        self.scaler = GradScaler(device)

    def step(self, step: int, *, spoilt: bool) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.problem.loss(self.model, step)).backward()
        if spoilt:
            next(self.model.parameters()).grad.view(-1)[0] = inf
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, steps: Iterable[int], infs: Iterable[int] = ()) -> None:
        for step in steps:
            self.step(step, spoilt=step in infs)

    def everything(self) -> dict[str, Any]:
        return everything(model=self.model, optimizer=self.optimizer, belay=self.belay)


# A skipped step


@every_method
@every_inner
@every_way
def test_a_skipped_step_moves_nothing(how: str, inner: str, way: str) -> None:
    run = Run(METHODS[how], inner, way)
    run.train(range(4))
    before = run.everything()
    run.train([4, 5], infs=[4, 5])
    assert run.scaler.get_scale() == 2.0**14  # halved twice: both were skipped indeed
    assert different(run.everything(), before) == []
    assert run.belay.step == 4


@every_method
@every_way
def test_a_run_with_skipped_steps_is_the_run_without_them(how: str, way: str) -> None:
    run, other = (Run(METHODS[how], "AdamW", way) for _ in range(2))
    infs = (0, 1, 5, 9, 11)
    run.train(range(12), infs)
    advance(other.model, other.optimizer, MLP, [step for step in range(12) if step not in infs])
    assert different(run.everything(), other.everything()) == []
    assert run.belay.step == 7


@every_way
@pytest.mark.parametrize("options", [{"every": 3}, {"start": 2}, {"start": 3, "every": 2}], ids=str)
def test_skipped_steps_count_neither_towards_every_nor_towards_start(way: str, options: dict[str, int]) -> None:
    run, other = (Run(CONSTANT["belay"], "AdamW", way, **options) for _ in range(2))
    infs = (0, 3, 4, 8)
    run.train(range(14), infs)
    advance(other.model, other.optimizer, MLP, [step for step in range(14) if step not in infs])
    assert different(run.everything(), other.everything()) == []


@every_way
@pytest.mark.parametrize("how", ["belay", "lookahead"])
def test_the_count_is_right_after_every_step(way: str, how: str) -> None:
    run, counts = Run(METHODS[how], "AdamW", way), []
    for step in range(6):
        run.step(step, spoilt=step in (1, 2, 4))
        counts.append(run.belay.step)
    assert counts == [1, 1, 1, 2, 2, 3]


@every_way
@pytest.mark.parametrize("how", ["ema", "swa"])
def test_a_skipped_step_moves_no_averaged_buffer(way: str, how: str) -> None:
    run = Run(METHODS[how], "AdamW", way, problem=NORMALISED, buffers="average")
    run.train(range(3))
    before = everything(belay=run.belay)
    assert any("num_batches_tracked" in name for name in before)
    run.train([3], infs=[3])
    assert different(everything(belay=run.belay), before) == []


@every_way
@pytest.mark.parametrize("how", ["ema", "swa"])
def test_a_skipped_step_does_not_forget_the_averages_own_statistics(way: str, how: str) -> None:
    run = Run(METHODS[how], "AdamW", way, problem=NORMALISED)
    run.train(range(3))
    with run.belay.averaged() as model:  # as update_bn does
        model(torch.ones(4, 3))
    before = everything(belay=run.belay)
    assert any("running_mean" in name for name in before)
    run.train([3], infs=[3])
    assert different(everything(belay=run.belay), before) == []


@every_way
def test_a_spectator_does_not_see_a_skipped_step(way: str) -> None:
    run = Run(CONSTANT["belay"], "AdamW", way, spectators={"short": tb.Spring.ema(decay=0.5), "lagged": LAGGED})
    run.train(range(3))
    before = everything(belay=run.belay)
    run.train([3], infs=[3])
    assert different(everything(belay=run.belay), before) == []


@every_way
def test_a_resumed_run_knows_what_was_skipped(way: str) -> None:
    whole, half, again = (Run(METHODS["swa"], "AdamW", way) for _ in range(3))
    infs = (1, 4, 7)
    whole.train(range(10), infs)
    half.train(range(5), infs)
    for part in ("model", "optimizer", "belay", "scaler"):
        getattr(again, part).load_state_dict(copy.deepcopy(getattr(half, part).state_dict()))
    again.train(range(5, 10), infs)
    assert different(again.everything(), whole.everything()) == []


@every_way
def test_of_two_optimizers_under_one_scaler_only_the_spoilt_one_is_skipped(way: str) -> None:
    arguments = {} if way == "plain" else {way: True}
    model, scaler = MLP.model(f32), GradScaler("cpu")
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02, **arguments) for part in (model.inner, model.outer)]
    belays = [tb.Belay(model, optimizer, CONSTANT["belay"]) for optimizer in optimizers]
    for step in range(4):
        model.zero_grad()
        scaler.scale(MLP.loss(model, step)).backward()
        if step == 2:
            model.inner.bias.grad[0] = inf
            before = everything(belay=belays[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert different(everything(belay=belays[0]), before) == []
    assert [belay.step for belay in belays] == [3, 4]


# Waiting for the device


def numbers_read(run: Run) -> int:
    """Count the numbers read by two steps of the optimizer, one of them skipped.

    They come after a first one, which may look at the weights: others may have been loaded since the average began.
    """
    count = 0
    for step, spoilt in ((0, False), (1, False), (2, True)):
        run.optimizer.zero_grad()
        run.scaler.scale(MLP.loss(run.model, step)).backward()
        if spoilt:
            run.model.gain.grad.fill_(inf)
        with Reading() as reading:
            run.scaler.step(run.optimizer)
        count += reading.count if step else 0
        run.scaler.update()
    return count


@pytest.fixture(params=INNER)
def fused_alone(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A fused optimizer, and how many numbers it reads without Belay."""
    run = Run(CONSTANT["ema"], request.param, "fused")
    run.belay.detach()
    return request.param, numbers_read(run)


@pytest.mark.parametrize("how", CONSTANT)
def test_a_constant_coupling_reads_no_number_from_the_device(
    how: str, fused_alone: tuple[str, int], skipping: str
) -> None:
    inner, reads = fused_alone
    run = Run(CONSTANT[how], inner, "fused")
    at_once = 2 if skipping == "asked" else 0  # whether each of the steps is skipped
    assert numbers_read(run) == reads + at_once
    with Reading() as reading:
        assert run.belay.step == 2
    assert reading.count == (0 if at_once else 1)  # else read when `step` is asked for


def test_only_on_a_device_is_a_number_waited_for() -> None:
    assert not seams.waits_for(torch.zeros(()))
    assert seams.waits_for(torch.zeros((), device="meta"))


def test_while_a_graph_is_captured_nothing_is_asked(
    fused_alone: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision of the host during capture would be repeated by every replay."""
    inner, reads = fused_alone
    run = Run(CONSTANT["belay"], inner, "fused")
    seams.set_capturing(monkeypatch)
    assert numbers_read(run) == reads
    assert run.belay.step == 2


@pytest.mark.parametrize("how", COUNTING)
def test_a_method_that_counts_steps_must_ask_whether_each_took_place(how: str, fused_alone: tuple[str, int]) -> None:
    inner, reads = fused_alone
    assert numbers_read(Run(COUNTING[how], inner, "fused")) > reads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
@pytest.mark.parametrize("how", CONSTANT)
@every_inner
def test_a_constant_coupling_never_waits_for_a_gpu(how: str, inner: str) -> None:
    run = Run(CONSTANT[how], inner, "fused", device="cuda")
    run.train(range(2))
    with no_waiting():
        run.optimizer.zero_grad()
        run.scaler.scale(run.model(torch.ones(4, 3, device="cuda")).mean()).backward()
        run.scaler.step(run.optimizer)
    assert run.belay.step == 3


# The rest of a training loop


def loop(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[int],
    *,
    scaler: GradScaler | None,
    infs: Iterable[int] = (),
    parts: int = 1,
    clip: float | None = None,
    autocast: bool = False,
) -> None:
    """A usual training loop: gradient accumulation, clipping, autocast, with a scaler or without."""
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = MLP.loss(model, 10 * step + part) / parts
                assert model(torch.ones(1, 3)).dtype == (torch.bfloat16 if autocast else f32)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step in infs and part == 0:
                model.inner.weight.grad[0, 0] = inf
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@every_way
@pytest.mark.parametrize("how", ["belay", "velocities", "lookahead"])
@pytest.mark.parametrize(
    "habit", [{"parts": 3}, {"clip": 0.05}, {"autocast": True}, {"parts": 2, "clip": 0.1, "autocast": True}], ids=str
)
def test_the_habits_of_training_loops_change_nothing_about_it(how: str, way: str, habit: dict[str, Any]) -> None:
    run, other = (Run(METHODS[how], "AdamW", way) for _ in range(2))
    infs = (0, 3, 4)
    loop(run.model, run.optimizer, range(8), scaler=run.scaler, infs=infs, **habit)
    kept = [step for step in range(8) if step not in infs]
    loop(other.model, other.optimizer, kept, scaler=None, **habit)
    assert run.belay.step == 5
    assert different(run.everything(), other.everything()) == []


@every_way
def test_a_scaler_that_is_switched_off_changes_nothing(way: str) -> None:
    run, other = (Run(CONSTANT["belay"], "AdamW", way) for _ in range(2))
    run.scaler = GradScaler("cpu", enabled=False)
    run.train(range(5))
    advance(other.model, other.optimizer, MLP, range(5))
    assert different(run.everything(), other.everything()) == []


@pytest.mark.parametrize("spoilt", [[True], [False], [True, False], [False, True], [True, True, False]], ids=str)
@pytest.mark.parametrize("then", [[False], [True, False]], ids=str)
@pytest.mark.parametrize("how", ["ema, lagged", "belay", "ema"])
def test_steps_that_raise_whether_or_not_they_would_be_skipped_leave_no_trace(
    how: str, spoilt: list[bool], then: list[bool]
) -> None:
    """Fused: a lagged average must not move twice if its step raises and is taken again."""

    def fails(*_: object) -> None:
        raise KeyError("on the way")

    run, other = (Run(METHODS[how], "AdamW", "fused") for _ in range(2))
    run.train(range(3))
    handle = run.optimizer.register_step_pre_hook(fails)
    for inf_found in spoilt:
        with pytest.raises(KeyError):
            run.step(3, spoilt=inf_found)
        run.scaler.update()
    handle.remove()
    del run.optimizer.found_inf, run.optimizer.grad_scale  # GradScaler leaves them behind when a step raises
    for inf_found in then:
        run.step(3, spoilt=inf_found)
    other.train(range(4))
    assert run.belay.step == 4
    assert different(run.everything(), other.everything()) == []

"""The race: rows are independent runs, their results are right, and theory predicts their limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from helpers.problems import same
from torchbelay import Belay
from torchbelay.lab.arms import (
    BELAY_SGD,
    CONTROLS,
    EMA_SGD,
    MOMENTUM_SGD,
    PAPER_ARMS,
    PAPER_SPRING,
    SGD,
    Arm,
    Lane,
    belay_arm,
)
from torchbelay.lab.plane import race
from torchbelay.lab.plane.functions import BEALE, BOWL, ROSENBROCK, Function
from torchbelay.lab.plane.robustness import AVERAGING
from torchbelay.physics.methods import centred
from torchbelay.physics.spring import Spring

f64 = torch.float64

# Rows are independent runs -------------------------------------------------------------------------------------------

MORE = (
    Arm("EMA+momentum", "momentum", Spring.ema(0.95)),
    Arm("BELAY+momentum", "momentum", PAPER_SPRING),
    Arm("Adam without momentum", "Adam without momentum"),
    belay_arm("Adam without momentum"),
    Arm("θ = −0.5", "SGD", centred(-0.5, AVERAGING, follow="before")),
    Arm("with velocities", "SGD", Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)),
)
ARMS = (*PAPER_ARMS, *CONTROLS, MOMENTUM_SGD, *MORE)
RATES = (1e-3, 2e-3)  # with velocities SGD tolerates little more on Rosenbrock
LANES = [Lane(arm, lr) for lr in RATES for arm in ARMS]
PLANE = (ROSENBROCK, BEALE)
STEPS = 25

# The optimizers of the race, written once more as a user would.
MADE: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, foreach=False),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, foreach=False),
    "Adam": lambda params, lr: torch.optim.Adam(params, lr=lr, foreach=False),
    "Adam without momentum": lambda params, lr: torch.optim.Adam(params, lr=lr, betas=(0.0, 0.999), foreach=False),
}


def starts(functions: int = len(PLANE), count: int = 3, seed: int = 5) -> Tensor:
    return torch.rand(functions, count, 2, generator=torch.Generator().manual_seed(seed), dtype=f64) - 0.5


@pytest.fixture(scope="module")
def raced() -> tuple[Tensor, Tensor]:
    """Return w1 and w2 of every lane after every step: (steps, lanes, functions, starts, 2)."""
    field = race.Race(PLANE, starts(), LANES)
    w1, w2 = [], []
    for _ in range(STEPS):
        field.step()
        w1.append(field.w.clone())
        w2.append(field.w2())
    return torch.stack(w1), torch.stack(w2)


def alone(function: Function, lane: Lane, start: Tensor) -> tuple[Tensor, Tensor]:
    """Run one row by itself: one point, autograd, a torch optimizer and a Belay."""
    model = nn.Module()
    model.w = nn.Parameter(start.clone())
    optimizer = MADE[lane.arm.inner]([model.w], lane.actual_lr)
    average = None if lane.arm.method is None else Belay(model, optimizer, lane.arm.method)
    w1, w2 = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        function(model.w).backward()
        optimizer.step()
        w1.append(model.w.detach().clone())
        w2.append(w1[-1] if average is None else average.average_state_dict()["w"].clone())
    return torch.stack(w1), torch.stack(w2)


def test_every_inner_optimizer_is_among_the_arms() -> None:
    assert {arm.inner for arm in ARMS} == set(race.INNER) == set(MADE)


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: f"{lane.arm.name} at {lane.lr:g}")
def test_a_row_is_the_same_as_a_run_by_itself(raced: tuple[Tensor, Tensor], lane: Lane) -> None:
    i = LANES.index(lane)
    for f, function in enumerate(PLANE):
        for s, start in enumerate(starts()[f]):
            for together, separate in zip(raced, alone(function, lane, start), strict=True):
                # autograd adds the terms of a gradient in another order, and 25 steps enlarge the difference
                torch.testing.assert_close(together[:, i, f, s], separate, rtol=1e-12, atol=1e-14)


def test_the_lanes_differ() -> None:
    """Otherwise the test above would compare one run with itself."""
    field = race.Race(PLANE, starts(), LANES)
    for _ in range(STEPS):
        field.step()
    ends = torch.stack((field.w, field.w2())).flatten(2)
    for one in range(len(LANES)):
        for other in range(one):
            assert not torch.equal(ends[:, one], ends[:, other]), (LANES[one], LANES[other])


@pytest.mark.parametrize("huge", [1e150, math.inf, math.nan])
def test_a_start_that_overflows_leaves_its_neighbours_alone(huge: float) -> None:
    usual = race.Race(PLANE, starts(), LANES)
    spoiled_starts = starts()
    spoiled_starts[0, 1] = huge
    spoiled = race.Race(PLANE, spoiled_starts, LANES)
    for _ in range(STEPS):
        usual.step()
        spoiled.step()
    others = torch.ones(len(PLANE), 3, dtype=torch.bool)
    others[0, 1] = False
    for mine, theirs in ((usual.w, spoiled.w), (usual.w2(), spoiled.w2())):
        assert same(mine[:, others], theirs[:, others])
    sgd = LANES.index(Lane(SGD, RATES[0]))
    assert not bool(spoiled.w[sgd, 0, 1].isfinite().any())


@pytest.mark.parametrize("wild", [BELAY_SGD, SGD, MOMENTUM_SGD], ids=lambda arm: arm.name)
def test_a_lane_that_overflows_leaves_the_others_alone(wild: Arm) -> None:
    usual, spoiled = (race.Race(PLANE, starts(), [*LANES, Lane(wild, lr)]) for lr in (1e-3, 1e9))
    for _ in range(STEPS):
        usual.step()
        spoiled.step()
    assert not bool(spoiled.w[-1].isfinite().any())
    assert same(usual.w[:-1], spoiled.w[:-1])
    assert same(usual.w2()[:-1], spoiled.w2()[:-1])


def test_w2_is_w1_in_lanes_without_an_average(raced: tuple[Tensor, Tensor]) -> None:
    w1, w2 = raced
    for i, lane in enumerate(LANES):
        assert torch.equal(w1[:, i], w2[:, i]) == (not lane.arm.averages), lane


def test_looking_at_w2_changes_nothing() -> None:
    seen, unseen = (race.Race(PLANE, starts(), LANES) for _ in range(2))
    for _ in range(STEPS):
        seen.step()
        unseen.step()
        before = seen.w.clone()
        assert same(seen.w2(), seen.w2())
        assert same(seen.w, before)
    assert same(seen.w, unseen.w)
    assert same(seen.w2(), unseen.w2())


def test_w2_of_lanes_that_all_lack_an_average_is_a_copy_of_w1() -> None:
    field = race.Race([BOWL], starts(1), [Lane(SGD, 0.1)])
    field.step()
    w2 = field.w2()
    assert same(w2, field.w)
    w2.zero_()
    assert bool(field.w.any())


def test_the_losses_of_nan_and_of_overflow_are_infinite() -> None:
    field = race.Race([ROSENBROCK], torch.tensor([[[math.nan, 0.0], [1e200, 0.0], [1.0, 1.0]]]), [Lane(SGD, 0.1)])
    assert field.losses(field.w).tolist() == [[[math.inf, math.inf, 1.0]]]


# Starts -------------------------------------------------------------------------------------------------------------


def draw(seed: int, half_width: float | None = None, function: Function = ROSENBROCK, count: int = 400) -> Tensor:
    return race.random_starts(function, count, torch.Generator().manual_seed(seed), half_width)


@pytest.mark.parametrize("function", [ROSENBROCK, BEALE], ids=lambda f: f.name)
@pytest.mark.parametrize("half_width", [None, 0.3])
def test_starts_fill_the_box(function: Function, half_width: float | None) -> None:
    points, reach = draw(0, half_width, function), half_width or function.half_width
    assert points.dtype == f64
    assert points.shape == (400, 2)
    for corner in (points.amin(0), -points.amax(0)):
        assert ((corner >= -reach) & (corner < -0.95 * reach)).all()


def test_starts_are_those_of_their_seed() -> None:
    assert torch.equal(draw(0), draw(0))
    assert not bool((draw(0) == draw(1)).any())


def test_the_tolerance_is_a_share_of_the_median_loss_of_the_starts() -> None:
    points = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [30.0, 0.0]], dtype=f64)
    assert race.tolerance(BOWL, points) == pytest.approx(1e-2 * 0.8, rel=1e-15)
    assert race.tolerance(ROSENBROCK, points) == pytest.approx(1e-3 * 404, rel=1e-15)


# Arrived, diverged, converged ---------------------------------------------------------------------------------------

GOAL, LAST = 0.1, 10
IN, OUT, EDGE = 0.05, 0.2, GOAL


@dataclass(frozen=True)
class Story:
    """Losses after steps 0 to 10, and the outcome if every step is observed."""

    losses: list[float]
    arrived: int
    converged: bool
    worst: float
    lost_at: int = LAST + 1  # the step in which w1 leaves


STORIES = {
    "never under": Story([OUT] * 11, 11, False, OUT),
    "always under": Story([IN] * 11, 0, True, IN),
    "exactly on the tolerance": Story([EDGE] * 11, 0, True, EDGE),
    "a hair above": Story([math.nextafter(EDGE, 1)] * 11, 11, False, math.nextafter(EDGE, 1)),
    "under from 4 on": Story([OUT] * 4 + [IN] * 7, 4, True, OUT),
    "under, out, and under from 7 on": Story([OUT] + [IN] * 3 + [9.0] * 3 + [IN] * 4, 7, True, 9.0),
    "under until the last step": Story([IN] * 10 + [OUT], 11, False, OUT),
    "under in the last tenth": Story([OUT] * 9 + [IN] * 2, 9, True, OUT),
    "too late": Story([OUT] * 10 + [IN], 10, False, OUT),
    "not a number for a while": Story([IN] * 3 + [math.nan] + [IN] * 7, 4, True, math.inf),
    "not a number in the end": Story([IN] * 10 + [math.nan], 11, False, math.inf),
    "out of sight at 3": Story([OUT] * 11, 11, False, OUT, lost_at=3),
    "out of sight at 3 with a small loss": Story([IN] * 11, 0, False, IN, lost_at=3),
    "out of sight in the last step": Story([IN] * 11, 0, False, IN, lost_at=LAST),
    "out of sight and back": Story([IN] * 11, 0, False, IN, lost_at=5),
}
RETURNS = "out of sight and back"
AWAY = 10.0 * race.FAR


def _ladder_value(x: Tensor, y: Tensor) -> Tensor:
    table = torch.tensor([story.losses for story in STORIES.values()], dtype=f64)
    return table[y.long(), (x % AWAY).long().clamp(0, LAST)]


def _ladder_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """At learning rate 1, SGD makes x count the steps; a story is out of sight while x is a million or more."""
    lost_at = torch.tensor([story.lost_at for story in STORIES.values()])[y.long()]
    back = y.long() == list(STORIES).index(RETURNS)
    step = (x % AWAY).long() + 1
    jump = torch.where(step == lost_at, AWAY, 0.0) - torch.where(back & (step == lost_at + 1), AWAY, 0.0)
    return -1 - jump, torch.zeros_like(y)


LADDER = Function("ladder", "", _ladder_value, _ladder_gradient, curvature=None, half_width=1.0)


def run_stories(observed: range) -> race.Outcome:
    at = torch.tensor([[[0.0, row] for row in range(len(STORIES))]], dtype=f64)
    lanes = [Lane(SGD, 1.0)]
    (outcome,) = race.run([LADDER], at, lanes, steps=LAST, tolerances=[GOAL], observed=observed)
    return outcome


@pytest.mark.parametrize("name", STORIES)
def test_the_outcome_of_a_run(name: str) -> None:
    story, row = STORIES[name], list(STORIES).index(name)
    outcome = run_stories(range(LAST))
    for which in (0, 1):
        assert int(outcome.arrived[which][0, row]) == story.arrived
        assert bool(outcome.converged(which)[0, row]) == story.converged
        assert float(outcome.worst[which][0, row]) == story.worst
        last = story.losses[-1]
        assert float(outcome.loss[which][0, row]) == (math.inf if math.isnan(last) else last)
    assert int(outcome.diverged[0, row]) == story.lost_at
    assert bool(outcome.lost[0, row]) == (story.lost_at <= LAST)


def test_only_the_observed_steps_count_and_the_last_is_always_observed() -> None:
    outcome, rows = run_stories(range(0, LAST, 4)), list(STORIES)  # observes 0, 4, 8 and, because it is the last, 10
    seen = {name: int(outcome.arrived[0][0, rows.index(name)]) for name in STORIES}
    assert seen["under from 4 on"] == 4
    assert seen["under, out, and under from 7 on"] == 8
    assert seen["under in the last tenth"] == 10
    assert seen["under until the last step"] == 11
    assert seen["not a number for a while"] == 0
    gone = {name: int(outcome.diverged[0, rows.index(name)]) for name in STORIES}
    assert gone["out of sight at 3"] == 4
    assert gone["out of sight in the last step"] == 10
    assert gone[RETURNS] == 11


def test_the_watcher_sees_the_start_the_observed_steps_and_the_end_and_every_step_ticks() -> None:
    seen, ticks = [], []
    race.run(
        [BOWL, ROSENBROCK],
        starts(2, 3),
        [Lane(SGD, 0.01), Lane(EMA_SGD, 0.01)],
        steps=7,
        tolerances=[1.0, 1.0],
        observed=range(0, 7, 3),
        tick=ticks.append,
        watch=lambda step, w1, w2: seen.append((step, w1.shape, torch.equal(w1[1], w2[1]))),
    )
    assert ticks == [1] * 7
    assert seen == [(step, (2, 2, 3, 2), step == 0) for step in (0, 3, 6, 7)]


def test_each_function_has_its_own_tolerance_and_outcome() -> None:
    same_starts = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=f64)
    lanes = [Lane(SGD, 0.0), Lane(SGD, 1 / 0.4)]  # at rest, and at the minimum in one step
    loose, tight = race.run([BOWL, BOWL], same_starts, lanes, steps=5, tolerances=[0.5, 1e-6], observed=range(5))
    assert loose.arrived[0].tolist() == [[0], [0]]
    assert tight.arrived[0].tolist() == [[6], [1]]

"""Averaging methods, through `Belay` around a real torch optimizer, against programs written from their papers.

A program is in its paper's own variables and knows nothing of couplings. Both sides train the same network on the same
fresh batches, and every step of both trajectories is compared.
"""

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.ids import without_address
from helpers.problems import f64
from helpers.programs import (
    anchored_program,
    average_program,
    belay_program,
    centre_of_mass_program,
    diloco_program,
    easgd_program,
    ema_nesterov_program,
    extrapolating_program,
    hard_sync_program,
    lookahead_program,
    power_weight,
    primal_averaging_program,
    swinging_program,
    switch_ema_program,
    weighted_program,
)
from helpers.side_by_side import INNER, Program, Update, alone, assert_same, belayed, jagged, sgd
from torchbelay import methods
from torchbelay.physics.schedules import cosine, linear

# γ of σ_rel = 0.1: the positive root of (γ+2)²(γ+3)·0.01 = γ+1
GAMMA_OF_TENTH = float(max(np.roots([0.01, 0.07, 0.16 - 1, 0.12 - 1]).real))


def ramp(start: float, end: float, steps: int, t: int) -> float:
    """A straight line from step 1 to step `steps`."""
    return start + (end - start) * (min(t, steps) - 1) / (steps - 1)


def edm_decay(t: int, half_life: float, batch: int, ratio: float) -> float:
    """EDM's ema_beta in its loop's own variables: all in images, and none seen yet at the first step."""
    seen = (t - 1) * batch
    return 0.5 ** (batch / max(min(half_life, seen * ratio), 1e-8))


PROGRAMS: dict[str, tuple[Any, Program]] = {
    "BELAY": (tb.Spring(k=1.0, m1=10.0, m2=20.0), belay_program(1.0, 10.0, 20.0)),
    "BELAY, light average": (tb.Spring(k=3.0, m1=200.0, m2=2.0), belay_program(3.0, 200.0, 2.0)),
    "BELAY by name": (methods.belay(k=2.0, m1=30.0, m2=7.0), belay_program(2.0, 30.0, 7.0)),
    "BELAY after": (
        tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after"),
        belay_program(1.0, 10.0, 20.0, follow="after"),
    ),
    "BELAY at m1 = inf": (tb.Spring(k=1.0, m1=math.inf, m2=8.0), average_program(lambda t: 1 - 1 / 16, lag=True)),
    "BELAY with velocities": (
        tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=12.0, c2=24.0),
        swinging_program(1.0, 10.0, 20.0, 12.0, 24.0, "derived"),
    ),
    "BELAY with velocities, printed": (
        tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=12.0, c2=30.0, force="printed"),
        swinging_program(1.0, 10.0, 20.0, 12.0, 30.0, "printed"),
    ),
    "BELAY, the average alone swings": (
        tb.Spring(k=1.0, m1=10.0, m2=20.0, c2=24.0),
        swinging_program(1.0, 10.0, 20.0, 20.0, 24.0, "derived"),
    ),
    "BELAY as its centre of mass": (tb.Spring(k=1.0, m1=10.0, m2=20.0), centre_of_mass_program(1.0, 10.0, 20.0)),
    "BELAY as its centre of mass, heavy": (
        tb.Spring(k=4.0, m1=50.0, m2=5.0),
        centre_of_mass_program(4.0, 50.0, 5.0),
    ),
    "EMA": (tb.Spring.ema(decay=0.95), average_program(lambda t: 0.95)),
    "EMA by half-life": (tb.Spring.ema(half_life=9.0), average_program(lambda t: 0.5 ** (1 / 9))),
    "EMA method": (methods.ema(0.7), average_program(lambda t: 0.7)),
    "EMA method by half-life": (methods.ema(half_life=9.0), average_program(lambda t: 0.5 ** (1 / 9))),
    "EMA by samples": (
        methods.ema(half_life_samples=100, batch_size=8),
        average_program(lambda t: 0.5 ** (8 / 100)),
    ),
    "EMA lagged": (methods.ema(0.9, follow="before"), average_program(lambda t: 0.9, lag=True)),
    "EMA, ratio warm-up": (
        methods.ema(0.95, warmup="ratio"),
        average_program(lambda t: min(0.95, (1 + t) / (10 + t))),
    ),
    "EMA, inverse-power warm-up": (
        methods.ema(0.95, warmup="inverse-power", power=0.75),
        average_program(lambda t: min(0.95, 1 - (1 + t) ** -0.75)),
    ),
    "EMA lagged, warm-up": (
        methods.ema(half_life=30.0, warmup="ratio", follow="before"),
        average_program(lambda t: min(0.5 ** (1 / 30), (1 + t) / (10 + t)), lag=True),
    ),
    "EMA, inverse-power warm-up with all its numbers": (
        methods.ema(0.97, warmup="inverse-power", power=0.75, inv_gamma=5.0, min_decay=0.3),
        average_program(lambda t: max(0.3, min(0.97, 1 - (1 + t / 5) ** -0.75))),
    ),
    "EMA, ramp-up of EDM": (
        methods.ema(half_life_samples=300, batch_size=64, rampup_ratio=0.05),
        average_program(lambda t: edm_decay(t, 300, 64, 0.05)),
    ),
    "EMA, a cosine of decays": (
        methods.ema(cosine(0.8, 1.0, steps=101)),
        average_program(lambda t: 1 - 0.2 * (1 + math.cos(math.pi * (min(t, 101) - 1) / 100)) / 2),
    ),
    "EMA lagged, a line of decays with a least one": (
        methods.ema(linear(0.0, 0.99, steps=60), min_decay=0.4, follow="before"),
        average_program(lambda t: max(0.4, ramp(0.0, 0.99, 60, t)), lag=True),
    ),
    "EMA, a function and a warm-up": (
        methods.ema(lambda t: 0.9 + 0.09 * math.sin(t), warmup="ratio"),
        average_program(lambda t: min(0.9 + 0.09 * math.sin(t), (1 + t) / (10 + t))),
    ),
    "EMA, a copy": (methods.ema(0.0), hard_sync_program(1)),
    "EMA, a copy one step late": (methods.ema(0.0, follow="before"), average_program(lambda t: 0.0, lag=True)),
    "EMA, standing still": (methods.ema(1.0), hard_sync_program(10**9)),
    "hard sync": (methods.hard_sync(7), hard_sync_program(7)),
    "hard sync at every step": (methods.hard_sync(1), hard_sync_program(1)),
    "SWA": (methods.swa(), weighted_program(lambda s, t: 1.0)),
    "SWA every 5": (methods.swa(every=5), weighted_program(lambda s, t: float(s % 5 == 0), every=5)),
    "power EMA": (methods.power_ema(gamma=3.0), weighted_program(power_weight(3.0))),
    "power EMA, uniform": (methods.power_ema(gamma=0.0), weighted_program(lambda s, t: 1.0)),
    "power EMA by width": (methods.power_ema(sigma_rel=0.1), weighted_program(power_weight(GAMMA_OF_TENTH))),
    "EASGD": (methods.easgd(0.2), easgd_program(lambda t: 0.2)),
    "EASGD, now and then": (methods.easgd(0.2, every=7), easgd_program(lambda t: 0.0 if t % 7 else 0.2)),
    "DiLoCo": (methods.diloco(every=5), diloco_program(5, 0.7, 0.9)),
    "DiLoCo, other numbers": (methods.diloco(3, lr=0.8, momentum=0.25), diloco_program(3, 0.8, 0.25)),
    "Lookahead": (methods.lookahead(), lookahead_program(6, 0.5)),
    "Lookahead, other numbers": (methods.lookahead(k=4, alpha=0.8), lookahead_program(4, 0.8)),
    "Switch EMA": (methods.switch_ema(decay=0.9, every=13), switch_ema_program(0.9, 13)),
    "primal averaging": (methods.primal_averaging(mu_x=0.95, mu_y=0.8), primal_averaging_program(0.95, 0.8)),
    "primal averaging, y = z": (methods.primal_averaging(mu_x=0.9, mu_y=0.0), primal_averaging_program(0.9, 0.0)),
    "primal averaging as centred": (methods.centred(-0.8, 0.05), primal_averaging_program(0.95, 0.8)),
    "EMA-Nesterov": (methods.ema_nesterov(0.8, 0.9), ema_nesterov_program(lambda t: 0.8, 0.9)),
    "EMA-Nesterov, faded in": (
        methods.ema_nesterov(linear(0.0, 0.9, steps=40), 0.95),
        ema_nesterov_program(lambda t: ramp(0.0, 0.9, 40, t), 0.95),
    ),
    "EMA-Nesterov, a restless β": (
        methods.ema_nesterov(lambda t: 0.45 + 0.45 * math.sin(t), 0.7),
        ema_nesterov_program(lambda t: 0.45 + 0.45 * math.sin(t), 0.7),
    ),
    "centred, θ through 0": (
        methods.centred(linear(-0.8, 0.7, steps=90), cosine(0.5, 0.02, steps=120)),
        anchored_program(
            lambda t: ramp(-0.8, 0.7, 90, t),
            lambda t: 0.02 + 0.48 * (1 + math.cos(math.pi * (min(t, 120) - 1) / 119)) / 2,
        ),
    ),
    "centred, lagged, θ through 0": (
        methods.centred(linear(0.7, -0.8, steps=90), linear(0.5, 0.02, steps=120), "before"),
        anchored_program(lambda t: ramp(0.7, -0.8, 90, t), lambda t: ramp(0.5, 0.02, 120, t), follow="before"),
    ),
    "centred, a restless θ": (
        methods.centred(lambda t: -0.4 + 0.3 * math.sin(t), 0.1),
        anchored_program(lambda t: -0.4 + 0.3 * math.sin(t), lambda t: 0.1),
    ),
    "centred, lagged, a restless θ": (
        methods.centred(lambda t: -0.4 + 0.3 * math.sin(t), 0.1, "before"),
        anchored_program(lambda t: -0.4 + 0.3 * math.sin(t), lambda t: 0.1, follow="before"),
    ),
    "centred at 1/t": (methods.centred(-0.9, lambda t: 1 / t), anchored_program(lambda t: -0.9, lambda t: 1 / t)),
    "centred, attractive": (methods.centred(1.0, 0.05), extrapolating_program(1.0, 0.05)),
    "centred, repulsive": (methods.centred(-0.9, 0.05), extrapolating_program(-0.9, 0.05)),
    "centred, lagged": (methods.centred(0.5, 0.2, "before"), extrapolating_program(0.5, 0.2, follow="before")),
    "centred, lagged, repulsive": (
        methods.centred(-0.5, 0.02, "before"),
        extrapolating_program(-0.5, 0.02, follow="before"),
    ),
}


@pytest.mark.parametrize(("inner", "impl"), [("sgd", "reference"), ("adamw", "foreach")])
@pytest.mark.parametrize("case", PROGRAMS)
def test_method_is_its_papers_program(case: str, inner: str, impl: str) -> None:
    method, program = PROGRAMS[case]
    assert_same(belayed(method, INNER[inner], impl=impl), alone(program, INNER[inner]))


def test_easgd_by_rho_follows_the_learning_rate() -> None:
    mine = belayed(methods.easgd(rho=2.0), sgd(), lr=jagged)
    assert_same(mine, alone(easgd_program(lambda t: 2.0 * jagged(t)), sgd(), lr=jagged))


def test_the_matched_ema_differs_from_belay_by_where_the_gradient_is_taken_and_by_nothing_else() -> None:
    spring, lr = tb.Spring(k=1.0, m1=10.0, m2=20.0), 0.1
    matched = belayed(spring.matched_ema(), sgd(lr * spring.effective_lr_scale))
    scale = (1 - 0.05) * 10 / 30
    assert_same(matched, alone(extrapolating_program(0.0, 0.075, scale=scale, follow="before"), sgd(lr)))


# every=N and start=N -------------------------------------------------------------------------------------------------


def thinned_program(
    a_of: Callable[[int], float], b_of: Callable[[int], float], every: int, *, follow: str = "after"
) -> Program:
    """Plain steps, and at every N-th one a relaxation by a_of(t) and b_of(t)."""

    def run(w1: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = w1
        for t in count(1):
            stepped = w1 + update(w1, t)
            if t % every:
                w1 = stepped
            else:
                a, b = a_of(t), b_of(t)
                target = w1 if follow == "before" else stepped
                w1, w2 = (1 - a) * stepped + a * w2, (1 - b) * w2 + b * target
            yield w1, w2

    return run


def relaxed(own: float, other: float, n: int) -> float:
    """a_N = a·(1 − (1−a−b)^N)/(a+b)."""
    return own * (1 - (1 - own - other) ** n) / (own + other)


@pytest.mark.parametrize("every", [2, 7])
@pytest.mark.parametrize("follow", ["before", "after"])
@pytest.mark.parametrize("m1", [10.0, math.inf])
def test_every_compounds_a_spring(m1: float, follow: str, every: int) -> None:
    a, b = 1 / (2 * m1), 1 / 40
    program = thinned_program(lambda t: relaxed(a, b, every), lambda t: relaxed(b, a, every), every, follow=follow)
    spring = tb.Spring(k=1.0, m1=m1, m2=20.0, follow=follow)
    assert_same(belayed(spring, INNER["adamw"], every=every), alone(program, INNER["adamw"]))


def ratio_decay(t: int) -> float:
    return min(0.97, (1 + t) / (10 + t))


THINNED: dict[str, tuple[Any, Callable[[int, int], float]]] = {  # the method; what is left of the average after N steps
    "ema": (methods.ema(0.95), lambda t, n: 0.95**n),
    "ema, warm-up": (
        methods.ema(0.97, warmup="ratio"),
        lambda t, n: math.prod(ratio_decay(s) for s in range(t - n + 1, t + 1)),
    ),
    "ema, scheduled": (
        methods.ema(linear(0.5, 0.99, steps=50)),
        lambda t, n: math.prod(ramp(0.5, 0.99, 50, s) for s in range(t - n + 1, t + 1)),
    ),
    "ema, ramp-up": (
        methods.ema(half_life=20.0, rampup_ratio=0.1),
        lambda t, n: math.prod(edm_decay(s, 20, 1, 0.1) for s in range(t - n + 1, t + 1)),
    ),
    "ema, a copy": (methods.ema(0.0), lambda t, n: 0.0),
    "ema, standing still": (methods.ema(1.0), lambda t, n: 1.0),
    "swa": (methods.swa(), lambda t, n: (t - n) / t),
    "power_ema": (methods.power_ema(gamma=3.0), lambda t, n: ((t - n) / t) ** 4),
}


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("case", THINNED)
def test_every_compounds_what_changes_with_the_step(case: str, every: int) -> None:
    method, left = THINNED[case]
    program = thinned_program(lambda t: 0.0, lambda t: 1 - left(t, every), every)
    assert_same(belayed(method, INNER["adamw"], every=every), alone(program, INNER["adamw"]))


@pytest.mark.parametrize(
    "method",
    [
        methods.heavy_ball(0.9),
        methods.nesterov(0.9),
        methods.schedule_free(0.9),
        methods.easgd(0.1),
        methods.easgd(rho=0.1),
        methods.lookahead(),
        methods.switch_ema(decay=0.9, every=10),
        methods.swa(every=3),
        methods.primal_averaging(mu_x=0.9, mu_y=0.5),
        methods.centred(0.5, 0.1),
        methods.centred(lambda t: 0.0 if t < 30 else 0.5, 0.1),
        methods.ema_nesterov(0.5, 0.9),
        methods.ema_nesterov(lambda t: 0.0 if t < 30 else 0.5, 0.9),
        methods.hard_sync(5),
        tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=12.0, c2=24.0),
        tb.Spring(k=1.0, m1=math.inf, m2=20.0, c2=24.0),
    ],
    ids=without_address,
)
def test_every_is_refused_where_steps_cannot_be_left_out(method: Any) -> None:
    with pytest.raises(ValueError, match="every=4"):
        belayed(method, sgd(), every=4)


def delayed(program: Program, start: int) -> Program:
    """Plain steps at first, when the average is the weights; then the program, from there and from its own step 1."""

    def run(w: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        for t in range(1, start + 1):
            w = w + update(w, t)
            yield w, w
        yield from program(w, lambda at, t: update(at, t + start))

    return run


STARTED: dict[str, tuple[Any, Program, dict[str, int]]] = {
    **{
        name: (*PROGRAMS[name], {})
        for name in (
            "BELAY",
            "EMA, ratio warm-up",
            "EMA, a cosine of decays",
            "EMA-Nesterov, faded in",
            "centred, lagged, θ through 0",
            "hard sync",
            "SWA every 5",
            "Lookahead",
        )
    },
    "SWA, every=4": (
        methods.swa(),
        thinned_program(lambda t: 0.0, lambda t: 1 - THINNED["swa"][1](t, 4), 4),
        {"every": 4},
    ),
}


@pytest.mark.parametrize("start", [1, 30])
@pytest.mark.parametrize("case", STARTED)
def test_start_begins_as_if_training_had_begun_there(case: str, start: int) -> None:
    method, program, options = STARTED[case]
    mine = belayed(method, INNER["adamw"], start=start, **options)
    assert_same(mine, alone(delayed(program, start), INNER["adamw"]))


# The paper's two-dimensional prediction ------------------------------------------------------------------------------


def on_rosenbrock(method: Any, start: tuple[float, float], steps: int = 3000) -> list[tuple[float, float]]:
    """SGD at the paper's η = 0.01 on its function, (0 − x)² + 100(x − y²)²: every point that it visited."""
    plane = nn.Module()
    plane.w = nn.Parameter(torch.tensor(start, dtype=f64))
    optimizer = torch.optim.SGD(plane.parameters(), lr=0.01)
    if method is not None:
        tb.Belay(plane, optimizer, method)
    path = []
    for _ in range(steps):
        x, y = plane.w.tolist()
        path.append((x, y))
        plane.w.grad = torch.tensor([2 * x + 200 * (x - y * y), -400 * y * (x - y * y)], dtype=f64)
        optimizer.step()
    return path


STARTS = [(0.05, 0.05), (-0.2, 0.3)]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("method", [None, tb.Spring.ema(decay=0.95)], ids=["SGD", "EMA+SGD"])
def test_sgd_overflows_on_rosenbrock_and_an_ema_cannot_help(method: Any, start: tuple[float, float]) -> None:
    assert not all(map(math.isfinite, on_rosenbrock(method, start)[-1]))


@pytest.mark.parametrize("start", STARTS)
def test_belay_converges_on_rosenbrock_at_its_effective_learning_rate(start: tuple[float, float]) -> None:
    path = on_rosenbrock(tb.Spring(k=1.0, m1=10.0, m2=20.0), start)
    (_, y_then), (x, y) = path[1000], path[-1]
    assert x == pytest.approx(100 / 101 * y * y, rel=1e-2)  # on the floor of the valley: x rings no more
    assert x * x + 100 * (x - y * y) ** 2 < 4e-6
    # The floor is y⁴·100/101, so that 1/y² grows by 8·100/101·η_eff a step: slowly, and at the effective rate.
    # What is neglected is of the order of y², 0.2%, and of the lag behind the floor; another rate would be far off.
    growth = (1 / y**2 - 1 / y_then**2) / (len(path) - 1 - 1000)
    assert growth == pytest.approx(8 * 100 / 101 * 0.95 / 3 * 0.01, rel=0.02)

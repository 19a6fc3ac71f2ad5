"""Methods: the four numbers of each averaging method, the arguments it refuses, and the memory of three of them."""

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, astuple
from fractions import Fraction
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Method, Remembers, settled
from torchbelay.physics.schedules import linear
from torchbelay.physics.spring import Spring

INF, NAN = math.inf, math.nan
STEPS, RATES = (1, 2, 3, 5, 6, 10, 1000, 10**6), (1e-4, 0.1, 3.0)
Numbers = tuple[float, float, float, float]


def four(c: Coupling) -> Numbers:
    """Return (a, b, p, q)."""
    return astuple(c)


def line(t: int) -> float:
    """The straight line from 0.5 at step 1 to 0.9 at step 11."""
    return 0.5 + 0.04 * (min(t, 11) - 1)


# The table of methods ----------------------------------------------------------------------------------------------
# method, the four numbers as functions of step and learning rate

TABLE: list[tuple[Any, Callable[[int, float], Numbers]]] = [
    (methods.belay(k=1.0, m1=10.0, m2=20.0), lambda t, lr: (0.05, 0.025, 0.95, 0)),
    (methods.belay(), lambda t, lr: (1 / 4000, 1 / 1000, 1 - 1 / 4000, 0)),
    (methods.belay(k=1.0, m1=10.0, m2=20.0, follow="after"), lambda t, lr: (0.05, 0.025, 0.95, 0.025)),
    (methods.ema(0.9), lambda t, lr: (0, 0.1, 1, 0.1)),
    (methods.ema(0.9, follow="before"), lambda t, lr: (0, 0.1, 1, 0)),
    (methods.ema(0.0), lambda t, lr: (0, 1, 1, 1)),
    (methods.ema(1.0), lambda t, lr: (0, 0, 1, 0)),
    (methods.ema(linear(0.5, 0.9, 11)), lambda t, lr: (0, 1 - line(t), 1, 1 - line(t))),
    (methods.ema(half_life=20.0), lambda t, lr: (0, 1 - 2 ** (-1 / 20), 1, 1 - 2 ** (-1 / 20))),
    (Spring.ema(0.9), lambda t, lr: (0, 0.1, 1, 0.1)),
    (Spring(k=0.2, m1=INF, m2=1.0), lambda t, lr: (0, 0.1, 1, 0)),
    (methods.hard_sync(3), lambda t, lr: (0, 0, 1, 0) if t % 3 else (0, 1, 1, 1)),
    (methods.swa(), lambda t, lr: (0, 1 / t, 1, 1 / t)),
    (methods.swa(every=3), lambda t, lr: (0, 0, 1, 0) if t % 3 else (0, 3 / t, 1, 3 / t)),
    (methods.power_ema(gamma=0.0), lambda t, lr: (0, 1 / t, 1, 1 / t)),
    (methods.power_ema(gamma=6.94), lambda t, lr: (0, 1 - (1 - 1 / t) ** 7.94, 1, 1 - (1 - 1 / t) ** 7.94)),
    (methods.easgd(0.3), lambda t, lr: (0.3, 0.3, 1, 0)),
    (methods.easgd(rho=0.3), lambda t, lr: (0.3 * lr, 0.3 * lr, 1, 0)),
    (methods.easgd(0.3, every=4), lambda t, lr: (0, 0, 1, 0) if t % 4 else (0.3, 0.3, 1, 0)),
    (methods.easgd(rho=0.3, every=2), lambda t, lr: (0, 0, 1, 0) if t % 2 else (0.3 * lr, 0.3 * lr, 1, 0)),
    (
        methods.diloco(every=5),
        lambda t, lr: (0, 0, 1, 0) if t % 5 else (1 - 0.7 * 1.9, 0.7 * 1.9, 0.7 * 1.9, 0.7 * 1.9),
    ),
    (methods.diloco(2, lr=0.5, momentum=0.0), lambda t, lr: (0, 0, 1, 0) if t % 2 else (0.5, 0.5, 0.5, 0.5)),
    (methods.lookahead(k=5, alpha=0.8), lambda t, lr: (0, 0, 1, 0) if t % 5 else (0.2, 0.8, 0.8, 0.8)),
    (methods.lookahead(k=2, alpha=1.0), lambda t, lr: (0, 0, 1, 0) if t % 2 else (0, 1, 1, 1)),
    (methods.switch_ema(0.7, every=3), lambda t, lr: (0, 0.3, 1, 0.3) if t % 3 else (0.7, 0.3, 0.3, 0.3)),
    (methods.heavy_ball(0.9), lambda t, lr: (-0.9, 1, 1, 0)),
    (methods.nesterov(0.9), lambda t, lr: (-0.9, 1, 1.9, 1)),
    (methods.ema_nesterov(0.6, 0.9), lambda t, lr: (-0.06, 0.1, 1.06, 0.1)),
    (
        methods.ema_nesterov(linear(0.5, 0.9, 11), 0.9),
        lambda t, lr: (-0.1 * line(t + 1), 0.1, 1 + 0.1 * line(t + 1), 0.1),
    ),
    (methods.primal_averaging(0.9, 0.6), lambda t, lr: (-0.6 * 0.1 / 0.4, 0.1 / 0.4, 1 - 0.54, 0.1)),
    (methods.schedule_free(0.9), lambda t, lr: (-9 / t, 10 / t, 0.1 + 0.9 / t, 1 / t)),
    (methods.schedule_free(0.0), lambda t, lr: (0, 1 / t, 1, 1 / t)),  # β = 0 is the uniform average
    (methods.centred(0.5, 0.3), lambda t, lr: (0.1, 0.2, 1.35, 0.3)),
    (methods.centred(0.5, 0.3, follow="before"), lambda t, lr: (0.1, 0.2, 1.5, 0)),
    (methods.centred(-0.5, 0.3), lambda t, lr: (-0.3, 0.6, 0.65, 0.3)),
    (
        methods.centred(linear(0.5, 0.9, 11), 0.3),
        lambda t, lr: (
            1 - (1 + 0.7 * line(t + 1)) / (1 + line(t)),
            0.3 / (1 + line(t)),
            1 + 0.7 * line(t + 1),
            0.3,
        ),
    ),
    (
        methods.centred(0.5, linear(0.5, 0.9, 11), "before"),
        lambda t, lr: (line(t) / 3, line(t) / 1.5, 1.5, 0),
    ),
]
NAMES = [repr(method) for method, _ in TABLE]


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=NAMES)
def test_the_four_numbers_are_those_of_the_table(method: Any, expected: Callable[[int, float], Numbers]) -> None:
    for lr, t in itertools.product(RATES, STEPS):  # a method with a memory sees each learning rate as constant
        # 1 − (1 − 1/t)^γ loses five digits at the last step.
        assert four(method.coupling(t, lr)) == pytest.approx(expected(t, lr), rel=1e-10, abs=1e-15)


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=NAMES)
def test_varies_says_what_the_coupling_depends_on(method: Any, expected: Callable[[int, float], Numbers]) -> None:
    by_step = {expected(t, 0.1) for t in STEPS}
    by_rate = {expected(2, lr) for lr in RATES}
    if method.varies == "never":
        assert (len(by_step), len(by_rate)) == (1, 1)
    elif method.varies == "step":
        assert (len(by_step) > 1, len(by_rate)) == (True, 1)
    else:
        assert method.varies == "lr"
        assert isinstance(method, Remembers) or len(by_rate) > 1


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=NAMES)
def test_every_row_is_a_method_whose_repr_makes_it_again(method: Any, expected: object) -> None:
    assert isinstance(method, Method)
    assert eval(repr(method), vars(methods) | {"Spring": Spring, "inf": INF, "linear": linear}) == method


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=NAMES)
def test_a_pickled_method_is_equal(method: Any, expected: object) -> None:
    assert pickle.loads(pickle.dumps(method)) == method


@pytest.mark.parametrize("name", sorted(set(methods.__all__) - {"Method", "belay"}))
def test_a_pickle_that_names_the_package_still_loads(name: str) -> None:
    """Pickles of classes name their module, which was `torchbelay.physics.methods` before each had its own file."""
    assert pickle.loads(f"ctorchbelay.physics.methods\n{name}\n.".encode()) is getattr(methods, name)


FILES = {"heavy_ball": "momentum", "nesterov": "momentum"}


@pytest.mark.parametrize("name", sorted(set(methods.__all__) - {"Method"}))
def test_a_method_has_its_own_file_and_its_docstring_says_all(name: str) -> None:
    file = FILES.get(name, name)
    method = getattr(import_module(f"torchbelay.physics.methods.{file}"), name)
    assert method is getattr(methods, name)
    assert method.__module__ == f"torchbelay.physics.methods.{file}"
    for part in ("a = ", "b = ", "p = ", "q = ", "When to use it: ", "Reference: ", ">>> "):
        assert part in method.__doc__


def test_an_object_without_coupling_is_no_method() -> None:
    assert not isinstance(0.999, Method)
    assert not isinstance(Coupling(0.0, 0.1, 1.0, 0.1), Method)


def test_every_public_method_is_in_the_table() -> None:
    rows = {type(method).__name__ for method, _ in TABLE}
    assert set(methods.__all__) - {"Method", "belay"} <= rows


@pytest.mark.parametrize(
    ("method", "rhythm"),
    [
        (methods.lookahead(), True),
        (methods.diloco(), True),
        (methods.easgd(0.1, every=2), True),
        (methods.switch_ema(0.9, every=5), True),
        (methods.swa(every=2), True),
        (methods.hard_sync(2), True),
        (methods.hard_sync(1), False),
        (methods.ema(linear(0.5, 0.9, 11)), False),
        (methods.centred(0.5, linear(0.5, 0.9, 11)), False),
        (methods.centred(linear(0.0, 0.9, 11), 0.1), True),
        (methods.ema_nesterov(linear(0.0, 0.9, 11), 0.9), True),
        (methods.ema_nesterov(0.5, 0.9), False),
        (methods.swa(), False),
        (methods.ema(0.9), False),
        (methods.heavy_ball(0.9), False),
    ],
    ids=str,
)
def test_rhythm_marks_methods_with_special_steps(method: Any, rhythm: bool) -> None:
    assert getattr(method, "rhythm", False) == rhythm


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=NAMES)
def test_frozen(method: Any, expected: object) -> None:
    name = next(iter(method.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(method, name, 0.5)


# The averages that the formulas make -----------------------------------------------------------------------------


def follow_path(method: Any, path: Sequence[float]) -> float:
    """Return the average after weights without pull went along this path, from 0."""
    w1 = w2 = 0.0
    for t, target in enumerate(path, 1):
        c = method.coupling(t, 0.1)
        assert (c.a, c.p) == (0, 1)
        w1, w2 = target, w2 + c.b * (w1 - w2) + c.q * (target - w1)
    return w2


PATH = np.random.default_rng(1).standard_normal(60).cumsum()


def test_swa_is_the_mean_of_the_points_it_took() -> None:
    assert follow_path(methods.swa(), PATH) == pytest.approx(PATH.mean(), rel=1e-13)
    assert follow_path(methods.swa(every=7), PATH) == pytest.approx(PATH[6::7].mean(), rel=1e-13)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 6.94, 16.97])
def test_power_ema_weighs_step_s_as_a_power_of_s(gamma: float) -> None:
    s = np.arange(61) ** (gamma + 1)
    weights = np.diff(s) / s[-1]  # ∫ s^γ ds over each step
    assert follow_path(methods.power_ema(gamma=gamma), PATH) == pytest.approx(weights @ PATH, rel=1e-12)


@pytest.mark.parametrize("gamma", [1e-3, 0.5, 6.94, 16.97, 1e4])
def test_power_ema_finds_the_exponent_of_a_width(gamma: float) -> None:
    sigma = math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))
    assert methods.power_ema(sigma_rel=sigma).exponent == pytest.approx(gamma, rel=1e-9)  # σ is flat near γ = 0
    assert methods.power_ema(gamma=gamma).exponent == gamma


@pytest.mark.parametrize("sigma", [1e-6, 0.05, 0.10, 0.2, 12**-0.5])
def test_power_ema_has_the_width_that_was_given(sigma: float) -> None:
    gamma = methods.power_ema(sigma_rel=sigma).exponent
    assert math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) == pytest.approx(sigma, rel=1e-14)


@pytest.mark.parametrize(("sigma", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_power_ema_has_the_exponents_that_its_paper_prints(sigma: float, gamma: float) -> None:
    assert round(methods.power_ema(sigma_rel=sigma).exponent, 2) == gamma


@pytest.mark.parametrize("t", [1, 2, 9, 90, 10**5, 10**7])
def test_ema_warm_ups_are_the_smaller_of_two_decays(t: int) -> None:
    d = 0.9999
    ratio = 1 - methods.ema(d, warmup="ratio").coupling(t, 0.1).b
    assert ratio == pytest.approx(min(d, (1 + t) / (10 + t)), rel=1e-15)
    inverse = 1 - methods.ema(d, warmup="inverse-power").coupling(t, 0.1).b
    assert inverse == pytest.approx(min(d, 1 - (1 + t) ** (-2 / 3)), rel=1e-15)
    steeper = 1 - methods.ema(d, warmup="inverse-power", power=1.0).coupling(t, 0.1).b
    assert steeper == pytest.approx(min(d, t / (1 + t)), rel=1e-15)


@pytest.mark.parametrize("warmup", ["ratio", "inverse-power"])
@pytest.mark.parametrize("given", [{"decay": 0.99}, {"half_life": 100.0}])
def test_ema_with_a_warm_up_ends_as_the_one_without(warmup: Any, given: dict[str, float]) -> None:
    warm = methods.ema(**given, warmup=warmup)
    assert warm.varies == "step"
    assert warm.coupling(10**6, 0.1) == methods.ema(**given).coupling(1, 0.1)


def test_ema_counts_its_half_life_in_steps_or_samples() -> None:
    steps = methods.ema(half_life=500.0).coupling(1, 0.1)
    assert (1 - steps.b) ** 500 == pytest.approx(0.5, rel=1e-12)
    assert methods.ema(half_life_samples=16_000.0, batch_size=32).coupling(1, 0.1) == steps
    assert methods.ema(half_life=1e12).coupling(1, 0.1).b == pytest.approx(math.log(2) / 1e12, rel=1e-11)


def test_ema_and_spring_ema_are_the_same_average() -> None:
    for d in (0.5, 0.9, 0.999, 0.9999):
        assert methods.ema(d).coupling(1, 0.1) == Spring.ema(d).coupling()
        assert methods.ema(half_life=100 * d).coupling(1, 0.1) == Spring.ema(half_life=100 * d).coupling()


@pytest.mark.parametrize(
    "method",
    [
        methods.lookahead(k=5, alpha=0.8),
        methods.lookahead(k=1, alpha=0.3),
        methods.switch_ema(0.9, every=7),
        methods.switch_ema(0.5, every=1),
    ],
    ids=str,
)
def test_effective_lr_scale_is_the_mean_drift_over_whole_rounds(method: Any) -> None:
    steps = 3 * (method.k if isinstance(method, methods.lookahead) else method.every)
    w1 = w2 = 0.0
    for t in range(1, steps + 1):
        c = method.coupling(t, 0.1)
        w1, w2 = w1 + c.a * (w2 - w1) + c.p, w2 + c.b * (w1 - w2) + c.q
    assert w1 == pytest.approx(w2, rel=1e-14)  # a round ends with both in one place
    assert method.effective_lr_scale == pytest.approx(w1 / steps, rel=1e-13)


@pytest.mark.parametrize("theta", [-0.9, -0.5, 0.0, 0.25, 1.0, 2.0])
@pytest.mark.parametrize("follow", ["before", "after"])
def test_centred_members_differ_in_theta_alone(theta: float, follow: Any) -> None:
    c = methods.centred(theta, 0.01, follow).coupling(1, 0.1)
    assert (c.rate, c.theta, c.effective_lr_scale) == pytest.approx((0.01, theta, 1), rel=1e-13, abs=1e-15)
    assert c.q == (0.01 if follow == "after" else 0)


def test_centred_contains_belay_at_its_effective_rate() -> None:
    belay = Spring(k=1.0, m1=10.0, m2=20.0)
    c = methods.centred(belay.theta, 0.075, follow="before").coupling(1, 0.1)
    assert four(c) == pytest.approx((belay.kappa1, belay.kappa2, belay.alpha / belay.effective_lr_scale, 0), rel=1e-14)


@pytest.mark.parametrize("follow", ["before", "after"])
@pytest.mark.parametrize("t", [1, 5, 11, 12])
def test_a_moving_theta_is_that_of_the_settled_coupling_and_not_of_the_step(t: int, follow: Any) -> None:
    moving = methods.centred(linear(-0.5, 0.9, 11), linear(0.3, 0.1, 11), follow)
    theta, rate = linear(-0.5, 0.9, 11)(t), linear(0.3, 0.1, 11)(t)
    assert settled(moving, t, 0.1) == methods.centred(theta, rate, follow).coupling(1, 0.1)
    assert (moving.coupling(t, 0.1).theta == pytest.approx(theta)) == (t >= 11)
    assert moving.effective_lr_scale == 1
    assert (moving.pulls, moving.horizon, moving.varies) == (True, 11, "step")


def test_a_method_without_a_moving_theta_is_settled_as_it_is() -> None:
    for method in (methods.ema(0.9), methods.centred(0.5, 0.1), methods.nesterov(0.9), Spring(1.0, 10.0, 20.0)):
        assert settled(method, 3, 0.1) == method.coupling(3, 0.1)


@pytest.mark.parametrize("t", [1, 5, 40])
def test_ema_nesterovs_own_beta_is_that_of_the_point_where_the_step_began(t: int) -> None:
    fading = linear(0.0, 0.9, 40)
    moving = methods.ema_nesterov(fading, 0.95)
    assert settled(moving, t, 0.1) == methods.ema_nesterov(fading(t), 0.95).coupling(1, 0.1)
    assert moving.coupling(t, 0.1) == methods.ema_nesterov(fading(t + 1), 0.95).coupling(1, 0.1)
    assert moving.coupling(t, 0.1).effective_lr_scale == pytest.approx(1 / (1 - fading(t + 1)))
    assert (moving.pulls, moving.horizon, moving.varies) == (True, 40, "step")


def test_ema_nesterov_without_a_memory_is_nesterov_and_without_a_look_ahead_ema() -> None:
    assert methods.ema_nesterov(0.8, 0.0).coupling(1, 0.1) == methods.nesterov(0.8).coupling(1, 0.1)
    assert methods.ema_nesterov(0.0, 0.75).coupling(1, 0.1) == methods.ema(0.75).coupling(1, 0.1)
    assert not methods.ema_nesterov(0.0, 0.75).pulls


@pytest.mark.parametrize("mu_y", [0.0, 0.3, 0.9])
def test_primal_averaging_is_centred_at_minus_mu_y(mu_y: float) -> None:
    primal = methods.primal_averaging(0.9, mu_y).coupling(1, 0.1)
    assert four(primal) == pytest.approx(four(methods.centred(-mu_y, 0.1).coupling(1, 0.1)), rel=1e-13, abs=1e-15)


# Momentum and schedule-free, as their own programs -------------------------------------------------------------------

SCHEDULE = [0.3, 0.3, 0.1, 0.05, 0.2, 0.2, 0.0, 0.1, 0.4, 0.01]


def slope(w: float) -> float:
    """Return the gradient of a loss that is not quadratic."""
    return w + math.sin(3 * w)


def couple(method: Any, rates: Sequence[float]) -> list[tuple[float, float]]:
    """Return (w1, w2) after each step of plain SGD inside the coupling, from 1."""
    w1 = w2 = 1.0
    path = []
    for t, lr in enumerate(rates, 1):
        c, u = method.coupling(t, lr), -lr * slope(w1)
        w1, w2 = w1 + c.a * (w2 - w1) + c.p * u, w2 + c.b * (w1 - w2) + c.q * u
        path.append((w1, w2))
    return path


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_its_own_program_under_a_schedule(nesterov: bool) -> None:
    method = methods.nesterov(0.8) if nesterov else methods.heavy_ball(0.8)
    rates = [lr for lr in SCHEDULE if lr]  # at lr = 0 the displacement loses the velocity, and the programs part
    w, v, path = 1.0, 0.0, []
    for lr in rates:
        g = slope(w)
        v = 0.8 * v + g
        w = w - lr * (g + 0.8 * v if nesterov else v)
        path.append(w)
    assert [w1 for w1, _ in couple(method, rates)] == pytest.approx(path, rel=1e-12)


@pytest.mark.parametrize(("r", "power"), [(0.0, 2.0), (1.0, 2.0), (0.5, 0.0)])
def test_schedule_free_is_its_own_program_under_a_schedule(r: float, power: float) -> None:
    x = z = y = 1.0
    largest = total = 0.0
    path = []
    for t, lr in enumerate(SCHEDULE, 1):
        z -= lr * slope(y)
        largest = max(largest, lr)
        weight = t**r * largest**power
        total += weight
        x += weight / total * (z - x)
        y = 0.9 * x + 0.1 * z
        path.append((y, x))
    found = couple(methods.schedule_free(0.9, r=r, weight_lr_power=power), SCHEDULE)
    assert np.allclose(found, path, rtol=1e-12, atol=0)


def test_schedule_free_does_not_average_before_the_learning_rate_rises() -> None:
    method = methods.schedule_free(0.9)
    assert method.coupling(1, 0.0).b == 0
    assert method.coupling(2, 0.1).q == 1  # the first weight that counts


EXTREME = {
    "a power of the step beyond floats": (200, 2, [0.1] * 60),
    "learning rates whose square is beyond floats": (0, 2, [1e200, 2e200, 1e200, 3e200]),
    "learning rates whose power is below floats": (0, 100, [1e-5, 2e-5, 1e-5, 2.01e-5]),
    "factors that make up for each other": (200, 100, [1e-8, 1e-8, 2e-8] * 20),
    "a warm-up from below floats into their range": (0, 50, [1e-9, 1e-6, 1.01e-6, 1.02e-6, 1.02e-6]),
    "a warm-up out of the range of floats": (0, 2, [0.0, 1e139, 2e139, 1e140, 1.5e140, 1e150, 1.1e150]),
    "learning rates that do not count": (300, 0, [0.0] * 20),
}


@pytest.mark.parametrize(("r", "power", "rates"), EXTREME.values(), ids=EXTREME)
def test_schedule_free_knows_shares_of_weights_that_no_float_holds(r: int, power: int, rates: list[float]) -> None:
    method = methods.schedule_free(0.9, r=float(r), weight_lr_power=float(power))
    largest, total = Fraction(0), Fraction(0)
    for t, lr in enumerate(rates, 1):
        largest = max(largest, Fraction(lr))
        weight = Fraction(t) ** r * largest**power
        total += weight
        share = float(weight / total) if total else 0.0
        assert method.coupling(t, lr).q == pytest.approx(share, rel=1e-12)
        assert method.coupling(t, lr).q == pytest.approx(share, rel=1e-12)  # asked again for the same step


def test_schedule_free_knows_such_shares_of_a_step_that_is_asked_for_alone() -> None:
    shares = [Fraction(t) ** 200 for t in range(1, 61)]
    alone = methods.schedule_free(0.9, r=200.0).coupling(60, 1e200)
    assert alone.q == pytest.approx(float(shares[-1] / sum(shares)), rel=1e-12)
    assert methods.schedule_free(0.9, r=200.0).coupling(60, 0.0).q == 0


# Memory ----------------------------------------------------------------------------------------------------------

REMEMBERING = [
    methods.heavy_ball(0.8),
    methods.nesterov(0.8),
    methods.schedule_free(0.9),
    methods.schedule_free(0.9, r=1),
]


def ask(method: Any, rates: Sequence[float], first: int = 1) -> list[Numbers]:
    """Return the four numbers of successive steps."""
    return [four(method.coupling(t, lr)) for t, lr in enumerate(rates, first)]


@pytest.fixture(params=REMEMBERING, ids=str)
def fresh(request: pytest.FixtureRequest) -> Any:
    """A method with an empty memory."""
    return request.param.fresh()


def test_momentum_repels_by_the_ratio_of_learning_rates() -> None:
    repulsion = [a for a, *_ in ask(methods.heavy_ball(0.5), [0.1, 0.2, 0.2, 0.05, 0.0, 0.4])]
    assert repulsion == pytest.approx([-0.5, -1.0, -0.5, -0.125, 0.0, -0.5], rel=1e-15)


@pytest.mark.parametrize("method", [methods.schedule_free(0.9, weight_lr_power=0.5), methods.easgd(rho=0.5)], ids=repr)
@pytest.mark.parametrize("lr", [-0.1, math.nan])
def test_a_learning_rate_that_makes_no_weight_is_refused_by_name(method: Any, lr: float) -> None:
    with pytest.raises(ValueError, match=f"lr={lr}"):
        method.coupling(1, lr)
    assert getattr(method, "memory", ()) == ()


def test_schedule_free_weighs_by_the_largest_rate_so_far() -> None:
    weights = [q for *_, q in ask(methods.schedule_free(0.9), [1.0, 2.0, 1.0])]
    assert weights == pytest.approx([1, 4 / 5, 4 / 9], rel=1e-15)


def test_called_in_order_it_remembers(fresh: Any) -> None:
    assert ask(fresh, [0.1, 0.4, 0.2]) != ask(fresh.fresh(), [0.2, 0.2, 0.2])
    assert fresh.memory[0] == 3


def test_two_calls_for_one_step_return_the_same(fresh: Any) -> None:
    once = ask(fresh.fresh(), SCHEDULE)
    twice = []
    for t, lr in enumerate(SCHEDULE, 1):
        again = [four(fresh.coupling(t, lr)) for _ in range(3)]
        assert again[0] == again[1] == again[2]
        twice.append(again[0])
    assert twice == once


def test_out_of_order_it_takes_the_learning_rate_as_constant(fresh: Any) -> None:
    ask(fresh, [0.1, 0.4, 0.2])
    constant = ask(fresh.fresh(), [0.3] * 7)
    assert four(fresh.coupling(7, 0.3)) == pytest.approx(constant[6], rel=1e-14)
    assert four(fresh.coupling(1, 0.3)) == pytest.approx(constant[0], rel=1e-14)
    assert ask(fresh, [0.3] * 6, first=2) == pytest.approx(np.array(constant[1:]), rel=1e-14)  # then in order again


def test_fresh_is_a_copy_without_memory(fresh: Any) -> None:
    first = ask(fresh, SCHEDULE)
    memory = fresh.memory
    new = fresh.fresh()
    assert (new.memory, new) == ((), fresh)  # equal, because the memory is not part of the method
    assert ask(new, SCHEDULE) == first
    ask(new, [1.0])
    assert fresh.memory == memory


def test_remember_continues_from_a_checkpoint(fresh: Any) -> None:
    whole = ask(fresh, SCHEDULE)
    for cut in range(1, len(SCHEDULE)):
        first = fresh.fresh()
        ask(first, SCHEDULE[:cut])
        resumed = fresh.fresh()
        resumed.remember(list(first.memory))  # as loaded from a checkpoint
        assert resumed.memory == first.memory
        assert ask(resumed, SCHEDULE[cut:], first=cut + 1) == whole[cut:]


# Refused arguments ---------------------------------------------------------------------------------------------------

UNIT = r"needs {0} > 0 and {0} < 1$"
FROM_0 = r"needs {0} ≥ 0 and {0} < 1$"


@pytest.mark.parametrize(
    ("make", "bad", "error", "message"),
    [
        (methods.ema, {}, ValueError, "exactly one of decay, half_life, half_life_samples; got none"),
        (
            methods.ema,
            {"decay": 0.9, "half_life": 3.0},
            ValueError,
            r"exactly one of .*; got decay=0\.9, half_life=3\.0",
        ),
        (methods.ema, {"decay": NAN}, ValueError, r"^decay=nan .* needs decay ≥ 0 and decay ≤ 1$"),
        (methods.ema, {"decay": "0.9"}, TypeError, r"^decay='0\.9' is not a number; give a float"),
        (methods.ema, {"decay": 1e-17}, ValueError, r"^decay=1e-17 .* keeps nothing .* use a larger decay"),
        (methods.ema, {"half_life": 1e-3}, ValueError, r"^half_life=0\.001 .* use a larger half_life"),
        (
            methods.ema,
            {"half_life_samples": 0.01, "batch_size": 64},
            ValueError,
            r"^half_life_samples=0\.01 .* keeps nothing .* use a larger half_life_samples",
        ),
        (methods.ema, {"half_life": 0.0}, ValueError, r"^half_life=0\.0 .* needs half_life > 0, finite"),
        (methods.ema, {"half_life": NAN}, ValueError, r"^half_life=nan .* needs half_life > 0, finite"),
        (methods.ema, {"half_life": INF}, ValueError, r"^half_life=inf .* needs half_life > 0, finite"),
        (methods.ema, {"half_life_samples": 5.0}, ValueError, "^half_life_samples=5.0 and batch_size=None go together"),
        (methods.ema, {"decay": 0.9, "batch_size": 4}, ValueError, "^half_life_samples=None and batch_size=4 go"),
        (methods.ema, {"half_life_samples": NAN, "batch_size": 2}, ValueError, r"^half_life_samples=nan .* finite"),
        (
            methods.ema,
            {"half_life_samples": 5.0, "batch_size": 0},
            ValueError,
            r"^batch_size=0 .* needs batch_size ≥ 1",
        ),
        (methods.ema, {"half_life_samples": 5.0, "batch_size": 2.0}, TypeError, r"^batch_size=2\.0 .* give an int"),
        (
            methods.ema,
            {"decay": 0.9, "warmup": "slow"},
            ValueError,
            "^warmup='slow' .* one of 'ratio', 'inverse-power'",
        ),
        (methods.ema, {"decay": 0.9, "power": 0.0}, ValueError, r"^power=0\.0 .* needs power > 0, finite"),
        (methods.ema, {"decay": 0.9, "power": NAN}, ValueError, r"^power=nan .* needs power > 0, finite"),
        (methods.ema, {"decay": 0.9, "follow": "both"}, ValueError, "^follow='both' .* one of 'before', 'after'"),
        (methods.swa, {"every": 0}, ValueError, "^every=0 .* needs every ≥ 1"),
        (methods.swa, {"every": 1.0}, TypeError, r"^every=1\.0 is not a whole number; give an int of at least 1"),
        (methods.swa, {"every": True}, TypeError, "^every=True is not a whole number"),
        (methods.power_ema, {}, ValueError, "exactly one of gamma, sigma_rel; got none"),
        (
            methods.power_ema,
            {"gamma": 1.0, "sigma_rel": 0.1},
            ValueError,
            "exactly one of gamma, sigma_rel; got gamma=",
        ),
        (methods.power_ema, {"gamma": -0.1}, ValueError, r"^gamma=-0\.1 .* needs gamma ≥ 0, finite"),
        (methods.power_ema, {"gamma": NAN}, ValueError, "^gamma=nan .* needs gamma ≥ 0, finite"),
        (
            methods.power_ema,
            {"sigma_rel": 0.0},
            ValueError,
            r"^sigma_rel=0\.0 .* needs sigma_rel > 0 and sigma_rel ≤ 0\.2886",
        ),
        (methods.power_ema, {"sigma_rel": 0.29}, ValueError, r"^sigma_rel=0\.29 .* sigma_rel ≤ 0\.2886"),
        (methods.power_ema, {"sigma_rel": NAN}, ValueError, r"^sigma_rel=nan .* sigma_rel ≤ 0\.2886"),
        (methods.easgd, {}, ValueError, "exactly one of alpha, rho; got none"),
        (methods.easgd, {"alpha": 0.1, "rho": 0.1}, ValueError, r"exactly one of alpha, rho; got alpha=0\.1, rho=0\.1"),
        (methods.easgd, {"alpha": 1.0}, ValueError, r"^alpha=1\.0 .* " + UNIT.format("alpha")),
        (methods.easgd, {"alpha": NAN}, ValueError, "^alpha=nan .* " + UNIT.format("alpha")),
        (methods.easgd, {"rho": 0.0}, ValueError, r"^rho=0\.0 .* needs rho > 0, finite"),
        (methods.easgd, {"rho": NAN}, ValueError, "^rho=nan .* needs rho > 0, finite"),
        (methods.easgd, {"alpha": 0.1, "every": 0}, ValueError, "^every=0 .* needs every ≥ 1"),
        (methods.diloco, {"every": 0}, ValueError, "^every=0 .* needs every ≥ 1"),
        (methods.diloco, {"every": 2.0}, TypeError, r"^every=2\.0 .* give an int"),
        (methods.diloco, {"lr": 0.0}, ValueError, r"^lr=0\.0 .* needs lr > 0"),
        (methods.diloco, {"lr": NAN}, ValueError, "^lr=nan .* needs lr > 0"),
        (methods.diloco, {"momentum": 1.0}, ValueError, r"^momentum=1\.0 .* " + FROM_0.format("momentum")),
        (methods.diloco, {"lr": 1.4}, ValueError, r"^lr=1\.4 with momentum=0\.9 is unstable.*use lr < 1\.357"),
        (methods.lookahead, {"k": 0}, ValueError, "^k=0 .* needs k ≥ 1"),
        (methods.lookahead, {"k": 5.0}, TypeError, r"^k=5\.0 .* give an int"),
        (methods.lookahead, {"alpha": 0.0}, ValueError, r"^alpha=0\.0 .* needs alpha > 0"),
        (methods.lookahead, {"alpha": 1.1}, ValueError, r"^alpha=1\.1 .* needs alpha > 0"),
        (methods.lookahead, {"alpha": NAN}, ValueError, "^alpha=nan .* needs alpha > 0"),
        (methods.switch_ema, {"decay": 1.0, "every": 5}, ValueError, r"^decay=1\.0 .* " + UNIT.format("decay")),
        (methods.switch_ema, {"decay": NAN, "every": 5}, ValueError, "^decay=nan .* " + UNIT.format("decay")),
        (methods.switch_ema, {"decay": 0.9, "every": 0}, ValueError, "^every=0 .* needs every ≥ 1"),
        (methods.heavy_ball, {"momentum": 1.0}, ValueError, r"^momentum=1\.0 .* " + FROM_0.format("momentum")),
        (methods.heavy_ball, {"momentum": -0.1}, ValueError, r"^momentum=-0\.1 .* " + FROM_0.format("momentum")),
        (methods.nesterov, {"momentum": NAN}, ValueError, "^momentum=nan .* " + FROM_0.format("momentum")),
        (methods.primal_averaging, {"mu_x": 1.0, "mu_y": 0.5}, ValueError, r"^mu_x=1\.0 .* " + FROM_0.format("mu_x")),
        (methods.primal_averaging, {"mu_x": 0.5, "mu_y": NAN}, ValueError, "^mu_y=nan .* " + FROM_0.format("mu_y")),
        (methods.schedule_free, {"beta": 1.0}, ValueError, r"^beta=1\.0 .* " + FROM_0.format("beta")),
        (methods.schedule_free, {"beta": NAN}, ValueError, "^beta=nan .* " + FROM_0.format("beta")),
        (methods.schedule_free, {"r": -1.0}, ValueError, r"^r=-1\.0 .* needs r ≥ 0, finite"),
        (
            methods.schedule_free,
            {"weight_lr_power": NAN},
            ValueError,
            "^weight_lr_power=nan .* needs weight_lr_power ≥ 0",
        ),
        (methods.centred, {"theta": -1.0, "rate": 0.1}, ValueError, r"^theta=-1\.0 .* needs theta > -1, finite"),
        (methods.centred, {"theta": NAN, "rate": 0.1}, ValueError, "^theta=nan .* needs theta > -1, finite"),
        (methods.centred, {"theta": INF, "rate": 0.1}, ValueError, "^theta=inf .* needs theta > -1, finite"),
        (methods.centred, {"theta": 0.0, "rate": 1.0}, ValueError, r"^rate=1\.0 .* " + UNIT.format("rate")),
        (methods.centred, {"theta": 0.0, "rate": NAN}, ValueError, "^rate=nan .* " + UNIT.format("rate")),
        (
            methods.centred,
            {"theta": 0.0, "rate": 0.1, "follow": ""},
            ValueError,
            "^follow='' .* one of 'before', 'after'",
        ),
        (methods.centred, {"theta": linear(0, -1, 9), "rate": 0.1}, ValueError, r"^theta=linear.* at step 9: theta=-1"),
        (methods.centred, {"theta": linear, "rate": 0.1}, TypeError, "^theta=linear was not called"),
        (
            methods.centred,
            {"theta": 0.0, "rate": linear(0.1, 0.0, 9)},
            ValueError,
            r"^rate=linear.* at step 9: rate=0\.0 is out of range; it needs rate > 0 and rate ≤ 1",
        ),
        (methods.ema_nesterov, {"beta": 1.0, "gamma": 0.9}, ValueError, r"^beta=1\.0 .* " + FROM_0.format("beta")),
        (methods.ema_nesterov, {"beta": linear(0, 1, 9), "gamma": 0.9}, ValueError, "^beta=linear.* at step 9: beta=1"),
        (methods.ema_nesterov, {"beta": 0.5, "gamma": 1.0}, ValueError, r"^gamma=1\.0 .* " + FROM_0.format("gamma")),
        (methods.ema_nesterov, {"beta": 0.5, "gamma": linear}, TypeError, "^gamma=<class .* is not a number"),
        (methods.hard_sync, {"every": 0}, ValueError, "^every=0 .* needs every ≥ 1"),
        (methods.hard_sync, {"every": 2.0}, TypeError, r"^every=2\.0 is not a whole number; give an int"),
        (methods.belay, {"k": NAN}, ValueError, "^k=nan .* needs k > 0"),
        (methods.belay, {"m1": 0.1}, ValueError, "^κ1 .* m1=0\\.1.* use m1 > 0\\.5"),
    ],
    ids=lambda x: repr(x) if isinstance(x, dict) else getattr(x, "__name__", ""),
)
def test_refused(make: Callable[..., Any], bad: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**bad)


def test_easgd_refuses_a_learning_rate_that_makes_it_jump() -> None:
    method = methods.easgd(rho=10.0)
    assert method.coupling(1, 0.0999).a == pytest.approx(0.999)
    with pytest.raises(ValueError, match=r"^rho=10\.0 at lr=0\.1 makes α = lr·rho = 1, and 0 ≤ α < 1 is needed"):
        method.coupling(1, 0.1)

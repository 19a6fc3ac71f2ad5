"""Warm-ups are recognised from the rates alone: each law by its own formula, with limits, delays and rounding."""

import math
import random

import pytest

from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.testing.warmup import Warmup, recognise


def of(rates: list[float]) -> Warmup:
    return recognise([watch(rate) for rate in rates])


def each(rate, steps: int = 120) -> Warmup:  # type: ignore[no-untyped-def]
    return of([rate(t) for t in range(1, steps + 1)])


@pytest.mark.parametrize("decay", [0.0001, 0.3, 0.5, 0.9, 0.999, 0.99999])
def test_a_constant_decay_is_no_warm_up(decay: float) -> None:
    found = each(lambda t: 1 - decay)
    assert (found.law, found.copies, found.ignored, found.every) == ("none", 0, 0, 1)
    assert found.decay == pytest.approx(decay, abs=1e-12)


@pytest.mark.parametrize("begin", [-3, 0, 1, 40])
@pytest.mark.parametrize("decay", [0.6, 0.9999])
def test_the_ratio_is_told_from_wherever_it_counts(begin: int, decay: float) -> None:
    found = each(lambda t: 0.0 if t < begin else 1.0 if t == begin else max(1 - decay, 9 / (10 + t - begin)))
    assert (found.law, found.numbers) == ("ratio", {"from": begin})
    assert found.decay == (decay if decay == 0.6 else None)


def test_a_ratio_of_two_updates_is_enough() -> None:
    found = each(lambda t: max(0.7, 9 / (10 + t)))
    assert (found.law, found.decay) == ("ratio", 0.3)


@pytest.mark.parametrize("power", [0.5, 2 / 3, 0.75, 2.0])
@pytest.mark.parametrize("inv_gamma", [0.5, 1.0, 10.0])
@pytest.mark.parametrize("begin", [0, 7])
def test_the_inverse_power_is_told_with_its_numbers(power: float, inv_gamma: float, begin: int) -> None:
    found = each(lambda t: 1.0 if t <= begin else (1 + (t - begin) / inv_gamma) ** -power)
    assert found.law == "inverse-power"
    assert found.numbers == pytest.approx({"power": power, "inv_gamma": inv_gamma, "from": begin}, abs=0.02)
    assert found.copies == begin


@pytest.mark.parametrize("least", [0.5, 0.7])
def test_the_inverse_power_is_told_between_a_least_and_a_largest_decay(least: float) -> None:
    found = each(lambda t: min(1 - least, max(0.05, (1 + t) ** (-2 / 3))))
    assert found.law == "inverse-power"
    assert (found.numbers["min_decay"], found.decay) == (least, 0.95)
    assert found.numbers["power"] == pytest.approx(2 / 3, abs=1e-3)


@pytest.mark.parametrize("before", [0, 1, 5])
def test_the_uniform_mean_is_told_with_what_it_counted_before(before: int) -> None:
    found = each(lambda t: 1 / (t + before))
    assert (found.law, found.numbers) == ("mean", {"before": before})


def test_a_mean_that_becomes_an_ema_is_told() -> None:
    found = each(lambda t: max(1 / t, 0.05))
    assert (found.law, found.decay) == ("mean", 0.95)


@pytest.mark.parametrize("gamma", [1.0, 6.94, 16.97])
def test_the_power_function_is_told(gamma: float) -> None:
    method = methods.power_ema(gamma=gamma)
    found = recognise([method.coupling(t, 0.1) for t in range(1, 121)])
    assert (found.law, found.numbers["gamma"]) == ("power", pytest.approx(gamma, abs=1e-5))


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999])
def test_a_correction_for_zeros_is_told(beta: float) -> None:
    found = each(lambda t: (1 - beta) / (1 - beta**t))
    assert (found.law, found.numbers["beta"]) == ("debiased", pytest.approx(beta, abs=1e-6))


def test_a_line_is_told_up_to_its_end() -> None:
    found = each(lambda t: 1 - min(0.99, 0.5 + 0.01 * t))
    assert (found.law, found.decay, found.numbers["slope"]) == ("linear", 0.99, pytest.approx(0.01))


def test_other_schedules_are_shown_as_numbers() -> None:
    found = each(lambda t: 0.002 * (1 + math.cos(math.pi * t / 300)))
    assert (found.law, found.numbers, found.decay) == ("other", {}, None)
    assert found.decays[0] == pytest.approx(0.996, abs=1e-6)
    assert len(found.decays) == 120


@pytest.mark.parametrize("seed", range(20))
def test_random_decays_are_no_law(seed: int) -> None:
    draw = random.Random(seed)
    assert of([draw.uniform(0.01, 0.9) for _ in range(60)]).law == "other"


@pytest.mark.parametrize("law", ["ratio", "inverse-power", "mean"])
def test_decays_that_were_computed_in_float32_are_told_all_the_same(law: str) -> None:
    exact = {"ratio": lambda t: 9 / (10 + t), "inverse-power": lambda t: (1 + t) ** (-2 / 3), "mean": lambda t: 1 / t}
    draw = random.Random(0)
    found = each(lambda t: exact[law](t) if t == 1 else exact[law](t) + draw.uniform(-6e-8, 6e-8))
    assert found.law == law


def test_a_rhythm_is_told_with_what_comes_before_it() -> None:
    found = each(lambda t: 0.1 if t % 4 == 0 else 0.0)
    assert (found.every, found.ignored, found.law, found.decay) == (4, 0, "none", 0.9)
    late = each(lambda t: 0.1 if t > 40 and t % 4 == 1 else 0.0)
    assert (late.every, late.ignored) == (4, 37)
    copied = each(lambda t: 1.0 if t == 1 else 0.1 if t > 30 else 0.0)
    assert (copied.every, copied.ignored, copied.copies) == (1, 29, 1)
    assert each(lambda t: 0.1 if t in (3, 4, 9, 11, 30) else 0.0).every == 0


def test_a_law_of_updates_and_not_of_calls_is_told_too() -> None:
    found = each(lambda t: 0.0 if t % 3 else 9 / (10 + t // 3))
    assert (found.law, found.numbers, found.every) == ("ratio", {"from": 0.0}, 3)


def test_an_average_that_never_moves_has_no_rhythm() -> None:
    found = of([0.0] * 10)
    assert (found.law, found.every, found.ignored, found.decay) == ("none", 0, 10, None)


def test_an_average_that_always_copies_has_decay_0() -> None:
    found = of([1.0] * 10)
    assert (found.law, found.copies, found.decay, found.decays) == ("none", 10, 0.0, ())


def test_the_law_of_an_average_that_pulls_is_not_guessed() -> None:
    found = recognise([Coupling(-0.9 / t, 1 / t, 0.5, 0.1) for t in range(2, 60)])
    assert (found.law, found.numbers) == ("other", {})


@pytest.mark.parametrize("rates", [[0.1], [0.1, 0.2], [1.0], [1.0, 0.1], [0.0, 0.1], [0.5, 0.4, 0.3]])
def test_few_updates_are_no_error(rates: list[float]) -> None:
    assert of(rates).law in ("none", "other")


def test_rates_beyond_1_and_below_0_are_no_error() -> None:
    assert of([1.5, -0.2, 3.0, 0.1, 1.7, -3.0]).law == "other"

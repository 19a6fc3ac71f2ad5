"""Least squares over profiles: the small matrix has the exact inner products, and the solution is the best one."""

import mpmath
import pytest
import torch
from torch import Tensor

import torchbelay as tb
from torchbelay.snapshots.least_squares import (
    Column,
    Life,
    combine,
    combine_powers,
    combine_profiles,
    matrix,
)
from torchbelay.snapshots.profiles import filter_of, point_weights, profile
from torchbelay.snapshots.targets import aim_at, window

STEPS = 300


def lives() -> dict[str, Life]:
    return {
        "power": Life(filter_of(tb.methods.power_ema(sigma_rel=0.05), STEPS), 0),
        "ema, late": Life(filter_of(tb.methods.ema(0.95), STEPS - 70), 70),
        "swa, last": Life(filter_of(tb.methods.swa(), 40), STEPS - 40),
        "velocities": Life(filter_of(tb.Spring(k=1.0, m1=30.0, m2=60.0, c1=5.0, c2=10.0), STEPS), 0),
        "pulled": Life(filter_of(tb.Spring(k=1.0, m1=30.0, m2=60.0), STEPS), 0),
    }


def mixed() -> list[Column]:
    found = [Column(None, step) for step in (0, 1, 33, STEPS)]
    for name, life in lives().items():
        found += [Column(life, step) for step in (60, 70, 71, 150, 290, STEPS)]
        if name == "pulled":
            found += [Column(life, 150, state=1), Column(life, STEPS, state=1)]
    return found


def dense(columns: list[Column], norm: str) -> Tensor:
    """Return the whole profiles, or the weights of all points, as columns."""
    found = []
    for life, step, state in columns:
        p = torch.ones(step, dtype=torch.float64)
        if life is not None:
            p = profile(life.filter, life.born, step, state)
        whole = p if norm == "updates" else point_weights(p)
        found.append(torch.nn.functional.pad(whole, (0, STEPS + (norm == "profile") - len(whole))))
    return torch.stack(found, 1)


@pytest.mark.parametrize("norm", ["updates", "profile"])
def test_the_small_matrix_has_the_inner_products_of_the_profiles(norm: str) -> None:
    columns = mixed()
    small, whole = matrix(columns, norm), dense(columns, norm)
    assert len(small) < len(whole)
    torch.testing.assert_close(small.T @ small, whole.T @ whole, rtol=1e-12, atol=1e-12)


def test_the_best_combination_with_sum_one_is_found() -> None:
    columns = [Column(life, step) for life in list(lives().values())[:2] for step in range(75, STEPS + 1, 25)]
    target = Column(aim_at(window(60), STEPS).life, STEPS)
    small, whole = matrix([*columns, target]), dense([*columns, target], "updates")
    x, condition = combine(small[:, :-1], small[:, -1])
    assert float(x.sum()) == pytest.approx(1.0, abs=1e-12)
    # an independent solution: the last weight is one minus the others
    reference = whole[:, -2:-1]
    others = torch.linalg.lstsq(whole[:, :-2] - reference, whole[:, -1:] - reference).solution[:, 0]
    expected = torch.cat([others, 1 - others.sum()[None]])
    torch.testing.assert_close(x, expected, rtol=1e-7, atol=1e-9)
    assert 1 < condition < 1e6


def test_snapshots_with_equal_profiles_share_their_weight() -> None:
    life = lives()["power"]
    small = matrix([Column(life, 100), Column(life, 100), Column(life, STEPS), Column(life, STEPS)])
    x, condition = combine(small[:, :3], small[:, 3])
    torch.testing.assert_close(x, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-12)
    assert condition < 1e6
    x, _ = combine(small[:, :2], small[:, 3])
    torch.testing.assert_close(x, torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_profiles_that_differ_by_rounding_errors_share_their_weight() -> None:
    """Else the weights would be 1e14 and −1e14; whether equal profiles come out equal depends on the processor."""
    life = lives()["power"]
    small = matrix([Column(life, 100), Column(life, 100), Column(life, STEPS)])
    small[:, 1] *= 1 + 1e-15 * torch.linspace(-1, 1, len(small), dtype=torch.float64)
    assert not torch.equal(small[:, 0], small[:, 1])
    x, condition = combine(small[:, :2], small[:, 2])
    torch.testing.assert_close(x, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert condition == 1.0


def test_one_snapshot_has_the_weight_one() -> None:
    life = lives()["power"]
    small = matrix([Column(life, 100), Column(life, 200)])
    assert combine(small[:, :1], small[:, 1]).weights.tolist() == [1.0]


def edm2(times: list[float], gammas: list[float], t: float, gamma: float) -> list[float]:
    """Return the weights of the paper's Algorithm 3, in 50 digits, by integrals of products of monomials."""
    with mpmath.workdps(50):
        n = len(times)

        def product(i: int, tb_: float, gb: float) -> mpmath.mpf:
            ta, ga, tb_, gb = map(mpmath.mpf, (times[i], gammas[i], tb_, gb))
            upper = min(ta, tb_)  # ∫ τ^(γa+γb) dτ from 0 to the smaller time
            area = upper ** (ga + gb + 1) / (ga + gb + 1)
            return (ga + 1) * (gb + 1) * area / (ta ** (ga + 1) * tb_ ** (gb + 1))

        a = mpmath.matrix([[product(i, times[j], gammas[j]) for j in range(n)] for i in range(n)])
        b = mpmath.matrix([product(i, t, gamma) for i in range(n)])
        x = mpmath.lu_solve(a, b)
        total = mpmath.fsum(x)
        return [float(each / total) for each in x]


@pytest.mark.parametrize("sigma", [0.04, 0.075, 0.10, 0.2])
@pytest.mark.parametrize("count", [2, 8, 16])
def test_power_functions_have_the_published_solution(count: int, sigma: float) -> None:
    times = [4000.0 * (k + 1) / count for k in range(count)] * 2
    gammas = [tb.methods.power_ema(sigma_rel=s).exponent for s in (0.05, 0.10) for _ in range(count)]
    gamma = tb.methods.power_ema(sigma_rel=sigma).exponent
    found = combine_powers(list(zip(times, gammas, strict=True)), (4000.0, gamma))
    assert found.weights.tolist() == pytest.approx(edm2(times, gammas, 4000.0, gamma), abs=1e-9)


def test_many_steps_approach_the_published_solution() -> None:
    """The steps of a run are a staircase under the power function: the finer it is, the closer the weights."""
    errors = []
    for steps in (100, 1000, 10000):
        snapshots, times = [], []
        for sigma in (0.05, 0.10):
            life = Life(filter_of(tb.methods.power_ema(sigma_rel=sigma), steps), 0)
            snapshots += [Column(life, steps * k // 4) for k in range(1, 5)]
            times += [(float(steps * k // 4), tb.methods.power_ema(sigma_rel=sigma).exponent) for k in range(1, 5)]
        target = Column(aim_at(tb.methods.power_ema(sigma_rel=0.08), steps).life, steps)
        small = matrix([*snapshots, target], "profile")
        gamma = tb.methods.power_ema(sigma_rel=0.08).exponent
        difference = combine_profiles(small[:, :-1], small[:, -1]).weights
        difference = difference - combine_powers(times, (float(steps), gamma)).weights
        errors.append(float(difference.abs().max()))
    assert errors[2] < 1e-6
    assert errors[1] < errors[0] / 50
    assert errors[2] < errors[1] / 50


def test_snapshots_that_do_not_cover_the_target_are_refused_in_the_norm_of_profiles() -> None:
    life = lives()["swa, last"]
    early = Column(Life(filter_of(tb.methods.power_ema(gamma=50.0), STEPS), 0), 20)
    small = matrix([early, Column(life, STEPS)], "profile")
    with pytest.raises(ValueError, match="do not cover the target"):
        combine_profiles(small[:, :1], small[:, 1])


@pytest.mark.thorough
def test_a_million_steps_are_a_small_problem() -> None:
    """Whole profiles would be 200 million numbers; what is solved has a few thousand rows."""
    steps, count = 1_000_000, 100
    power = [Life(filter_of(tb.methods.power_ema(sigma_rel=s), steps), 0) for s in (0.05, 0.10)]
    columns = [Column(life, steps * (k + 1) // count) for life in power for k in range(count)]
    target, weights = Column(aim_at(tb.methods.ema(half_life=20_000.0), steps).life, steps), Column(None, steps)
    small = matrix([*columns, target, weights])
    x, _ = combine(small[:, :-2], small[:, -2])
    error = (small[:, :-2] @ x - small[:, -2]).norm() / (small[:, -2] - small[:, -1]).norm()
    assert float(error) < 2e-4
    assert len(small) < 10_000


def test_64_snapshots_of_two_power_functions_rebuild_the_mean_of_1000_steps() -> None:
    steps = 4000
    power = [Life(filter_of(tb.methods.power_ema(sigma_rel=s), steps), 0) for s in (0.05, 0.10)]
    columns = [Column(life, 125 * k) for life in power for k in range(1, 33)]
    small = matrix([*columns, Column(aim_at(window(1000), steps).life, steps), Column(None, steps)])
    x, condition = combine(small[:, :-2], small[:, -2])
    error = float((small[:, :-2] @ x - small[:, -2]).norm() / (small[:, -2] - small[:, -1]).norm())
    assert error == pytest.approx(1.87e-4, rel=0.01)
    assert condition < 1e4
    assert float(x.norm()) < 2  # no large weights that cancel: rounding errors of snapshots are not blown up

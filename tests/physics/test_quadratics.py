"""Exact moments on noisy quadratics, against the same moments step by step in numpy."""

import math

import numpy as np
import pytest

from helpers.quadratic import kick, step_matrix
from torchbelay import Coupling, methods
from torchbelay.physics.quadratics import Direction, Quadratic, typical

PROBLEM = Quadratic.of([3.0, 0.5, 0.02], counts=[1, 2, 50], start=2.0, noise=0.3, batch=4)


def step_by_step(problem: Quadratic, couplings: list[Coupling], lr: float, beta: float = 0.0) -> tuple[float, float]:
    """Bias and noise of w2, one step after the other."""
    bias = noise = 0.0
    for h, n, start, variance in problem.directions:
        mean, moments = np.array([1.0, 1.0, 0.0]), np.zeros((3, 3))
        for coupling in couplings:
            m, push = step_matrix(coupling, lr * h, beta), kick(coupling, beta)
            mean, moments = m @ mean, m @ moments @ m.T + np.outer(push, push)
        bias += n * h * start * mean[1] ** 2 / 2
        noise += n * h * variance * lr**2 * moments[1, 1] / 2
    return bias, noise


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("theta", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 77, 256])
def test_the_loss_after_a_run_is_exact(theta: float, beta: float, steps: int) -> None:
    coupling = methods.centred(theta, 0.05).coupling(1, 0.1)
    found = PROBLEM.loss(coupling, 0.3, steps, momentum=beta)
    assert found == pytest.approx(step_by_step(PROBLEM, [coupling] * steps, 0.3, beta), rel=1e-9)
    assert found.total == found.bias + found.noise


@pytest.mark.parametrize("steps", [1, 2, 40, 700])
def test_the_loss_of_schedule_free_averaging_is_nearly_exact(steps: int) -> None:
    method = methods.schedule_free(0.9)
    couplings = [method.coupling(t, 0.5) for t in range(1, steps + 1)]
    expected = step_by_step(PROBLEM, couplings, 0.5)
    assert PROBLEM.loss_free(0.9, 0.5, steps) == pytest.approx(expected, rel=0.01 if steps > 16 else 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_on_random_spectra_schedule_free_averaging_is_exact_to_3_percent_if_most_is_noise(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, steps = int(random.integers(1, 6)), int(10 ** random.uniform(1.3, 3))
    problem = Quadratic.of(
        (10 ** random.uniform(-4, 1, count)).tolist(),
        counts=random.integers(1, 100, count).tolist(),
        start=float(10 ** random.uniform(-1, 1)),
        noise=float(10 ** random.uniform(-1, 1)),
        batch=32,
    )
    lr = 2 / problem.largest * float(10 ** random.uniform(-2, 0))
    bias, noise = step_by_step(problem, [methods.schedule_free(0.9).coupling(t, lr) for t in range(1, steps + 1)], lr)
    found = problem.loss_free(0.9, lr, steps)
    assert found.bias + found.noise == pytest.approx(bias + noise, rel=0.03 if noise > bias else 0.1)


def test_a_simulation_has_this_loss() -> None:
    random, coupling, lr = np.random.default_rng(1), methods.centred(-0.4, 0.1).coupling(1, 0.1), 0.4
    losses = np.zeros(20_000)
    for h, n, start, variance in PROBLEM.directions:
        w1 = w2 = np.full(losses.shape, math.sqrt(start))
        for _ in range(30):
            u = -lr * (h * w1 + math.sqrt(variance) * random.standard_normal(losses.shape))
            w1, w2 = w1 + coupling.a * (w2 - w1) + coupling.p * u, w2 + coupling.b * (w1 - w2) + coupling.q * u
        losses += n * h * w2**2 / 2
    assert losses.mean() == pytest.approx(PROBLEM.loss(coupling, lr, 30).total, rel=0.03)


def test_the_start_and_the_noise_are_those_asked_for() -> None:
    assert PROBLEM.start == pytest.approx(2.0)
    assert [each.noise for each in PROBLEM.directions] == pytest.approx([0.3 * h / 4 for h in (3.0, 0.5, 0.02)])
    assert PROBLEM.largest == 3.0
    assert typical(start=3.0).start == pytest.approx(3.0)
    assert typical().largest == 1.0


def test_merging_keeps_start_noise_and_the_largest_curvature() -> None:
    random = np.random.default_rng(2)
    many = Quadratic.of((10 ** random.uniform(-4, 0, 60)).tolist(), noise=0.1)
    few = many.merged(10)
    assert len(few.directions) <= 10
    assert few.largest == many.largest
    assert few.start == pytest.approx(many.start)
    assert sum(d.number for d in few.directions) == pytest.approx(60)
    coupling = methods.ema(0.99).coupling(1, 0.1)
    ours, theirs = (each.loss(coupling, 0.5 / many.largest, 1000).total for each in (few, many))
    assert ours == pytest.approx(theirs, rel=0.1)
    assert many.merged(60) is many


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_an_unstable_rate_has_an_infinite_loss(beta: float) -> None:
    ema = methods.ema(0.9).coupling(1, 0.1)
    limit = ema.max_stable_lr(3.0, momentum=beta)
    assert PROBLEM.loss(ema, limit, 10, momentum=beta).total == math.inf
    assert PROBLEM.loss(ema, 0.99 * limit, 10, momentum=beta).total < math.inf
    assert PROBLEM.loss_free(0.9, 100.0, 50).total == math.inf


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"curvatures": []}, r"^curvatures=\[\] has no curvature"),
        ({"curvatures": 1.0}, "^curvatures=1.0 has no curvature"),
        ({"curvatures": np.array(1.0)}, r"^curvatures=array\(1.\) has no curvature; give a list"),
        ({"curvatures": b"12"}, "^curvatures=b'12' has no curvature"),
        ({"curvatures": [1.0, 0.0]}, "^curvatures=0.0 .* needs curvatures > 0"),
        ({"counts": [1.0, 2.0]}, "^counts has 2 numbers for 1 curvatures"),
        ({"noise": -1.0}, "^noise=-1.0 "),
        ({"batch": 0.0}, "^batch=0.0 "),
        ({"start": 0.0, "noise": 0.0}, "^start=0 and noise=0 leave nothing"),
    ],
    ids=str,
)
def test_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quadratic.of(**{"curvatures": [1.0]} | bad)  # type: ignore[arg-type]


def test_curvatures_may_come_one_by_one() -> None:
    assert Quadratic.of(h for h in (1.0, 0.5)) == Quadratic.of([1.0, 0.5])  # type: ignore[arg-type]


def test_directions_are_tuples() -> None:
    assert Direction(1.0, 2.0, 3.0, 4.0) == (1.0, 2.0, 3.0, 4.0)


def test_before_the_first_step_the_loss_is_that_of_the_start() -> None:
    problem, ema = Quadratic.of([1.0, 0.1], noise=0.01), Coupling(0.0, 0.5, 1.0, 0.5)
    assert problem.loss(ema, 0.5, 0) == problem.loss_free(0.9, 0.5, 0) == (problem.start, 0.0)


@pytest.mark.parametrize(
    ("lr", "steps", "error", "message"),
    [
        (0.5, -5, ValueError, "steps=-5 is too small"),
        (0.5, 2.5, TypeError, "steps=2.5 is not a whole number"),
        (float("nan"), 3, ValueError, "lr=nan is out of range"),
        (-0.5, 3, ValueError, "lr=-0.5 is out of range"),
    ],
)
def test_a_loss_after_no_number_of_steps_or_at_no_rate_is_refused(
    lr: float, steps: int, error: type[Exception], message: str
) -> None:
    problem = Quadratic.of([1.0, 0.1], noise=0.01)
    for ask in (
        lambda: problem.loss(Coupling(0.0, 0.5, 1.0, 0.5), lr, steps),
        lambda: problem.loss_free(0.9, lr, steps),
    ):
        with pytest.raises(error, match=message):
            ask()

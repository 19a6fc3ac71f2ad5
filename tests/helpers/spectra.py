"""Random quadratics, and the best of a grid of settings on each, by numpy: to judge advice that never saw them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from torchbelay.physics.quadratics import Quadratic

THETAS = (-0.9, -0.75, -0.6, -0.45, -0.3, -0.15, 0.0, 0.5)


class Case(NamedTuple):
    """A random problem."""

    curvatures: list[float]
    steps: int
    noise: float
    beta1: float

    @property
    def problem(self) -> Quadratic:
        """The problem as the library has it."""
        return Quadratic.of(self.curvatures, noise=self.noise)

    @property
    def limit(self) -> float:
        """The largest stable learning rate of an EMA."""
        return 2 * (1 + self.beta1) / (1 - self.beta1) / max(self.curvatures)


def random_cases(seed: int, count: int) -> Iterator[Case]:
    """Yield problems of any size, condition, noise and length."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        size, condition, bend = int(random.integers(3, 16)), 10 ** random.uniform(1, 5), random.uniform(0.3, 3)
        curvatures = condition ** -(random.uniform(0, 1, size) ** bend) * 10 ** random.uniform(-2, 2)
        steps, noise = int(random.integers(200, 3000)), 10 ** random.uniform(-3, 1)
        yield Case(curvatures.tolist(), steps, float(noise), (0.0, 0.9)[random.integers(2)])


def losses(case: Case, theta: object, rate: object, lr: object) -> np.ndarray:
    """Return the expected loss of the average for each (θ, c, η); infinite if it grows."""
    theta, c, lr = (np.asarray(each, float) for each in (theta, rate, lr))
    b, p, new, beta = c / (1 + theta), 1 + theta * (1 - c), 1 - case.beta1, case.beta1
    a, found = theta * b, np.zeros(theta.shape)
    with np.errstate(all="ignore"):
        for h, n, start, variance in case.problem.directions:
            mean = np.stack([new * lr * h, 0 * b, beta + 0 * b], -1)
            w1 = np.stack([1 - a, a, 0 * a], -1) - p[..., None] * mean
            w2 = np.stack([b, 1 - b, 0 * a], -1) - c[..., None] * mean
            m = np.stack([w1, w2, mean], -2)
            kick = new * np.stack([-p, -c, 1 + 0 * c], -1)
            noise = kick[..., None] * kick[..., None, :]
            power, moments = m, noise
            for bit in f"{case.steps:b}"[1:]:
                moments, power = moments + power @ moments @ power.swapaxes(-1, -2), power @ power
                if bit == "1":
                    moments, power = noise + m @ moments @ m.swapaxes(-1, -2), m @ power
            left = power[..., 1, 0] + power[..., 1, 1]
            found = found + n * h * (start * left**2 + variance * lr**2 * moments[..., 1, 1]) / 2
    return np.where(np.isfinite(found), found, np.inf)


def smooth_losses(case: Case, theta: object, rate: object, lr: object) -> np.ndarray:
    """Return the mean of the losses at seven learning rates within 15% of each: no single rate may be a lucky one."""
    factors = np.geomspace(1 / 1.15, 1.15, 7)
    return sum(losses(case, theta, rate, np.asarray(lr, float) * each) for each in factors) / 7


def best_smooth_of_grid(case: Case, clear: float) -> float:
    """Return the least smooth loss over θ above a share of its floor and wide ranges of both rates."""
    rates = np.geomspace(0.1, min(400, case.steps / 2), 24) / case.steps
    lrs = np.geomspace(0.3 / case.steps / max(case.curvatures), 0.9 * case.limit, 48)
    thetas = (*THETAS, -0.675, -0.525, -0.375, -0.2)
    grid = np.meshgrid(thetas, np.minimum(rates, 0.5), lrs, indexing="ij")
    floor = -(1 - case.beta1) / (1 - case.beta1 * (1 - grid[1]))
    return float(np.where(grid[0] >= clear * floor, smooth_losses(case, *grid), np.inf).min())


def best_of_grid(case: Case, thetas: tuple[float, ...] = THETAS, clear: float = 1.0) -> float:
    """Return the least loss over θ above a share of its floor, 10 averaging rates and 19 learning rates."""
    rates = np.geomspace(0.7, 40, 10) / case.steps
    lrs = case.limit * 2.0 ** np.arange(-8, 3.01, 0.6)
    grid = np.meshgrid(thetas, np.minimum(rates, 0.5), lrs, indexing="ij")
    floor = -(1 - case.beta1) / (1 - case.beta1 * (1 - grid[1]))
    return float(np.where(grid[0] >= clear * floor, losses(case, *grid), np.inf).min())

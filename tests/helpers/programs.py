"""Each method as a program of its own, as its paper writes it."""

from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from helpers.problems import f64
from helpers.side_by_side import Program, Update


def belay_program(k: float, m1: float, m2: float, *, follow: str = "before") -> Program:
    """Algorithm 1 without velocities."""
    alpha, beta = 1 - k / (2 * m1), 1 - k / (2 * m2)

    def run(w1: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = w1
        for t in count(1):
            stepped = w1 + update(w1, t)
            target = w1 if follow == "before" else stepped
            w1, w2 = alpha * stepped + (1 - alpha) * w2, beta * w2 + (1 - beta) * target
            yield w1, w2

    return run


def swinging_program(k: float, m1: float, m2: float, c1: float, c2: float, force: str) -> Program:
    """Algorithm 1 with both velocities, as printed, but for the force if asked."""
    alpha, beta = 1 - k / (2 * m1), 1 - k / (2 * m2)
    scale = 2 * alpha if force == "derived" else 1 / (2 * alpha)

    def run(w1: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        w2, v1, v2 = w1, torch.zeros_like(w1), torch.zeros_like(w1)
        for t in count(1):
            u = update(w1, t)
            w1, w2, v1, v2 = (
                alpha * (w1 + u) + (1 - alpha) * w2 + (1 - c1 / (2 * m1)) * v1,
                beta * w2 + (1 - beta) * w1 + (1 - c2 / (2 * m2)) * v2,
                v1 + (k / m1) * (w2 - w1) - (c1 / m1) * v1 + scale * u,
                v2 + (k / m2) * (w1 - w2) - (c2 / m2) * v2,
            )
            yield w1, w2

    return run


def centre_of_mass_program(k: float, m1: float, m2: float) -> Program:
    """What BELAY comes to: a lagged EMA of z, gradients taken beyond z by θ. No w1 is kept, it is read off."""
    kappa1, kappa2 = k / (2 * m1), k / (2 * m2)
    return extrapolating_program(m2 / m1, kappa1 + kappa2, scale=(1 - kappa1) * m1 / (m1 + m2), follow="before")


def extrapolating_program(theta: float, rate: float, *, scale: float = 1.0, follow: str = "after") -> Program:
    """z' = z + r·u(w1), w2 an EMA of z (of the z before the step, or after it), w1 = z + θ·(z − w2)."""

    def run(z: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = z
        for t in count(1):
            moved = z + scale * update(z + theta * (z - w2), t)
            w2 = (1 - rate) * w2 + rate * (z if follow == "before" else moved)
            z = moved
            yield z + theta * (z - w2), w2

    return run


def anchored_program(
    theta_at: Callable[[int], float], rate_at: Callable[[int], float], *, follow: str = "after"
) -> Program:
    """z is stepped, w2 an EMA of z at a moving rate; step t takes its gradient at z + θ_t·(z − w2), θ_t moving too."""

    def run(z: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = z
        for t in count(1):
            ahead = z + theta_at(t) * (z - w2)
            moved = z + update(ahead, t)
            w2 = w2 + rate_at(t) * ((z if follow == "before" else moved) - w2)
            z = moved
            yield z + theta_at(t + 1) * (z - w2), w2  # where the next gradient will be taken

    return run


def ema_nesterov_program(beta_at: Callable[[int], float], gamma: float) -> Program:
    """The authors' θ and m: θ' = θ + βm stepped, m' = γm + (1−γ)(θ' − θ); and, apart from them, an EMA of the θs."""

    def run(theta: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        m, average = torch.zeros_like(theta), theta
        for t in count(1):
            ahead = theta + beta_at(t) * m
            stepped = ahead + update(ahead, t)
            m = gamma * m + (1 - gamma) * (stepped - theta)
            theta = stepped
            average = gamma * average + (1 - gamma) * theta
            yield theta + beta_at(t + 1) * m, average

    return run


def hard_sync_program(every: int) -> Program:
    """A target network that is loaded with the weights after every N-th step."""

    def run(w: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        target = w
        for t in count(1):
            w = w + update(w, t)
            if t % every == 0:
                target = w
            yield w, target

    return run


def average_program(decay_at: Callable[[int], float], *, lag: bool = False) -> Program:
    """An average of the weights with this decay at step t; if it lags, of those from before the step."""

    def run(w: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        average = w
        for t in count(1):
            stepped = w + update(w, t)
            d = decay_at(t)
            average = d * average + (1 - d) * (w if lag else stepped)
            w = stepped
            yield w, average

    return run


def weighted_program(weight_of: Callable[[int, int], float], *, every: int = 1) -> Program:
    """The average as an explicit sum over all weights so far: step s of t has weight_of(s, t), nothing recursive."""

    def run(w: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        history, average = [], w
        for t in count(1):
            w = w + update(w, t)
            history.append(w)
            if t % every == 0:
                weights = torch.tensor([weight_of(s, t) for s in range(1, t + 1)], dtype=f64)
                average = (weights / weights.sum()) @ torch.stack(history)
            yield w, average

    return run


def lookahead_program(k: int, alpha: float) -> Program:
    def run(slow: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        t = 0
        while True:
            fast = slow
            for inner in range(k):
                t += 1
                fast = fast + update(fast, t)
                if inner < k - 1:
                    yield fast, slow
            slow = slow + alpha * (fast - slow)
            yield slow, slow

    return run


def switch_ema_program(decay: float, every: int) -> Program:
    def run(w: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        average = w
        for t in count(1):
            w = w + update(w, t)
            average = decay * average + (1 - decay) * w
            if t % every == 0:
                w = average
            yield w, average

    return run


def diloco_program(every: int, lr: float, momentum: float) -> Program:
    """Nesterov's momentum as torch's SGD has it: the gradient of a round is where it began less where it ended."""

    def run(outer: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        inner, buffer = outer, torch.zeros_like(outer)
        for t in count(1):
            inner = inner + update(inner, t)
            if t % every == 0:
                gradient = outer - inner
                buffer = momentum * buffer + gradient
                inner = outer = outer - lr * (gradient + momentum * buffer)
            yield inner, outer

    return run


def easgd_program(alpha_at: Callable[[int], float]) -> Program:
    """One worker x and the centre: both move by α of their difference, from where they were."""

    def run(x: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        centre = x
        for t in count(1):
            pull = alpha_at(t) * (x - centre)
            x, centre = x + update(x, t) - pull, centre + pull
            yield x, centre

    return run


def primal_averaging_program(mu_x: float, mu_y: float) -> Program:
    def run(z: Tensor, update: Update) -> Iterator[tuple[Tensor, Tensor]]:
        x = y = z
        for t in count(1):
            z = z + update(y, t)
            x = mu_x * x + (1 - mu_x) * z
            y = mu_y * x + (1 - mu_y) * z
            yield y, x

    return run


def power_weight(gamma: float) -> Callable[[int, int], float]:
    """∫ τ^γ dτ from s − 1 to s: the part of step s in an average over time that weighs the time τ by τ^γ."""
    return lambda s, t: s ** (gamma + 1) - (s - 1) ** (gamma + 1)

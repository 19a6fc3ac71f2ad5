"""Independent programs for the methods of the coupling table, in their own variables and without couplings.

A program takes gradient steps on Rosenbrock's function and averages as its source does: torch's optimizers and
averages, the schedulefree package, or a few lines written from the method's definition.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

from torchbelay.lab.arms import PAPER_SPRING
from torchbelay.physics import methods
from torchbelay.physics.method import Method
from torchbelay.physics.spring import Spring

from .functions import ROSENBROCK, Function

LR = 1e-3  # stable for all of them on Rosenbrock's function, momentum 0.9 included
DECAY = 0.95
MOMENTUM = 0.9

Program = Callable[[Tensor], Iterator[tuple[Tensor, Tensor | None]]]  # yields (w1, w2 or None) without end


def gradient(w: Tensor, function: Function = ROSENBROCK) -> Tensor:
    """Return the gradient at points whose last dimension is (x, y)."""
    out = torch.empty_like(w)
    function.gradient_(w, out=out)
    return out


def _step(w: Tensor) -> Tensor:
    """Take one step of gradient descent."""
    return w - LR * gradient(w)


def _belay(k: float, m1: float, m2: float, follow: str = "before") -> Program:
    """Algorithm 1 without velocities."""
    alpha, beta = 1 - k / (2 * m1), 1 - k / (2 * m2)

    def run(w1: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = w1
        while True:
            stepped = _step(w1)
            target = w1 if follow == "before" else stepped
            w1, w2 = alpha * stepped + (1 - alpha) * w2, beta * w2 + (1 - beta) * target
            yield w1, w2

    return run


def centre_of_mass(k: float, m1: float, m2: float) -> Program:
    """BELAY in another form: a lagged EMA of the centre of mass z, with gradients taken beyond z, away from the EMA."""
    share, rate, theta = (1 - k / (2 * m1)) * m1 / (m1 + m2), k / 2 * (1 / m1 + 1 / m2), m2 / m1

    def run(z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        w2 = z
        while True:
            moved = z - share * LR * gradient(z + theta * (z - w2))
            w2 = (1 - rate) * w2 + rate * z
            z = moved
            yield z + theta * (z - w2), w2

    return run


def quasi_hyperbolic(beta: float, nu: float, lr: float) -> Program:
    """Momentum as Ma and Yarats generalise it (2018): v is an EMA of gradients, ν the share of v in the step.

    ν = 0 is plain descent, ν = 1 is torch's momentum (at lr·(1 − β)).
    """

    def run(w: Tensor) -> Iterator[tuple[Tensor, None]]:
        v = torch.zeros_like(w)
        while True:
            g = gradient(w)
            v = beta * v + (1 - beta) * g
            w = w - lr * ((1 - nu) * g + nu * v)
            yield w, None

    return run


def _torch_sgd(**options: Any) -> Program:
    """SGD of torch."""

    def run(w: Tensor) -> Iterator[tuple[Tensor, None]]:
        parameter = nn.Parameter(w.clone())
        optimizer = torch.optim.SGD([parameter], lr=LR, **options)
        while True:
            parameter.grad = gradient(parameter.detach())
            optimizer.step()
            yield parameter.detach().clone(), None

    return run


def _torch_average(*, copies: bool, **options: Any) -> Program:
    """The averaged model of torch; with `copies`, a first update copies the start."""

    def run(w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        model = nn.ParameterList([nn.Parameter(w.clone())])
        averaged = AveragedModel(model, **options)
        if copies:
            averaged.update_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        while True:
            model[0].grad = gradient(model[0].detach())
            optimizer.step()
            averaged.update_parameters(model)
            yield model[0].detach().clone(), next(averaged.module.parameters()).detach().clone()

    return run


def torch_ema() -> Program:
    """The EMA of torch, Eq. 1; its first update copies the start."""
    return _torch_average(copies=True, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]


def _torch_swa() -> Program:
    """The uniform average of torch."""
    return _torch_average(copies=False, avg_fn=get_swa_avg_fn())  # type: ignore[no-untyped-call]


def _lagged_ema(w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The average of the weights from before each step."""
    average = w
    while True:
        average = DECAY * average + (1 - DECAY) * w
        w = _step(w)
        yield w, average


def _power(gamma: float) -> Program:
    """The mean of all weights so far, as a sum: step s weighs ∫ τ^γ dτ from s − 1 to s."""

    def run(w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        history: list[Tensor] = []
        for t in count(1):
            w = _step(w)
            history.append(w)
            weights = torch.arange(t + 1, dtype=w.dtype).pow(gamma + 1).diff()
            yield w, torch.tensordot(weights / weights.sum(), torch.stack(history), dims=1)

    return run


def _easgd(alpha: float) -> Program:
    """One worker and the centre: both move by α of their distance."""

    def run(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        centre = x
        while True:
            pull = alpha * (x - centre)
            x, centre = _step(x) - pull, centre + pull
            yield x, centre

    return run


def _lookahead(k: int, alpha: float) -> Program:
    """Slow weights, and fast ones that start from them every k steps."""

    def run(slow: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            fast = slow
            for _ in range(k - 1):
                fast = _step(fast)
                yield fast, slow
            slow = slow + alpha * (_step(fast) - slow)
            yield slow, slow

    return run


def _switch_ema(decay: float, every: int) -> Program:
    """An EMA that replaces the weights every `every` steps."""

    def run(w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        average = w
        for t in count(1):
            w = _step(w)
            average = decay * average + (1 - decay) * w
            w = w if t % every else average
            yield w, average

    return run


def _primal_averaging(mu_x: float, mu_y: float) -> Program:
    """Primal averaging: x is an average of z, and gradients are taken at y between the two."""

    def run(z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        x = y = z
        while True:
            z = z - LR * gradient(y)
            x = mu_x * x + (1 - mu_x) * z
            y = mu_y * x + (1 - mu_y) * z
            yield y, x

    return run


def _schedule_free(beta: float) -> Program:
    """Schedule-free SGD at a constant learning rate, from its definition."""

    def run(z: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        x = y = z
        for t in count(1):
            z = z - LR * gradient(y)
            x = (1 - 1 / t) * x + z / t
            y = beta * x + (1 - beta) * z
            yield y, x

    return run


def _schedule_free_package(beta: float, package: Any) -> Program:
    """Schedule-free SGD as its authors publish it."""

    def run(w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        parameter = nn.Parameter(w.clone())
        optimizer = package.SGDScheduleFree([parameter], lr=LR, momentum=beta)
        optimizer.train()
        while True:
            parameter.grad = gradient(parameter.detach())
            optimizer.step()
            y = parameter.detach().clone()
            optimizer.eval()
            x = parameter.detach().clone()
            optimizer.train()
            parameter.data.copy_(y)  # train() and eval() would round it
            yield y, x

    return run


def _schedule_free_program(beta: float) -> tuple[Program, str]:
    """Return the authors' package if it is installed, else the definition; and the name of which."""
    try:
        package = importlib.import_module("schedulefree")
    except ImportError:
        return _schedule_free(beta), "its definition"
    return _schedule_free_package(beta, package), "schedulefree"


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A method of the table, and the program that it is compared with."""

    name: str
    method: Method
    program: Program
    against: str  # the source of the program


def table() -> list[Row]:
    """Return every row of the coupling table."""
    schedule_free, source = _schedule_free_program(MOMENTUM)
    definition = "its definition"
    return [
        Row("BELAY", PAPER_SPRING, _belay(PAPER_SPRING.k, PAPER_SPRING.m1, PAPER_SPRING.m2), "Algorithm 1"),
        Row(
            "BELAY, follow=after",
            Spring(k=PAPER_SPRING.k, m1=PAPER_SPRING.m1, m2=PAPER_SPRING.m2, follow="after"),
            _belay(PAPER_SPRING.k, PAPER_SPRING.m1, PAPER_SPRING.m2, "after"),
            "Algorithm 1, w2 to w1*",
        ),
        Row(
            "EMA",
            Spring.ema(decay=DECAY),
            torch_ema(),
            "torch AveragedModel",
        ),
        Row("EMA, lagged", methods.ema(DECAY, follow="before"), _lagged_ema, definition),
        Row("SWA", methods.swa(), _torch_swa(), "torch AveragedModel"),
        Row("power EMA", methods.power_ema(gamma=6.94), _power(6.94), "the weighted sum"),
        Row("EASGD", methods.easgd(0.1), _easgd(0.1), definition),
        Row("Lookahead", methods.lookahead(k=6, alpha=0.5), _lookahead(6, 0.5), definition),
        Row("Switch EMA", methods.switch_ema(decay=0.9, every=10), _switch_ema(0.9, 10), definition),
        Row("heavy ball", methods.heavy_ball(MOMENTUM), _torch_sgd(momentum=MOMENTUM), "torch SGD"),
        Row("Nesterov", methods.nesterov(MOMENTUM), _torch_sgd(momentum=MOMENTUM, nesterov=True), "torch SGD"),
        Row(
            "primal averaging",
            methods.primal_averaging(mu_x=0.95, mu_y=0.8),
            _primal_averaging(0.95, 0.8),
            definition,
        ),
        Row("schedule-free", methods.schedule_free(MOMENTUM), schedule_free, source),
    ]

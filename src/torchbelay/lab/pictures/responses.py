"""What one update does under each method: the impulse response of weights and average, drawn from the four numbers."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torchbelay.physics import methods
from torchbelay.physics.method import Method

from .svg import BLUE, ORANGE, Axes, Drawing

AT, STEPS = 10, 60  # the step of the update, and the last one that is drawn

# The setting of each method that is drawn: short memories, so that 50 steps show all of it.
EXAMPLES: dict[str, dict[str, float]] = {
    "ema": {"decay": 0.9},
    "swa": {},
    "power_ema": {"gamma": 2},
    "hard_sync": {"every": 25},
    "belay": {"k": 1, "m1": 10, "m2": 20},
    "easgd": {"alpha": 0.05},
    "lookahead": {"k": 6, "alpha": 0.5},
    "switch_ema": {"decay": 0.9, "every": 25},
    "diloco": {"every": 6, "lr": 0.7, "momentum": 0.9},
    "heavy_ball": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9},
    "ema_nesterov": {"beta": 0.5, "gamma": 0.9},
    "schedule_free": {"beta": 0.9},
    "primal_averaging": {"mu_x": 0.9, "mu_y": 0.7},
    "centred": {"theta": -0.5, "rate": 0.1},
}


def example(name: str) -> Method:
    """Return the method of this name with the setting that is drawn."""
    made: Method = getattr(methods, name)(**EXAMPLES[name])
    return made


class Response(NamedTuple):
    """Where weights and average are after each step, from step 0 on."""

    w1: tuple[float, ...]
    w2: tuple[float, ...]


def respond(method: Method, at: int = AT, steps: int = STEPS) -> Response:
    """Return the motion of weights and average that begin at 0, if the only update is one of size 1 at step `at`.

    >>> from torchbelay.physics.methods import ema
    >>> respond(ema(0.5), at=1, steps=3)
    Response(w1=(0.0, 1.0, 1.0, 1.0), w2=(0.0, 0.5, 0.75, 0.875))
    """
    inertia = getattr(method, "inertia2", None)
    w1 = w2 = v = 0.0
    found = [(w1, w2)]
    for step in range(1, steps + 1):
        u = float(step == at)
        a, b, p, q = (getattr(method.coupling(step, 1.0), name) for name in "abpq")
        apart, carried = w2 - w1, 0.0
        if inertia is not None and b:  # a velocity moves at a sync alone
            carried, v = inertia.carry * v, inertia.stay * v - inertia.pull * apart + inertia.push * u
        w1, w2 = w1 + a * apart + p * u + carried, w2 - b * apart + q * u + carried
        found.append((w1, w2))
    return Response(*zip(*found, strict=True))


def drawing(name: str) -> Callable[[], str]:
    """Return the function that draws the response of a method of `EXAMPLES`."""
    return lambda: draw(name)


def draw(name: str) -> str:
    """Return the picture of a method's response: the weights thin and blue, the average thick and orange."""
    response = respond(example(name))
    call = f"{name}({', '.join(f'{key}={value:g}' for key, value in EXAMPLES[name].items())})"
    high = _ceiling(max(response.w1 + response.w2))
    picture = Drawing(
        440,
        190,
        f"{call}: one update of size 1 at step {AT}. After {STEPS - AT} more steps, {response.w1[-1]:.2g} of it is in "
        f"the weights w1 and {response.w2[-1]:.2g} in the average w2.",
    )
    picture.text((44, 18), call, size=12, bold=True)
    picture.line((44, 34), (64, 34), BLUE, 1.4)
    picture.text((69, 38), "w1, the weights", BLUE, size=11)
    picture.line((170, 34), (190, 34), ORANGE, 3.4)
    picture.text((195, 38), "w2, the average", ORANGE, size=11)
    axes = Axes(picture, (44, 50), (380, 104), (0, STEPS), (0, high))
    axes.frame(
        [(step, str(step - AT) if step > AT else "update") for step in range(AT, STEPS + 1, 10)],
        [(value, f"{value:g}") for value in (0, high / 2, high)],
    )
    steps = range(STEPS + 1)
    axes.curve(*_stairs(steps, response.w2), ORANGE, 3.4)
    axes.curve(*_stairs(steps, response.w1), BLUE, 1.4)
    picture.text((424, 188), "steps after the update", size=11, anchor="end")
    return picture.render()


def _ceiling(value: float) -> float:
    """Return the end of a scale for values up to this one: 1, 2 or 5 times a power of ten, or half more."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 1.2, 1.5, 2, 3, 4, 5, 8, 10, 12) if value <= each * power * 1.001)


def _stairs(steps: range, values: tuple[float, ...]) -> tuple[list[float], list[float]]:
    """Return the corners of a stair: a value holds from its step to the next."""
    xs = [float(x) for step in steps[1:] for x in (step, step)]
    ys = [y for before, after in pairwise(values) for y in (before, after)]
    return [0.0, *xs], [values[0], *ys]

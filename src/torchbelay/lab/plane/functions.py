"""The paper's four functions of two variables, each with its minimum at (0, 0) (Figures 1 to 3)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Function:
    """A loss on the plane. `value` and `gradient` take x and y of any shape."""

    name: str
    formula: str
    value: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    curvature: float | None  # the largest at the minimum; None if the function has none
    half_width: float  # of the box around the minimum in which runs start
    goal: float = 1e-2  # a run has arrived if its loss is under this share of the starts' median loss

    def __call__(self, w: Tensor) -> Tensor:
        """Return the loss of points whose last dimension is (x, y)."""
        return self.value(w[..., 0], w[..., 1])

    def gradient_(self, w: Tensor, out: Tensor) -> None:
        """Write the gradient at the points `w` into `out`."""
        out[..., 0], out[..., 1] = self.gradient(w[..., 0], w[..., 1])


# Rosenbrock as printed, (a − x)² + b(x − y²)² with a = 0, b = 100. The textbook's differs (erratum E9): here, at the
# minimum the curvatures are 202 along x and 0 along y, and the valley x = y² is quartic.


def _rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    return x**2 + 100 * (x - y**2) ** 2


def _rosenbrock_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    off = x - y * y
    return 2 * x + 200 * off, -400 * y * off


# Beale, moved by (3, ½) so that its minimum is at the origin: Σ (cᵢ − X + X·Yⁱ)² over i = 1, 2, 3. The paper's
# saddle is at X = 0, Y = 1.

_BEALE = ((1.5, 1), (2.25, 2), (2.625, 3))


def _beale(x: Tensor, y: Tensor) -> Tensor:
    big_x, big_y = x + 3, y + 0.5
    terms = [(c - big_x + big_x * big_y**i) ** 2 for c, i in _BEALE]
    return terms[0] + terms[1] + terms[2]


def _beale_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    big_x, y1 = x + 3, y + 0.5
    y2 = y1 * y1
    y3 = y2 * y1
    r1, r2, r3 = 1.5 - big_x + big_x * y1, 2.25 - big_x + big_x * y2, 2.625 - big_x + big_x * y3
    along_x = 2 * (r1 * (y1 - 1) + r2 * (y2 - 1) + r3 * (y3 - 1))
    return along_x, 2 * big_x * (r1 + 2 * r2 * y1 + 3 * r3 * y2)


def _absolute(x: Tensor, y: Tensor) -> Tensor:
    return x.abs() / 10 + y.abs()


def _absolute_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.sgn() / 10, y.sgn()


def _bowl(x: Tensor, y: Tensor) -> Tensor:
    return ((x + y / 10) ** 2 + (x - y / 10) ** 2) / 10


def _bowl_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return 0.4 * x, 0.004 * y


# Beale's curvatures at (3, ½): the Hessian is JᵀJ·2 with rows (Yⁱ − 1, 3·i·Yⁱ⁻¹) of J.
_BEALE_CURVATURE = 48.97978635347775

ROSENBROCK = Function(
    "Rosenbrock",
    "x² + 100·(x − y²)²",
    _rosenbrock,
    _rosenbrock_gradient,
    curvature=202.0,
    half_width=0.5,
    goal=1e-3,  # the steep direction alone brings nearly every run under 1e-2
)
BEALE = Function(
    "Beale",
    "Σ (cᵢ − X + X·Yⁱ)², X = x + 3, Y = y + ½",
    _beale,
    _beale_gradient,
    curvature=_BEALE_CURVATURE,
    half_width=1.0,
)
ABSOLUTE = Function("absolute", "|x|/10 + |y|", _absolute, _absolute_gradient, curvature=None, half_width=1.0)
BOWL = Function("bowl", "((x + y/10)² + (x − y/10)²)/10", _bowl, _bowl_gradient, curvature=0.4, half_width=1.0)

FUNCTIONS = (ROSENBROCK, BEALE, ABSOLUTE, BOWL)


def find_function(name: str) -> Function:
    """Return the function with the name that a record gives.

    >>> find_function("bowl").formula
    '((x + y/10)² + (x − y/10)²)/10'
    """
    return next(function for function in FUNCTIONS if function.name == name)

"""What theory expects of the part `penalty`, computed by formulas alone before its first run.

θ < 0 is taken to cost loss by the noise that stays in the average. On a quadratic, a direction of curvature h adds
½·h·Var(w2) to the loss, and `Coupling.stationary_variance` gives the variance for any momentum β1 of the optimizer.
The noise of the gradient is taken to be in proportion to the curvature, as near a minimum, and x = lr·h to be spread
evenly over its logarithm, from a thousandth up to a top. The top is not known, so there is one prediction for each of
several. Nor is the strength of the noise known: what is predicted is a share of the penalty, that which is left of the
penalty at the reference, β1 = 0.9 and c = 0.0895.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from torchbelay.lab.records import significant
from torchbelay.physics.methods import centred

THETA = -0.5
BETAS, RATES = (0.9, 0.0), (0.0895, 0.005)
REFERENCE = (0.9, 0.0895)  # β1 and c of the earlier run on CIFAR-10, at which θ = −0.5 had 1.042 times EMA's loss
BOTTOM, TOPS, PRIMARY = 1e-3, (0.1, 0.3, 1.0, 1.9), 1.0  # of x; without momentum, SGD and its EMA are stable below 2
POINTS = 400  # of x per spectrum

Cell = tuple[float, float]  # β1 and c


@dataclass(frozen=True)
class Share:
    """The predicted penalty at a cell, as a share of that at the reference."""

    beta1: float
    rate: float
    share: float  # for the primary top
    low: float  # the least and the largest over all tops
    high: float


def excess(theta: float, cell: Cell, top: float) -> float:
    """Return the loss that noise adds to the average's, up to a factor that is the same for every θ and cell."""
    beta1, rate = cell
    coupling = centred(theta=theta, rate=rate).coupling(1, 1.0)
    xs = (BOTTOM * (top / BOTTOM) ** ((i + 0.5) / POINTS) for i in range(POINTS))
    return math.fsum(
        x * coupling.stationary_variance(x, 1.0, noise=math.sqrt(x), momentum=beta1).w2 / POINTS for x in xs
    )


def penalty(cell: Cell, top: float) -> float:
    """Return what θ = −0.5 adds to EMA's loss, in the same unit."""
    return excess(THETA, cell, top) - excess(0.0, cell, top)


def predict() -> list[Share]:
    """Compute the prediction for every cell.

    >>> [(each.beta1, each.rate, round(each.share, 2)) for each in predict()]
    [(0.9, 0.0895, 1.0), (0.9, 0.005, 0.05), (0.0, 0.0895, 0.26), (0.0, 0.005, 0.04)]
    """
    return list(_predict())


def _predict() -> Iterator[Share]:
    reference = {top: penalty(REFERENCE, top) for top in TOPS}
    for beta1 in BETAS:
        for rate in RATES:
            shares = {top: significant(penalty((beta1, rate), top) / reference[top], 4) for top in TOPS}
            yield Share(beta1, rate, shares[PRIMARY], min(shares.values()), max(shares.values()))


def committed() -> list[Share]:
    """Read the prediction that was committed before the first run."""
    lines = json.loads((files(__package__) / "prediction.json").read_text(encoding="utf-8"))
    return [Share(**line) for line in lines["shares"]]

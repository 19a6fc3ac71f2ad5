"""Power EMA: an average whose memory grows with the run."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torchbelay.physics import arguments
from torchbelay.physics.brief import brief
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.physics.method import Law, Varies
from torchbelay.physics.scaling import Scaleless


@dataclass(frozen=True)
class power_ema(Scaleless):
    """Power-function average: step t has the weight ∫τ^γ dτ over its time.

        a = 0, b = 1 − (1 − 1/t)^(γ+1), p = 1, q = b

    Give the exponent γ, or the width σ_rel of the average relative to the length of the run:
    σ_rel² = (γ+1)/((γ+2)²(γ+3)).

    When to use it: if the length of the run is not fixed in advance, as for diffusion models. The memory is a constant
    share of the run and needs no warm-up.

    Reference: Karras et al., "Analyzing and improving the training dynamics of diffusion models", 2024, §3.

    >>> round(power_ema(sigma_rel=0.05).exponent, 2), round(power_ema(sigma_rel=0.10).exponent, 2)
    (16.97, 6.94)
    >>> power_ema(gamma=1.0).coupling(2, 0.1).b
    0.75
    """

    gamma: float | None = None
    sigma_rel: float | None = None

    varies: ClassVar[Varies] = "step"

    __repr__ = brief

    def __post_init__(self) -> None:
        if arguments.exactly_one(gamma=self.gamma, sigma_rel=self.sigma_rel) == "gamma":
            arguments.keep(self, "gamma", low=0, open_low=False)
        else:
            # γ = 0, the uniform average, is the widest: σ_rel = 1/√12
            arguments.keep(self, "sigma_rel", low=0, high=12**-0.5, open_high=False)

    @cached_property
    def exponent(self) -> float:
        """γ, given or solved from σ_rel by bisection; σ_rel falls steadily with γ."""
        if self.gamma is not None:
            return self.gamma
        assert self.sigma_rel is not None
        low, high = 0.0, 1.0 / self.sigma_rel + 1  # σ_rel < 1/γ for every γ
        while (middle := (low + high) / 2) not in (low, high):
            wide = math.sqrt((middle + 1) / (middle + 3)) / (middle + 2) > self.sigma_rel
            low, high = (middle, high) if wide else (low, middle)
        return low

    @property
    def law(self) -> Law:
        """The equation above as a formula of the step."""
        return Law("relative", exponent=self.exponent + 1)

    def coupling(self, step: int, lr: float) -> Coupling:
        """Return the coupling of this step; ignores `lr`."""
        return watch(1.0 if step == 1 else -math.expm1((self.exponent + 1) * math.log1p(-1 / step)))

"""BELAY: an average that pulls the weights back, as a spring pulls two masses together."""

from torchbelay.physics.coupling import Follow
from torchbelay.physics.spring import Spring


def belay(k: float = 1.0, m1: float = 2000.0, m2: float = 500.0, *, follow: Follow = "before") -> Spring:
    """BELAY, velocity-free, with κi = k/(2·mi).

        a = κ1, b = κ2, p = 1 − κ1, q = 0    (q = κ2 with follow="after")

    The defaults are the paper's setting for MNIST. This is `Spring(k, m1, m2)`; `Spring` itself also takes damping.

    When to use it: to try whether an average that pulls the weights steadies a training. Compare it with
    `Spring.matched_ema()`, which has the same memory and no pull.

    Reference: Patsenker, Li, Kluger, "Exponential weight averaging as damped harmonic motion", 2023, Algorithm 1.

    >>> belay(k=1.0, m1=10.0, m2=20.0).coupling(1, 0.1)
    Coupling(a=0.05, b=0.025, p=0.95, q=0.0)
    """
    return Spring(k=k, m1=m1, m2=m2, follow=follow)

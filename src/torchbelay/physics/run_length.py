"""The k(T) rule: a spring constant that is good for T0 steps, rescaled for a run of T steps (§3.3)."""

import math
from typing import Literal, get_args

from . import arguments

Rule = Literal["printed", "exact"]


def rescale_k(
    T: float,  # noqa: N803 (the paper's symbol)
    *,
    m1: float,
    m2: float,
    k0: float,
    T0: float,  # noqa: N803
    rule: Rule,
) -> float:
    """Return the k for a run of T steps, at Δt = 1.

    "printed" is the paper's rule, k = k0·T0/T. "exact" keeps (1 − κ1 − κ2)^T, the share of the start that is left
    after the run, and gives an average for every T.

    >>> rescale_k(10_000, m1=2000.0, m2=500.0, k0=1.0, T0=1_000_000, rule="printed")
    100.0
    """
    arguments.number("T", T, low=0)
    arguments.number("T0", T0, low=0)
    arguments.number("k0", k0, low=0)
    arguments.one_of("rule", rule, get_args(Rule))
    inverse = 1 / arguments.positive_or_inf("m1", m1) + 1 / arguments.positive_or_inf("m2", m2)
    if rule == "printed":
        k = k0 * T0 / T
        if k / 2 >= min(m1, m2):
            raise ValueError(
                f"T={T!r} makes k = k0·T0/T = {k:.6g}, and κ = k/(2·{min(m1, m2):g}) ≥ 1 is no average; use "
                f"rule='exact', or T > {k0 * T0 / (2 * min(m1, m2)):.6g}, or larger masses"
            )
        return k
    kappa0 = k0 * inverse / 2  # κ1 + κ2 at T0
    if kappa0 >= 1:
        raise ValueError(
            f"k0={k0!r} makes κ1 + κ2 = {kappa0:.4g} ≥ 1 at T0: there is nothing to keep; use a smaller k0"
        )
    kappa = -math.expm1(T0 / T * math.log1p(-kappa0)) if kappa0 else 0.0
    kappa = min(kappa, 1 - 1e-15)  # so far below 1 that k/(2m) does not round up to 1
    return 2 * kappa / inverse if inverse else k0

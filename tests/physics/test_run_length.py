"""The k(T) rule, through `Spring.for_steps`: a setting for T0 steps, rescaled to T steps."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest

from torchbelay.physics.spring import Spring

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("rule", ["printed", "exact"])
def test_for_steps_changes_nothing_at_T0(rule: Any) -> None:
    s = Spring.for_steps(1000, m1=30.0, m2=50.0, k0=2.0, T0=1000, rule=rule)
    assert s.k == pytest.approx(2.0, rel=1e-14)


def test_for_steps_exact_makes_an_average_for_every_length() -> None:
    rng = np.random.default_rng(13)
    for T, m1, m2, share in zip(*rng.uniform((0, -3, -3, 1e-6), (9, 6, 6, 1), (4000, 4)).T, strict=True):
        masses = [float(10**m1), float(10**m2)]
        if share < 0.3:
            masses[int(10 * share) % 2] = INF
        k0 = float(2 * share / sum(1 / m for m in masses))
        s = Spring.for_steps(float(10**T), m1=masses[0], m2=masses[1], k0=k0, rule="exact")
        assert s.kappa1 + s.kappa2 < 1


@pytest.mark.parametrize("T", [1, 30, 1000, 10**6, 10**9])
@pytest.mark.parametrize("m1", [3e6, INF])
def test_for_steps_exact_forgets_as_much_over_the_whole_run(T: int, m1: float) -> None:
    masses = 1 / m1 + 1 / 1e6
    s = Spring.for_steps(T, m1=m1, m2=1e6, k0=5.0, rule="exact")
    with mpmath.workdps(40):  # floats lose the digits of 1 − κ that are compared
        left = (1 - mpmath.mpf(s.k) * masses / 2) ** T
        tuned = (1 - mpmath.mpf(5.0) * masses / 2) ** 1_000_000
    assert float(left / tuned) == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"T": 0}, r"^T=0 .* needs T > 0"),
        ({"T": NAN}, r"^T=nan .* needs T > 0"),
        ({"T0": -1}, r"^T0=-1 .* needs T0 > 0"),
        ({"T0": NAN}, r"^T0=nan .* needs T0 > 0"),
        ({"k0": 0}, r"^k0=0 .* needs k0 > 0"),
        ({"k0": NAN}, r"^k0=nan .* needs k0 > 0"),
        ({"m1": NAN}, r"^m1=nan .* needs m1 > 0, or inf"),
        ({"rule": "guessed"}, r"^rule='guessed' is unknown; choose one of 'printed', 'exact'"),
        (
            {"T": 1000},
            r"^T=1000 makes k = k0·T0/T = 1000, and κ = k/\(2·500\) ≥ 1 .* use rule='exact', or T > 1000, or",
        ),
        ({"rule": "exact", "k0": 1000.0}, r"^k0=1000\.0 makes κ1 \+ κ2 = 1\.25 ≥ 1 at T0: .* use a smaller k0"),
    ],
    ids=str,
)
def test_for_steps_refuses(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spring.for_steps(**{"T": 10_000, "m1": 2000.0, "m2": 500.0} | bad)


def test_for_steps_printed_accepts_lengths_just_above_the_advised_one() -> None:
    assert Spring.for_steps(1000.001, m1=2000.0, m2=500.0).kappa2 == pytest.approx(1, rel=1e-5)

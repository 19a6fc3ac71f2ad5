"""The two ends of EMA have the numbers that springs near them approach."""

import math

import pytest

from torchbelay.physics.limits import Limit
from torchbelay.physics.methods import ema
from torchbelay.physics.spring import Spring


@pytest.mark.parametrize(("decay", "near"), [(0.0, 1e-12), (1.0, 1 - 1e-12)])
def test_an_end_is_where_springs_near_it_go(decay: float, near: float) -> None:
    limit, spring = Limit(decay), Spring.ema(decay=near)
    assert limit.coupling() == ema(decay).coupling(1, 0.1)
    for name in ("k", "m2", "dt", "alpha", "beta", "kappa1", "kappa2", "theta", "decay", "effective_lr_scale"):
        assert getattr(limit, name) == pytest.approx(getattr(spring, name), abs=1e-11), name
    for name in ("m1", "c1", "c2", "follow", "force", "regime"):
        assert getattr(limit, name) == getattr(spring, name), name
    assert limit.max_stable_lr(4.0) == pytest.approx(spring.max_stable_lr(4.0))
    assert limit.matched_ema() is limit


def test_what_they_remember() -> None:
    assert (Limit(0.0).half_life, Limit(1.0).half_life) == (0.0, math.inf)
    assert "remembers nothing" in Limit(0.0).explain()
    assert "forgets nothing" in Limit(1.0).explain()


def test_no_other_decay_is_an_end() -> None:
    with pytest.raises(ValueError, match=r"decay=0\.5 is not an end; every other EMA is Spring\.ema\(decay=0\.5\)"):
        Limit(0.5)
    with pytest.raises(ValueError, match="curvature"):
        Limit(1.0).max_stable_lr(0.0)

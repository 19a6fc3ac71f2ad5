"""Small matrices in plain numbers, against numpy."""

import numpy as np
import pytest

from helpers.quadratic import lyapunov
from torchbelay.physics import matrices


def rows(array: np.ndarray) -> matrices.Matrix:
    return tuple(map(tuple, array.tolist()))


@pytest.mark.parametrize("size", [2, 3])
def test_everything_is_what_numpy_has(size: int) -> None:
    random = np.random.default_rng(size)
    for _ in range(50):
        m, n = random.standard_normal((2, size, size)) * 0.4
        v = random.standard_normal(size)
        q = n @ n.T
        assert matrices.apply(rows(m), v.tolist()) == pytest.approx((m @ v).tolist(), rel=1e-12)
        for found, expected in (
            (matrices.product(rows(m), rows(n)), m @ n),
            (matrices.congruence(rows(m), rows(q)), m @ q @ m.T),
            (matrices.outer(v.tolist()), np.outer(v, v)),
            (matrices.total(rows(m), rows(n)), m + n),
        ):
            assert np.allclose(found, expected, rtol=1e-12, atol=1e-14)
        expected = np.zeros_like(q)
        for steps in range(1, 20):
            expected = m @ expected @ m.T + q
            power, noise = matrices.repeat(rows(m), rows(q), steps)
            assert np.allclose(power, np.linalg.matrix_power(m, steps), rtol=1e-10, atol=1e-13)
            assert np.allclose(noise, expected, rtol=1e-10, atol=1e-13)
        assert matrices.solve(m.tolist(), v.tolist()) == pytest.approx(np.linalg.solve(m, v).tolist(), rel=1e-8)
        s = np.array(lyapunov(rows(m), rows(q)))
        assert np.allclose(s, m @ s @ m.T + q, rtol=1e-9, atol=1e-12)
        assert (s == s.T).all()

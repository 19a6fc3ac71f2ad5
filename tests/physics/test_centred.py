"""`methods.centred` with a moving θ and a moving rate: its four numbers follow from z, w2 and w1 = z + θ·(z − w2)."""

from typing import Any

import pytest
import sympy

from torchbelay.ops.reference import couple
from torchbelay.physics.methods import centred

z, w2, u, now, later, c = sympy.symbols("z w2 u theta_t theta_next c")


def stepped(follow: str) -> tuple[Any, Any, Any]:
    """Return w1 before the step, and (w1, w2) after it, from the centre's own equations."""
    z_new = z + u
    w2_new = w2 + c * ((z_new if follow == "after" else z) - w2)
    return z + now * (z - w2), z_new + later * (z_new - w2_new), w2_new


def written(follow: str) -> dict[str, Any]:
    """The numbers as the docstring has them."""
    kept = later * (1 - c)
    numbers = {"a": (now - kept) / (1 + now), "b": c / (1 + now)}
    return numbers | ({"p": 1 + kept, "q": c} if follow == "after" else {"p": 1 + later, "q": 0})


@pytest.mark.parametrize("follow", ["after", "before"])
def test_the_numbers_follow_from_the_centre(follow: str) -> None:
    w1, w1_new, w2_new = stepped(follow)
    found = couple(w1, w2, u, **written(follow))
    assert [sympy.simplify(x - y) for x, y in zip(found, (w1_new, w2_new), strict=True)] == [0, 0]


@pytest.mark.parametrize("follow", ["after", "before"])
def test_the_code_has_the_numbers_of_the_docstring(follow: Any) -> None:
    thetas, rates = [0.7, -0.6, 0.2, 3.0], [1.0, 0.3, 0.05]
    method = centred(lambda t: thetas[t - 1], lambda t: rates[t - 1], follow)
    for t in (1, 2, 3):
        at = {now: thetas[t - 1], later: thetas[t], c: rates[t - 1]}
        expected = [float(sympy.sympify(x).subs(at)) for x in written(follow).values()]
        found = method.coupling(t, 0.1)
        assert [found.a, found.b, found.p, found.q] == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_the_lagged_pull_keeps_the_factor_1_minus_c() -> None:
    """With G = θ_{t+1} in `a` as in `p`, a θ that stands still would not pull at all."""
    a = ((1 + later) * now / (1 + now) - later).subs(later, now)
    assert sympy.simplify(a) == 0
    assert centred(0.5, 0.3, "before").coupling(1, 0.1).a == pytest.approx(0.1)

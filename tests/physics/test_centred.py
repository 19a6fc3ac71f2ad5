"""`methods.centred` with a moving θ and a moving rate: its four numbers follow from z, w2 and w1 = z + θ·(z − w2)."""

from typing import Any

import pytest
import sympy

from torchbelay.ops.reference import couple
from torchbelay.physics.methods import centred, primal_averaging
from torchbelay.physics.schedules import linear

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


NEAR = -1 + 2**-50


@pytest.mark.parametrize("follow", ["after", "before"])
def test_a_theta_at_which_rounding_destroys_the_numbers_is_refused(follow: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^theta=-0\.99999.* is too near to -1: .* use a theta of at least -0\.99999999$"
    ):
        centred(NEAR, 0.1, follow)


def test_a_schedule_is_refused_at_the_step_at_which_theta_is_too_near() -> None:
    refusal = r" at step {}: theta=-0\.99999.* is too near to -1: "
    with pytest.raises(ValueError, match=r"^theta=linear.*" + refusal.format(9)):
        centred(linear(0.0, NEAR, 9), 0.1)
    with pytest.raises(ValueError, match=r"^theta=.*" + refusal.format(1)):
        centred(lambda _: NEAR, 0.1)
    later = centred(lambda step: 0.0 if step < 5 else NEAR, 0.1)
    assert later.coupling(3, 0.1).b == pytest.approx(0.1)
    for step, ask in ((4, later.coupling), (5, later.settled)):
        with pytest.raises(ValueError, match=refusal.format(5)):
            ask(step, 0.1)


def test_the_nearest_theta_keeps_half_of_the_digits() -> None:
    """Its centre of mass moves by u, as that of every θ."""
    found = centred(-0.99999999, 0.1).coupling(1, 0.1)
    assert found.effective_lr_scale == pytest.approx(1, abs=1e-6)
    assert found.rate == pytest.approx(0.1, rel=1e-6)


def test_primal_averaging_has_bounds_of_its_own() -> None:
    assert primal_averaging(0.9, 0.999).coupling(1, 0.1).theta == pytest.approx(-0.999)

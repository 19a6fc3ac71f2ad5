"""The oracle itself: against hand-computed numbers, against Newton's law, and its symmetries, mostly as algebra."""

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.ops import reference

w1, w2, v1, v2, u, shift = sympy.symbols("w1 w2 v1 v2 u shift", real=True)
k, m1, m2, c1, c2, dt, scale = sympy.symbols("k m1 m2 c1 c2 dt scale", positive=True)
a, b, p, q = sympy.symbols("a b p q", real=True)

NUMBERS = {"a": a, "b": b, "p": p, "q": q}
MASSES = {"k": k, "m1": m1, "m2": m2}
DAMPED = {**MASSES, "c1": c1, "c2": c2}
CRITICAL = {**MASSES, "c1": 2 * m1 / dt, "c2": 2 * m2 / dt}  # velocity-free
FORCES = ("derived", "printed")


def identical(left: tuple, right: tuple) -> bool:
    """Whether two tuples are equal as algebra, for all values of their symbols."""
    return all(sympy.simplify(x - y) == 0 for x, y in zip(left, right, strict=True))


def couple_step(w1, w2, v1, v2, u):
    return (*reference.couple(w1, w2, u, **NUMBERS), v1, v2)


def algorithm1_step(w1, w2, v1, v2, u):
    return (*reference.algorithm1(w1, w2, u, **MASSES, dt=dt), v1, v2)


def derived_step(w1, w2, v1, v2, u):
    return reference.algorithm1_with_velocities(w1, w2, v1, v2, u, **DAMPED, dt=dt, force="derived")


def printed_step(w1, w2, v1, v2, u):
    return reference.algorithm1_with_velocities(w1, w2, v1, v2, u, **DAMPED, dt=dt, force="printed")


every_step = pytest.mark.parametrize("step", [couple_step, algorithm1_step, derived_step, printed_step])


def test_couple_is_the_linear_map_with_its_four_numbers():
    assert identical(
        reference.couple(w1, w2, u, **NUMBERS),
        ((1 - a) * w1 + a * w2 + p * u, b * w1 + (1 - b) * w2 + q * u),
    )


def test_algorithm1_is_the_coupling_kappa1_kappa2_alpha_0():
    kappa1, kappa2 = k * dt**2 / (2 * m1), k * dt**2 / (2 * m2)
    assert identical(
        reference.algorithm1(w1, w2, u, **MASSES, dt=dt),
        reference.couple(w1, w2, u, a=kappa1, b=kappa2, p=1 - kappa1, q=0),
    )


@pytest.mark.parametrize("force", FORCES)
def test_at_c_2m_over_dt_positions_are_velocity_free_whatever_the_velocities(force):
    new1, new2, *_ = reference.algorithm1_with_velocities(w1, w2, v1, v2, u, **CRITICAL, dt=dt, force=force)
    assert identical((new1, new2), reference.algorithm1(w1, w2, u, **MASSES, dt=dt))


@pytest.mark.parametrize("mass", [1, 2])
@pytest.mark.parametrize("force", FORCES)
def test_velocity_free_is_decided_for_each_mass_on_its_own(mass, force):
    numbers = {**DAMPED, f"c{mass}": CRITICAL[f"c{mass}"]}
    new = reference.algorithm1_with_velocities(w1, w2, v1, v2, u, **numbers, dt=dt, force=force)
    own, other = (v1, v2) if mass == 1 else (v2, v1)
    assert own not in sympy.simplify(new[mass - 1]).free_symbols
    assert other in sympy.simplify(new[2 - mass]).free_symbols


@pytest.mark.parametrize("force", FORCES)
def test_at_c_2m_over_dt_a_velocity_flips_its_sign_and_does_not_decay(force):
    new = reference.algorithm1_with_velocities(w1, w1, v1, v2, 0, **CRITICAL, dt=dt, force=force)
    assert identical(new[2:], (-v1, -v2))


def test_derived_force_is_newtons_law_with_a_constant_acceleration_in_the_step():
    f = 2 * m1 * (1 - k * dt**2 / (2 * m1)) * u / dt**2  # the force that moves the position by α·u
    acceleration1 = (k * (w2 - w1) - c1 * v1 + f) / m1
    acceleration2 = (k * (w1 - w2) - c2 * v2) / m2
    assert identical(
        derived_step(w1, w2, v1, v2, u),
        (
            w1 + v1 * dt + acceleration1 * dt**2 / 2,
            w2 + v2 * dt + acceleration2 * dt**2 / 2,
            v1 + acceleration1 * dt,
            v2 + acceleration2 * dt,
        ),
    )


def test_printed_force_differs_in_nothing_but_what_u_adds_to_v1():
    alpha = 1 - k * dt**2 / (2 * m1)
    derived, printed = derived_step(w1, w2, v1, v2, u), printed_step(w1, w2, v1, v2, u)
    assert identical(printed[:2] + printed[3:], derived[:2] + derived[3:])
    assert identical((derived[2].diff(u), printed[2].diff(u)), (2 * alpha / dt, 1 / (2 * alpha * dt)))


def test_an_unknown_force_is_refused():
    with pytest.raises(KeyError, match="paper"):
        reference.algorithm1_with_velocities(0.0, 0.0, 0.0, 0.0, 1.0, k=1, m1=2, m2=2, c1=1, c2=1, force="paper")


@every_step
def test_moving_both_masses_together_moves_the_result_with_them(step):
    moved = step(w1 + shift, w2 + shift, v1, v2, u)
    x1, x2, y1, y2 = step(w1, w2, v1, v2, u)
    assert identical(moved, (x1 + shift, x2 + shift, y1, y2))


@every_step
def test_scaling_everything_scales_the_result(step):
    scaled = step(*(scale * x for x in (w1, w2, v1, v2, u)))
    assert identical(scaled, tuple(scale * x for x in step(w1, w2, v1, v2, u)))


@every_step
def test_at_rest_nothing_moves(step):
    assert identical(step(w1, w1, 0, 0, 0), (w1, w1, 0, 0))


@pytest.mark.parametrize("force", FORCES)
def test_dt_is_a_choice_of_units(force):
    """With time measured in steps: k·dt², c·dt, v·dt and dt = 1."""
    x1, x2, y1, y2 = reference.algorithm1_with_velocities(w1, w2, v1, v2, u, **DAMPED, dt=dt, force=force)
    in_steps = {"k": k * dt**2, "m1": m1, "m2": m2, "c1": c1 * dt, "c2": c2 * dt}
    new = reference.algorithm1_with_velocities(w1, w2, v1 * dt, v2 * dt, u, **in_steps, force=force)
    assert identical(new, (x1, x2, y1 * dt, y2 * dt))
    velocity_free = reference.algorithm1(w1, w2, u, k=k * dt**2, m1=m1, m2=m2)
    assert identical(velocity_free, reference.algorithm1(w1, w2, u, **MASSES, dt=dt))


def test_the_centre_of_mass_is_moved_by_the_update_alone():
    x1, x2 = reference.algorithm1(w1, w2, u, **MASSES, dt=dt)
    alpha = 1 - k * dt**2 / (2 * m1)
    assert identical((m1 * (x1 - w1) + m2 * (x2 - w2),), (m1 * alpha * u,))


# By hand, with numbers that binary floating point holds exactly: so == is the right comparison.


def test_couple_by_hand():
    # w1 + ½·(w2 − w1) + 2·u = 1 + 2 + 6, w2 + ¼·(w1 − w2) − u = 5 − 1 − 3
    assert reference.couple(1.0, 5.0, 3.0, a=0.5, b=0.25, p=2.0, q=-1.0) == (9.0, 1.0)


def test_algorithm1_by_hand():
    # α = 1 − 1/8 and β = 1 − 1/4: ⅞·(1 + 3) + ⅛·9, ¾·9 + ¼·1
    assert reference.algorithm1(1.0, 9.0, 3.0, k=1.0, m1=4.0, m2=2.0) == (4.625, 7.0)


def test_algorithm1_by_hand_with_dt():
    # dt = 2: α = 1 − 4/8 and β = 1 − 4/16: ½·(1 + 3) + ½·9, ¾·9 + ¼·1
    assert reference.algorithm1(1.0, 9.0, 3.0, k=1.0, m1=4.0, m2=8.0, dt=2.0) == (6.5, 7.0)


@pytest.mark.parametrize("force", FORCES)
def test_both_forces_agree_at_alpha_one_half(force):
    # k = m1 makes α = ½ and 2α = 1/(2α) = 1: v1' = v1 + (w2 − w1) − ½·v1 + u = 2 + 8 − 1 + 2
    new = reference.algorithm1_with_velocities(
        1.0, 9.0, 2.0, 0.0, 2.0, k=4.0, m1=4.0, m2=8.0, c1=2.0, c2=4.0, force=force
    )
    assert new[2] == 11.0


@pytest.mark.parametrize(("force", "new_v1"), [("derived", 5.25), ("printed", 4.0)])
def test_algorithm1_with_velocities_by_hand(force, new_v1):
    # α = ¾ and β = ⅞, velocity factors 1 − 2/8 = ¾ and 1 − 4/16 = ¾:
    # w1' = ¾·(1 + 1.5) + ¼·5 + ¾·2, w2' = ⅞·5 + ⅛·1 − ¾·4
    # v1' = 2 + ½·4 − ½·2 + s·1.5 with s = 2α = 1.5 or 1/(2α) = ⅔, v2' = −4 − ¼·4 + ½·4
    new = reference.algorithm1_with_velocities(
        1.0, 5.0, 2.0, -4.0, 1.5, k=2.0, m1=4.0, m2=8.0, c1=2.0, c2=4.0, force=force
    )
    assert new == (4.625, 1.5, new_v1, -3.0)


# On tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_tensors_keep_their_dtype_and_are_left_as_they_were(draw, same_bits, dtype):
    given_ = [draw.normal((3, 2), dtype) for _ in range(5)]
    before = [t.clone() for t in given_]
    x1, x2, y1, y2, up = given_
    new = [
        *reference.couple(x1, x2, up, a=0.25, b=0.5, p=0.75, q=0.125),
        *reference.algorithm1(x1, x2, up, k=1.0, m1=4.0, m2=2.0),
        *reference.algorithm1_with_velocities(x1, x2, y1, y2, up, k=1.0, m1=4.0, m2=2.0, c1=1.0, c2=1.0),
    ]
    assert {t.dtype for t in new} == {dtype}
    assert {t.shape for t in new} == {(3, 2)}
    assert same_bits(given_, before)


place, coefficient = st.floats(-100, 100), st.floats(-2, 2)


@given(*[place] * 3, st.floats(0.01, 3), st.floats(2, 100), st.floats(2, 100), st.floats(0.1, 1))
def test_algorithm1_equals_its_coupling_in_float64(x1, x2, up, k, m1, m2, dt):
    kappa1, kappa2 = k * dt**2 / (2 * m1), k * dt**2 / (2 * m2)
    left = reference.algorithm1(x1, x2, up, k=k, m1=m1, m2=m2, dt=dt)
    right = reference.couple(x1, x2, up, a=kappa1, b=kappa2, p=1 - kappa1, q=0.0)
    assert left == pytest.approx(right, rel=0, abs=3e-13)  # a few roundings of numbers up to 300: 8·300·1.1e-16


@given(st.lists(st.tuples(place, place, place), max_size=6), *[coefficient] * 4)
def test_tensors_give_what_their_elements_give(points, a, b, p, q):
    numbers = {"a": a, "b": b, "p": p, "q": q}
    new = reference.couple(*torch.tensor(points, dtype=torch.float64).reshape(-1, 3).unbind(dim=1), **numbers)
    # the same operations in the same order in float64: the same bits
    assert torch.stack(new, dim=1).tolist() == [list(reference.couple(*point, **numbers)) for point in points]

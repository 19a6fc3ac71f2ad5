"""Every erratum of docs/errata.md, proved: what is printed is wrong, what the software does is right.

Algebra is done with sympy, through the very functions that every other path of the library is tested against
(`ops.reference`); "equal" then means equal as formulas, for all masses, springs and weights.
"""

import math
import random
import re
from collections.abc import Callable

import pytest
import sympy as sp
import torch

from helpers.root import ROOT
from torchbelay.belay import Belay
from torchbelay.ops.reference import algorithm1, algorithm1_with_velocities, couple
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.methods import heavy_ball
from torchbelay.physics.spring import Spring

k, m1, m2, c1, c2, dt = sp.symbols("k m1 m2 c1 c2 dt", positive=True)
w1, w2, v1, v2, u = sp.symbols("w1 w2 v1 v2 u", real=True)
factor1, factor2 = 1 - k * dt**2 / (2 * m1), 1 - k * dt**2 / (2 * m2)  # of mass m1, of mass m2
lam = sp.Symbol("lambda", positive=True)

TWO_D = {"k": 1.0, "m1": 10.0, "m2": 20.0}  # the paper's setting in two dimensions
MNIST = {"m1": 2000.0, "m2": 500.0}  # with k = 1 at a million steps


def equal(x: sp.Expr, y: sp.Expr) -> bool:
    return sp.simplify(x - y) == 0


def step(coupling: Coupling, x1: float, x2: float, update: float) -> tuple[float, float]:
    """One step of the library's four numbers."""
    return couple(x1, x2, update, a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)


def with_velocities(force: str = "derived", **instead: sp.Expr) -> tuple[sp.Expr, ...]:
    """Algorithm 1 with all its symbols, but for those given."""
    at = {"w1": w1, "w2": w2, "v1": v1, "v2": v2, "u": u, "k": k, "m1": m1, "m2": m2, "c1": c1, "c2": c2, "dt": dt}
    return algorithm1_with_velocities(**(at | instead), force=force)


def moved(x: sp.Expr, v: sp.Expr, acceleration: sp.Expr) -> sp.Expr:
    """Where a mass is after Δt of constant acceleration."""
    return x + dt * v + dt**2 / 2 * acceleration


# E1: the weights of w1 and w2 are swapped ----------------------------------------------------------------------------


def test_E1_the_old_average_keeps_the_weight_alpha() -> None:
    derived = moved(w2, 0, k / m2 * (w1 - w2))
    printed = factor2 * w1 + (1 - factor2) * w2
    assert equal(derived, (1 - factor2) * w1 + factor2 * w2)
    assert equal(derived - printed, (1 - 2 * factor2) * (w1 - w2))  # so they differ unless the factor happens to be ½
    assert equal(algorithm1(w1, w2, u, k=k, m1=m1, m2=m2, dt=dt)[1], derived)


def test_E1_as_printed_an_immovable_average_would_jump_onto_the_weights() -> None:
    assert sp.limit(factor2 * w1 + (1 - factor2) * w2, m2, sp.oo) == w1
    assert sp.limit(algorithm1(w1, w2, u, k=k, m1=m1, m2=m2, dt=dt)[1], m2, sp.oo) == w2
    assert step(Spring(k=1.0, m1=10.0, m2=math.inf).coupling(), 1.0, 5.0, 0.0)[1] == 5.0


# E2: which factor is called α, which β -------------------------------------------------------------------------------


def test_E2_alpha_belongs_to_m1_and_beta_to_m2() -> None:
    new1, new2 = algorithm1(w1, w2, 0, k=k, m1=m1, m2=m2, dt=dt)
    assert equal(sp.diff(new1, w1), factor1)
    assert equal(sp.diff(new2, w2), factor2)
    spring = Spring(**TWO_D)
    assert (spring.alpha, spring.beta) == (1 - 1 / 20, 1 - 1 / 40)


def test_E2_with_the_names_of_section_3_algorithm_1_would_break_the_third_law() -> None:
    def total(alpha: sp.Expr, beta: sp.Expr) -> sp.Expr:
        """m1·w1 + m2·w2 after a step without force, which moves no centre of mass."""
        return m1 * (alpha * w1 + (1 - alpha) * w2) + m2 * (beta * w2 + (1 - beta) * w1)

    before = m1 * w1 + m2 * w2
    assert equal(total(alpha=factor1, beta=factor2), before)
    drift = k * dt**2 * (m1**2 - m2**2) * (w2 - w1) / (2 * m1 * m2)
    assert equal(total(alpha=factor2, beta=factor1) - before, drift)  # zero for equal masses only


# E3: what the update adds to the velocity ----------------------------------------------------------------------------


@pytest.mark.parametrize(("force", "times"), [("derived", 1), ("printed", 1 / (4 * factor1**2))])
def test_E3_a_force_that_moves_the_position_by_alpha_u_adds_2_alpha_u_to_the_velocity(
    force: str, times: sp.Expr
) -> None:
    new1, _, new_v1, _ = with_velocities(force)
    acceleration = sp.diff(new1, u) * u / (dt**2 / 2)  # the position says which force it was
    assert equal(acceleration * dt, 2 * factor1 * u / dt)
    assert equal(sp.diff(new_v1, u) * u, times * acceleration * dt)


@pytest.mark.parametrize(("force", "gone"), [("derived", 9), ("printed", sp.Rational(9, 2))])
def test_E3_a_free_mass_under_a_constant_force_goes_as_the_square_of_time(force: str, gone: sp.Expr) -> None:
    x = v = sp.Integer(0)
    for _ in range(3):  # no spring, no friction: u = f·Δt²/(2m), so that 3 steps make f·(3Δt)²/(2m) = 9u
        x, _, v, _ = with_velocities(force, w1=x, w2=0, v1=v, v2=0, k=0, c1=0, c2=0)
    assert equal(x, gone * u)


@pytest.mark.parametrize(("force", "holds"), [("derived", True), ("printed", False)])
def test_E3_only_with_the_derived_force_the_velocity_is_how_fast_the_weights_move(force: str, holds: bool) -> None:
    drift, tension = sp.symbols("drift tension", real=True)
    new1, new2, new_v1, new_v2 = with_velocities(force, w2=w1 + tension)
    steady = [new1 - w1 - drift, new2 - w1 - tension - drift, new_v1 - v1, new_v2 - v2]
    (found,) = sp.solve(steady, [drift, tension, v1, v2], dict=True)
    balance = 2 * factor1 * m1 * u / ((c1 + c2) * dt)  # friction balances the force
    assert equal(found[drift], balance) is holds
    assert equal(found[drift], dt * found[v1]) is holds


def test_E3_the_spring_derives_by_default_and_prints_by_name() -> None:
    damped = TWO_D | {"c1": 5.0, "c2": 10.0}
    derived, printed = Spring(**damped), Spring(**damped, force="printed")
    assert derived.inertia1 is not None
    assert printed.inertia1 is not None
    assert derived.inertia1.push == 2 * derived.alpha
    assert printed.inertia1.push == 1 / (2 * printed.alpha)
    assert derived.effective_lr_scale == pytest.approx(2 * 0.95 * 10 / 15, rel=1e-15)


# E4: the constants of the overdamped oscillator ----------------------------------------------------------------------

w0, delta, root, time = sp.symbols("w0 delta root t", positive=True)  # root = √(δ² − k/m)


def overdamped(constant1: sp.Expr, constant2: sp.Expr) -> sp.Expr:
    return constant1 * sp.exp((-delta + root) * time) + constant2 * sp.exp((-delta - root) * time)


RIGHT = overdamped(w0 / 2 * (1 + delta / root), w0 / 2 * (1 - delta / root))
PRINTED = overdamped(w0 * (delta / root - sp.Rational(1, 2)), w0 * (sp.Rational(1, 2) - delta / root))


def test_E4_the_constants_follow_from_starting_at_rest_at_w0() -> None:
    x = sp.Function("x")
    equation = x(time).diff(time, 2) + 2 * delta * x(time).diff(time) + (delta**2 - root**2) * x(time)
    solved = sp.dsolve(equation, x(time), ics={x(0): w0, x(time).diff(time).subs(time, 0): 0}).rhs
    assert equal(solved, RIGHT)
    assert RIGHT.subs(time, 0).simplify() == w0


def test_E4_as_printed_the_motion_starts_at_0() -> None:
    assert PRINTED.subs(time, 0).simplify() == 0


def test_E4_the_software_tends_to_the_right_curve_as_steps_shrink() -> None:
    masses = {"m1": 2.0, "m2": 2.0, "c1": 8.0, "c2": 8.0}  # the distance has δ = 2, ω² = k(1/m1 + 1/m2) = 1
    at = {w0: 1, delta: 2, root: sp.sqrt(3), time: 2}
    right, printed = float(RIGHT.subs(at)), float(PRINTED.subs(at))

    def distance(count: int) -> float:
        state = (0.0, 1.0, 0.0, 0.0)
        for _ in range(count):
            state = algorithm1_with_velocities(*state, 0.0, k=1.0, **masses, dt=2 / count)
        return state[1] - state[0]

    errors = [abs(distance(count) - right) for count in (1000, 2000)]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.01)  # a first-order scheme: the rest is of second order
    assert errors[1] < 1e-3 < 0.1 < abs(printed - right)
    halved = Spring(k=1.0, **masses, dt=0.001).half_life * 0.001
    assert halved == pytest.approx(math.log(2) / (2 - math.sqrt(3)), rel=1e-3)  # of first order in Δt as well


# E5: the spring constant of a run of T steps -------------------------------------------------------------------------

k0, T, T0 = sp.symbols("k0 T T0", positive=True)
KAPPA0 = k0 / 2 * (1 / m1 + 1 / m2)
EXACT = 2 * (1 - (1 - KAPPA0) ** (T0 / T)) / (1 / m1 + 1 / m2)


def test_E5_the_exact_rule_leaves_as_much_of_the_start_after_every_run() -> None:
    kept = sp.Symbol("kept", positive=True)  # 1 − κ0, positive because κ0 < 1 for an average
    left = (1 - EXACT / 2 * (1 / m1 + 1 / m2)).subs(k0, 2 * (1 - kept) / (1 / m1 + 1 / m2))
    assert equal(sp.simplify(left) ** T, kept**T0)


def test_E5_to_first_order_k_times_T_is_constant_and_only_to_first_order() -> None:
    ratio = sp.series(EXACT / (k0 * T0 / T), k0, 0, 2).removeO()
    assert equal(ratio, 1 - (T0 / T - 1) * KAPPA0 / 2)


def test_E5_the_appendix_loses_T0() -> None:
    appendix, section = k0 / T, k0 * T0 / T
    assert section.subs(T, T0) == k0  # a run of the tuned length keeps its k
    assert appendix.subs(T, T0) == k0 / T0
    assert Spring.for_steps(1_000_000, **MNIST).k == 1.0


def logarithm_left(spring: Spring, count: int) -> float:
    """Of the share of the start that is left after a run; the share itself underflows."""
    return count * math.log(spring.decay)


@pytest.mark.parametrize("count", [500, 1000, 10_000, 10_000_000])
def test_E5_the_softwares_exact_rule_keeps_what_is_left(count: int) -> None:
    tuned = logarithm_left(Spring(k=1.0, **MNIST), 1_000_000)
    carried = logarithm_left(Spring.for_steps(count, **MNIST, rule="exact"), count)
    assert carried == pytest.approx(tuned, rel=2e-12)  # 1 − κ rounds to 1e-16, and κ is 1.25e-4 in the longest run


@pytest.mark.parametrize(("count", "off"), [(10_000, 0.0676), (10_000_000, -0.00056)])
def test_E5_the_softwares_default_is_the_printed_rule_which_keeps_it_nearly(count: int, off: float) -> None:
    by_default = Spring.for_steps(count, **MNIST)
    assert by_default == Spring.for_steps(count, **MNIST, rule="printed")
    assert by_default.k == 1_000_000 / count
    ratio = logarithm_left(by_default, count) / logarithm_left(Spring(k=1.0, **MNIST), 1_000_000)
    assert ratio - 1 == pytest.approx(off, rel=0.01)  # the digits that are written above


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_E5_in_a_short_run_the_printed_rule_is_no_average_and_is_refused(count: int) -> None:
    assert 1_000_000 / count / (2 * MNIST["m2"]) >= 1
    with pytest.raises(ValueError, match="no average; use rule='exact'"):
        Spring.for_steps(count, **MNIST)
    exact = Spring.for_steps(count, **MNIST, rule="exact")
    assert 0 < exact.kappa1 + exact.kappa2 < 1


# E6: averaging the weights after the step, or before it --------------------------------------------------------------


def averages(after: Coupling, before: Coupling, count: int = 50) -> tuple[list[float], list[float]]:
    """Two averages, and their models, under the same updates; both start as copies of the same weights."""
    draw = random.Random(0)
    x, y = (1.0, 1.0), (1.0, 1.0)
    series: tuple[list[float], list[float]] = ([x[1]], [y[1]])
    for _ in range(count):
        update = draw.gauss(0, 1)
        x, y = step(after, *x, update), step(before, *y, update)
        series[0].append(x[1])
        series[1].append(y[1])
    return series


def test_E6_the_lagged_average_is_the_ordinary_one_of_a_step_ago() -> None:
    model, after, before = w1, w1, w1
    for n in range(4):
        update = sp.Symbol(f"u{n}")
        earlier = after
        _, before = couple(model, before, update, a=0, b=lam, p=1, q=0)  # Algorithm 1 with m1 = ∞
        model, after = couple(model, after, update, a=0, b=lam, p=1, q=lam)  # Eq. 1
        assert equal(after, (1 - lam) * earlier + lam * model)  # Eq. 1 indeed: of the stepped weights
        assert equal(before, earlier)
        assert not equal(before, after)


def test_E6_the_software_has_both_schemes_one_step_apart() -> None:
    eq1, algorithm = Spring.ema(decay=0.875), Spring(k=0.25, m1=math.inf, m2=1.0)  # 1/8 is exact in binary
    assert (eq1.follow, algorithm.follow) == ("after", "before")
    after, before = averages(eq1.coupling(), algorithm.coupling())
    assert before[1:] == pytest.approx(after[:-1], rel=1e-13)  # the two add the same numbers in another order
    assert max(abs(x - y) for x, y in zip(after, before, strict=True)) > 0.1


def test_E6_with_feedback_the_two_even_learn_at_different_rates() -> None:
    kappa1, kappa2 = 1 - factor1, 1 - factor2
    for q, rate in ((0, factor1 * m1 / (m1 + m2)), (kappa2, m1 / (m1 + m2))):
        new1, new2 = couple(w1, w2, u, a=kappa1, b=kappa2, p=factor1, q=q)
        gain = (m1 * (new1 - w1) + m2 * (new2 - w2)) / (m1 + m2)  # of the centre of mass
        assert equal(gain, rate * u)
    assert Spring(**TWO_D).effective_lr_scale == pytest.approx(0.95 / 3, rel=1e-15)
    assert Spring(**TWO_D, follow="after").effective_lr_scale == pytest.approx(1 / 3, rel=1e-15)


# E7: what the number of an EMA weights -------------------------------------------------------------------------------


def test_E7_the_two_readings_of_alpha_are_two_different_averages() -> None:
    alpha = sp.Symbol("alpha", positive=True)
    equation1 = alpha * w1 + (1 - alpha) * w2
    decay = alpha * w2 + (1 - alpha) * w1
    assert equal(equation1 - decay, (2 * alpha - 1) * (w1 - w2))


@pytest.mark.parametrize("decay", [0.05, 0.95])
def test_E7_decay_is_the_weight_of_the_old_average(decay: float) -> None:
    spring = Spring.ema(decay=decay)
    assert step(spring.coupling(), 0.0, 1.0, 0.0)[1] == pytest.approx(decay, rel=1e-15)
    assert 0.5 ** (1 / spring.half_life) == pytest.approx(decay, rel=1e-14)


def test_E7_an_ema_of_0_95_remembers_a_dozen_steps_and_not_a_quarter_of_one() -> None:
    assert Spring.ema(decay=0.95).half_life == pytest.approx(13.5, abs=0.05)
    assert Spring.ema(decay=1 - 0.95).half_life == pytest.approx(0.23, abs=0.005)  # Eq. 1 with the same number


# E8: what c = 2m does to the velocity --------------------------------------------------------------------------------


def test_E8_at_c_2m_the_velocity_has_eigenvalue_minus_1_and_leaves_the_positions() -> None:
    new = sp.Matrix(with_velocities(u=0, c1=2 * m1 / dt, c2=2 * m2 / dt))
    matrix = new.jacobian([w1, w2, v1, v2])
    assert matrix[:2, 2:] == sp.zeros(2, 2)  # positions do not see it
    assert matrix[2:, 2:] == -sp.eye(2)  # and it flips for ever
    assert equal(new[0], algorithm1(w1, w2, 0, k=k, m1=m1, m2=m2, dt=dt)[0])
    assert equal(new[1], algorithm1(w1, w2, 0, k=k, m1=m1, m2=m2, dt=dt)[1])


def test_E8_a_velocity_never_returns_to_0() -> None:
    state = (sp.Integer(0), sp.Integer(0), v1, v2)
    for n in range(1, 6):
        state = with_velocities(w1=state[0], w2=state[1], v1=state[2], v2=state[3], u=0, c1=2 * m1 / dt, c2=2 * m2 / dt)
        assert [sp.simplify(s) for s in state] == [0, 0, (-1) ** n * v1, (-1) ** n * v2]


def test_E8_the_spring_keeps_no_velocity_there() -> None:
    spring = Spring(**TWO_D, c1=20.0, c2=40.0)
    assert (spring.inertia1, spring.inertia2, spring.regime) == (None, None, "velocity-free")
    assert spring.coupling() == Spring(**TWO_D).coupling()
    assert Spring(**TWO_D, c1=20.0, c2=39.0).inertia2 is not None


# E9: the Rosenbrock function -----------------------------------------------------------------------------------------

x, y = sp.symbols("x y", real=True)


def as_printed(a: int, b: int) -> sp.Expr:
    return (a - x) ** 2 + b * (x - y**2) ** 2


def textbook(a: int, b: int) -> sp.Expr:
    return (a - x) ** 2 + b * (y - x**2) ** 2


def curvatures(f: sp.Expr) -> set[sp.Expr]:
    """Eigenvalues of the Hessian at the origin."""
    return set(sp.hessian(f, (x, y)).subs({x: 0, y: 0}).eigenvals())


def test_E9_as_printed_the_minimum_is_the_origin_with_curvature_202_and_a_flat_direction() -> None:
    f = as_printed(a=0, b=100)
    stationary = sp.solve([f.diff(x), f.diff(y)], [x, y], dict=True)
    assert stationary == [{x: 0, y: 0}]
    assert curvatures(f) == {0, 202}
    assert f.subs(x, 0) == 100 * y**4  # a minimum, of fourth order, along the flat direction


def test_E9_the_textbook_function_is_another_one() -> None:
    f = textbook(a=0, b=100)
    assert curvatures(f) == {2, 200}
    second = (as_printed(0, 100) - x**2).subs({x: y, y: x}, simultaneous=True)
    assert equal(second, f - x**2)  # x and y are exchanged in the second term
    exchanged = f.subs({x: y, y: x}, simultaneous=True)
    assert equal(exchanged - as_printed(0, 100), y**2 - x**2)  # but not in the first: no renaming makes them one


def test_E9_learning_rates_are_judged_by_the_printed_functions_curvature() -> None:
    (largest,) = curvatures(as_printed(a=0, b=100)) - {0}
    limits = [s.max_stable_lr(float(largest)) for s in (Spring.ema(decay=0.95), Spring(**TWO_D))]
    assert limits == pytest.approx([0.009901, 0.010158], abs=5e-7)
    assert limits[0] < 0.01 < limits[1]  # the paper's rate lies between


# E10: the sign of momentum -------------------------------------------------------------------------------------------


def momentum_step(w: sp.Expr, v: sp.Expr, gradient: sp.Expr, sign: int) -> tuple[sp.Expr, sp.Expr]:
    """Average the gradient, then move by ±α times the average."""
    v = (1 - lam) * v + lam * gradient
    return w + sign * sp.Symbol("alpha", positive=True) * v, v


def momentum_polynomial(sign: int) -> tuple[Callable[[int], sp.Expr], sp.Expr, sp.Expr]:
    """Characteristic polynomial on a quadratic of curvature h, with h and α."""
    h, alpha = sp.symbols("h alpha", positive=True)
    w, v = sp.symbols("w v", real=True)
    matrix = sp.Matrix(momentum_step(w, v, h * w, sign)).jacobian([w, v])
    polynomial = matrix.charpoly(sp.Symbol("z"))
    return lambda at: sp.simplify(polynomial.eval(at)), h, alpha


def test_E10_with_plus_every_step_size_diverges() -> None:
    at, h, alpha = momentum_polynomial(+1)
    assert equal(at(1), -alpha * lam * h)  # negative at 1, positive far out: a real root beyond 1


def test_E10_with_minus_it_converges_just_where_the_software_says() -> None:
    at, h, alpha = momentum_polynomial(-1)
    # Jury's conditions: both values positive, and the product of the roots, 1 − λ, inside the circle
    assert equal(at(1), alpha * lam * h)
    assert equal(at(-1), 2 * (2 - lam) - alpha * lam * h)
    assert equal(at(0), 1 - lam)
    coupling = heavy_ball(0.75).coupling(1, 0.1)  # λ = ¼, learning rate αλ
    assert coupling.max_stable_lr(curvature=1.0) == pytest.approx(2 * (2 - 0.25), rel=1e-14)


def test_E10_heavy_ball_is_the_section_with_minus() -> None:
    assert heavy_ball(0.75).coupling(1, 0.1) == Coupling(a=-0.75, b=1.0, p=1.0, q=0.0)
    alpha, mu = sp.Symbol("alpha", positive=True), 1 - lam
    w, v = w1, sp.Integer(0)
    model, average = w1, w1
    for n in range(4):
        gradient = sp.Symbol(f"g{n}")  # whatever it may be: the two are at the same point
        w, v = momentum_step(w, v, gradient, -1)
        model, average = couple(model, average, -alpha * lam * gradient, a=-mu, b=1, p=1, q=0)
        assert equal(model, w)


# E11: where the average starts ---------------------------------------------------------------------------------------


def test_E11_without_any_gradient_an_average_elsewhere_drags_the_weights_to_the_centre_of_mass() -> None:
    new1, new2 = algorithm1(w1, w2, 0, k=k, m1=m1, m2=m2, dt=dt)
    assert equal(m1 * new1 + m2 * new2, m1 * w1 + m2 * w2)  # the centre stays …
    assert equal(new2 - new1, (factor1 + factor2 - 1) * (w2 - w1))  # … and the distance dies out
    spring, pair = Spring(**TWO_D), (0.0, 1.0)
    for _ in range(500):
        pair = step(spring.coupling(), *pair, 0.0)
    assert pair == pytest.approx((2 / 3, 2 / 3), rel=1e-14)  # 0.925^500 is 1e-17: two thirds of the way, lost


def test_E11_an_average_that_starts_as_a_copy_moves_nothing() -> None:
    for new in algorithm1(w1, w1, 0, k=k, m1=m1, m2=m2, dt=dt):
        assert equal(new, w1)
    assert step(Spring(**TWO_D).coupling(), 0.7, 0.7, 0.0) == (0.7, 0.7)


def test_E11_belay_starts_its_average_as_a_copy() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    belay = Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), Spring(**TWO_D))
    average = belay.average_state_dict()
    assert set(average) == {"weight", "bias"}
    assert all(torch.equal(average[name], weight) for name, weight in model.state_dict().items())


# E12: when the gradient at the average is the average of gradients ---------------------------------------------------


def weights(t: int) -> list[sp.Expr]:
    """a_s = λ(1−λ)^(t−s), s = 0, …, t."""
    return [lam * (1 - lam) ** (t - s) for s in range(t + 1)]


def mismatch(gradient: Callable[[sp.Expr], sp.Expr], shares: list[sp.Expr]) -> sp.Expr:
    """Gradient at the average minus average of the gradients, over unknown points."""
    points = sp.symbols(f"p:{len(shares)}", real=True)
    average = sum(a * p for a, p in zip(shares, points, strict=True))
    return sp.expand(gradient(average) - sum(a * gradient(p) for a, p in zip(shares, points, strict=True)))


def test_E12_the_weights_sum_to_less_than_1() -> None:
    t = sp.Symbol("t", integer=True, nonnegative=True)
    total = 1 - (1 - lam) ** (t + 1)
    assert equal(total.subs(t, 0), lam)  # by induction: one weight λ, …
    assert equal(total.subs(t, t + 1), lam + (1 - lam) * total)  # … and a newer one lowers all others by 1 − λ
    assert equal(sum(weights(5)), total.subs(t, 5))


def test_E12_the_software_gives_the_missing_weight_to_the_copy_that_it_starts_from() -> None:
    points = sp.symbols("p:5", real=True)
    average = w1
    for before, point in zip((w1, *points[:-1]), points, strict=True):
        _, average = couple(before, average, point - before, a=0, b=lam, p=1, q=lam)
    for point, share in zip(points, weights(4), strict=True):
        assert equal(sp.diff(average, point), share)
    assert equal(sp.diff(average, w1), (1 - lam) ** 5)


def test_E12_an_affine_gradient_is_enough_once_the_weights_sum_to_1() -> None:
    h, g = sp.symbols("h g", real=True)
    truncated = weights(3)
    assert equal(mismatch(lambda w: h * w + g, truncated), g * (1 - lam) ** 4)  # even for L linear, h = 0
    assert equal(mismatch(lambda w: h * w + g, [*truncated, (1 - lam) ** 4]), 0)


def test_E12_an_affine_gradient_is_needed() -> None:
    assert mismatch(lambda w: w**2, [lam, 1 - lam]) != 0  # L = w³/3
    point, reach = sp.symbols("point reach", real=True)
    slope = sp.Function("slope")
    gap = slope(point + lam * reach) - lam * slope(point + reach) - (1 - lam) * slope(point)
    second = gap.diff(reach, 2).subs(reach, 0).doit()
    # the gap at small distances is half of this times reach²: to vanish everywhere, the gradient needs slope'' = 0
    assert equal(second, -lam * (1 - lam) * slope(point).diff(point, 2))


# E13: units ----------------------------------------------------------------------------------------------------------


def test_E13_the_unit_of_eta_is_a_time_squared_over_a_mass() -> None:
    metre, second, kilogram, gram = sp.symbols("metre second kilogram gram", positive=True)
    newton = kilogram * metre / second**2
    eta = metre / newton  # a position is η times a force
    assert equal(eta, second**2 / kilogram)
    assert not equal(eta, second**2 / metre)
    pull = (newton / metre) * second**2 / gram  # k·Δt²/m with masses in g: a thousand, and not a number
    assert equal(pull.subs(gram, kilogram / 1000), 1000)


def test_E13_only_two_ratios_matter_so_that_units_cancel() -> None:
    mass, time = sp.symbols("mass time", positive=True)  # other units of mass and time
    before = algorithm1(w1, w2, u, k=k, m1=m1, m2=m2, dt=dt)
    after = algorithm1(w1, w2, u, k=k * mass / time**2, m1=m1 * mass, m2=m2 * mass, dt=dt * time)
    assert all(equal(x, y) for x, y in zip(before, after, strict=True))


# E14: the force on an infinite mass ----------------------------------------------------------------------------------


def test_E14_the_update_of_a_fixed_force_vanishes_as_the_mass_grows() -> None:
    f = sp.Symbol("f", positive=True)
    update = f * dt**2 / (2 * factor1 * m1)
    assert sp.limit(update, m1, sp.oo) == 0
    assert equal(sp.limit(update.subs(f, f * m1), m1, sp.oo), f * dt**2 / 2)  # a force that grows with the mass


def test_E14_here_an_infinite_mass_moves_by_the_whole_update() -> None:
    assert step(Spring(k=1.0, m1=math.inf, m2=10.0).coupling(), 1.0, 5.0, 0.25)[0] == 1.25


# E15: one mass where two move ----------------------------------------------------------------------------------------


def test_E15_the_distance_closes_by_the_reduced_mass() -> None:
    new1, new2 = algorithm1(w1, w2, 0, k=k, m1=m1, m2=m2, dt=dt)
    reduced = m1 * m2 / (m1 + m2)
    assert equal(new1 - new2, (1 - k * dt**2 / (2 * reduced)) * (w1 - w2))
    assert MNIST["m1"] / (MNIST["m1"] + MNIST["m2"]) == 0.8  # its own mass alone, for the average: a fifth too slow


def test_E15_the_softwares_rule_has_the_reduced_mass() -> None:
    spring = Spring.for_steps(10_000, **MNIST, rule="exact")
    reduced = 2000 * 500 / (2000 + 500)
    assert math.log(spring.decay) * 10_000 == pytest.approx(math.log1p(-1 / (2 * reduced)) * 1_000_000, rel=1e-9)


# E16: k is 1, and is not ---------------------------------------------------------------------------------------------


def test_E16_the_rule_gives_1_for_a_million_steps_only() -> None:
    assert Spring.for_steps(1_000_000, **MNIST).k == 1
    assert [Spring.for_steps(T, **MNIST).k for T in (100_000, 2_000_000)] == [10.0, 0.5]


# E17: the name of the scheme -----------------------------------------------------------------------------------------


def test_E17_forward_euler_would_not_move_from_rest() -> None:
    acceleration = k / m2 * (w1 - w2)
    velocity = sp.Integer(0)
    assert equal(w2 + dt * velocity, w2)  # forward Euler: x + Δt·v
    printed = with_velocities(v1=0, v2=0, u=0)[1]
    assert equal(printed - w2, dt**2 / 2 * acceleration)
    no_velocity = with_velocities(u=0, c1=2 * m1 / dt, c2=2 * m2 / dt)[1]
    assert equal(no_velocity - w2, dt**2 / 2 * acceleration)  # all that is left at c = 2m


# The page that tells people ------------------------------------------------------------------------------------------


def test_every_proof_is_named_on_the_page_and_every_name_there_is_a_proof() -> None:
    page = (ROOT / "docs" / "errata.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (E\d+)", page, flags=re.M) == [f"E{n}" for n in range(1, 18)]
    here = [name for name in globals() if name.startswith("test_E")]
    assert re.findall(r"`(test_E\w+)`", page) == here


# The numbers in the words ---------------------------------------------------------------------------------------------


def test_the_numbers_on_the_page_are_these() -> None:
    words = " ".join((ROOT / "docs" / "errata.md").read_text(encoding="utf-8").split())
    inverse = 1 / MNIST["m1"] + 1 / MNIST["m2"]
    left = [steps * math.log1p(-Spring.for_steps(steps, **MNIST).k * inverse / 2) for steps in (10_000, 1_000_000)]
    assert f"it is off by {left[0] / left[1] - 1:.0%} at 10,000 steps (in the logarithm of that share)" in words
    with pytest.raises(ValueError, match="is no average"):
        Spring.for_steps(1000, **MNIST)
    assert "and at 1,000 steps it is not an average" in words
    as_decay, in_eq_1 = (Spring.ema(decay=decay).half_life for decay in (0.95, 1 - 0.95))
    assert f"has a half-life of {as_decay:.1f} steps, and in Eq. 1 one of {in_eq_1:.2f} steps" in words
    ema, belay = (s.max_stable_lr(202.0) for s in (Spring.ema(decay=0.95), Spring(**TWO_D)))
    assert f"stable below {ema:.6f}, BELAY with (k, m1, m2) = (1, 10, 20) below {belay:.6f}" in words
    off = [1 - (1 / MNIST[mass]) / inverse for mass in ("m2", "m1")]
    assert off == pytest.approx([1 / 5, 4 / 5])
    assert "`m2` alone is off by a fifth, and `m1` alone by four fifths" in words
    drawn = TWO_D["m2"] / (TWO_D["m1"] + TWO_D["m2"])
    assert drawn == pytest.approx(2 / 3)
    assert "of the distance, two thirds of it for (k, m1, m2) = (1, 10, 20)" in words

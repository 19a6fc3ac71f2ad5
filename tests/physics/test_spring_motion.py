"""Spring: every closed form against the eigenvalues of Algorithm 1, which `step_matrix` states independently."""

import math
import warnings
from fractions import Fraction
from typing import Any, get_args

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchbelay.physics.spring import Force, Spring
from torchbelay.physics.warnings import UnstableSpringWarning

Array = NDArray[np.float64]
Setting = dict[str, Any]
INF = math.inf
FORCES = get_args(Force)


# The oracle ------------------------------------------------------------------------------------------------------


def step_matrix(
    *, k: Any, m1: Any, m2: Any, c1: Any, c2: Any, dt: Any = 1, force: str = "derived", push: Any = 0
) -> tuple[list[list[Any]], list[Any]]:
    """Return the matrix of Algorithm 1 on (w1, w2, v1, v2) under the update u − push·w1, and the column of u.

    It uses only + − × /, and so takes floats, fractions and numpy arrays.
    """
    kappa1, kappa2 = k * dt * dt / (2 * m1), k * dt * dt / (2 * m2)
    alpha, beta = 1 - kappa1, 1 - kappa2
    s = 2 * alpha / dt if force == "derived" else 1 / (2 * alpha * dt)
    matrix = [
        [alpha * (1 - push), 1 - alpha, dt - c1 * dt * dt / (2 * m1), 0],
        [1 - beta, beta, 0, dt - c2 * dt * dt / (2 * m2)],
        [-k * dt / m1 - s * push, k * dt / m1, 1 - c1 * dt / m1, 0],
        [k * dt / m2, -k * dt / m2, 0, 1 - c2 * dt / m2],
    ]
    return matrix, [alpha, 0, s, 0]


def rows(kind: str) -> list[int]:
    """Return the indices in (w1, w2, v1, v2) that move: velocities that matter, and an average that is not fixed."""
    return {"free": [0, 1], "first": [0, 1, 2], "second": [0, 1, 3], "m1=inf": [0, 1, 3], "m2=inf": [0, 2]}.get(
        kind, [0, 1, 2, 3]
    )


def matrices(kind: str, setting: dict[str, Array], force: str, push: Any = 0.0) -> Array:
    """Return the step matrices of many settings, reduced to the rows that move."""
    matrix, _ = step_matrix(**{"c1": 0.0, "c2": 0.0} | setting, force=force, push=push)
    full = np.stack([np.stack([np.broadcast_to(x, setting["k"].shape) for x in row], -1) for row in matrix], -2)
    keep = rows(kind)
    return full[:, keep][:, :, keep]


def radius(matrix: Array) -> Array:
    """Return the spectral radii."""
    return np.abs(np.linalg.eigvals(matrix)).max(-1)


def radius_without_translation(matrix: Array) -> Array:
    """Return the spectral radii without the eigenvalue closest to 1."""
    values = np.linalg.eigvals(matrix)
    np.put_along_axis(values, np.abs(values - 1).argmin(-1)[:, None], 0, -1)
    return np.abs(values).max(-1)


# Random settings -------------------------------------------------------------------------------------------------

# Both masses with a velocity and the same δ, or unequal ones; one mass velocity-free; none; one infinite mass.
KINDS = ("free", "equal", "unequal", "first", "second", "m1=inf", "m2=inf")


def random_settings(kind: str, count: int, seed: int, *, most: float = 1.05) -> dict[str, Array]:
    """Return random settings: masses over four decades, κ from 1e-4 to 1, δ up to `most`."""
    rng = np.random.default_rng(seed)
    m1, m2 = np.exp(rng.uniform(-2, 7, (2, count)))
    k = 2 * np.minimum(m1, m2) * np.exp(rng.uniform(math.log(1e-4), math.log(0.99), count))
    delta1, delta2 = rng.uniform(0.0, most, (2, count))
    setting = {"k": k, "m1": m1, "m2": m2}
    if kind == "m1=inf":
        setting["m1"] = np.full(count, INF)
    if kind == "m2=inf":
        setting["m2"] = np.full(count, INF)
    if kind in ("equal", "unequal", "first", "m2=inf"):
        setting["c1"] = 2 * m1 * delta1
    if kind in ("equal", "unequal", "second", "m1=inf"):
        setting["c2"] = 2 * m2 * (delta1 if kind == "equal" else delta2)
    return setting


def springs(setting: dict[str, Array], **more: Any) -> list[Spring]:
    """Return the spring of each setting, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpringWarning)
        return [
            Spring(**dict(zip(setting, map(float, values), strict=True)), **more)
            for values in zip(*setting.values(), strict=True)
        ]


def quiet(**setting: Any) -> Spring:
    """Return a spring without a warning, stable or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpringWarning)
        return Spring(**setting)


def stable(setting: dict[str, Array], **more: Any) -> tuple[dict[str, Array], list[Spring]]:
    """Return the settings whose spring is stable, and their springs."""
    made = springs(setting, **more)
    mask = np.array([s.is_stable for s in made])
    return {name: values[mask] for name, values in setting.items()}, [s for s in made if s.is_stable]


# Free motion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_is_stable_agrees_with_the_eigenvalues(kind: str) -> None:
    setting = random_settings(kind, 3000, seed=1)
    matrix = matrices(kind, setting, "derived")
    largest = radius(matrix) if kind == "m2=inf" else radius_without_translation(matrix)
    clear = np.abs(largest - 1) > 1e-9  # a double eigenvalue is computed to the root of the precision
    assert clear.mean() > 0.99
    says = np.array([s.is_stable for s in springs(setting)])
    assert (says == (largest < 1))[clear].all()
    assert kind == "free" or 0.1 < says.mean() < 0.99  # both answers occur


@pytest.mark.parametrize("most", [1.05, 0.2])
def test_equal_damping_is_stable_between_a_quarter_of_omega_squared_and_one(most: float) -> None:
    for s in springs(random_settings("equal", 2000, seed=2, most=most)):
        delta, omega2 = s.c1 / (2 * s.m1), s.k * (1 / s.m1 + 1 / s.m2)
        assert s.is_stable == (0 < omega2 < 4 * delta and delta < 1)


@pytest.mark.parametrize("factor", [1 - 1e-9, 1 + 1e-9])
@pytest.mark.parametrize("border", ["omega", "one"])
def test_the_border_of_equal_damping_is_sharp(border: str, factor: float) -> None:
    k, m1, m2 = 0.3, 2.0, 5.0
    delta = k * (1 / m1 + 1 / m2) / 4 * factor if border == "omega" else 1 / factor
    assert quiet(k=k, m1=m1, m2=m2, c1=2 * m1 * delta, c2=2 * m2 * delta).is_stable == (factor > 1)


def test_one_undamped_mass_of_two_equal_ones_never_comes_to_rest() -> None:
    # |λ|² = 1 − 2κ + 2κ for its pair: on the circle for every κ and under every rounding.
    for s in springs({"k": np.geomspace(1e-6, 3, 500), "m1": np.full(500, 2.0), "m2": np.full(500, 2.0)}, c2=0.0):
        assert s.regime == "unstable"


def test_decay_is_the_spectral_radius_of_the_distance_for_equal_damping() -> None:
    setting = random_settings("equal", 3000, seed=3)
    matrix = matrices("equal", setting, "derived")
    distance = np.array([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]])  # the motion of these two is closed
    relative = distance @ matrix @ np.linalg.pinv(distance)
    assert np.allclose(distance @ matrix, relative @ distance, rtol=0, atol=1e-12)
    expected = radius(relative)
    made = springs(setting)
    # Near a double root both sides are accurate only to the square root of the precision.
    assert np.allclose([s.decay for s in made], expected, rtol=1e-7, atol=0)
    halved = np.array([s.half_life for s in made])  # infinite if the distance grows
    assert np.allclose(0.5 ** (1 / halved), np.minimum(expected, 1), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", ["unequal", "first", "second", "m1=inf", "m2=inf", "free"])
def test_decay_is_the_largest_mode_but_translation_otherwise(kind: str) -> None:
    setting = random_settings(kind, 2000, seed=4)
    matrix = matrices(kind, setting, "derived")
    largest = radius(matrix) if kind == "m2=inf" else radius_without_translation(matrix)
    assert np.allclose([s.decay for s in springs(setting)], largest, rtol=1e-7, atol=1e-15)  # double roots again


@pytest.mark.parametrize("kappa", [0.4, 1e-3, 1e-9, 1e-16, 1e-25])
def test_half_life_of_a_velocity_free_spring_keeps_its_digits(kappa: float) -> None:
    s = Spring(k=2 * kappa, m1=3.0, m2=1.0)
    assert s.half_life == pytest.approx(math.log(0.5) / math.log1p(-kappa * 4 / 3), rel=1e-14)
    assert s.is_stable  # although 1 − κ rounds to 1


@pytest.mark.parametrize(
    "setting",
    [
        {"k": 1e-9, "m1": 3.0, "m2": 1.0, "c1": 0.3, "c2": 0.1},
        {"k": 1e-9, "m1": 3.0, "m2": 1.0, "c1": 0.3, "c2": 1.9},
        {"k": 1.0, "m1": 3e7, "m2": 1e12, "c1": 2e6, "c2": 2e12},
        {"k": 1.0, "m1": 2e4, "m2": 2e3, "c1": 20.0, "c2": 1.0},
        {"k": 1e-6, "m1": 1.0, "m2": 1e3, "c1": 1e-5, "c2": 0.5, "force": "printed"},
    ],
    ids=str,
)
def test_half_life_of_slow_springs_with_velocities_against_60_digits(setting: Setting) -> None:
    with mpmath.workdps(60):
        matrix, _ = step_matrix(**{n: mpmath.mpf(x) if n != "force" else x for n, x in setting.items()})
        if setting["c2"] == 2 * setting["m2"]:
            matrix = [row[:3] for row in matrix[:3]]
        values = sorted(mpmath.eig(mpmath.matrix(matrix), right=False), key=lambda z: abs(z - 1))[1:]
        if setting["c1"] / setting["m1"] == setting["c2"] / setting["m2"]:  # the common velocity is no distance
            values.remove(min(values, key=lambda z: abs(z - 1 + mpmath.mpf(setting["c1"]) / setting["m1"])))
        expected = float(mpmath.log(0.5) / mpmath.log(max(abs(z) for z in values)))
    assert Spring(**setting).half_life == pytest.approx(expected, rel=1e-11)


def test_a_spring_that_jumps_onto_its_average_has_no_half_life() -> None:
    s = Spring(k=1.0, m1=1.0, m2=1.0)
    assert (s.decay, s.half_life) == (0.0, 0.0)


# Critical damping ------------------------------------------------------------------------------------------------


def test_critical_damping_closes_the_distance_by_one_minus_omega() -> None:
    setting = random_settings("free", 1000, seed=5)
    for k, m1, m2 in zip(*setting.values(), strict=True):
        s = Spring.critical(k=k, m1=m1, m2=m2)
        omega = math.sqrt(k * (1 / m1 + 1 / m2))
        assert s.regime == "critical"
        assert s.c1 / (2 * m1) == pytest.approx(omega - omega**2 / 4, rel=1e-14)
        # A rounding ε of δ moves a double root by √ε.
        assert s.decay == pytest.approx(abs(1 - omega), abs=1e-7 * omega)


@pytest.mark.parametrize("omega", [0.01, 0.5, 1.0, 1.6])
def test_critical_damping_is_the_fastest_and_divides_the_regimes(omega: float) -> None:
    s = Spring.critical(k=omega**2 / 2, m1=1.0, m2=1.0)
    less, more = (Spring(k=s.k, m1=1.0, m2=1.0, c1=s.c1 * f, c2=s.c2 * f) for f in (1 - 1e-4, 1 + 1e-4))
    assert (less.regime, s.regime, more.regime) == ("underdamped", "critical", "overdamped")
    assert s.decay < min(less.decay, more.decay)


@pytest.mark.parametrize(("m1", "m2"), [(INF, 3.0), (3.0, INF)])
def test_critical_damping_does_not_damp_an_infinite_mass(m1: float, m2: float) -> None:
    s = Spring.critical(k=0.5, m1=m1, m2=m2, dt=0.5)
    assert [c is None for c in (s.c1, s.c2)] == [m == INF for m in (m1, m2)]
    assert s.regime == "critical"
    assert s.decay == pytest.approx(1 - 0.5 * math.sqrt(0.5 / 3), abs=1e-7)  # √ε again


# Under a force ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("kind", KINDS)
def test_effective_lr_scale_is_the_drift_of_a_long_run(kind: str, force: str) -> None:
    setting, made = stable(random_settings(kind, 800, seed=6), force=force)
    matrix = matrices(kind, setting, force)
    _, column = step_matrix(**{"c1": 0.0, "c2": 0.0} | setting, force=force)
    gain = np.stack([np.broadcast_to(column[i], setting["k"].shape) for i in rows(kind)], -1)
    quick = (radius if kind == "m2=inf" else radius_without_translation)(matrix) ** 3000 < 1e-12
    matrix, gain = matrix[quick], gain[quick]
    assert len(gain) > 150
    state = np.zeros_like(gain)
    for _ in range(3000):
        state = (matrix @ state[..., None])[..., 0] + gain
    drift = (matrix @ state[..., None])[..., 0] + gain - state
    expected = [s.effective_lr_scale for s, q in zip(made, quick, strict=True) if q]
    # w1 is about 3000 at the end, and the difference of two steps there has 12 digits.
    assert np.allclose(drift[:, 0], expected, rtol=0, atol=1e-9)
    if kind not in ("m1=inf", "m2=inf"):
        assert np.allclose(drift[:, 1], expected, rtol=0, atol=1e-9)  # the pair moves together


@pytest.mark.parametrize("kind", ["free", "equal", "unequal", "first", "second"])
def test_effective_lr_scale_in_closed_form_with_the_derived_force(kind: str) -> None:
    for s in stable(random_settings(kind, 500, seed=7))[1]:
        c1, c2 = (2 * m if c is None else c for m, c in ((s.m1, s.c1), (s.m2, s.c2)))
        alpha = 1 - s.k / (2 * s.m1)
        assert s.effective_lr_scale == pytest.approx(2 * alpha * s.m1 / (c1 + c2), rel=1e-13)
        if kind == "free":
            assert s.effective_lr_scale == pytest.approx(alpha / (1 + s.m2 / s.m1), rel=1e-13)


def test_effective_lr_scale_without_any_brake_is_infinite() -> None:
    for force in FORCES:
        assert quiet(k=0.1, m1=1.0, m2=2.0, c1=0.0, c2=0.0, force=force).effective_lr_scale == INF
    # a brake that vanishes with dt
    assert quiet(k=1.0, m1=0.1, m2=1.0, c1=9.9e-322, c2=0.0, dt=1e-3).effective_lr_scale == INF


def test_effective_lr_scale_beside_an_infinite_mass() -> None:
    for force in FORCES:
        assert Spring(k=0.1, m1=INF, m2=2.0, c2=1.0, force=force).effective_lr_scale == 1
        assert Spring(k=0.1, m1=2.0, m2=INF, c1=1.0, force=force).effective_lr_scale == 0
    assert Spring(k=0.1, m1=2.0, m2=INF).effective_lr_scale == 0


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("kind", KINDS)
def test_max_stable_lr_is_where_the_step_first_leaves_the_unit_circle(kind: str, force: str) -> None:
    setting, made = stable(random_settings(kind, 400, seed=8), force=force)
    limit = np.array([s.max_stable_lr(1.0) for s in made])
    assert len(limit) > 100

    def at(share: float) -> Array:
        return radius(matrices(kind, setting, force, push=limit * share))

    assert (at(1 - 1e-6) < 1).all()
    assert (at(1 + 1e-6) > 1).all()
    for share in np.linspace(0.02, 0.99, 50):  # the first crossing: nothing left the circle before
        assert (at(share) < 1).all()
    by_curvature = [s.max_stable_lr(7.0) for s in made]
    assert np.allclose(by_curvature, limit / 7, rtol=1e-15, atol=0)


def test_max_stable_lr_in_closed_form_without_velocities() -> None:
    for s in springs(random_settings("free", 2000, seed=9)):
        alpha, beta = 1 - s.k / (2 * s.m1), 1 - s.k / (2 * s.m2)
        assert s.max_stable_lr(3.0) == pytest.approx(2 * (alpha + beta) / (alpha * (1 + beta)) / 3, rel=1e-13)


def characteristic(matrix: list[list[Fraction]]) -> list[Fraction]:
    """Return the coefficients of det(λI − M), highest first, without rounding (Faddeev and LeVerrier)."""
    span = range(len(matrix))
    adjugate = [[Fraction(i == j) for j in span] for i in span]
    coefficients = [Fraction(1)]
    for power in range(1, len(matrix) + 1):
        product = [[sum(matrix[i][m] * adjugate[m][j] for m in span) for j in span] for i in span]
        coefficients.append(-sum(product[i][i] for i in span) / power)
        adjugate = [[product[i][j] + coefficients[-1] * (i == j) for j in span] for i in span]
    return coefficients


def inside_the_circle(coefficients: list[Fraction]) -> bool:
    """Whether all roots lie inside the unit circle, by the recursion of Schur and Cohn, without rounding."""
    while len(coefficients) > 1:
        first, last = coefficients[0], coefficients[-1]
        if abs(last) >= abs(first):
            return False
        coefficients = [first * x - last * y for x, y in zip(coefficients, reversed(coefficients), strict=True)][:-1]
    return True


@pytest.mark.parametrize("force", FORCES)
def test_max_stable_lr_holds_for_heavy_lightly_damped_masses(force: str) -> None:
    # Slow modes crowd within 1e-7 of 1, too close for numpy's eigenvalues.
    rng = np.random.default_rng(10)
    checked = 0
    for m1, m2, d1, d2 in zip(*10 ** rng.uniform((0.5, 0.5, -4, -4), (7, 7, 0, 0), (150, 4)).T, strict=True):
        setting = {"k": 1.0, "m1": float(m1), "m2": float(m2), "c1": float(2 * m1 * d1), "c2": float(2 * m2 * d2)}
        s = quiet(**setting, force=force)
        if not s.is_stable:
            continue
        limit = s.max_stable_lr(1.0)
        for share, expected in ((0.5, True), (1 - 1e-6, True), (1 + 1e-6, False)):
            matrix, _ = step_matrix(
                **{n: Fraction(x) for n, x in setting.items()}, force=force, push=Fraction(limit * share)
            )
            assert inside_the_circle(characteristic(matrix)) == expected
        checked += 1
    assert checked > 80


def test_an_unstable_spring_with_velocities_has_no_stable_lr() -> None:
    assert quiet(k=1.0, m1=1.0, m2=1.0, c1=0.1, c2=0.1).max_stable_lr(1.0) == 0


@pytest.mark.parametrize(
    ("setting", "name", "digits", "value"),
    [
        ({"m1": 10.0, "m2": 20.0}, "effective_lr_scale", 4, 0.3167),
        ({"m1": 2000.0, "m2": 500.0}, "effective_lr_scale", 4, 0.7998),
        ({"m1": 20000.0, "m2": 2000.0}, "effective_lr_scale", 4, 0.9091),
        ({"m1": 10.0, "m2": 20.0}, "theta", 12, 2.0),
    ],
)
def test_numbers_of_the_papers_settings(setting: Setting, name: str, digits: int, value: float) -> None:
    assert round(getattr(Spring(k=1.0, **setting), name), digits) == value


def test_stable_rates_of_the_papers_rosenbrock() -> None:
    belay = Spring(k=1.0, m1=10.0, m2=20.0)
    assert round(Spring.ema(decay=0.95).max_stable_lr(202), 6) == 0.009901
    assert round(belay.max_stable_lr(202), 6) == 0.010158
    assert round(Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0).max_stable_lr(1), 3) == 0.471
    assert round(belay.max_stable_lr(1) * belay.effective_lr_scale, 2) == 0.65


# Units -----------------------------------------------------------------------------------------------------------

NUMBERS = ("kappa1", "kappa2", "omega", "theta", "decay", "half_life", "effective_lr_scale")


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("kind", KINDS)
def test_only_k_dt2_and_c_dt_count(kind: str, force: str) -> None:
    setting = random_settings(kind, 150, seed=11)
    dt = np.exp(np.random.default_rng(12).uniform(-3, 3, 150))
    damping = {name: setting[name] / dt for name in ("c1", "c2") if name in setting}
    slow = springs(setting | damping | {"k": setting["k"] / dt**2, "dt": dt}, force=force)
    for s, unit in zip(slow, springs(setting, force=force), strict=True):
        assert s.regime == unit.regime
        for name in NUMBERS:  # ulps of the inputs, times the condition of modes that come to within 1e-5 of each other
            assert getattr(s, name) == pytest.approx(getattr(unit, name), rel=1e-9), name
        assert s.max_stable_lr(1.0) == pytest.approx(unit.max_stable_lr(1.0), rel=1e-9)


def test_velocities_are_measured_in_units_of_time() -> None:
    dt, unit = 0.25, Spring(k=0.5, m1=2.0, m2=3.0, c1=1.0, c2=2.0)
    s = Spring(k=0.5 / dt**2, m1=2.0, m2=3.0, c1=1.0 / dt, c2=2.0 / dt, dt=dt)
    for ours, theirs in ((s.inertia1, unit.inertia1), (s.inertia2, unit.inertia2)):
        assert ours == (theirs.carry * dt, theirs.stay, theirs.pull / dt, theirs.push / dt)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.floats(1e-3, 1e3))
def test_damping_of_2m_over_dt_is_velocity_free_under_every_rounding(m1: float, m2: float, dt: float) -> None:
    k = min(m1, m2) / dt**2
    s = Spring(k=k, m1=m1, m2=m2, c1=2 * m1 / dt, c2=2 * m2 / dt, dt=dt)
    assert (s.regime, s.coupling()) == ("velocity-free", Spring(k=k, m1=m1, m2=m2, dt=dt).coupling())

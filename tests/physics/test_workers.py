"""Workers on equal springs: their modes against eigenvalues of the whole map, and what is said of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.spring import Spring
from torchbelay.physics.workers import Workers, gathering, share_of_each

shares = st.floats(0.001, 0.3)


def whole(c: Coupling, n: int, push: float = 0.0) -> np.ndarray:
    """The map of w1_1, …, w1_n, w2 under u_i = −push·w1_i, written down element by element."""
    found = np.zeros((n + 1, n + 1))
    for i in range(n):
        found[i, i] = 1 - c.a - c.p * push
        found[i, n] = c.a
        found[n, i] = c.b - c.q * push
    found[n, n] = 1 - n * c.b
    return found


@given(a=shares, b=shares, n=st.integers(1, 6))
def test_the_modes_are_the_eigenvalues_of_all_bodies(a: float, b: float, n: int) -> None:
    workers = Workers(Coupling(a, b, 1.0, 0.0), n)
    found = np.sort(np.linalg.eigvals(whole(workers.coupling, n)).real)
    assert found == pytest.approx(sorted(workers.eigenvalues), abs=1e-9)


@given(a=shares, b=shares, n=st.integers(1, 6), whole_update=st.booleans(), after=st.booleans())
def test_a_rate_below_the_limit_is_stable_and_one_above_is_not(
    a: float, b: float, n: int, whole_update: bool, after: bool
) -> None:
    b = min(b, 0.9 * (1 - a) / n)
    workers = Workers(Coupling(a, b, 1.0 if whole_update else 1 - a, b if after else 0.0), n)
    limit = workers.max_stable_lr(curvature=2.0) * 2.0
    assert math.isfinite(limit)
    radius = [max(abs(np.linalg.eigvals(whole(workers.coupling, n, x * limit)))) for x in (0.999, 1.001)]
    assert radius[0] < 1 < radius[1]


@given(a=shares, b=shares, n=st.integers(1, 6))
def test_the_centre_of_mass_moves_at_the_effective_rate(a: float, b: float, n: int) -> None:
    workers = Workers(Coupling(a, b, 1 - a, 0.0), n)
    state, step = np.zeros(n + 1), whole(workers.coupling, n)
    push = np.array([workers.coupling.p] * n + [0.0])
    weights = np.array([b] * n + [a]) / (n * b + a)
    before = weights @ state
    state = step @ state + push
    assert weights @ state - before == pytest.approx(workers.effective_lr_scale)


@given(a=shares, b=shares, n=st.integers(1, 5), steps=st.integers(1, 6))
def test_several_steps_as_one_move_mean_and_average_as_the_steps_do(a: float, b: float, n: int, steps: int) -> None:
    b = min(b, 0.9 * (1 - a) / n)
    workers = Workers(Coupling(a, b, 1 - a, 0.0), n)
    once = workers.compound(steps)
    start = np.array([*range(1, n + 1), 0.0])
    slow, quick = np.linalg.matrix_power(whole(workers.coupling, n), steps) @ start, whole(once.coupling, n) @ start
    assert quick[-1] == pytest.approx(slow[-1])
    assert quick[:-1].mean() == pytest.approx(slow[:-1].mean())
    assert 0 <= once.coupling.a <= 1 - (1 - a) ** steps + 1e-12  # differences shrink no more than in the steps


def test_one_worker_is_the_pair_itself() -> None:
    coupling = Spring(k=1.0, m1=10.0, m2=20.0).coupling()
    alone = Workers(coupling, 1)
    assert alone.pair == coupling
    assert alone.max_stable_lr(3.0) == coupling.max_stable_lr(3.0)
    assert alone.eigenvalues == coupling.eigenvalues


def test_what_methods_do_with_workers() -> None:
    assert gathering(Spring(k=1.0, m1=10.0, m2=20.0)) == gathering(methods.easgd(0.1)) == "spring"
    assert gathering(methods.lookahead()) == gathering(methods.diloco()) == "mean"
    assert gathering(methods.swa()) is None


def test_springs_that_are_too_strong_are_refused_with_the_cure() -> None:
    easgd, spring = methods.easgd(0.2), Spring(k=1.0, m1=1.0, m2=2.0)
    assert share_of_each(easgd, easgd.coupling(1, 0.0), 3) == Coupling(0.2, 0.2, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"with 4 workers has a \+ N·b = 1, .*use α < 1/\(N \+ 1\) = 0\.2$"):
        share_of_each(easgd, easgd.coupling(1, 0.0), 4)
    with pytest.raises(ValueError, match=r"with 4 workers has a \+ N·b = 1\.5.*weaken the springs by at least 1\.5"):
        share_of_each(spring, spring.coupling(), 4)


def test_a_mean_and_a_step_at_rest_have_no_limit() -> None:
    diloco, seldom = methods.diloco(every=2), methods.easgd(0.4, every=2)
    assert share_of_each(diloco, diloco.coupling(2, 0.0), 8) == diloco.coupling(2, 0.0)
    assert share_of_each(seldom, seldom.coupling(1, 0.0), 8).b == 0


def test_workers_in_words() -> None:
    said = Workers(methods.easgd(0.1).coupling(1, 0.0), 4).explain()
    assert "4 workers hang on one average" in said
    assert "a + N·b = 0.5 of its distance to the mean" in said
    assert "forgets half of it in 1 syncs" in said
    assert "The 3 differences between workers shrink by half in 6.58 syncs" in said
    assert "move at 0.8 of the optimizer's learning rate" in said
    assert "stable below ηh = 1.875; the mean of the workers would be the first to leave" in said
    assert "differences" not in Workers(methods.easgd(0.1).coupling(1, 0.0), 1).explain().split("If they")[0]
    strong = Workers(methods.easgd(0.4).coupling(1, 0.0), 4).explain()
    assert "unstable or overshoots: use α < 1/(N + 1) = 0.2" in strong
    assert "nothing holds them together" in Workers(methods.ema(0.9).coupling(1, 0.0), 2).explain()


def test_with_an_average_that_follows_after_the_step_differences_are_the_first_to_leave() -> None:
    workers = Workers(Spring(k=1.0, m1=10.0, m2=20.0, follow="after").coupling(), 3)
    assert workers.max_stable_lr(1.0) == pytest.approx(1.95 / 0.95)
    assert "the differences between workers would be the first" in workers.explain()
    assert Workers(Coupling(0.1, 0.1, -1.0, 0.0), 2).max_stable_lr(1.0) == 0


def test_a_count_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^count=0 .* needs count ≥ 1"):
        Workers(Coupling(0.1, 0.1, 1.0, 0.0), 0)


# DiLoCo -------------------------------------------------------------------------------------------------------------


@given(x=st.floats(0.01, 1.0), momentum=st.floats(0.0, 0.99), part=st.floats(0.05, 1.5))
def test_diloco_is_stable_below_its_limit_in_every_direction_that_does_not_overshoot(
    x: float, momentum: float, part: float
) -> None:
    """A round leaves 1 − x of the distance to the minimum; the outer step is Nesterov's on a curvature x."""
    limit = methods.diloco(momentum=momentum).max_stable_lr
    lr = part * limit
    step = np.array([[1 - lr * (1 + momentum) * x, lr * momentum**2], [-x, momentum]])
    radius = max(abs(np.linalg.eigvals(step)))
    if part < 0.999:
        assert radius < 1
    if part > 1.001 and x == 1.0:
        assert radius > 1


def test_the_limit_of_diloco_is_reached_where_a_round_comes_to_rest() -> None:
    for momentum in (0.0, 0.5, 0.9):
        limit = methods.diloco(momentum=momentum).max_stable_lr
        for part, stable in ((0.999, True), (1.001, False)):
            lr = part * limit
            step = np.array([[1 - lr * (1 + momentum), lr * momentum**2], [-1.0, momentum]])
            assert bool(max(abs(np.linalg.eigvals(step))) < 1) is stable


def test_diloco_keeps_what_it_says_of_a_constant_drift() -> None:
    method = methods.diloco(every=1, lr=0.3, momentum=0.5)
    w2 = v = 0.0
    for _ in range(200):
        before = w2
        w2, v = w2 + 0.3 * (1.5 * 1.0 + 0.25 * v), 0.5 * v + 1.0
    assert w2 - before == pytest.approx(method.effective_lr_scale) == pytest.approx(0.6)

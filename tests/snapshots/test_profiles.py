"""Profiles: what every average holds of every update, against the family's equations stepped number by number."""

import pytest
import torch
from torch import Tensor

import torchbelay as tb
from helpers.methods_under_test import METHODS
from torchbelay.physics.coupling import Inertia
from torchbelay.physics.method import Method
from torchbelay.snapshots.profiles import (
    Filter,
    couplings,
    filter_of,
    following,
    lives_of_pair,
    point_weights,
    profile,
    pulls,
    respond,
)

STEPS = 40
KNOWN = {name: make for name, make in METHODS.items() if getattr(make(), "varies", None) in ("never", "step")}
KNOWN |= {
    "spring with velocities": lambda: tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "spring with one velocity": lambda: tb.Spring(k=1.0, m1=10.0, m2=20.0, c2=10.0),
    "critical spring": lambda: tb.Spring.critical(k=1.0, m1=10.0, m2=20.0),
}


def train(method: Method, updates: Tensor, every: int = 1) -> tuple[Tensor, Tensor]:
    """Return w1 and w2 after every step, from 0 on, by the equations as they are printed."""
    w1 = w2 = v1 = v2 = torch.zeros((), dtype=torch.float64)
    swings = (getattr(method, "inertia1", None), getattr(method, "inertia2", None))
    one, two = (each or Inertia(0.0, 0.0, 0.0, 0.0) for each in swings)
    found = []
    for t, u in enumerate(updates, 1):
        c = tb.Coupling(0.0, 0.0, 1.0, 0.0)
        if t % every == 0:
            c = method.coupling(t - every + 1, 0.0)
            for later in range(t - every + 2, t + 1):
                c = c.then(method.coupling(later, 0.0))
        if isinstance(method, tb.methods.diloco):  # by its own equations
            w1 = w1 + u
            if t % method.every == 0:
                d, mu = w1 - w2, method.momentum
                w2, v2 = w2 + method.lr * ((1 + mu) * d + mu**2 * v2), mu * v2 + d
                w1 = w2
            found.append((w1, w2))
            continue
        away = w2 - w1
        w1, w2, v1, v2 = (
            w1 + c.a * away + c.p * u + one.carry * v1,
            w2 - c.b * away + c.q * u + two.carry * v2,
            one.stay * v1 + one.pull * away + one.push * u,
            two.stay * v2 - two.pull * away + two.push * u,
        )
        found.append((w1, w2))
    return torch.stack([each[0] for each in found]), torch.stack([each[1] for each in found])


def draw(steps: int = STEPS) -> Tensor:
    return torch.randn(steps, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", KNOWN)
def test_average_and_weights_are_their_profiles_times_the_updates(name: str) -> None:
    updates = draw()
    w1, w2 = train(KNOWN[name](), updates)
    f = filter_of(KNOWN[name](), STEPS)
    for step in (1, 2, 3, 17, STEPS):
        torch.testing.assert_close(profile(f, 0, step) @ updates[:step], w2[step - 1], rtol=1e-12, atol=1e-12)
        own = profile(f, 0, step, f.own) if f.own >= 0 else profile(None, 0, step)
        torch.testing.assert_close(own @ updates[:step], w1[step - 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("name", ["ema", "ema, lagged", "power_ema", "belay", "swa"])
def test_averages_that_couple_every_few_steps_have_their_own_profile(name: str, every: int) -> None:
    updates = draw()
    _, w2 = train(KNOWN[name](), updates, every)
    found = profile(filter_of(KNOWN[name](), STEPS, every=every), 0, STEPS) @ updates
    torch.testing.assert_close(found, w2[-1], rtol=1e-12, atol=1e-12)


PULLING = [name for name, make in KNOWN.items() if pulls(couplings(make(), STEPS))] + ["spring with velocities"]
WATCHING = [name for name in KNOWN if not pulls(couplings(KNOWN[name](), STEPS)) and "spring" not in name]


@pytest.mark.parametrize("born", [0, 1, 15])
@pytest.mark.parametrize("watcher", WATCHING)
@pytest.mark.parametrize("name", PULLING)
def test_an_average_that_watches_weights_that_are_pulled(name: str, watcher: str, born: int) -> None:
    updates = draw()
    w1, _ = train(KNOWN[name](), updates)
    points = torch.cat([w1.new_zeros(1), w1])
    w = points[born]
    method = KNOWN[watcher]()
    for t in range(1, STEPS - born + 1):
        c = method.coupling(t, 0.0)
        before, after = points[born + t - 1], points[born + t]
        w = w + c.b * (before - w) + c.q * (after - before)
    run = lives_of_pair([(0, filter_of(KNOWN[name](), STEPS))], STEPS)
    f = following(couplings(method, STEPS - born), born, run)
    torch.testing.assert_close(profile(f, 0, STEPS) @ updates, w, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(profile(f, 0, STEPS, f.own) @ updates, w1[-1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["belay", "lookahead", "spring with velocities"])
def test_a_pair_that_begins_late_and_begins_again(name: str) -> None:
    updates = draw()
    lives = [(4, filter_of(KNOWN[name](), STEPS - 4)), (19, filter_of(KNOWN[name](), STEPS - 19))]
    first, _ = train(KNOWN[name](), updates[4:19])
    start = updates[:4].sum() + first[-1]
    w1, w2 = train(KNOWN[name](), updates[19:])
    run = lives_of_pair(lives, STEPS)
    torch.testing.assert_close(profile(run, 0, 19) @ updates[:19], start)  # the average is the weights again
    torch.testing.assert_close(profile(run, 0, STEPS) @ updates, start + w2[-1])
    torch.testing.assert_close(profile(run, 0, STEPS, 1) @ updates, start + w1[-1])


def test_before_its_birth_an_average_is_the_weights() -> None:
    f = filter_of(tb.methods.ema(0.9), 10)
    late = profile(f, 6, 10)
    assert late[:6].tolist() == [1.0] * 6
    torch.testing.assert_close(late[6:], 1 - 0.9 ** torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))
    assert profile(f, 6, 4).tolist() == [1.0] * 4
    assert profile(None, 0, 3).tolist() == [1.0] * 3


@pytest.mark.parametrize("steps", [1, 2, 7, 50, 121])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_responses_are_products_of_the_transitions(size: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    f = Filter(
        torch.randn(steps, size, size, dtype=torch.float64, generator=generator) / size,
        torch.randn(steps, size, dtype=torch.float64, generator=generator),
    )
    expected, product = [], torch.eye(size, dtype=torch.float64)
    for s in reversed(range(steps)):
        expected.insert(0, product @ f.gain[s])
        product = product @ f.transition[s]
    found, carried = respond(f)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(carried, product, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", KNOWN)
def test_couplings_are_those_that_the_method_returns(name: str) -> None:
    method = KNOWN[name]()
    found = couplings(method, STEPS)
    for t in range(1, STEPS + 1):
        c = method.coupling(t, 0.0)
        assert found[t - 1].tolist() == pytest.approx([c.a, c.b, c.p, c.q], rel=1e-14)


@pytest.mark.parametrize("name", ["ema", "power_ema", "swa", "swa, every 3", "ema, lagged"])
def test_the_weights_of_points_sum_to_one_and_make_the_average(name: str) -> None:
    w1, w2 = train(KNOWN[name](), draw())
    weights = point_weights(profile(filter_of(KNOWN[name](), STEPS), 0, STEPS))
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-14)
    assert bool((weights > -1e-15).all())
    torch.testing.assert_close(weights[1:] @ w1, w2[-1], rtol=1e-12, atol=1e-12)


def test_the_weights_of_a_power_function_are_its_integral_over_each_step() -> None:
    gamma = 3.0
    weights = point_weights(profile(filter_of(tb.methods.power_ema(gamma), 50), 0, 50))
    edges = (torch.arange(51, dtype=torch.float64) / 50) ** (gamma + 1)
    assert float(weights[0]) == 0
    torch.testing.assert_close(weights[1:], edges[1:] - edges[:-1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["heavy_ball", "nesterov", "schedule_free", "easgd, rho"])
def test_a_method_that_needs_the_learning_rate_has_no_profile_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match="depend on the learning rate"):
        filter_of(METHODS[name](), 10)


def test_a_method_of_ones_own_that_says_when_it_varies_has_a_profile() -> None:
    class Alternating:
        varies = "step"
        period = 2

        def coupling(self, step: int, lr: float) -> tb.Coupling:
            b = 0.5 if step % 2 else 0.25
            return tb.Coupling(0.0, b, 1.0, b)

    rates = [0.5, 0.25, 0.5]
    expected = [1 - torch.tensor(rates[s:], dtype=torch.float64).neg().add(1).prod().item() for s in range(3)]
    assert profile(filter_of(Alternating(), 3), 0, 3).tolist() == pytest.approx(expected)


def test_nothing_is_written_in_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        run = lives_of_pair([(1, filter_of(tb.Spring(1.0, 10.0, 20.0), 4))], 5)
        for f in (filter_of(tb.methods.power_ema(1.0), 5), run, following(couplings(tb.methods.swa(), 3), 2, run)):
            assert profile(f, 0, 5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)

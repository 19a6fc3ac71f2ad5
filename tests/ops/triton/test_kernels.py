"""The kernels against the oracle: every method, dtype, layout and size that they claim, and nothing beside it."""

from math import inf, nan

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Counter, Tensors, normal, scheduled, still, take
from helpers.kernels_under_test import PAIRS, SHAPES, STEPS, close, embedded, kernel, lists, rate, updates
from helpers.methods_under_test import METHODS
from helpers.problems import same
from helpers.seams import Motion, Move, Swing, schedule_of
from torchbelay.ops import arithmetic, reference
from torchbelay.ops.step import REST
from torchbelay.ops.triton.table import BLOCK, fits
from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling

every_method = pytest.mark.parametrize("name", METHODS)
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")


# Every method


@pytest.mark.thorough
@every_method
@pytest.mark.parametrize("by", ["host", "device"])
def test_a_run_equals_the_loop_of_the_reference(name: str, by: str) -> None:
    method, mine = METHODS[name](), lists(born=2)
    schedule = schedule_of(METHODS[name]()) if by == "device" else None
    if by == "device" and schedule is None:
        pytest.skip("this method sees the learning rate or has no formula: the host must ask it")
    exact, backend, count = mine.copy(torch.float64), kernel(), Counter(2)
    for step in range(1, STEPS + 1):
        c, u = method.coupling(step, rate(step)), updates(step)
        take(backend, [Move(mine, None if schedule else Motion(c), schedule)], u, count=count)
        for i, by_ in enumerate(u):
            new = reference.couple(exact.w1[i], exact.w2[i], by_.double(), a=c.a, b=c.b, p=c.p, q=c.q)
            exact.w1[i], exact.w2[i] = new
    # the repulsive ones take differences of nearly equal numbers ten times over
    close(mine.all(), exact.all(), factor=20 if min(c.a, 0) < 0 else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["host", "device"])
def test_velocities_equal_the_reference(spring, algorithm1, by: str) -> None:
    mine = lists()
    mine.v1, mine.v2 = ([normal(s, seed=at + i) for i, s in enumerate(SHAPES)] for at in (200, 300))
    inertia = zip((mine.v1, mine.v2), (spring.inertia1, spring.inertia2), strict=True)
    motion = Motion(spring.coupling(), *(Swing(v, each) if each else None for v, each in inertia))
    exact, backend, count = mine.copy(torch.float64), kernel(), Counter()
    move = still(mine, motion) if by == "host" else scheduled(mine, motion)
    groups = list(zip(*exact.lists(), strict=True))
    for step in range(STEPS):
        u = updates(step)
        take(backend, [move], u, count=count)
        groups = [algorithm1(*group, by_.double()) for group, by_ in zip(groups, u, strict=True)]
    w1, w2, v1, v2 = (list(each) for each in zip(*groups, strict=True))
    close(mine.w1, w1, factor=20)
    close(mine.w2, w2, factor=20)
    close(mine.v1 if motion.swing1 else [], v1 if motion.swing1 else [], factor=20)
    close(mine.v2 if motion.swing2 else [], v2 if motion.swing2 else [], factor=20)


@pytest.mark.thorough
@pytest.mark.parametrize("momentum", [0.9, 0.25])
@pytest.mark.parametrize("by", ["host", "device"])
def test_weights_and_average_meet_where_its_velocity_takes_it(by: str, momentum: float) -> None:
    """At 0.25 the four numbers are those of a copy, a = 0 and p = 1, and the velocity alone moves the weights."""
    method, mine, backend, count = methods.diloco(3, lr=0.8, momentum=momentum), lists(), kernel(), Counter()
    mine.v2 = [torch.zeros_like(w) for w in mine.w2]
    exact = mine.copy(torch.float64)
    sync = Motion(method.coupling(3, 0.0), swing2=Swing(mine.v2, method.inertia2))
    for step in range(1, 10):
        move = scheduled(mine, REST, REST, sync) if by == "device" else still(mine, REST if step % 3 else sync)
        u = updates(step)
        take(backend, [move], u, count=count)
        for i, by_ in enumerate(u):
            exact.w1[i] = exact.w1[i] + by_.double()
            if step % 3 == 0:
                d = exact.w1[i] - exact.w2[i]
                exact.w2[i] = exact.w2[i] + 0.8 * ((1 + momentum) * d + momentum**2 * exact.v2[i])
                exact.v2[i] = momentum * exact.v2[i] + d
                exact.w1[i] = exact.w2[i]
        if step % 3 == 0:
            assert all(map(same, mine.w1, mine.w2))  # not a bit is between them
    close(mine.all(), exact.all(), factor=5)


# Layouts and sizes


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "transposed"])
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (7,), (3, 5, 2), (BLOCK,), (2 * BLOCK + 1,), (5, BLOCK // 2)], ids=str
)
@every_pair
def test_every_layout_and_nothing_beside_it(layout: str, shape: tuple[int, ...], dtypes) -> None:
    w1, w2, old = normal(shape, dtypes[0], seed=1), normal(shape, dtypes[1], seed=2), normal(shape, dtypes[0], seed=3)
    (x1, beside1), (x2, beside2) = embedded(old, layout), embedded(w2, layout)
    assert fits(x1, x2)
    c = Coupling(0.3, -0.2, 1.4, 0.6)
    take(kernel(), [still(Tensors([x1], [x2]), Motion(c))], [w1 - old])
    w1 = old + (w1 - old)  # as the step rounded it
    exact = reference.couple(old.double(), w2.double(), w1.double() - old.double(), a=c.a, b=c.b, p=c.p, q=c.q)
    for found, expected in zip((x1, x2), exact, strict=True):
        half = torch.finfo(found.dtype).eps / 2
        torch.testing.assert_close(found.double(), expected, rtol=half + 1e-6, atol=2e-6)
    for t, beside in ((x1, beside1), (x2, beside2)):
        assert int(beside.isnan().sum()) == 64, "something was written beside the tensor"
        assert not t.isnan().any()


# Numbers that are not finite, and steps that are skipped


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_nan_and_inf_are_carried_through() -> None:
    strange = torch.tensor([1.0, nan, inf, -inf, 2.0, 2.0, 2.0], device=WHERE)
    mine, theirs = (Tensors([strange.clone()], [strange.flip(0)]) for _ in range(2))
    take(kernel(), [still(mine, Motion(Coupling(0.25, 0.3, 0.75, 0.3)))])
    arithmetic.pull_together_(theirs.w1, theirs.w2, 0.25, 0.3)
    torch.testing.assert_close(mine.all(), theirs.all(), rtol=1e-6, atol=0, equal_nan=True)
    assert not mine.w1[0][:4].isfinite()[1:].any()


@pytest.mark.parametrize("coupling", [Coupling(0.0, 0.1, 1.0, 0.1), Coupling(0.0, 0.1, 1.0, 0.3)], ids=str)
def test_an_average_that_only_watches_cannot_spoil_the_weights(coupling: Coupling) -> None:
    mine = Tensors([normal((5,))], [torch.full((5,), nan, device=WHERE)])
    old, u = mine.w1[0].clone(), normal((5,), seed=1)
    take(kernel(), [still(mine, Motion(coupling))], [u])
    assert same(mine.w1[0], old + u)


def test_weights_that_pull_nothing_leave_the_average_alone() -> None:
    mine = Tensors([torch.full((5,), nan, device=WHERE)], [normal((5,))])
    old = mine.w2[0].clone()
    take(kernel(), [still(mine, Motion(Coupling(0.2, 0.0, 0.8, 0.0)))])
    assert same(mine.w2[0], old)


@every_pair
@every_method
def test_a_skipped_step_leaves_every_bit(name: str, dtypes) -> None:
    mine = lists([(3, 5), (BLOCK + 3,)], dtypes)
    mine.w1[0].view(-1)[:3] = torch.tensor([nan, inf, -0.0])
    old = mine.copy()
    motion = Motion(METHODS[name]().coupling(1, 0.1))
    take(kernel(), [still(mine, motion)], updates(0, [(3, 5), (BLOCK + 3,)], dtypes[0]), torch.zeros((), device=WHERE))
    assert all(map(same, mine.all(), old.all()))


@every_pair
def test_a_sync_leaves_not_a_bit_between_them(dtypes) -> None:
    mine = lists([(3, 5), (BLOCK + 3,)], dtypes)
    sync = Motion(methods.lookahead(k=1, alpha=0.3).coupling(1, 0.0))
    take(kernel(), [still(mine, sync)], updates(1, [(3, 5), (BLOCK + 3,)], dtypes[0]))
    assert all(same(w1, w2.to(w1.dtype)) for w1, w2 in zip(mine.w1, mine.w2, strict=True))


def test_the_first_point_of_a_uniform_average_is_taken_exactly() -> None:
    mine = lists()
    take(kernel(), [still(mine, Motion(methods.swa().coupling(1, 0.0)))], updates(1))
    assert all(map(same, mine.w1, mine.w2))


def test_autograd_notices_what_the_kernels_write() -> None:
    mine, backend = lists([(5,)]), kernel()
    versions = [mine.w1[0]._version]
    take(backend, [still(mine, Motion(Coupling(0.1, 0.1, 0.9, 0.1)))])
    versions.append(mine.w1[0]._version)
    backend.trade(mine.w1, mine.w2).go()
    versions.append(mine.w1[0]._version)
    assert versions == sorted(set(versions))

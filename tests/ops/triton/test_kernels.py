"""The kernels against the oracle: every method, dtype, layout and size that they claim, and nothing beside it."""

from math import inf, nan, sin

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.kernels_under_test import WHERE, Counter, Tensors, bf16, f16, f32, kernel, normal, scheduled, still, take
from helpers.methods_under_test import METHODS
from helpers.problems import same
from helpers.seams import Motion, Move, launches, schedule_of, tables
from torchbelay.ops import arithmetic, reference
from torchbelay.ops.arithmetic import Swing
from torchbelay.ops.triton import kernels, launch
from torchbelay.ops.triton.numbers import Numbers
from torchbelay.ops.triton.table import BLOCK, Follower, Table, fits
from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling

STEPS = 9
SHAPES = [(3, 5), (), (0, 2), (1,), (BLOCK + 3,)]
PAIRS = [(f32, f32), (bf16, f32), (f16, f32), (bf16, bf16), (f16, f16), (f32, bf16), (f32, f16), (bf16, f16)]

every_method = pytest.mark.parametrize("name", METHODS)
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")


def rate(step: int) -> float:
    return 0.1 * (1.5 + sin(step))


def lists(shapes=SHAPES, dtypes=(f32, f32), *, born: int = 0) -> Tensors:
    w1 = [normal(shape, dtypes[0], seed=i) for i, shape in enumerate(shapes)]
    w2 = [normal(shape, dtypes[1], seed=100 + i) for i, shape in enumerate(shapes)]
    return Tensors(w1, w2, born=born)


def updates(step: int, shapes=SHAPES, dtype: torch.dtype = f32) -> list[Tensor]:
    return [normal(shape, dtype, seed=1000 * step + i) for i, shape in enumerate(shapes)]


def close(found: list[Tensor], expected: list[Tensor], *, factor: float = 1.0) -> None:
    """Equal but for float32's rounding, `factor` times that of a few operations on numbers of order 10."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=2e-6 * factor, atol=2e-6 * factor)


# Every method


@every_method
@pytest.mark.parametrize("by", ["host", "device"])
def test_a_run_equals_the_loop_of_the_reference(name: str, by: str) -> None:
    method, mine = METHODS[name](), lists(born=2)
    schedule = schedule_of(METHODS[name]()) if by == "device" else None
    if by == "device" and schedule is None:
        pytest.skip("this method sees the learning rate: the host must ask it")
    exact, backend, count = mine.copy(torch.float64), kernel(), Counter(2)
    for step in range(1, STEPS + 1):
        c, u = method.coupling(step, rate(step)), updates(step)
        take(backend, [Move(mine, None if schedule else Motion(c), schedule)], u, count=count)
        for i, by_ in enumerate(u):
            new = reference.couple(exact.w1[i], exact.w2[i], by_.double(), a=c.a, b=c.b, p=c.p, q=c.q)
            exact.w1[i], exact.w2[i] = new
    # the repulsive ones take differences of nearly equal numbers ten times over
    close(mine.all(), exact.all(), factor=20 if min(c.a, 0) < 0 else 1)


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


# What a device makes of a schedule


LAWS = {name: make for name, make in METHODS.items() if getattr(make(), "law", None)}


@pytest.mark.parametrize("name", [*LAWS, "lookahead", "switch_ema"])
@pytest.mark.parametrize("first", [1, 2, 17, 999, 10**6])
def test_the_device_finds_the_numbers_of_every_step(name: str, first: int) -> None:
    method = METHODS[name]()
    move = Move(Tensors([], [], born=5), None, schedule_of(method))
    numbers = Numbers.of([move], "whole", torch.device(WHERE))
    assert numbers.varies
    for step in range(first, first + 4):
        launch.look(numbers, torch.tensor(step + 5 - 1, device=WHERE))
        c = method.coupling(step, 0.0)
        found = numbers.current[0].tolist()
        assert found[:4] == pytest.approx([c.a, c.b, c.p, c.q], rel=1e-6)  # float32 has them
        assert found[int(kernels.ACTIVE)] == float(c != Coupling(0.0, 0.0, 1.0, 0.0))


def test_laws_are_what_their_methods_say() -> None:
    assert {name.partition(",")[0] for name in LAWS} == {"ema", "swa", "power_ema"}


# Layouts and sizes


def embedded(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same values inside a larger buffer of nan, and that buffer."""
    buffer = torch.full((t.numel() + 64,), nan, device=t.device, dtype=t.dtype)
    inner = buffer[32 : 32 + t.numel()] if layout != "misaligned" else buffer[33 : 33 + t.numel()]
    view = (
        inner.view(t.shape[::-1]).permute(tuple(range(t.dim()))[::-1])
        if layout == "transposed"
        else inner.view(t.shape)
    )
    view.copy_(t)
    return view, buffer


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


def test_offsets_beyond_two_to_the_31_are_not_cut() -> None:
    """A tensor that begins 2³¹ elements, 2³³ bytes, before the memory that its last block lies in."""
    away = 1 << 31
    mine = lists([(BLOCK - 5,)])
    expected = mine.w2[0] + 0.25 * (mine.w1[0] - mine.w2[0])
    table = Table(mine.w1, [[Follower(mine.w2[0], None, None, 0)]], none=1)
    row = table.rows[0]
    row[int(kernels.SIZE)] += away
    row[int(kernels.FIRST)] -= away // BLOCK
    for column in (int(kernels.W1), int(kernels.HEAD) + int(kernels.W2)):
        row[column] -= 4 * away
    numbers = Numbers.of([still(mine, Motion(Coupling(0.0, 0.25, 1.0, 0.25)))], "after", torch.device(WHERE))
    launch.move(table, numbers, keep=None, count=Counter().count)
    torch.testing.assert_close(mine.w2[0], expected, rtol=1e-6, atol=1e-7)


def test_one_launch_whatever_the_dtypes_and_the_number_of_averages(monkeypatch) -> None:
    cohorts = [lists([(5,), (BLOCK + 1,)], pair) for pair in ((f32, f32), (bf16, f32), (f16, f32))]
    watching = [Tensors(each.w1, [w.clone() for w in each.w2]) for each in cohorts]
    alone = [[each.copy() for each in some] for some in (cohorts, watching)]
    for some, others in zip(*alone, strict=True):
        others.w1 = some.w1
    pull, ema = Motion(Coupling(0.1, 0.2, 0.9, 0.2)), Motion(Coupling(0.0, 0.3, 1.0, 0.3))
    counted = launches(monkeypatch)
    take(kernel(), [*(still(each, pull) for each in cohorts), *(still(each, ema) for each in watching)])
    assert counted.count == 1
    for pulled, watch in zip(*alone, strict=True):
        take(kernel(), [still(pulled, pull)])
        take(kernel(), [still(watch, ema)])
    assert counted.count == 7
    for mine, theirs in zip([*cohorts, *watching], [each for some in alone for each in some], strict=True):
        # an average that watches sees the pulled weights before they are rounded to 16 bits
        half = torch.finfo(mine.w1[0].dtype).eps
        torch.testing.assert_close(mine.all(), theirs.all(), rtol=half, atol=half)


def test_a_tensor_that_an_average_leaves_out_is_left_to_the_others() -> None:
    mine = lists([(5,), (6,), (7,)])
    watching = Tensors([mine.w1[1]], [mine.w2[1].clone()])
    expected = [w2 + 0.2 * (w1 - w2) for w1, w2 in zip(mine.w1, mine.w2, strict=True)]
    second = watching.w2[0] + 0.3 * (mine.w1[1] - watching.w2[0])
    move = [still(mine, Motion(Coupling(0.0, 0.2, 1.0, 0.2))), still(watching, Motion(Coupling(0.0, 0.3, 1.0, 0.3)))]
    take(kernel(), move)
    close([*mine.w2, *watching.w2], [*expected, second])


# Numbers that are none


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


# What does not fit


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_go_the_foreach_way(dtype: torch.dtype) -> None:
    drawn = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=dtype).to(WHERE)
    mine, theirs = (Tensors([drawn[0].clone()], [drawn[1].clone()]) for _ in range(2))
    backend, c = kernel(), Coupling(0.1, 0.2, 0.9, 0.2)
    assert backend.used_for(mine) == "foreach"
    take(backend, [still(mine, Motion(c))])
    arithmetic.pull_together_(theirs.w1, theirs.w2, c.a, c.b)
    assert all(map(same, mine.all(), theirs.all()))


def test_a_tensor_with_gaps_goes_the_foreach_way() -> None:
    w1, w2 = torch.randn(2, 6, 4, device=WHERE)
    mine = Tensors([w1[:, ::2]], [w2[:, ::2].clone()])
    assert kernel().used_for(mine) == "foreach"
    assert not fits(torch.zeros(4, 4, device=WHERE), torch.zeros(4, 4, device=WHERE).t())  # laid out differently
    expected = mine.w2[0] + 0.5 * (mine.w1[0] - mine.w2[0])
    take(kernel(), [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))])
    close(mine.w2, [expected])


def test_weights_that_move_in_memory_are_found_again() -> None:
    mine, backend = lists([(50,), (60,)]), kernel()
    move = [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))]
    take(backend, move)
    mine.w1[1].data = torch.ones(60, device=WHERE)  # as `model.to` and many a script do
    expected = mine.w2[1] + 0.5 * (1 - mine.w2[1])
    take(backend, move)
    close([mine.w2[1]], [expected])


def test_tables_are_made_once(monkeypatch) -> None:
    made = tables(monkeypatch)
    mine, backend, method = lists(), kernel(), METHODS["heavy_ball"]()
    for step in range(1, 4):
        take(backend, [still(mine, Motion(method.coupling(step, rate(step))))], updates(step))
    assert made.count == 1  # though the numbers were others at every step


def test_a_period_is_one_schedule() -> None:
    motion = Motion(Coupling(0.0, 0.5, 1.0, 0.5))
    rest = Motion(Coupling(0.0, 0.0, 1.0, 0.0))
    mine, backend, count, moved = lists([(5,)]), kernel(), Counter(), []
    move = scheduled(mine, rest, rest, motion)
    for _ in range(7):
        old = mine.copy()
        take(backend, [move], count=count)
        moved.append(not same(mine.w2[0], old.w2[0]))
    assert moved == [False, False, True, False, False, True, False]


# Trading places


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "transposed"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16, torch.float64, torch.complex64], ids=str)
def test_every_bit_trades_places(layout: str, dtype: torch.dtype) -> None:
    shapes = [(), (0,), (1,), (3, 5), (2 * BLOCK + 7,)]
    generator = torch.Generator().manual_seed(1)

    def any_bits(shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        drawn = torch.randint(256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape).to(WHERE)
        return embedded(drawn, layout)[0]

    x, y = [any_bits(s) for s in shapes], [any_bits(s) for s in shapes]
    old = [t.clone() for t in x], [t.clone() for t in y]
    kernel().exchange_(x, y)
    assert all(map(same, x, old[1]))
    assert all(map(same, y, old[0]))


def test_weights_of_several_dtypes_trade_places_together() -> None:
    x, y = ([normal((9,), dtype, seed=s) for dtype in (f32, bf16, torch.float64, f16)] for s in (0, 1))
    old = [t.clone() for t in x]
    kernel().exchange_(x, y)
    assert all(map(same, y, old))


def test_autograd_notices_what_the_kernels_write() -> None:
    mine, backend = lists([(5,)]), kernel()
    versions = [mine.w1[0]._version]
    take(backend, [still(mine, Motion(Coupling(0.1, 0.1, 0.9, 0.1)))])
    versions.append(mine.w1[0]._version)
    backend.exchange_(mine.w1, mine.w2)
    versions.append(mine.w1[0]._version)
    assert versions == sorted(set(versions))

"""The table of addresses: written once, read whole, and written anew if weights move in memory."""

import weakref

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Counter, still, take
from helpers.kernels_under_test import close, kernel, lists, rate, updates
from helpers.methods_under_test import METHODS
from helpers.seams import Motion, tables
from torchbelay.ops.reference import couple
from torchbelay.ops.triton import launch, layout
from torchbelay.ops.triton.numbers import Numbers
from torchbelay.ops.triton.table import BLOCK, Follower, Table
from torchbelay.physics.coupling import Coupling


def test_offsets_beyond_two_to_the_31_are_not_cut() -> None:
    """A tensor that begins 2³¹ elements, 2³³ bytes, before the memory that its last block lies in."""
    away = 1 << 31
    mine = lists([(BLOCK - 5,)])
    expected = mine.w2[0] + 0.25 * (mine.w1[0] - mine.w2[0])
    table = Table(mine.w1, [[Follower(mine.w2[0], None, None, 0)]], none=1)
    row = table.rows[0]
    row[int(layout.SIZE)] += away
    row[int(layout.FIRST)] -= away // BLOCK
    for column in (int(layout.W1), int(layout.HEAD) + int(layout.W2)):
        row[column] -= 4 * away
    numbers = Numbers.of([still(mine, Motion(Coupling(0.0, 0.25, 1.0, 0.25)))], "after", torch.device(WHERE))
    launch.move(table, numbers, keep=None, count=Counter().count)
    torch.testing.assert_close(mine.w2[0], expected, rtol=1e-6, atol=1e-7)


def test_weights_that_move_in_memory_are_found_again() -> None:
    mine, backend = lists([(50,), (60,)]), kernel()
    move = [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))]
    take(backend, move)
    mine.w1[1].data = torch.ones(60, device=WHERE)  # as `model.to()` and many scripts do
    expected = mine.w2[1] + 0.5 * (1 - mine.w2[1])
    take(backend, move)
    close([mine.w2[1]], [expected])


@pytest.mark.parametrize("coupling", [Coupling(0.0, 0.5, 1.0, 0.5), Coupling(0.25, 0.5, 0.75, 0.0)])
def test_weights_that_moved_cost_one_table(coupling: Coupling, monkeypatch) -> None:
    """Whether a copy of the weights is needed, and they are looked for before the step, or not, and after it."""
    made = tables(monkeypatch)
    mine, backend = lists([(50,), (60,)]), kernel()
    move = [still(mine, Motion(coupling))]
    expected = mine.copy(torch.float64)
    for step in range(6):
        if step == 3:
            mine.w1[1].data = mine.w1[1].data.clone()
        take(backend, move, updates(step, [(50,), (60,)]))
        for w1, w2, u in zip(expected.w1, expected.w2, updates(step, [(50,), (60,)]), strict=True):
            new1, new2 = couple(w1, w2, u.double(), a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)
            w1.copy_(new1)
            w2.copy_(new2)
    close(mine.all(), expected.all())
    assert made.count == 2


def test_weights_laid_out_otherwise_within_a_step_are_not_replaced_by_their_stand_ins() -> None:
    """The stride of a dimension of size 1 means nothing, so that nothing has to be formed anew after the step."""
    mine, backend = lists([(1, 40)]), kernel()
    move = [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))]
    take(backend, move)
    expected = mine.w2[0].clone()
    for value in (1.0, 2.0, 3.0):
        backend_step = backend.prepare(move, Counter())
        mine.w1[0].data = torch.full((40,), value, device=WHERE).as_strided((1, 40), (int(value), 1))
        backend_step.finish(None)
        expected += 0.5 * (value - expected)
        assert backend.is_current()
    mine.w1[0].fill_(9.0)  # where they are now, and not in a copy of them
    take(backend, move)
    close(mine.w2, [expected + 0.5 * (9 - expected)])


def test_a_table_that_a_graph_has_seen_outlives_weights_that_move() -> None:
    mine, backend = lists([(50,)]), kernel()
    move = [still(mine, Motion(Coupling(0.0, 0.5, 1.0, 0.5)))]
    backend.remember([mine])
    step = backend.prepare(move, Counter(), capturing=True)
    seen = weakref.ref(step._pass.table.rows)
    step.finish(None)
    mine.w1[0].data = mine.w1[0].data.clone()
    backend.prepare(move, Counter()).finish(None)
    assert step._pass.table.rows is not seen()
    assert seen() is not None


def test_tables_are_made_once(monkeypatch) -> None:
    made = tables(monkeypatch)
    mine, backend, method = lists(), kernel(), METHODS["heavy_ball"]()
    for step in range(1, 4):
        take(backend, [still(mine, Motion(method.coupling(step, rate(step))))], updates(step))
    assert made.count == 1  # though the numbers differ at every step

"""The table of addresses: written once, read whole, and written anew if weights move in memory."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Counter, still, take
from helpers.kernels_under_test import close, kernel, lists, rate, updates
from helpers.methods_under_test import METHODS
from helpers.seams import Motion, tables
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


def test_tables_are_made_once(monkeypatch) -> None:
    made = tables(monkeypatch)
    mine, backend, method = lists(), kernel(), METHODS["heavy_ball"]()
    for step in range(1, 4):
        take(backend, [still(mine, Motion(method.coupling(step, rate(step))))], updates(step))
    assert made.count == 1  # though the numbers differ at every step

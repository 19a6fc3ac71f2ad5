"""The numbers of a step as the device finds them from a schedule and a count."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Counter, Tensors, scheduled, take
from helpers.kernels_under_test import kernel, lists
from helpers.methods_under_test import METHODS
from helpers.problems import same
from helpers.seams import Motion, Move, schedule_of
from torchbelay.ops.triton import launch, layout
from torchbelay.ops.triton.numbers import Numbers
from torchbelay.physics.coupling import Coupling

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
        assert found[:4] == pytest.approx([c.a, c.b, c.p, c.q], rel=1e-6)  # in float32
        assert found[int(layout.ACTIVE)] == float(c != Coupling(0.0, 0.0, 1.0, 0.0))


def test_laws_are_what_their_methods_say() -> None:
    assert {name.partition(",")[0] for name in LAWS} == {"ema", "hard_sync", "swa", "power_ema"}


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

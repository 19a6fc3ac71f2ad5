"""The backend for several workers, with all of them in one process: each contributes, then each gets the sum."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.backends_under_test import Counter, Tensors
from torchbelay.ops import reference, workers
from torchbelay.ops.step import REST, Motion, Move, Swing
from torchbelay.physics.coupling import Coupling, Inertia

N = 3
SHAPES = [(2, 3), (), (0, 4), (7,)]
STAR = Coupling(0.1, 0.05, 0.8, 0.02)
EASGD = Coupling(0.2, 0.2, 1.0, 0.0)
AFTER = Coupling(0.2, 0.1, 0.8, 0.1)
SYNC = Coupling(1 - 1.2, 1.2, 1.2, 1.2)


class Together:
    """N backends whose sums are taken when all have contributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.vectors: list[list[Tensor]] = []
        monkeypatch.setattr(dist, "get_world_size", lambda group: N)
        monkeypatch.setattr(dist, "all_reduce", lambda vector, group: self.vectors[group].append(vector))
        self.backends = [workers.Workers(rank) for rank in range(N)]

    def step(self, groups: list[Tensors], updates: list[list[Tensor]], motions: list[Motion], keep: Any = None) -> None:
        self.vectors = [[] for _ in range(N)]
        steps = []
        for backend, group, motion in zip(self.backends, groups, motions, strict=True):
            steps.append(backend.prepare([Move(group, motion)], Counter()))
        for step, group, update in zip(steps, groups, updates, strict=True):
            for w, u in zip(group.w1, update, strict=True):
                w += u
            step.exchange()
        for same in zip(*self.vectors, strict=True):
            total = torch.stack(same).sum(0)
            for vector in same:
                vector.copy_(total)
        for step in steps:
            step.finish(keep)


def made(dtype: torch.dtype, average: torch.dtype, *, velocities: bool = False) -> list[Tensors]:
    torch.manual_seed(1)
    w2 = [torch.randn(shape).to(average) for shape in SHAPES]
    v2 = [torch.randn(shape).to(average) for shape in SHAPES] if velocities else []
    own = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(N)]
    return [Tensors(w1, [w.clone() for w in w2], v2=[v.clone() for v in v2]) for w1 in own]


def updates(seed: int, dtype: torch.dtype) -> list[list[Tensor]]:
    torch.manual_seed(seed)
    return [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(N)]


@pytest.mark.parametrize("coupling", [STAR, EASGD, AFTER], ids=["any", "EASGD", "after"])
@pytest.mark.parametrize(
    ("dtype", "average", "within"),
    [
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.float32, 2e-2),
    ],
)
def test_springs_equal_the_map_of_all_bodies(
    monkeypatch: pytest.MonkeyPatch, coupling: Coupling, dtype: torch.dtype, average: torch.dtype, within: float
) -> None:
    together, groups, u = Together(monkeypatch), made(dtype, average), updates(2, dtype)
    exact = [
        ([w.to(torch.float64, copy=True) for w in g.w1], [w.to(torch.float64, copy=True) for w in g.w2]) for g in groups
    ]
    together.step(groups, u, [Motion(coupling)] * N)
    for i in range(len(SHAPES)):
        start = exact[0][1][i]
        moved = [
            reference.couple(w1[i], start, by[i].double(), a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)
            for (w1, _), by in zip(exact, u, strict=True)
        ]
        total = start + sum(w2 - start for _, w2 in moved)
        for group, (w1, _) in zip(groups, moved, strict=True):
            torch.testing.assert_close(group.w1[i].double(), w1, rtol=within, atol=within)
            torch.testing.assert_close(group.w2[i].double(), total, rtol=within, atol=within)
            assert torch.equal(group.w2[i], groups[0].w2[i])


@pytest.mark.parametrize("swinging", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_workers_meet_where_the_mean_would_be_alone(
    monkeypatch: pytest.MonkeyPatch, swinging: bool, dtype: torch.dtype
) -> None:
    together, groups = Together(monkeypatch), made(dtype, torch.float64, velocities=swinging)
    inertia = Inertia(carry=0.5, stay=0.75, pull=1.0, push=1.0)
    mean = [torch.stack([g.w1[i].double() for g in groups]).mean(0) for i in range(len(SHAPES))]
    alone = Tensors(mean, [w.clone() for w in groups[0].w2], v2=[v.clone() for v in groups[0].v2])
    still = [[torch.zeros_like(w) for w in g.w1] for g in groups]
    motions = [Motion(SYNC, swing2=Swing(g.v2, inertia) if swinging else None) for g in (*groups, alone)]
    together.step(groups, still, motions[:-1])
    oracle = reference.Reference()
    oracle.prepare([Move(alone, motions[-1])], Counter()).finish(None)
    for group in groups:
        for i in range(len(SHAPES)):
            torch.testing.assert_close(group.w2[i], alone.w2[i], rtol=0, atol=1e-14)
            assert torch.equal(group.w1[i], group.w2[i].to(dtype))
            if swinging:
                torch.testing.assert_close(group.v2[i], alone.v2[i], rtol=0, atol=1e-14)


def test_a_step_that_did_not_take_place_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Together(monkeypatch)
    for coupling in (STAR, SYNC):
        groups = made(torch.float32, torch.float32, velocities=coupling is SYNC)
        inertia = Inertia(carry=0.5, stay=0.75, pull=1.0, push=1.0)
        motions = [Motion(coupling, swing2=Swing(g.v2, inertia) if g.v2 else None) for g in groups]
        before = [[t.clone() for t in (*g.w1, *g.w2, *g.v2)] for g in groups]
        together.step(groups, [[torch.zeros_like(w) for w in g.w1] for g in groups], motions, keep=torch.tensor(0.0))
        for group, old in zip(groups, before, strict=True):
            assert all(map(torch.equal, (*group.w1, *group.w2, *group.v2), old))


def test_a_step_at_rest_sends_nothing_and_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    together, groups = Together(monkeypatch), made(torch.float32, torch.float32)
    before = [[t.clone() for t in (*g.w1, *g.w2)] for g in groups]
    together.step(groups, [[torch.zeros_like(w) for w in g.w1] for g in groups], [REST] * N)
    assert together.vectors == [[]] * N
    assert all(map(torch.equal, (t for g in groups for t in (*g.w1, *g.w2)), (t for old in before for t in old)))


def test_tensors_of_one_dtype_are_one_message_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchbelay.ops.arithmetic.SCRATCH", 4)  # so that tensors are cut into pieces
    together, groups, u = Together(monkeypatch), made(torch.float64, torch.float64), updates(3, torch.float64)
    together.step(groups, u, [Motion(STAR)] * N)
    assert [len(each) for each in together.vectors] == [workers.messages(N)] * N
    size = sum(w.numel() for w in groups[0].w1)
    assert together.vectors[0][0].nbytes == workers.exchanged_bytes(size, N, bytes_per_number=8)
    monkeypatch.setattr("torchbelay.ops.arithmetic.SCRATCH", 1 << 24)
    other, them = Together(monkeypatch), made(torch.float64, torch.float64)
    other.step(them, u, [Motion(STAR)] * N)
    assert all(torch.equal(x, y) for g, h in zip(groups, them, strict=True) for x, y in zip(g.w2, h.w2, strict=True))


def test_what_workers_store_and_send() -> None:
    assert workers.stored_bytes(10, momentum=True, bytes_per_number=2) == 40
    assert workers.exchanged_bytes(10, 1) == workers.sent_bytes(10, 1) == workers.messages(1) == 0
    assert workers.sent_bytes(10, 2) == workers.exchanged_bytes(10, 2) == 40
    assert workers.messages(4, dtypes=2) == 2

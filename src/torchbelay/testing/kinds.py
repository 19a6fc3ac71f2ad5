"""What somebody's averaging code does with buffers, integers, frozen, tied and 16-bit weights, and idle updates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from torchbelay.physics.coupling import Coupling

from .comparison import widen
from .impulses import carried, deviation, predict, tolerance
from .reading import BrokenError, UnreadableError, named_tensors
from .toy import Factory, Run, Toy, record

SIZE = 4  # elements of the tensors under test
TWINS = ("layer.bias", "layer.weight")  # plain weights that make the same moves

IDLE = range(3, 9)  # the updates, counted from 0, before which the weights do not change

Treatment = Literal["averaged", "copied", "ignored", "left out", "otherwise"]


@dataclass(frozen=True)
class Kind:
    """What happens to one kind of tensor: its treatment, or how the code fails on it."""

    treatment: Treatment | None
    dtype: str = ""  # of the average, if it is read
    error: str = ""

    def __str__(self) -> str:
        return self.treatment or self.error


@dataclass(frozen=True)
class SixteenBit:
    """What happens to the average of weights of 16 bits."""

    weights: str  # their dtype
    average: str  # the dtype that `read()` returns
    accumulates: bool | None  # whether changes below the resolution of 16 bits add up; None if that cannot be told
    error: str = ""


def buffers(factory: Factory, steps: int, dtype: torch.dtype) -> Kind:
    """Try a floating-point buffer."""
    return _try(factory, steps, dtype, lambda toy, t: toy.register_buffer("extra", t))


def integers(factory: Factory, steps: int, dtype: torch.dtype) -> Kind:
    """Try a buffer of whole numbers, as BatchNorm's count of batches is."""
    return _try(factory, steps, dtype, lambda toy, t: toy.register_buffer("extra", (16 * t).long()), scale=16)


def frozen(factory: Factory, steps: int, dtype: torch.dtype) -> Kind:
    """Try a parameter without gradient whose values change all the same."""

    def add(toy: Toy, t: Tensor) -> None:
        toy.register_parameter("extra", nn.Parameter(t, requires_grad=False))

    return _try(factory, steps, dtype, add)


def tied(factory: Factory, steps: int, dtype: torch.dtype) -> Kind:
    """Try one parameter under two names; "averaged" means as an untied one."""

    def add(toy: Toy, t: Tensor) -> None:
        shared = nn.Parameter(t)
        toy.register_parameter("extra", shared)
        toy.register_parameter("extra_again", shared)

    return _try(factory, steps, dtype, add)


def _try(
    factory: Factory, steps: int, dtype: torch.dtype, add: Callable[[Toy, Tensor], object], scale: int = 1
) -> Kind:
    """Run a toy with a further tensor `extra`, which begins and moves like the twin times `scale`."""
    toy = Toy(SIZE, dtype)
    add(toy, toy.layer.bias.detach().clone())
    with torch.no_grad():
        for p in toy.layer.parameters():
            p.copy_((named_tensors(toy)["extra"] / scale).reshape(p.shape))  # whole numbers are rounded
    moves = carried(steps, SIZE, seed=2, dense=True)
    moves = (scale * moves).round() / scale if scale > 1 else moves
    history: list[tuple[Tensor, ...]] = []
    try:
        run = Run(factory, toy)
        for move in moves:
            run.step(dict.fromkeys(TWINS, move) | {"extra": scale * move})
            try:
                average = run.average()
            except UnreadableError:
                continue
            if "extra" not in average and "extra_again" not in average:
                return Kind("left out")
            names = [name for name in ("extra", "extra_again") if name in average]
            kept = average[names[0]].dtype
            twin = next((widen(average[name]).flatten() for name in TWINS if name in average), None)
            if twin is None or (history and len(history[-1]) != 2 + len(names)):
                return Kind("otherwise")
            history.append((run.weights()["extra"], twin, *(widen(average[name]) for name in names)))
    except BrokenError as error:
        return Kind(None, error=str(error))
    if not history:
        return Kind(None, error="the average cannot be read")
    own, twins, *averages = (torch.stack(column) for column in zip(*history, strict=True))
    allowed = tolerance(dtype, kept)
    if scale > 1:  # torch multiplies whole numbers in float32, and rounds their average if it is one
        allowed = max(allowed, 1e-4) if kept.is_floating_point else 1.0
    moved = (twins[1:] - twins[:-1]).abs().amax(dim=1) > tolerance(dtype)
    treatments = {_treatment(own, scale * twins, average, moved, allowed) for average in averages}
    return Kind(treatments.pop() if len(treatments) == 1 else "otherwise", str(kept).removeprefix("torch."))


def _treatment(own: Tensor, twins: Tensor, average: Tensor, moved: Tensor, allowed: float) -> Treatment:
    """Return what happened to a tensor, from its values, its twin's averages and its own, after every update.

    Only updates that moved the twin's average tell anything, except if those copied: then a tensor that is copied
    between them too is not averaged.
    """

    def same(one: Tensor, other: Tensor) -> bool:
        return bool(((one - other).abs()[1:][moved] <= allowed).all())

    def always_same(one: Tensor, other: Tensor) -> bool:
        return bool(((one - other).abs() <= allowed).all())

    if not moved.any():
        return "ignored" if torch.equal(average, average[:1].expand_as(average)) else "otherwise"
    if same(average, twins):
        return "copied" if always_same(average, own) and not always_same(average, twins) else "averaged"
    if same(average, own):
        return "copied"
    return "ignored" if same(average, average[:1].expand_as(average)) else "otherwise"


def sixteen_bit(factory: Factory, dtype: torch.dtype, couplings: Sequence[Coupling]) -> SixteenBit:
    """Try weights of 16 bits: do changes of the average that are below their resolution add up?

    After half of the updates all weights but one jump, just so far that a single update moves the average by less than
    half of its resolution.
    """
    name, steps = str(dtype).removeprefix("torch."), len(couplings) or 4
    half = steps // 2
    toy = Toy(256, dtype)
    with torch.no_grad():
        for p in toy.parameters():
            p.fill_(1.0)
    back_and_forth = torch.zeros(256, dtype=torch.float64)
    back_and_forth[0] = 0.5  # one weight moves always, so that no step leaves all as they are
    try:
        run = Run(factory, toy)
        for step in range(half):
            run.step(dict.fromkeys(TWINS, back_and_forth * (-1) ** step))
        before = run.average()
        read = next(iter(before))
        kept = before[read].dtype
        jump = _jump(dtype, kept, couplings[half:])
        jumped = torch.full((256,), jump, dtype=torch.float64)
        jumped[0] = 0.0
        for step in range(half, steps):
            run.step(dict.fromkeys(TWINS, jumped if step == half else back_and_forth * (-1) ** step))
        after = run.average()
    except BrokenError as error:
        return SixteenBit(name, "", None, str(error))
    found = SixteenBit(name, str(kept).removeprefix("torch."), None)
    started, ended = (widen(average[read]).flatten()[1:] for average in (before, after))
    if jump == 0 or not torch.equal(started, torch.ones_like(started)):
        return found
    moves = torch.zeros(len(couplings), 1, dtype=torch.float64)
    moves[half] = jump
    expected = predict(couplings, torch.zeros(2, 1, dtype=torch.float64), moves)[-1, 1].item()
    if expected < 0.9 * torch.finfo(kept if kept.itemsize == 2 else dtype).eps:
        return found
    return replace(found, accumulates=ended.mean().item() - 1 > expected / 2)


def _jump(dtype: torch.dtype, kept: torch.dtype, couplings: Sequence[Coupling]) -> float:
    """Return how far weights at 1 jump; 0 if no jump will do, or if the average pulls, which rounds the weights too."""
    fastest = max((abs(c.b) for c in couplings), default=0.0)
    if not fastest or any(c.a for c in couplings):
        return 0.0
    widest = 0.45 * torch.finfo(kept if kept.itemsize == 2 else dtype).eps / fastest
    jump = float(torch.tensor(1 + widest, dtype=torch.float64).to(dtype)) - 1
    if jump > widest:  # rounded up
        jump = 1 + jump - torch.finfo(dtype).eps * 2 ** math.floor(math.log2(1 + jump)) - 1
    return max(0.0, jump)


Idle = Literal["counts", "ignored", "moves", "counted only", "otherwise"]


def idle(factory: Factory, couplings: Sequence[Coupling], dtype: torch.dtype, allowed: float) -> Idle | None:
    """Tell what updates do between which the weights did not change; None if that cannot be told.

    "counts": as any other. "ignored": nothing. "moves": the average moves, and the warm-up does not count. "counted
    only": the warm-up counts, and the average does not move.
    """
    steps = len(couplings)
    if steps <= IDLE.stop + 3:
        return None
    moves = carried(steps, SIZE, seed=3, dense=True)
    moves[IDLE] = 0.0
    try:
        trace = record(factory, Toy(SIZE, dtype), moves)
    except BrokenError:
        return None
    states = trace.states[trace.began :, :, 0]
    rest = Coupling(0.0, 0.0, 1.0, 0.0)
    ways: dict[Idle, list[Coupling]] = {"counts": [], "ignored": [], "moves": [], "counted only": []}
    for t, coupling in enumerate(couplings):
        behind = couplings[t - len(IDLE)] if t >= IDLE.stop else couplings[min(t, IDLE.start)]
        is_idle = t in IDLE
        ways["counts"].append(coupling)
        ways["ignored"].append(rest if is_idle else behind)
        ways["moves"].append(behind)
        ways["counted only"].append(rest if is_idle else coupling)
    seen = slice(trace.began, trace.began + len(states) - 1)
    for way, chosen in ways.items():
        predicted = predict(chosen[seen], states[0], moves[seen])
        if deviation(predicted, states) <= allowed:
            return way
    return "otherwise"

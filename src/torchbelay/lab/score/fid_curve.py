"""FID during training: a group is trained once with its averages kept on disk, then every FID is measured on its own.

A FID takes minutes and a study many of them. So the training and each FID are cached by themselves, and a study that is
stopped goes on with the next FID.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torchbelay.belay.files import replacing
from torchbelay.lab.deadline import Deadline
from torchbelay.lab.part import Record, Tick
from torchbelay.lab.records import rounded

from . import fid
from .cache import CachedRecords
from .data import Images
from .experiment import GRID, FidReference, ImageSampler, encode_grid, protocol_record, run_key, train
from .studies import Group
from .training.learner import LearnerGroup
from .training.speed import StepMode, build_learners

Cached = Callable[[str], CachedRecords]  # the cache file of a piece of a group, by the piece's name


class KeptWeights:
    """Weights of a group's networks in a folder, by lane, step and kind (w1 or w2)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, index: int, step: int, weights: str) -> Path:
        """Return the file of some weights."""
        return self.folder / f"{index}-{step}-{weights}.pt"

    def keep(self, index: int, step: int, weights: str, state: dict[str, torch.Tensor]) -> None:
        """Write weights; the file is complete or missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.path(index, step, weights)) as temporary:
            torch.save({name: tensor.cpu() for name, tensor in state.items()}, temporary)

    def load(self, index: int, step: int, weights: str) -> dict[str, torch.Tensor]:
        """Read weights."""
        return torch.load(self.path(index, step, weights), weights_only=True)  # type: ignore[no-any-return]


def fid_steps(group: Group) -> list[int]:
    """Return the steps at which FIDs are measured: equally spaced points at which the losses are measured too."""
    points = [math.ceil(group.points * i / group.fid_points) for i in range(1, group.fid_points + 1)]
    return [math.ceil(group.steps * point / group.points) for point in points]


def pieces(group: Group) -> list[tuple[int, int, str]]:
    """Return what is sampled, as lane, step and weights: averages at all steps, and the weights w1 at the end."""
    steps = fid_steps(group)
    return [
        (index, step, weights)
        for index in group.fids
        for step in steps
        for weights in (("w2", "w1") if step == steps[-1] else ("w2",))
    ]


def run_pieces(
    group: Group,
    images: Images,
    device: torch.device,
    mode: StepMode,
    tick: Tick,
    reference: FidReference | None,
    cached: Cached,
    deadline: Deadline,
    *,
    anew: bool = False,
) -> tuple[float, list[Record]]:
    """Train a group and measure its FIDs; return how long all pieces took, and their records.

    Pieces that are in the cache are read from it, unless `anew` removes them. Without time for the next FID,
    OutOfTimeError is raised: what is finished is in the cache.
    """
    training = cached("training")
    if anew:
        for name in ("training", *map(_name, pieces(group))):
            cached(name).path.unlink(missing_ok=True)
    kept = KeptWeights(training.path.with_suffix(".weights"))
    before = training.read()
    if before is None or not all(kept.path(*piece).exists() for piece in _missing(group, cached)):
        begin = time.perf_counter()
        found = list(_train(group, images, device, mode, tick, kept))
        took = time.perf_counter() - begin
        training.write(found, took)
    else:
        took, found = before
        tick(len(group.lanes) * group.steps)
    sampler: ImageSampler | None = None
    for piece in pieces(group):
        done = cached(_name(piece))
        if (read := done.read()) is None:
            deadline.check()
            begin = time.perf_counter()
            sampler = sampler or ImageSampler(group.objective, device, mode)
            lines = list(_measure(group, piece, kept, sampler, reference))
            read = time.perf_counter() - begin, lines
            done.write(lines, read[0])
            deadline.spent(read[0])
        took += read[0]
        found += read[1]
    shutil.rmtree(kept.folder, ignore_errors=True)  # the pieces have all that is needed
    return took, found


def _name(piece: tuple[int, int, str]) -> str:
    return "-".join(map(str, piece))


def _missing(group: Group, cached: Cached) -> Iterator[tuple[int, int, str]]:
    """Yield the pieces that are not in the cache: their weights are needed."""
    for piece in pieces(group):
        if cached(_name(piece)).read() is None:
            yield piece


def _train(
    group: Group, images: Images, device: torch.device, mode: StepMode, tick: Tick, kept: KeptWeights
) -> Iterator[Record]:
    """Train, keep the weights of every piece, and yield the protocol and the runs."""
    wanted = pieces(group)

    def observe(step: int, learners: LearnerGroup) -> None:
        for index, at, weights in wanted:
            if at == step:
                learner = learners.members[index]
                state = learner.belay.average_state_dict() if weights == "w2" else learner.network.state_dict()
                kept.keep(index, step, weights, state)

    yield protocol_record(group)
    learners = build_learners(group.objective, group.lanes, group.seed, device, mode)
    yield from train(group, learners, images, mode, tick, observe=observe)


def _measure(
    group: Group, piece: tuple[int, int, str], kept: KeptWeights, sampler: ImageSampler, reference: FidReference | None
) -> Iterator[Record]:
    """Make images with the weights of a piece; yield their FID and, for the average at the end, a grid of them.

    Every seed has random numbers of its own, the same for all arms: so the spread over the seeds contains the noise of
    a FID's samples.
    """
    index, step, weights = piece
    state, begin = kept.load(*piece), time.perf_counter()
    key = run_key(group, group.lanes[index]) | {"weights": weights, "sample_seed": group.seed, "step": step}
    lost = not all(bool(each.isfinite().all()) for each in state.values())
    sampler.network.load_state_dict(state)
    made = sampler.make(0 if lost else group.samples, seed=group.seed)
    last = step == fid_steps(group)[-1]
    if reference is not None:
        distance = math.nan if lost else fid.distance(made, reference.statistics, reference.inception)
        yield {
            "kind": "fid" if last else "fid during training",
            **key,
            "fid": rounded(distance),
            "samples": group.samples,
            "sampler": group.objective.sampler,
            "reference": reference.description,
            "network": reference.inception.identity,
            "wall_s": round(time.perf_counter() - begin, 2),
        }
    if last and weights == "w2" and not lost:
        yield {"kind": "grid", **key, "rows": GRID, "columns": GRID, "png": encode_grid(made)}

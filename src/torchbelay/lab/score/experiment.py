"""Train a group of networks side by side and record losses during training, images at the end, and their FID."""

import base64
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record, Tick
from torchbelay.lab.records import rounded
from torchbelay.lab.versions import versions
from torchbelay.physics.identity import describe

from . import fid
from .data import Images
from .models.objective import Objective
from .studies import Group
from .training.batches import Batches, as_bytes
from .training.learner import Learner, LearnerGroup, precision
from .training.speed import StepMode, build_learners
from .training.validation import Validation

SAMPLE_SEED = 0
EXACT = 17  # digits: a float is written without rounding
GRID = 8  # images along each side of the grid in a record
SAMPLE_BATCH = 2500  # images that are made at once
TRIPLES = 1024  # of image, noise level and noise, on which losses are measured


@dataclass(frozen=True)
class FidReference:
    """What a FID is measured with: the network, and the statistics of the training images."""

    inception: fid.Extractor
    statistics: fid.Statistics
    description: str  # of the images that the statistics are of


def run_group(
    group: Group,
    images: Images,
    device: torch.device,
    mode: StepMode,
    tick: Tick,
    reference: FidReference | None = None,
    triples: int = TRIPLES,
) -> Iterator[Record]:
    """Train a group and yield its records: the protocol, then the runs, then grids of images and their FID.

    Without a `reference` there is no FID.
    """
    learners = build_learners(group.objective, group.lanes, group.seed, device, mode)
    yield protocol_record(group, triples)
    yield from train(group, learners, images, mode, tick, triples)
    if group.fids:
        sampler = ImageSampler(group.objective, device, mode)
        for index in group.fids:
            yield from _image_records(group, learners.members[index], sampler, reference)


Observer = Callable[[int, LearnerGroup], object]  # called with the step at which losses are measured


def train(
    group: Group,
    learners: LearnerGroup,
    images: Images,
    mode: StepMode,
    tick: Tick,
    triples: int = TRIPLES,
    observe: Observer = lambda step, learners: None,
) -> Iterator[Record]:
    """Take all steps, then yield a record per learner."""
    objective, device, begin = group.objective, learners.members[0].device, time.perf_counter()
    validation = Validation.make(images, objective, device, count=triples)
    batches = Batches(images.train.to(device), objective, group.batch, seed=1000 + group.seed)
    curves: list[list[Record]] = [[] for _ in learners.members]
    last = 0
    for step in range(1, group.steps + 1):
        for learner in learners.running:
            if (scale := lr_scale(group, learner.lane, step)) != lr_scale(group, learner.lane, step - 1):
                learner.set_lr_scale(scale)
        learners.step(*batches.next())
        if step * group.points // group.steps > last * group.points // group.steps:
            learners.wait()
            for curve, learner in zip(curves, learners.members, strict=True):
                mean = learner.total_loss() / (step - last) if learner in learners.running else math.nan
                curve.append({"step": step, "batch_loss": rounded(mean), **validation.losses(objective.loss, learner)})
            learners.drop_lost()
            observe(step, learners)
            last = step
        tick(len(learners.members))
    each_s = (time.perf_counter() - begin) / sum(learner.taken for learner in learners.members)
    for learner, curve in zip(learners.members, curves, strict=True):
        yield _run_record(group, learner, curve, each_s * learner.taken, mode)


def lr_scale(group: Group, lane: Lane, step: int) -> float:
    """Return the share of its learning rate that a lane has at a step; before the first step it has all of it."""
    if step == 0:
        return 1.0
    return min(1.0, *(step / steps for steps in (group.ramp * group.steps, lane.warm_up) if steps), 1.0)


def run_key(group: Group, lane: Lane) -> Record:
    """Return the fields that identify a run among those of its part."""
    return {"study": group.study, "arm": lane.arm.name, "lr": lane.lr, "seed": group.seed}


def _run_record(group: Group, learner: Learner, curve: list[Record], wall_s: float, mode: StepMode) -> Record:
    lane = learner.lane
    final = {weights: losses for weights, losses in curve[-1].items() if weights not in ("step", "batch_loss")}
    coupling = learner.lane.arm.method.coupling(1, lane.actual_lr)  # type: ignore[union-attr]
    return {
        "kind": "run",
        **run_key(group, lane),
        "dataset": group.dataset,
        "model": group.objective.MODEL,
        "parameters": sum(p.numel() for p in learner.network.parameters()),
        "method": describe(lane.arm.method),
        "theta": rounded(coupling.theta),
        "rate": rounded(coupling.rate),
        **{name: rounded(getattr(lane.arm.method, name, math.nan), EXACT) for name in ("k", "m1", "m2")},
        "optimizer_lr": rounded(lane.actual_lr),
        "effective_lr": rounded(lane.effective_lr),
        "eps": lane.eps,
        "warm_up": lane.warm_up,
        "beta1": lane.beta1,
        "features": group.objective.describe().get("features"),
        "steps": group.steps,
        "steps_taken": learner.taken,  # fewer, if the run was lost
        "batch": group.batch,
        "images": learner.taken * group.batch,
        "reduction": group.objective.reduction,
        "curve": curve,
        "final": final,
        "finite": all(value is not None for losses in final.values() for value in losses.values()),
        "side_by_side": len(group.lanes),
        "how": mode,
        "precision": "bfloat16" if learner.device.type == "cuda" else "float32",
        **versions(learner.device),
        "wall_s": round(wall_s, 2),
    }


def protocol_record(group: Group, triples: int = TRIPLES) -> Record:
    """Return the setting that a group's runs share, and how it differs from the paper's."""
    return {
        "kind": "protocol",
        "study": group.study,
        "dataset": group.dataset,
        "steps": group.steps,
        "batch": group.batch,
        "ramp": group.ramp,
        "triples": triples,
        **group.objective.describe(),
        "differs": list(group.differs),
    }


class ImageSampler:
    """Makes images with any weights of a model; its network is compiled once."""

    def __init__(self, objective: Objective, device: torch.device, mode: StepMode) -> None:
        self.objective, self.device = objective, device
        network = objective.network().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network: nn.Module = network.eval()
        compiles = mode == "compiled and captured"
        self._evaluate: nn.Module = torch.compile(self.network, dynamic=False) if compiles else self.network  # type: ignore[assignment]

    @torch.no_grad()
    def make(self, n: int, *, seed: int = SAMPLE_SEED, tick: Tick = lambda n: None) -> Tensor:
        """Make n images, as bytes on the device; for a given SAMPLE_BATCH, a seed always gives the same images."""
        generator = torch.Generator(self.device).manual_seed(seed)
        parts = []
        for begin in range(0, n, SAMPLE_BATCH):
            with precision(self.device):
                made = self.objective.sample(self._evaluate, min(SAMPLE_BATCH, n - begin), generator, tick)
            parts.append(as_bytes(made))
        return torch.cat(parts) if parts else torch.empty(0, *self.objective.shape, dtype=torch.uint8)


def _image_records(
    group: Group, learner: Learner, sampler: ImageSampler, reference: FidReference | None
) -> Iterator[Record]:
    """Make images with an average and yield their FID and a grid of them."""
    key = run_key(group, learner.lane) | {"weights": "w2", "sample_seed": SAMPLE_SEED}
    begin = time.perf_counter()
    sampler.network.load_state_dict(learner.belay.average_state_dict())
    lost = learner.lost  # weights that are not finite make no images
    made = sampler.make(0 if lost else group.samples)
    if reference is not None:
        distance = math.nan if lost else fid.distance(made, reference.statistics, reference.inception)
        yield {
            "kind": "fid",
            **key,
            "fid": rounded(distance),
            "samples": group.samples,
            "sampler": group.objective.sampler,
            "reference": reference.description,
            "network": reference.inception.identity,
            "wall_s": round(time.perf_counter() - begin, 2),
        }
    if not lost:
        yield {"kind": "grid", **key, "rows": GRID, "columns": GRID, "png": encode_grid(made)}


def encode_grid(images: Tensor) -> str:
    """Encode the first images as one PNG, in base64."""
    return base64.b64encode(encode_png(images[: GRID * GRID], GRID)).decode()


def encode_png(images: Tensor, columns: int) -> bytes:
    """Encode images, bytes of shape (n, channels, height, width), as one PNG with `columns` images per row."""
    from matplotlib.image import imsave

    n, channels, height, width = images.shape
    rows = math.ceil(n / columns)
    sheet = images.new_zeros((rows * columns, channels, height, width))
    sheet[:n] = images
    sheet = sheet.view(rows, columns, channels, height, width).permute(0, 3, 1, 4, 2).cpu()
    flat = sheet.reshape(rows * height, columns * width, channels).expand(-1, -1, 3)
    stream = io.BytesIO()
    imsave(stream, flat.contiguous().numpy(), format="png")
    return stream.getvalue()

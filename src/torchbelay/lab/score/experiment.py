"""A group of networks is trained side by side and becomes records: losses on the way, images at the end, their FID."""

import base64
import io
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record, Tick
from torchbelay.lab.versions import versions

from . import fid as frechet
from .data import Images
from .models.objective import Objective
from .studies import Group
from .training.batches import Batches, as_bytes
from .training.learner import Together, Trainee, precision
from .training.speed import How
from .training.speed import group as side_by_side
from .training.validation import Yardstick, number

SAMPLE_SEED = 0
GRID = 8  # pictures along each side of the grid that is kept
AT_ONCE = 2500  # images that are made together
TRIPLES = 1024  # of image, noise level and noise, on which losses are taken


@dataclass(frozen=True)
class Judge:
    """What FID needs: the network, and the statistics of the training images."""

    inception: frechet.Extractor
    reference: frechet.Statistics
    said: str  # what the reference is


def experiment(
    group: Group, images: Images, device: torch.device, how: How, tick: Tick, judge: Judge | None = None
) -> Iterator[Record]:
    """Train a group and yield its records: first the protocol, then the runs, then what needs images."""
    together = side_by_side(group.objective, group.lanes, group.seed, device, how)
    yield protocol(group)
    yield from _train(group, together, images, how, tick)
    if group.fids:
        studio = Studio(group.objective, device, how)
        for index in group.fids:
            yield from _pictures(group, together.trainees[index], studio, judge)


def _train(group: Group, together: Together, images: Images, how: How, tick: Tick) -> Iterator[Record]:
    objective, device, begin = group.objective, together.trainees[0].device, time.perf_counter()
    yardstick = Yardstick.make(images, objective, device, count=TRIPLES)
    batches = Batches(images.train.to(device), objective, group.batch, seed=1000 + group.seed)
    curves: list[list[Record]] = [[] for _ in together.trainees]
    last = 0
    for step in range(1, group.steps + 1):
        if group.ramp:
            for trainee in together.trainees:
                trainee.set_lr_scale(min(1.0, step / (group.ramp * group.steps)))
        together.step(*batches.next())
        if step * group.points // group.steps > last * group.points // group.steps:
            together.wait()
            for curve, trainee in zip(curves, together.trainees, strict=True):
                mean = trainee.total_loss() / (step - last) if trainee in together.running else math.nan
                curve.append({"step": step, "batch_loss": number(mean), **yardstick.of(objective.loss, trainee)})
            together.leave_the_lost()
            last = step
        tick(len(together.trainees))
    each_s = (time.perf_counter() - begin) / sum(trainee.taken for trainee in together.trainees)
    for trainee, curve in zip(together.trainees, curves, strict=True):
        yield _record(group, trainee, curve, each_s * trainee.taken, how)


def identity(group: Group, lane: Lane) -> Record:
    """What tells a run from the others of its part."""
    return {"study": group.study, "arm": lane.arm.name, "lr": lane.lr, "seed": group.seed}


def _record(group: Group, trainee: Trainee, curve: list[Record], wall_s: float, how: How) -> Record:
    lane = trainee.lane
    final = {weights: curve[-1][weights] for weights in ("w1", "w2")}
    coupling = trainee.lane.arm.method.coupling(1, lane.actual_lr)  # type: ignore[union-attr]
    return {
        "kind": "run",
        **identity(group, lane),
        "dataset": group.dataset,
        "model": group.objective.MODEL,
        "parameters": sum(p.numel() for p in trainee.network.parameters()),
        "method": repr(lane.arm.method),
        "theta": number(coupling.theta),
        "rate": number(coupling.rate),
        **{name: _finite(getattr(lane.arm.method, name, None)) for name in ("k", "m1", "m2")},
        "optimizer_lr": number(lane.actual_lr),
        "effective_lr": number(lane.effective_lr),
        "steps": group.steps,
        "steps_taken": trainee.taken,  # fewer, if the run was lost
        "batch": group.batch,
        "images": trainee.taken * group.batch,
        "reduction": group.objective.reduction,
        "curve": curve,
        "final": final,
        "finite": all(value is not None for losses in final.values() for value in losses.values()),
        "side_by_side": len(group.lanes),
        "how": how,
        "precision": "bfloat16" if trainee.device.type == "cuda" else "float32",
        **versions(trainee.device),
        "wall_s": round(wall_s, 2),
    }


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def protocol(group: Group) -> Record:
    """The setting that a group's runs have in common, and how it differs from the paper's."""
    return {
        "kind": "protocol",
        "study": group.study,
        "dataset": group.dataset,
        "steps": group.steps,
        "batch": group.batch,
        "ramp": group.ramp,
        "triples": TRIPLES,
        **group.objective.describe(),
        "differs": list(group.differs),
    }


class Studio:
    """A network to make images with, for any weights: it is compiled once."""

    def __init__(self, objective: Objective, device: torch.device, how: How) -> None:
        self.objective, self.device = objective, device
        network = objective.network().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network: nn.Module = network.eval()
        compiles = how == "compiled and captured"
        self._ask: nn.Module = torch.compile(self.network, dynamic=False) if compiles else self.network  # type: ignore[assignment]

    @torch.no_grad()
    def make(self, n: int, *, seed: int = SAMPLE_SEED, tick: Tick = lambda n: None) -> Tensor:
        """n images as bytes, on the device; a seed's are the same as long as AT_ONCE is."""
        generator = torch.Generator(self.device).manual_seed(seed)
        parts = []
        for begin in range(0, n, AT_ONCE):
            with precision(self.device):
                made = self.objective.sample(self._ask, min(AT_ONCE, n - begin), generator, tick)
            parts.append(as_bytes(made))
        return torch.cat(parts) if parts else torch.empty(0, *self.objective.shape, dtype=torch.uint8)


def _pictures(group: Group, trainee: Trainee, studio: Studio, judge: Judge | None) -> Iterator[Record]:
    """The images of an average, as a grid and as a distance."""
    about = identity(group, trainee.lane) | {"weights": "w2", "sample_seed": SAMPLE_SEED}
    begin = time.perf_counter()
    studio.network.load_state_dict(trainee.belay.average_state_dict())
    lost = trainee.lost  # nothing can be made with it
    made = studio.make(0 if lost else group.samples)
    if judge is not None:
        distance = math.nan if lost else frechet.fid(made, judge.reference, judge.inception)
        yield {
            "kind": "fid",
            **about,
            "fid": number(distance),
            "samples": group.samples,
            "sampler": group.objective.sampler,
            "reference": judge.said,
            "network": judge.inception.identity,
            "wall_s": round(time.perf_counter() - begin, 2),
        }
    if not lost:
        yield {"kind": "grid", **about, "rows": GRID, "columns": GRID, "png": grid(made)}


def grid(images: Tensor) -> str:
    """The first images, as a PNG in base64."""
    return base64.b64encode(png(images[: GRID * GRID], GRID)).decode()


def png(images: Tensor, columns: int) -> bytes:
    """Bytes (n, channels, height, width) as a picture of rows of pictures, a PNG."""
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

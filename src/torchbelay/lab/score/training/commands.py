"""The commands `torchbelay train`, `sample` and `fid`. Each returns the exit status, or raises LabError."""

import io
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from torchbelay.belay import Belay
from torchbelay.lab.part import LabError, Tick
from torchbelay.lab.records import rounded, write_bytes
from torchbelay.lab.score import data
from torchbelay.lab.score import fid as fid_module
from torchbelay.lab.score.download import cache_folder
from torchbelay.lab.score.experiment import ImageSampler, encode_png
from torchbelay.lab.score.formats import DATASETS
from torchbelay.lab.score.models.objective import Objective
from torchbelay.lab.versions import versions
from torchbelay.physics.spring import Spring

from .budget import Plan
from .folder import Folder, append_record
from .presets import PRESETS
from .presets import find as find_preset
from .ranks import Ranks, choose_device
from .request import TrainingRequest, find_plan
from .train import train as run

Weights = Literal["w1", "w2"]


# torchbelay train -----------------------------------------------------------------------------------------------------


def train(request: TrainingRequest, *, dry_run: bool = False, console: Console | None = None) -> int:
    """Train, or print what would be done."""
    console = console or Console()
    if not dry_run:
        return run(request, console)
    table = Table(show_header=False, title=request.preset.name)
    for label, value in _plan_rows(request):
        table.add_row(label, escape(value))
    console.print(table)
    console.print("nothing was run, and nothing written", highlight=False)
    return 0


def show_presets(console: Console | None = None) -> int:
    """Print all presets, grouped by model and data, with the paper's results."""
    console, widest = console or Console(), max(map(len, PRESETS))
    for about, family in groupby(PRESETS.values(), lambda preset: preset.about):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=2 + widest, no_wrap=True)
        for preset in family:
            paper = f" [paper: {preset.paper}]" if preset.paper else ""
            table.add_row(f"  {preset.name}", escape(preset.averaged + paper))
        length = f"{_image_count(preset.images)} images, lr {preset.lr:g}"
        console.print(f"{about} ({length})", highlight=False, markup=False, style="bold")
        if caution := preset.caution():
            console.print(f"{caution}.", highlight=False, markup=False)
        console.print(table)
    return 0


def _plan_rows(request: TrainingRequest) -> Iterator[tuple[str, str]]:
    """Yield the plan of a training as labels and texts; refuse whatever training would refuse."""
    preset, folder, device = request.preset, Folder(request.out), choose_device(request.device)
    options, before = request.options(Ranks(device)), folder.read_options()
    if before is not None:
        options["processes"] = before["processes"]  # a dry run does not know how many torchrun would start
    known, done = find_plan(request, options, folder)
    plan = known or Plan.make(preset, lr=request.lr, every=request.every)
    lane, method = plan.lane, plan.lane.arm.method
    with torch.device("meta"):
        network = preset.objective.network()
    copy = data.find_copy(preset.dataset, request.data)  # refuses what `load` would refuse
    yield "about", f"{preset.about}; {preset.averaged}"
    yield "data", f"{DATASETS[preset.dataset].title}, {'found' if copy else 'to be downloaded'}"
    yield "network", f"{preset.objective.MODEL}, {sum(p.numel() for p in network.parameters()):,} parameters"
    if known is None:
        yield (
            "steps",
            f"as many as fit into {request.budget and request.budget.text}: measured first, then the masses are scaled",
        )
    else:
        yield (
            "steps",
            f"{plan.steps:,} of {plan.batch} images: {_image_count(plan.images)} images, a report every {plan.every:,} "
            "steps",
        )
        yield "average", f"{lane.arm.name}: {method!r}"
        if isinstance(method, Spring):
            yield "", _spring_text(method, plan)
    ramp = f", after a ramp over the first {preset.ramp:.0%} of the steps" if preset.ramp else ""
    yield "learning rate", f"{lane.actual_lr:.4g} for Adam, {lane.effective_lr:.4g} effective{ramp}"
    if caution := preset.caution(request.lr):
        yield "caution", caution
    yield "loss", preset.objective.reduction
    yield "device", f"{device}{', compiled' if request.compile else ''}"
    yield "seed", str(request.seed)
    if preset.paper:
        yield "the paper", preset.paper
    state = "new" if before is None else "finished" if done == plan.steps else f"continues after step {done:,}"
    yield "results", f"{folder.path}: {state}"


def _spring_text(spring: Spring, plan: Plan) -> str:
    """Return in one line what `torchbelay explain` says at length."""
    return (
        f"decay {spring.decay:.6g} per step, half-life {spring.half_life:.4g} steps, "
        f"{spring.half_life / plan.steps:.2%} of the run; θ = {spring.theta:.4g}"
    )


def _image_count(images: int) -> str:
    """Return a number of images with the unit of --budget.

    >>> _image_count(25_600_000), _image_count(12_800), _image_count(999)
    ('25.6M', '12.8k', '999')
    """
    for unit, size in (("M", 1_000_000), ("k", 1000)):
        if images >= size:
            return f"{images / size:.4g}{unit}"
    return str(images)


# torchbelay sample and fid --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel:
    """The weights of a run, loaded to make images."""

    sampler: ImageSampler
    plan: Plan
    step: int
    device: torch.device

    @classmethod
    def load(cls, folder: Folder, weights: Weights, device: torch.device) -> "TrainedModel":
        """Load the last checkpoint; the run need not be finished."""
        before = folder.read_options()
        state = None if before is None else folder.load(device)
        if before is None or state is None:
            raise LabError(
                f"{folder.path} has no checkpoint; train it first: torchbelay train PRESET --out {folder.path}"
            )
        resolved = before["resolved"]
        preset = find_preset(before["preset"])
        plan = Plan.make(preset, images=resolved["images"], lr=before["lr"], every=resolved["every"])
        folder.refuse_changed_plan(plan.describe())
        sampler = ImageSampler(preset.objective, device, "captured")
        sampler.network.load_state_dict(state["trainee"]["network"])
        if weights == "w2":
            method = plan.lane.arm.method
            assert method is not None  # a run without an average cannot be trained
            belay = Belay(sampler.network, None, method)
            belay.load_state_dict(state["trainee"]["belay"])
            belay.copy_to_model()
        return cls(sampler, plan, int(state["step"]), device)

    def make(self, count: int, seed: int, console: Console) -> Tensor:
        """Make images as bytes, with a progress bar."""
        with _progress_bar(console, "making images", count * evaluations_per_image(self.plan.preset.objective)) as tick:
            return self.sampler.make(count, seed=seed, tick=tick)


def evaluations_per_image(objective: Objective) -> int:
    """Count how often the sampler evaluates the network, with a stand-in for the network that returns zeros.

    >>> from torchbelay.lab.score.models.edm import EDM
    >>> evaluations_per_image(EDM((1, 28, 28), steps=18))
    35
    """
    calls: list[int] = []
    stand_in: Any = lambda x, *inputs: torch.zeros_like(x)  # noqa: E731 - it stands for a module
    objective.sample(stand_in, 1, torch.Generator().manual_seed(0), calls.append)
    return len(calls)


@contextmanager
def _progress_bar(console: Console, what: str, total: int) -> Iterator[Tick]:
    """Show a progress bar on a terminal; yield the function that advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(what, total=total)
        yield lambda n: bars.advance(task, n)


def sample(
    path: Path,
    *,
    count: int = 64,
    weights: Weights = "w2",
    seed: int = 0,
    out: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> int:
    """Write images of a run, as a PNG or as an npz of bytes (n, height, width, channels) under the name arr_0."""
    console, folder = console or Console(), Folder(path)
    out = out or path / f"samples-{weights}-seed{seed}.png"
    if out.suffix not in (".png", ".npz"):
        raise LabError(f"--out {out} has the ending {out.suffix!r}; give .png or .npz")
    trained = TrainedModel.load(folder, weights, choose_device(device))
    made = trained.make(count, seed, console).cpu()
    if out.suffix == ".png":
        content = encode_png(made, math.ceil(math.sqrt(count)))
    else:
        stream = io.BytesIO()
        np.savez_compressed(stream, arr_0=made.permute(0, 2, 3, 1).numpy())
        content = stream.getvalue()
    write_bytes(out, content)
    text = f"{out}: {count:,} images of {weights} after step {trained.step:,}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def fid(
    path: Path,
    *,
    samples: int = 10_000,
    weights: Weights = "w2",
    seed: int = 0,
    inception: Path | None = None,
    dataset: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> int:
    """Measure the FID of a run's images against the training images, print it, and append it to the run's fid.jsonl."""
    console, folder, begin = console or Console(), Folder(path), time.perf_counter()
    if samples < 2:
        raise LabError(f"--samples {samples} are too few for a covariance; give 2 or more")
    chosen = choose_device(device)
    network = fid_module.Inception(chosen, inception)
    trained = TrainedModel.load(folder, weights, chosen)
    name = trained.plan.preset.dataset
    images = data.load(name, dataset)
    with console.status("features of the training images (cached for the next time)"):
        reference = fid_module.reference_statistics(images, network, cache_folder())
    made = trained.make(samples, seed, console)
    with console.status("features of the samples"):
        distance = fid_module.distance(made, reference, network)
    record = {
        "fid": rounded(distance),
        "samples": samples,
        "seed": seed,
        "weights": weights,
        "step": trained.step,
        "images": trained.step * trained.plan.batch,
        "sampler": trained.plan.preset.objective.sampler,
        "reference": f"{DATASETS[name].title}, {reference.count:,} training images",
        "network": network.identity,
        **versions(chosen),
        "wall_s": round(time.perf_counter() - begin, 2),
    }
    append_record(folder.fids, record)
    text = (
        f"FID {distance:.4g}: {samples:,} images of {weights} after step {trained.step:,} (seed {seed}, "
        f"{record['sampler']}) against {record['reference']}; {network.identity}"
    )
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0

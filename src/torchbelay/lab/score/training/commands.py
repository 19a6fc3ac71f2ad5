"""What the commands `torchbelay train`, `sample` and `fid` do. Each returns the exit status, or raises LabError."""

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
from torchbelay.lab.records import write_bytes
from torchbelay.lab.score import data
from torchbelay.lab.score import fid as frechet
from torchbelay.lab.score.experiment import Studio, png
from torchbelay.lab.score.models.objective import Objective
from torchbelay.lab.versions import versions
from torchbelay.physics.spring import Spring

from .budget import Plan
from .folder import Folder, append
from .presets import PRESETS, find
from .ranks import Ranks, chosen
from .train import Asked, looked_up
from .train import train as run
from .validation import number

Weights = Literal["w1", "w2"]


# torchbelay train -----------------------------------------------------------------------------------------------------


def train(asked: Asked, *, dry_run: bool = False, console: Console | None = None) -> int:
    """Train, or say what would be done."""
    console = console or Console()
    if not dry_run:
        return run(asked, console)
    table = Table(show_header=False, title=asked.preset.name)
    for label, value in _rows(asked):
        table.add_row(label, escape(value))
    console.print(table)
    console.print("nothing was run, and nothing written", highlight=False)
    return 0


def show_presets(console: Console | None = None) -> int:
    """All presets, by what is trained, and what the paper has of each."""
    console, widest = console or Console(), max(map(len, PRESETS))
    for about, family in groupby(PRESETS.values(), lambda preset: preset.about):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=2 + widest, no_wrap=True)
        for preset in family:
            paper = f" [paper: {preset.paper}]" if preset.paper else ""
            table.add_row(f"  {preset.name}", escape(preset.averaged + paper))
        length = f"{_short(preset.images)} images, lr {preset.lr:g}"
        console.print(f"{about} ({length})", highlight=False, markup=False, style="bold")
        console.print(table)
    return 0


def _rows(asked: Asked) -> Iterator[tuple[str, str]]:
    preset, folder, device = asked.preset, Folder(asked.out), chosen(asked.device)
    options, before = asked.options(Ranks(device)), folder.asked()
    if before is not None:
        options["processes"] = before["processes"]  # how many there will be is not known here
    known, done = looked_up(asked, options, folder)
    plan = known or Plan.of(preset, lr=asked.lr, every=asked.every)
    lane, method = plan.lane, plan.lane.arm.method
    with torch.device("meta"):
        network = preset.objective.network()
    there = data.find(preset.dataset, asked.data)  # refuses what `load` would refuse
    yield "about", f"{preset.about}; {preset.averaged}"
    yield "data", f"{data.SETS[preset.dataset].title}, {'at hand' if there else 'to be downloaded'}"
    yield "network", f"{preset.objective.MODEL}, {sum(p.numel() for p in network.parameters()):,} parameters"
    if known is None:
        yield "steps", f"as many as take {asked.budget and asked.budget.text} here: measured first; masses follow"
    else:
        yield (
            "steps",
            f"{plan.steps:,} of {plan.batch} images: {_short(plan.images)} images, a report every {plan.every:,}",
        )
        yield "average", f"{lane.arm.name}: {method!r}"
        if isinstance(method, Spring):
            yield "", _in_a_line(method, plan)
    ramp = f", growing to it over the first {preset.ramp:.0%}" if preset.ramp else ""
    yield "learning rate", f"{lane.actual_lr:.4g} of Adam, {lane.effective_lr:.4g} in effect{ramp}"
    yield "loss", preset.objective.reduction
    yield "device", f"{device}{', compiled' if asked.compile else ''}"
    yield "seed", str(asked.seed)
    if preset.paper:
        yield "the paper", preset.paper
    state = "to begin" if before is None else "finished" if done == plan.steps else f"to go on after step {done:,}"
    yield "results", f"{folder.path}: {state}"


def _in_a_line(spring: Spring, plan: Plan) -> str:
    """What `torchbelay explain` would say of it at length."""
    return (
        f"decay {spring.decay:.6g} a step, half-life {spring.half_life:.4g} steps, {spring.half_life / plan.steps:.2%} "
        f"of the run; θ = {spring.theta:.4g}"
    )


def _short(images: int) -> str:
    """A number of images as --budget takes it.

    >>> _short(25_600_000), _short(12_800), _short(999)
    ('25.6M', '12.8k', '999')
    """
    for unit, size in (("M", 1_000_000), ("k", 1000)):
        if images >= size:
            return f"{images / size:.4g}{unit}"
    return str(images)


# torchbelay sample and fid --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run's weights, ready to make images."""

    studio: Studio
    plan: Plan
    step: int
    device: torch.device

    @classmethod
    def of(cls, folder: Folder, weights: Weights, device: torch.device) -> "Trained":
        """From the last checkpoint, of a run that need not be finished."""
        before = folder.asked()
        state = None if before is None else folder.load(device)
        if before is None or state is None:
            raise LabError(
                f"{folder.path} has no checkpoint; train it first: torchbelay train PRESET --out {folder.path}"
            )
        resolved = before["resolved"]
        preset = find(before["preset"])
        plan = Plan.of(preset, images=resolved["images"], lr=before["lr"], every=resolved["every"])
        folder.refuse_changes(plan.describe())
        studio = Studio(preset.objective, device, "captured")
        studio.network.load_state_dict(state["trainee"]["network"])
        if weights == "w2":
            method = plan.lane.arm.method
            assert method is not None  # or it could not have been trained
            belay = Belay(studio.network, None, method)
            belay.load_state_dict(state["trainee"]["belay"])
            belay.copy_to_model()
        return cls(studio, plan, int(state["step"]), device)

    def make(self, count: int, seed: int, console: Console) -> Tensor:
        """Images as bytes, with a bar."""
        with _bar(console, "making images", count * evaluations(self.plan.preset.objective)) as tick:
            return self.studio.make(count, seed=seed, tick=tick)


def evaluations(objective: Objective) -> int:
    """How often the network is asked for an image: counted with one that is silent.

    >>> from .edm import EDM
    >>> evaluations(EDM((1, 28, 28), steps=18))
    35
    """
    asked: list[int] = []
    silent: Any = lambda x, *told: torch.zeros_like(x)  # noqa: E731 - it stands for a module
    objective.sample(silent, 1, torch.Generator().manual_seed(0), asked.append)
    return len(asked)


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Tick]:
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
    """Images of a run, as a PNG or as an npz of bytes (n, height, width, channels) under the name arr_0."""
    console, folder = console or Console(), Folder(path)
    out = out or path / f"samples-{weights}-seed{seed}.png"
    if out.suffix not in (".png", ".npz"):
        raise LabError(f"--out {out} has the ending {out.suffix!r}; give .png or .npz")
    trained = Trained.of(folder, weights, chosen(device))
    made = trained.make(count, seed, console).cpu()
    if out.suffix == ".png":
        content = png(made, math.ceil(math.sqrt(count)))
    else:
        stream = io.BytesIO()
        np.savez_compressed(stream, arr_0=made.permute(0, 2, 3, 1).numpy())
        content = stream.getvalue()
    write_bytes(out, content)
    told = f"{out}: {count:,} images of {weights} after step {trained.step:,}"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
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
    """The FID of a run's images against the training images; printed, and added to the run's fid.jsonl."""
    console, folder, begin = console or Console(), Folder(path), time.perf_counter()
    if samples < 2:
        raise LabError(f"--samples {samples} are too few for a covariance; give 2 or more")
    where = chosen(device)
    network = frechet.Inception(where, inception)
    trained = Trained.of(folder, weights, where)
    name = trained.plan.preset.dataset
    images = data.load(name, dataset)
    with console.status("the training images, which are kept for the next time"):
        reference = frechet.reference(images, network, data.cache_folder())
    made = trained.make(samples, seed, console)
    with console.status("the features of the images"):
        distance = frechet.fid(made, reference, network)
    record = {
        "fid": number(distance),
        "samples": samples,
        "seed": seed,
        "weights": weights,
        "step": trained.step,
        "images": trained.step * trained.plan.batch,
        "sampler": trained.plan.preset.objective.sampler,
        "reference": f"{data.SETS[name].title}, {reference.count:,} training images",
        "network": network.identity,
        **versions(where),
        "wall_s": round(time.perf_counter() - begin, 2),
    }
    append(folder.fids, record)
    told = (
        f"FID {distance:.4g}: {samples:,} images of {weights} after step {trained.step:,} (seed {seed}, "
        f"{record['sampler']}) against {record['reference']}; {network.identity}"
    )
    console.print(told, highlight=False, markup=False, soft_wrap=True)
    return 0

"""The parts of the report that need a GPU: run where there is one, and shown from the package's records elsewhere.

A group of networks that is finished is kept in the cache, so that a stopped study goes on with the next one.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import as_file, files

import torch

from torchbelay.lab import records as on_disk
from torchbelay.lab.part import LabError, Record, Settings, Tick

from . import fid, studies
from .batches import Batches
from .budget import Budget
from .experiment import Judge, experiment
from .images import Name, available, cache_folder, load
from .speed import How, seconds_a_step, throughput
from .speed import group as side_by_side
from .studies import Group
from .trainee import deterministic
from .versions import versions

DEVICE = torch.device("cuda")
HOW: How = "compiled and captured"
QUICK = 0.02  # the share of a study that --quick runs, where there is a GPU
SPEED_STEPS = 10  # in each round in which the speed is taken
SEEDS_APART = 100  # the seeds of a study with another --seed are others


def plan(name: str, settings: Settings) -> tuple[int, str]:
    """Units of work, and one line that says what would be run."""
    if why := obstacle(name, settings):
        return 1, f"shows the records that come with the package: {why}"
    groups = _planned(name, settings)
    networks = sum(len(each.lanes) for each in groups)
    units = sum(len(each.lanes) * each.steps for each in groups)
    kinds = ", ".join(dict.fromkeys(each.study for each in groups))
    return units, f"{networks} networks on {groups[0].dataset} ({kinds}), {units:,} steps in all"


def run(name: str, settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; where that cannot be done, the records that come with the package."""
    if why := obstacle(name, settings):
        tick(1)
        return committed(name, why)
    return list(Study(name, settings, tick).records())


def obstacle(name: str, settings: Settings) -> str | None:
    """Why the study cannot be run here, in a sentence; None if it can."""
    if not torch.cuda.is_available():
        return "There is no GPU here."
    if not available(_dataset(name), settings.data):
        return f"There is no copy of {_dataset(name)} here; name one with --data."
    return None


def committed(name: str, why: str) -> list[Record]:
    """The records that come with the package, and why they are shown."""
    with as_file(files(__package__) / "records" / f"{name}.jsonl") as path:
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "origin" else line for line in found]


class Study:
    """A part of the report, about to be run on the GPU."""

    def __init__(self, name: str, settings: Settings, tick: Tick) -> None:
        self.name, self.settings, self.tick = name, settings, tick
        self.device = DEVICE
        self.images = load(_dataset(name), settings.data)

    def records(self) -> Iterator[Record]:
        """Everything, the origin first."""
        begin = time.perf_counter()
        share = self._share()
        found: list[Record] = []
        with deterministic():
            for study in studies.STUDIES[self.name]:
                for each in _groups(study, self.settings, share, best_rate(found) if study == "table1" else None):
                    found += self._group(each)
                if not self.settings.quick:
                    found += self._speeds(each)
        date, spent = time.strftime("%Y-%m"), round(time.perf_counter() - begin)
        origin: Record = {"kind": "origin", "date": date, "device_s": spent, **versions(self.device)}
        yield origin if self.settings.budget is None else origin | {"budget": self.settings.budget}
        yield from found

    def _group(self, each: Group) -> list[Record]:
        """A group's records, from the cache if it was finished before."""
        told = json.dumps([repr(each), HOW, versions(self.device)])
        path = cache_folder() / "groups" / f"{each.study}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.jsonl"
        if path.exists():
            self.tick(len(each.lanes) * each.steps)
            return on_disk.read(path)[1]
        found = list(experiment(each, self.images, self.device, HOW, self.tick, self._judge(each)))
        on_disk.write(path, on_disk.header(self.name, self.settings, 0.0), found)
        return found

    def _judge(self, each: Group) -> Judge | None:
        """What FID needs; where its network cannot be had, images are made and shown all the same."""
        if not each.fids:
            return None
        try:
            inception = fid.Inception(self.device, self.settings.inception)
        except LabError:
            if self.settings.inception is not None:
                raise
            return None
        told = f"{self.images.name} train, {len(self.images.train)} images"
        return Judge(inception, fid.reference(self.images, inception, cache_folder()), told)

    def _speeds(self, each: Group) -> list[Record]:
        lane = next(lane for lane in each.lanes if lane.arm.name in ("BELAY", studies.coupled(0.25).name))
        pixels, about = self.images.train.to(self.device), {"study": each.study, "dataset": each.dataset}
        return [
            throughput(each.objective, pixels, lane, each.batch, together=n, how=HOW, steps=SPEED_STEPS) | about
            for n in (1, len(each.lanes))
        ]

    def _share(self) -> float:
        """Of the studies' steps that the budget allows."""
        if self.settings.budget is None:
            return 1.0
        budget, groups = Budget.parse(self.settings.budget), _planned(self.name, self.settings)
        if budget.images is not None:
            return budget.images / max(each.steps * each.batch for each in groups)
        assert budget.seconds is not None
        return budget.seconds / sum(each.steps * self._pace(each) for each in groups)

    def _pace(self, each: Group) -> float:
        """Seconds that a step of a group takes."""
        together = side_by_side(each.objective, each.lanes, each.seed, self.device, HOW)
        batches = Batches(self.images.train.to(self.device), each.objective, each.batch, seed=0)
        return seconds_a_step([together], batches, steps=3)[0]


def best_rate(found: Sequence[Record]) -> float:
    """The learning rate at which the averages of all arms together have the lowest training loss; a lost one counts 1.

    >>> runs = [(1e-3, 0.06), (1e-2, None), (1e-3, 0.07)]
    >>> best_rate([{"kind": "run", "lr": lr, "final": {"w2": {"train": loss}}} for lr, loss in runs])
    0.001
    """
    losses: dict[float, list[float]] = {}
    for line in found:
        if line["kind"] == "run":
            loss = line["final"]["w2"]["train"]
            losses.setdefault(line["lr"], []).append(1.0 if loss is None else min(1.0, loss))
    return min(losses, key=lambda lr: sum(losses[lr]) / len(losses[lr]))


def _groups(study: str, settings: Settings, share: float, best: float | None) -> Iterator[Group]:
    """The groups of a study; `best` is what Table 1 takes beside the paper's rate."""
    if settings.quick:
        share *= QUICK
    try:
        groups = studies.table1(best, share=share) if best is not None else getattr(studies, study)(share=share)
        for each in groups:
            each = replace(each, seed=each.seed + SEEDS_APART * settings.seed)
            yield replace(each, fids=()) if settings.quick else each
            if settings.quick:
                return  # one seed
    except ValueError as error:  # from a spring
        raise LabError(f"the budget is too small for {study}: {error}") from error


def _planned(name: str, settings: Settings) -> list[Group]:
    """All groups of a part, as far as is known before any has been run."""
    return [
        each
        for study in studies.STUDIES[name]
        for each in _groups(study, settings, 1.0, studies.USUAL_RATE if study == "table1" else None)
    ]


def _dataset(name: str) -> Name:
    return "cifar10" if name == "cifar10" else "mnist"

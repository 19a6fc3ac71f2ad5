"""The parts of the report that need a GPU: run where there is one, and shown from the package's records elsewhere.

A group of networks that is finished is kept in the cache, so that a stopped study goes on with the next one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import as_file, files

import torch

from torchbelay.lab import records as on_disk
from torchbelay.lab.arms import BELAY
from torchbelay.lab.part import LabError, Record, Settings, Tick
from torchbelay.lab.versions import versions

from . import fid, studies
from .analysis import HEAVIER
from .analysis import Study as Found
from .cache import Kept
from .data import Name, available, cache_folder, load
from .experiment import Judge, experiment
from .studies import Group
from .training.batches import Batches
from .training.budget import Budget
from .training.learner import deterministic
from .training.speed import How, seconds_a_step, throughput
from .training.speed import group as side_by_side

DEVICE = torch.device("cuda")
HOW: How = "compiled and captured"
QUICK = 0.2  # the share of a study that --quick runs, where there is a GPU; with less, CIFAR-10's spring would be none
SPEED_STEPS = 10  # in each round in which the speed is taken
SEEDS_APART = 100  # the seeds of a study with another --seed are others
UNITS = 1000  # of a progress bar
FEWEST = 256  # images that are made of a network, however small the budget


def plan(name: str, settings: Settings) -> tuple[int, str]:
    """Units of work, and one line that says what would be run."""
    if why := obstacle(name, settings):
        return 1, f"shows the records that come with the package: {why}"
    budget = None if settings.budget is None else Budget.parse(settings.budget)
    timed = budget is not None and budget.seconds is not None
    groups = _planned(name, settings, 1.0 if budget is None or timed else _share_of_images(name, settings, budget))
    networks, kinds = sum(len(each.lanes) for each in groups), ", ".join(dict.fromkeys(each.study for each in groups))
    steps = sum(len(each.lanes) * each.steps for each in groups)
    length = f"as many steps as fit into {settings.budget}" if timed else f"{steps:,} steps in all"
    drawn = sum(len(each.fids) for each in groups)
    images = f"; besides, images of {drawn} of them and their FID" if drawn else ""
    return UNITS, f"{networks} networks on {groups[0].dataset} ({kinds}), {length}{images}"


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
        self.name, self.settings = name, settings
        self.device = DEVICE
        self.images = load(_dataset(name), settings.data)
        self.share = self._share()
        groups = _planned(name, settings, self.share)
        self.tick = _Share(tick, sum(len(each.lanes) * each.steps for each in groups))

    def records(self) -> Iterator[Record]:
        """Everything, the origin first."""
        found: list[Record] = []
        spent = 0.0
        with deterministic():
            for study in studies.STUDIES[self.name]:
                for each in _groups(study, self.settings, self.share, best_rates(found)):
                    took, lines = self._group(each)
                    found += lines
                    spent += took
                if not self.settings.quick:
                    found += self._speeds(each)
        date, origin = time.strftime("%Y-%m"), versions(self.device)
        yield {"kind": "origin", "date": date, "device_s": round(spent), "budget": self.settings.budget, **origin}
        yield from found

    def _group(self, each: Group) -> tuple[float, list[Record]]:
        """How long a group took, and its records; from the cache, if it was finished before."""
        judge = self._judge(each)
        kept = Kept(each.study, each, HOW, versions(self.device), None if judge is None else judge.inception.identity)
        if not self.settings.anew and (before := kept.read()) is not None:
            self.tick(len(each.lanes) * each.steps)
            return before
        begin = time.perf_counter()
        found = list(experiment(each, self.images, self.device, HOW, self.tick, judge))
        took = time.perf_counter() - begin
        kept.write(found, took)
        return took, found

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
        """Of the studies' steps that the budget allows; once measured it is kept, so that a stopped study goes on."""
        if self.settings.budget is None:
            return 1.0
        budget = Budget.parse(self.settings.budget)
        if budget.seconds is None:
            return _share_of_images(self.name, self.settings, budget)
        kept = Kept(f"share-{self.name}", self.settings.budget, self.settings.quick, versions(self.device))
        if (before := kept.read()) is None:
            took = sum(each.steps * self._pace(each) for each in _planned(self.name, self.settings, 1.0))
            before = 0.0, [{"share": budget.seconds / took}]
            kept.write(before[1])
        return float(before[1][0]["share"])

    def _pace(self, each: Group) -> float:
        """Seconds that a step of a group takes."""
        together = side_by_side(each.objective, each.lanes, each.seed, self.device, HOW)
        batches = Batches(self.images.train.to(self.device), each.objective, each.batch, seed=0)
        return seconds_a_step([together], batches, steps=3)[0]


class _Share:
    """Turns steps into the units of a progress bar."""

    def __init__(self, tick: Tick, steps: int) -> None:
        self._tick, self._steps, self._taken = tick, steps, 0

    def __call__(self, steps: int) -> None:
        before, self._taken = self._taken, min(self._steps, self._taken + steps)  # there may be more than was planned
        self._tick(UNITS * self._taken // self._steps - UNITS * before // self._steps)


def best_rates(records: Sequence[Record]) -> dict[str, float]:
    """The learning rate that suits each arm best in the short runs, by the loss on training images.

    A heavier BELAY is among them if it did better than that of Table 1: it is BELAY tuned.
    """
    short = Found(records, "rates")
    rates = {arm: short.best_rate(arm) or studies.USUAL_RATE for arm in (*studies.THREE, *HEAVIER)}
    tuned = min((BELAY, *HEAVIER), key=lambda arm: short.mean_loss(arm, rates[arm]))
    return {arm: lr for arm, lr in rates.items() if arm in (*studies.THREE, tuned)}


def _groups(study: str, settings: Settings, share: float, best: Mapping[str, float]) -> Iterator[Group]:
    """The groups of a study; `best` is what Table 1 takes beside the paper's rate."""
    share *= QUICK if settings.quick else 1.0
    try:
        groups = studies.table1(best, share=share) if study == "table1" else getattr(studies, study)(share=share)
        for each in groups:
            each = replace(each, seed=each.seed + SEEDS_APART * settings.seed)
            each = replace(each, samples=max(FEWEST, round(min(1.0, share) * each.samples)))
            yield replace(each, fids=()) if settings.quick else each
            if settings.quick:
                return  # one seed
    except ValueError as error:  # from a spring
        raise LabError(f"--budget {settings.budget} is too small for {study}: {error}") from error


def _planned(name: str, settings: Settings, share: float) -> list[Group]:
    """All groups of a part, if Table 1 takes the rates that were the best in our own short runs."""
    best = best_rates(committed("mnist", ""))
    return [each for study in studies.STUDIES[name] for each in _groups(study, settings, share, best)]


def _share_of_images(name: str, settings: Settings, budget: Budget) -> float:
    """A budget of images is that of the network that sees most."""
    assert budget.images is not None
    return budget.images / max(each.steps * each.batch for each in _planned(name, settings, 1.0))


def _dataset(name: str) -> Name:
    return "cifar10" if name == "cifar10" else "mnist"

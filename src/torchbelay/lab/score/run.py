"""Run the parts of the report that need a GPU; without a GPU or data, show the records that come with the package.

A group of networks that is finished stays in the cache, so that a stopped study continues with the next group.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Protocol

import torch

from torchbelay.lab import records as on_disk
from torchbelay.lab.arms import BELAY, EQUAL, MATCHED
from torchbelay.lab.deadline import Deadline, OutOfTimeError
from torchbelay.lab.part import LabError, Record, Settings, Tick
from torchbelay.lab.versions import versions
from torchbelay.physics.identity import describe

from . import fid, studies
from .analysis import HEAVIER, StudyResults
from .cache import CachedRecords
from .data import Images, is_available, load
from .download import cache_folder
from .experiment import FidReference, run_group
from .fid_curve import pieces, run_pieces
from .formats import DATASETS, DatasetName
from .studies import Group
from .training.batches import Batches
from .training.budget import Budget
from .training.learner import LearnerGroup, deterministic
from .training.speed import StepMode, build_learners, seconds_per_step, throughput

QUICK = 0.2  # the share of a study that --quick runs on a GPU; a smaller one would leave CIFAR-10 no valid spring
SPEED_STEPS = 10  # steps per round in which the speed is measured
SEEDS_APART = 100  # the distance between the seeds of a study at two values of --seed
UNITS = 1000  # of a progress bar
FEWEST = 256  # images per network, even with the smallest budget
SPEED_SHOWN = ("mnist", "sign", "cifar10")  # parts whose plates have a table of speeds


_DATASETS: dict[str, DatasetName] = {"cifar10": "cifar10", "penalty": "cifar10-part"}  # of parts; the others: MNIST


class GroupRunner(Protocol):
    """The signature of `experiment.run_group`."""

    def __call__(
        self,
        group: Group,
        images: Images,
        device: torch.device,
        mode: StepMode,
        tick: Tick,
        reference: FidReference | None,
        /,
    ) -> Iterator[Record]:
        """Train a group and yield its records."""


def find_gpu() -> torch.device | None:
    """Return the GPU; None if there is none."""
    return torch.device("cuda") if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Resources:
    """What a study runs on and with. The defaults are the real ones; a test passes small ones.

    >>> Resources(device=torch.device("cpu"), mode="eager").device
    device(type='cpu')
    """

    device: torch.device | None = field(default_factory=find_gpu)  # without one, no study is run
    mode: StepMode = "compiled and captured"
    load: Callable[[DatasetName, Path | None], Images] = load
    is_available: Callable[[DatasetName, Path | None], bool] = is_available
    inception: Callable[[torch.device, Path | None], fid.Extractor] = fid.Inception
    plans: Mapping[str, Callable[..., Iterator[Group]]] = field(default_factory=lambda: studies.PLANS)
    run_group: GroupRunner = run_group
    throughput: Callable[..., Record] = throughput
    seconds_per_step: Callable[..., list[float]] = seconds_per_step


def plan(name: str, settings: Settings, resources: Resources | None = None) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    resources = resources or Resources()
    if why := obstacle(name, settings, resources):
        return 1, f"shows the records that come with the package: {why}"
    budget = None if settings.budget is None else Budget.parse(settings.budget)
    timed = budget is not None and budget.seconds is not None
    planner = _Planner(name, settings, resources)
    groups = planner.all_groups(1.0 if budget is None or timed else planner.share_of_images(budget))
    networks, kinds = sum(len(each.lanes) for each in groups), ", ".join(dict.fromkeys(each.study for each in groups))
    steps = sum(len(each.lanes) * each.steps for each in groups)
    length = f"as many steps as fit into {settings.budget}" if timed else f"{steps:,} steps in all"
    sampled = sum(len(each.fids) for each in groups)
    images = f"; besides, images of {sampled} of them and their FID" if sampled else ""
    return UNITS, f"{networks} networks on {groups[0].dataset} ({kinds}), {length}{images}"


def run(name: str, settings: Settings, tick: Tick, resources: Resources | None = None) -> list[Record]:
    """Train and measure; if that is impossible here, return the records that come with the package."""
    resources = resources or Resources()
    if why := obstacle(name, settings, resources):
        tick(1)
        return read_committed(name, why)
    return list(StudyRun(name, settings, tick, resources).records())


def obstacle(name: str, settings: Settings, resources: Resources) -> str | None:
    """Return why the study cannot be run here, as a sentence; None if it can."""
    if resources.device is None:
        return "There is no GPU here."
    if not resources.is_available(_dataset(name), settings.data):
        info = DATASETS[_dataset(name)]
        return f"There is no copy of {info.title} here; give one with --data: {info.accepted}."
    return None


def read_committed(name: str, why: str) -> list[Record]:
    """Read the records that come with the package; the origin says why they are shown."""
    with as_file(files(__package__) / "records" / f"{name}.jsonl") as path:
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "origin" else line for line in found]


def adopt(name: str, settings: Settings, records: Sequence[Record], resources: Resources | None = None) -> list[int]:
    """Put the complete seeds of earlier records into the cache, so that they are not run again; return these seeds.

    For a study whose cache is gone. A seed counts if its runs and FIDs are those of the plan. The caller answers for it
    that the code of the runs is what it was. Versions and device are compared: they are part of the key.
    """
    resources, found = resources or Resources(), []
    for each in _Planner(name, settings, resources).all_groups(1.0):
        own = [line for line in records if line.get("study") == each.study]
        lines = [line for line in own if line.get("seed") == each.seed]
        runs, fids = ([line for line in lines if key in line] for key in ("curve", "fid"))
        if not _is_planned(each, runs, fids):
            continue
        made = {key: runs[0][key] for key in versions(torch.device("cpu"))}
        cached = _cached(each, resources.mode, made, fids[0]["network"] if fids else None)
        if cached.read() is None:
            shared = [line for line in own if line["kind"] == "protocol"][:1]  # every group has one, all the same
            cached.write([*shared, *lines], sum(line["wall_s"] for line in (*runs, *fids)))
        found.append(each.seed)
    return found


def _is_planned(group: Group, runs: Sequence[Record], fids: Sequence[Record]) -> bool:
    """Whether these are all runs and FIDs of a group, with the settings that it has now."""
    fields = "arm", "lr", "method", "eps", "warm_up", "beta1", "steps", "batch", "dataset", "model", "features"
    shared = group.steps, group.batch, group.dataset, group.objective.MODEL, group.objective.describe().get("features")
    wanted = [
        (lane.arm.name, lane.lr, describe(lane.arm.method), lane.eps, lane.warm_up, lane.beta1, *shared)
        for lane in group.lanes
    ]
    at = pieces(group) if group.fid_points else [(index, None, "w2") for index in group.fids]
    sampled = [(group.lanes[index].arm.name, step, weights, group.samples) for index, step, weights in at]
    return (
        sorted(map(repr, wanted)) == sorted(repr(tuple(run.get(field) for field in fields)) for run in runs)
        and bool(runs)
        and sorted(map(repr, sampled))
        == sorted(repr((line["arm"], line.get("step"), line["weights"], line["samples"])) for line in fids)
    )


def _cached(group: Group, mode: StepMode, made: Record, identity: str | None) -> CachedRecords:
    """Return the cache file of a group's records, made with some versions on some device."""
    plain = replace(group, differs=())  # words about a group change nothing in its runs
    return CachedRecords(group.study, plain, mode, made, identity)


class StudyRun:
    """A part of the report while it is run on a GPU."""

    def __init__(self, name: str, settings: Settings, tick: Tick, resources: Resources) -> None:
        assert resources.device is not None
        self.name, self.settings, self.resources, self.device = name, settings, resources, resources.device
        self.deadline = Deadline(settings.stop_after)
        self.images = resources.load(_dataset(name), settings.data)
        self.planner = _Planner(name, settings, resources)
        self.share = self._share()
        groups = self.planner.all_groups(self.share)
        self.tick = StepProgress(tick, sum(len(each.lanes) * each.steps for each in groups))

    def records(self) -> Iterator[Record]:
        """Yield all records, the origin first."""
        found: list[Record] = []
        self.spent, complete = 0.0, True
        with deterministic():
            try:
                for study in studies.STUDIES[self.name]:
                    self._run_study(study, found)
            except OutOfTimeError:
                complete = False  # what is finished is a smaller study
        date, origin = time.strftime("%Y-%m-%d"), versions(self.device)
        about = {"date": date, "device_s": round(self.spent), "budget": self.settings.budget, "complete": complete}
        yield {"kind": "origin", **about, **origin}
        yield from found

    def _run_study(self, study: str, found: list[Record]) -> None:
        """Add the records of a study to `found`, group by group."""
        for each in self.planner.groups(study, self.share, best_rates(found)):
            took, lines = self._run_or_read(each)
            found += lines
            self.spent += took
        if self.name in SPEED_SHOWN and not self.settings.quick:
            found += self._speeds(each)

    def _run_or_read(self, each: Group) -> tuple[float, list[Record]]:
        """Return how long a group took and its records, from the cache if it was finished before."""
        reference, mode = self._fid_reference(each), self.resources.mode
        identity = None if reference is None else reference.inception.identity
        cached = _cached(each, mode, versions(self.device), identity)
        if not self.settings.anew and (before := cached.read()) is not None:
            self.tick(len(each.lanes) * each.steps)
            return before
        self.deadline.check()
        given = each, self.images, self.device, mode, self.tick, reference
        if each.fid_points:
            took, found = run_pieces(*given, cached.piece, self.deadline, anew=self.settings.anew)
        else:
            begin = time.perf_counter()
            found = list(self.resources.run_group(*given))
            took = time.perf_counter() - begin
            self.deadline.spent(took)
        cached.write(found, took)
        return took, found

    def _fid_reference(self, each: Group) -> FidReference | None:
        """Return what FID needs; without its network, images are made but not measured."""
        if not each.fids:
            return None
        try:
            inception = self.resources.inception(self.device, self.settings.inception)
        except LabError:
            if self.settings.inception is not None:
                raise
            return None
        description = f"{self.images.name} train, {len(self.images.train)} images"
        return FidReference(inception, fid.reference_statistics(self.images, inception, cache_folder()), description)

    def _speeds(self, each: Group) -> list[Record]:
        """Measure the speed of one network with a pulling spring, and of as many as the group trains side by side."""
        springs = [lane for lane in each.lanes if lane.arm.name in (BELAY, studies.coupled(0.25).name)]
        if not springs:
            return []
        lane = springs[0]
        pixels, fields = self.images.train.to(self.device), {"study": each.study, "dataset": each.dataset}
        options = {"mode": self.resources.mode, "steps": SPEED_STEPS}
        measure = self.resources.throughput
        return [
            measure(each.objective, pixels, lane, each.batch, side_by_side=count, **options) | fields
            for count in (1, len(each.lanes))
        ]

    def _share(self) -> float:
        """Return the share of the steps that the budget allows; a measured share is cached for later runs."""
        if self.settings.budget is None:
            return 1.0
        budget = Budget.parse(self.settings.budget)
        if budget.seconds is None:
            return self.planner.share_of_images(budget)
        key = (self.settings.budget, self.settings.quick, versions(self.device))
        cached = CachedRecords(f"share-{self.name}", *key)
        if (before := cached.read()) is None:
            alike = Counter(replace(each, seed=0) for each in self.planner.all_groups(1.0))  # a seed has no speed
            took = sum(count * each.steps * self._seconds_per_step(each) for each, count in alike.items())
            before = 0.0, [{"share": budget.seconds / took}]
            cached.write(before[1])
        return float(before[1][0]["share"])

    def _seconds_per_step(self, each: Group) -> float:
        """Measure how long a group takes for a step."""
        learners: LearnerGroup = build_learners(each.objective, each.lanes, each.seed, self.device, self.resources.mode)
        batches = Batches(self.images.train.to(self.device), each.objective, each.batch, seed=0)
        return self.resources.seconds_per_step([learners], batches, steps=3)[0]


@dataclass(frozen=True)
class _Planner:
    """The groups of a part, for its settings."""

    name: str
    settings: Settings
    resources: Resources

    def groups(self, study: str, share: float, best: Mapping[str, float]) -> Iterator[Group]:
        """Yield the groups of a study; `best` are the rates that Table 1 uses beside the paper's."""
        settings, make = self.settings, self.resources.plans[study]
        share *= QUICK if settings.quick else 1.0
        try:
            for each in make(best, share=share) if study == "table1" else make(share=share):
                samples = max(FEWEST, round(min(1.0, share) * each.samples))
                each = replace(each, seed=each.seed + SEEDS_APART * settings.seed, samples=samples)
                yield replace(each, fids=()) if settings.quick else each
                if settings.quick:
                    return  # one seed
        except ValueError as error:  # from a spring
            raise LabError(f"--budget {settings.budget} is too small for {study}: {error}") from error

    def all_groups(self, share: float) -> list[Group]:
        """Return all groups of the part; Table 1 has the best rates of the committed short runs."""
        best = best_rates(read_committed("mnist", ""))
        return [each for study in studies.STUDIES[self.name] for each in self.groups(study, share, best)]

    def share_of_images(self, budget: Budget) -> float:
        """Return the share of the steps at which the network with the most images sees the budget's number."""
        assert budget.images is not None
        return budget.images / max(each.steps * each.batch for each in self.all_groups(1.0))


class StepProgress:
    """Turns steps into the units of a progress bar."""

    def __init__(self, tick: Tick, steps: int) -> None:
        self._tick, self._steps, self._taken = tick, steps, 0

    def __call__(self, steps: int) -> None:
        """Count some steps, and advance the bar."""
        before, self._taken = self._taken, min(self._steps, self._taken + steps)  # a run may exceed its plan
        self._tick(UNITS * self._taken // self._steps - UNITS * before // self._steps)


def best_rates(records: Sequence[Record]) -> dict[str, float]:
    """Return the learning rate at which each arm has the lowest training loss in the short runs and loses no seed.

    A heavier BELAY is included only if it has a lower loss than BELAY with Table 1's masses: it is the tuned BELAY.
    """
    short, standard = StudyResults(records, "rates"), (EQUAL, MATCHED, BELAY)
    rates = {arm: short.safe_rate(arm) or studies.USUAL_RATE for arm in (*standard, *HEAVIER)}
    tuned = min((BELAY, *HEAVIER), key=lambda arm: short.mean_loss(arm, rates[arm]))
    return {arm: lr for arm, lr in rates.items() if arm in (*standard, tuned)}


def _dataset(name: str) -> DatasetName:
    return _DATASETS.get(name, "mnist")

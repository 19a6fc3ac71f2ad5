"""The part `gpt`: a byte-level GPT on Python code, every arm over the same learning rates, tuned and judged apart.

On a GPU it runs in full. With --quick it trains very small networks anywhere. Elsewhere it shows the records that come
with the package. `claims/study.md` states its hypotheses and rules.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files

import torch

from torchbelay.lab import records as on_disk
from torchbelay.lab.deadline import Deadline, OutOfTimeError
from torchbelay.lab.part import LabError, Plate, Record, Settings, Tick
from torchbelay.lab.score.cache import CachedRecords, digest_sources
from torchbelay.lab.threads import one_thread
from torchbelay.lab.versions import versions

from .analysis import CURVES, Runs
from .arms import BELAY, CONSTANT, COSINE, HALF, LOOKAHEAD, QUARTER, SCHEDULE_FREE, Arm
from .corpus import SPLITS, Corpus, Split, find
from .network import Shape
from .training import Protocol, Trainer

NAME = "gpt"
TITLE = "The sign of the spring, on a language model"

FULL = Protocol()
QUICK = Protocol(
    shape=Shape(layers=1, width=32, heads=2, context=32),
    batch=8,
    steps=60,
    warmup=6,
    rate=0.1,
    lrs=(3e-3, 1e-2, 3e-2),
    tuned_on=1,
    judged_on=2,
    windows=64,
    corpus=4_000_000,
)
MEASURED = (CONSTANT, HALF, BELAY)  # whose curvature is measured in runs of their own, on the first seed for tuning
FIRST_JUDGED = 1000  # the seeds for judging are others than those for tuning
SOURCES = ("arms.py", "corpus.py", "network.py", "training.py")  # the code that a run depends on


RunKey = tuple[str, float, int, Split | None]  # arm, rate, seed and split


def _key(r: Record) -> RunKey:
    return r["arm"], r["lr"], r["seed"], r.get("split")


@dataclass(frozen=True)
class Stage:
    """Arms that are tuned, and then arms that are judged."""

    tuned: tuple[Arm, ...]
    judged: tuple[Arm, ...]


# The order of the runs: first all that the hypotheses need, seed by seed. A study that ends early is a smaller one.
STAGES = (
    Stage((CONSTANT, HALF, BELAY), (*CURVES, BELAY)),
    Stage((QUARTER, COSINE, SCHEDULE_FREE, LOOKAHEAD), (COSINE, SCHEDULE_FREE, LOOKAHEAD)),
)
AT_LAST = (BELAY, COSINE, SCHEDULE_FREE, LOOKAHEAD)  # judged at their best rates above, and then at the others


@dataclass(frozen=True)
class Lane:
    """One run."""

    arm: Arm
    lr: float
    seed: int
    split: Split | None  # None: its curvature is measured, not its losses


def choose(settings: Settings) -> Protocol:
    """Return the protocol of these settings."""
    return QUICK if settings.quick else FULL


def obstacle(settings: Settings) -> str | None:
    """Return why nothing can be trained here, as a sentence; None if it can."""
    return None if settings.quick or torch.cuda.is_available() else "There is no GPU here."


def scouting(how: Protocol, arms: Sequence[Arm], seed: int = 0) -> list[Lane]:
    """Return the runs of the first seed for tuning: every arm at every rate."""
    return [Lane(arm, lr, 100 * seed, "tune") for arm in arms for lr in how.lrs]


def refining(how: Protocol, arms: Sequence[Arm], runs: Runs, seed: int = 0) -> list[Lane]:
    """Return the runs of the other seeds for tuning: each arm at the best rate so far, and at the rates beside it."""
    return [
        Lane(arm, lr, each, "tune")
        for each in range(100 * seed + 1, 100 * seed + how.tuned_on)
        for arm in arms
        for lr in sorted({near for best in _best(runs, arm) for near in _beside(how.lrs, best)})
    ]


def judging(how: Protocol, arms: Sequence[Arm], runs: Runs, seed: int = 0) -> list[Lane]:
    """Return the runs by which arms are compared, once the best rates are known: all of one seed, then of the next."""
    first = FIRST_JUDGED + 100 * seed
    return [
        Lane(arm, lr, each, "judge")
        for each in range(first, first + how.judged_on)
        for arm in arms
        for lr in (how.lrs if arm in CURVES else _best(runs, arm))
    ]


def completing(how: Protocol, arms: Sequence[Arm], runs: Runs, seed: int = 0) -> list[Lane]:
    """Return the runs that give a curve to arms which were judged at their best rates alone: all other rates."""
    first = FIRST_JUDGED + 100 * seed
    return [
        Lane(arm, lr, each, "judge")
        for each in range(first, first + how.judged_on)
        for arm in arms
        for lr in how.lrs
        if lr not in _best(runs, arm)
    ]


def tracing(how: Protocol, arms: Sequence[Arm], seed: int = 0) -> list[Lane]:
    """Return the runs in which the curvature is measured: those of the first seed for tuning, once more."""
    return [replace(lane, split=None) for lane in scouting(how, arms, seed)]


def _results(arm: Arm) -> tuple[str, ...]:
    """Return what has a best rate of its own: the average; and the weights, if they alone are usual training."""
    return ("w1", "w2") if arm.cosine else ("w2",)


def _best(runs: Runs, arm: Arm) -> list[float]:
    """Return the best rates of an arm, of each of its results."""
    return sorted({runs.best_lr(arm.name, weights) for weights in _results(arm)})


def _beside(lrs: Sequence[float], lr: float) -> Sequence[float]:
    at = lrs.index(lr)
    return lrs[max(0, at - 1) : at + 2]


def count(how: Protocol) -> int:
    """Return the most runs that there can be: if no best rate is at an end. In the end every arm has every rate."""
    total = 0
    for stage in STAGES:
        total += len(stage.tuned) * len(how.lrs)
        total += (how.tuned_on - 1) * sum(3 * len(_results(arm)) for arm in stage.tuned)
    return total + len(how.lrs) * (how.judged_on * len((*CURVES, *AT_LAST)) + len(MEASURED))


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    how = choose(settings)
    if why := obstacle(settings):
        return 1, f"shows the records that come with the package: {why}"
    most = count(how)
    return most, f"at most {most} networks of {how.shape.layers} layers, {how.steps:,} steps each"


def run(settings: Settings, tick: Tick, have: Sequence[Record] = ()) -> list[Record]:
    """Train and measure; without a GPU, return the records that come with the package.

    Runs that are in the records `have` are not made again. The caller answers for it that their code was the same.
    """
    if why := obstacle(settings):
        tick(1)
        return read_committed(why)
    return list(Study(settings, tick, have).records())


def read_committed(why: str) -> list[Record]:
    """Read the records that come with the package; the protocol says why they are shown."""
    with as_file(files(__package__) / "records" / f"{NAME}.jsonl") as path:
        if not path.exists():
            return []
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "protocol" else line for line in found]


@cache
def code_digest() -> str:
    """Return the digest of the code that a run depends on: runs of another version are not reused."""
    return digest_sources(files(__package__), SOURCES)


class Study:
    """The part while it runs. A finished run stays in the cache, so that a stopped study continues with the next."""

    def __init__(self, settings: Settings, tick: Tick, have: Sequence[Record] = ()) -> None:
        self.how, self.settings, self.tick = choose(settings), settings, tick
        self.deadline = Deadline(settings.stop_after)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not settings.quick else "cpu")
        self.corpus: Corpus = find(settings.data, self.how.corpus)
        self.origin = versions(self.device)
        self._before = self._runs_before() | self._adopted(have)
        self._trainer: Trainer | None = None
        self.spent = 0.0
        self.complete, self.traced = False, False  # all losses, all curvatures

    def records(self) -> Iterator[Record]:
        """Yield all records, the protocol first."""
        if self.device.type == "cpu":
            with one_thread():
                yield from self._records()
        else:
            yield from self._records()

    def _records(self) -> Iterator[Record]:
        runs: list[Record] = []
        try:
            for lane in self._lanes(runs):
                runs.append(self._run(lane))  # noqa: PERF401 - what is finished counts if time runs out
            self.traced = True
        except OutOfTimeError:
            pass  # what is finished is a smaller study
        yield self._about()
        yield from runs

    def _lanes(self, runs: Sequence[Record]) -> Iterator[Lane]:
        """Yield all runs in their order; `runs` are those that are finished, which grow meanwhile."""
        seed = self.settings.seed
        for stage in STAGES:
            yield from scouting(self.how, stage.tuned, seed)
            yield from refining(self.how, stage.tuned, Runs(runs), seed)
            yield from judging(self.how, stage.judged, Runs(runs), seed)
        yield from completing(self.how, AT_LAST, Runs(runs), seed)
        self.complete = True
        yield from tracing(self.how, MEASURED, seed)

    def _runs_before(self) -> dict[RunKey, Record]:
        """Return the runs that come with the package, if they are an unfinished study with this text, code and GPU."""
        about, *runs = read_committed("") or [{}]
        same = all(about.get(key) == value for key, value in self._identity().items())
        is_whole = not about or (about["complete"] and about.get("traced", False))
        return {_key(r): r for r in runs} if same and not is_whole and not self.settings.anew else {}

    def _adopted(self, have: Sequence[Record]) -> dict[RunKey, Record]:
        """Return runs of earlier records; refuse those of another text, network, length or machine."""
        if not have:
            return {}
        about, *runs = have
        for key, value in (self._sizes() | self._identity()).items():
            if key != "code" and about.get(key) != value:
                raise LabError(f"the records to go on from have {key} {about.get(key)}, not {value}: run all anew")
        return {_key(r): {**r, "code": r.get("code", about["code"])} for r in runs}

    def _sizes(self) -> Record:
        """Return the sizes and numbers of every run."""
        how = self.how
        return {
            "layers": how.shape.layers,
            "width": how.shape.width,
            "context": how.shape.context,
            "batch": how.batch,
            "steps": how.steps,
            "warmup": how.warmup,
            "rate": how.rate,
        }

    def _identity(self) -> Record:
        """Return what runs must agree in to be of one study."""
        made_by = {key: self.origin[key] for key in ("torch", "device")}
        return {"code": code_digest(), "digest": self.corpus.digest, "steps": self.how.steps, **made_by}

    def _run(self, lane: Lane) -> Record:
        how = replace(self.how, lrs=(), tuned_on=0, judged_on=0, corpus=0)  # what one run depends on
        key = (how, lane.arm.name, lane.lr, lane.seed, lane.split, self._identity())
        cached = CachedRecords(NAME, *key, code=code_digest())
        known = None if self.settings.anew else cached.read()
        found = known[1][0] if known else self._before.get((lane.arm.name, lane.lr, lane.seed, lane.split))
        if found is None:
            self.deadline.check()
            begin = time.perf_counter()
            self._trainer = self._trainer or Trainer(self.how, self.corpus, self.device)
            if lane.split is None:
                found = self._trainer.trace(lane.arm, lane.lr, lane.seed, self.how.looks)
            else:
                found = self._trainer.run(lane.arm, lane.lr, lane.seed, lane.split)
            found |= {"run_s": round(time.perf_counter() - begin, 2), "code": code_digest()}
            cached.write([found], found["run_s"])
            self.deadline.spent(found["run_s"])
        self.spent += found["run_s"]
        self.tick(1)
        return found

    def _about(self) -> Record:
        return {
            "kind": "protocol",
            "complete": self.complete,
            "traced": self.traced,
            **self._sizes(),
            "bytes": {split: len(self.corpus.held_out(split)) for split in SPLITS},
            "packages": self.corpus.packages,
            "device_s": round(self.spent),
            "date": time.strftime("%Y-%m-%d"),
            **self._identity(),
            **self.origin,
        }


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; without runs there are none."""
    if not any(record["kind"] == "run" for record in records):
        return []
    from torchbelay.lab.report import style  # only here, because a machine that trains may lack matplotlib

    from . import figures

    with style.house():
        return figures.draw(records)

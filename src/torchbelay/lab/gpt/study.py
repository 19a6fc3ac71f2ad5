"""The part `gpt`: a byte-level GPT on Python code, every arm over the same learning rates, tuned and judged apart.

On a GPU it runs in full. With --quick it trains very small networks anywhere. Elsewhere it shows the records that come
with the package.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files

import torch

from torchbelay.lab import records as on_disk
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.report import style
from torchbelay.lab.score.cache import CachedRecords, digest_sources
from torchbelay.lab.threads import one_thread
from torchbelay.lab.versions import versions

from . import figures
from .analysis import Runs
from .arms import ARMS, BELAY, CONSTANT, HALF, QUARTER, Arm
from .corpus import Corpus, Split, collect
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
WHOLE_CURVE = (CONSTANT, QUARTER, HALF, BELAY)  # judged at every rate; the others at their best
MEASURED = (CONSTANT, HALF, BELAY)  # whose curvature is measured, on the first seed for tuning
FIRST_JUDGED = 1000  # the seeds for judging are others than those for tuning


@dataclass(frozen=True)
class Lane:
    """One run."""

    arm: Arm
    lr: float
    seed: int
    split: Split
    curvature: bool = False


def choose(settings: Settings) -> Protocol:
    """Return the protocol of these settings."""
    return QUICK if settings.quick else FULL


def obstacle(settings: Settings) -> str | None:
    """Return why nothing can be trained here, as a sentence; None if it can."""
    return None if settings.quick or torch.cuda.is_available() else "There is no GPU here."


def tuning(how: Protocol, seed: int = 0) -> list[Lane]:
    """Return the runs by which each arm's best rate is chosen."""
    seeds = range(100 * seed, 100 * seed + how.tuned_on)
    return [
        Lane(arm, lr, each, "tune", curvature=arm in MEASURED and each == seeds[0])
        for each in seeds
        for arm in ARMS.values()
        for lr in how.lrs
    ]


def judging(how: Protocol, runs: Runs, seed: int = 0) -> list[Lane]:
    """Return the runs by which arms are compared, once the best rates are known."""
    first = FIRST_JUDGED + 100 * seed
    return [
        Lane(arm, lr, each, "judge")
        for each in range(first, first + how.judged_on)
        for arm in ARMS.values()
        for lr in (how.lrs if arm in WHOLE_CURVE else sorted({runs.best_lr(arm.name), runs.best_lr(arm.name, "w1")}))
    ]


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would be run."""
    how = choose(settings)
    if why := obstacle(settings):
        return 1, f"shows the records that come with the package: {why}"
    most = how.judged_on * (len(WHOLE_CURVE) * len(how.lrs) + 2 * (len(ARMS) - len(WHOLE_CURVE)))
    count = len(tuning(how)) + most
    return count, f"at most {count} networks of {how.shape.layers} layers, {how.steps:,} steps each"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; without a GPU, return the records that come with the package."""
    if why := obstacle(settings):
        tick(1)
        return read_committed(why)
    return list(Study(settings, tick).records())


def read_committed(why: str) -> list[Record]:
    """Read the records that come with the package; the protocol says why they are shown."""
    with as_file(files(__package__) / "records" / f"{NAME}.jsonl") as path:
        if not path.exists():
            return []
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "protocol" else line for line in found]


@cache
def code_digest() -> str:
    """Return the digest of this part's own code: runs of another version are not reused."""
    return digest_sources(files(__package__))


class Study:
    """The part while it runs. A finished run stays in the cache, so that a stopped study continues with the next."""

    def __init__(self, settings: Settings, tick: Tick) -> None:
        self.how, self.settings, self.tick = choose(settings), settings, tick
        self.device = torch.device("cuda" if torch.cuda.is_available() and not settings.quick else "cpu")
        self.corpus: Corpus = collect(self.how.corpus)
        self._trainer: Trainer | None = None
        self.spent = 0.0

    def records(self) -> Iterator[Record]:
        """Yield all records, the protocol first."""
        if self.device.type == "cpu":
            with one_thread():
                yield from self._records()
        else:
            yield from self._records()

    def _records(self) -> Iterator[Record]:
        begun = [self._run(lane) for lane in tuning(self.how, self.settings.seed)]
        judged = [self._run(lane) for lane in judging(self.how, Runs(begun), self.settings.seed)]
        yield self._about()
        yield from begun
        yield from judged

    def _run(self, lane: Lane) -> Record:
        key = (code_digest(), self.how, lane.arm.name, lane.lr, lane.seed, lane.split, lane.curvature)
        cached = CachedRecords(NAME, *key, self.corpus.digest, versions(self.device))
        known = None if self.settings.anew else cached.read()
        if known is None:
            begin = time.perf_counter()
            self._trainer = self._trainer or Trainer(self.how, self.corpus, self.device)
            found = [self._trainer.run(lane.arm, lane.lr, lane.seed, lane.split, curvature=lane.curvature)]
            known = time.perf_counter() - begin, found
            cached.write(found, known[0])
        self.spent += known[0]
        self.tick(1)
        return known[1][0]

    def _about(self) -> Record:
        how = self.how
        return {
            "kind": "protocol",
            "layers": how.shape.layers,
            "width": how.shape.width,
            "context": how.shape.context,
            "batch": how.batch,
            "steps": how.steps,
            "warmup": how.warmup,
            "rate": how.rate,
            "bytes": {split: len(self.corpus.held_out(split)) for split in ("train", "tune", "judge")},
            "packages": self.corpus.packages,
            "digest": self.corpus.digest,
            "device_s": round(self.spent),
            "date": time.strftime("%Y-%m"),
            **versions(self.device),
        }


def draw(records: Sequence[Record]) -> list[Plate]:
    """Return the plates; without runs there are none."""
    if not any(record["kind"] == "run" for record in records):
        return []
    with style.house():
        return figures.draw(records)

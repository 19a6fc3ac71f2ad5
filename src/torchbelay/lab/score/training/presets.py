"""Named trainings: the paper's tables with its numbers, and small versions of them that take minutes on one GPU."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchbelay.lab.arms import BELAY, Arm, Lane
from torchbelay.lab.part import LabError
from torchbelay.lab.score.formats import DatasetName
from torchbelay.lab.score.models.edm import CIFAR10
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.objective import Objective
from torchbelay.lab.score.studies import (
    CIFAR10_BATCH,
    CIFAR10_BELAY,
    CIFAR10_EDM,
    CIFAR10_EMA,
    EDM_HALF_LIFE,
    MASSES,
    MNIST_BELAY,
    MNIST_EDM,
    MNIST_EMA,
    PAPER_RATE,
    belay,
    ema,
    equal,
    matched,
    stretch,
)
from torchbelay.physics.spring import Spring

MATCHED_TEXT = "the EMA matched to BELAY: its averaging rate, at its effective learning rate"
EQUAL_TEXT = "the EMA of BELAY's averaging rate, at the nominal learning rate"
CURVES = "train and test loss over iterations, drawn without numbers"
CURE = "3e-4"  # SAFE_RATE as an argument of the command


@dataclass(frozen=True)
class Preset:
    """A training, with all its numbers."""

    name: str
    about: str
    dataset: DatasetName
    objective: Objective
    spring: Spring  # the argument of `arm`: BELAY's spring or, in an EMA's preset, the EMA itself
    arm: Callable[[Spring], Arm]
    lr: float
    batch: int
    images: int  # that the run sees, repetitions included
    paper: str = ""  # the paper's results, if it prints any
    ramp: float = 0.0  # the share of the run over which the learning rate grows to its value
    averaged: str = BELAY  # the average, in words

    @property
    def steps(self) -> int:
        """The length of the run, for which the masses are chosen."""
        return self.images // self.batch

    def caution(self, lr: float | None = None) -> str:
        """Return a warning if nothing trained at this learning rate, by default the preset's; else nothing.

        >>> find("table1-belay").caution()
        'At lr 0.05 nothing trained from a cold start in our runs (docs/paper.md); give --lr 3e-4'
        >>> find("table1-belay").caution(3e-4), find("mnist-edm-belay").caution()
        ('', '')
        """
        chosen = self.lr if lr is None else lr
        if self.lr != PAPER_RATE or chosen < PAPER_RATE:
            return ""
        return f"At lr {PAPER_RATE:g} nothing trained from a cold start in our runs (docs/paper.md); give --lr {CURE}"

    def lane(self, share: float = 1.0, lr: float | None = None) -> Lane:
        """Return the arm and rate for a run `share` times as long; the average spans the same share of the run."""
        return Lane(self.arm(stretch(self.spring, share)), self.lr if lr is None else lr)


# The presets ----------------------------------------------------------------------------------------------------------


def _with_controls(belay_preset: Preset, average: Spring, text: str, paper: str = "") -> Iterator[Preset]:
    """Yield BELAY, the EMA that the paper compares it with, and two controls; the matched EMA is the fair one."""
    stem = belay_preset.name.removesuffix("-belay")
    yield belay_preset
    yield replace(belay_preset, name=f"{stem}-ema", averaged=f"EMA: {text}", spring=average, arm=ema, paper=paper)
    yield replace(belay_preset, name=f"{stem}-equal", averaged=EQUAL_TEXT, arm=equal, paper="")
    yield replace(belay_preset, name=f"{stem}-matched", averaged=MATCHED_TEXT, arm=matched, paper="")


_TABLE1 = Preset(
    "table1-belay",
    "Table 1: NCSNv2 on MNIST; size, length and batch are not printed: those of NCSN and NCSNv2",
    "mnist",
    NCSN(features=64),
    MNIST_BELAY,
    belay,
    lr=PAPER_RATE,
    batch=128,
    images=200_000 * 128,
    paper="loss .042 train / .040 test, FID 15.2",
)

_CIFAR10 = Preset(
    "cifar10-belay",
    "The appendix: EDM on CIFAR-10, days on eight GPUs",
    "cifar10",
    CIFAR10,
    CIFAR10_BELAY,
    belay,
    lr=1e-3,
    batch=CIFAR10_BATCH,
    images=200_000_000,
    ramp=0.05,
    paper="loss .176 train / .170 test, FID 1.99",
)

_SMALL_STEPS = 15_625
_SMALL_SHARE = _SMALL_STEPS / _CIFAR10.steps
_CIFAR10_SMALL = replace(
    _CIFAR10,
    name="cifar10-small-belay",
    about="A small EDM on CIFAR-10, minutes on one GPU: 1% of the images, masses scaled to the steps",
    objective=CIFAR10_EDM,
    spring=stretch(CIFAR10_BELAY, _SMALL_SHARE),
    batch=128,
    images=_SMALL_STEPS * 128,
    paper="",
)

_MNIST_EDM = Preset(
    "mnist-edm-belay",
    "A small EDM on MNIST, minutes on one GPU, with Table 1's masses; not in the paper",
    "mnist",
    MNIST_EDM,
    MNIST_BELAY,
    belay,
    lr=1e-3,
    batch=128,
    images=10_000 * 128,
)


def _all() -> Iterator[Preset]:
    text = "decay .999, BELAY as m1 → ∞, and NCSNv2's own"
    yield from _with_controls(_TABLE1, MNIST_EMA, text, "loss .056 train / .061 test, FID 18.1")
    for name, m1 in MASSES.items():
        text, spring = f"BELAY with the appendix's m1 = {name}", replace(MNIST_BELAY, m1=m1)
        yield replace(_TABLE1, name=f"appendix-m1-{name}", averaged=text, spring=spring, paper=CURVES)
    half_life = f"EDM's half-life of {EDM_HALF_LIFE // 1000}k images"
    yield from _with_controls(_CIFAR10, CIFAR10_EMA, f"{half_life}, constant", "loss .175 train / .168 test, FID 1.98")
    yield from _with_controls(_CIFAR10_SMALL, stretch(CIFAR10_EMA, _SMALL_SHARE), f"{half_life}, scaled to the steps")
    yield from _with_controls(_MNIST_EDM, MNIST_EMA, "decay .999")


PRESETS: dict[str, Preset] = {preset.name: preset for preset in _all()}


def find(name: str) -> Preset:
    """Return the preset of that name; the error for an unknown name lists the nearest ones.

    >>> find("mnist-edm-ema").spring
    Spring.ema(decay=0.999)
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise LabError(f"unknown preset {name!r}; {meant}torchbelay train --list shows them all")

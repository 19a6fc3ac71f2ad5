"""All parts, in the order of the report."""

from typing import cast

from . import overhead, theory
from .advice import study as advice
from .gpt import study as gpt
from .part import Part
from .plane import fig1, fig2, fig3, invariance, momentum, robustness
from .posthoc import study as posthoc
from .ring import study as ring
from .score import cifar10, figure4, mnist, penalty, readings, sign, warm_up

_PLANE = (fig1, fig2, fig3, robustness, momentum, invariance)
_IMAGES = (mnist, figure4, readings, sign, cifar10)
_STUDY = (warm_up, penalty, gpt)  # claims/study.md
_ALL = (*_PLANE, theory, overhead, ring, advice, posthoc, *_IMAGES, *_STUDY)
PARTS: dict[str, Part] = {part.NAME: part for part in cast("tuple[Part, ...]", _ALL)}
# Parts that run alone: the first measures times, which other work would spoil; each of the rest needs a whole GPU.
EXCLUSIVE = ("overhead", "mnist", "figure4", "readings", "sign", "cifar10", "warmup", "penalty", "gpt")

"""What a part of the laboratory is: experiments that become records, and figures drawn from records alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]  # plain JSON: the options of a run and what came of it
Tick = Callable[[int], object]  # so many units of work are done


class LabError(Exception):
    """What went wrong, in one line that a person can act on."""


@dataclass(frozen=True)
class Settings:
    """What the person chose; every number of a record follows from these and the code."""

    seed: int = 0
    quick: bool = False  # a small version of everything, to see that it works; its verdicts mean little
    # What the parts that train on images on a GPU are told besides.
    data: Path | None = None  # a copy of the data set
    inception: Path | None = None  # the weights of FID's network
    budget: str | None = None  # how much of it: a time, or images for each network
    anew: bool = False  # even what is kept of an earlier run


MISSING = "–"  # in a table


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first cell of a row names it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plate:
    """A figure, or a table, as the report shows it."""

    name: str  # of its files, without the ending
    title: str
    caption: str  # plain text: what is seen, from which starts, how many steps, and what to make of it
    figure: "Figure | Table"
    notes: tuple[str, ...] = ()  # a list below the caption, a sentence each


class Part(Protocol):
    """A module of this package with these names."""

    NAME: str
    TITLE: str

    def plan(self, settings: Settings, /) -> tuple[int, str]:
        """Units of work, and one line that says what would be run."""

    def run(self, settings: Settings, tick: Tick, /) -> list[Record]:
        """Do it. The same settings give the same records, but for fields named `…_s`, which are times."""

    def draw(self, records: Sequence[Record], /) -> list[Plate]:
        """The figures, from the records alone."""

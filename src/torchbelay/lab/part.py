"""What a part of the laboratory is: experiments that become records, and figures drawn from records alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]  # plain JSON: the options of a run and its results
Tick = Callable[[int], object]  # called with the number of units of work that are done


class LabError(Exception):
    """A failure that the user can act on; its message is one line and names a cure."""


@dataclass(frozen=True)
class Settings:
    """The user's choices; every number of a record follows from these and the code."""

    seed: int = 0
    quick: bool = False  # a small version of everything, to see that it works; its verdicts mean little
    # Only for the parts that train on images on a GPU:
    data: Path | None = None  # a copy of the data set
    inception: Path | None = None  # the weights of FID's network
    budget: str | None = None  # how much to train: a time, or a number of images per network
    anew: bool = False  # run again what an earlier run left in the cache
    stop_after: float | None = None  # seconds, after which a part returns the records of what is finished


MISSING = "–"  # in a table


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first cell of a row names it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: tuple[str, ...] = ()  # columns of sentences: they begin at the left and may break anywhere


@dataclass(frozen=True)
class Plate:
    """A figure, or a table, as the report shows it."""

    name: str  # of its files, without the ending
    title: str
    caption: str  # plain text, at most two sentences: what one sees, and what follows from it
    figure: "Figure | Table"
    notes: tuple[str, ...] = ()  # how it was made: starts, steps, seeds, settings, rules; one or more sentences each


class Part(Protocol):
    """A module with these names; `registry` lists all parts."""

    NAME: str
    TITLE: str

    def plan(self, settings: Settings, /) -> tuple[int, str]:
        """Return the units of work, and one line that says what would run."""

    def run(self, settings: Settings, tick: Tick, /) -> list[Record]:
        """Run the experiments. The same settings give the same records, except for times: fields named `…_s`."""

    def draw(self, records: Sequence[Record], /) -> list[Plate]:
        """Draw the figures, from the records alone."""

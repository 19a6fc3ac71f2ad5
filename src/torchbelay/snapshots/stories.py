"""How averages came about, as snapshots tell it: methods as texts, and the tables of couplings that no text tells."""

from collections.abc import Iterable, Mapping
from functools import cache

from torchbelay.belay.average import Average, Entry
from torchbelay.belay.cohort import Cohort, varies
from torchbelay.physics.identity import describe
from torchbelay.physics.method import Method

from .folder import Story, Told
from .targets import parse


def text_of(method: Method) -> tuple[str, bool]:
    """Return a method as a text, and whether the text alone tells all of its couplings."""
    try:
        text = describe(method)
    except ValueError:
        return type(method).__qualname__, False
    if not type(method).__module__.startswith("torchbelay.physics."):  # a class of the user's may have any name
        return text, False
    return text, _numbered(method) and _can_be_read(text)


@cache
def _can_be_read(text: str) -> bool:
    """Whether a text makes its method again; asked once, for reading a text takes a millisecond of a step."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _numbered(method: Method) -> bool:
    """Whether the number of a step is all that its coupling depends on."""
    return varies(method) in ("never", "step")


def told_of(average: str, entries: Mapping[str, Entry], every: int, trained: Iterable[str]) -> Told:
    """Return how the average of each parameter came about."""
    texts = {id(m): text_of(m) for m in {id(e.method): e.method for e in entries.values()}.values()}
    stories: dict[Story, int] = {}
    other: dict[str, int] = {}
    for e in entries.values():
        text, known = texts[id(e.method)]
        table = None if known else _table_name(average, text, 0 if _numbered(e.method) else e.group, e.born)
        number = stories.setdefault(Story(text, e.born, every, table), len(stories))
        if number:
            other[e.name] = number
    return Told(tuple(stories), other | dict.fromkeys(set(trained) - entries.keys(), -1))


def _table_name(average: str, text: str, group: int, born: int) -> str:
    return f"{average}: {text} of group {group} since step {born}"


def untold(average: Average) -> dict[str, Cohort]:
    """Return the tables of couplings that an average needs, each with a cohort that moves by them."""
    found: dict[str, Cohort] = {}
    for cohort in average.cohorts:
        text, known = text_of(cohort.method)
        if not known:
            found.setdefault(_table_name(average.name, text, cohort.group or 0, cohort.born), cohort)
    return found

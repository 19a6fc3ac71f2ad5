"""The report: one page that stands by itself, and every figure as a file beside it.

The page asks nothing of the network and runs no script; its own policy (a `Content-Security-Policy` in its head)
forbids both. How it looks is in page.html. What it says comes from the records' headers, the verdicts, the plates and
the errata: no number is typed in here.
"""

import base64
import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from torchbelay import __version__
from torchbelay.lab.claims.errata import ERRATA
from torchbelay.lab.claims.verdict import Answer, Verdict
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.records import write_bytes, write_text

from . import style
from .words import code, duration, pieces, sentence

PAGE = "index.html"
LARGEST_SVG = 700_000  # bytes; a larger drawing goes into the page as a PNG, and is an SVG beside it all the same
COMMAND = "torchbelay reproduce"

# What a person who reads one paragraph should learn, the weightiest first: is training more robust, does BELAY beat EMA
# on images, does the average save a diverging SGD, is it fast. As many as LED go into the answer.
LEADING = ("C11", "C9", "C2", "C3")
LED = 3

_SAID = {  # how many claims an answer was given to, in words
    Answer.HOLDS: ("holds", "hold"),
    Answer.IN_PART: ("holds in part", "hold in part"),
    Answer.FAILS: ("does not hold", "do not hold"),
    Answer.OPEN: ("was not run", "were not run"),
}

_FACTS = {"Seed": "seed", "torchbelay": "torchbelay", "torch": "torch", "Python": "python", "Machine": "device"}
_VERSIONS = {"torch": "torch", "Python": "python"}
_MADE = ("torch", "python", "device")  # of a header; records that were made elsewhere say it better


def build(
    out: Path,
    heads: Mapping[str, Record],
    records: Mapping[str, Sequence[Record]],
    verdicts: Sequence[Verdict],
    plates: Mapping[str, Sequence[Plate]],
    *,
    titles: Mapping[str, str] | None = None,
) -> Path:
    """Write the figures and the page into the folder `out`; the page is the last, and its path the result.

    `heads`, `records` and `plates` are those of the parts that were run, by name. `titles` has every part that there is
    by name, in the order of the page: one that was not run is shown with the command that runs it. Without it, the
    parts are those that were run and those that a claim needs.
    """
    if titles is None:
        titles = {name: name for name in (*heads, *(part for verdict in verdicts for part in verdict.claim.needs))}
    _check(titles, heads, records, plates)
    parts = []
    for name, title in titles.items():
        figures = tuple(_figure(out, plate) for plate in plates.get(name, ()))
        command = f"{COMMAND} {name}{_options(heads)}"
        lines = records.get(name, ())
        origin = next((line for line in lines if line.get("kind") == "origin"), {})
        parts.append(_Part(name, title, command, heads.get(name), len(lines), figures, origin))
    claims = [_claim(verdict, parts) for verdict in verdicts]
    run = [part for part in parts if part.head is not None]
    facts = {name: [part.facts[name] for part in run] for name in ("Size", *_FACTS)}
    page = _template().render(
        version=__version__,
        command=COMMAND,
        counts=_counts([claim.answer for claim in claims]),
        lead=_lead(claims),
        claims=claims,
        parts=parts,
        run=run,
        quick=[part for part in run if part.quick],
        total=duration(sum(head.get("wall_s", 0.0) for head in heads.values())),
        shared=[(name, values[0]) for name, values in facts.items() if len({*values}) == 1],
        differing=[name for name, values in facts.items() if len({*values}) > 1],
        errata=ERRATA,
        missing=MISSING,
    )
    write_text(out / PAGE, page)
    return out / PAGE


def _check(
    titles: Mapping[str, str],
    heads: Mapping[str, Record],
    records: Mapping[str, Sequence[Record]],
    plates: Mapping[str, Sequence[Plate]],
) -> None:
    """Refuse what would leave something out of the page, or write one figure over another."""
    if strangers := {*heads, *plates} - {*titles}:
        raise ValueError(f"no title of {', '.join(sorted(strangers))}")
    if torn := ({*heads} ^ {*records}) | ({*plates} - {*heads}):
        raise ValueError(f"only some of header, records and figures of {', '.join(sorted(torn))}")
    names = [plate.name for drawn in plates.values() for plate in drawn]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two figures are called {', '.join(sorted(twice))}")


# What the page shows, as the template takes it ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    """A plate whose files are written."""

    name: str
    title: str
    caption: str
    notes: tuple[str, ...]
    files: tuple[str, ...]  # the endings of its files
    table: Table | None = None  # instead of an image
    source: str = ""  # the image itself, as an address that needs no other file
    width: int = 0  # in CSS pixels, at the size that it was drawn for
    height: int = 0


@dataclass(frozen=True)
class _Part:
    """A part, run or not."""

    name: str
    title: str
    command: str  # that runs it
    head: Record | None  # None: it was not run
    count: int  # of records
    figures: tuple[_Figure, ...]
    origin: Record  # where the records were made, if they say so themselves; else empty

    @property
    def quick(self) -> bool:
        return self.head is not None and bool(self.head.get("quick")) and not self.origin.get("committed")

    @property
    def committed(self) -> str:
        """That the records come with the package, why, and where they were made; empty if they do not."""
        if not self.origin.get("committed"):
            return ""
        made = [f"{name} {self.origin[key]}" for name, key in _VERSIONS.items() if key in self.origin]
        made += [str(self.origin["date"])] if "date" in self.origin else []
        made += [f"{duration(self.origin['device_s'])} of its time"] if "device_s" in self.origin else []
        how = f" ({', '.join(made)})" if made else ""
        why = sentence(self.origin["why"]) if self.origin.get("why") else ""
        device = self.origin.get("device", "another machine")
        return f"These are the committed records, made on {device}{how}. {why}".rstrip()

    @property
    def took(self) -> str:
        return duration(self.head["wall_s"]) if self.head is not None and "wall_s" in self.head else "–"

    @property
    def facts(self) -> dict[str, str]:
        """How it was run, under the names that a person reads."""
        head = (self.head or {}) | {key: self.origin[key] for key in _MADE if key in self.origin}
        said = {name: str(head.get(key, "–")) for name, key in _FACTS.items()}
        return {"Size": "quick" if self.quick else "full"} | said


@dataclass(frozen=True)
class _Claim:
    """A verdict, and where it leads."""

    id: str
    text: str
    rule: str
    answer: Answer
    summary: str
    numbers: tuple[tuple[str, str], ...]
    plate: str | None  # the figure behind it, if it was drawn
    commands: tuple[str, ...]  # that would answer it, if nothing has


def _figure(out: Path, plate: Plate) -> _Figure:
    """Write a plate's files."""
    about = (plate.name, plate.title, plate.caption, plate.notes)
    figure = plate.figure
    if isinstance(figure, Table):
        _write(out, plate, {"csv": _csv(figure)})
        return _Figure(*about, files=("csv",), table=figure)
    with style.house():  # the resolution and the names inside an SVG are the house's too
        content = {"svg": style.as_bytes(figure, "svg")}
        figure.set_layout_engine("none")  # both are laid out alike, and only once: it takes as long as drawing
        content["png"] = style.as_bytes(figure, "png")
    _write(out, plate, content)
    kind, mime = ("svg", "image/svg+xml") if len(content["svg"]) <= LARGEST_SVG else ("png", "image/png")
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    source = f"data:{mime};base64,{base64.b64encode(content[kind]).decode()}"
    return _Figure(*about, files=tuple(content), source=source, width=width, height=height)


def _write(out: Path, plate: Plate, content: Mapping[str, bytes]) -> None:
    for kind, data in content.items():
        write_bytes(out / "figures" / f"{plate.name}.{kind}", data)


def _csv(table: Table) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
    return text.getvalue().encode()


def _options(heads: Mapping[str, Record]) -> str:
    """What a command needs so that another part goes with those that were run; nothing if these do not agree."""
    made = {(head.get("seed", 0), bool(head.get("quick"))) for head in heads.values()}
    if len(made) != 1:
        return ""
    ((seed, quick),) = made
    return f"{f' --seed {seed}' if seed else ''}{' --quick' if quick else ''}"


def _claim(verdict: Verdict, parts: Sequence[_Part]) -> _Claim:
    claim, finding = verdict.claim, verdict.finding
    commands: tuple[str, ...] = ()
    if finding.answer is Answer.OPEN:
        commands = tuple(part.command for part in parts if part.name in claim.needs and part.head is None)
    plate = claim.plate if any(claim.plate == figure.name for part in parts for figure in part.figures) else None
    summary = sentence(finding.summary)
    return _Claim(claim.id, claim.text, claim.rule, finding.answer, summary, finding.numbers, plate, commands)


def _counts(answers: Sequence[Answer]) -> str:
    """The answer in numbers: so many claims hold, so many do not."""
    if not any(answer is not Answer.OPEN for answer in answers):
        return "No claim of the paper has been judged yet."
    said = [f"{count} {_SAID[answer][count != 1]}" for answer in Answer if (count := answers.count(answer))]
    said = [*said[:-2], " and ".join(said[-2:])]
    return f"Of {len(answers)} claims of the paper, {', '.join(said)}."


def _lead(claims: Iterable[_Claim]) -> list[_Claim]:
    """The weightiest of the claims that were judged."""
    rank = {name: place for place, name in enumerate(LEADING)}
    judged = [claim for claim in claims if claim.answer is not Answer.OPEN]
    judged.sort(key=lambda claim: rank.get(claim.id, len(rank)))  # stable: the others keep their order
    return judged[:LED]


def _template() -> Template:
    """The page without its contents."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": code, "pieces": pieces}
    return environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8"))

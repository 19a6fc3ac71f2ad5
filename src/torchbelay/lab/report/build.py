"""The report: one page that needs no other file, and beside it every figure as a file, and the explorer.

The page makes no request and runs no script; its own policy (a `Content-Security-Policy` in its head) forbids both.
page.html holds the layout and the fixed sentences. All numbers come from the records' headers, the verdicts, the plates
and the errata; none is typed in here.
"""

import base64
import csv
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from torchbelay import __version__, explorer
from torchbelay.lab.claims.errata import ERRATA
from torchbelay.lab.claims.protocol import read_protocol
from torchbelay.lab.claims.study import PARTS as STUDY_PARTS
from torchbelay.lab.claims.study import read_study, study_plate
from torchbelay.lab.claims.verdict import Answer, Verdict
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.records import write_bytes, write_text

from . import style
from .markdown import render
from .words import code, duration, listed, pieces, sentence

PAGE = "index.html"
LARGEST_SVG = 700_000  # bytes; the page shows a larger drawing as a PNG, and the SVG still lies beside it
COMMAND = "torchbelay reproduce"

# The claims that matter most, for readers of one paragraph: is training more robust, does BELAY beat EMA on images,
# does the average save a diverging SGD, is it fast. The first LEAD_SIZE of those that were judged open the page.
LEADING = ("C11", "C9", "C2", "C3")
LEAD_SIZE = 3

_VERBS = {  # what one claim does, and what several do
    Answer.HOLDS: ("holds", "hold"),
    Answer.IN_PART: ("holds in part", "hold in part"),
    Answer.FAILS: ("does not hold", "do not hold"),
    Answer.UNDECIDED: ("is undecided", "are undecided"),
    Answer.NOT_REPRODUCED: ("was not reproduced", "were not reproduced"),
    Answer.OPEN: ("was not run", "were not run"),
}

_OUTCOMES = {True: "passed", False: "failed", None: "open"}

_FACTS = {"Seed": "seed", "torchbelay": "torchbelay", "torch": "torch", "Python": "python", "Machine": "device"}
_VERSIONS = {"torch": "torch", "Python": "python"}
_ORIGIN_FACTS = ("torch", "python", "device")  # records that were made elsewhere have their own


def build(
    out: Path,
    heads: Mapping[str, Record],
    records: Mapping[str, Sequence[Record]],
    verdicts: Sequence[Verdict],
    plates: Mapping[str, Sequence[Plate]],
    *,
    titles: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Path:
    """Write the figures, the explorer, then the page, into the folder `out`; return the path of the page.

    `heads`, `records` and `plates` hold the parts that were run, by name. `titles` names all parts in the order of the
    page; a part that was not run is shown with the command that runs it. Without `titles`, the parts are those that
    were run and those that a claim needs. `folder` is what the user gave as `--out`, for the commands that the page
    shows; None is the default.
    """
    if titles is None:
        titles = {name: name for name in (*heads, *(part for verdict in verdicts for part in verdict.claim.needs))}
    _check(titles, heads, records, plates)
    parts = []
    place = "" if folder is None else f" --out {shlex.quote(folder)}"
    for name, title in titles.items():
        figures = tuple(_write_figure(out, plate) for plate in plates.get(name, ()))
        command = f"{COMMAND} {name}{_choose_options(heads)}{place}"
        lines = records.get(name, ())
        origin = next((line for line in lines if line.get("kind") == "origin"), {})
        parts.append(_Part(name, title, command, heads.get(name), len(lines), figures, origin))
    claims = [_link_claim(verdict, parts) for verdict in verdicts]
    run = [part for part in parts if part.head is not None]
    studied = [part.name for part in run if part.name in STUDY_PARTS]
    facts = {name: [part.facts[name] for part in run] for name in ("Size", *_FACTS)}
    page = _load_template().render(
        version=__version__,
        command=COMMAND,
        folder=place,
        status=_describe_status(parts, claims),
        counts=_count_answers([claim.answer for claim in claims]),
        lead=_choose_lead(claims),
        judged=[claim for claim in claims if claim.answer is not Answer.OPEN],
        waiting=[claim for claim in claims if claim.answer is Answer.OPEN],
        parts=parts,
        run=run,
        quick=[part for part in run if part.quick],
        total=duration(sum(head.get("wall_s", 0.0) for head in heads.values())),
        shared=[(name, values[0]) for name, values in facts.items() if len({*values}) == 1],
        differing=[name for name, values in facts.items() if len({*values}) > 1],
        errata=ERRATA,
        protocol=render(read_protocol(), "rules"),
        study=_write_figure(out, study_plate(records)) if studied else None,
        studied=studied,
        unstudied=[part.command for part in parts if part.name in STUDY_PARTS and part.head is None],
        study_rules=render(read_study(), "study"),
        missing=MISSING,
        explorer=explorer.NAME,
    )
    write_text(out / explorer.NAME, explorer.page())
    write_text(out / PAGE, page)
    return out / PAGE


def _check(
    titles: Mapping[str, str],
    heads: Mapping[str, Record],
    records: Mapping[str, Sequence[Record]],
    plates: Mapping[str, Sequence[Plate]],
) -> None:
    """Raise ValueError if a part would be missing from the page, or if two figures would share a file."""
    if untitled := {*heads, *plates} - {*titles}:
        raise ValueError(f"titles lacks {', '.join(sorted(untitled))}; give every part a title")
    if incomplete := ({*heads} ^ {*records}) | ({*plates} - {*heads}):
        names = ", ".join(sorted(incomplete))
        raise ValueError(
            f"heads, records and plates disagree on {names}; a part has a header, records and maybe plates"
        )
    figures = [plate.name for drawn in plates.values() for plate in drawn]
    if repeated := {name for name in figures if figures.count(name) > 1}:
        raise ValueError(f"two figures are called {', '.join(sorted(repeated))}; give each its own name")


# What the template shows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    """A plate whose files are written."""

    name: str
    title: str
    caption: str
    notes: tuple[str, ...]
    files: tuple[str, ...]  # the suffixes of its files
    table: Table | None = None  # shown instead of an image
    source: str = ""  # the image as a data URL
    width: int = 0  # in CSS pixels, at the size at which it was drawn
    height: int = 0


@dataclass(frozen=True)
class _Part:
    """A part, run or not."""

    name: str
    title: str
    command: str  # the command that runs it
    head: Record | None  # None if it was not run
    count: int  # the number of records
    figures: tuple[_Figure, ...]
    origin: Record  # the machine and versions that made the records, if they contain them; else empty

    @property
    def quick(self) -> bool:
        """Whether this is the quick version; committed records are always full."""
        return self.head is not None and bool(self.head.get("quick")) and not self.origin.get("committed")

    @property
    def committed(self) -> str:
        """A note on committed records: the machine that made them, and why they are used; empty for other records."""
        if not self.origin.get("committed"):
            return ""
        made = [f"{name} {self.origin[key]}" for name, key in _VERSIONS.items() if key in self.origin]
        made += [str(self.origin["date"])] if "date" in self.origin else []
        made += [f"{duration(self.origin['device_s'])} of device time"] if "device_s" in self.origin else []
        details = f" ({', '.join(made)})" if made else ""
        why = sentence(self.origin["why"]) if self.origin.get("why") else ""
        device = self.origin.get("device", "another machine")
        return f"These are the committed records, made on {device}{details}. {why}".rstrip()

    @property
    def time(self) -> str:
        """The time that the part took."""
        return duration(self.head["wall_s"]) if self.head is not None and "wall_s" in self.head else "–"

    @property
    def facts(self) -> dict[str, str]:
        """The settings and versions of the run, under the names that the page prints."""
        head = (self.head or {}) | {key: self.origin[key] for key in _ORIGIN_FACTS if key in self.origin}
        values = {name: str(head.get(key, MISSING)) for name, key in _FACTS.items()}
        return {"Size": "quick" if self.quick else "full"} | values


@dataclass(frozen=True)
class _Claim:
    """A verdict with the links and commands that belong to it."""

    id: str
    text: str
    rule: str
    answer: Answer
    summary: str
    numbers: tuple[tuple[str, str], ...]
    tests: tuple[tuple[str, str], ...]  # the name of each test, and its outcome
    plate: str | None  # the name of the figure behind it, if it was drawn
    commands: tuple[str, ...]  # the commands that would answer it, if it is open


def _write_figure(out: Path, plate: Plate) -> _Figure:
    """Write a plate's files, and return what the page shows of it."""
    about = (plate.name, plate.title, plate.caption, plate.notes)
    figure = plate.figure
    if isinstance(figure, Table):
        _write_files(out, plate, {"csv": _format_csv(figure)})
        return _Figure(*about, files=("csv",), table=figure)
    with style.house():  # it also sets the resolution, and the names inside an SVG
        content = {"svg": style.as_bytes(figure, "svg")}
        figure.set_layout_engine("none")  # the PNG keeps the layout of the SVG: laying out takes as long as drawing
        content["png"] = style.as_bytes(figure, "png")
    _write_files(out, plate, content)
    kind, mime = ("svg", "image/svg+xml") if len(content["svg"]) <= LARGEST_SVG else ("png", "image/png")
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    source = f"data:{mime};base64,{base64.b64encode(content[kind]).decode()}"
    return _Figure(*about, files=tuple(content), source=source, width=width, height=height)


def _write_files(out: Path, plate: Plate, content: Mapping[str, bytes]) -> None:
    for kind, data in content.items():
        write_bytes(out / "figures" / f"{plate.name}.{kind}", data)


def _format_csv(table: Table) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
    return text.getvalue().encode()


def _choose_options(heads: Mapping[str, Record]) -> str:
    """Return the options with which another part goes with those that were run; none if those do not agree."""
    made = {(head.get("seed", 0), bool(head.get("quick"))) for head in heads.values()}
    if len(made) != 1:
        return ""
    ((seed, quick),) = made
    return f"{f' --seed {seed}' if seed else ''}{' --quick' if quick else ''}"


def _link_claim(verdict: Verdict, parts: Sequence[_Part]) -> _Claim:
    claim, finding = verdict.claim, verdict.finding
    commands: tuple[str, ...] = ()
    if finding.answer is Answer.OPEN:
        commands = tuple(part.command for part in parts if part.name in claim.needs and part.head is None)
    plate = claim.plate if any(claim.plate == figure.name for part in parts for figure in part.figures) else None
    summary = sentence(finding.summary)
    tests = tuple((name, _OUTCOMES[outcome]) for name, outcome in finding.tests.items())
    return _Claim(claim.id, claim.text, claim.rule, finding.answer, summary, finding.numbers, tests, plate, commands)


def _count_answers(answers: Sequence[Answer]) -> str:
    """Return how many claims have each answer, as a sentence."""
    if not any(answer is not Answer.OPEN for answer in answers):
        return "No claim of the paper has been judged yet."
    counts = [f"{count} {_VERBS[answer][count != 1]}" for answer in Answer if (count := answers.count(answer))]
    return f"Of {len(answers)} claims of the paper, {listed(counts)}."


def _describe_status(parts: Sequence[_Part], claims: Sequence[_Claim]) -> Markup:
    """Return how many parts were run, with links to them, and how many claims wait for others; empty if all were."""
    run = [part for part in parts if part.head is not None]
    if len(run) == len(parts):
        return Markup()
    few = run if 2 * len(run) <= len(parts) else [part for part in parts if part.head is None]
    verb = "has" if len(run) == 1 else "have"
    text = Markup("{} of {} parts {} been run").format(len(run), len(parts), verb)
    if run:
        links = [Markup('<a href="#part-{}">{}</a>').format(part.name, part.title) for part in few]
        text += Markup("{} {}").format(":" if few is run else ", all but", Markup(", ").join(links))
    if waiting := sum(claim.answer is Answer.OPEN for claim in claims):
        needs = "claim needs" if waiting == 1 else "claims need"
        text += Markup(". {} {} parts that have not been run").format(waiting, needs)
    return text + "."


def _choose_lead(claims: Iterable[_Claim]) -> list[_Claim]:
    """Return the claims that open the page: the most important ones of those that were judged."""
    rank = {name: place for place, name in enumerate(LEADING)}
    judged = [claim for claim in claims if claim.answer is not Answer.OPEN]
    judged.sort(key=lambda claim: rank.get(claim.id, len(rank)))  # stable: the others keep their order
    return judged[:LEAD_SIZE]


def _load_template() -> Template:
    """Return the template of the page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": code, "pieces": pieces}
    return environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8"))

"""The job behind `torchbelay reproduce`: run the parts that have no records yet, judge the claims, make the report."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import records as record_files
from .claims import judge
from .claims.study import PARTS as STUDIED
from .claims.study import judge_study
from .claims.verdict import Answer, Verdict
from .part import LabError, Plate, Record, Settings
from .progress import PartsProgress
from .registry import EXCLUSIVE, PARTS
from .report import build
from .workers import Failure, Result, work

ALL = "all"
FOLDER = "report"  # of the report, if the user names none; cli/reproduce.py says so too, without an import of the lab
_RECORD_ERRORS = (LookupError, ValueError, TypeError, StopIteration, ArithmeticError)  # what unusable records raise
_COLOURS = {
    Answer.HOLDS: "green",
    Answer.IN_PART: "yellow",
    Answer.FAILS: "red",
    Answer.UNDECIDED: "cyan",
    Answer.NOT_REPRODUCED: "cyan",
    Answer.OPEN: "dim",
}


def reproduce(
    names: Sequence[str],
    out: Path,
    settings: Settings,
    *,
    jobs: int = 1,
    force: bool = False,
    dry_run: bool = False,
    console: Console | None = None,
) -> int:
    """Run the parts that have no records yet, and make the report of all that have. Return the exit status.

    Raises LabError, before any part runs, for a mistake that the user can correct.
    """
    console = console or Console()
    wanted = select_parts(names)
    present = _read_present(out, settings, ignore=wanted if force else [])
    todo = [name for name in wanted if name not in present]
    if dry_run:
        _show_plan(console, wanted, todo, out, settings)
        return 0
    _check_writable(out)
    if force:  # old records are moved aside: if the run is stopped, the same command without --force continues it
        for name in todo:
            if record_path(out, name).exists():
                record_path(out, name).replace(_old_path(out, name))
    failed = _run(console, todo, out, settings, jobs) if todo else {}
    present = _read_present(out, settings, ignore=list(failed))  # a failed part's old records may have another seed
    heads = {name: head for name, (head, _) in present.items()}
    found: dict[str, list[Record]] = {name: lines for name, (_, lines) in present.items()}
    with console.status("drawing the figures"):
        verdicts = _judge(found, out)
        page = _report(out, heads, found, verdicts)
    _show_summary(console, verdicts, found, len(wanted) - len(todo), len(wanted))
    for name, why in failed.items():
        console.print(f"[red]{name} failed[/]: {escape(why)}", soft_wrap=True)
    console.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)
    return 1 if failed else 0


def select_parts(names: Sequence[str]) -> list[str]:
    """Return the parts with these names, in the report's order; every part for "all" or for no names."""
    unknown = [name for name in names if name not in PARTS and name != ALL]
    if unknown:
        raise LabError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}, {ALL}")
    return [name for name in PARTS if not names or ALL in names or name in names]


def record_path(out: Path, name: str) -> Path:
    """Return the file of a part's records."""
    return out / "records" / f"{name}.jsonl"


def _read_present(out: Path, settings: Settings, ignore: Sequence[str]) -> dict[str, tuple[Record, list[Record]]]:
    """Read the records that exist, except for `ignore`; refuse damaged files, and records of other settings."""
    present = {}
    for name in PARTS:
        path = record_path(out, name)
        if name in ignore or not os.path.exists(path):  # unlike Path.exists, it never raises
            continue
        head, lines = record_files.read(path)
        if head["part"] != name:
            raise LabError(f"{path} has the records of {head['part']}; move it away, or run again with --force")
        if (head["seed"], head["quick"]) != (settings.seed, settings.quick):
            made = f"--seed {head['seed']}{' --quick' if head['quick'] else ''}"
            raise LabError(f"{path} was made with {made}; choose another --out, or run everything again: all --force")
        origin = next((line for line in lines if line.get("kind") == "origin"), {"committed": True})
        if not origin.get("committed") and origin.get("budget") != settings.budget:
            made = f"--budget {origin['budget']}" if origin.get("budget") else "no --budget"
            raise LabError(f"{path} was made with {made}; choose another --out, or run it again: {name} --force")
        present[name] = (head, lines)
    return present


def _check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written to now, and not after minutes of work."""
    for folder in (out, out / "records", out / "figures"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror or error
            raise LabError(f"cannot write to {folder}: {why}; choose another folder with --out") from error


def _run(console: Console, todo: Sequence[str], out: Path, settings: Settings, jobs: int) -> dict[str, str]:
    """Run the parts, and write the records of each as soon as it is done. Return the reason for each failure."""
    failed: dict[str, str] = {}
    with PartsProgress(console, {name: PARTS[name].plan(settings) for name in todo}) as progress:
        for event in work(todo, EXCLUSIVE, settings, jobs):
            if isinstance(event, Result):
                head = record_files.header(event.part, settings, event.wall_s)
                try:
                    record_files.write(record_path(out, event.part), head, event.records)
                except ValueError as error:  # a number that JSON does not have
                    failed[event.part] = f"its records cannot be written: {error}"
                    continue
                _failure_path(out, event.part).unlink(missing_ok=True)
                _old_path(out, event.part).unlink(missing_ok=True)
                progress.finish(event.part)
            elif isinstance(event, Failure):
                failed[event.part] = event.why
                if event.details:
                    record_files.write_text(_failure_path(out, event.part), event.details)
                    failed[event.part] += f" (details: {_failure_path(out, event.part)})"
                progress.stop(event.part)
            else:
                progress.advance(event.part, event.units)
    return failed


def _old_path(out: Path, name: str) -> Path:
    """Return the file in which a part's old records wait for the new ones."""
    return record_path(out, name).with_suffix(".jsonl.old")


def _failure_path(out: Path, name: str) -> Path:
    """Return the file that says how a part failed."""
    return out / f"{name}.failed.txt"


def _draw(name: str, lines: Sequence[Record], out: Path) -> list[Plate]:
    """Draw a part's figures; records that can be read but not drawn are damaged."""
    try:
        return PARTS[name].draw(lines)
    except _RECORD_ERRORS as error:
        raise LabError(
            f"{record_path(out, name)} lacks what its figures need ({error!r}); run again with --force"
        ) from error


def _report(out: Path, heads: dict[str, Record], found: dict[str, list[Record]], verdicts: list[Verdict]) -> Path:
    """Make the page. Some figures raise only at this point, when they are laid out, if a number is absurd."""
    plates = {name: _draw(name, lines, out) for name, lines in found.items()}
    titles = {name: part.TITLE for name, part in PARTS.items()}
    try:
        given = None if out == Path(FOLDER) else str(out)
        return build.build(out, heads, found, verdicts, plates, titles=titles, folder=given)
    except (RuntimeError, *_RECORD_ERRORS) as error:
        folder = record_path(out, ALL).parent
        raise LabError(f"no report can be drawn from {folder} ({error!r}); run again with --force") from error


def _judge(found: dict[str, list[Record]], out: Path) -> list[Verdict]:
    """Return all verdicts; records that can be read but not judged are damaged."""
    try:
        return judge(found)
    except _RECORD_ERRORS as error:
        raise LabError(
            f"a file in {record_path(out, ALL).parent} lacks what the claims need ({error!r}); run again with --force"
        ) from error


def _show_plan(console: Console, wanted: Sequence[str], todo: Sequence[str], out: Path, settings: Settings) -> None:
    table = Table("part", "what would run", "state")
    for name in wanted:
        about = f"[bold]{escape(PARTS[name].TITLE)}[/]\n{escape(PARTS[name].plan(settings)[1])}"
        table.add_row(name, about, "to run" if name in todo else "done")
    console.print(table)
    console.print(f"nothing was run; results would go to {escape(str(out))}", soft_wrap=True, highlight=False)


def _show_summary(
    console: Console, verdicts: Sequence[Verdict], found: dict[str, list[Record]], done: int, wanted: int
) -> None:
    rows = [(v.claim.id, v.finding.answer, v.finding.summary) for v in verdicts if v.finding.answer is not Answer.OPEN]
    if rows:
        _show_answers(console, "The paper's claims", rows)
    if waiting := len(verdicts) - len(rows):
        console.print(f"{waiting} of {len(verdicts)} claims need parts that have not been run", highlight=False)
    if not set(STUDIED).isdisjoint(found):
        known = [each for each in judge_study(found) if each.answer is not Answer.OPEN]
        _show_answers(
            console, "The study of the spring's sign", [(h.id, h.answer, f"{h.claim}: {h.numbers}") for h in known]
        )
    if done:
        console.print(f"{done} of {wanted} parts were done already; --force runs them again", highlight=False)


def _show_answers(console: Console, title: str, rows: Sequence[tuple[str, Answer, str]]) -> None:
    table = Table("", "verdict", "what was found", title=title)
    for name, answer, text in rows:
        table.add_row(escape(name), f"[{_COLOURS[answer]}]{answer}[/]", escape(text))
    console.print(table)

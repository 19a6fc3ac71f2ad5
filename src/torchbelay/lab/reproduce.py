"""What runs when, what need not run again, and the report at the end: the job behind `torchbelay reproduce`."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import records as on_disk
from .claims import judge
from .claims.verdict import Answer, Verdict
from .part import LabError, Plate, Record, Settings
from .registry import ALONE, PARTS
from .report import build
from .workers import Done, Failed, work

ALL = "all"
_LACKING = (LookupError, ValueError, TypeError, StopIteration, ArithmeticError)
_MARK = {Answer.HOLDS: "green", Answer.IN_PART: "yellow", Answer.FAILS: "red", Answer.OPEN: "dim"}


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
    """Run the parts that are not there yet, and make the report of all that are. Returns the exit status.

    Raises LabError, before anything is run, for what a person must set right first.
    """
    console = console or Console()
    wanted = chosen(names)
    there = _there(out, settings, redo=wanted if force else [])
    todo = [name for name in wanted if name not in there]
    if dry_run:
        _show_plan(console, wanted, todo, out, settings)
        return 0
    _check_writable(out)
    if force:  # moved aside, so that, if this is stopped, the same command without --force goes on from there
        for name in todo:
            if path_of(out, name).exists():
                path_of(out, name).replace(_aside(out, name))
    failed = _run(console, todo, out, settings, jobs) if todo else {}
    kept = _there(out, settings, redo=list(failed))  # what a failed part left earlier may be of another seed
    heads = {name: head for name, (head, _) in kept.items()}
    found: dict[str, list[Record]] = {name: lines for name, (_, lines) in kept.items()}
    with console.status("drawing the figures"):
        verdicts = _judge(found, out)
        page = _report(out, heads, found, verdicts)
    _show_summary(console, verdicts, len(wanted) - len(todo), len(wanted))
    for name, why in failed.items():
        console.print(f"[red]{name} failed[/]: {escape(why)}", soft_wrap=True)
    console.print(f"report: {escape(str(page))}", soft_wrap=True, highlight=False)
    return 1 if failed else 0


def chosen(names: Sequence[str]) -> list[str]:
    """The parts of those names, in the report's order; "all", or nothing, is every one of them."""
    unknown = [name for name in names if name not in PARTS and name != ALL]
    if unknown:
        raise LabError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}, {ALL}")
    return [name for name in PARTS if not names or ALL in names or name in names]


def path_of(out: Path, name: str) -> Path:
    """Where a part's records lie."""
    return out / "records" / f"{name}.jsonl"


def _there(out: Path, settings: Settings, redo: Sequence[str]) -> dict[str, tuple[Record, list[Record]]]:
    """The parts whose records are there; those made with other settings, and damaged ones, are refused."""
    there = {}
    for name in PARTS:
        path = path_of(out, name)
        if name in redo or not os.path.exists(path):  # unlike Path.exists never an error
            continue
        head, lines = on_disk.read(path)
        if head["part"] != name:
            raise LabError(f"{path} has the records of {head['part']}; move it away, or run again with --force")
        if (head["seed"], head["quick"]) != (settings.seed, settings.quick):
            made = f"--seed {head['seed']}{' --quick' if head['quick'] else ''}"
            raise LabError(
                f"{path} was made with {made}; choose another --out, or make all of it anew with: all --force"
            )
        origin = next((line for line in lines if line.get("kind") == "origin"), {"committed": True})
        if not origin.get("committed") and origin.get("budget") != settings.budget:
            made = f"--budget {origin['budget']}" if origin.get("budget") else "no --budget"
            raise LabError(f"{path} was made with {made}; choose another --out, or make it anew with: {name} --force")
        there[name] = (head, lines)
    return there


def _check_writable(out: Path) -> None:
    """Find out now, not after minutes of work, that nothing can be written."""
    for folder in (out, out / "records", out / "figures"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror or error
            raise LabError(f"cannot write to {folder}: {why}; choose another folder with --out") from error


def _run(console: Console, todo: Sequence[str], out: Path, settings: Settings, jobs: int) -> dict[str, str]:
    """Run the parts, and write each one's records as soon as it is done; returns why those that failed did."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    failed: dict[str, str] = {}
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = {name: bars.add_task(name, total=PARTS[name].plan(settings)[0]) for name in todo}
        for event in work(todo, ALONE, settings, jobs):
            if isinstance(event, Done):
                head = on_disk.header(event.part, settings, event.wall_s)
                try:
                    on_disk.write(path_of(out, event.part), head, event.records)
                except ValueError as error:  # what JSON cannot say
                    failed[event.part] = f"its records cannot be written: {error}"
                    continue
                _failure(out, event.part).unlink(missing_ok=True)
                _aside(out, event.part).unlink(missing_ok=True)
                bars.update(tasks[event.part], completed=PARTS[event.part].plan(settings)[0])
            elif isinstance(event, Failed):
                failed[event.part] = event.why
                if event.details:
                    on_disk.write_text(_failure(out, event.part), event.details)
                    failed[event.part] += f" (all of it: {_failure(out, event.part)})"
                bars.stop_task(tasks[event.part])
            else:
                bars.advance(tasks[event.part], event.units)
    return failed


def _aside(out: Path, name: str) -> Path:
    """Where a part's old records wait until there are new ones."""
    return path_of(out, name).with_suffix(".jsonl.old")


def _failure(out: Path, name: str) -> Path:
    """Where it is written how a part failed."""
    return out / f"{name}.failed.txt"


def _draw(name: str, lines: Sequence[Record], out: Path) -> list[Plate]:
    """A part's figures; records that cannot be drawn are damaged, however well they read."""
    try:
        return PARTS[name].draw(lines)
    except _LACKING as error:
        raise LabError(
            f"{path_of(out, name)} lacks what its figures need ({error!r}); run again with --force"
        ) from error


def _report(out: Path, heads: dict[str, Record], found: dict[str, list[Record]], verdicts: list[Verdict]) -> Path:
    """The page. Some figures find out only when they are laid out that a number of theirs is absurd."""
    plates = {name: _draw(name, lines, out) for name, lines in found.items()}
    titles = {name: part.TITLE for name, part in PARTS.items()}
    try:
        return build.build(out, heads, found, verdicts, plates, titles=titles)
    except (RuntimeError, *_LACKING) as error:
        records = path_of(out, ALL).parent
        raise LabError(f"no report can be drawn from {records} ({error!r}); run again with --force") from error


def _judge(found: dict[str, list[Record]], out: Path) -> list[Verdict]:
    """All verdicts; the same goes for records that cannot be judged."""
    try:
        return judge(found)
    except _LACKING as error:
        raise LabError(
            f"a file in {path_of(out, ALL).parent} lacks what the claims need ({error!r}); run again with --force"
        ) from error


def _show_plan(console: Console, wanted: Sequence[str], todo: Sequence[str], out: Path, settings: Settings) -> None:
    table = Table("part", "what would be run", "state")
    for name in wanted:
        table.add_row(name, escape(PARTS[name].plan(settings)[1]), "to run" if name in todo else "there already")
    console.print(table)
    console.print(f"nothing was run; results would go to {escape(str(out))}", soft_wrap=True, highlight=False)


def _show_summary(console: Console, verdicts: Sequence[Verdict], kept: int, wanted: int) -> None:
    table = Table("claim", "verdict", "what was found", title="The paper's claims")
    for verdict in verdicts:
        answer = verdict.finding.answer
        table.add_row(verdict.claim.id, f"[{_MARK[answer]}]{answer}[/]", escape(verdict.finding.summary))
    console.print(table)
    if kept:
        console.print(f"{kept} of {wanted} parts were there already; --force runs them again", highlight=False)

"""`torchbelay reproduce`: which parts run, what is refused, and what is left when something goes wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from rich.console import Console

from torchbelay.cli import main
from torchbelay.lab import records, reproduce
from torchbelay.lab.claims import CLAIMS
from torchbelay.lab.claims.verdict import Answer, Claim, Finding, Verdict
from torchbelay.lab.part import LabError, Plate, Record, Settings
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style
from torchbelay.lab.workers import Event, Failure, Progress, Result

# Parts that cost nothing ----------------------------------------------------------------------------------------------


class Fake:
    """A part of three units that counts its runs, and that can fail to run or to draw."""

    def __init__(self, name: str) -> None:
        self.NAME, self.TITLE = name, f"Title of {name}"
        self.runs: list[Settings] = []
        self.failure: BaseException | None = None
        self.undrawable: Exception | None = None

    def plan(self, settings: Settings) -> tuple[int, str]:
        return 3, f"what {self.NAME} would do [{'quickly' if settings.quick else 'at length'}]"

    def run(self, settings: Settings, tick: Callable[[int], object]) -> list[Record]:
        self.runs.append(settings)
        for _ in range(3):
            tick(1)
        if self.failure is not None:
            raise self.failure
        return [{"kind": self.NAME, "seed": settings.seed, "run": len(self.runs)}]

    def draw(self, lines: Sequence[Record]) -> list[Plate]:
        if self.undrawable is not None:
            raise self.undrawable
        return [Plate(self.NAME, self.TITLE, f"caption of {lines[0]['kind']}", style.figure(2.0, 1.0))]


class Lab(SimpleNamespace):
    """The laboratory with three parts that cost nothing, and a folder for its report."""

    a: Fake
    b: Fake
    c: Fake
    out: Path
    printed: str

    def __call__(self, *names: str, **options: object) -> int:
        console = Console(file=io.StringIO(), width=200)
        chosen = {key: options.pop(key) for key in ("seed", "quick", "budget") if key in options}
        settings = Settings(**{"quick": True} | chosen)
        try:
            return reproduce.reproduce(names, self.out, settings, console=console, **options)
        finally:
            self.printed = console.file.getvalue()

    @property
    def runs(self) -> tuple[int, ...]:
        return tuple(len(part.runs) for part in (self.a, self.b, self.c))

    def files(self) -> set[str]:
        return {str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()}

    def record(self, name: str) -> Path:
        return self.out / "records" / f"{name}.jsonl"

    def states(self) -> dict[str, tuple[int, bytes]]:
        """When every record was written, and what it holds."""
        found = sorted((self.out / "records").iterdir())
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def in_this_process(parts: dict[str, Fake]) -> Callable[..., Iterator[Event]]:
    """Return a `workers.work` that runs the parts in this process."""

    def work(names: Sequence[str], exclusive: Sequence[str], settings: Settings, jobs: int) -> Iterator[Event]:
        for name in names:
            try:
                yield Progress(name, 1)
                yield Result(name, parts[name].run(settings, lambda units: None), 0.5)
            except Exception as error:
                yield Failure(name, f"{type(error).__name__}: {error}", f"Traceback of {name}")

    return work


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    parts = {name: Fake(name) for name in ("a", "b", "c")}
    claim = Claim("C1", "a claim", "a rule", ("a",), lambda _: Finding(Answer.HOLDS, "never used"))
    found = Verdict(claim, Finding(Answer.IN_PART, "found [in] brackets [/]"))
    monkeypatch.setattr(reproduce, "PARTS", parts)
    monkeypatch.setattr(reproduce, "EXCLUSIVE", ())
    monkeypatch.setattr(reproduce, "work", in_this_process(parts))
    monkeypatch.setattr(reproduce, "judge", lambda records: [found])
    monkeypatch.setattr(style, "as_bytes", lambda figure, kind: kind.encode())
    return Lab(**parts, out=tmp_path / "report", printed="")


REPORT = {"index.html", "explorer.html", "figures/{0}.png", "figures/{0}.svg", "records/{0}.jsonl"}


def report_of(*names: str) -> set[str]:
    return {pattern.format(name) for pattern in REPORT for name in names}


# Which parts run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([], ["a", "b", "c"]),
        (["all"], ["a", "b", "c"]),
        (["b", "all"], ["a", "b", "c"]),
        (["c", "a"], ["a", "c"]),
        (["b", "b"], ["b"]),
    ],
)
def test_parts_are_chosen_by_name_in_the_order_of_the_report(lab: Lab, names: list[str], chosen: list[str]) -> None:
    assert reproduce.select_parts(names) == chosen


def test_an_unknown_part_is_refused_with_a_list_of_the_known_ones(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"^unknown part 'fig9'; choose from a, b, c, all$"):
        lab("a", "fig9")
    assert (lab.runs, lab.out.exists()) == ((0, 0, 0), False)


def test_everything_is_run_once_and_written_with_its_settings(lab: Lab) -> None:
    assert lab(seed=5) == 0
    assert lab.runs == (1, 1, 1)
    assert lab.files() == report_of("a", "b", "c")
    for name in ("a", "b", "c"):
        head, lines = records.read(lab.record(name))
        assert (head["part"], head["seed"], head["quick"], head["wall_s"]) == (name, 5, True, 0.5)
        assert lines == [{"kind": name, "seed": 5, "run": 1}]
    assert lab.printed.splitlines()[-1] == f"report: {lab.out / 'index.html'}"


def test_finished_parts_are_not_run_again_but_shown_again(lab: Lab) -> None:
    lab("a")
    before = lab.states()
    (lab.out / "index.html").unlink()
    assert lab("a", "b") == 0
    assert lab.runs == (1, 1, 0)
    assert lab.states()["a.jsonl"] == before["a.jsonl"]
    assert lab.files() == report_of("a", "b")
    assert "1 of 2 parts were done already; --force runs them again" in lab.printed


def test_the_report_shows_all_parts_that_have_records(lab: Lab) -> None:
    lab("a")
    lab("c")
    page = (lab.out / "index.html").read_text()
    assert "caption of a" in page
    assert "caption of c" in page
    assert "caption of b" not in page
    assert "Title of b" in page
    assert f"torchbelay reproduce b --quick --out {lab.out}</code>" in page


def test_force_runs_the_named_parts_again_and_no_other(lab: Lab) -> None:
    lab("a", "b")
    before = lab.states()
    assert lab("a", force=True) == 0
    assert lab.runs == (2, 1, 0)
    assert records.read(lab.record("a"))[1][0]["run"] == 2
    assert lab.states()["b.jsonl"] == before["b.jsonl"]
    assert "were done already" not in lab.printed


@pytest.mark.parametrize(
    ("other", "made"),
    [({"seed": 1}, "--seed 0 --quick"), ({"quick": False}, "--seed 0 --quick")],
    ids=["seed", "quick"],
)
@pytest.mark.parametrize("names", [("a",), ("b",), ()], ids=["the same part", "another part", "all"])
def test_records_of_other_settings_are_refused_and_kept(
    lab: Lab, names: tuple[str, ...], other: dict[str, object], made: str
) -> None:
    lab("a")
    before = lab.states()
    advice = "choose another --out, or run everything again: all --force"
    with pytest.raises(LabError) as error:
        lab(*names, **other)
    assert str(error.value) == f"{lab.record('a')} was made with {made}; {advice}"
    assert (lab.runs, lab.states()) == ((1, 0, 0), before)


@pytest.mark.parametrize(
    ("origin", "budget", "made"),
    [
        ({"kind": "origin", "budget": "5m"}, None, "--budget 5m"),
        ({"kind": "origin", "budget": "5m"}, "6m", "--budget 5m"),
        ({"kind": "origin"}, "6m", "no --budget"),
    ],
)
def test_records_of_another_budget_are_refused(lab: Lab, origin: Record, budget: str | None, made: str) -> None:
    lab("a")
    head, lines = records.read(lab.record("a"))
    records.write(lab.record("a"), head, [*lines, origin])
    with pytest.raises(LabError, match=rf"a\.jsonl was made with {made}; .* or run it again: a --force"):
        lab("a", budget=budget)
    records.write(lab.record("a"), head, [*lines, origin | {"committed": True}])
    lab("a", budget=budget)  # records that come with the package suit any budget
    assert lab.runs == (1, 0, 0)


def test_full_records_are_named_without_quick(lab: Lab) -> None:
    lab("a", quick=False, seed=3)
    with pytest.raises(LabError, match=r"was made with --seed 3; choose"):
        lab("a")


def test_one_part_cannot_be_forced_into_other_settings_than_the_rest(lab: Lab) -> None:
    lab("a", "b")
    with pytest.raises(LabError, match=r"b\.jsonl was made with --seed 0 --quick"):
        lab("a", seed=1, force=True)
    assert lab.runs == (1, 1, 0)


def test_all_can_be_forced_into_other_settings(lab: Lab) -> None:
    lab("a", "b")
    assert lab("all", seed=1, force=True) == 0
    assert lab.runs == (2, 2, 1)
    assert {records.read(lab.record(name))[0]["seed"] for name in ("a", "b", "c")} == {1}


def test_a_dry_run_lists_everything_and_does_nothing(lab: Lab) -> None:
    assert lab(dry_run=True) == 0
    assert (lab.runs, lab.out.exists()) == ((0, 0, 0), False)
    for name in ("a", "b", "c"):
        assert re.search(rf"{name} .* Title of {name} .* to run .*\n.* what {name} would do \[quickly\] ", lab.printed)
    assert lab.printed.endswith(f"nothing was run; results would go to {lab.out}\n")


def test_a_dry_run_knows_which_parts_are_done(lab: Lab) -> None:
    lab("b")
    before = lab.states()
    for force, state in ((False, "done"), (True, "to run")):
        assert lab("b", dry_run=True, force=force) == 0
        assert re.search(rf"Title of b .* {state} .*\n.* what b would do ", lab.printed)
        assert "what a would do" not in lab.printed
    assert (lab.runs, lab.states()) == ((0, 1, 0), before)


def test_the_summary_has_every_verdict_as_it_is_written(lab: Lab) -> None:
    lab("a")
    assert re.search(r"C1 .* holds in part .* found \[in\] brackets \[/\]", lab.printed)


def test_a_folder_with_brackets_in_its_name_is_named_as_it_is(lab: Lab) -> None:
    lab.out = lab.out.parent / "a[b]c [/red]"
    assert lab("a") == 0
    assert f"report: {lab.out / 'index.html'}" in lab.printed
    assert lab("a", dry_run=True) == 0
    assert str(lab.out) in lab.printed


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failing_part_is_named_and_the_others_are_kept(lab: Lab) -> None:
    lab.b.failure = RuntimeError("no luck [/x] today")
    assert lab() == 1
    assert lab.runs == (1, 1, 1)
    assert lab.files() == report_of("a", "c") | {"b.failed.txt"}
    details = lab.out / "b.failed.txt"
    assert details.read_text() == "Traceback of b"
    assert f"b failed: RuntimeError: no luck [/x] today (details: {details})\n" in lab.printed
    assert "a failed" not in lab.printed


def test_a_part_that_failed_is_run_again_and_its_failure_forgotten(lab: Lab) -> None:
    lab.b.failure = RuntimeError("no luck")
    lab()
    lab.b.failure = None
    assert lab() == 0
    assert lab.runs == (1, 2, 1)
    assert lab.files() == report_of("a", "b", "c")


def test_a_failure_without_a_traceback_has_no_details_file(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "work", lambda *_: iter([Failure("a", "its process ended with status -9", "")]))
    assert lab("a") == 1
    assert "a failed: its process ended with status -9\n" in lab.printed
    assert lab.files() == {"index.html", "explorer.html"}


def test_a_failure_under_force_keeps_the_old_records_aside_and_does_not_show_them(lab: Lab) -> None:
    lab("a", "b")
    before = lab.record("b").read_bytes()
    lab.b.failure = RuntimeError("no luck")
    assert lab("all", force=True) == 1
    assert lab.record("b").with_suffix(".jsonl.old").read_bytes() == before
    assert not lab.record("a").with_suffix(".jsonl.old").exists()  # there are new ones
    assert "caption of b" not in (lab.out / "index.html").read_text()


def test_a_failure_is_named_even_if_there_were_records_of_another_seed(lab: Lab) -> None:
    lab()
    lab.b.failure = RuntimeError("no luck")
    assert lab("all", seed=1, force=True) == 1
    assert "b failed: RuntimeError: no luck" in lab.printed
    assert not lab.record("b").exists()


def test_a_run_that_was_stopped_under_force_continues_without_it(lab: Lab) -> None:
    lab()
    lab.b.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        lab("all", seed=1, force=True)
    lab.b.failure = None
    done = lab.states()["a.jsonl"]
    assert lab(seed=1) == 0
    assert lab.states()["a.jsonl"] == done
    assert {records.read(lab.record(name))[0]["seed"] for name in ("a", "b", "c")} == {1}


def test_an_interruption_keeps_finished_parts_and_the_same_call_continues(lab: Lab) -> None:
    lab.b.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        lab()
    assert lab.runs == (1, 1, 0)
    assert lab.files() == {"records/a.jsonl"}
    before = lab.states()
    lab.b.failure = None
    assert lab() == 0
    assert lab.runs == (1, 2, 1)
    assert lab.states()["a.jsonl"] == before["a.jsonl"]
    assert lab.files() == report_of("a", "b", "c")


# Mistakes that are found first ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_the_way", ["", "records", "figures"])
def test_a_file_in_the_way_of_a_folder_is_found_before_anything_is_run(lab: Lab, in_the_way: str) -> None:
    path = lab.out / in_the_way
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    with pytest.raises(LabError, match=r"^cannot write .*; choose another folder with --out$"):
        lab("a")
    assert lab.runs == (0, 0, 0)
    assert path.read_text() == "precious"


def test_a_name_that_is_too_long_for_a_file_is_refused(lab: Lab) -> None:
    lab.out = lab.out.parent / ("x" * 300)
    with pytest.raises(LabError, match=r"cannot write .*File name too long; choose another folder with --out"):
        lab("a")
    assert lab.runs == (0, 0, 0)


@pytest.mark.parametrize("names", [("a",), ("b",), ()], ids=["the same part", "another part", "all"])
def test_a_damaged_record_is_refused_before_anything_is_run(lab: Lab, names: tuple[str, ...]) -> None:
    lab("a")
    lab.record("a").write_bytes(lab.record("a").read_bytes()[:-9])
    before = lab.states()
    with pytest.raises(LabError) as error:
        lab(*names)
    assert str(error.value) == f"{lab.record('a')} is damaged (cut short); move it away, or run again with --force"
    assert (lab.runs, lab.states()) == ((1, 0, 0), before)


def test_a_damaged_record_is_replaced_by_force(lab: Lab) -> None:
    lab("a")
    lab.record("a").write_bytes(b"\x00")
    assert lab("a", force=True) == 0
    assert records.read(lab.record("a"))[1][0]["run"] == 2


def test_a_damaged_record_can_be_moved_away(lab: Lab) -> None:
    lab("a")
    lab.record("a").write_bytes(b"\x00")
    lab.record("a").rename(lab.out / "away")
    assert lab("a") == 0
    assert lab.runs == (2, 0, 0)


def test_the_records_of_another_part_are_refused(lab: Lab) -> None:
    lab("a")
    lab.record("b").write_bytes(lab.record("a").read_bytes())
    with pytest.raises(LabError, match=r"b\.jsonl has the records of a; move it away, or run again with --force"):
        lab("a")


@pytest.mark.parametrize("error", [KeyError("w1"), IndexError(), ValueError("x"), TypeError("x"), StopIteration()])
def test_records_that_cannot_be_drawn_are_damaged(lab: Lab, error: Exception) -> None:
    lab.a.undrawable = error
    with pytest.raises(LabError) as refusal:
        lab("a")
    assert str(refusal.value).startswith(f"{lab.record('a')} lacks what its figures need (")
    assert str(refusal.value).endswith("; run again with --force")
    assert lab.record("a").exists()


def test_records_that_cannot_be_judged_are_damaged(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(found: object) -> None:
        raise KeyError("BELAY+SGD")

    monkeypatch.setattr(reproduce, "judge", judge)
    with pytest.raises(LabError, match=r"records lacks what the claims need \(KeyError\('BELAY\+SGD'\)\)"):
        lab("a")


# The command ----------------------------------------------------------------------------------------------------------


class Printed(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Printed]:
    """Run `torchbelay reproduce …` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object) -> Printed:
        status = main(["reproduce", *map(str, arguments)])
        return Printed(status, *capsys.readouterr())

    return command


def test_a_real_part_runs_in_a_process_of_its_own_and_is_not_run_again(
    command: Callable[..., Printed], tmp_path: Path
) -> None:
    first = command("fig1", "--quick", "--out", tmp_path)
    assert (first.status, first.err) == (0, "")
    path = tmp_path / "records" / "fig1.jsonl"
    before = path.stat().st_mtime_ns, path.read_bytes()
    again = command("fig1", "--quick", "--out", tmp_path)
    assert (again.status, again.err) == (0, "")
    assert "1 of 1 parts were done already" in again.out
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    forced = command("fig1", "--quick", "--force", "--out", tmp_path)
    assert forced.status == 0
    assert path.stat().st_mtime_ns > before[0]
    assert [records.without_times(line) for line in records.read(path)[1]] == [
        records.without_times(json.loads(line)) for line in before[1].decode().splitlines()[1:]
    ]
    for other in (("--seed", "1", "--quick"), ()):
        refused = command("fig1", "--out", tmp_path, *other)
        assert (refused.status, refused.out) == (2, "")
        assert re.fullmatch(r"torchbelay reproduce: .*fig1\.jsonl was made with --seed 0 --quick; .*\n", refused.err)


def test_the_command_runs_the_named_parts_with_its_options(lab: Lab, command: Callable[..., Printed]) -> None:
    assert command("a", "c", "--out", lab.out, "--seed", "12", "--jobs", "3").status == 0
    assert lab.a.runs == lab.c.runs == [Settings(seed=12, quick=False)]
    assert lab.b.runs == []


def test_a_failed_part_is_exit_status_1(lab: Lab, command: Callable[..., Printed]) -> None:
    lab.a.failure = RuntimeError("no luck")
    printed = command("--quick", "--out", lab.out)
    assert printed.status == 1
    assert f"a failed: RuntimeError: no luck (details: {lab.out / 'a.failed.txt'})\n" in printed.out


def test_an_interruption_is_one_line_and_exit_status_130(lab: Lab, command: Callable[..., Printed]) -> None:
    lab.a.failure = KeyboardInterrupt()
    printed = command("--quick", "--out", lab.out)
    assert printed.status == 130
    assert printed.err == "torchbelay reproduce: stopped; what is finished is kept, and the same command goes on\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig1", "nonsense"], r"unknown part 'nonsense'; choose from fig1, .*, gpt, all"),
        (["--out", "{file}"], r"cannot write .*; choose another folder with --out"),
        (["--out", "{file}/below"], r"cannot write .*; choose another folder with --out"),
        (["--seed", "-1"], r"argument --seed: .*"),
        (["--budget", "soon"], r"--budget 'soon' is not understood; give .*"),
        (["--seed", "1.5"], r".*'1\.5' is not a whole number from 0 to 4294967295"),
        (["--seed", "4294967296"], r".*'4294967296' is not a whole number from 0 to 4294967295"),
        (["--jobs", "0"], r".*'0' is not a whole number of at least 1"),
        (["--fast"], r"unknown argument: --fast"),
    ],
)
def test_a_typing_mistake_is_one_line_and_exit_status_2(
    command: Callable[..., Printed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    printed = command(*(argument.format(file=tmp_path / "file") for argument in arguments))
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(rf"torchbelay reproduce: {message}\n", printed.err), printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_a_damaged_record_is_one_line_and_exit_status_2(command: Callable[..., Printed], tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "ring.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" * 20)
    printed = command("fig1", "--quick", "--out", tmp_path)
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(
        r"torchbelay reproduce: cannot read .*ring\.jsonl: .*, or run again with --force\n", printed.err
    )
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ring.jsonl"]


@pytest.mark.parametrize("seed", ["0", "4294967295"])
def test_a_dry_run_of_the_real_parts_lists_them_all(command: Callable[..., Printed], tmp_path: Path, seed: str) -> None:
    printed = command("--dry-run", "--seed", seed, "--out", tmp_path / "report")
    assert (printed.status, printed.err) == (0, "")
    for name in PARTS:
        assert re.search(rf"{name} .* to run", printed.out)
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_part(command: Callable[..., Printed]) -> None:
    printed = command("--help")
    assert printed.status == 0
    assert f"{', '.join(list(PARTS))} or all (default)" in " ".join(printed.out.split())


def test_a_missing_package_is_named_with_a_cure(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torchbelay.lab.reproduce")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    printed = command("--dry-run")
    assert (printed.status, printed.out) == (2, "")
    assert (
        printed.err == "torchbelay reproduce: this needs rich.console: pip install '.[lab]' in a clone of torchbelay\n"
    )


# The command in a process, with signals -------------------------------------------------------------------------------


def started(*arguments: object, held: str = "") -> "subprocess.Popen[str]":
    """Start the command in a session of its own, as a terminal does; the part `held` never comes to its end."""
    program = ["-c", "from helpers import reproduce_command as it; it.main()"] if held else ["-m", "torchbelay.cli"]
    line = [sys.executable, *program, "reproduce", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "HELD_PART": held, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def family(process: "subprocess.Popen[str]") -> tuple[list[int], list[int]]:
    """Return its children, the fork server among them, and their children: the workers that the server made."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parent = {int(pid): int(ppid) for pid, ppid in (line.split() for line in listed.splitlines())}
    children = [pid for pid, ppid in parent.items() if ppid == process.pid]
    return children, [pid for pid, ppid in parent.items() if ppid in children]


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_half_written_and_the_same_command_continues(tmp_path: Path) -> None:
    arguments = ("fig1", "fig2", "--quick", "--jobs", "2", "--out", tmp_path)
    fig1, fig2 = (tmp_path / "records" / f"{name}.jsonl" for name in ("fig1", "fig2"))
    process = started(*arguments, held="fig2")
    wait_until(fig1.exists, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == "torchbelay reproduce: stopped; what is finished is kept, and the same command goes on\n"
    assert files(tmp_path) == {"records/fig1.jsonl"}
    before = fig1.stat().st_mtime_ns, fig1.read_bytes()

    process = started(*arguments)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "1 of 2 parts were done already" in out
    assert (fig1.stat().st_mtime_ns, fig1.read_bytes()) == before
    assert records.read(fig2)[0]["records"] == len(records.read(fig2)[1]) > 0
    assert not [name for name in files(tmp_path) if name.endswith((".tmp", ".failed.txt"))]


@pytest.mark.slow
def test_ctrl_c_while_modules_are_loaded_is_one_line_too(tmp_path: Path) -> None:
    process = started("fig3", "--quick", "--out", tmp_path, held="fig3")
    wait_until(lambda: len(family(process)[0]) == 2, process)  # the resource tracker and the fork server
    time.sleep(0.5)  # the server loads torch by now; otherwise the test would pass for the wrong reason
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == "torchbelay reproduce: stopped; what is finished is kept, and the same command goes on\n"
    assert files(tmp_path) == set()


@pytest.mark.slow
def test_a_killed_process_is_a_failed_part(tmp_path: Path) -> None:
    process = started("fig3", "--quick", "--out", tmp_path, held="fig3")
    wait_until(lambda: family(process)[1], process)
    (worker,) = family(process)[1]
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate()
    assert (process.returncode, err) == (1, "")
    assert "fig3 failed: its process ended with status -9\n" in out
    assert files(tmp_path) == {"index.html", "explorer.html"}


# Everything -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_in_its_quick_version_end_to_end(tmp_path: Path) -> None:
    process = started("--quick", "--out", tmp_path)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == f"report: {tmp_path / 'index.html'}"
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    claims = [f"C{i}" for i in range(1, 17)]
    assert [claim.id for claim in CLAIMS] == claims
    for name in claims:
        assert f'id="claim-{name}"' in page
        assert re.search(rf"\b{name} ", out)
    figures = re.findall(r'<figure id="figure-([^"]+)"', page)
    for part in PARTS:
        head, lines = records.read(tmp_path / "records" / f"{part}.jsonl")
        assert (head["part"], head["seed"], head["quick"], bool(lines)) == (part, 0, True, True)
        assert f'id="part-{part}"' in page
    assert {claim.plate for claim in CLAIMS if claim.plate} <= {*figures}
    drawn = re.findall(r'href="(figures/[^"]+)"', page)
    assert files(tmp_path) == {"index.html", "explorer.html", *drawn, *(f"records/{part}.jsonl" for part in PARTS)}
    assert len(figures) == len({*figures}) == page.count("<img ") + page.count('<table class="rows results')
    assert len(drawn) == 2 * page.count("<img ") + page.count('<table class="rows results')
    assert page.count("<img ") >= 13 + len(PARTS) - 6  # some parts have tables alone

"""The command `torchbelay`: its start, its verbs, and its output in terminals and pipes."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

import torchbelay
from torchbelay.cli import main

EXPLAIN = ["explain", "--k", "1", "--m1", "10", "--m2", "20"]


def test_version(run) -> None:
    assert run("--version") == (0, f"torchbelay {torchbelay.__version__}\n", "")


def test_without_a_subcommand_help_goes_to_stderr_with_status_2(run) -> None:
    printed = run("")
    assert (printed.status, printed.out) == (2, "")
    assert printed.err.startswith("usage: torchbelay ")
    assert "explain" in printed.err


@pytest.mark.parametrize("line", ["explode", "--explain"])
def test_an_unknown_subcommand_ends_in_one_line_and_status_2(run, line: str) -> None:
    printed = run(line)
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(r"torchbelay: [^\n]+\n", printed.err)


def test_a_terminal_without_greek_letters_gets_escapes(monkeypatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(EXPLAIN) == 0
    assert rb"\u03b1, \u03b2" in stream.buffer.getvalue()


def test_a_reader_that_stops_reading_is_no_error(monkeypatch, capsys) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as stream:  # closing it flushes the rest without an error
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(EXPLAIN) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_status_2(monkeypatch, capsys) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(EXPLAIN) == 2
    assert re.fullmatch(r"torchbelay: cannot write the output: [^\n]+; make room, [^\n]+\n", capsys.readouterr().err)


@pytest.mark.parametrize("line", [EXPLAIN, ["explain", "--k", "1"]])
def test_a_process_without_stdout_and_stderr_ends_as_any_other(monkeypatch, line: list[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(line) == (0 if line is EXPLAIN else 2)
    for opened in (sys.stdout, sys.stderr):
        assert opened.name == os.devnull
        opened.close()


def test_ctrl_c_in_a_verb_that_leaves_nothing_behind_is_one_line_and_status_130(run, monkeypatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchbelay.cli.explain._setting", interrupted)
    assert run(EXPLAIN) == (130, "", "torchbelay: stopped\n")


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "torchbelay.cli", "explain", "--decay", "0.75", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout)["decay"], done.stderr) == (0.75, "")


# `python -m torchbelay.cli ARGUMENTS`, then the names of all imported modules on stderr.
COUNTED = """
import runpy, sys
at_start = set(sys.modules)
try:
    runpy.run_module("torchbelay.cli", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
sys.stderr.write("\\n".join(set(sys.modules) - at_start))
"""


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "identify --help",
        "explain --help",
        "explain --k 1 --m1 10 --m2 20 --json",
        f"explore --no-open --output {os.devnull}",
    ],
)
def test_help_and_explain_import_neither_torch_nor_numpy(line: str) -> None:
    command = [sys.executable, "-c", COUNTED, *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = done.stderr.split("\n")
    assert "torchbelay.cli.parser" in modules  # the list is that of the command
    assert done.stdout
    assert not {module.partition(".")[0] for module in modules} & {"torch", "numpy"}
    assert len(modules) < 130  # 85 with Python 3.11, nearly all of them the standard library's; about 2,000 with torch


def test_the_verbs_have_one_file_each() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchbelay.cli", "--help"], capture_output=True, text=True, check=True
    )
    for verb in ("explain", "identify", "reproduce", "train", "sample", "fid"):
        assert re.search(rf"^    {verb}\b", done.stdout, re.M)
        assert callable(getattr(torchbelay.cli, verb).run)

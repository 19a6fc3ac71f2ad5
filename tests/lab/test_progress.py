"""The progress of parts, on a terminal and in a file."""

import io

from rich.console import Console

from torchbelay.lab.progress import PartsProgress

PLANS = {"a": (8, "eight [units]"), "b": (3, "three units")}


def test_a_file_gets_a_line_per_part_and_quarter() -> None:
    console = Console(file=io.StringIO(), width=40)
    with PartsProgress(console, PLANS) as progress:
        assert console.file.getvalue() == "a: eight [units]\nb: three units\n"  # before anything is done
        for units in (1, 1, 1, 3):
            progress.advance("a", units)
        progress.finish("a")
        progress.finish("a")  # nothing is left
        progress.advance("b", 5)  # more than planned
        progress.finish("b")
    lines = console.file.getvalue().splitlines()[2:]
    assert [line.rsplit(" after ")[0] for line in lines] == ["a: 25%", "a: 75%", "a: 100%", "b: 100%"]
    assert all(line.endswith(" s") for line in lines)


def test_a_part_that_fails_says_no_more() -> None:
    console = Console(file=io.StringIO(), width=40)
    with PartsProgress(console, PLANS) as progress:
        progress.stop("a")
    assert "100%" not in console.file.getvalue()


def test_a_terminal_gets_bars_and_no_lines() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with PartsProgress(console, PLANS) as progress:
        progress.advance("a", 8)
    shown = console.file.getvalue()
    assert "100%" in shown
    assert "eight" not in shown
    assert " after " not in shown

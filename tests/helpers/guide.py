"""Follow a page of the documentation word by word: its Python, its files and its commands, with what they print.

- A block of `python` runs, all blocks of a page in one program.
- After the words "Save this as `NAME`:", a block is written to a file instead.
- In a block of `console`, lines that begin with `$ ` are commands (torchbelay, torchrun); the rest is their output.
- A block of `text` right after a block of `python` is what that prints. Without one, it must print nothing.
"""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from helpers.torchrun import torchrun
from torchbelay.cli import main

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_FILE = re.compile(r"Save this as `([\w.]+)`:\s*$")


class Block(NamedTuple):
    """A block of a page: its kind, its text, the file that it is saved as, and what it prints."""

    kind: str
    text: str
    file: str | None
    prints: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that can be followed, in order."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(page):
        kind, text = match.groups()
        between, end = page[end : match.start()], match.end()
        if kind == "text":
            assert found, "the page shows an output before any program"
            assert found[-1].kind == "python", f"no program prints {text!r}"
            assert not between.strip(), f"words between a program and its output: {between!r}"
            found[-1] = found[-1]._replace(prints=text)
        elif kind in ("python", "console"):
            file = _FILE.search(between)
            found.append(Block(kind, text, file[1] if file else None, ""))
        else:
            assert kind in ("", "bash", "yaml"), f"a block of {kind!r} is not followed"
    return found


def follow(page: str, folder: Path, name: str = "page") -> dict[str, Any]:
    """Do all that a page says, in the current folder; compare its outputs; return the names of its program."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "console":
            for command, shown in _commands(block.text):
                compare(run(command, folder), shown)
        else:
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text, name, "exec"), names)
            compare(printed.getvalue(), block.prints)
    return names


def _commands(text: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ (.*)\n", text, flags=re.M)
    assert not parts[0].strip(), f"an output without a command: {parts[0]!r}"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def run(command: str, folder: Path) -> str:
    """Return what a command prints; it must succeed. The lines of several processes are sorted."""
    program, *arguments = shlex.split(command)
    if program == "torchrun":
        return "".join(sorted(torchrun(arguments, folder).splitlines(keepends=True)))
    assert program == "torchbelay", f"{command!r} cannot be followed"
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(arguments) == 0
    return printed.getvalue()


def compare(printed: str, shown: str) -> None:
    """Compare an output with what the page shows: words and whole numbers exactly, other numbers to a few per cent.

    "…" stands for the rest of a line, and a line "…" of the page for any lines.
    """
    found, wanted = printed.strip(), shown.strip()
    lines = re.split(r"^…$", _NUMBER.sub("\0", wanted), flags=re.M)
    pattern = r"[\s\S]*".join("[^\n]*".join(re.escape(part) for part in line.split("…")) for line in lines)
    pattern = pattern.replace("\0", f"({_NUMBER.pattern})").replace("\\\x00", f"({_NUMBER.pattern})")
    match = re.fullmatch(pattern, found)
    assert match, f"the page shows\n{wanted}\nand this was printed\n{found}"
    for number, expected in zip(match.groups(), _NUMBER.findall(wanted), strict=True):
        if expected.lstrip("-").isdigit():
            assert number == expected, f"{number} was printed, and the page shows {expected}:\n{found}"
        else:
            far = abs(float(number) - float(expected))
            assert far <= 0.05 * abs(float(expected)) + _unit(expected), f"{number}, not {expected}:\n{found}"


def _unit(number: str) -> float:
    """Return one unit of the last digit of a number, and a little for its own rounding."""
    digits, _, power = number.partition("e")
    return 1.01 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))

"""The documents of the repository: their pages, links, headings, code and commands."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from helpers.root import ROOT

DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"(?P<before>(?:^[^\n]*\n)?)^(?P<indent> *)```(?P<kind>[\w-]*)\n(?P<text>.*?)^ *```$", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)((?:^    .*\n|^\n(?=    ))+)", re.M)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n")
_SHELL = ("bash", "console", "sh")
COMMANDS = ("torchbelay", "torchrun", "make", "pip", "python", "pre-commit")


class Block(NamedTuple):
    """A block of code: its kind, its text, and why it is not run, if the page says that it is not."""

    kind: str
    text: str
    not_run: str | None


def name(page: Path) -> str:
    """Return a page's path within the repository."""
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    """Return the text of a page."""
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        reason = _NOT_RUN.fullmatch(match["before"].lstrip())
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)]
        found.append(Block(match["kind"], "".join(lines), reason[1] if reason else None))
    return found


def indented(text: str) -> list[str]:
    """Return the blocks of a page that are code because they are indented."""
    return [textwrap.dedent(block) for block in _INDENTED.findall(without_code(text))]


def without_code(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub(r"\g<before>", text)


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", without_code(text), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found[f"{anchor}-{found[anchor]}" if anchor in found else anchor] = 0
        found[anchor] += 1
    return {*found}


def commands(text: str) -> list[str]:
    """Return the commands of a page: lines of its blocks for a shell, and lines of other blocks that begin like one."""
    found = []
    plain = [Block("", block, None) for block in indented(text)]
    for kind, body, _ in [*blocks(text), *plain]:
        if kind not in ("", *_SHELL):
            continue
        lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in prompted or lines:
            first = line.partition(" ")[0].removeprefix(".venv/bin/")
            if first in COMMANDS or prompted or (kind in _SHELL and line and not line.startswith("#")):
                found.append(line)
    return found


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows)).replace(
        "| --- " * len(columns) + "|", "|---" * len(columns) + "|"
    )

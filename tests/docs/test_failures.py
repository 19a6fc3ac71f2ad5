"""docs/failures.md: every block runs and prints what the page shows, and the table has the numbers of the sections."""

import re
from typing import Any

import pytest

from helpers.root import ROOT
from torchbelay.cli import main

PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
PAIRS = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.S)
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.S | re.M))  # failures, by their titles
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| [") and (cells := [cell.strip() for cell in line.strip("|").split("|")])
}


@pytest.mark.thorough
def test_the_python_of_the_page_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    blocks = PAIRS.findall(PAGE)
    assert len(blocks) == PAGE.count("```python") > 3 * 8
    for block, shown in blocks:
        exec(compile(block, "failures.md", "exec"), names)
        assert capsys.readouterr().out.split() == shown.split()


def test_every_failure_is_shown_explained_seen_and_done_right() -> None:
    assert 8 <= len(SECTIONS) <= 14
    for title, text in SECTIONS.items():
        parts = re.findall(r"^(Seen (?:in|with)|\*\*What it does\.|\*\*How to see it\.|\*\*Done right\.)", text, re.M)
        assert len(parts) == 4, title
        first = text.partition("**What it does.**")[0]
        assert re.search(r"\]\(https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+\)", first), title
        assert PAIRS.search(text.partition("**Done right.**")[2]), title


def test_a_thread_is_named_by_its_repository_and_number() -> None:
    links = re.findall(r"\[([^]]*)#(\d+)\]\(https://github\.com/[\w-]+/([\w-]+)/(?:issues|pull)/(\d+)\)", PAGE)
    assert len(links) == PAGE.count("https://github.com/") > len(SECTIONS)
    for named, number, repository, in_address in links:
        assert number == in_address
        assert named.strip() in ("", repository)


def test_the_table_has_the_numbers_that_the_sections_print() -> None:
    assert [re.match(r"\[(.*)\]", name)[1].capitalize() for name in ROWS] == [*SECTIONS]
    for (right, wrong, _), text in zip(ROWS.values(), SECTIONS.values(), strict=True):
        before, _, after = text.partition("**Done right.**")
        printed = [re.search(r"```text\n(\S+)", part)[1] for part in (before, after)]
        assert [wrong, right] == [{"{'weight':": "empty", "refused:": "refused"}.get(each, each) for each in printed]


def test_the_numbers_follow_from_the_definition_of_an_average() -> None:
    def average(decay: float, weights: list[float], begin: float = 0.0) -> float:
        for w in weights:
            begin = decay * begin + (1 - decay) * w
        return round(begin, 2)

    numbers = {name[1:].partition("]")[0]: cells[:2] for name, cells in ROWS.items()}
    hundred = [float(t) for t in range(1, 101)]
    assert numbers["an average that never began at the weights"] == [
        str(average(0.99, hundred)),
        str(average(0.99, hundred, 50.0)),
    ]
    per_batch = [float((batch + 1) // 8) for batch in range(800)]
    assert numbers["an update per batch"] == [str(average(0.9, hundred)), str(average(0.9, per_batch))]
    skipped = [float((t + 2) // 2) for t in range(100)]
    assert numbers["an update for a step that was skipped"] == [
        str(average(0.9, hundred[:50])),
        str(average(0.9, skipped)),
    ]
    assert numbers["an average of 16 bits"][0] == str(average(0.999, [2.0] * 1000, 1.0))


def test_the_command_finds_the_first_failure(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block, _ in PAIRS.findall(SECTIONS["Names that no longer match"]) if "def by_name" in block]
    (tmp_path / "gallery_of_failures.py").write_text("import torch\n" + block.partition("\n\n\nprint")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["identify", "gallery_of_failures:by_name", "--steps", "16"]) == 1
    assert "The average does not move in 16 updates" in " ".join(capsys.readouterr().out.split())

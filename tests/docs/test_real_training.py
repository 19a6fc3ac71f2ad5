"""The page "Under real training": its code runs, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from helpers.root import ROOT
from torchbelay.testing import CONTRACTS

PAGE = (ROOT / "docs" / "real-training.md").read_text()
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| situation", "| mode"))
]
NAMED = sorted(set(re.findall(r"`(tests/[^`:]+\.py)(?:::(\w+))`", PAGE)))


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{Path(file).stem}-{name}" for file, name in NAMED])
def test_every_test_that_the_page_names_exists(file: str, name: str) -> None:
    assert name in functions(file)
    assert name.startswith("test_") or file.startswith("tests/helpers/rank_checks/")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_says_what_happens_and_names_a_test(row: str) -> None:
    situation, what, shown = (cell.strip() for cell in row.strip("|").split("|"))
    assert situation
    assert what
    assert re.findall(r"`tests/[^`:]+\.py::\w+`", shown)


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(block, "real-training.md", "exec"), {})
    said = capsys.readouterr().out
    assert all(name in said for name in CONTRACTS)

"""docs/peers.md names a test for every row, and the versions that the tests run with."""

import ast
import re

import pytest

from helpers.root import ROOT

PAGE = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
TESTS = ROOT / "tests" / "behaviour" / "test_peers.py"
NAMED = sorted(set(re.findall(r"`(test_\w+)`", PAGE)))


def rows() -> tuple[list[str], list[str]]:
    """Return the rows of the comparison, and those of the list of tests."""
    cells = [line.count("|") for line in PAGE.splitlines()]
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| |", "| row"))]
    assert set(cells) == {0, 3, 6}
    return [line for line in lines if line.count("|") == 6], [line for line in lines if line.count("|") == 3]


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_the_page_names_exists(name: str) -> None:
    tree = ast.parse(TESTS.read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_its_tests() -> None:
    compared, shown = rows()
    assert len(compared) == len(shown) == 8
    assert all(re.search(r"`test_\w+`", line) for line in shown)


def test_the_versions_are_those_that_the_tests_run_with() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line
    )
    torch = ".".join(pinned["torch"].split(".")[:2])
    versions = (
        f"torch {torch}'s `AveragedModel`, ema-pytorch {pinned['ema-pytorch']} and torch-ema {pinned['torch-ema']}"
    )
    assert versions in " ".join(PAGE.split())

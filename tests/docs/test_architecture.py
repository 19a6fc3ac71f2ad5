"""docs/architecture.md names files that exist, every folder of the package, and every file that is too long."""

import re
from pathlib import Path

import pytest

from helpers.root import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "torchbelay"
LONG = 360  # lines; "about 350"

NAMED = sorted({*re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)})


def find(name: str) -> Path:
    """Return the path of a file or folder as the page names it."""
    return ROOT / name if name.startswith(("tests", "docs", "benchmarks", "src")) else SOURCE / name


@pytest.mark.parametrize("name", NAMED)
def test_what_the_page_names_exists(name: str) -> None:
    assert find(name).is_dir() if name.endswith("/") else find(name).is_file()


def test_the_page_names_every_folder_of_the_package() -> None:
    folders = {
        f"{path.relative_to(SOURCE)}/"
        for path in SOURCE.rglob("*")
        if path.is_dir() and path.name != "__pycache__" and any(path.glob("*.*"))
    }
    assert folders - {*NAMED} == set()


def test_the_rooms_are_those_of_the_package() -> None:
    table = re.findall(r"^\| `([\w.]+/?)` \|", PAGE, re.M)
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py", "_version.py"}
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    assert {*table} == modules | packages


def test_every_long_file_is_explained_and_no_other() -> None:
    section = PAGE.partition("## Long files")[2]
    assert section
    explained = {*re.findall(r"`([\w./]+\.py)`", section)}
    long = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if len(path.read_text(encoding="utf-8").splitlines()) > LONG
    }
    assert explained == long

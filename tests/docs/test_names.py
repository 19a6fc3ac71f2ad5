"""Every `tb.…` and `torchbelay.…` that a page names exists, and every import of its code finds what it asks for."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

from helpers.documents import PAGES, blocks, name, read

# In code: `tb.methods.ema`, torchbelay.testing.check. In prose only between backticks. No file, as torchbelay.py.
_NAME = re.compile(r"(?<![\w./@-])(?:tb|torchbelay)((?:\.[A-Za-z_]\w*)+)(?![\w/])")
_PYTHON = ("python", "py", "pycon")


def named(text: str) -> set[str]:
    """Return the dotted names of a page that begin at the package, without the package."""
    code = [block.text for block in blocks(text) if block.kind in _PYTHON]
    code += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    found = {match[1:] for part in code for match in _NAME.findall(part)}
    return {each for each in found if not each.endswith((".py", ".md"))}


@cache
def value(path: str) -> Any:
    """Return what a dotted name stands for; a field of a dataclass without a default stands for itself."""
    try:
        return resolve_name(f"torchbelay.{path}")
    except AttributeError:
        owner, _, last = path.rpartition(".")
        annotations = getattr(value(owner), "__annotations__", {}) if owner else {}
        if last not in annotations:
            raise
        return last


def imported(path: str) -> ModuleType | None:
    """Return a module of ours; None if the framework that it needs is not installed."""
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("torchbelay"):
            raise
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_names_of_a_page_exist(page: Path) -> None:
    missing, absent = [], []
    for each in sorted(named(read(page))):
        try:
            value(each)
        except ModuleNotFoundError as error:
            (missing if str(error.name).startswith("torchbelay") else absent).append(each)
        except AttributeError:
            missing.append(each)
    assert missing == []
    if absent:
        pytest.skip(f"not installed here: what {', '.join(absent)} needs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if "torchbelay" in read(page)], ids=name)
def test_the_imports_of_a_page_find_what_they_ask_for(page: Path) -> None:
    for block in blocks(read(page)):
        if block.kind not in ("python", "py"):
            continue
        for node in ast.walk(ast.parse(block.text)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torchbelay"):
                continue
            module = imported(str(node.module))
            if module is None:
                continue
            for alias in node.names:
                assert hasattr(module, alias.name), f"from {node.module} import {alias.name}"


def test_a_name_that_does_not_exist_is_found() -> None:
    assert named("`tb.methods.emma(0.9)`, see `torchbelay.Spring.ema`\n") == {"methods.emma", "Spring.ema"}
    assert named("```python\nbelay = tb.Bellay(model)\n```\n") == {"Bellay"}
    for wrong in ("methods.emma", "Spring.enma", "nothing.at.all"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            value(wrong)
    assert value("Spring.k") == "k"

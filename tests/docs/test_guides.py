"""Every how-to is followed word by word, and prints what it shows."""

import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import torchbelay as tb
from helpers import guide
from helpers.root import ROOT

FOLDER = ROOT / "docs" / "how-to"
PAGES = (
    "batchnorm.md",
    "compile.md",
    "fsdp2.md",
    "gan.md",
    "learning-rate.md",
    "lora.md",
    "many-workers.md",
    "merge.md",
    "mixed-precision.md",
    "plain-loop.md",
    "post-hoc.md",
    "projections.md",
    "resume.md",
    "several-averages.md",
    "target-network.md",
    "teacher.md",
)
NEEDS = {"lora.md": "peft"}  # what a page needs besides torch


def _marked(page: str) -> object:
    """Return a page as the parameter of a test that is slow if the page starts processes or compiles."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    slow = "torchrun" in text or "torch.compile(" in text
    return pytest.param(page, text, id=page, marks=pytest.mark.slow if slow else pytest.mark.thorough)


@pytest.mark.parametrize(("page", "text"), [_marked(page) for page in PAGES])
def test_a_page_can_be_followed_word_by_word(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    if "torch.compile(" in text and (shutil.which("g++") is None or sys.platform == "win32"):
        pytest.skip("torch's compiler needs g++ to make code for the CPU")
    monkeypatch.chdir(tmp_path)
    assert guide.blocks(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide.follow(text, tmp_path, page)
    assert [str(each.message) for each in caught if issubclass(each.category, tb.BelayWarning)] == []


def test_every_page_is_followed() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == {*PAGES, "index.md"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_what_one_looks_for(page: str) -> None:
    text = (FOLDER / page).read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["What can go wrong", "More"]
    assert any(block.prints or block.kind == "console" for block in guide.blocks(text))  # what to expect


def test_the_index_links_to_every_page_and_readme_to_the_index() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert {*PAGES} <= {*re.findall(r"\]\(([\w-]+\.md)\)", index)}
    assert "(docs/how-to/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 0.0123\n", "loss 0.0145"),  # another number
        ("step 100", "step 101"),  # whole numbers are exact
        ("one\ntwo", "one"),  # a line that the page leaves out
        ("", "True"),
        ("True", ""),
        ("in 3 days, step 4", "in … days, step 5"),
    ],
)
def test_an_output_that_differs_is_noticed(printed: str, shown: str) -> None:
    with pytest.raises(AssertionError):
        guide.compare(printed, shown)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [("loss 0.0123\n", "loss 0.0124"), ("a (b) 2e-03", "a (b) 2e-03"), ("in 3 s: 7", "in … s: 7"), ("", "")],
)
def test_an_output_that_agrees_is_accepted(printed: str, shown: str) -> None:
    guide.compare(printed, shown)


def test_a_program_that_fails_or_prints_what_the_page_does_not_show_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        guide.follow("```python\n1 / 0\n```\n", tmp_path)
    with pytest.raises(AssertionError):
        guide.follow("```python\nprint('more')\n```\n", tmp_path)
    guide.follow("```python\nprint('more')\n```\n\n```text\nmore\n```\n", tmp_path)
    guide.follow("Save this as `a.py`:\n\n```python\n1 / 0\n```\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "1 / 0\n"

"""Every how-to is followed word by word, and prints what it shows."""

import re
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
    "lora.md",
    "many-workers.md",
    "merge.md",
    "mixed-precision.md",
    "plain-loop.md",
    "post-hoc.md",
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

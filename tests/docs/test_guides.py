"""Every how-to is followed word by word, and prints what it shows."""

import warnings
from pathlib import Path

import pytest

import torchbelay as tb
from helpers import guide
from helpers.root import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in (DOCS / "how-to").glob("*.md") if path.stem != "index")
NEEDS = {"lora": "peft"}  # what a page needs besides torch


def _marks(path: Path) -> list[pytest.MarkDecorator]:
    text = path.read_text(encoding="utf-8")
    return [pytest.mark.slow] if "torchrun" in text or "torch.compile(" in text else [pytest.mark.thorough]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=_marks(path)) for path in PAGES])
def test_a_page_can_be_followed_word_by_word(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.chdir(tmp_path)
    page = path.read_text(encoding="utf-8")
    assert guide.blocks(page)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide.follow(page, tmp_path, path.name)
    assert [str(each.message) for each in caught if issubclass(each.category, tb.BelayWarning)] == []

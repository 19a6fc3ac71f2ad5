"""docs/which-method.md is followed word by word, and what it says was measured is what the records say.

`PYTHONPATH=src:tests python tests/docs/test_which_method.py` fills in the measurements anew.
"""

import re
import sys
import warnings
from pathlib import Path

import pytest

import torchbelay as tb
from helpers import guide, kept_records, measured
from helpers.root import ROOT
from torchbelay.lab.gpt.analysis import Runs, judged

PATH = ROOT / "docs" / "which-method.md"
FLAT = 0.2  # how far the numbers of an advice may be from the page's: its optimum is flat
PAGE = PATH.read_text(encoding="utf-8")


def test_the_table_says_what_was_measured() -> None:
    assert len(measured.MARKED.findall(PAGE)) == 15
    assert measured.filled(PAGE) == PAGE, "fill it in with: PYTHONPATH=src:tests python tests/docs/test_which_method.py"


def test_a_dash_stands_only_where_nothing_was_measured() -> None:
    dashes = re.findall(r"^\| [^|]+ \| \[([^]]+)\]\([^)]+\) \| – \|$", PAGE, re.M)
    assert dashes == ["EMA with a schedule, hard sync", "DiLoCo"]
    assert {"schedule-free", "Lookahead"} <= {run["arm"] for run in kept_records.lines("gpt") if run["kind"] == "run"}


@pytest.mark.thorough
def test_the_page_can_be_followed_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])  # the command adds the folder of train.py
    monkeypatch.setenv("COLUMNS", "80")
    compare, unit = guide.compare, guide._unit

    def compare_loosely(printed: str, shown: str) -> None:
        with monkeypatch.context() as patch:
            if "θ = " in shown or "theta=" in shown:
                patch.setattr(guide, "_unit", lambda number: max((FLAT - 0.05) * abs(float(number)), unit(number)))
            compare(printed, shown)

    monkeypatch.setattr(guide, "compare", compare_loosely)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.BelayWarning)
        guide.follow(PAGE, tmp_path, PATH.name)


def test_the_page_says_how_far_the_numbers_of_an_advice_may_differ() -> None:
    said = f"may differ between machines, here and below. The test of this page accepts {FLAT:.0%}."
    assert said in " ".join(PAGE.split())


def test_the_cell_of_belay_points_to_the_table_of_the_paper() -> None:
    (cell,) = re.findall(r"^\| what the paper proposes \|.*\| (.*) \|$", PAGE, re.M)
    assert "(paper.md#belay-against-ema-in-three-ways)" in cell
    assert len(re.sub(r"<!--.*?-->", "", cell).split()) <= 25


def test_that_a_spring_that_repels_widens_the_range_is_said_of_quadratics_alone() -> None:
    (row,) = re.findall(r"^\| to survive a learning rate that is high \|.*$", PAGE, re.M)
    assert len(re.sub(r"<!--.*?-->", "", row.split("|")[-2]).split()) <= 25
    answers = {str(h.answer) for h in judged(Runs(kept_records.lines("gpt"))) if h.id.startswith("H2")}
    assert answers == {"undecided"}
    assert "is a fact about quadratics; for networks it is [undecided](paper.md#with-the-controls-in) (H2)." in PAGE
    assert "Generalized Primal Averaging, of which schedule-free is the case c = 1/t." in PAGE


def test_every_row_of_the_table_ends_in_code() -> None:
    sections = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): text
        for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    }
    targets = re.findall(r"^\| [^|]+ \| \[[^]]+\]\(#([\w-]+)\) \|", PAGE, re.M)
    assert len(targets) == 10
    assert all("```python" in sections[target] for target in targets)


if __name__ == "__main__":
    PATH.write_text(measured.filled(PAGE), encoding="utf-8")

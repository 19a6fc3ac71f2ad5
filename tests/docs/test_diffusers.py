"""The page about diffusers: its Python runs as one script, and its numbers are those of the run."""

import difflib
import re
from pathlib import Path

import pytest

from helpers.root import ROOT

accelerate = pytest.importorskip("accelerate", reason="accelerate is the framework that this page is about")
pytest.importorskip("diffusers", reason="diffusers is the framework that this page is about")

PAGE = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate keeps one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_both_loops_run_and_save_the_same_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 4
    names: dict[str, object] = {"__name__": "docs", "folder": str(tmp_path)}
    exec("\n".join(BLOCKS), names)
    steps, apart = capsys.readouterr().out.split()[-2:]
    assert f"After {steps} steps" in PAGE
    (bound,) = re.findall(r"differ by less than (\S+): roundings", PAGE)
    assert float(apart) < float(bound) < 1e-6
    moved = names["before"]["conv_in.weight"] - names["unet"].state_dict()["conv_in.weight"]  # type: ignore[index,attr-defined]
    assert moved.abs().max() > 1e-4  # an average that is the weights would be equal too


def test_the_page_counts_the_lines_that_differ() -> None:
    before, after = (block.splitlines() for block in BLOCKS[1:3])
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert f"The difference is +{added} and −{removed} lines." in PAGE

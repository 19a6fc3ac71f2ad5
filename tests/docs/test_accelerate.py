"""The page about Accelerate: its Python runs as one script."""

import re
from pathlib import Path

import pytest

from helpers.root import ROOT

accelerate = pytest.importorskip("accelerate", reason="accelerate is the framework that this page is about")

PAGE = (ROOT / "docs" / "accelerate.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate keeps one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {"__name__": "docs"})
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("[")] == ["10", "10"]  # DeepSpeed logs that it was imported
    assert (tmp_path / "run" / "custom_checkpoint_0.pkl").is_file()

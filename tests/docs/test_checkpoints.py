"""docs/checkpoints.md: its code runs, and its warning is the one that it tells of."""

import re
import warnings
from pathlib import Path

import pytest

from helpers.root import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 11
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile("\n".join(blocks), "checkpoints.md", "exec"), names := {})
    (said,) = [str(each.message) for each in caught if "this state is of another Belay" in str(each.message)]
    assert "'short' is new and begins at the checkpoint's 'average'" in said
    out = capsys.readouterr().out
    assert "'belay/tension'" in out
    assert "after 5 steps" in out
    assert "differs: ema(at_300=(0.0, 0.003333333333, 1.0, 0.003333333333), …) in the checkpoint, ema(at_300=" in out
    assert "a checkpoint cannot hold all of the method of 'average' (ema.decay=<function <lambda> " in out
    assert names["belay"].step == 3

"""The page about Transformers: its Python runs as one script, and its table names methods of Trainer."""

import re
from pathlib import Path

import pytest

from helpers.root import ROOT

transformers = pytest.importorskip("transformers", reason="transformers is the framework that this page is about")
accelerate = pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from torchbelay.integrations.transformers import BelayCallback, _Averaging  # noqa: E402

PAGE = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Accelerate keeps one state per process."""
    transformers.utils.logging.set_verbosity_error()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    exec("\n".join(blocks), {"__name__": "docs"})
    printed = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"True|False|\d+", line)]
    assert printed == ["20", "True", "20"]


def test_the_tables_name_what_the_integration_has() -> None:
    named = set(re.findall(r"^\| `(\w+)(?:\(\))?` \|", PAGE, re.M))
    added = {name for name in vars(_Averaging) if callable(getattr(transformers.Trainer, name, None)) and name in PAGE}
    assert added == {name for name in vars(_Averaging) if not name.startswith("__")} - {"_abc_impl"}
    assert named == added | {"belay", "use_weights", "use_average"}
    assert all(hasattr(BelayCallback, name) for name in named - added)

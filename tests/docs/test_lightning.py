"""The page about Lightning: its Python runs as one script, and its configuration file makes the callback."""

import inspect
import re
from pathlib import Path

import pytest

from helpers.root import ROOT

pytest.importorskip("lightning", reason="the page is about Lightning, which is not installed")

from helpers.lightning_training import NOISE

pytestmark = [pytest.mark.filterwarnings(line) for line in NOISE]

PAGE = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {"__name__": "docs"})
    printed = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"True|\d+|\[.*\]", line)]
    assert printed == ["True", "[True, True, True]", "8"]


def test_the_configuration_of_the_page_makes_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # names differ between its versions
    parser = pytest.importorskip("jsonargparse").ArgumentParser(exit_on_error=False)
    from lightning.pytorch import Callback

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    parser.add_argument("--trainer.callbacks", type=list[Callback])
    made = parser.instantiate_classes(parser.parse_string(text))
    (callback,) = made.trainer.callbacks
    assert "decay=0.999" in repr(callback._method)


def test_the_table_has_the_arguments_and_their_defaults() -> None:
    from torchbelay.integrations.lightning import BelayCallback

    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGE, re.M))
    found = {
        p.name: p.default for p in inspect.signature(BelayCallback).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    assert {name: eval(value) for name, value in rows.items()} == found

"""docs/identify.md: its code prints what the page shows, its command runs, and its table is what `identify` finds."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim.swa_utils import get_ema_multi_avg_fn

from helpers import averaging_code as code
from helpers.root import ROOT
from torchbelay import methods
from torchbelay.cli import main
from torchbelay.testing import Identification, identify

PAGE = (ROOT / "docs" / "identify.md").read_text(encoding="utf-8")
PARTS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.S)
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 8 and cells[0]
}


def test_the_python_of_the_page_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(PARTS) == PAGE.count("```python") == 4
    names: dict[str, Any] = {}
    for block, shown in PARTS:
        exec(compile(block, "identify.md", "exec"), names)
        assert " ".join(capsys.readouterr().out.split()) == " ".join(shown.split())


def test_the_command_of_the_page_runs(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("\n".join(block for block, _ in PARTS[:3:2]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "train", None)  # so that no other test's module is taken, and none left behind
    del sys.modules["train"]
    (command,) = re.findall(r"^\$ torchbelay (.*)$", PAGE, re.M)
    assert main(command.replace("1000", "100").split()) == 1
    assert "never begins at the weights" in " ".join(capsys.readouterr().out.split())


# The libraries -------------------------------------------------------------------------------------------------------

LIBRARIES: dict[str, Callable[[], Any]] = {
    "torch's AveragedModel, as it comes": code.averaged_model,
    "torch's AveragedModel, EMA": lambda: code.averaged_model(multi_avg_fn=get_ema_multi_avg_fn(0.99)),
    "ema-pytorch's EMA": lambda: code.ema_pytorch(beta=0.99),
    "torch-ema": lambda: code.torch_ema(decay=0.99),
    "timm's ModelEmaV3": lambda: code.timm(counted=False, decay=0.99),
    "diffusers' EMAModel": lambda: code.diffusers(decay=0.99),
    "Lightning's EMAWeightAveraging": lambda: code.lightning(decay=0.99),
    "torchbelay's ema": lambda: code.belay(lambda: methods.ema(0.99)),
}


def row(found: Identification) -> list[str]:
    """Return the cells that the findings make."""
    warmup = found.warmup
    assert warmup is not None
    begin = warmup.numbers.get("from", 0)
    tau = "τ = update" + (f" − {begin:g}" if begin else "")
    laws = {
        "none": "none",
        "mean": "uniform mean",
        "ratio": f"(1 + τ)/(10 + τ), {tau}",
        "inverse-power": f"1 − (1 + τ)^−2/3, {tau}",
    }
    if warmup.law == "inverse-power":
        assert (warmup.numbers["power"], warmup.numbers["inv_gamma"]) == pytest.approx((2 / 3, 1), abs=1e-3)
    return [
        "averages" if not warmup.copies else "copies" if warmup.copies == 1 else f"copies, {warmup.copies} times",
        laws[warmup.law],
        "every update" if warmup.every == 1 else f"every {warmup.every}th",
        str(found.buffers),
        str(found.frozen),
        {"averaged": "once", "otherwise": "twice"}[str(found.tied)],
        {True: "moves", False: "stands still"}[bool(found.sixteen_bit[0].accumulates)],
    ]


def test_the_table_has_all_libraries() -> None:
    assert ROWS.keys() == LIBRARIES.keys()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_row_of_the_table_is_what_identify_finds(name: str) -> None:
    found = identify(LIBRARIES[name](), steps=256 if name == "ema-pytorch's EMA" else 64)
    assert found.sixteen_bit[0].accumulates is not None
    assert row(found) == ROWS[name]

"""The pages about timm and torchtitan: their Python runs as one script each, and the averages are what they say."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.averaging_code import library_file
from helpers.root import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves and loads


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def run(text: str, number: int) -> dict[str, Any]:
    """Run all blocks of a page, as many as are expected; return its names."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == number
    names: dict[str, Any] = {"__name__": "docs"}
    exec("\n".join(blocks), names)
    return names


def test_timms_loop_has_the_same_average_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    utils: Any = ModuleType("timm.utils")
    utils.ModelEmaV3 = library_file("timm", "utils/model_ema.py").ModelEmaV3  # the package would import torchvision
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.utils", utils)
    text = page("timm.md")
    names = run(text, 4)
    steps, apart, losses = capsys.readouterr().out.split()
    assert f"After {steps} steps" in text
    (bound,) = re.findall(r"differ by less than (\S+) in float32", text)
    assert max(float(apart), float(losses)) < float(bound) < 1e-5
    assert list(names["before_ema"]) == list(names["after_ema"])
    weights = names["model"].state_dict()
    for name in ("0.weight", "1.running_mean"):  # averages, and not just copies
        assert (weights[name] - names["after_ema"][name]).abs().max() > 1e-3


def test_torchtitans_trainer_has_the_average_of_a_plain_loop_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page("torchtitan.md")
    names = run(text, 2)
    assert capsys.readouterr().out.split() == ["True"]
    trainer, resumed = names["trainer"], names["resumed"]
    ours = trainer.belay.average_state_dict()
    assert all(torch.equal(value, resumed.belay.average_state_dict()[name]) for name, value in ours.items())
    assert list(ours) == [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]

    plain = names["Trainer"]()
    plain.belay.detach()
    average = {name: value.clone() for name, value in plain.states["model"].state_dict().items()}
    for x in names["batches"]:
        plain.train([x])
        for name, value in plain.states["model"].state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
    (bound,) = re.findall(r"by hand by less than (\S+)\.", text)
    assert max(float((average[name] - ours[name]).abs().max()) for name in ours) < float(bound)
    assert (
        max(float((value - ours[name]).abs().max()) for name, value in plain.states["model"].state_dict().items())
        > 1e-3
    )


def test_an_average_can_begin_at_a_checkpoint_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(page("torchtitan.md"), 2)
    old, new, dcp = names["trainer"], names["Trainer"](seed=2), names["dcp"]
    dcp.save({key: old.states[key] for key in ("model", "optimizer")}, checkpoint_id=tmp_path / "old")
    dcp.load({key: new.states[key] for key in ("model", "optimizer")}, checkpoint_id=tmp_path / "old")
    new.belay.reset()
    expected = old.states["model"].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in new.belay.average_state_dict().items())

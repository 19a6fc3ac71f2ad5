"""The page about DeepSpeed: its program runs by its command, on two processes."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.root import ROOT
from helpers.torchrun import torchrun

PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is the framework that this page is about")
def test_the_program_of_the_page_runs_by_its_command(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (command,) = re.findall(r"```\n(torchrun .*?)\n```", PAGE, re.S)
    (tmp_path / "train.py").write_text(program)
    arguments = shlex.split(command)[1:]
    assert arguments.pop(0) == "--standalone"
    said = torchrun(arguments, tmp_path)
    assert "10" in said.split()
    names = {each.name for each in (tmp_path / "run" / "global_step10").iterdir()}
    assert {"torchbelay_0_rank_0_of_2.pt", "torchbelay_0_rank_1_of_2.pt"} <= names
    plain = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    before = plain[0].weight.detach().clone()
    assert tb.load_average(tmp_path / "run.safetensors", plain)["step"] == "10"
    assert not torch.equal(plain[0].weight, before)

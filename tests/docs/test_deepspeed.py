"""The page about DeepSpeed: its program runs by its command, on two processes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.root import ROOT

LIMIT = 200.0  # seconds; on an idle machine it takes 10
PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is the framework that this page is about")
def test_the_program_of_the_page_runs_by_its_command(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (command,) = re.findall(r"```\n(torchrun .*?)\n```", PAGE, re.S)
    (tmp_path / "train.py").write_text(program)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    with (tmp_path / "log").open("w") as log:
        ran = subprocess.Popen(
            started, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ran.wait(LIMIT)
        finally:
            if ran.poll() is None:
                os.killpg(ran.pid, signal.SIGKILL)  # the processes that it started, too
    said = (tmp_path / "log").read_text()
    assert ran.returncode == 0, said
    assert "10" in said.split()
    names = {each.name for each in (tmp_path / "run" / "global_step10").iterdir()}
    assert {"torchbelay_0_rank_0_of_2.pt", "torchbelay_0_rank_1_of_2.pt"} <= names
    plain = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    before = plain[0].weight.detach().clone()
    assert tb.load_average(tmp_path / "run.safetensors", plain)["step"] == "10"
    assert not torch.equal(plain[0].weight, before)

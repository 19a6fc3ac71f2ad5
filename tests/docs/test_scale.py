"""The page about several machines: its programs run under torchrun, and its numbers are those of the formulas."""

import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from helpers.root import ROOT
from torchbelay.belay import traffic

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    return found


@pytest.mark.slow
def test_replicas_share_an_average_under_torchrun(tmp_path: Path) -> None:
    text = section("One average for all replicas")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    ((ranks, name),) = re.findall(r"torchrun --nproc-per-node (\d) (\S+)", text)
    (tmp_path / name).write_text(program)
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    told = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, name],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    outputs = dict(re.findall(r"rank (\d): (\S+)", told.stdout))
    assert len(outputs) == int(ranks)
    assert len(set(outputs.values())) == 1  # one average for all
    assert {f"slice {i + 1} of {ranks}" for i in range(int(ranks))} == set(re.findall(r"slice \d of \d", told.stdout))
    state = torch.load(tmp_path / "belay.pt", weights_only=True)
    assert state["step"] == 100
    assert state["averages"]["average"]["weights"]["0.weight"].shape == (64, 16)


def test_the_share_of_a_rank_is_what_the_page_says() -> None:
    block = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), *[(768,)] * 5]
    shapes = [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]
    assert sum(map(prod, shapes)) == 124_439_808  # GPT-2 small
    (said,) = re.findall(r"largest share of GPT-2 small is ([\d.]+)% above 1/8", PAGE)
    assert f"{traffic.stored(shapes, 8, 1) / (sum(map(prod, shapes)) / 8) - 1:.3%}" == f"{said}%"
    assert f"{traffic.BUCKET >> 20} MiB" in section("One average for all replicas")

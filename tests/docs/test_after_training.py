"""docs/after-training.md: its code runs, its commands are understood, and its numbers are those of the library."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from helpers.root import ROOT
from torchbelay.cli import main
from torchbelay.snapshots import merger

PAGE = (ROOT / "docs" / "after-training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
MERGES = [line for line in re.findall(r"^torchbelay merge .*$", PAGE, re.M) if "$(" not in line]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[3][:30] for block in BLOCKS])
def test_the_code_of_the_page_runs(block: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "after-training.md", "exec"), {})


@pytest.mark.parametrize("line", MERGES)
def test_the_commands_of_the_page_run(line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "my_evaluation.py").write_text("import torch\ndef accuracy(path): return 1.0\n")
    checkpoints = words[1 : min(i for i, word in enumerate(words) if word.startswith("--"))]
    for number, name in enumerate(checkpoints):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        if not name.endswith(".pt"):
            place.mkdir()
            place /= "pytorch_model.bin"
        state = {"w": torch.full((2,), float(number))}
        torch.save({"model": state, "ema": state} if "--key" in words else state, place)
    assert main(words) == 0, capsys.readouterr().err


def test_the_times_are_those_that_were_measured() -> None:
    spec = importlib.util.spec_from_file_location("merge_benchmark", ROOT / "benchmarks" / "merge.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    results = json.loads((ROOT / "benchmarks" / "results" / "merge.json").read_text())
    least = []
    for name, turns in results["turns"].items():
        s = benchmark.summary(turns)
        least.append(s["one"])
        row = f"{s['merge']:.2f} s | {s['copy']:.2f} s | {s['merge/copy']:.2f} | {s['CPU']:.2f} s"
        assert f"| {name.replace(' ', ', ')} | {row} |" in PAGE
        assert s["merge/copy"] <= 1.5
    assert f"{min(least):.2f} to\n{max(least):.2f} s" in PAGE
    assert f"medians of\n{results['rounds']} rounds" in PAGE
    loads = sorted([results["load before"], results["load after"]])
    assert f"a load of {loads[0]:.0f} to {loads[1]:.0f}" in PAGE


def test_the_size_of_a_part_is_the_librarys() -> None:
    assert f"parts of {merger._PART:,} elements" in PAGE

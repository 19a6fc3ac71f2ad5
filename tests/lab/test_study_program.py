"""benchmarks/study.py runs parts of the study within a time, writes their records, and prints no result."""

import json
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import kept_records
from helpers.root import ROOT
from torchbelay.lab import records
from torchbelay.lab.gpt import study
from torchbelay.lab.gpt.arms import Arm
from torchbelay.lab.part import Record

PROGRAM = str(ROOT / "benchmarks" / "study.py")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM, *arguments])
    runpy.run_path(PROGRAM, run_name="__main__")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let the language model train nothing; return the arms that would have been trained."""
    found: list[str] = []

    def pretend(self: object, arm: Arm, lr: float, seed: int, split: str, **_: object) -> Record:
        found.append(arm.name)
        key = {"kind": "run", "arm": arm.name, "theta": arm.theta, "lr": lr, "seed": seed, "split": split}
        return key | {"losses": {"w1": 2.345, "w2": 1.234}, "fresh": 1.234}

    def pretend_to_look(self: object, arm: Arm, lr: float, seed: int, looks: Sequence[int]) -> Record:
        found.append(arm.name)
        key = {"kind": "curvature", "arm": arm.name, "theta": arm.theta, "lr": lr, "seed": seed, "products": 10}
        return key | {"curvatures": [[step, 2.0] for step in looks]}

    monkeypatch.setattr(study.Trainer, "run", pretend)
    monkeypatch.setattr(study.Trainer, "trace", pretend_to_look)
    monkeypatch.setattr(study, "QUICK", replace(study.QUICK, corpus=400_000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def test_it_writes_the_records_of_a_part_and_prints_no_loss(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path))
    head, lines = records.read(tmp_path / "gpt.jsonl")
    assert head["part"] == "gpt"
    assert lines[0]["complete"] is True
    assert len(lines) - 1 == len(trained)
    said = capsys.readouterr().out
    assert re.search(rf"^gpt: {len(trained)} runs are finished, .* complete$", said, re.M)
    assert "1.23" not in said
    assert "2.34" not in said
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path))  # everything is finished
    assert len(lines) - 1 == len(trained)


def test_without_time_it_writes_what_is_finished(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path), "--stop-after", "0")
    assert trained == []
    assert "0 runs are finished" in capsys.readouterr().out
    assert [line["kind"] for line in records.read(tmp_path / "gpt.jsonl")[1]] == ["protocol"]


def test_a_further_part_is_not_begun_without_time_to_compile_it(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "gpt", "warmup", "--quick", "--out", str(tmp_path), "--stop-after", "100")
    assert "warmup: not begun" in capsys.readouterr().out
    assert not (tmp_path / "warmup.jsonl").exists()


def test_without_a_gpu_it_says_so_and_leaves_the_records_of_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "penalty.jsonl").write_text("from a GPU")
    run(monkeypatch, "warmup", "penalty", "gpt", "--out", str(tmp_path))
    said = capsys.readouterr().out
    assert [line.partition(": ")[2] for line in said.splitlines()] == ["nothing was run. There is no GPU here."] * 3
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("penalty.jsonl", "from a GPU")]


def test_the_records_are_those_that_the_package_would_show(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file can be committed as it is."""
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path))
    first, *rest = (tmp_path / "gpt.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["records"] == len(rest)
    assert json.loads(first)["device"] == "CPU"
    plates = study.draw([json.loads(line) for line in rest])
    names = ("rates", "curvature", "floor", "arms", "effects", "hypotheses")
    assert [plate.name for plate in plates] == [f"gpt-{name}" for name in names]


def test_the_complete_seeds_of_earlier_records_are_taken(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = kept_records.paths()["figure4"]
    complete = sorted({line["seed"] for line in kept_records.lines("figure4") if line["kind"] == "fid"})
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path), "--have", str(kept))
    seeds = ", ".join(map(str, complete))
    assert f"figure4: seeds {seeds} are taken from {kept}" in capsys.readouterr().out
    assert len(list((tmp_path / "cache").rglob("figure4-*.jsonl"))) == len(complete)


def test_the_runs_of_earlier_records_are_taken(
    trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path))
    whole = [*trained]
    trained.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another cache"))
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path / "again"), "--have", str(tmp_path / "gpt.jsonl"))
    assert whole
    assert trained == []
    assert records.read(tmp_path / "again" / "gpt.jsonl")[1] == records.read(tmp_path / "gpt.jsonl")[1]


def test_what_it_refuses_it_says_in_a_line(trained: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path))
    trained.clear()
    head, (about, *lines) = records.read(tmp_path / "gpt.jsonl")
    records.write(tmp_path / "other.jsonl", head, [about | {"batch": 3}, *lines])
    with pytest.raises(SystemExit, match=r"^study\.py: the records to go on from have batch 3, not \d+: run all anew$"):
        run(monkeypatch, "gpt", "--quick", "--out", str(tmp_path), "--have", str(tmp_path / "other.jsonl"))
    assert trained == []

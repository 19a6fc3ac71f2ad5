"""The folder of a run: what it refuses, what it cuts back, and that its checkpoint is whole or the one before."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from torchbelay.lab.part import LabError
from torchbelay.lab.score.folder import ASKED, FORMAT, Folder

OPTIONS: dict[str, Any] = {
    "preset": "tiny",
    "budget": None,
    "lr": None,
    "seed": 0,
    "every": None,
    "compile": False,
    "device": "cpu",
    "processes": 1,
    "resolved": {"steps": 10, "attention": (4,), "dropout": 0.1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "deep" / "run")


def contents(folder: Folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


# Options --------------------------------------------------------------------------------------------------------------


def test_what_was_begun_can_be_read_again(folder: Folder) -> None:
    assert folder.asked() is None
    folder.begin(OPTIONS)
    found = folder.asked()
    assert found is not None
    assert found["format"] == FORMAT
    assert {name: found[name] for name in ASKED} == {name: OPTIONS[name] for name in ASKED}


def test_it_is_begun_only_once(folder: Folder) -> None:
    folder.begin(OPTIONS)
    before = contents(folder)
    folder.begin(OPTIONS | {"seed": 5})
    assert contents(folder) == before


def test_the_same_options_go_on(folder: Folder) -> None:
    folder.refuse_others(OPTIONS)  # nothing is there yet
    folder.refuse_changes(OPTIONS["resolved"])
    folder.begin(OPTIONS)
    folder.refuse_others(OPTIONS)
    folder.refuse_changes(OPTIONS["resolved"])  # a tuple is a list in JSON, and the same


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("preset", "other", "the preset tiny, not the preset other"),
        ("budget", "10m", "no --budget, not --budget 10m"),
        ("lr", 1e-3, "no --lr, not --lr 0.001"),
        ("seed", 3, "--seed 0, not --seed 3"),
        ("every", 7, "no --every, not --every 7"),
        ("compile", True, "no --compile, not --compile"),
        ("device", "cuda", "--device cpu, not --device cuda"),
        ("processes", 2, "1 process, not 2 processes"),
    ],
)
def test_another_option_is_refused_by_name(folder: Folder, name: str, value: object, said: str) -> None:
    folder.begin(OPTIONS)
    before = contents(folder)
    with pytest.raises(LabError) as error:
        folder.refuse_others(OPTIONS | {name: value})
    assert str(error.value) == f"{folder.path} was begun with {said}; go on with that, or choose another --out"
    assert contents(folder) == before


def test_a_preset_that_has_changed_is_refused(folder: Folder) -> None:
    folder.begin(OPTIONS)
    with pytest.raises(LabError, match=r"has changed: dropout was 0\.1, and is 0\.2 now; choose another --out$"):
        folder.refuse_changes(OPTIONS["resolved"] | {"dropout": 0.2})
    with pytest.raises(LabError, match=r"has changed: new was None, and is 1 now"):
        folder.refuse_changes(OPTIONS["resolved"] | {"new": 1})


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"format": 1}', "\x00"])
def test_damaged_options_are_refused(folder: Folder, damage: str) -> None:
    folder.begin(OPTIONS)
    folder.options.write_text(damage)
    with pytest.raises(LabError, match=r"^cannot read .*options\.json .*; move the folder away$"):
        folder.asked()


def test_options_of_another_format_are_refused(folder: Folder) -> None:
    folder.begin(OPTIONS)
    folder.options.write_text(json.dumps(OPTIONS | {"format": 99}))
    with pytest.raises(LabError, match=r"has format 99, this version reads"):
        folder.asked()


def test_a_checkpoint_without_options_is_not_overwritten(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    folder.save({"step": 3})
    with pytest.raises(LabError, match=r"has a checkpoint but no options\.json; choose another --out"):
        folder.asked()


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(LabError, match=r"cannot write .*; choose another folder with --out"):
        Folder(tmp_path / "run").begin(OPTIONS)
    assert (tmp_path / "run").read_text() == "precious"


# Reports --------------------------------------------------------------------------------------------------------------


def reported(folder: Folder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.stats.read_text().splitlines()]


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [2]), (3, [2]), (4, [2, 4]), (9, [2, 4, 6])])
def test_reports_of_later_steps_are_cut_off(folder: Folder, step: int, left: list[int]) -> None:
    folder.begin(OPTIONS)
    folder.cut(step)  # there are none yet
    for at in (2, 4, 6):
        folder.report({"step": at, "loss": None})
    folder.cut(step)
    assert reported(folder) == left


@pytest.mark.parametrize("torn", ['{"step": 6, "lo', '{"step": 6}', "\x00\x00", '{"loss": 1}\n', "[]\n"])
def test_a_report_that_was_not_finished_is_cut_off(folder: Folder, torn: str) -> None:
    folder.begin(OPTIONS)
    for at in (2, 4):
        folder.report({"step": at})
    with folder.stats.open("a") as file:
        file.write(torn)
    folder.cut(10)
    assert reported(folder) == [2, 4]
    folder.report({"step": 6})
    assert reported(folder) == [2, 4, 6]


# Checkpoint -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back(folder: Folder) -> None:
    assert (folder.load(), folder.step()) == (None, 0)
    folder.path.mkdir(parents=True)
    folder.save({"step": 3, "weights": torch.arange(4.0)})
    folder.save({"step": 5, "weights": torch.arange(4.0) * 2})
    state = folder.load()
    assert state is not None
    assert state["weights"].tolist() == [0, 2, 4, 6]
    assert folder.step() == state["step"] == 5
    assert list(contents(folder)) == ["checkpoint.pt"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.mkdir(parents=True)
    folder.save({"step": 3})
    before = contents(folder)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LabError, match=r"^cannot write .*No space left on device.*; the one before is kept$"):
        folder.save({"step": 4})
    assert contents(folder) == before


@pytest.mark.parametrize("keep", [0, 10, 300])
def test_a_damaged_checkpoint_is_refused(folder: Folder, keep: int) -> None:
    folder.path.mkdir(parents=True)
    folder.save({"step": 3, "weights": torch.zeros(1000)})
    folder.checkpoint.write_bytes(folder.checkpoint.read_bytes()[:keep])
    for peek in (False, True):
        with pytest.raises(LabError, match=r"^cannot read .*checkpoint\.pt .*; move the folder away$"):
            folder.load(peek=peek)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


def test_a_checkpoint_runs_no_code(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.path.mkdir(parents=True)
    monkeypatch.chdir(folder.path)
    torch.save({"format": FORMAT, "step": Trap()}, folder.checkpoint)
    with pytest.raises(LabError, match="cannot read"):
        folder.load()
    assert not (folder.path / "trapped").exists()


def test_a_checkpoint_of_another_format_is_refused(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    folder.save({"step": 3, "format": 99})
    with pytest.raises(LabError, match="format 99, this version reads"):
        folder.load()

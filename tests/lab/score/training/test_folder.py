"""The folder of a run: what it refuses, what it cuts back, and that its checkpoint is whole or the one before."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchbelay.lab.part import LabError
from torchbelay.lab.records import write_bytes
from torchbelay.lab.score.training import folder as folder_module
from torchbelay.lab.score.training.folder import FORMAT, OPTION_NAMES, Folder

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
    assert folder.read_options() is None
    folder.begin(OPTIONS)
    found = folder.read_options()
    assert found is not None
    assert found["format"] == FORMAT
    assert {name: found[name] for name in OPTION_NAMES} == {name: OPTIONS[name] for name in OPTION_NAMES}


def test_it_is_begun_only_once(folder: Folder) -> None:
    folder.begin(OPTIONS)
    before = contents(folder)
    folder.begin(OPTIONS | {"seed": 5})
    assert contents(folder) == before


def test_the_same_options_go_on(folder: Folder) -> None:
    folder.refuse_other_options(OPTIONS)  # nothing is there yet
    folder.refuse_changed_plan(OPTIONS["resolved"])
    folder.begin(OPTIONS)
    before = contents(folder)
    folder.refuse_other_options(OPTIONS)
    folder.refuse_changed_plan(OPTIONS["resolved"])  # a tuple is a list in JSON, and the same
    assert contents(folder) == before


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
        folder.refuse_other_options(OPTIONS | {name: value})
    assert str(error.value) == f"{folder.path} was begun with {said}; go on with that, or choose another --out"
    assert contents(folder) == before


def test_a_preset_that_has_changed_is_refused(folder: Folder) -> None:
    folder.begin(OPTIONS)
    with pytest.raises(LabError, match=r"has changed: dropout was 0\.1, and is 0\.2 now; train in another"):
        folder.refuse_changed_plan(OPTIONS["resolved"] | {"dropout": 0.2})
    with pytest.raises(LabError, match=r"has changed: new was None, and is 1 now"):
        folder.refuse_changed_plan(OPTIONS["resolved"] | {"new": 1})


def test_a_run_that_did_not_write_beta1_had_09(folder: Folder) -> None:
    folder.begin(OPTIONS)
    folder.refuse_changed_plan(OPTIONS["resolved"] | {"beta1": 0.9})
    with pytest.raises(LabError, match=r"has changed: beta1 was 0\.9, and is 0\.5 now"):
        folder.refuse_changed_plan(OPTIONS["resolved"] | {"beta1": 0.5})


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"format": 1}', "\x00"])
def test_damaged_options_are_refused(folder: Folder, damage: str) -> None:
    folder.begin(OPTIONS)
    folder.options.write_text(damage)
    with pytest.raises(LabError, match=r"^cannot read .*options\.json .*; move the folder away$"):
        folder.read_options()


def test_options_of_another_format_are_refused(folder: Folder) -> None:
    folder.begin(OPTIONS)
    folder.options.write_text(json.dumps(OPTIONS | {"format": 99}))
    with pytest.raises(LabError, match=r"has format 99, this version reads"):
        folder.read_options()


def test_a_checkpoint_without_options_is_not_overwritten(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    folder.save({"step": 3})
    with pytest.raises(LabError, match=r"is not a run: it has a checkpoint but no options\.json; choose another"):
        folder.read_options()


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(LabError, match=r"cannot write .*; choose another folder with --out"):
        Folder(tmp_path / "run").begin(OPTIONS)
    assert (tmp_path / "run").read_text() == "precious"


# One process at a time ------------------------------------------------------------------------------------------------

BUSY = r"^another process trains in .*run; wait until it ends, or choose another --out$"
needs_locks = pytest.mark.skipif(folder_module.fcntl is None, reason="this system has no such locks")


@needs_locks
def test_it_is_held_by_one_at_a_time(folder: Folder) -> None:
    with folder.locked():
        before = contents(folder)
        with pytest.raises(LabError, match=BUSY), Folder(folder.path).locked():
            raise AssertionError("both are there")
        assert contents(folder) == before
        with (
            pytest.raises(LabError, match=BUSY),
            Folder(folder.path).locked(),
        ):  # it stays locked
            raise AssertionError("both are there")
    with folder.locked():
        pass


@needs_locks
def test_a_lock_file_that_was_left_behind_refuses_no_process(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    folder.lock.touch()
    with folder.locked():
        folder.begin(OPTIONS)
    assert list(contents(folder)) == ["options.json"]


@needs_locks
def test_a_lock_that_is_removed_while_it_is_taken_is_none(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ends in between; who comes next makes another file, and would not see this lock."""
    take = folder_module.fcntl.flock

    for follower in (lambda: None, folder.lock.touch):

        def flock(handle: int, how: int, follower: Callable[[], None] = follower) -> None:
            take(handle, how)
            folder.lock.unlink()
            follower()

        with monkeypatch.context() as patch:
            patch.setattr(folder_module.fcntl, "flock", flock)
            with pytest.raises(LabError, match=BUSY), folder.locked():
                raise AssertionError("held without a lock")


@pytest.mark.parametrize("lacking", ["module", "file system"])
def test_without_locks_it_is_not_held(folder: Folder, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    module = SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4) if lacking == "file system" else None
    monkeypatch.setattr(folder_module, "fcntl", module)
    with folder.locked(), Folder(folder.path).locked():
        folder.begin(OPTIONS)
    assert list(contents(folder)) == ["options.json"]


def test_a_folder_in_which_nothing_was_written_is_gone(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), folder.locked():
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@needs_locks
def test_a_file_in_the_way_of_the_lock_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(LabError, match=r"^cannot write .*run.\.lock: .*; choose another --out$"):
        Folder(tmp_path / "run").locked().__enter__()
    assert (tmp_path / "run").read_text() == "precious"


def test_what_was_left_half_written_is_removed_but_not_what_others_write(folder: Folder) -> None:
    folder.begin(OPTIONS)
    own = [".options.json.ab_c1.part", ".stats.jsonl.x.part", ".samples.png.x.part", ".checkpoint.pt.0123abcd.tmp"]
    for name in (*own, ".samples-w2-seed0.png.x.part", "notes.part"):
        (folder.path / name).touch()
    folder.tidy()
    assert set(contents(folder)) == {"options.json", ".samples-w2-seed0.png.x.part", "notes.part"}


@pytest.mark.parametrize("name", ["options", "samples"])
def test_what_a_kill_leaves_is_known_to_be_so(folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # had it been killed before that
        patch.setattr(os, "replace", lambda *_: None)
        write_bytes(getattr(folder, name), b"half")
    assert len(contents(folder)) == 1
    folder.tidy()
    assert contents(folder) == {}


# Reports --------------------------------------------------------------------------------------------------------------


def reported(folder: Folder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.stats.read_text().splitlines()]


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [2]), (3, [2]), (4, [2, 4]), (9, [2, 4, 6])])
def test_reports_of_later_steps_are_cut_off(folder: Folder, step: int, left: list[int]) -> None:
    folder.begin(OPTIONS)
    folder.cut_reports(step)  # there are none yet
    for at in (2, 4, 6):
        folder.report({"step": at, "loss": None})
    folder.cut_reports(step)
    assert reported(folder) == left


@pytest.mark.parametrize("torn", ['{"step": 6, "lo', '{"step": 6}', "\x00\x00", '{"loss": 1}\n', "[]\n"])
def test_a_report_that_was_not_finished_is_cut_off(folder: Folder, torn: str) -> None:
    folder.begin(OPTIONS)
    for at in (2, 4):
        folder.report({"step": at})
    with folder.stats.open("a") as file:
        file.write(torn)
    folder.cut_reports(10)
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
    with pytest.raises(LabError, match=r"^cannot write .*No space left on device.*; the previous one is kept$"):
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

"""`torchbelay synthesize`: what it prints, writes and refuses."""

import sys
from pathlib import Path

import pytest
import torch

import torchbelay as tb
from helpers.recorded_runs import Walk
from helpers.small import mlp, train
from torchbelay.cli import main, progress
from torchbelay.snapshots import Recorder, synthesize
from torchbelay.snapshots.opening import open_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots")
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    with Recorder(belay, path, every=20):
        train(model, optimizer, 210)
    return path


def call(*words: object) -> int:
    return main(["synthesize", *map(str, words)])


def test_a_list_says_what_the_folder_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(folder, "--list") == 0
    head, *rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [cell.strip() for cell in head if cell.strip()] == ["average", "method", "snapshots", "steps", "size"]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0][:3] == ["(weights)", "1", "0"]
    assert cells[1][:4] == ["average", "ema(decay=0.9)", "11", "20 to 210"]
    assert cells[2][:3] == ["power_05", "power_ema(sigma_rel=0.05)", "11"]


def test_a_target_is_written_as_the_library_makes_it(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "avg.safetensors"
    assert call(folder, "--target", "ema(half_life=30)", "--at", "200", "--out", out) == 0
    printed = capsys.readouterr()
    expected = synthesize(folder, "ema(half_life=30)", at=200)
    assert str(expected) in printed.out
    assert "100%" in printed.err
    with open_checkpoint(out) as file:
        found = {name: file.read(name) for name in file.names}
    state = expected.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    mlp().load_state_dict(found, strict=True)


def test_without_out_the_error_is_told_and_nothing_is_written(
    folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    assert call(folder, "--target", "window(60)", "--norm", "profile") == 0
    assert "window(60) at step 210 from 34 snapshots: predicted error" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_has_a_table_a_picture_and_a_file_per_target(folder: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = ["--sweep", "ema(half_life=[1, 20, 40])", "--picture", tmp_path / "sweep.png", "--out", tmp_path / "all"]
    assert call(folder, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["target", "predicted", "error"]
    assert "above --max-error 0.01" in lines[1]
    assert "above" not in lines[2]
    assert (tmp_path / "sweep.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [
        "ema(half_life=20.0).safetensors",
        "ema(half_life=40.0).safetensors",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --list, --target and --sweep"),
        (["--list", "--target", "window(5)"], "got --list and --target"),
        (["--target", "windows(5)"], "choose from"),
        (["--target", "__import__('os')"], "choose from"),
        (["--target", "window([5, 6])"], "tells 2 targets"),
        (["--target", "window(5)", "--at", "5000"], "at=5000: the snapshots in"),
        (["--target", "ema(half_life=1)"], "and --max-error=0.01: record more snapshots"),
        (["--target", "window(60)", "--max-error", "nan"], "--max-error=nan"),
        (["--target", "heavy_ball(0.9)"], "depend on the learning rate"),
        (["--target", "window(60)", "--picture", "profiles.jpg"], "does not end in .png"),
        (["--target", "window(60)", "--picture", "nowhere/profiles.png"], "there is no folder nowhere"),
        (["--target", "window(60)", "--out", "nowhere/avg.safetensors"], "there is no folder"),
        (["--target", "window(60)", "--out", "avg.pt"], "give a name that ends in .safetensors"),
        (["--target", "window(60)", "--out", "."], "--out='.' is a folder"),
        (["--sweep", "window([])"], "'window([])' has a list without values"),
        (["--target", "window(60)", "--norm", "l1"], "invalid choice: 'l1'"),
        (["--sweep", "window([60, 500])", "--out", "all"], "asks for more steps than the 210"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch, capsys, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(folder, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchbelay synthesize: ")
    assert error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_snapshots_is_refused(tmp_path: Path, capsys) -> None:
    assert call(tmp_path, "--list") == 2
    assert "holds no snapshots" in capsys.readouterr().err
    assert call(tmp_path / "none", "--list") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_what_exists_is_not_replaced_without_being_asked(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "avg.safetensors"
    out.write_text("mine")
    assert call(folder, "--target", "window(60)", "--out", out) == 2
    assert "exists; give another --out, or --overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert call(folder, "--target", "window(60)", "--out", out, "--overwrite") == 0
    assert out.stat().st_size > 100


def test_a_snapshot_is_not_replaced_by_what_is_made_of_it(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "link").symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("000000020.average.average.safetensors", "000000000.weights.safetensors"):
        for place in (folder / name, tmp_path / "link" / name):
            assert call(folder, "--target", "window(60)", "--out", place, "--overwrite") == 2
            assert "has the name of a snapshot among the others; give another name" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has the name of a snapshot"):
        synthesize(folder, "window(60)").save(folder / "000000020.average.average.safetensors")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert call(folder, "--target", "window(60)", "--out", folder / "mean.safetensors") == 0
    (folder / "mean.safetensors").unlink()


def test_ctrl_c_leaves_nothing_half_written(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def stop(self: progress.Bar, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(progress.Bar, "__call__", stop)
    assert call(folder, "--target", "window(60)", "--out", tmp_path / "avg.safetensors") == 130
    assert "stopped; nothing is half-written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_cure_is_told_before_the_work(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["--target", "window(60)", "--picture", tmp_path / "a.png", "--out", tmp_path / "avg.safetensors"]
    assert call(folder, *words) == 2
    assert "--picture needs matplotlib: pip install '.[lab]' in a clone of torchbelay" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_warnings_are_notes(tmp_path: Path, capsys) -> None:
    run = Walk(size=20)
    with run.record(tmp_path, every=5):
        run.steps(60)
    assert call(tmp_path, "--target", "Spring(k=1, m1=60, m2=30)", "--max-error", "1") == 0
    printed = capsys.readouterr()
    assert "torchbelay synthesize: note: Spring(k=1.0, m1=60.0, m2=30.0) pulls the weights" in printed.err
    (tmp_path / "000000010.average.power_05.safetensors").write_bytes(b"damaged")
    assert call(tmp_path, "--list") == 0
    assert "note: a snapshot cannot be used" in capsys.readouterr().err


def test_a_resumed_run_is_listed_as_such(tmp_path: Path, capsys) -> None:
    run = Walk(size=5)
    with run.record(tmp_path, every=5):
        run.steps(10)
    with run.record(tmp_path, every=5):
        run.steps(10)
    assert call(tmp_path, "--list") == 0
    assert "resumed after step 10" in capsys.readouterr().out


def test_a_run_that_began_again_is_listed_as_such(tmp_path: Path, capsys) -> None:
    run = Walk(size=5)
    with run.record(tmp_path, every=5):
        run.steps(7)
        run.belay.reset()
        run.steps(5)
    with run.record(tmp_path, every=5):
        run.steps(10)
    assert call(tmp_path, "--list") == 0
    printed = capsys.readouterr().out
    assert "resumed after step 12\n" in printed
    assert "begun again by reset() after step 7\n" in printed


def test_the_help_has_examples(capsys) -> None:
    assert main(["synthesize", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--target 'ema(half_life=2000)' --at 40000 --out avg.safetensors" in printed
    assert "decay(1000, 'cosine')" in printed

"""Greedy soups: which checkpoints are kept, the log, and errors."""

import json
import math
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import load, save_sharded
from torchbelay.snapshots import greedy


class Judge:
    """Scores a checkpoint by how near its one weight is to a number, and remembers what it was asked."""

    def __init__(self, wanted: float, sign: int = -1) -> None:
        self.wanted = wanted
        self.sign = sign
        self.asked: list[float] = []

    def __call__(self, path: Path) -> float:
        value = (load(path) if path.is_dir() else torch.load(path))["w"].item()
        self.asked.append(value)
        return self.sign * abs(value - self.wanted)


def checkpoints(folder: Path, *values: float) -> list[Path]:
    for value in values:
        torch.save({"w": torch.tensor([value])}, folder / f"{value:g}.pt")
    return [folder / f"{value:g}.pt" for value in values]


@pytest.mark.parametrize("lower", [False, True])
def test_checkpoints_are_tried_from_the_best_and_kept_if_they_help(tmp_path: Path, lower: bool) -> None:
    """Near 2.0: 3 alone is best; with 0 it is 1.5, better; with 4.2 it is 2.4, better still; with 9 it is worse."""
    judge = Judge(2.0, 1 if lower else -1)
    soup = greedy(checkpoints(tmp_path, 9.0, 0.0, 3.0, 4.2), tmp_path / "soup.pt", judge, lower=lower)
    assert judge.asked[:4] == pytest.approx([9, 0, 3, 4.2])
    assert judge.asked[4:] == pytest.approx([1.5, 2.4, 4.05])
    tried = [tuple(Path(m).stem for m in members) for members in soup.scores]
    assert tried == [("9",), ("0",), ("3",), ("4.2",), ("0", "3"), ("0", "3", "4.2"), ("9", "0", "3", "4.2")]
    assert [Path(member).stem for member in soup.members] == ["0", "3", "4.2"]
    assert torch.load(tmp_path / "soup.pt")["w"].item() == pytest.approx(2.4)
    assert abs(soup.score) == pytest.approx(0.4)
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]


def test_the_best_checkpoint_alone_may_win(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path, 1.0, 5.0)
    with pytest.warns(UserWarning, match="is the only checkpoint: the merge is a copy"):
        soup = greedy(paths, tmp_path / "soup.pt", Judge(1.0))
    assert soup.members == (str(paths[0]),)
    assert torch.load(tmp_path / "soup.pt")["w"].item() == 1.0


def test_folders_are_evaluated_as_folders(tmp_path: Path) -> None:
    paths = [save_sharded(tmp_path / str(k), {"w": torch.tensor([float(k)])}, 1) for k in (1, 2)]
    soup = greedy(paths, tmp_path / "soup", Judge(1.4))
    assert len(soup.members) == 2
    assert load(tmp_path / "soup")["w"].item() == 1.5


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path, 1.0, 2.0, 9.0)
    log = tmp_path / "log.jsonl"
    first = Judge(1.4)

    def until(path: Path) -> float:
        if len(first.asked) == 2:
            raise KeyboardInterrupt
        return first(path)

    with pytest.raises(KeyboardInterrupt):
        greedy(paths, tmp_path / "soup.pt", until, log=log)
    assert [json.loads(line)["score"] for line in log.read_text().splitlines()] == pytest.approx([-0.4, -0.6])
    assert not (tmp_path / "soup.pt").exists()
    with open(log, "a") as file:
        file.write('{"members": ["half a li')  # killed while it wrote
    second = Judge(1.4)
    said: list[str] = []
    soup = greedy(paths, tmp_path / "soup.pt", second, log=log, say=said.append)
    assert second.asked == pytest.approx([9.0, 1.5, 4.0])
    assert [line.split()[1:] for line in said] == [
        ["1.pt"],
        ["2.pt"],
        ["9.pt"],
        ["1.pt,", "2.pt"],
        ["1.pt,", "2.pt,", "9.pt"],
    ]
    assert len(log.read_text().splitlines()) == 5
    third = Judge(1.4)
    again = greedy(paths, tmp_path / "soup.pt", third, log=log, overwrite=True)
    assert third.asked == []
    assert (again.members, again.scores) == (soup.members, soup.scores)


def test_nan_is_the_worst_score(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path, 1.0, 2.0, 9.0)
    judge = Judge(1.4)
    soup = greedy(paths, tmp_path / "soup.pt", lambda path: math.nan if path.stem == "2" else judge(path))
    assert soup.members == tuple(map(str, paths[:2]))  # the mean has a score although 2 alone has none
    with pytest.raises(ValueError, match="evaluate returned no finite score for any checkpoint"):
        greedy(paths, tmp_path / "other.pt", lambda path: math.nan)


def test_what_cannot_be_merged_is_refused_before_the_first_evaluation(tmp_path: Path) -> None:
    paths = checkpoints(tmp_path, 1.0, 2.0)
    torch.save({"v": torch.ones(1)}, tmp_path / "other.pt")
    (tmp_path / "log").write_text("hello\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n half")
    (tmp_path / "no line").write_bytes(b"my notes")
    judge = Judge(1.0)
    for given, out, log, message in (
        ([*paths, tmp_path / "other.pt"], "soup.pt", None, "not of one model"),
        ([*paths, paths[0]], "soup.pt", None, "a checkpoint is given twice"),
        ([*paths, f"{tmp_path}/./1.pt"], "soup.pt", None, "a checkpoint is given twice"),
        (paths, "2.pt", None, "is or holds the checkpoint"),
        (paths, "soup.pt", tmp_path / "log", "has no score in line 1; give the log of a soup"),
        (paths, "soup.pt", tmp_path / "bytes", "has no score in line 1; give the log of a soup"),
        (paths, "soup.pt", tmp_path / "no line", "has no score in line 1; give the log of a soup"),
        (paths, "soup.pt", tmp_path / "soup.pt", "log=.* is also where the soup goes; give another file"),
        (paths, "soup.pt", tmp_path / "none" / "log", "log=.*there is no folder .*; make it first"),
        (paths, "soup.pt", tmp_path, "log=.* is a folder; give the name of a file in it"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            greedy(given, tmp_path / out, judge, log=log)
    assert judge.asked == []
    assert (tmp_path / "bytes").read_bytes() == b"\xff\xfe\n half"  # what is not a log is not touched
    assert (tmp_path / "no line").read_bytes() == b"my notes"

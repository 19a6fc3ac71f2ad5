"""Killed at any moment and started again, a training ends bit for bit where an undisturbed one does.

5 kills, or the number in TORCHBELAY_KILLS, which `make soak` sets.
"""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import killed_training as program
from helpers.problems import different, everything
from helpers.small import same

KILLS = int(os.environ.get("TORCHBELAY_KILLS", "5"))
STEPS, FEW = 30 * KILLS, 20

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")]


class Result:
    """The last checkpoint, as something whose leaves can be compared."""

    def __init__(self, folder: Path) -> None:
        self.loaded: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)

    def state_dict(self) -> dict[str, Any]:
        return self.loaded


@pytest.fixture(scope="module")
def server() -> Any:
    """A server of processes that have imported everything, so that a kill hits the training and not an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([program.__name__, "torch._dynamo"])  # the latter at the first optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server of Python 3.11 does not take over sys.path
        first = context.Process(target=time.sleep, args=(0,))
        first.start()
        first.join()
    assert first.exitcode == 0
    return context


def finish(server: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Let the training come to its end, and return its last state."""
    process = server.Process(target=program.main, args=(folder, steps))
    process.start()
    process.join()
    assert process.exitcode == 0
    return everything(result=Result(folder))


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Return the average beside the checkpoint; a file that exists loads strictly, whatever happened."""
    weights = load_file(folder / "average.safetensors")
    program.Transformer().load_state_dict(weights, strict=True)
    return weights


@pytest.fixture(scope="module")
def short(server: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a short training that runs undisturbed."""
    return finish(server, tmp_path_factory.mktemp("short"), FEW)


def test_killed_at_random_moments_it_ends_where_an_undisturbed_run_does(
    server: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    began = time.monotonic()
    expected = finish(server, tmp_path_factory.mktemp("undisturbed"), STEPS)
    whole, dice = time.monotonic() - began, random.Random(KILLS)
    folders, kills = [tmp_path / "0"], 0
    folders[0].mkdir()
    while kills < KILLS:
        process = server.Process(target=program.main, args=(folders[-1], STEPS))
        process.start()
        while kills == 0 and process.is_alive() and not (folders[-1] / "checkpoint.pt").exists():
            time.sleep(0.01)  # one life at least leaves something to go on from, however busy the machine is
        process.join(timeout=dice.uniform(0.2, 2.0) * whole / KILLS)
        process.kill()
        process.join()
        if process.exitcode == 0:  # it had come to its end before: begin another
            folders.append(tmp_path / str(len(folders)))
            folders[-1].mkdir()
            continue
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        if (folders[-1] / "checkpoint.pt").exists():
            assert Result(folders[-1]).loaded["done"] > 0  # a checkpoint that exists is whole
        if (folders[-1] / "average.safetensors").exists():
            exported(folders[-1])
    finish(server, folders[-1], STEPS)
    weights = exported(folders[-1])
    assert same(weights["position"], expected["/result/belay/averages/average/weights/position"])
    resumed = 0
    for folder in folders:
        assert different(everything(result=Result(folder)), expected) == []
        lives = [int(line) for line in (folder / "lives.txt").read_text().splitlines()]
        assert lives == sorted(lives)  # never back behind a checkpoint
        resumed += sum(life > 0 for life in lives)
    assert resumed > 0  # and it did go on from where it had been


def half_written(count: int) -> None:
    """Let the process die when half of the bytes of a checkpoint are on the disk."""
    right, calls = torch.save, []

    def wrong(state: Any, file: Any) -> None:
        calls.append(None)
        if len(calls) < count:
            right(state, file)
            return
        right(state, file)
        file.flush()
        os.truncate(file.name, os.path.getsize(file.name) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = wrong


def die_in(name: str, *, before: bool) -> Callable[[int], None]:
    """Let the process die right before or after a numbered call of a function of `os` that writes a checkpoint."""

    def prepare(count: int) -> None:
        right, calls = getattr(os, name), []

        def wrong(*arguments: Any) -> None:
            if sys._getframe(1).f_code is not program.save.__code__:
                right(*arguments)
                return
            calls.append(None)
            if len(calls) == count and before:
                os.kill(os.getpid(), signal.SIGKILL)
            right(*arguments)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, wrong)

    return prepare


MOMENTS = {
    "half of it written": half_written,
    "written, not yet on the disk": die_in("fsync", before=True),
    "on the disk, not yet renamed": die_in("replace", before=True),
    "renamed": die_in("replace", before=False),
}


def doomed(moment: str, count: int, folder: Path) -> None:
    MOMENTS[moment](count)
    program.main(folder, FEW)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_a_checkpoint_is_written_the_last_whole_one_counts(
    server: Any, short: dict[str, Any], tmp_path: Path, moment: str, count: int
) -> None:
    process = server.Process(target=doomed, args=(moment, count, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole = count if moment == "renamed" else count - 1
    assert (tmp_path / "checkpoint.pt").exists() == (whole > 0)
    if count > 1:  # a first checkpoint that was never finished leaves nothing, and the run begins again
        assert Result(tmp_path).loaded["done"] == whole * program.EVERY
    assert different(finish(server, tmp_path, FEW), short) == []
    lives = (tmp_path / "lives.txt").read_text().split()
    assert lives == ["0", str(whole * program.EVERY)]


def test_the_program_runs_by_itself_and_gives_the_same(short: dict[str, Any], tmp_path: Path) -> None:
    subprocess.run([sys.executable, program.__file__, str(tmp_path), str(FEW)], check=True)
    assert different(everything(result=Result(tmp_path)), short) == []


@pytest.mark.parametrize("part", ["belay", "optimizer", "schedule", "dice"])
def test_the_comparison_notices_what_a_checkpoint_forgets(short: dict[str, Any], part: str) -> None:
    """Without this, the tests above could pass for a training whose parts have no effect."""
    half, other = program.Training(FEW), program.Training(FEW)
    for _ in range(FEW // 2):
        half.step()
    state = half.state_dict()
    state[part] = torch.Generator().manual_seed(9).get_state() if part == "dice" else getattr(other, part).state_dict()
    other.load_state_dict(state)
    while other.done < FEW:
        other.step()
    weights = other.model.state_dict()
    assert not same(weights, {name: short[f"/result/model/{name}"] for name in weights})

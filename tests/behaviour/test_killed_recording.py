"""Killed at any moment, a recording leaves a folder that can be used, and goes on in it after a resume.

8 kills, or the number in TORCHBELAY_KILLS, which `make soak` sets.
"""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import killed_recording as program
from torchbelay.snapshots import synthesize, window
from torchbelay.snapshots.folder import Folder

KILLS = int(os.environ.get("TORCHBELAY_KILLS", "8"))
STEPS = 90

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")]

Expected = dict[tuple[str | None, int], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def server() -> Any:
    """A server of processes that have imported everything, so that a kill hits the training and not an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([program.__name__, "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        first = context.Process(target=time.sleep, args=(0,))
        first.start()
        first.join()
    assert first.exitcode == 0
    return context


@pytest.fixture(scope="module")
def expected() -> Expected:
    """The averages after every step of an undisturbed run."""
    run = program.Training()
    found: Expected = {(None, 0): {name: p.detach().clone() for name, p in run.model.named_parameters()}}
    while run.belay.step < STEPS:
        run.step()
        for name in ("average", "power_05", "power_10"):
            found[name, run.belay.step] = run.belay.average_state_dict(name)
    return found


def run(server: Any, target: Callable[..., None], *arguments: Any) -> int:
    """Run something in a process of the server, and return its exit status."""
    process = server.Process(target=target, args=arguments)
    process.start()
    process.join()
    return int(process.exitcode)


def check(folder: Path, expected: Expected, recwarn: pytest.WarningsRecorder) -> int:
    """Read everything that a folder says it has; return the last step."""
    found = Folder(folder)
    assert not [str(each.message) for each in recwarn]  # nothing is damaged
    for each in found.snapshots:
        with each.open() as file:
            for name in file.names:
                assert torch.equal(file.read(name), expected[each.average, each.step][name])
    if found.last > 40:
        made = synthesize(folder, window(20), max_error=2.0).state_dict()  # snapshots that waited in memory are lost
        assert set(made) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    return found.last


def test_killed_at_random_moments_the_folder_is_usable(
    server: Any, expected: Expected, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    dice, last, kills = random.Random(KILLS), [], 0
    while kills < KILLS:
        process = server.Process(target=program.main, args=(tmp_path, STEPS))
        process.start()
        process.join(timeout=dice.uniform(0.1, 0.6))
        process.kill()
        process.join()
        kills += 1
        if (tmp_path / "snapshots").exists():
            last.append(check(tmp_path / "snapshots", expected, recwarn))
        if process.exitcode == 0:
            break
    assert run(server, program.main, tmp_path, STEPS) == 0
    assert check(tmp_path / "snapshots", expected, recwarn) == STEPS
    assert not list((tmp_path / "snapshots").glob(".*"))
    steps = Folder(tmp_path / "snapshots").steps
    assert set(steps) <= {0, *range(3, STEPS + 1, 3), *range(10, STEPS + 1, 10)}
    assert len(steps) > 5


def die(name: str, count: int, *, before: bool) -> None:
    """Let the process die right before or after a numbered call of a function of `os`, whichever thread makes it."""
    right, numbers = getattr(os, name), itertools.count(1)

    def wrong(*arguments: Any, **more: Any) -> Any:
        number = next(numbers)
        if number == count and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = right(*arguments, **more)
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, wrong)


def doomed(prepare: Callable[[], None], folder: Path, steps: int = STEPS) -> None:
    prepare()
    program.main(folder, steps)


class Moment:
    """Dies at a numbered call; a class, because a process of the server must be told what to do."""

    def __init__(self, name: str, count: int, *, before: bool) -> None:
        self.name, self.count, self.before = name, count, before

    def __call__(self) -> None:
        die(self.name, self.count, before=self.before)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(
    ("name", "before"), [("fsync", True), ("replace", True), ("replace", False), ("truncate", False)]
)
def test_killed_while_a_snapshot_is_written_the_whole_ones_count(
    server: Any,
    expected: Expected,
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    name: str,
    before: bool,
    count: int,
) -> None:
    assert run(server, doomed, Moment(name, count, before=before), tmp_path) == -signal.SIGKILL
    check(tmp_path / "snapshots", expected, recwarn)
    assert run(server, program.main, tmp_path, STEPS) == 0
    assert check(tmp_path / "snapshots", expected, recwarn) == STEPS


def test_killed_while_abandoned_steps_are_removed_none_of_them_comes_back(
    server: Any, expected: Expected, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run(server, program.main, tmp_path, 60)
    old = program.Training()
    for _ in range(40):
        old.step()
    torch.save(old.state_dict(), tmp_path / "checkpoint.pt")  # all later steps are to be taken again
    # 49 steps: the training, which may run ahead of the thread that writes, must not save its next checkpoint
    assert run(server, doomed, Moment("unlink", 2, before=True), tmp_path, 49) == -signal.SIGKILL
    assert check(tmp_path / "snapshots", expected, recwarn) == 42
    assert len(Folder(tmp_path / "snapshots").stale) > 10
    assert run(server, program.main, tmp_path, 45) == 0
    found = Folder(tmp_path / "snapshots")
    assert found.steps == [0, *range(3, 43, 3), 45]
    assert found.stale == []

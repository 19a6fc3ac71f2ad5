"""Killed at any moment, a merge leaves the old checkpoint or the new one, never a mixture.

10 kills per layout, or twice the number in TORCHBELAY_KILLS, which `make soak` sets.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import killed_merge as program
from helpers.checkpoints import SAVE, State, load

KILLS = 2 * int(os.environ.get("TORCHBELAY_KILLS", "5"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="folders are exchanged in one step"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture(scope="module")
def server() -> Any:
    """A server of processes that have imported everything, so that a kill hits the merge and not an import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([program.__name__, "torch.distributed.checkpoint"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server of Python 3.11 does not take over sys.path
        first = context.Process(target=time.sleep, args=(0,))
        first.start()
        first.join()
    assert first.exitcode == 0
    return context


def checkpoints(folder: Path, layout: str, value: float) -> list[Path]:
    """Save two checkpoints whose mean is `value` everywhere."""
    paths = []
    for sign in (-1, 1):
        state = {f"w{k}": torch.full((200, 200), value + sign) for k in range(12)}
        paths.append(SAVE[layout](folder / f"{value:g}{'-' if sign < 0 else '+'}", state))
        if paths[-1].is_dir():
            (paths[-1] / "marker.txt").write_text(f"{value:g}")
    return paths


def value_of(out: Path) -> float:
    """Return the one value of a checkpoint; fail if it is damaged or a mixture."""
    state: State = load(out)
    values = {value.item() for tensor in state.values() for value in tensor.unique()}
    assert len(state) == 12
    assert len(values) == 1, values
    (value,) = values
    if out.is_dir():
        assert (out / "marker.txt").read_text() == f"{value:g}"
    return value


@pytest.mark.parametrize("layout", SAVE)
def test_killed_at_random_moments_it_leaves_the_old_or_the_new_checkpoint(
    server: Any, tmp_path: Path, layout: str
) -> None:
    sets = [checkpoints(tmp_path, layout, value) for value in (3.0, 5.0)]
    out = tmp_path / "here" / f"out{sets[0][0].suffix}"
    out.parent.mkdir()
    began = time.monotonic()
    process = server.Process(target=program.once, args=(sets[0], out))
    process.start()
    process.join()
    assert value_of(out) == 3.0
    whole = time.monotonic() - began
    dice = random.Random(layout)
    seen = []
    for _ in range(KILLS):
        process = server.Process(target=program.forever, args=(sets, out))
        process.start()
        time.sleep(dice.uniform(0.05, 2.5) * whole)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        seen.append(value_of(out))
    assert {*seen} <= {3.0, 5.0}
    process = server.Process(target=program.once, args=(sets[1], out))
    process.start()
    process.join()
    assert value_of(out) == 5.0
    if out.is_dir():  # what the killed ones had left is gone
        assert [item.name for item in out.parent.iterdir() if item.suffix != ".read"] == ["out"]
    for paths in sets:  # the inputs are what they were
        for path in paths:
            (value,) = {value.item() for tensor in load(path).values() for value in tensor.unique()}
            assert value in (2.0, 4.0, 6.0)

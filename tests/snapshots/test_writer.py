"""A step never waits for the disk: snapshots are written in the background, or left out, and errors are told."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchbelay as tb
from helpers.recorded_runs import Walk
from torchbelay.snapshots import Recorder, recorder, synthesize, window, writer
from torchbelay.snapshots.folder import Folder


def test_a_step_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote, go = [], threading.Event()
    write = recorder.write

    def slowly(*arguments: Any) -> None:
        go.wait(600)
        wrote.append(None)
        write(*arguments)

    monkeypatch.setattr(recorder, "write", slowly)
    run = Walk(size=1000)
    made = run.record(tmp_path, every=2)
    run.steps(10)
    assert wrote == []  # five snapshots are due, none is written, and the training has not waited
    go.set()
    made.close()
    assert Folder(tmp_path).steps == [0, 2, 4, 6, 8, 10]
    expected = synthesize(tmp_path, tb.methods.power_ema(sigma_rel=0.05)).state_dict()["weight"]
    torch.testing.assert_close(expected, run.average("power_05"))  # what was copied is not what moved on since


class Copied(TorchDispatchMode):
    """Counts the bytes that operations write to memory which did not exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {given.untyped_storage().data_ptr() for given in tree_leaves(args) if isinstance(given, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.bytes += made.untyped_storage().nbytes()
        return result


def test_a_step_costs_the_copy_of_the_tensors(tmp_path: Path) -> None:
    """While the disk is busy, a step with a snapshot copies each average once, and does nothing else that is large."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    model.weight.grad, model.bias.grad = torch.randn(100, 100), torch.randn(100)

    def new_memory() -> int:
        with Copied() as copied:
            optimizer.step()
        return copied.bytes

    new_memory()  # the first step makes buffers to compute in
    plain = new_memory()
    go = threading.Event()
    made = Recorder(belay, tmp_path, every=1)
    made.wait()
    made._background.add(lambda: go.wait(600) and None, 0)  # the disk is busy
    recorded = [new_memory() for _ in range(20)]
    waiting = len(made._background.waiting)
    go.set()
    made.close()
    assert waiting == 21
    averages = 3 * 4 * (100 * 100 + 100)
    assert set(recorded) == {plain + averages}


def test_a_disk_that_is_too_slow_costs_snapshots_and_not_time(tmp_path: Path, monkeypatch: Any) -> None:
    go = threading.Event()
    write = recorder.write
    monkeypatch.setattr(recorder, "write", lambda *given: go.wait(600) and write(*given))
    monkeypatch.setattr(recorder, "MOST_WAITING", 1)
    run = Walk(size=10)
    made = run.record(tmp_path, every=5)  # the first weights wait
    run.steps(5)
    with pytest.warns(tb.BelayWarning, match="the snapshots of step 10 are left out: .* raise every=5"):
        run.steps(5)
    go.set()
    made.wait()
    run.steps(5)
    made.close()
    assert made.recorded == Folder(tmp_path).steps == [0, 5, 15]
    found = synthesize(tmp_path, window(5), max_error=2.0)  # and it is known what is missing
    assert {step for _, step in found.weights} == {0, 5, 15}


def test_errors_of_writing_are_told_at_the_next_snapshot_and_by_wait(tmp_path: Path, monkeypatch: Any) -> None:
    write, broken = recorder.write, [True]

    def sometimes(*arguments: Any) -> None:
        if broken[0]:
            raise OSError(28, "No space left on device")
        write(*arguments)

    run = Walk(size=10)
    made = run.record(tmp_path, every=5)
    made.wait()
    monkeypatch.setattr(recorder, "write", sometimes)
    run.steps(5)
    made._background.wait()
    broken[0] = False
    with pytest.warns(tb.BelayWarning, match="a snapshot was not written: OSError: .*No space left"):
        run.steps(5)
    made.wait()
    broken[0] = True
    run.steps(5)
    with pytest.raises(OSError, match="No space left"):
        made.wait()
    broken[0] = False
    made.close()
    assert 10 in Folder(tmp_path).steps
    assert 5 not in Folder(tmp_path).steps


@pytest.mark.slow
def test_a_program_that_ends_writes_what_is_waiting(tmp_path: Path) -> None:
    program = (
        "import sys, time, torch, torchbelay as tb\n"
        "from torchbelay.snapshots import recorder\n"
        "write = recorder.write\n"
        "recorder.write = lambda *given: (time.sleep(0.2), write(*given))\n"
        "model = torch.nn.Linear(3, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))\n"
        f"made = tb.snapshots.Recorder(belay, {str(tmp_path)!r}, every=1)\n"
        "model(torch.ones(1, 3)).sum().backward(); optimizer.step()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert Folder(tmp_path).steps == [0, 1]


def test_background_jobs_are_done_in_order_and_problems_told_once() -> None:
    done: list[int] = []
    background = writer.Background()

    def job(number: int) -> None:
        if number == 2:
            raise ValueError("two")
        done.append(number)

    for number in range(5):
        background.add(lambda number=number: job(number), 10)
    background.wait()
    assert done == [0, 1, 3, 4]
    assert [str(problem) for problem in background.problems()] == ["two"]
    assert background.problems() == []
    assert background.waiting == []
    background.add(lambda: done.append(9), 1)  # a new thread
    background.wait()
    assert done[-1] == 9

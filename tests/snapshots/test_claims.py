"""A folder of snapshots is that of one run: other processes are seen by a lock, which ends with them."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchbelay as tb
from helpers.recorded_runs import Walk
from helpers.root import ROOT
from torchbelay.snapshots import claims, files
from torchbelay.snapshots.folder import Folder

fcntl = pytest.importorskip("fcntl", reason="Windows has no locks of this kind")
TAKEN = r"folder='.*run' is where another process records a run, .* give each a folder of its own"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder to which another process records; the lock is that of another handle, which is all that counts."""
    folder = tmp_path / "run"
    folder.mkdir()
    handle = files.lock(folder)
    assert handle is not None
    yield folder
    os.close(handle)


def is_free(folder: Path) -> bool:
    """Whether another process could record there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_a_run_that_begins_is_refused_in_the_folder_of_another_process(elsewhere: Path) -> None:
    run = Walk(size=3)
    with pytest.raises(ValueError, match=TAKEN):
        run.record(elsewhere, every=5)
    assert everything(elsewhere) == {}
    assert run.belay._stepper.observers == ()
    run.steps(2)  # and training goes on without a record


def test_a_resumed_run_goes_on_there_with_a_warning(elsewhere: Path) -> None:
    run = Walk(size=3)
    run.steps(5)
    with pytest.warns(tb.BelayWarning, match="another process still records to folder='.*run': if it is not about to"):
        recorder = run.record(elsewhere, every=5)
    run.steps(5)
    recorder.close()
    assert Folder(elsewhere).steps == [10]


def test_a_folder_is_held_until_its_last_recorder_is_closed_and_no_file_is_left(tmp_path: Path) -> None:
    run, folder = Walk(size=3), tmp_path / "run"
    first = run.record(folder, every=5)
    first.wait()
    second = run.record(folder, every=5)
    assert not is_free(folder)
    first.close()
    assert not is_free(folder)
    second.close()
    assert is_free(folder)
    assert all(name.endswith(".safetensors") for name in os.listdir(folder))


def test_a_recorder_that_is_dropped_or_stopped_holds_nothing(tmp_path: Path) -> None:
    def stopped() -> None:
        with Walk(size=3).record(tmp_path, every=5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert is_free(tmp_path)
    dropped = Walk(size=3).record(tmp_path, every=5)
    dropped.wait()
    del dropped
    Walk(size=3).record(tmp_path, every=5).close()
    assert is_free(tmp_path)


def test_a_recorder_that_is_refused_holds_nothing(tmp_path: Path) -> None:
    run = Walk(size=3)
    with run.record(tmp_path, every=5):
        run.steps(5)
    with pytest.raises(ValueError, match="holds snapshots up to step 5") as refused:
        Walk(size=3).record(tmp_path, every=5)
    assert refused.traceback  # which keeps the Recorder
    assert is_free(tmp_path)


def test_the_ranks_of_one_run_do_not_refuse_each_other(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank writes, and only that rank locks."""
    monkeypatch.setattr(claims, "is_first_rank", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Walk(size=3).record(elsewhere, every=5).close()


@pytest.mark.parametrize("lacking", ["system", "file system"])
def test_without_locks_every_run_has_its_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    if lacking == "system":
        monkeypatch.setattr(claims, "lock", lambda folder: None)
    else:
        monkeypatch.setattr(files.fcntl, "flock", flock)
    run = Walk(size=3)
    with run.record(elsewhere, every=5):
        run.steps(5)
    assert Folder(elsewhere).steps == [0, 5]


RUN = """
import os, sys, time
from pathlib import Path
from helpers.recorded_runs import Walk

run = Walk(size=3)
recorder = run.record(Path(sys.argv[1]), every=5)
recorder.wait()
worker = os.fork()
if worker == 0:
    os.write(1, b"ready\\n")  # a whole line at once, for two processes write here
    time.sleep(600)
os.write(1, f"{worker}\\n".encode())
time.sleep(600)
"""


@pytest.mark.slow
def test_a_real_process_is_seen_and_one_that_was_killed_is_not_even_if_its_worker_lives_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-c", RUN, str(folder)]
    worker = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as other:
        try:
            assert other.stdout is not None
            said = {other.stdout.readline().strip() for _ in range(2)}
            assert "ready" in said
            worker = int(next(iter(said - {"ready"})))
            with pytest.raises(ValueError, match=TAKEN):
                Walk(size=3).record(folder, every=5)
            other.kill()
            other.wait()
            os.kill(worker, 0)  # it lives
            Walk(size=3, seed=1).record(folder, every=5).close()
        finally:
            other.kill()
            if worker:
                os.kill(worker, signal.SIGKILL)
    assert Folder(folder).steps == [0]

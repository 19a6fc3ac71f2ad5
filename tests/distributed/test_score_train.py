"""`torchbelay train` on two processes: same result as with one, only the first writes, and it can be continued."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from helpers import score_ranks
from helpers.problems import different, everything
from helpers.root import ROOT
from torchbelay.lab import records
from torchbelay.lab.score.training.folder import Folder

pytestmark = pytest.mark.slow  # two processes


class Runs:
    """The folders, statuses and logs of all runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.statuses: dict[str, list[int | None]] = json.loads((folder / "statuses.json").read_text())

    def state(self, name: str) -> dict[str, Any]:
        state = Folder(self.folder / name).load()
        assert state is not None
        del state["wall_s"]
        return state

    def stats(self, name: str) -> list[records.Record]:
        lines = (self.folder / name / "stats.jsonl").read_text().splitlines()
        return [records.without_times(json.loads(line)) for line in lines]

    def log(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}.{rank}.log").read_text()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Runs:
    """Made once, for any number of pytest workers."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    folder = shared / "score-ranks"
    with FileLock(shared / "score-ranks.lock"):
        if not folder.exists():
            folder.mkdir()
            paths = [str(ROOT / "tests"), *sys.path]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                environment.pop(name, None)
            line = [sys.executable, score_ranks.__file__, str(folder)]
            done = subprocess.run(
                line, env=environment, capture_output=True, text=True, timeout=8 * score_ranks.LIMIT, check=False
            )
            assert done.returncode == 0, done.stderr
    return Runs(folder)


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = lambda: state


def test_two_processes_learn_what_one_does(runs: Runs) -> None:
    assert runs.statuses["alone"] == [0]
    assert runs.statuses["pair"] == [0, 0], runs.log("pair", 0) + runs.log("pair", 1)
    alone, pair = runs.state("alone"), runs.state("pair")
    start = torch.cat([value.flatten() for value in _fresh().values()])
    for part in (lambda s: s["network"], lambda s: s["belay"]["averages"]["average"]["weights"]):
        one, two = (torch.cat([part(s["trainee"])[name].flatten() for name in _fresh()]) for s in (alone, pair))
        assert (one - two).norm() < 0.01 * (one - start).norm()
    for one, two in zip(runs.stats("alone"), runs.stats("pair"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
        assert one["w2"] == pytest.approx(two["w2"], rel=1e-3)
        assert (one["step"], one["lr"]) == (two["step"], two["lr"])
    assert torch.equal(alone["batches"], pair["batches"])
    assert len(pair["ranks"]) == 2


def _fresh() -> dict[str, torch.Tensor]:
    from helpers.score_models import NCSN_PRESET

    torch.manual_seed(0)
    return dict(NCSN_PRESET.objective.network().named_parameters())


def test_only_the_first_one_speaks_and_writes(runs: Runs) -> None:
    assert "step 10 of 10" in runs.log("pair", 0)
    assert "step" not in runs.log("pair", 1)
    assert [line["step"] for line in runs.stats("pair")] == [4, 8, 10]
    assert {path.name for path in (runs.folder / "pair").iterdir()} == {
        *("options.json", "stats.jsonl", "checkpoint.pt", "samples.png")
    }


def test_a_batch_that_cannot_be_shared_is_refused(runs: Runs) -> None:
    assert runs.statuses["indivisible"] == [2, 2, 2]
    assert "torchbelay train: a batch of 4 cannot be shared by 3 processes" in runs.log("indivisible", 0)
    assert not (runs.folder / "indivisible").exists()


def test_a_signal_to_one_stops_both_and_they_go_on_bit_for_bit(runs: Runs) -> None:
    assert runs.statuses["whole"] == [0, 0], runs.log("whole", 0) + runs.log("whole", 1)
    assert runs.statuses["stop"] == [143, 143], runs.log("stopped-stop", 0) + runs.log("stopped-stop", 1)
    assert "stopped after step 6 of 16" in runs.log("stopped-stop", 0)
    assert runs.statuses["go on"] == [0, 0], runs.log("stopped", 0) + runs.log("stopped", 1)
    whole, resumed = (everything(run=_State(runs.state(name))) for name in ("whole", "stopped"))
    assert different(whole, resumed) == []
    assert runs.stats("whole") == runs.stats("stopped")


def test_ranks_have_dropout_of_their_own(runs: Runs) -> None:
    first, second = runs.state("whole")["ranks"]
    assert not torch.equal(first["dice"], second["dice"])


def test_another_number_of_processes_is_refused(runs: Runs) -> None:
    assert runs.statuses["other number"] == [2]
    assert "was begun with 2 processes, not 1 process;" in runs.log("whole", 0)

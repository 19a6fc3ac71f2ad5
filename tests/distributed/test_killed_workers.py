"""Workers that are killed and start again from their checkpoints end bit for bit where undisturbed ones do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import killed_workers as program
from helpers.problems import different, everything

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")]

KILLED = [moment for moment in program.MOMENTS if moment != "undisturbed"]


class Result:
    """The last checkpoint of a worker, as something whose leaves can be compared."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.loaded = torch.load(folder / str(program.STEPS) / f"{rank}.pt", weights_only=True)

    def state_dict(self) -> dict[str, object]:
        return self.loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs, in one program that imports everything once."""
    there = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    lives = len(program.METHODS) * (2 * len(program.MOMENTS) - 1)
    subprocess.run(
        [sys.executable, program.__file__, str(there)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=lives * program.LIMIT + 60,
    )
    return there


@pytest.mark.parametrize("moment", KILLED)
@pytest.mark.parametrize("method", program.METHODS)
def test_killed_workers_end_where_undisturbed_ones_do(folder: Path, method: str, moment: str) -> None:
    first, second = json.loads((folder / "said.json").read_text())[f"{method}-{moment}"]
    assert first[1] == -signal.SIGKILL
    assert first[0] not in (0, None)  # the other one got an error, and did not wait for ever
    assert second == [0, 0]
    for rank in range(program.WORLD):
        mine, other = (Result(folder / f"{method}-{which}", rank) for which in (moment, "undisturbed"))
        assert different(everything(worker=mine), everything(worker=other)) == []


@pytest.mark.parametrize("method", program.METHODS)
def test_both_workers_have_one_average_and_weights_of_their_own(folder: Path, method: str) -> None:
    one, two = (Result(folder / f"{method}-undisturbed", rank).loaded for rank in range(program.WORLD))
    averages = [each["belay"]["averages"]["average"]["weights"] for each in (one, two)]
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    assert not torch.equal(one["model"]["0.weight"], two["model"]["0.weight"])

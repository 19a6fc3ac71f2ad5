"""Sharded and replicated training on 1, 2, 3 and 4 real processes; the checks themselves are in helpers/rank_checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from helpers import rank_checks, ranks

pytestmark = pytest.mark.slow  # ten processes

CASES = [(name, world) for world in sorted(ranks.WORLDS) for name in rank_checks.for_ranks(world)]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[int, dict[str, str | None]]:
    """What every check said, by the number of ranks; run once, whatever number of workers pytest has."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    folder = shared / "ranks"
    with FileLock(shared / "ranks.lock"):
        if not folder.exists():
            folder.mkdir()
            _run(folder)
    files = {world: folder / f"{world}.json" for world in ranks.WORLDS}
    log = (folder / "log").read_text()
    assert all(file.exists() for file in files.values()), log
    return {world: json.loads(file.read_text()) | {"log": log} for world, file in files.items()}


def _run(folder: Path) -> None:
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # fully_shard would take a GPU, if there is one, without being asked
    }
    with (folder / "log").open("w") as log:
        subprocess.run(
            [sys.executable, str(Path(ranks.__file__)), str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=2 * ranks.LIMIT * len(ranks.WORLDS) + 600,  # two attempts each, and the imports
            check=False,
        )


@pytest.mark.parametrize(("name", "world"), CASES, ids=[f"{name}-{world}" for name, world in CASES])
def test_on_several_ranks(said: dict[int, dict[str, str | None]], name: str, world: int) -> None:
    assert name in said[world], f"it did not come to this check; the log says:\n{said[world]['log']}"
    assert said[world][name] is None, said[world][name]

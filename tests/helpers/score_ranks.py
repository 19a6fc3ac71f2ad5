"""`torchbelay train` on several processes, as torchrun starts it, but forked from one that has imported everything.

    python score_ranks.py FOLDER

writes to FOLDER the runs `alone` (one process) and `pair`, `whole`, `stopped` (two), and the exit statuses of each.
"""

import json
import os
import socket
import sys
from pathlib import Path

from helpers.ranks import finish

LIMIT = 300.0  # seconds; a run takes one or two


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(rank: int, world: int, environment: dict[str, str], argv: list[str], logs: list[Path]) -> None:
    """Run the command in this process, with the environment of torchrun."""
    from helpers import score_command

    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    with logs[rank].open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.exit(score_command.main(argv))


def train(world: int, name: str, folder: Path, *arguments: str, stop: int = 0) -> list[int | None]:
    """Train and return the exit statuses of all ranks."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TINY_AGREE": "2",
        "TINY_STOP": str(stop),
    }
    argv = ["train", *arguments, "--out", str(folder / name), "--device", "cpu", "--every", "4"]
    logs = [folder / f"{name}{'-stop' if stop else ''}.{rank}.log" for rank in range(world)]
    return finish(run, world, world, environment, argv, logs, limit=LIMIT)


def main(folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from helpers import score_command  # noqa: F401  # imports before the fork save time

    statuses = {
        "alone": train(1, "alone", folder, "tiny-ncsn"),
        "pair": train(2, "pair", folder, "tiny-ncsn"),
        "indivisible": train(3, "indivisible", folder, "tiny-ncsn"),
        "whole": train(2, "whole", folder, "tiny-edm"),
        "stop": train(2, "stopped", folder, "tiny-edm", stop=6),
        "go on": train(2, "stopped", folder, "tiny-edm"),
        "other number": train(1, "whole", folder, "tiny-edm"),
    }
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

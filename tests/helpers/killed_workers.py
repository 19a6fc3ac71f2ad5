"""Two workers that are killed and started again, from the checkpoints that each of them keeps.

    python killed_workers.py FOLDER

imports everything once and forks. For every method, and every moment at which the second worker is killed, it writes to
FOLDER/<method>-<moment> what the workers had in the end, and to FOLDER/said.json how each life of each worker ended.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD, STEPS, EVERY, LIMIT = 2, 14, 5, 40.0  # EVERY: steps from one checkpoint to the next

METHODS = {"diloco": {"every": 3}, "easgd": {"alpha": 0.1, "every": 2}}


def build(method: str) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and a Belay that shares its average with the other worker."""
    import torch
    import torch.distributed as dist

    import torchbelay as tb

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    made = getattr(tb.methods, method)(**METHODS[method])
    return model, optimizer, tb.Belay(model, optimizer, made, workers=dist.group.WORLD)


def work(rank: int, folder: Path, method: str, die: Callable[[], None] | None) -> None:
    """Train until the end; `die` prepares the end of the second worker."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{os.getppid()}-{len(list(folder.glob('life-*')))}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=LIMIT - 10),
    )
    model, optimizer, belay = build(method)
    parts = {"model": model, "optimizer": optimizer, "belay": belay}
    done = [
        int(each.name) for each in folder.iterdir() if each.name.isdigit() and len(list(each.glob("*.pt"))) == WORLD
    ]
    if done:
        state = torch.load(folder / str(max(done)) / f"{rank}.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if die is not None and rank == 1:
        die()
    while belay.step < STEPS:
        drawn = torch.Generator().manual_seed(100 * belay.step + rank)
        x = torch.randn(8, 3, generator=drawn)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if belay.step % EVERY == 0 or belay.step == STEPS:
            there = folder / str(belay.step)
            there.mkdir(exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, there / f"{rank}.tmp")
            os.replace(there / f"{rank}.tmp", there / f"{rank}.pt")
    dist.destroy_process_group()


def dying(where: str, name: str, count: int) -> Callable[[], None]:
    """Return what lets a process die at the numbered call of a function."""

    def prepare() -> None:
        import torch  # noqa: F401

        module = sys.modules[where]
        right, calls = getattr(module, name), []

        def wrong(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return right(*args, **kwargs)

        setattr(module, name, wrong)

    return prepare


MOMENTS: dict[str, Callable[[], None] | None] = {
    "undisturbed": None,
    "in a sync": dying("torch.distributed", "all_reduce", 3),
    "while it saves": dying("os", "replace", 2),
}


def live(folder: Path, method: str, die: Callable[[], None] | None) -> list[int | None]:
    """Let both workers live once, and return how they ended."""
    fork = multiprocessing.get_context("fork")
    (folder / f"life-{len(list(folder.glob('life-*')))}").touch()
    both = [fork.Process(target=work, args=(rank, folder, method, die)) for rank in range(WORLD)]
    for each in both:
        each.start()
    for each in both:
        each.join(LIMIT)
    ended = [each.exitcode for each in both]
    for each in both:
        if each.is_alive():
            each.kill()
            each.join()
    return ended


def main(folder: Path) -> None:
    """Let every pair of workers live and die, and go on."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch._dynamo  # noqa: F401  # once for all: the first optimizer imports it

    import torchbelay as tb

    assert tb.Belay is not None  # names are looked up late

    said = {}
    for method in METHODS:
        for moment, die in MOMENTS.items():
            own = folder / f"{method}-{moment}"
            own.mkdir()
            said[own.name] = [live(own, method, die)] + ([] if die is None else [live(own, method, None)])
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

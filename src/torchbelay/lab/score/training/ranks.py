"""One process, or several that torchrun has started: their ranks, their devices, and what they exchange."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbelay.lab.part import LabError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `count` processes. A single process never communicates.

    >>> Ranks(torch.device("cpu")).gather("x")
    ['x']
    """

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def distribute(self, network: nn.Module) -> nn.Module:
        """Return the network with its gradients averaged over all processes."""
        if self.count == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, broadcast_buffers=False)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, to each of them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set in any process."""
        return [any(column) for column in zip(*self.gather(flags), strict=True)]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return to all processes what the first one makes; if it fails, all fail."""
        if self.count == 1:
            return make()
        outcome: list[Any] = [None, None]  # the value, or the error
        if self.first:
            try:
                outcome[0] = make()
            except LabError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise LabError(outcome[1])
        value: T = outcome[0]
        return value

    def first_then_others(self, make: Callable[[], T]) -> T:
        """Make one value per process, on the first process before the others, which then find its download."""
        if not self.first:
            self.from_first(lambda: None)
            return make()
        made: list[T] = []
        self.from_first(lambda: made.append(make()))
        return made[0]


def process_count() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return max(1, _environment_number("WORLD_SIZE"))


def _environment_number(name: str) -> int:
    """Read a number from the environment; 0 if it is not set."""
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise LabError(f"the environment has {name}={text!r}, which is not a number; unset it, or start with torchrun")
    return int(text)


@contextmanager
def join_ranks(device: str | None) -> Iterator[Ranks]:
    """Join the processes that torchrun has started (WORLD_SIZE, RANK, LOCAL_RANK); without torchrun, stay alone."""
    chosen, count = choose_device(device), process_count()
    if count == 1:
        yield Ranks(chosen)
        return
    rank, local = _environment_number("RANK"), _environment_number("LOCAL_RANK")
    if chosen.type == "cuda":
        if local >= torch.cuda.device_count():
            raise LabError(
                f"{local + 1} processes, but only {torch.cuda.device_count()} GPUs here; start fewer processes"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", rank=rank, world_size=count)
    yield Ranks(chosen, rank, count)
    dist.destroy_process_group()  # not after a failure: it could wait for the other processes forever


def choose_device(device: str | None) -> torch.device:
    """Return the device of that name; by default a GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise LabError(f"--device {device!r} is not a device; give cuda, cuda:1 or cpu") from None
    if found.type not in ("cuda", "cpu"):
        raise LabError(f"--device {device!r} is not supported; give cuda, cuda:1 or cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LabError(f"--device {device!r}: there are {torch.cuda.device_count()} GPUs here; give another, or cpu")
    return found

"""One process, or several that torchrun has started: who writes, who has which part, and what they agree on."""

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
    """This process among `count`. Alone, everything here is at once and without communication.

    >>> Ranks(torch.device("cpu")).gathered("x")
    ['x']
    """

    device: torch.device
    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def spread(self, network: nn.Module) -> nn.Module:
        """The network, its gradients averaged over all processes."""
        if self.count == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices, broadcast_buffers=False)

    def gathered(self, value: T) -> list[T]:
        """What each process has, for all of them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether some process has it raised."""
        return [any(column) for column in zip(*self.gathered(flags), strict=True)]

    def firsts(self, make: Callable[[], T]) -> T:
        """What the first process makes, for all; where it fails, all fail."""
        if self.count == 1:
            return make()
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = make()
            except LabError as error:
                said[1] = str(error)
        dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise LabError(said[1])
        value: T = said[0]
        return value

    def in_turn(self, make: Callable[[], T]) -> T:
        """Each its own, the first process before the others: what it has downloaded they find."""
        if not self.first:
            self.firsts(lambda: None)
            return make()
        made: list[T] = []
        self.firsts(lambda: made.append(make()))
        return made[0]


def started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return max(1, _told("WORLD_SIZE"))


def _told(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise LabError(f"the environment has {name}={text!r}, which is no number; unset it, or start with torchrun")
    return int(text)


@contextmanager
def joined(device: str | None) -> Iterator[Ranks]:
    """This process, on `device`; among others if torchrun says that there are any (WORLD_SIZE, RANK, LOCAL_RANK)."""
    where, count = chosen(device), started()
    if count == 1:
        yield Ranks(where)
        return
    rank, local = _told("RANK"), _told("LOCAL_RANK")
    if where.type == "cuda":
        if local >= torch.cuda.device_count():
            raise LabError(f"{local + 1} processes here, but {torch.cuda.device_count()} GPUs; start fewer")
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", rank=rank, world_size=count)
    yield Ranks(where, rank, count)
    dist.destroy_process_group()  # not after a failure, where it might wait for others in vain


def chosen(device: str | None) -> torch.device:
    """The device of that name; by default a GPU, if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise LabError(f"--device {device!r} is no device; give cuda, cuda:1 or cpu") from None
    if found.type not in ("cuda", "cpu"):
        raise LabError(f"--device {device!r} is not supported; give cuda, cuda:1 or cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise LabError(f"--device {device!r}: there are {torch.cuda.device_count()} GPUs here; give another, or cpu")
    return found

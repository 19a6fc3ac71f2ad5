"""What a checkpoint is: named tensors in files that are read one at a time, and a place to write such files."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor


class TensorInfo(NamedTuple):
    """The dtype and shape of a tensor that was not read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize


class Output(ABC):
    """A checkpoint that is being written. Several threads may write; `finish` comes last, and only if all went well."""

    @abstractmethod
    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor, in row-major order, beginning with the element number `start`."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the files; refuse if a tensor is not written whole."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of files and memory, whether complete or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


class Checkpoint(ABC):
    """Named tensors in a file or folder. Opening it reads names, dtypes and shapes; `read` reads one tensor.

    `open_checkpoint(path)` opens any layout. Several threads may read at a time.
    """

    path: Path
    layout: str  # in words
    files: tuple[Path, ...]  # those that hold the weights
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    sliceable: bool = True  # a part of a tensor can be read without the rest of it
    companions: tuple[Path, ...] = ()  # files beside the weights that belong to the model, relative to the folder
    beside: Sequence[str] = ()  # entries of the files that are not weights

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order of the files."""
        return tuple(self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, which is not read for that."""
        return torch.Size(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, which is not read for that."""
        return self.tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """Read a tensor into new memory of the host."""
        info = self.tensors[name]
        flat = torch.empty(info.numel, dtype=info.dtype, device="cpu")
        self.read_into(name, 0, flat)
        return flat.view(info.shape)

    @abstractmethod
    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read `out.numel()` elements of a tensor, in row-major order from number `start`, into a flat tensor."""

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one tensor; empty for layouts that cannot say so."""
        return ()

    @abstractmethod
    def output(self, destination: Path, about: Mapping[str, str], apart: Collection[str] = ()) -> Output:
        """Begin a checkpoint of the same names, dtypes, shapes and layout at `destination`; `about` says what it is.

        `destination` is a file if this checkpoint is one, and an empty folder if this one is a folder. Names that share
        one tensor here do so there too, except those in `apart`.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of open files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

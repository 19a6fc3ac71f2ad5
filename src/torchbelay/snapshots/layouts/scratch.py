"""Tensors that lie in files instead of memory, for layouts whose writers want all tensors at once."""

import os
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from torchbelay.snapshots.checkpoint import TensorInfo
from torchbelay.snapshots.files import reserve

_IN_MEMORY = 1 << 16  # bytes; a smaller tensor is not worth a file


class Scratch:
    """Empty tensors to be written in parts. The system moves their pages to the disk when memory becomes scarce.

    Each has a storage of its own, because torch.save writes whole storages. The files have no names any more once they
    are mapped (except on Windows), so that even a killed process leaves none.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], folder: Path) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix=".scratch.", dir=folder, ignore_cleanup_errors=True)
        self.missing = {name: info.numel for name, info in tensors.items()}
        self.counting = threading.Lock()
        try:
            with torch.inference_mode(False):  # other threads could not write to inference tensors
                self.tensors = {name: self._empty(number, info) for number, (name, info) in enumerate(tensors.items())}
        except BaseException:
            self.folder.cleanup()
            raise
        if os.name != "nt":
            self.folder.cleanup()

    def _empty(self, number: int, info: TensorInfo) -> Tensor:
        if info.nbytes < _IN_MEMORY:
            return torch.empty(info.shape, dtype=info.dtype, device="cpu")
        path = Path(self.folder.name, str(number))
        reserve(path, info.nbytes)
        tensor = torch.from_file(str(path), shared=True, size=info.numel, dtype=info.dtype, device="cpu").view(
            info.shape
        )
        with suppress(PermissionError):  # Windows: removed with the folder
            path.unlink()
        return tensor

    def write(self, name: str, values: Tensor, start: int) -> None:
        """Write elements of a tensor, in row-major order."""
        self.tensors[name].view(-1)[start : start + values.numel()].copy_(values.view(-1))
        with self.counting:
            self.missing[name] -= values.numel()

    def finish(self) -> None:
        """Refuse if a tensor is not written whole."""
        if missing := [name for name, count in self.missing.items() if count]:
            raise ValueError(f"not written whole: {', '.join(missing[:3])}; write every element once")

    def close(self) -> None:
        """Unmap and remove everything."""
        self.tensors = {}
        self.folder.cleanup()

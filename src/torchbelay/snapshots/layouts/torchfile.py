"""Files of torch.save: one, or the shards that an index of Hugging Face names.

They are mapped into memory and read without running code (`weights_only=True`). A file may be a training checkpoint
that holds more than weights: the weights are then one of its entries, and the rest is carried along.
"""

import mmap
import os
import pickle
import threading
import zipfile
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import set_default_mmap_options, skip_data

from torchbelay.belay.overlap import place
from torchbelay.ops.strides import is_dense
from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo
from torchbelay.snapshots.files import Handles, buffer, reserve, write_bytes

from .checksums import data_position, renew_checksums


class TorchCheckpoint(Checkpoint):
    """The weights in a file of torch.save, or in several files in a folder."""

    def __init__(self, path: Path, files: Iterable[Path], key: str | None, companions: Iterable[Path] = ()) -> None:
        self.path = path
        self.files = tuple(files)
        self.layout = "a file of torch.save" if len(self.files) == 1 else f"{len(self.files)} files of torch.save"
        self.metadata: dict[str, str] = {}
        self.key = key
        self.found: dict[str, tuple[Path, Tensor]] = {}
        self.beside: list[str] = []  # entries beside the weights
        for file in self.files:
            whole = load(file)
            state, beside = find_state(whole, key, str(file))
            self.beside += beside
            for name, tensor in state.items():
                if isinstance(tensor, Tensor):
                    self.found[name] = file, _plain(tensor, name, file)
                else:
                    self.beside.append(name)
        self.tensors = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, (_, t) in self.found.items()}
        self.sliceable = all(tensor.is_contiguous() for _, tensor in self.found.values())
        self.companions = tuple(companions)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read `out.numel()` elements of a tensor, in row-major order from number `start`, into a flat tensor."""
        out.copy_(self.found[name][1].reshape(-1)[start : start + out.numel()])

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one tensor."""
        groups: dict[object, list[str]] = {}
        for name, (file, tensor) in self.found.items():
            if tensor.numel():
                groups.setdefault((file, place(tensor)), []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def output(self, destination: Path, about: Mapping[str, str], apart: Collection[str] = ()) -> Output:
        """Begin files of the same entries. Tied weights stay tied, except those named in `apart`."""
        return _Files(self, destination, apart)

    def close(self) -> None:
        """Unmap the files."""
        self.found = {}


def load(file: Path) -> Any:
    """Load what torch.save wrote, mapped into memory if the file is of the format that allows it."""
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as problem:
            if "mmap can only be used" not in str(problem):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)  # before torch 1.6
    except pickle.UnpicklingError as problem:
        raise ValueError(
            f"{file} holds Python objects besides tensors, which may run code when they are read; save the state dict "
            f"alone: torch.save(model.state_dict(), path)"
        ) from problem
    except OSError as problem:
        if problem.filename is not None:
            raise
        raise ValueError(f"{file} cannot be read ({problem}); it is damaged: write or copy it again") from problem
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as problem:
        raise ValueError(f"{file} is not a file of torch.save, or a damaged one; write or copy it again") from problem


def find_state(whole: Any, key: str | None, where: str) -> tuple[MutableMapping[str, Any], list[str]]:
    """Return the weights in a checkpoint, and the names of the entries beside them.

    `key` leads to them ("model", or "ema.shadow" for an entry of an entry). Without it, the checkpoint must itself be
    a state dict, or have exactly one entry that is one.
    """
    if key is not None:
        state = whole
        beside: list[str] = []
        for part in key.split("."):
            if not isinstance(state, Mapping) or part not in state:
                raise ValueError(f"key={key!r} is not in {where}, which holds {_held(state)}; give one of these")
            beside += [str(name) for name in state if name != part]
            state = state[part]
        if not _is_state(state):
            raise ValueError(f"key={key!r} in {where} is not a state dict but {_held(state)}; give another key")
        return state, beside
    if _is_state(whole):
        return whole, []
    entries = [name for name, value in whole.items() if _is_state(value)] if isinstance(whole, Mapping) else []
    if len(entries) != 1:
        what = f"several state dicts ({_names(entries)})" if entries else f"no state dict but {_held(whole)}"
        raise ValueError(f"{where} holds {what}; say which entry holds the weights: key='...'")
    return whole[entries[0]], [str(name) for name in whole if name != entries[0]]


def _is_state(value: Any) -> bool:
    """Return whether a value is a state dict: names and tensors, perhaps with an entry of another kind."""
    if not isinstance(value, MutableMapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = sum(isinstance(item, Tensor) for item in value.values())
    return tensors > 0 and not any(isinstance(item, Mapping) and item for item in value.values())


def _held(value: Any) -> str:
    return f"the entries {_names(value)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _names(names: Iterable[object]) -> str:
    listed = [str(name) for name in names]
    return ", ".join(listed[:8]) + (", …" if len(listed) > 8 else "")


def _plain(tensor: Tensor, name: str, file: Path) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(f"{file}: {name!r} is {kind}, which cannot be averaged by elements; make it dense first")
    return tensor.detach()


class _Files(Output):
    """Files of torch.save like those of another checkpoint; what is not a weight is kept.

    They are saved without the bytes of their tensors and mapped into memory, and then the tensors are written in parts.
    Parts go to their places in the file by the system's calls, which is faster than by mapped memory.
    """

    def __init__(self, like: TorchCheckpoint, destination: Path, apart: Collection[str]) -> None:
        if os.name == "nt":
            raise NotImplementedError("files of torch.save are written in place, which Windows cannot; use safetensors")
        self.paths = {file: destination / file.name if like.path.is_dir() else destination for file in like.files}
        self.targets: dict[str, Tensor] = {}
        self.places: dict[str, tuple[Path, int]] = {}  # in the files, of those that lie in rows
        self.handles = Handles("r+b")
        self.missing = {name: info.numel for name, info in like.tensors.items()}
        self.counting = threading.Lock()
        with torch.inference_mode(False):  # other threads could not write to inference tensors
            for file, path in self.paths.items():
                self._begin(file, path, like.key, apart)

    def _begin(self, file: Path, path: Path, key: str | None, apart: Collection[str]) -> None:
        whole = load(file)
        state, _ = find_state(whole, key, str(file))
        _give_memory(state, _tensors(whole), apart)
        try:
            with skip_data():
                torch.save(whole, path)
        except RuntimeError as problem:  # torch does not say what the system said
            raise OSError(f"{path} could not be written: {problem}; is there room on the disk?") from problem
        reserve(path, path.stat().st_size)
        with set_default_mmap_options(mmap.MAP_SHARED):
            made = load(path)
        weights, _ = find_state(made, key, str(path))
        own = {name: tensor.detach() for name, tensor in weights.items() if isinstance(tensor, Tensor)}
        ours = {id(tensor) for tensor in weights.values()}
        copied: set[int] = set()
        for old, new in zip(_tensors(whole), _tensors(made), strict=True):
            if id(new) not in ours and _memory(new) not in copied:
                new.untyped_storage().copy_(old.untyped_storage())  # all of it: elements may share places
                copied.add(_memory(new))
        self.targets |= own
        if (begin := _address(path, _tensors(made))) is not None:
            rows = {name: tensor for name, tensor in own.items() if tensor.is_contiguous()}
            self.places |= {name: (path, tensor.data_ptr() - begin) for name, tensor in rows.items()}

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor, or, if it does not lie in rows, all of them."""
        target = self.targets[name]
        if name in self.places and values.dtype == target.dtype:
            path, position = self.places[name]
            file = self.handles.at(path, position + start * target.element_size())
            write_bytes(file, buffer(values.contiguous()))
        elif target.is_contiguous():
            target.view(-1)[start : start + values.numel()].copy_(values.view(-1))
        else:
            target.copy_(values.view(target.shape))
        with self.counting:
            self.missing[name] -= values.numel()

    def finish(self) -> None:
        """Complete the files."""
        if missing := [name for name, count in self.missing.items() if count]:
            raise ValueError(f"not written whole: {', '.join(missing[:3])}; write every element once")
        self.close()
        for path in self.paths.values():
            renew_checksums(path)

    def close(self) -> None:
        """Unmap the files."""
        self.targets = {}
        self.handles.close()


def _address(path: Path, tensors: Sequence[Tensor]) -> int | None:
    """Return where in memory a file that was loaded begins, or None if that cannot be told from its tensors."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        records = [each for each in archive.infolist() if "/data/" in each.filename and each.file_size]
        positions = sorted((data_position(file, each), each.file_size) for each in records)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    addresses = sorted(storages.items())
    if len(addresses) != len(positions) or not positions:
        return None
    begin = addresses[0][0] - positions[0][0]
    same = all((begin + at, size) == found for (at, size), found in zip(positions, addresses, strict=True))
    return begin if same else None


def _give_memory(state: MutableMapping[str, Any], everything: Sequence[Tensor], apart: Collection[str]) -> None:
    """Replace weights by empty ones if their memory is also that of something else, or larger than they are.

    Tied weights, several names of one tensor, stay tied, except those named in `apart`.
    """
    users: dict[int, int] = {}
    for tensor in everything:
        users[_memory(tensor)] = users.get(_memory(tensor), 0) + 1
    groups: dict[object, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            groups.setdefault(name if name in apart else (_memory(tensor), place(tensor)), []).append(name)
    for names in groups.values():
        old = state[names[0]]
        is_filled = old.untyped_storage().nbytes() == old.numel() * old.element_size()
        is_plain = not (old.is_conj() or old.is_neg())  # values are written as they are
        if users[_memory(old)] == len(names) and is_filled and is_plain and is_dense(old):
            continue
        empty = torch.empty(old.shape, dtype=old.dtype, device="cpu")
        for name in names:
            parameter = isinstance(state[name], nn.Parameter)
            state[name] = nn.Parameter(empty, state[name].requires_grad) if parameter else empty


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    """Return all tensors in dicts, lists and tuples, in the order in which they are saved."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inner for tensor in _tensors(item)]

"""Files of torch.save: one, or the shards that an index of Hugging Face names.

They are mapped into memory and read without running code (`weights_only=True`). A file may be a training checkpoint
that holds more than weights: the weights are then one of its entries, and the rest is carried along.
"""

import pickle
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.snapshots.checkpoint import Checkpoint, Output, TensorInfo

from .scratch import Scratch


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
                groups.setdefault((file, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), []).append(
                    name
                )
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def output(self, destination: Path, about: Mapping[str, str]) -> Output:
        """Begin files of the same entries."""
        return _Files(self, destination)

    def scratch_bytes(self) -> int:
        """Return the bytes of all tensors: torch.save wants them at once, so they wait in a file."""
        return self.nbytes

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
    except (RuntimeError, EOFError) as problem:
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
    """Files of torch.save like those of another checkpoint.

    Tied weights stay tied if their values are equal; what is not a weight is kept.
    """

    def __init__(self, like: TorchCheckpoint, destination: Path) -> None:
        self.like = like
        self.folder = like.path.is_dir()
        self.destination = destination
        self.scratch = Scratch(like.tensors, destination if self.folder else destination.parent)

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        """Write elements of a tensor."""
        self.scratch.write(name, values, start)

    def finish(self) -> None:
        """Write the files."""
        self.scratch.finish()
        made: dict[str, Tensor] = dict(self.scratch.tensors)
        for first, *others in self.like.tied:
            made |= {name: made[first] for name in others if torch.equal(made[name], made[first])}
        for file in self.like.files:
            whole = load(file)
            state, _ = find_state(whole, self.like.key, str(file))
            for name, old in state.items():
                if isinstance(old, nn.Parameter):
                    state[name] = nn.Parameter(made[name], requires_grad=old.requires_grad)
                elif isinstance(old, Tensor):
                    state[name] = made[name]
            torch.save(whole, self.destination / file.name if self.folder else self.destination)

    def close(self) -> None:
        """Free the scratch files."""
        self.scratch.close()

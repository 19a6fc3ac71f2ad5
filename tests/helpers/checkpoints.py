"""Checkpoints of every layout, made of a state dict, and read back by the library that owns the layout."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

State = dict[str, Tensor]


def save_safetensors(path: Path, state: State) -> Path:
    save_file(state, path := path.with_suffix(".safetensors"), {"format": "pt"})
    return path


def save_torch(path: Path, state: State) -> Path:
    torch.save(state, path := path.with_suffix(".pt"))
    return path


def save_sharded(path: Path, state: State, shards: int = 3, ending: str = "safetensors") -> Path:
    """Save as `save_pretrained` does: some shards and an index, with a configuration beside them."""
    path.mkdir()
    names = list(state)
    stem = "model" if ending == "safetensors" else "pytorch_model"
    places = {name: f"{stem}-{number % shards + 1:05}-of-{shards:05}.{ending}" for number, name in enumerate(names)}
    for file in {*places.values()}:
        part = {name: state[name] for name in names if places[name] == file}
        save_file(part, path / file, {"format": "pt"}) if ending == "safetensors" else torch.save(part, path / file)
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in state.values())},
        "weight_map": places,
    }
    (path / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"hidden_size": 3}')
    return path


def save_bin(path: Path, state: State) -> Path:
    return save_sharded(path, state, 2, "bin")


def save_dcp(path: Path, state: State) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state, "step": 7}, checkpoint_id=path, no_dist=True)
    return path


def load(path: Path) -> State:
    """Read a checkpoint by safetensors or torch."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if (path / ".metadata").exists():
        dcp_to_torch_save(path, file := path.parent / f"{path.name}.read")
        return torch.load(file, weights_only=True)["model"]
    (index,) = path.glob("*.index.json")
    places = json.loads(index.read_text())["weight_map"]
    read = load_file if "safetensors" in index.name else torch.load
    state = {name: tensor for file in {*places.values()} for name, tensor in read(path / file).items()}
    assert dict.fromkeys(places) == dict.fromkeys(state)
    return state


SAVE: dict[str, Callable[[Path, State], Path]] = {
    "safetensors": save_safetensors,
    "sharded": save_sharded,
    "torch": save_torch,
    "bin": save_bin,
    "dcp": save_dcp,
}


def states(count: int, dtype: torch.dtype = torch.float32) -> list[State]:
    """Return state dicts of one small model, with a scalar, an empty tensor and an integer."""
    generator = torch.Generator().manual_seed(0)

    def one() -> State:
        return {
            "a.weight": torch.randn(5, 7, generator=generator).to(dtype),
            "a.bias": torch.randn(7, generator=generator).to(dtype),
            "scale": torch.randn((), generator=generator).to(dtype),
            "none": torch.empty(0, 3, dtype=dtype),
            "positions": torch.arange(4),
        }

    return [one() for _ in range(count)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in dtype, shape and every bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))

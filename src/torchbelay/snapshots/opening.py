"""Open a checkpoint of any layout: find out what a path leads to."""

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from torchbelay.belay.files import TORCH_ENDINGS

from .checkpoint import Checkpoint
from .layouts.pipeline import Pipeline, parts
from .layouts.safetensors import SafetensorsCheckpoint
from .layouts.torchfile import TorchCheckpoint

# Files with these endings hold weights or the state of a training run, and would contradict new weights beside them.
_WEIGHTS = (
    *TORCH_ENDINGS,
    ".safetensors",
    ".distcp",
    ".msgpack",
    ".h5",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".npz",
    ".tmp",
)
# The names that `from_pretrained` of Transformers, diffusers and PEFT look for, without variants such as fp16.
_STEMS = ("model", "diffusion_pytorch_model", "adapter_model", "pytorch_model")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt")


def open_checkpoint(path: str | os.PathLike[str], *, key: str | None = None) -> Checkpoint:
    """Open a checkpoint to read its tensors one by one; only names, dtypes and shapes are read now.

    `path` is a safetensors file, a file of torch.save, or a folder: of `save_pretrained` (one file or shards, also a
    pipeline of diffusers or an adapter of PEFT) or of torch.distributed.checkpoint. `key` says which entry of a
    training checkpoint holds the weights, if several could.

    >>> import tempfile, torch
    >>> file = tempfile.mkdtemp() + "/step9.pt"
    >>> torch.save({"model": torch.nn.Linear(2, 1).state_dict(), "step": 9}, file)
    >>> with open_checkpoint(file) as checkpoint:
    ...     checkpoint.names, checkpoint.shape("weight"), checkpoint.dtype("bias"), checkpoint.read("weight").shape
    (('weight', 'bias'), torch.Size([1, 2]), torch.float32, torch.Size([1, 2]))
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path, key)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a file or folder of weights")
    if path.name.endswith(".index.json"):
        raise ValueError(f"{path} is an index; give its folder, {path.parent}")
    if path.suffix == ".safetensors" or not _is_torch_file(path):
        return SafetensorsCheckpoint(path, [path])
    return TorchCheckpoint(path, [path], key)


def holds_weights(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of a layout that can be opened."""
    places = [folder, *(folder / part for part in parts(folder))]
    return any(_weights(place) or (place / ".metadata").is_file() for place in places)


def strangers(folder: Path, replaced: Collection[Path]) -> list[str]:
    """Return what else a folder holds than weights of the checkpoint there and files of the names in `replaced`.

    All names are relative to the folder.
    """
    places = [folder, *(folder / part for part in parts(folder))]
    own = {file for place in places for file in _files(place)} | {folder / file for file in replaced}
    found = [item for place in places for item in place.iterdir() if item not in own and item not in places]
    return sorted(str(item.relative_to(folder)) for item in found)


def _files(folder: Path) -> list[Path]:
    """Return the files of the weights in a folder, with their index; without shards, if the index is damaged."""
    found = _weights(folder)
    if found is None:
        return [folder / ".metadata", *folder.glob("*.distcp")] if (folder / ".metadata").is_file() else []
    shards: Collection[str] = ()
    if found.name.endswith(".index.json"):
        with suppress(ValueError, OSError):
            shards = _index(found).values()
    return [found, *(folder / name for name in shards)]


def _folder(folder: Path, key: str | None) -> Checkpoint:
    models = {part: _model(folder / part, key) for part in parts(folder) if holds_weights(folder / part)}
    if models:
        if _weights(folder):
            models = {"": _model(folder, key), **models}
        carried = [*_companions(folder)]
        for part in parts(folder):
            carried += [Path(part, file) for file in _companions(folder / part)]
        return Pipeline(folder, models, tuple(carried))
    return _model(folder, key)


def _model(folder: Path, key: str | None) -> Checkpoint:
    """Open a folder that holds one model."""
    found = _weights(folder)
    companions = _companions(folder)
    if not found:
        if (folder / ".metadata").is_file():
            from .layouts.dcp import DcpCheckpoint  # imports torch.distributed.checkpoint

            return DcpCheckpoint(folder, key, companions)
        seen = sorted(item.name for item in folder.iterdir())
        holds = ", ".join(seen[:6]) + (", …" if len(seen) > 6 else "") if seen else "nothing"
        raise ValueError(
            f"{folder} holds no weights but {holds}; give a folder of save_pretrained or torch.distributed.checkpoint, "
            "or a file"
        )
    places = _index(found) if found.name.endswith(".index.json") else {}
    files = [found.parent / name for name in dict.fromkeys(places.values())] or [found]
    if ".safetensors" in found.name:
        checkpoint: Checkpoint = SafetensorsCheckpoint(folder, files, companions)
    else:
        checkpoint = TorchCheckpoint(folder, files, key, companions)
    if lost := places.keys() - checkpoint.tensors.keys():
        raise ValueError(f"{found} names {min(lost)!r}, which none of its shards holds; save the checkpoint again")
    return checkpoint


def _weights(folder: Path) -> Path | None:
    """Return the file of weights in a folder, or the index of its shards, as `from_pretrained` would choose it."""
    for ending in (".safetensors", ".bin"):
        for stem in _STEMS:
            for name in (f"{stem}{ending}", f"{stem}{ending}.index.json"):
                if (folder / name).is_file():
                    return folder / name
    if (folder / ".metadata").is_file():
        return None
    names = sorted(item.name for item in folder.iterdir() if item.is_file() and item.name not in _NOT_WEIGHTS)
    for endings in ((".safetensors.index.json",), (".safetensors",), TORCH_ENDINGS):
        if fitting := [name for name in names if name.endswith(endings)]:
            if len(fitting) > 1:
                raise ValueError(
                    f"{folder} holds several files of weights ({', '.join(fitting[:5])}); give one of them"
                )
            return folder / fitting[0]
    return None


def _index(index: Path) -> dict[str, str]:
    """Return the file of every tensor, as an index of Hugging Face has it."""
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{index} is not an index of shards ({problem}); write it again") from problem
    for name in dict.fromkeys(places.values()):
        if Path(name).name != name:
            raise ValueError(f"{index} names the shard {name!r}, which is not in its folder; put all shards there")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index.parent / name}, which {index.name} names, does not exist; copy it there")
    return places


def _companions(folder: Path) -> list[Path]:
    """Return the files beside the weights, relative to the folder: configuration, tokenizer, index of shards."""
    return sorted(
        Path(item.name)
        for item in folder.iterdir()
        if item.is_file() and not item.name.startswith(".") and not item.name.endswith(_WEIGHTS)
    )


def left_behind(checkpoint: Checkpoint) -> list[str]:
    """Return the files with other weights, or with the state of training, in the folders of a checkpoint."""
    folders = {checkpoint.path, *(file.parent for file in checkpoint.files)}
    found = [item for folder in folders for item in folder.iterdir() if item.name.endswith(_WEIGHTS)]
    return sorted(str(item.relative_to(checkpoint.path)) for item in found if item not in checkpoint.files)


def _is_torch_file(path: Path) -> bool:
    """Return whether a file of any name begins like one of torch.save: a zip file, or a pickle before torch 1.6."""
    with open(path, "rb") as file:
        first = file.read(4)
    return first[:2] in (b"PK", b"\x80\x02")

"""Small stand-ins for MNIST and CIFAR-10, as files of every form in which the data sets come."""

import gzip
import hashlib
import io
import struct
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchbelay.lab.part import LabError
from torchbelay.lab.score.data import Images, load
from torchbelay.lab.score.formats import DATASETS, DatasetName

TRAIN, TEST = 20, 8  # of the small sets that stand for the large ones here
MNIST_FILES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def pixels(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A small set, channels first."""
    generator = np.random.default_rng(7)
    shape = DATASETS[name].shape
    train, test = (generator.integers(0, 256, (n, *shape), dtype=np.uint8) for n in (TRAIN, TEST))
    return train, test


def make_sets_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the published sets small, with no folder named, an empty cache, and no internet."""
    for name in ("mnist", "cifar10"):
        train, test = pixels(name)
        found = hashlib.sha256(train.tobytes() + test.tobytes()).hexdigest()
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], train=TRAIN, test=TEST, sha256=found))
    monkeypatch.delenv("TORCHBELAY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(urllib.request, "urlopen", no_internet)


def no_internet(*_: Any, **__: Any) -> Any:
    raise urllib.error.URLError("no route\nto host")


def npz(path: Path, name: str, **other: np.ndarray) -> Path:
    train, test = (part.transpose(0, 2, 3, 1) for part in pixels(name))
    if name == "mnist":
        train, test = train[..., 0], test[..., 0]
    labels = {"y_train": np.zeros(TRAIN), "y_test": np.zeros(TEST)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **({"x_train": train, "x_test": test} | labels | other))  # type: ignore[arg-type]
    return path


def idx(folder: Path, ending: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, part in zip(MNIST_FILES, pixels("mnist"), strict=True):
        content = struct.pack(">4I", 0x803, len(part), 28, 28) + part.tobytes()
        (folder / (file + ending)).write_bytes(gzip.compress(content) if ending else content)
    return folder


def batches() -> dict[str, bytes]:
    train, test = pixels("cifar10")
    parts = zip(BATCHES, [*np.split(train, 5), test], strict=True)
    return {file: np.insert(part.reshape(len(part), -1), 0, 9, axis=1).tobytes() for file, part in parts}  # 9: a label


def unpacked(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in batches().items():
        (folder / file).write_bytes(content)
    return folder


def tar(path: Path, lacking: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file, content in reversed(batches().items()):  # their order in the archive says nothing
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
            member.size = len(content)
            if file != lacking:
                archive.addfile(member, io.BytesIO(content))
    return path


COPIES: dict[str, tuple[DatasetName, Callable[[Path], Path]]] = {
    "an npz of MNIST": ("mnist", lambda at: npz(at / "any-name.npz", "mnist")),
    "a folder with it": ("mnist", lambda at: npz(at / "mnist.npz", "mnist").parent),
    "packed idx files": ("mnist", lambda at: idx(at, ".gz")),
    "plain idx files": ("mnist", lambda at: idx(at, "")),
    "an npz of CIFAR-10": ("cifar10", lambda at: npz(at / "any-name.npz", "cifar10")),
    "a folder with that": ("cifar10", lambda at: npz(at / "cifar10.npz", "cifar10").parent),
    "batches": ("cifar10", unpacked),
    "batches in their folder": ("cifar10", lambda at: unpacked(at / "cifar-10-batches-bin").parent),
    "an archive": ("cifar10", lambda at: tar(at / "any-name.tar.gz")),
    "a folder with an archive": ("cifar10", lambda at: tar(at / "cifar-10-binary.tar.gz").parent),
}


def is_right(found: Images, name: str) -> bool:
    train, test = (torch.from_numpy(part) for part in pixels(name))
    assert found.name == name
    assert found.train.dtype == found.test.dtype == torch.uint8
    assert found.train.is_contiguous()
    assert found.test.is_contiguous()
    return torch.equal(found.train, train) and torch.equal(found.test, test)


def refused(name: Any, path: Path | None) -> str:
    """What is said: a single line."""
    with pytest.raises(LabError) as error:
        load(name, path)
    said = str(error.value)
    assert "\n" not in said
    return said

"""MNIST and CIFAR-10, from a local copy or from the usual download. Every pixel is checked."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchbelay.lab.part import LabError

from .download import cache_folder, download
from .formats import CURE, LAYOUTS, Copy, DatasetName, find_info, read_npz, read_tar
from .models.objective import Shape

FOLDER_VARIABLE = "TORCHBELAY_DATA"


@dataclass(frozen=True)
class Images:
    """A data set as uint8 pixels, (n, channels, height, width).

    >>> blank = torch.zeros(5, 1, 28, 28, dtype=torch.uint8)
    >>> Images("mnist", train=blank, test=blank[:2]).shape
    (1, 28, 28)
    """

    name: str
    train: Tensor
    test: Tensor

    @property
    def shape(self) -> Shape:
        """Channels, height and width of an image."""
        channels, height, width = self.train.shape[1:]
        return channels, height, width


def load(name: DatasetName, path: Path | None) -> Images:
    """Load a data set from `path`; without one, from the folder in TORCHBELAY_DATA, the cache, or the internet."""
    info = find_info(name)
    reader, paths = find_copy(name, path) or download(name)
    train, test = (torch.from_numpy(np.array(part, order="C")) for part in reader(info, paths))
    if (found := digest(train, test)) != info.sha256:  # a subset or another set would silently change every number
        place = paths[0] if len(paths) == 1 else paths[0].parent
        raise LabError(f"{place} is not {info.title} as published (sha256 {found[:12]}… of its pixels); {CURE}")
    return Images(name, train, test)


def is_available(name: DatasetName, path: Path | None) -> bool:
    """Whether all files are present, so that `load` needs no download; damage shows only on reading."""
    find_info(name)
    try:
        return find_copy(name, path) is not None
    except LabError:
        return False


def digest(*parts: Tensor) -> str:
    """Return the SHA-256 of the bytes of some tensors, one after the other.

    >>> digest(torch.tensor([1, 2], dtype=torch.uint8)) == digest(*torch.tensor([[1], [2]], dtype=torch.uint8))
    True
    """
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.detach().cpu().contiguous().numpy().data)
    return sha.hexdigest()


# Finding a copy -------------------------------------------------------------------------------------------------------


def find_copy(name: DatasetName, path: Path | None) -> Copy | None:
    """Return the local copy and its reader; None if the data set must be downloaded."""
    if path is not None:
        return _copy_at(name, path)
    if named := os.environ.get(FOLDER_VARIABLE):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise LabError(f"{FOLDER_VARIABLE} names {folder}, which is no folder; set it right, or use --data")
        if found := _copy_in(name, folder):
            return found
        _refuse_partial(name, folder)
    return _copy_in(name, cache_folder())


def _copy_at(name: DatasetName, path: Path) -> Copy:
    """Return the copy that --data names, a file or a folder; refuse anything else."""
    info = find_info(name)
    if path.is_dir():
        if found := _copy_in(name, path):
            return found
        _refuse_partial(name, path)
        raise LabError(f"no {info.title} in the folder {path}; give {info.accepted}")
    if not path.exists():
        raise LabError(f"{path} does not exist; give {info.accepted}")
    if path.suffix == ".npz":
        return Copy(read_npz, [path])
    if name == "cifar10" and path.name.endswith((".tar.gz", ".tgz")):
        return Copy(read_tar, [path])
    raise LabError(f"{path} is no copy of {info.title} that can be read; give {info.accepted}")


def _copy_in(name: DatasetName, folder: Path) -> Copy | None:
    """Return the copy in a folder, in the first format whose files are all present."""
    for files, reader in LAYOUTS[name]:
        paths = [folder / file for file in files]
        if all(path.is_file() for path in paths):
            return Copy(reader, paths)
    return None


def _refuse_partial(name: DatasetName, folder: Path) -> None:
    """Refuse a folder with only some of the files: it is more likely a mistake than a reason to download."""
    for files, _ in LAYOUTS[name]:
        lacking = [file for file in files if not (folder / file).is_file()]
        if len(lacking) < len(files):
            raise LabError(f"{folder / lacking[0]} is missing; put it beside the others, or give a copy with --data")

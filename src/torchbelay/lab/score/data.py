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
from .formats import CURE, LAYOUTS, Copy, DatasetInfo, DatasetName, find_info, read_npz, read_tar
from .models.objective import Shape

FOLDER_VARIABLE = "TORCHBELAY_DATA"
PART_FILE = "cifar10-part.npz"
UNASKED = "Training on MNIST takes minutes on a CPU; give a copy with --data to do it."


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
    if name == "cifar10-part" and not _has_part(path):
        return _check(info, _first(load("cifar10", path), info), "the beginning of CIFAR-10")
    reader, paths = find_copy(name, path) or download(name)
    train, test = (torch.from_numpy(np.array(part, order="C")) for part in reader(info, paths))
    return _check(info, Images(name, train, test), paths[0] if len(paths) == 1 else paths[0].parent)


def _check(info: DatasetInfo, images: Images, place: object) -> Images:
    """Refuse other pixels than the published ones: a subset or another set would silently change every number."""
    if (found := digest(images.train, images.test)) != info.sha256:
        raise LabError(f"{place} is not {info.title} as published (sha256 {found[:12]}… of its pixels); {CURE}")
    return images


def _first(images: Images, info: DatasetInfo) -> Images:
    return Images("cifar10-part", images.train[: info.train].clone(), images.test[: info.test].clone())


def _has_part(path: Path | None) -> bool:
    """Whether there is a file with the part alone, in the folder that is given, named or the cache."""
    if path is not None:
        return _copy_in("cifar10-part", path) is not None if path.is_dir() else path.name == PART_FILE
    return find_copy("cifar10-part", None) is not None


def is_available(name: DatasetName, path: Path | None) -> bool:
    """Whether all files are present, so that `load` needs no download; damage shows only on reading."""
    find_info(name)
    try:
        if name == "cifar10-part" and not _has_part(path):
            name = "cifar10"
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

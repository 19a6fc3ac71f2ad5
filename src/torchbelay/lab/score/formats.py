"""The file formats in which MNIST and CIFAR-10 are published, and the facts that every copy must agree with.

Labels are ignored: the score models here are unconditional.
"""

import gzip
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchbelay.lab.part import LabError

from .models.objective import Shape

DatasetName = Literal["mnist", "cifar10", "cifar10-part"]
Pixels = NDArray[np.uint8]  # (n, channels, height, width)

CURE = "move it away, or give another copy with --data"
DAMAGE = (  # the exceptions that a damaged file can raise in its reader
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # NotImplementedError too: a flipped bit in a zip's header can ask for unsupported features
    MemoryError,  # an impossible size
    SyntaxError,  # a damaged header of an array
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)


@dataclass(frozen=True)
class DatasetInfo:
    """The published facts about a data set; they hold for a copy in any format."""

    title: str
    shape: Shape
    train: int
    test: int
    sha256: str  # of all pixels, training set first, each image channel by channel
    source: str  # the address of the usual download, without the file's name
    md5: dict[str, str]  # of the files to download, as published
    accepted: str  # the file names that are understood, for error messages


DATASETS: dict[str, DatasetInfo] = {
    "mnist": DatasetInfo(
        title="MNIST",
        shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        sha256="5b92582eb909c82a9bfefcd44acbe9233be3eb5b419a44cf211022ad2bf4bf96",
        source="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        },
        accepted=(
            "mnist.npz, or a folder with mnist.npz or with train-images-idx3-ubyte.gz and t10k-images-idx3-ubyte.gz "
            "(or both without .gz)"
        ),
    ),
    "cifar10": DatasetInfo(
        title="CIFAR-10",
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        sha256="2ae5d6db0453753867541f0ccce0b648fcd0aaf596c0ca67c33dc03b3deaf283",
        source="https://www.cs.toronto.edu/~kriz/",
        md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        accepted=(
            "cifar10.npz, cifar-10-binary.tar.gz, or a folder with one of them or with data_batch_1.bin to "
            "data_batch_5.bin and test_batch.bin"
        ),
    ),
}


# The beginning of CIFAR-10, for where all of it is too much to carry.
DATASETS["cifar10-part"] = replace(
    DATASETS["cifar10"],
    title="CIFAR-10 (a part)",
    train=16_000,
    test=4_000,
    sha256="9af8a73ca1b9a3820d718b463034eed0682a1a9afd53cc28177b256546979f7c",
    accepted=f"cifar10-part.npz, or all of it: {DATASETS['cifar10'].accepted}",
)


def find_info(name: str) -> DatasetInfo:
    """Return the facts about a data set; refuse an unknown name.

    >>> find_info("mnist").train
    60000
    """
    if name not in DATASETS:
        raise LabError(f"unknown data set {name!r}; choose from {', '.join(DATASETS)}")
    return DATASETS[name]


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open an npz without running any code in it; the file is closed even if it is not an npz."""
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        yield file


# Readers --------------------------------------------------------------------------------------------------------------

Reader = Callable[[DatasetInfo, Sequence[Path]], tuple[Pixels, Pixels]]


class Copy(NamedTuple):
    """A copy of a data set on disk: its files, and the function that reads them."""

    reader: Reader
    paths: list[Path]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file raises into one line that names the file."""
    try:
        yield
    except DAMAGE as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"cannot read {path} ({why}); {CURE}") from error


def _check_shape(pixels: NDArray[Any], shape: tuple[int, ...]) -> Pixels:
    """Refuse another shape or dtype; call it within `_reading`, which names the file."""
    if pixels.dtype != np.uint8 or pixels.shape != shape:
        raise ValueError(f"{pixels.dtype} {pixels.shape} instead of uint8 {shape}")
    return pixels


def read_npz(info: DatasetInfo, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Read x_train and x_test, channels last; a single channel has no axis of its own."""
    (path,) = paths
    channels, height, width = info.shape

    def part(file: Any, key: str, count: int) -> Pixels:
        last = (channels,) if channels > 1 else ()
        pixels = _check_shape(file[key], (count, height, width, *last))
        return pixels.reshape(count, height, width, channels).transpose(0, 3, 1, 2)

    with _reading(path), open_npz(path) as file:
        return part(file, "x_train", info.train), part(file, "x_test", info.test)


def read_idx(info: DatasetInfo, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Read MNIST's idx files: a big-endian header (type and number of axes, then their lengths), then the pixels."""

    def part(path: Path, count: int) -> Pixels:
        with _reading(path):
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            magic, *axes = struct.unpack(">4I", content[:16])
            if magic != 0x803:
                raise ValueError(f"it starts with {magic:#x}, not with {0x803:#x}")
            pixels = np.frombuffer(content, np.uint8, offset=16).reshape(axes)
            return _check_shape(pixels, (count, *info.shape[1:])).reshape(count, *info.shape)

    train, test = paths
    return part(train, info.train), part(test, info.test)


BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def _split_batches(info: DatasetInfo, contents: Sequence[bytes], paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Split CIFAR-10's records: one byte for the label and 3072 for the pixels, channel by channel."""
    size = int(np.prod(info.shape))
    parts: list[Pixels] = []
    for number, (content, path) in enumerate(zip(contents, paths, strict=True)):
        count = info.test if number == len(BATCHES) - 1 else info.train // (len(BATCHES) - 1)
        with _reading(path):
            if len(content) != count * (1 + size):
                raise ValueError(f"{len(content)} bytes instead of {count * (1 + size)}")
            rows = np.frombuffer(content, np.uint8).reshape(count, 1 + size)
            parts.append(rows[:, 1:].reshape(count, *info.shape))
    return np.concatenate(parts[:-1]), parts[-1]


def read_batches(info: DatasetInfo, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Read CIFAR-10's six binary batches."""
    contents = []
    for path in paths:
        with _reading(path):
            contents.append(path.read_bytes())
    return _split_batches(info, contents, paths)


def read_tar(info: DatasetInfo, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Read the archive of CIFAR-10's binary batches, without unpacking it to disk."""
    (path,) = paths
    contents: dict[str, bytes] = {}
    with _reading(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if (file := Path(member.name).name) in BATCHES and (stream := archive.extractfile(member)):
                contents[file] = stream.read()
        in_order = [contents[file] for file in BATCHES]
    return _split_batches(info, in_order, [path / file for file in BATCHES])


# The files of a copy in a folder, for each format; the first format whose files are all present is read.
LAYOUTS: dict[str, tuple[tuple[tuple[str, ...], Reader], ...]] = {
    "mnist": (
        (("mnist.npz",), read_npz),
        (("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"), read_idx),
        (("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"), read_idx),
    ),
    "cifar10": (
        (("cifar10.npz",), read_npz),
        (BATCHES, read_batches),
        (tuple(f"cifar-10-batches-bin/{file}" for file in BATCHES), read_batches),
        (("cifar-10-binary.tar.gz",), read_tar),
    ),
    "cifar10-part": ((("cifar10-part.npz",), read_npz),),
}

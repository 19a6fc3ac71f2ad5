"""MNIST and CIFAR-10, from a copy at hand or from the usual download; every pixel is checked, labels are left aside."""

import gzip
import hashlib
import http.client
import importlib.util
import io
import os
import struct
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchbelay.lab.part import LabError

from .models.objective import Shape

Name = Literal["mnist", "cifar10"]
Pixels = NDArray[np.uint8]  # (n, channels, height, width)

FOLDER_VARIABLE = "TORCHBELAY_DATA"
_CURE = "move it away, or give another copy with --data"
_CHUNK = 1 << 20
DAMAGE = (  # what a file that is not what it should be makes its reader raise
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # NotImplementedError, too: a flipped bit in a zip's header asks for strange features
    MemoryError,  # a size that cannot be
    SyntaxError,  # of a broken image
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    tarfile.TarError,
)


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


@dataclass(frozen=True)
class Published:
    """What is known of a data set, whatever the form of the copy."""

    title: str
    shape: Shape
    train: int
    test: int
    sha256: str  # of all pixels, training set first, each image channel by channel
    source: str  # the address of the usual download, without the file's name
    md5: dict[str, str]  # of the files to download, as published
    would_do: str  # which copies are understood, for a person


SETS: dict[str, Published] = {
    "mnist": Published(
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
        would_do="mnist.npz, or a folder with train-images-idx3-ubyte.gz and t10k-images-idx3-ubyte.gz",
    ),
    "cifar10": Published(
        title="CIFAR-10",
        shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        sha256="2ae5d6db0453753867541f0ccce0b648fcd0aaf596c0ca67c33dc03b3deaf283",
        source="https://www.cs.toronto.edu/~kriz/",
        md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        would_do="cifar10.npz, cifar-10-binary.tar.gz, or a folder with one of them or with data_batch_1.bin and so on",
    ),
}


def load(name: Name, path: Path | None) -> Images:
    """A data set from `path`, or from the folder that TORCHBELAY_DATA names, from the cache, or from the internet."""
    published = _published(name)
    reader, paths = find(name, path) or _fetch(name)
    train, test = (torch.from_numpy(np.array(part, order="C")) for part in reader(published, paths))
    if (found := digest(train, test)) != published.sha256:  # a subset or another set would spoil every number silently
        where = paths[0] if len(paths) == 1 else paths[0].parent
        raise LabError(f"{where} is not {published.title} as published (sha256 {found[:12]}… of its pixels); {_CURE}")
    return Images(name, train, test)


def available(name: Name, path: Path | None) -> bool:
    """Whether all files are there, so that `load` needs no download; damage only shows when they are read."""
    _published(name)
    try:
        found = find(name, path)
    except LabError:
        return False
    return found is not None and (found[0] is not _read_mosaics or importlib.util.find_spec("PIL") is not None)


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchbelay"


def digest(*parts: Tensor) -> str:
    """SHA-256 of the bytes of some tensors, one after the other.

    >>> digest(torch.tensor([1, 2], dtype=torch.uint8)) == digest(*torch.tensor([[1], [2]], dtype=torch.uint8))
    True
    """
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.detach().cpu().contiguous().numpy().data)
    return sha.hexdigest()


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """An npz whose file is closed even if it is none, and which runs no code."""
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        yield file


# Where a copy is ------------------------------------------------------------------------------------------------------


def _published(name: str) -> Published:
    if name not in SETS:
        raise LabError(f"unknown data set {name!r}; choose from {', '.join(SETS)}")
    return SETS[name]


Reader = Callable[[Published, Sequence[Path]], tuple[Pixels, Pixels]]
Found = tuple[Reader, list[Path]]


def find(name: Name, path: Path | None) -> Found | None:
    """The files that are there and how to read them; None if they are to be downloaded."""
    if path is not None:
        return _at(name, path)
    if named := os.environ.get(FOLDER_VARIABLE):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise LabError(f"{FOLDER_VARIABLE} names {folder}, which is no folder; set it right, or use --data")
        if found := _in_folder(name, folder):
            return found
        _refuse_partial(name, folder)
    return _in_folder(name, cache_folder())


def _at(name: Name, path: Path) -> Found:
    """What the person pointed at."""
    published = _published(name)
    if path.is_dir():
        if found := _in_folder(name, path):
            return found
        _refuse_partial(name, path)
        raise LabError(f"no {published.title} in the folder {path}; give {published.would_do}")
    if not path.exists():
        raise LabError(f"{path} does not exist; give {published.would_do}")
    if path.suffix == ".npz":
        return _read_npz, [path]
    if name == "cifar10" and path.name.endswith((".tar.gz", ".tgz")):
        return _read_tar, [path]
    raise LabError(f"{path} is no copy of {published.title} that can be read; give {published.would_do}")


def _in_folder(name: Name, folder: Path) -> Found | None:
    """The first layout whose files are all there."""
    for files, reader in _LAYOUTS[name]:
        paths = [folder / file for file in files]
        if all(path.is_file() for path in paths):
            return reader, paths
    return None


def _refuse_partial(name: Name, folder: Path) -> None:
    """A folder with only some of the files is a mistake to tell, not to pass over."""
    for files, _ in _LAYOUTS[name]:
        lacking = [file for file in files if not (folder / file).is_file()]
        if len(lacking) < len(files):
            raise LabError(f"{folder / lacking[0]} is missing; put it beside the others, or give a copy with --data")


# What a copy holds ----------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"cannot read {path} ({why}); {_CURE}") from error


def _of_shape(pixels: NDArray[Any], shape: tuple[int, ...]) -> Pixels:
    """Refuse what has another shape or is no uint8; only within `_reading`, which names the file."""
    if pixels.dtype != np.uint8 or pixels.shape != shape:
        raise ValueError(f"{pixels.dtype} {pixels.shape} instead of uint8 {shape}")
    return pixels


def _read_npz(published: Published, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """x_train and x_test, channels last; a single channel has no axis of its own."""
    (path,) = paths
    channels, height, width = published.shape

    def part(file: Any, key: str, count: int) -> Pixels:
        last = (channels,) if channels > 1 else ()
        pixels = _of_shape(file[key], (count, height, width, *last))
        return pixels.reshape(count, height, width, channels).transpose(0, 3, 1, 2)

    with _reading(path), open_npz(path) as file:
        return part(file, "x_train", published.train), part(file, "x_test", published.test)


def _read_idx(published: Published, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """A big-endian header (type and number of axes, then their lengths), and the pixels."""

    def part(path: Path, count: int) -> Pixels:
        with _reading(path):
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            magic, *axes = struct.unpack(">4I", content[:16])
            if magic != 0x803:
                raise ValueError(f"it starts with {magic:#x}, not with {0x803:#x}")
            pixels = np.frombuffer(content, np.uint8, offset=16).reshape(axes)
            return _of_shape(pixels, (count, *published.shape[1:])).reshape(count, *published.shape)

    train, test = paths
    return part(train, published.train), part(test, published.test)


_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def _batches(published: Published, contents: Sequence[bytes], paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Records of a byte for the label and 3072 for the pixels, channel by channel."""
    size = int(np.prod(published.shape))
    parts: list[Pixels] = []
    for number, (content, path) in enumerate(zip(contents, paths, strict=True)):
        count = published.test if number == len(_BATCHES) - 1 else published.train // (len(_BATCHES) - 1)
        with _reading(path):
            if len(content) != count * (1 + size):
                raise ValueError(f"{len(content)} bytes instead of {count * (1 + size)}")
            rows = np.frombuffer(content, np.uint8).reshape(count, 1 + size)
            parts.append(rows[:, 1:].reshape(count, *published.shape))
    return np.concatenate(parts[:-1]), parts[-1]


def _read_batches(published: Published, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    contents = []
    for path in paths:
        with _reading(path):
            contents.append(path.read_bytes())
    return _batches(published, contents, paths)


def _read_tar(published: Published, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    (path,) = paths
    contents: dict[str, bytes] = {}
    with _reading(path), tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if (file := Path(member.name).name) in _BATCHES and (stream := archive.extractfile(member)):
                contents[file] = stream.read()
        in_order = [contents[file] for file in _BATCHES]
    return _batches(published, in_order, [path / file for file in _BATCHES])


def _read_mosaics(published: Published, paths: Sequence[Path]) -> tuple[Pixels, Pixels]:
    """Packed mosaics: each entry of an npz but `y` is a lossless image file of many tiles, row by row."""
    try:
        from PIL import Image
    except ImportError as error:
        raise LabError(f"the packed mosaics in {paths[0].parent} need Pillow; pip install pillow") from error
    channels, height, width = published.shape

    def tiles(content: bytes) -> Pixels:
        with Image.open(io.BytesIO(content)) as picture:
            mosaic = np.asarray(picture.convert("RGB"))
        rows, columns = mosaic.shape[0] // height, mosaic.shape[1] // width
        grid = mosaic.reshape(rows, height, columns, width, channels)
        return grid.transpose(0, 2, 4, 1, 3).reshape(-1, channels, height, width)

    def part(path: Path) -> Pixels:
        with _reading(path), open_npz(path) as file:
            return np.concatenate([tiles(file[key].tobytes()) for key in sorted(set(file.files) - {"y"})])

    first, second, test = (part(path) for path in paths)
    with _reading(paths[0].parent):
        train = _of_shape(np.concatenate([first, second]), (published.train, *published.shape))
        return train, _of_shape(test, (published.test, *published.shape))


_LAYOUTS: dict[str, tuple[tuple[tuple[str, ...], Reader], ...]] = {
    "mnist": (
        (("mnist.npz",), _read_npz),
        (("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte.gz"), _read_idx),
        (("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"), _read_idx),
    ),
    "cifar10": (
        (("cifar10.npz",), _read_npz),
        (_BATCHES, _read_batches),
        (tuple(f"cifar-10-batches-bin/{file}" for file in _BATCHES), _read_batches),
        (("cifar-10-binary.tar.gz",), _read_tar),
        (("cifar10_train_a.npz", "cifar10_train_b.npz", "cifar10_test.npz"), _read_mosaics),
    ),
}


# The usual download ---------------------------------------------------------------------------------------------------


def _fetch(name: Name) -> Found:
    """Download what the cache lacks of a data set: after an interruption, only the rest."""
    published = _published(name)
    paths = [cache_folder() / file for file in published.md5]
    for path in paths:
        if not path.exists():
            _download(published, path)
    return (_read_idx if name == "mnist" else _read_tar), paths


def _download(published: Published, path: Path) -> None:
    """Fetch a file; it has its name only when it is whole and right."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    address, md5 = published.source + path.name, published.md5[path.name]
    cure = f"give a copy with --data: {published.would_do}"
    part: str | None = None
    sums = hashlib.md5(usedforsecurity=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with (
            os.fdopen(handle, "wb") as file,
            urllib.request.urlopen(address, timeout=30) as answer,
            Progress(*columns, console=Console(stderr=True)) as progress,
        ):
            task = progress.add_task(path.name, total=int(answer.headers.get("Content-Length") or 0) or None)
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                sums.update(chunk)
                progress.advance(task, len(chunk))
        if sums.hexdigest() != md5:
            raise LabError(f"{address} came damaged (md5 {sums.hexdigest()}, not {md5}); try again, or {cure}")
        os.chmod(part, 0o644)
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"cannot download {address} to {path.parent} ({why}); {cure}") from error
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)

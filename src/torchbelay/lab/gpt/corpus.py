"""Text that every machine has: the Python code of the standard library and of the installed packages, as bytes.

A whole package is for training, for tuning or for judging, so that no text is seen twice. The share is decided by the
package's name alone, and so is the order. `Corpus.digest` says which text it was: installed versions differ. A text
that was saved can be read on another machine, so that a study goes on there with the same one.
"""

import hashlib
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchbelay.belay.files import replacing
from torchbelay.lab.part import LabError

Split = Literal["train", "tune", "judge"]
SPLITS: tuple[Split, ...] = ("train", "tune", "judge")
FILE = "gpt-corpus.npz"  # the name of a saved text, in the folder that --data names
_SHARES: dict[int, Split] = {0: "tune", 1: "judge"}  # of ten; the other eight are for training
_LEFT_OUT = {"test", "tests", "testing", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """The bytes of each split, one package after the other."""

    train: Tensor
    tune: Tensor
    judge: Tensor
    packages: int

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all text."""
        sha = hashlib.sha256()
        for split in SPLITS:
            text = self.held_out(split).cpu().numpy()
            sha.update(f"{split} {len(text)}\0".encode() + text.tobytes())
        return sha.hexdigest()

    def held_out(self, split: Split) -> Tensor:
        """Return the bytes of a split."""
        found: Tensor = getattr(self, split)
        return found

    def save(self, path: Path) -> None:
        """Write the text to a file, whole or not at all."""
        texts: dict[str, Any] = {split: self.held_out(split).cpu().numpy() for split in SPLITS}
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, packages=np.array(self.packages), digest=np.array(self.digest), **texts)


def load(path: Path) -> Corpus:
    """Read a saved text; refuse a damaged one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            train, tune, judge = (torch.from_numpy(file[split]) for split in SPLITS)
            found = Corpus(train, tune, judge, int(file["packages"]))
            digest = str(file["digest"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LabError(f"cannot read {path} ({error}); move it away, and the text is collected anew") from error
    if found.digest != digest:
        raise LabError(f"{path} is damaged: its SHA-256 differs; move it away, and the text is collected anew")
    return found


def find(folder: Path | None, most: int) -> Corpus:
    """Return the text that was saved in a folder; without one, collect it."""
    saved = None if folder is None else folder / FILE
    return load(saved) if saved is not None and saved.is_file() else collect(most)


def split_of(package: str) -> Split:
    """Return what a package is for.

    >>> [split_of(name) for name in ("json", "asyncio", "email")]
    ['train', 'tune', 'train']
    """
    return _SHARES.get(_digest(package)[-1] % 10, "train")


def _digest(package: str) -> bytes:
    return hashlib.sha256(package.encode()).digest()


def collect(most: int, folders: list[Path] | None = None) -> Corpus:
    """Read packages until there are `most` bytes, from each at most a fiftieth of them."""
    texts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    total, packages = 0, 0
    found = _packages(folders or _folders())
    for name in sorted(found, key=_digest):
        if total >= most:
            break
        text = _first_bytes(found[name], most // 50)
        if not text:
            continue
        texts[split_of(name)].append(text)
        total, packages = total + len(text), packages + 1
    if missing := [split for split, parts in texts.items() if not parts]:
        raise LabError(f"no Python code was found to {missing[0]} on; install more packages, as lightning or timm")
    train, tune, judge = (_as_tensor(b"".join(parts)) for parts in texts.values())
    return Corpus(train, tune, judge, packages)


def _folders() -> list[Path]:
    """Return the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    return [Path(folder) for folder in dict.fromkeys([paths["stdlib"], paths["purelib"], paths["platlib"]])]


def _packages(folders: list[Path]) -> dict[str, list[Path]]:
    """Return what makes up each top-level package: a folder, or one file."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for entry in sorted(folder.iterdir()):
            name = entry.name.removesuffix(".py")
            if entry.name in _LEFT_OUT or name.startswith(("_", "test", "torchbelay")) or "." in name:
                continue
            if entry.suffix == ".py" or entry.is_dir():
                found.setdefault(name, []).append(entry)
    return found


def _first_bytes(paths: list[Path], most: int) -> bytes:
    """Return the first bytes of a package's code; no file is read that does not belong to them."""
    text = b""
    for part in _texts(paths):
        text += part
        if len(text) >= most:
            break
    return text[:most]


def _texts(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            left_out = _LEFT_OUT.intersection(file.relative_to(path.parent).parts) or file.name.startswith("test_")
            if not left_out and file.is_file():  # a link may lead nowhere
                yield file.read_bytes() + b"\n"


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the bytes from each start, and the byte after each of them.

    >>> windows(torch.arange(10, dtype=torch.uint8), torch.tensor([0, 4]), 3)
    (tensor([[0, 1, 2],
            [4, 5, 6]]), tensor([[1, 2, 3],
            [5, 6, 7]]))
    """
    at = starts[:, None] + torch.arange(context + 1, device=starts.device)
    both = text[at].long()
    return both[:, :-1], both[:, 1:]


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Return the loss, in nats per byte, of a model that only knows how frequent each byte is."""
    counts = torch.bincount(train.long(), minlength=256).double() + 1
    return float(-(counts / counts.sum()).log()[held_out.long()].mean())

"""The data sets: every format gives the same pixels, and every defect of a copy is one line of error."""

import gzip
import hashlib
import http.client
import io
import os
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
from torchbelay.lab.score.data import Images, is_available, load
from torchbelay.lab.score.download import cache_folder
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


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


# Copies of every form -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", COPIES)
def test_every_form_of_a_copy_gives_the_same_pixels(form: str, tmp_path: Path) -> None:
    name, make = COPIES[form]
    path = make(tmp_path / "data")
    assert is_available(name, path)
    found = load(name, path)
    assert is_right(found, name)
    assert found.shape == DATASETS[name].shape
    found.train[0] = 0  # no view of something that may not be written


def test_the_folder_of_the_environment_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, cached = tmp_path / "named", tmp_path / "cache" / "torchbelay"
    idx(cached, ".gz")
    assert cache_folder() == cached
    assert is_right(load("mnist", None), "mnist")
    damaged = npz(named / "mnist.npz", "mnist", x_train=np.zeros(3))
    monkeypatch.setenv("TORCHBELAY_DATA", str(named))
    assert str(damaged) in refused("mnist", None)
    damaged.unlink()  # nothing of MNIST is there any more, so that the next place is asked
    assert is_right(load("mnist", None), "mnist")
    assert is_right(load("cifar10", unpacked(named)), "cifar10")


def test_the_cache_is_at_home_if_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "torchbelay"


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_available("mnist", None)
    assert not is_available("mnist", tmp_path / "nowhere")
    assert not is_available("cifar10", npz(tmp_path / "mnist.npz", "mnist").parent)
    assert is_available("mnist", tmp_path)
    monkeypatch.setenv("TORCHBELAY_DATA", str(tmp_path))
    assert is_available("mnist", None)
    assert not is_available("cifar10", None)
    (unpacked(tmp_path) / "data_batch_3.bin").unlink()
    assert not is_available("cifar10", None)
    monkeypatch.setenv("TORCHBELAY_DATA", str(tmp_path / "nowhere"))
    assert not is_available("mnist", None)
    idx(cache_folder(), ".gz")
    assert not is_available("mnist", None)  # as load would say that the folder is wrong
    monkeypatch.delenv("TORCHBELAY_DATA")
    assert is_available("mnist", None)


# Copies that are none -------------------------------------------------------------------------------------------------


def refused(name: Any, path: Path | None) -> str:
    """What is said: a single line."""
    with pytest.raises(LabError) as error:
        load(name, path)
    said = str(error.value)
    assert "\n" not in said
    return said


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown data set 'imagenet'; choose from mnist, cifar10" in refused("imagenet", None)
    with pytest.raises(LabError, match="unknown data set"):
        is_available("imagenet", None)  # type: ignore[arg-type]
    nowhere = tmp_path / "nowhere"
    assert refused("mnist", nowhere).startswith(f"{nowhere} does not exist; give mnist.npz")
    assert f"no CIFAR-10 in the folder {tmp_path}; give cifar10.npz" in refused("cifar10", tmp_path)
    (tmp_path / "notes.txt").write_text("none")
    for name in ("mnist", "cifar10"):  # how the files are named is said
        for file in (*DATASETS[name].md5, f"{name}.npz"):
            assert file in refused(name, nowhere)
    assert "notes.txt is no copy of MNIST" in refused("mnist", tmp_path / "notes.txt")
    monkeypatch.setenv("TORCHBELAY_DATA", str(nowhere))
    assert f"TORCHBELAY_DATA names {nowhere}" in refused("mnist", None)


@pytest.mark.parametrize("how", ["--data", "TORCHBELAY_DATA"])
@pytest.mark.parametrize("lacking", [BATCHES[2], BATCHES[5]])
def test_a_part_of_a_copy_is_no_reason_for_a_download(
    how: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unpacked(tmp_path) / lacking).unlink()
    monkeypatch.setenv("TORCHBELAY_DATA", str(tmp_path))
    said = refused("cifar10", tmp_path if how == "--data" else None)
    assert said.startswith(f"{tmp_path / lacking} is missing; ")


def test_a_batch_of_another_size(tmp_path: Path) -> None:
    path = unpacked(tmp_path) / BATCHES[1]
    path.write_bytes(path.read_bytes()[:3073])
    assert f"cannot read {path} (3073 bytes instead of {4 * 3073})" in refused("cifar10", tmp_path)


def test_an_archive_that_lacks_a_batch(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tgz", lacking=BATCHES[1])
    assert refused("cifar10", path).startswith(f"cannot read {path} ('{BATCHES[1]}')")


WRONG: dict[str, dict[str, np.ndarray]] = {
    "too few": {"x_train": np.zeros((TRAIN - 1, 28, 28), np.uint8)},
    "another size": {"x_test": np.zeros((TEST, 32, 32), np.uint8)},
    "floats": {"x_train": np.zeros((TRAIN, 28, 28), np.float32)},
    "objects": {"x_train": np.array([{}, None], dtype=object)},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_npz(what: str, tmp_path: Path) -> None:
    path = npz(tmp_path / "mnist.npz", "mnist", **WRONG[what])
    said = refused("mnist", path)
    assert said.startswith(f"cannot read {path} (")
    assert said.endswith("; move it away, or give another copy with --data")


def test_an_npz_of_other_things(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.zeros(3))
    np.savez(tmp_path / "b.npz", other=np.zeros(3))
    assert "float64 (3,) instead of uint8 (20, 28, 28)" in refused("mnist", tmp_path / "a.npz")
    assert "x_train" in refused("mnist", tmp_path / "b.npz")


def test_other_pixels_of_the_right_shape_are_refused(tmp_path: Path) -> None:
    """As those of Fashion-MNIST would be, or a set in another order."""
    train = pixels("mnist")[0][::-1, 0]
    path = npz(tmp_path / "mnist.npz", "mnist", x_train=train)
    assert refused("mnist", path).startswith(f"{path} is not MNIST as published (sha256 ")


def test_an_idx_file_of_labels_is_none_of_images(tmp_path: Path) -> None:
    idx(tmp_path, "")
    path = tmp_path / MNIST_FILES[1]
    path.write_bytes(struct.pack(">2I", 0x801, TEST) + bytes(TEST))
    assert refused("mnist", tmp_path) == (
        f"cannot read {path} (it starts with 0x801, not with 0x803); move it away, or give another copy with --data"
    )


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("form", COPIES)
def test_a_file_that_is_cut_short_is_named(form: str, tmp_path: Path) -> None:
    name, make = COPIES[form]
    path = make(tmp_path / "data")
    for file in files_of(path):
        whole = file.read_bytes()
        for length in (0, 3, 100, len(whole) // 2, len(whole) - 200):  # an archive ends with nothing that matters
            file.write_bytes(whole[:length])
            assert refused(name, path).startswith(f"cannot read {file}"), length
        file.write_bytes(whole)
    assert is_right(load(name, path), name)


@pytest.mark.parametrize("form", COPIES)
def test_a_flipped_bit_is_refused_or_does_no_harm(form: str, tmp_path: Path) -> None:
    name, make = COPIES[form]
    path = make(tmp_path / "data")
    generator = np.random.default_rng(3)
    said = []
    for file in files_of(path):
        whole = file.read_bytes()
        ends = (*range(64), *range(len(whole) - 64, len(whole)))  # the headers
        for place in (*ends, *generator.integers(0, len(whole), 30)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << int(generator.integers(8))
            file.write_bytes(flipped)
            try:
                assert is_right(load(name, path), name)
            except LabError as error:
                said.append(str(error))
        file.write_bytes(whole)
    assert len(said) > 30
    assert all(str(path) in line and "\n" not in line for line in said)


# The usual download ---------------------------------------------------------------------------------------------------


class Answer(io.BytesIO):
    """What urlopen gives."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content))}


@pytest.fixture
def internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Addresses and what is there; the published md5 sums are those of it."""
    there: dict[str, bytes] = {}
    archive = tar(tmp_path / "there" / "cifar-10-binary.tar.gz")
    for name, files in (("mnist", sorted(idx(tmp_path / "there-too", ".gz").iterdir())), ("cifar10", [archive])):
        published = DATASETS[name]
        assert sorted(published.md5) == [file.name for file in files]
        there |= {published.source + file.name: file.read_bytes() for file in files}
        sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in files}
        monkeypatch.setitem(DATASETS, name, replace(published, md5={file: sums[file] for file in published.md5}))

    def urlopen(address: str, *, timeout: float) -> Answer:
        assert timeout > 0
        return Answer(there[address])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return there


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_download_is_kept(name: DatasetName, internet: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_available(name, None)
    assert is_right(load(name, None), name)
    assert is_available(name, None)
    assert sorted(file.name for file in cache_folder().iterdir()) == sorted(DATASETS[name].md5)
    monkeypatch.setattr(urllib.request, "urlopen", no_internet)
    assert is_right(load(name, None), name)


def test_an_interrupted_download_goes_on_with_the_rest(internet: dict[str, bytes]) -> None:
    first, second = internet_of("mnist")
    whole = internet.pop(second)
    with pytest.raises(KeyError):
        load("mnist", None)
    assert [file.name for file in cache_folder().iterdir()] == [first.rpartition("/")[2]]
    internet.clear()
    internet[second] = whole
    assert is_right(load("mnist", None), "mnist")


def test_a_damaged_download_is_not_kept(internet: dict[str, bytes]) -> None:
    first, _ = internet_of("mnist")
    internet[first] = internet[first][:-1]
    said = refused("mnist", None)
    assert said.startswith(f"{first} came damaged (md5 ")
    assert "give a copy with --data: mnist.npz" in said
    assert list(cache_folder().iterdir()) == []


def internet_of(name: str) -> list[str]:
    return [DATASETS[name].source + file for file in DATASETS[name].md5]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("error", [urllib.error.URLError("no route\nto host"), http.client.IncompleteRead(b"")])
def test_without_the_internet_it_is_said_what_accepted(
    name: DatasetName, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    said = refused(name, None)
    assert said.startswith(f"cannot download {internet_of(name)[0]} to {cache_folder()} (")
    assert said.endswith(f"); give a copy with --data: {DATASETS[name].accepted}")
    assert list(cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, no folder")
    assert "give a copy with --data" in refused("mnist", None)


# The sets themselves --------------------------------------------------------------------------------------------------


REAL = os.environ.get("TORCHBELAY_DATA")  # read before any test takes it away
FACTS = {"mnist": (60_000, [0.1307]), "cifar10": (50_000, [0.4914, 0.4822, 0.4465])}
PUBLISHED = dict(DATASETS)


@pytest.mark.parametrize("name", FACTS)
def test_the_real_set(name: DatasetName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, name, PUBLISHED[name])
    if not REAL or not is_available(name, Path(REAL)):
        pytest.skip(f"TORCHBELAY_DATA names no folder with {PUBLISHED[name].title}")
    found = load(name, Path(REAL))
    count, means = FACTS[name]
    assert len(found.train) == count
    assert len(found.test) == 10_000
    torch.testing.assert_close(
        found.train.double().mean((0, 2, 3)) / 255, torch.tensor(means, dtype=torch.float64), atol=6e-5, rtol=0
    )

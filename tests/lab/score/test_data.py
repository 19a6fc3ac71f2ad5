"""The data sets: every format gives the same pixels, and every defect of a copy is one line of error."""

import hashlib
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.image_files import (
    BATCHES,
    COPIES,
    MNIST_FILES,
    TEST,
    TRAIN,
    idx,
    is_right,
    make_sets_small,
    npz,
    pixels,
    refused,
    tar,
    unpacked,
)
from torchbelay.lab.part import LabError
from torchbelay.lab.score.data import is_available, load
from torchbelay.lab.score.download import cache_folder
from torchbelay.lab.score.formats import DATASETS, DatasetName


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_sets_small(monkeypatch, tmp_path)


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


# The beginning of CIFAR-10 --------------------------------------------------------------------------------------------


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Make the part the first six and two images of the small set."""
    train, test = (pixels("cifar10")[0][:6], pixels("cifar10")[1][:2])
    found = hashlib.sha256(train.tobytes() + test.tobytes()).hexdigest()
    monkeypatch.setitem(DATASETS, "cifar10-part", replace(DATASETS["cifar10-part"], train=6, test=2, sha256=found))
    return train, test


def save_part(path: Path, train: np.ndarray, test: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x_train=train.transpose(0, 2, 3, 1), x_test=test.transpose(0, 2, 3, 1))
    return path


@pytest.mark.parametrize("place", ["file", "folder", "environment", "whole"])
def test_the_part_is_read_alone_or_cut_from_all(
    place: str, part: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    file = tar(folder / "cifar-10-binary.tar.gz") if place == "whole" else save_part(folder / "cifar10-part.npz", *part)
    if place == "environment":
        monkeypatch.setenv("TORCHBELAY_DATA", str(folder))
    path = {"file": file, "folder": folder, "environment": None, "whole": file}[place]
    assert is_available("cifar10-part", path)
    found = load("cifar10-part", path)
    assert found.name == "cifar10-part"
    assert np.array_equal(found.train.numpy(), part[0])
    assert np.array_equal(found.test.numpy(), part[1])


def test_other_images_than_the_first_are_refused(part: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    path = save_part(tmp_path / "cifar10-part.npz", part[0][::-1], part[1])
    with pytest.raises(LabError, match=r"is not CIFAR-10 \(a part\) as published"):
        load("cifar10-part", path)
    assert not is_available("cifar10-part", tmp_path / "nothing")
    assert not is_available("cifar10-part", None)


def test_the_real_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "cifar10", PUBLISHED["cifar10"])
    if not REAL or not is_available("cifar10-part", Path(REAL)):
        pytest.skip("TORCHBELAY_DATA names no folder with CIFAR-10")
    found = load("cifar10-part", Path(REAL))
    assert found.train.shape == (16_000, 3, 32, 32)
    assert found.test.shape == (4_000, 3, 32, 32)

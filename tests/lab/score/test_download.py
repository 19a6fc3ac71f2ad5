"""The download of a data set: it is kept, goes on after an interruption, and is refused if damaged."""

import hashlib
import http.client
import io
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.image_files import idx, is_right, make_sets_small, no_internet, refused, tar
from torchbelay.lab.score.data import is_available, load
from torchbelay.lab.score.download import cache_folder
from torchbelay.lab.score.formats import DATASETS, DatasetName


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_sets_small(monkeypatch, tmp_path)


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
def test_without_the_internet_the_error_says_what_is_accepted(
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

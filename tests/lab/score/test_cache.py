"""Cached records are found again only for the same code, settings and machine."""

from pathlib import Path

import pytest

import torchbelay.lab.score
from torchbelay.lab.score import cache
from torchbelay.lab.score.cache import CachedRecords, code_digest, digest_sources


@pytest.mark.parametrize("change", ["code", "settings", "machine"])
def test_cached_records_belong_to_all_that_they_depend_on(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CachedRecords("x", "settings", "machine").write([{"found": 1}], 2.5)
    assert CachedRecords("x", "settings", "machine").read() == (2.5, [{"found": 1}])
    if change == "code":
        monkeypatch.setattr(cache, "code_digest", lambda: "another")
    key = ("other" if change == "settings" else "settings", "other" if change == "machine" else "machine")
    assert CachedRecords("x", *key).read() is None


def package(folder: Path) -> Path:
    """A package with a module at the top, one in a folder, and a file that is not code."""
    (folder / "models").mkdir(parents=True)
    (folder / "run.py").write_text("a = 1")
    (folder / "models" / "unet.py").write_text("b = 2")
    (folder / "records.jsonl").write_text("{}")
    return folder


@pytest.mark.parametrize("path", ["run.py", "models/unet.py", "models/new.py", "training/deep/new.py"])
def test_any_change_of_code_changes_the_digest(path: str, tmp_path: Path) -> None:
    before, after = package(tmp_path / "before"), package(tmp_path / "after")
    assert digest_sources(before) == digest_sources(after)
    (after / path).parent.mkdir(parents=True, exist_ok=True)
    (after / path).write_text("c = 3")
    assert digest_sources(before) != digest_sources(after)


def test_a_module_that_moves_changes_the_digest(tmp_path: Path) -> None:
    before, after = package(tmp_path / "before"), package(tmp_path / "after")
    (after / "models" / "unet.py").rename(after / "unet.py")
    assert digest_sources(before) != digest_sources(after)


def test_other_files_do_not_change_the_digest(tmp_path: Path) -> None:
    before, after = package(tmp_path / "before"), package(tmp_path / "after")
    (after / "records.jsonl").write_text("other")
    assert digest_sources(before) == digest_sources(after)


def test_the_digest_covers_the_folders_of_this_package() -> None:
    folder = Path(str(torchbelay.lab.score.__file__)).parent
    assert code_digest() == digest_sources(folder)
    names = {name for name, _ in cache._sources(folder)}
    assert {"run.py", "models/unet.py", "training/train.py"} <= names

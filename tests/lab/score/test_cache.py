"""Cached records are found again only for the same code, settings and machine."""

import ast
import shutil
from pathlib import Path

import pytest

import torchbelay.lab.score
from torchbelay.lab.score import cache
from torchbelay.lab.score.cache import SOURCES, CachedRecords, code_digest, digest_sources


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


FOLDER = Path(str(torchbelay.lab.score.__file__)).parent
IN_THE_KEY = {"studies.py"}  # a group is part of the key
NO_NUMBERS = {"__init__.py", "cache.py", "download.py"}  # where files lie, not what is in them


def imported(name: str) -> set[str]:
    """The files of this package that one of them imports."""
    package = ["torchbelay", "lab", "score", *Path(name).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = [*parent, *(node.module or "").split(".")] if node.module else parent
            if module[:3] == package[:3]:
                inside = Path(*module[3:])
                found |= {f"{inside}.py", *(str(inside / f"{alias.name}.py") for alias in node.names)}
    return {name for name in found if (FOLDER / name).is_file()}


def test_the_digest_covers_all_code_that_runs_import() -> None:
    reached, new = set[str](), {"experiment.py", "fid_curve.py"}
    while new:
        reached |= new
        new = {found for name in new for found in imported(name)} - reached
    assert {"fid.py", "models/unet.py", "training/learner.py"} <= reached
    assert {name for name in reached if not name.startswith(SOURCES)} <= IN_THE_KEY | NO_NUMBERS


def test_a_caption_does_not_change_the_digest_and_a_network_does(tmp_path: Path) -> None:
    before = tmp_path / "before"
    shutil.copytree(FOLDER, before, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    assert code_digest() == digest_sources(before, SOURCES)
    for changed, same in (("captions.py", True), ("figures.py", True), ("models/ncsnv2.py", False)):
        after = tmp_path / changed.replace("/", "-")
        shutil.copytree(before, after)
        with (after / changed).open("a") as file:
            file.write("# changed")
        assert (digest_sources(before, SOURCES) == digest_sources(after, SOURCES)) is same


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_there(source: str) -> None:
    assert any(name.startswith(source) for name, _ in cache._sources(FOLDER))

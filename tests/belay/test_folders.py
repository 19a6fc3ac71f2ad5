"""A folder is filled as a whole or not at all, and never with a mixture of old and new weights."""

import os
from pathlib import Path
from typing import Any

import pytest

from torchbelay.belay.folders import filling


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fill(folder: Path, *files: str, text: str = "new") -> None:
    with filling(folder) as new:
        for file in files:
            (new / file).parent.mkdir(exist_ok=True)
            (new / file).write_text(text)


def pieces(count: int, stem: str = "model") -> list[str]:
    files = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [*files, f"{stem}.safetensors.index.json"]


def test_a_new_folder_appears_at_once_with_its_parents_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[list[str]] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(names(tmp_path / "a" / "b")), replace(a, b)))
    fill(tmp_path / "a" / "b", "config.json", "model.safetensors", "deep/adapter.json")
    assert seen == [[]]  # one rename, before which nothing was there
    assert names(tmp_path) == ["a/b/config.json", "a/b/deep/adapter.json", "a/b/model.safetensors"]


def test_a_folder_that_another_process_makes_in_the_meantime_is_filled_too(tmp_path: Path) -> None:
    """As the first ranks of two groups do that save one model."""
    with filling(tmp_path / "a") as new:
        (new / "model.safetensors").write_text("second")
        fill(tmp_path / "a", "model.safetensors", "config.json", text="first")
    assert names(tmp_path) == ["a/config.json", "a/model.safetensors"]
    assert (tmp_path / "a" / "model.safetensors").read_text() == "second"


def test_foreign_files_stay_and_others_are_replaced(tmp_path: Path) -> None:
    for file in ("notes.txt", "config.json", "pytorch_model.bin", "adapter_model.safetensors"):
        (tmp_path / file).write_text("old")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").write_text("old")
    fill(tmp_path, "config.json", "model.safetensors")
    assert {name: (tmp_path / name).read_text() for name in names(tmp_path)} == {
        "adapter_model.safetensors": "old",
        "checkpoint-5/model.safetensors": "old",
        "config.json": "new",
        "model.safetensors": "new",
        "notes.txt": "old",
        "pytorch_model.bin": "old",
    }


CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "one to three": (["model.safetensors"], pieces(3)),
    "three to one": (pieces(3), ["model.safetensors"]),
    "three to two": (pieces(3), pieces(2)),
    "three to three": (pieces(3), pieces(3)),
    "a variant": (
        ["model.fp16-00001-of-00001.safetensors", "model.safetensors.index.fp16.json"],
        ["model.fp16.safetensors"],
    ),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_weights_in_another_number_of_files_leave_no_old_ones_behind(
    tmp_path: Path, old: list[str], new: list[str]
) -> None:
    (tmp_path / "model.other.safetensors").write_text("another variant")
    fill(tmp_path, *old, text="old")
    fill(tmp_path, *new)
    assert names(tmp_path) == sorted([*new, "model.other.safetensors"])
    assert all((tmp_path / name).read_text() == "new" for name in new)


def loaded(folder: Path, *, index_first: bool) -> set[str] | None:
    """What a library reads: the one file or the files of the index, whichever it looks for first; None if it raises."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    for path in (index, one) if index_first else (one, index):
        if path.exists() and path == one:
            return {one.read_text()}
        if path.exists():
            found = sorted(folder.glob("model-*-of-*.safetensors"))
            count = index.read_text().split()[1]
            parts = [path for path in found if path.name.endswith(f"-of-{int(count):05}.safetensors")]
            return {path.read_text() for path in parts} if len(parts) == int(count) else None
    return None


@pytest.mark.parametrize("index_first", [True, False], ids=["as diffusers", "as Transformers"])
@pytest.mark.parametrize(("old", "new"), [*CHANGES.values()][:4], ids=[*CHANGES][:4])
def test_killed_after_any_file_the_folder_holds_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: list[str], new: list[str], index_first: bool
) -> None:
    class Killed(BaseException):
        pass

    def write(folder: Path, files: list[str], text: str) -> None:
        for file in files:
            count = len(files) - 1
            (folder / file).write_text(f"{text} {count}" if file.endswith("index.json") else text)

    replace, unlink = os.replace, Path.unlink
    for moment in range(40):
        folder = tmp_path / str(moment)
        folder.mkdir()
        write(folder, old, "old")
        left = moment

        def counted(call: Any) -> Any:
            def step(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return call(*args, **kwargs)

            return step

        with monkeypatch.context() as patched:
            try:
                with filling(folder) as temporary:
                    write(temporary, new, "new")
                    patched.setattr(os, "replace", counted(replace))
                    patched.setattr(Path, "unlink", counted(unlink))
            except Killed:
                pass
            else:
                break
        assert loaded(folder, index_first=index_first) in ({"old"}, {"new"}, None), moment
    else:
        pytest.fail("it never came to an end")
    assert loaded(folder, index_first=index_first) == {"new"}
    assert moment >= len(new)


def half(folder: Path) -> None:
    (folder / "config.json").write_text("half of it")
    raise KeyError


def test_a_block_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("old")
    for name in ("folder", "none"):
        with pytest.raises(KeyError), filling(tmp_path / name) as new:
            half(new)
    assert names(tmp_path) == ["folder/config.json"]
    assert (tmp_path / "folder" / "config.json").read_text() == "old"
    assert not (tmp_path / "none").exists()


def test_a_link_to_a_folder_stays_and_files_that_are_links_are_replaced(tmp_path: Path) -> None:
    """In a cache of downloads the files are links to blobs, which others use too."""
    (tmp_path / "blob").write_text("downloaded")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "model.safetensors").symlink_to(tmp_path / "blob")
    fill(tmp_path / "link", "model.safetensors")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").read_text() == "new"
    assert (tmp_path / "blob").read_text() == "downloaded"


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    with filling(tmp_path / "folder") as new:
        (new / "model.safetensors").write_text("new")
        (new / "model.safetensors").chmod(0o600)
    (tmp_path / "usual").touch()
    assert (tmp_path / "folder" / "model.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_where_no_folder_can_be_it_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name, error, message in (
        ("file", NotADirectoryError, "folder='.*file' is a file; give the name of a folder"),
        ("file/deeper", NotADirectoryError, "file' is a file, not a folder"),
        ("circle", OSError, "leads back to itself; remove it first"),
    ):
        with pytest.raises(error, match=message), filling(tmp_path / name):
            pytest.fail("the block was entered")
    with pytest.raises(ValueError, match="folder='' is no name"), filling(""):
        pass
    with pytest.raises(IsADirectoryError, match=r"config\.json' is a folder, and a file of the model has that name"):
        fill(tmp_path / "folder", "config.json", "model.safetensors")
    assert names(tmp_path) == ["file"]

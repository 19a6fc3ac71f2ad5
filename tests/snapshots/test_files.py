"""Folders are replaced whole or not at all, and what killed processes left is removed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from torchbelay.snapshots import files
from torchbelay.snapshots.files import Handles, buffer, replacing_folder

POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows does not lock folders")


def content(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("old", [None, {}, {"a": "old", "b": "old"}])
def test_a_folder_takes_the_place_of_another(tmp_path: Path, old: dict[str, str] | None) -> None:
    folder = tmp_path / "it"
    if old is not None:
        folder.mkdir()
        for name, text in old.items():
            (folder / name).write_text(text)
    with replacing_folder(folder) as temporary:
        (temporary / "a").write_text("new")
        assert folder.exists() == (old is not None)
    assert content(folder) == {"a": "new"}
    assert [item.name for item in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_the_old_folder_is_there_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "a").write_text("old")

    def fail() -> None:
        with replacing_folder(tmp_path / "it") as temporary:
            (temporary / "a").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert content(tmp_path / "it") == {"a": "old"}
    assert [item.name for item in tmp_path.iterdir()] == ["it"]


def test_a_file_system_that_cannot_exchange_folders_renames_twice(tmp_path: Path, monkeypatch) -> None:
    class NoLibrary:
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError("no libc")

    monkeypatch.setattr(files.ctypes, "CDLL", NoLibrary)
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "a").write_text("old")
    with replacing_folder(tmp_path / "it") as temporary:
        (temporary / "a").write_text("new")
    assert content(tmp_path / "it") == {"a": "new"}
    assert [item.name for item in tmp_path.iterdir()] == ["it"]


def test_a_link_stays_and_the_folder_that_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with replacing_folder(tmp_path / "link") as temporary:
        (temporary / "a").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == {"a": "new"}


@POSIX
@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from torchbelay.snapshots.files import replacing_folder\n"
        f"with replacing_folder({str(tmp_path / 'it')!r}) as folder:\n"
        "    (folder / 'part').write_text('half'); print(folder, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
    left = Path(other.stdout.readline().strip())
    with replacing_folder(tmp_path / "it") as temporary:
        (temporary / "a").write_text("new")
        assert left.exists()
    other.kill()
    other.communicate()
    assert (left / "part").exists()
    with replacing_folder(tmp_path / "it") as temporary:
        (temporary / "a").write_text("newer")
    assert not left.exists()
    assert content(tmp_path / "it") == {"a": "newer"}


def test_a_thread_has_one_file_open_however_many_there_are(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    handles = Handles("rb")
    open_before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert [handles.at(tmp_path / str(number), 0).read(1)[0] for number in range(50)] == list(range(50))
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(handles.at(tmp_path / "7", 0).read(1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [b"\x07"] * 3
    if open_before:
        assert len(os.listdir("/proc/self/fd")) <= open_before + 1
    handles.close()


def test_only_contiguous_tensors_on_the_host_have_a_buffer() -> None:
    assert bytes(buffer(torch.tensor([1, 2], dtype=torch.uint8))) == b"\x01\x02"
    assert len(buffer(torch.empty(0))) == 0
    for tensor in (torch.ones(2, 3).T, torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="only contiguous tensors on the host"):
            buffer(tensor)

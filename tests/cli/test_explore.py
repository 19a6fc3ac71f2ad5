"""`torchbelay explore`, through `main(argv)`: the file, the browser, errors and exit status."""

import errno
import os
import threading
import webbrowser
from pathlib import Path

import pytest

from torchbelay import explorer


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that a browser was asked to open; the command runs in an empty folder."""
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or True)
    monkeypatch.chdir(tmp_path)
    return found


def test_it_writes_the_page_and_opens_it(run, opened: list[str], tmp_path: Path) -> None:
    assert run("explore") == (0, "explorer.html\n", "")
    assert (tmp_path / "explorer.html").read_text(encoding="utf-8") == explorer.page()
    assert opened == [(tmp_path / "explorer.html").as_uri()]


def test_it_writes_another_file_without_opening_it(run, opened: list[str], tmp_path: Path) -> None:
    assert run(["explore", "--no-open", "--output", "a spring.html"]) == (0, "a spring.html\n", "")
    assert (tmp_path / "a spring.html").read_bytes() == explorer.page().encode()
    assert opened == []


def test_a_page_from_before_is_replaced(run, opened: list[str], tmp_path: Path) -> None:
    (tmp_path / "explorer.html").write_text("an older version")
    assert run("explore").status == 0
    assert (tmp_path / "explorer.html").read_text(encoding="utf-8") == explorer.page()


def test_a_page_from_before_stays_if_the_new_one_cannot_be_written(
    run, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "explorer.html").write_text("an older version")

    def until_the_disk_is_full(path: Path, text: str, **options: str) -> None:
        path.write_bytes(text.encode()[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", until_the_disk_is_full)
    printed = run("explore")
    message = "cannot write explorer.html: No space left on device; choose another file with --output"
    assert printed == (2, "", f"torchbelay explore: {message}\n")
    assert (tmp_path / "explorer.html").read_text() == "an older version"
    assert os.listdir(tmp_path) == ["explorer.html"]


def test_a_symbolic_link_stays_and_its_file_is_replaced(run, opened: list[str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "page.html").write_text("an older version")
    (tmp_path / "explorer.html").symlink_to("elsewhere/page.html")
    assert run("explore").status == 0
    assert (tmp_path / "explorer.html").is_symlink()
    assert (tmp_path / "elsewhere" / "page.html").read_bytes() == explorer.page().encode()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_pipe_gets_the_page_and_stays_a_pipe(run, opened: list[str], tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run("explore --no-open --output pipe").status == 0
    assert pipe.is_fifo()
    reader.join()
    assert read == [explorer.page().encode()]


@pytest.mark.parametrize("missing", ["false", "raises"])
def test_without_a_browser_it_says_so(run, opened: list[str], monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def refuse(address: str) -> bool:
        if missing == "raises":
            raise webbrowser.Error("could not locate runnable browser")
        return False

    monkeypatch.setattr(webbrowser, "open", refuse)
    printed = run("explore")
    assert printed.status == 0
    assert printed.out.splitlines() == [
        "explorer.html",
        "torchbelay explore: no browser was found; open the file above in one",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "explore --output .",
        "explore --output absent/explorer.html",
        "explore --output ~nobody-has-this-name/explorer.html",
    ],
)
def test_a_file_that_cannot_be_written_is_one_line_and_exit_status_2(run, opened: list[str], line: str) -> None:
    printed = run(line)
    assert (printed.status, printed.out) == (2, "")
    assert printed.err.startswith("torchbelay explore: cannot write ")
    assert printed.err.endswith("; choose another file with --output\n")
    assert printed.err.count("\n") == 1
    assert opened == []


def test_help_has_examples(run) -> None:
    printed = run("explore --help")
    assert printed.status == 0
    assert "torchbelay explore --output ~/spring.html" in printed.out

"""The page as one file: it holds its style and its script, asks for nothing else, and is small."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from torchbelay import explorer


class Reader(HTMLParser):
    """All tags of a page, and the text inside each style and script."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last = self.tags[-1][0] if self.tags else ""
        if last in ("style", "script"):
            self.texts[last] = self.texts.get(last, "") + data


def test_style_and_script_are_in_the_page_word_for_word() -> None:
    page = Reader(explorer.page())
    assert page.texts["style"].strip() == (explorer.sources() / "explorer.css").read_text(encoding="utf-8").strip()
    assert page.texts["script"].strip() == (explorer.sources() / "explorer.js").read_text(encoding="utf-8").strip()
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{"type": "module"}]  # from disk only this works


def test_the_page_asks_for_no_other_file() -> None:
    page = Reader(explorer.page())
    loaded = [attrs["src"] for _, attrs in page.tags if "src" in attrs]
    loaded += [attrs["href"] for tag, attrs in page.tags if tag == "link"]
    assert [address for address in loaded if not str(address).startswith("data:")] == []
    assert not re.search(r"@import|url\((?!['\"]?(?:data:|#))", page.texts["style"])
    assert not re.search(r"\bfetch\(|XMLHttpRequest|^import .*['\"]|\bimport\(", page.texts["script"], re.M)


def test_the_page_is_small() -> None:
    assert len(explorer.page().encode()) < 200_000


def test_a_page_whose_script_cannot_be_found_is_an_error_that_names_the_line(monkeypatch, tmp_path: Path) -> None:
    for name, text in (("index.html", "<p>nothing</p>"), ("explorer.css", ""), ("explorer.js", "")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(explorer, "sources", lambda: tmp_path)
    with pytest.raises(ValueError, match=r'index.html of the explorer has no line <link rel="stylesheet"'):
        explorer.page()


def test_a_wheel_has_the_sources_beside_the_package(monkeypatch, tmp_path: Path) -> None:
    installed = tmp_path / "torchbelay" / "explorer"
    installed.mkdir(parents=True)
    monkeypatch.setattr(explorer, "__file__", str(installed / "__init__.py"))
    assert explorer.sources() != installed  # nothing there: a checkout
    (installed / "index.html").write_text("")
    assert explorer.sources() == installed

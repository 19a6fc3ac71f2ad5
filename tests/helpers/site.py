"""The site, built once per test session in a folder of its own, and what its pages ask for."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from helpers.root import ROOT

LIMIT = 600  # seconds; a build takes three, and many times that on a busy machine


class Built(NamedTuple):
    """A built site: its folder, and the folder of the pages that it was made from."""

    site: Path
    pages: Path


@functools.cache
def build() -> Built:
    """Gather the pages and build the site as `make docs` does, warnings as errors."""
    folder = Path(tempfile.mkdtemp(prefix="torchbelay-site-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    pages = folder / "build" / "docs"
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for words in (
        [ROOT / "docs" / "site" / "site_pages.py", "--into", pages],
        ["-m", "zensical", "build", "--strict", "--clean", "--config-file", folder / "mkdocs.yml"],
    ):
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return Built(folder / "site", pages)


class Page(HTMLParser):
    """What a page of HTML asks for: its links, its anchors, and the files that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what a tag refers to."""
        found = {key: value or "" for key, value in attributes}
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key) and (key == "id" or tag == "a")}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loaded.append(found["href"])
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and found.get("src"):
            self.loaded.append(found["src"])
        elif tag == "object" and found.get("data"):
            self.loaded.append(found["data"])


def is_elsewhere(address: str) -> bool:
    """Return whether an address leads out of the site."""
    return bool(urlsplit(address).scheme and urlsplit(address).scheme != "data") or address.startswith("//")


def broken(site: Path, page: Path, address: str, known: dict[Path, Page]) -> str | None:
    """Return why an address of a page leads nowhere in the site, or None."""
    parts = urlsplit(address)
    if is_elsewhere(address) or parts.scheme == "data":
        return None
    base = site if parts.path.startswith("/") else page.parent
    file = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    file = file / "index.html" if file.is_dir() else file
    if not file.is_file():
        return f"{page.relative_to(site)} asks for {address}, which is not in the site"
    if parts.fragment and file in known and unquote(parts.fragment) not in known[file].anchors:
        return f"{page.relative_to(site)} links to {address}, and there is no such anchor"
    return None

"""The system's Chromium, driven by playwright: for tests that look at a page as a reader does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright import sync_api

PATIENCE = 180_000  # milliseconds that anything may take; 30,000 are too few on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launched() -> Iterator["sync_api.Browser"]:
    """Start a browser for the block. Skip the test if playwright or Chromium is not there."""
    reason = "playwright, of the extra dev, is not installed"
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path  # what `playwright install` would have fetched
        found = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip("no Chromium here; on Debian: apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, timeout=PATIENCE)
        try:
            yield browser
        finally:
            browser.close()

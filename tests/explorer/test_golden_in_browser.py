"""The golden values again, in the page as `torchbelay explore` writes it. Skipped without Chromium."""

import shutil
from pathlib import Path

import pytest

from helpers import explorer_golden
from torchbelay import explorer

pytestmark = pytest.mark.slow  # a browser

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, of the extra dev, is not installed")

PATIENCE = 180_000  # milliseconds that anything may take; 30,000 are too few on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def test_the_page_computes_the_golden_values_from_disk_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / explorer.NAME
    explorer.write(file)
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path  # what `playwright install` would have fetched
        found = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip("no Chromium here; on Debian: apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, timeout=PATIENCE)
        try:
            page = browser.new_page()
            page.set_default_timeout(PATIENCE)
            errors: list[str] = []
            requests: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(file.as_uri())
            report = page.evaluate("(data) => explorer.checkGolden(data)", explorer_golden.read())
        finally:
            browser.close()
    assert report["failures"] == []
    assert report["checked"] > 75_000
    assert errors == []
    assert [address for address in requests if not address.startswith("data:")] == [file.as_uri()]

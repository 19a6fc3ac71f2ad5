"""The golden values again, in the page as `torchbelay explore` writes it. Skipped without Chromium."""

from pathlib import Path

import pytest

from helpers import chromium, explorer_golden
from torchbelay import explorer

pytestmark = pytest.mark.slow  # a browser


def test_the_page_computes_the_golden_values_from_disk_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / explorer.NAME
    explorer.write(file)
    with chromium.launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(chromium.PATIENCE)
        errors: list[str] = []
        requests: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        report = page.evaluate("(data) => explorer.checkGolden(data)", explorer_golden.read())
    assert report["failures"] == []
    assert report["checked"] > 75_000
    assert errors == []
    assert [address for address in requests if not address.startswith("data:")] == [file.as_uri()]

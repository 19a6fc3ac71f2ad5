"""The site in a browser: on a phone, light and dark, its search, and what axe says of it. Skipped without Chromium."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from helpers import axe, chromium
from helpers.site import build

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = pytest.mark.slow  # a browser

pytest.importorskip("zensical", reason="zensical, of the extra docs, builds the site")

PHONE, DESK = 390, 1280
MAIN = (
    "index",
    "start",
    "which-method",
    "how-to/fsdp2",
    "methods",
    "paper",
    "failures",
    "api/methods",
    "explorer/index",
)
IN_DARK = ("index", "paper", "explorer/index")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Path:
    return build().site


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """A server of the site on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with chromium.launched() as found:
        yield found


def window(browser: "sync_api.Browser", width: int, scheme: str = "light") -> "sync_api.Page":
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(chromium.PATIENCE)
    return context.new_page()


def test_no_page_is_wider_than_the_window_or_asks_another_host(
    browser: "sync_api.Browser", site: Path, address: str
) -> None:
    page = window(browser, PHONE)
    asked: list[str] = []
    failed: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    page.on("pageerror", lambda error: failed.append(str(error)))
    wide = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":
            continue
        page.goto(f"{address}/{path.relative_to(site).as_posix()}")
        for width in (PHONE, DESK):
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(f"{path.name} at {width}")
        page.set_viewport_size({"width": PHONE, "height": 900})
    assert wide == []
    assert failed == []
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert len(asked) > 50
    page.context.close()


def test_search_finds_a_page_by_a_word_in_it(browser: "sync_api.Browser", address: str) -> None:
    page = window(browser, DESK)
    page.goto(f"{address}/index.html", wait_until="networkidle")
    page.locator("button.md-search__button:visible").click()
    page.get_by_role("combobox", name="Search").fill("torchtitan")
    found = page.get_by_role("option").first
    found.wait_for()
    assert "/torchtitan.html" in str(found.get_attribute("href"))
    page.context.close()


def test_the_colours_follow_the_reader(browser: "sync_api.Browser", address: str) -> None:
    shades = []
    for scheme in ("light", "dark"):
        page = window(browser, DESK, scheme)
        page.goto(f"{address}/methods.html")
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shades.append(sum(map(float, shade.strip("rgba()").split(",")[:3])))
        page.context.close()
    assert shades[0] > 600
    assert shades[1] < 150


REACHED = """() => [...document.querySelectorAll("pre > code, .md-typeset__scrollwrap")].every(
    each => each.scrollWidth <= each.clientWidth || each.tabIndex >= 0)"""  # all that scrolls, by keyboard


@pytest.mark.parametrize(
    ("name", "scheme"), [*((name, "light") for name in MAIN), *((name, "dark") for name in IN_DARK)]
)
def test_axe_finds_nothing_serious(browser: "sync_api.Browser", address: str, name: str, scheme: str) -> None:
    page = window(browser, DESK, scheme)
    page.goto(f"{address}/{name}.html", wait_until="networkidle")
    page.wait_for_function(REACHED)
    assert axe.serious(page) == []
    page.set_viewport_size({"width": PHONE, "height": 900})
    page.wait_for_function(REACHED)  # the page hears of its new width a little later
    assert axe.serious(page) == []
    page.context.close()

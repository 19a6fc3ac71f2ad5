"""The page in a browser: light and dark, on a desk, on a phone and on paper. Skipped without Chromium."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image, ImageStat

from helpers import chromium, sample_report

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = pytest.mark.slow  # a browser

DESK, TABLET, PHONE, SMALL_PHONE = (1280, 900), (768, 1024), (360, 740), (320, 640)


@dataclass
class Opened:
    """A page in the browser, and what it did while it was opened."""

    page: "sync_api.Page"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def value(self, script: str) -> object:
        return self.page.evaluate(script)

    def box(self, selector: str) -> dict[str, float]:
        """Where an element lies in the window: x, y, width and height."""
        return self.page.locator(selector).first.bounding_box()


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with chromium.launched() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything that takes room: the banner of a quick run, and a table of records with all columns."""
    return sample_report.build(tmp_path_factory.mktemp("report"), "fig2", elsewhere=True)


@pytest.fixture
def visit(browser: "sync_api.Browser", report: Path) -> Iterator[Callable[..., Opened]]:
    """Open the report (or another page) in a window of its own, and note what goes wrong or goes out."""
    contexts = []

    def go(size: tuple[int, int] = DESK, scheme: str = "light", path: Path = report) -> Opened:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        context.set_default_timeout(chromium.PATIENCE)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("console", lambda message: opened.errors.append(message.text))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(path.as_uri())
        return opened

    yield go
    for context in contexts:
        context.close()


def test_every_image_loads_nothing_goes_wrong_and_nothing_goes_out(visit: Callable[..., Opened], report: Path) -> None:
    opened = visit()
    widths = opened.value("[...document.images].map(image => image.complete ? image.naturalWidth : 0)")
    assert len(widths) == 3
    assert min(widths) > 0
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]


def test_the_checks_for_errors_and_requests_notice_them(visit: Callable[..., Opened], tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/far.png'><script>throw Error('torn')</script>")
    opened = visit(path=bad)
    assert opened.value("document.images[0].naturalWidth") == 0
    assert any("torn" in error for error in opened.errors)
    assert "http://127.0.0.1:9/far.png" in opened.requests


def test_light_and_dark_look_as_they_are_called(visit: Callable[..., Opened], tmp_path: Path) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        path = tmp_path / f"{scheme}.png"
        visit(scheme=scheme).page.screenshot(path=path)
        with Image.open(path) as shot:
            assert shot.size == DESK
            assert len(shot.convert("RGB").getcolors(maxcolors=DESK[0] * DESK[1])) > 100  # not blank
            brightness[scheme] = ImageStat.Stat(shot.convert("L")).mean[0]
    assert brightness["dark"] < 80
    assert brightness["light"] > 200


def test_figures_lie_on_white_in_the_dark(visit: Callable[..., Opened]) -> None:
    cards = visit(scheme="dark").value(
        "[...document.querySelectorAll('.card')].map(card => getComputedStyle(card).backgroundColor)"
    )
    assert cards == ["rgb(255, 255, 255)"] * 3


CONTRASTS = """() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => channels(colour).slice(0, 3).map(c => c / 255)
    .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((channels(colour)[3] ?? 1) == 1) return colour;
    }
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let text; text = walk.nextNode();) {
    if (!text.data.trim() || !text.parentElement.checkVisibility()) continue;
    const pair = [getComputedStyle(text.parentElement).color, behind(text.parentElement)].map(light);
    found.push([(Math.max(...pair) + .05) / (Math.min(...pair) + .05), text.data.trim()]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(visit: Callable[..., Opened], scheme: str) -> None:
    contrasts = visit(scheme=scheme).value(CONTRASTS)
    assert len(contrasts) > 200
    assert [pair for pair in contrasts if pair[0] < 4.5] == []  # WCAG 2, level AA
    assert max(contrasts)[0] > 12  # black on white has 21: the measure measures


@pytest.mark.parametrize("size", [SMALL_PHONE, PHONE, TABLET, DESK], ids=["small phone", "phone", "tablet", "desk"])
def test_the_page_is_never_wider_than_the_window(visit: Callable[..., Opened], size: tuple[int, int]) -> None:
    opened = visit(size)
    opened.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.value("document.documentElement.scrollWidth") <= size[0]


def test_on_a_phone_a_row_of_a_table_has_the_width_of_the_page(visit: Callable[..., Opened]) -> None:
    opened = visit(PHONE)
    for cell in ("#claim-C1 th", "#claim-C1 td:last-child", "#E5 th", "#E5 td:last-child"):
        assert opened.box(cell)["width"] == PHONE[0] - 2 * 16, cell  # but for the margins, 1rem each


def test_on_a_phone_a_table_of_numbers_has_each_beside_its_heading_and_none_that_is_missing(
    visit: Callable[..., Opened],
) -> None:
    opened = visit(PHONE)
    cells = opened.page.locator("#figure-results td")
    assert cells.count() == 16
    boxes = [cells.nth(i).bounding_box() for i in range(16) if cells.nth(i).is_visible()]
    assert len(boxes) == 16 - 5
    assert {box["width"] for box in boxes} == {PHONE[0] - 2 * 16}
    assert max(box["height"] for box in boxes) < 60  # one line, or two if it is long


@pytest.mark.parametrize("width", [320, 360, 600, 740, 768, 900, 1000, 1080, 1100, 1280])
def test_no_table_has_to_be_scrolled_sideways(visit: Callable[..., Opened], width: int) -> None:
    opened = visit((width, 900))
    boxes = opened.value(
        "[...document.querySelectorAll('.scroll')].map(box => [box.clientWidth, box.scrollWidth])"
    )  # what each has, and what its table takes
    assert len(boxes) == 2  # the table of results, and that of the records
    assert [pair for pair in boxes if pair[1] > pair[0]] == []


@pytest.mark.parametrize("size", [TABLET, (1000, 800)], ids=["tablet", "small laptop"])
def test_on_a_tablet_a_wide_table_has_its_cells_in_columns_each_beside_its_heading(
    visit: Callable[..., Opened], size: tuple[int, int]
) -> None:
    opened = visit(size)
    cells = opened.page.locator("#figure-results tbody tr:last-child td")
    boxes = [cells.nth(i).bounding_box() for i in range(8)]
    assert 1 < len({box["x"] for box in boxes}) < 8
    labels = opened.value(
        "[...document.querySelectorAll('#figure-results tbody tr:last-child td')]"
        ".map(cell => getComputedStyle(cell, '::before').content)"
    )
    assert labels[0] == '"w2 train"'
    assert len({*labels}) == 8
    missing = opened.page.locator("#figure-results .missing")
    assert missing.count() == 5
    assert not any(missing.nth(i).is_visible() for i in range(5))


def test_on_a_desk_a_table_of_numbers_fits_and_each_stands_below_its_heading(visit: Callable[..., Opened]) -> None:
    opened = visit(DESK)
    heads, cells = (opened.page.locator(f"#figure-results {what}") for what in ("thead th", "tbody tr:first-child > *"))
    for i in range(9):
        head, cell = heads.nth(i).bounding_box(), cells.nth(i).bounding_box()
        assert (head["x"], head["width"]) == (cell["x"], cell["width"])


def test_the_first_screen_has_the_answer(visit: Callable[..., Opened]) -> None:
    for size, last in ((DESK, ".strip li:last-child"), (PHONE, ".answer li:first-child")):
        opened = visit(size)
        for selector in ("h1", ".what", "#quick", ".answer p", last):
            box = opened.box(selector)
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= size[1], selector


def test_on_a_phone_a_figure_fits_and_can_be_shown_at_its_own_size(visit: Callable[..., Opened]) -> None:
    opened = visit(PHONE)
    assert opened.box("#figure-shares img")["width"] < PHONE[0]
    opened.page.get_by_label("Full size").nth(1).check()
    assert opened.box("#figure-shares img")["width"] == 9 * 96  # inches, as it was drawn
    assert opened.box("#figure-paths img")["width"] < PHONE[0]
    assert opened.value("document.documentElement.scrollWidth") <= PHONE[0]  # it scrolls in its own frame


def test_a_badge_leads_to_its_row_below_the_navigation(visit: Callable[..., Opened]) -> None:
    opened = visit()
    opened.page.locator(".strip a", has_text="C11").click()
    nav, row = opened.box("nav"), opened.box("#claim-C11")
    assert nav["y"] == 0
    assert nav["height"] <= row["y"] < DESK[1]


def test_the_keyboard_shows_where_it_is(visit: Callable[..., Opened]) -> None:
    opened = visit()
    for _ in range(3):
        opened.page.keyboard.press("Tab")
        assert opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert opened.value("document.activeElement.textContent") == "Claims"  # after the skip link and the name


def test_the_keyboard_opens_how_a_figure_was_made(visit: Callable[..., Opened]) -> None:
    opened = visit()
    notes = opened.page.locator("#figure-results .notes")
    assert not notes.is_visible()
    opened.page.locator("#figure-results summary").focus()
    opened.page.keyboard.press("Enter")
    assert notes.is_visible()
    assert opened.box("#figure-results summary")["height"] < 40  # its hidden words take no room
    opened.page.keyboard.press("Enter")
    assert not notes.is_visible()


def test_on_paper_all_disclosures_are_open_and_the_navigation_is_gone(visit: Callable[..., Opened]) -> None:
    opened = visit(scheme="dark")
    hidden = [
        opened.page.locator(selector) for selector in ("#claim-C1 dl", "#claim-C1 .quiet", "#figure-results .notes")
    ]
    assert not any(each.is_visible() for each in hidden)
    opened.page.emulate_media(media="print")
    assert all(each.is_visible() for each in hidden)
    assert not opened.page.locator("nav").is_visible()
    assert opened.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(opened.value(CONTRASTS))[0] >= 4.5  # ink, and not the light letters of the dark page

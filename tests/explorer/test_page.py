"""The explorer in a browser: drag, click, race, copy, share, by mouse and by keyboard. Skipped without Chromium."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urldefrag

import pytest
from PIL import Image, ImageStat

from helpers import chromium
from torchbelay import explorer

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = pytest.mark.slow  # a browser

DESK = (1280, 900)
PRESETS = 10
COUNT_FRAMES = """
  window.asked = 0;
  const ask = window.requestAnimationFrame.bind(window);
  window.quietly = ask;
  window.requestAnimationFrame = (work) => { window.asked++; return ask(work); };
"""


@dataclass
class Opened:
    """The explorer in a window of its own, and what went wrong in it."""

    page: "sync_api.Page"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def value(self, script: str, argument: object = None) -> object:
        return self.page.evaluate(script, argument)

    def settle(self) -> None:
        """Wait until what the page has put off to its next frame is done, by frames that nobody counts."""
        self.value(
            "new Promise(done => { const ask = window.quietly ?? requestAnimationFrame; ask(() => ask(done)); })"
        )

    def text(self, selector: str) -> str:
        self.settle()
        return self.page.locator(selector).inner_text()

    def number(self, selector: str) -> float:
        """Return the value of a handle that has the role of a slider."""
        self.settle()
        return float(self.page.locator(selector).get_attribute("aria-valuenow"))

    def type(self, key: str, text: str) -> None:
        """Type a number into the field of a setting."""
        self.page.fill(f"#{key}", text)
        self.page.press(f"#{key}", "Enter")

    def until(self, script: str, argument: object = None) -> None:
        """Wait until a condition of the page holds."""
        self.page.wait_for_function(script, arg=argument, timeout=chromium.PATIENCE)

    def says(self, selector: str, words: str) -> None:
        """Wait until an element has these words."""
        self.until("([id, words]) => document.querySelector(id).textContent.includes(words)", [selector, words])

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.page.locator(selector).bounding_box()
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def tab_to(self, identity: str) -> None:
        """Press Tab until the element of that id has the focus."""
        for _ in range(120):
            self.page.keyboard.press("Tab")
            if self.value("document.activeElement.id") == identity:
                return
        raise AssertionError(f"the keyboard does not reach #{identity}")


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with chromium.launched() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as `torchbelay explore` writes it."""
    path = tmp_path_factory.mktemp("explorer") / explorer.NAME
    explorer.write(path)
    return path


@pytest.fixture
def visit(browser: "sync_api.Browser", file: Path) -> Iterator[Callable[..., Opened]]:
    """Open the explorer from disk; at the end of the test nothing may have gone wrong in any window."""
    windows: list[Opened] = []

    def go(
        size: tuple[int, int] = DESK, scheme: str = "light", address: str = "", still: bool = True, touch: bool = False
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce" if still else "no-preference",
            has_touch=touch,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(chromium.PATIENCE)
        context.add_init_script(COUNT_FRAMES)
        opened = Opened(context.new_page())
        windows.append(opened)
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("console", lambda message: message.type == "error" and opened.errors.append(message.text))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(file.as_uri() + address)
        return opened

    yield go
    errors = [error for opened in windows for error in opened.errors]
    for opened in windows:
        opened.page.context.close()
    assert errors == []


Visit = Callable[..., Opened]


# The spring --------------------------------------------------------------------------------------------------------


def test_it_opens_from_disk_and_asks_for_no_other_file(visit: Visit, file: Path) -> None:
    opened = visit()
    assert opened.page.locator("#main").is_visible()
    assert not opened.page.locator("#no-script").count()
    assert opened.text("#sentence").startswith("BELAY, velocity-free")
    assert [url for url in opened.requests if not url.startswith("data:")] == [file.as_uri()]


def test_a_mass_that_is_dragged_draws_the_other_after_it(visit: Visit) -> None:
    opened = visit(still=False)
    opened.page.locator("#presets button", has_text="EMA").click()  # weights that nothing but the hand moves
    x, y = opened.middle("#mass1")
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 250, y, steps=3)
    held = opened.number("#mass1")
    assert held < 0.2
    opened.until("(place) => Math.abs(document.querySelector('#mass2').ariaValueNow - place) < 0.02", held)
    opened.page.mouse.up()
    assert opened.number("#mass1") == pytest.approx(held, abs=1e-3)


def test_a_spring_that_is_plucked_comes_to_rest_where_the_centre_of_mass_is(visit: Visit) -> None:
    opened = visit(still=False)
    opened.says("#stage-run", "Run")  # it moved by itself after it was opened, and stopped
    places = [opened.number(f"#mass{i}") for i in (1, 2)]
    centre = (10 * 0.62 + 20 * -0.38) / 30  # masses 10 and 20, from where pluck puts them
    assert places == pytest.approx([centre, centre], abs=0.01)
    click = "document.querySelector('#stage-pluck').click(), document.querySelector('#stage-run').textContent"
    assert opened.value(click) == "Pause"


def test_a_pair_above_the_edge_of_stability_leaves_the_stage(visit: Visit) -> None:
    opened = visit(still=False)
    opened.type("curvature", "400")
    opened.page.check("#stage-push")
    opened.says("#stage-text", "has left the stage")
    opened.says("#stage-run", "Run")


def test_every_preset_keeps_its_pair_on_the_stage(visit: Visit) -> None:
    opened = visit()
    for i in range(PRESETS):
        opened.page.locator("#presets button").nth(i).click()
        places = []
        for _ in range(60):
            places += [opened.number("#mass1"), opened.number("#mass2")]
            opened.value("document.querySelector('#stage-step').click()")
        assert max(map(abs, places)) < 1, opened.text("#presets [aria-pressed=true]")
        assert max(places) - min(places) > 0.5  # and there is something to see


def test_a_pair_that_a_hand_sends_beyond_the_edge_is_not_lost_without_a_word(visit: Visit) -> None:
    opened = visit(address="#mode=nesterov")
    x, y = opened.middle("#mass1")
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x + 300, y)
    opened.page.mouse.up()
    for _ in range(30):
        opened.value("document.querySelector('#stage-step').click()")
    assert "beyond the edge" in opened.text("#stage-text")
    opened.page.click("#stage-pluck")
    assert "beyond the edge" not in opened.text("#stage-text")


# Settings ----------------------------------------------------------------------------------------------------------


def test_every_preset_shows_its_own_numbers(visit: Visit) -> None:
    opened = visit()
    buttons = opened.page.locator("#presets button")
    assert buttons.count() == PRESETS
    seen = set()
    for i in range(PRESETS):
        buttons.nth(i).click()
        assert buttons.nth(i).get_attribute("aria-pressed") == "true"
        seen.add(opened.text("#numbers") + opened.text("#locus-text"))
        numbers = opened.value("explorer.analyze(explorer.fromHash(explorer.toHash({...explorer.DEFAULT})))")
        assert numbers["effectiveLrScale"] == pytest.approx(0.95 / 3)  # DEFAULT is not changed by presets
    assert len(seen) == PRESETS


def test_numbers_are_those_of_the_functions_above_the_page(visit: Visit) -> None:
    opened = visit(address="#m1=2000&m2=500&lr=0.02&curvature=30")
    found = opened.value("explorer.analyze(explorer.fromHash(location.hash))")
    words = opened.text("#numbers")
    for value in (found["effectiveLr"], found["halfLife"], found["theta"], found["maxStableLr"], found["noise"]):
        assert f"{value:.3g}" in words.replace("−", "-")
    assert found["regime"] in words
    assert opened.text("#sentence") == found["explanation"]


def test_a_slider_a_field_and_the_figures_move_together(visit: Visit) -> None:
    opened = visit()
    before = {
        name: opened.value(f"document.querySelector('#{name}').innerHTML") for name in ("locus", "noise", "impulse")
    }
    opened.value("""() => { const slider = document.querySelector('#k-slider'); slider.value = 400;
                            slider.dispatchEvent(new Event('input')); }""")
    k = float(opened.page.input_value("#k"))
    assert k == pytest.approx(1e-3 * 1e5**0.4, rel=0.01)
    assert f"κ1 = {k / 20:.4g}" in opened.text("#sentence")
    for name, drawn in before.items():
        assert opened.value(f"document.querySelector('#{name}').innerHTML") != drawn, name


def test_a_number_that_makes_no_spring_is_refused_in_words_and_changes_nothing(visit: Visit) -> None:
    opened = visit()
    sentence = opened.text("#sentence")
    for text, words in (("0.3", "κ1"), ("-3", "m1=-3.0 is out of range"), ("seven", "m1=nan")):
        opened.type("m1", text)
        assert words in opened.text("#why")
        assert opened.page.get_attribute("#m1", "aria-invalid") == "true"
        assert opened.text("#sentence") == sentence
    opened.type("m1", "inf")
    assert opened.text("#why") == ""
    assert opened.page.get_attribute("#m1", "aria-invalid") is None
    assert "never pulls" in opened.text("#sentence")


def test_theta_below_zero_makes_a_spring_that_repels(visit: Visit) -> None:
    opened = visit()
    opened.type("theta", "-0.5")
    assert "repels" in opened.text("#sentence")
    assert "pushes the weights away" in opened.text("#stage-text")
    assert float(opened.page.input_value("#c")) == pytest.approx(0.075)  # the rate that the spring had
    opened.type("k", "2")  # a setting of the spring makes it a spring again
    assert opened.text("#sentence").startswith("BELAY, velocity-free")


# Figures -----------------------------------------------------------------------------------------------------------


def test_the_curvature_can_be_dragged_over_the_edge(visit: Visit) -> None:
    opened = visit()
    edge = opened.value("explorer.analyze(explorer.DEFAULT).maxStableCurvature")
    assert opened.number("#curvature-handle") < edge
    opened.page.locator("#edge").scroll_into_view_if_needed()
    x, y = opened.middle("#curvature-handle .body")
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x + 140, y, steps=4)
    opened.page.mouse.up()
    dragged = opened.number("#curvature-handle")
    assert dragged > edge
    assert float(opened.page.input_value("#curvature")) == dragged
    assert "outside the unit circle" in opened.text("#locus-text")
    assert "not stable" in opened.page.get_attribute("#curvature-handle", "aria-valuetext")


def test_a_root_can_be_dragged_along_the_locus(visit: Visit) -> None:
    opened = visit()
    plane = opened.page.locator("#locus")
    plane.scroll_into_view_if_needed()
    disc = opened.page.locator("#locus [data-name=disc]").bounding_box()
    x, y = disc["x"] + disc["width"] / 2, disc["y"] + disc["height"] / 2
    opened.page.mouse.move(x + 20, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x, y, steps=3)  # to λ = 0
    opened.page.mouse.up()
    roots = opened.value(
        "explorer.analyze({...explorer.DEFAULT, curvature: +document.querySelector('#curvature').value})"
    )
    assert min(abs(complex(*root)) for root in roots["eigenvalues"]) < 0.05


# The race ----------------------------------------------------------------------------------------------------------


def test_a_click_on_the_plane_is_the_start_of_six_methods(visit: Visit) -> None:
    opened = visit()
    opened.page.click("#plane-frame", position={"x": 100, "y": 120})
    opened.until("location.hash.includes('x=')")
    x, y = opened.value("(() => { const s = explorer.fromHash(location.hash); return [s.x, s.y]; })()")
    assert (x, y) != (-0.2, 0.3)
    for _ in range(3):
        opened.page.click("#race-step")
    assert "step 3 of 2000" in opened.text("#race-text")
    losses = opened.value(
        """() => { const state = explorer.fromHash(location.hash), lanes = explorer.raceLanes(state);
             const race = explorer.createRace({fn: state.fn, start: [state.x, state.y], lanes});
             for (let i = 0; i < 3; i++) race.step();
             return race.lanes.map(lane => [lane.name, lane.loss2 ?? lane.loss1]); }"""
    )
    rows = opened.page.locator("#lanes tbody tr")
    assert rows.count() == 6
    for i, (name, loss) in enumerate(losses):
        assert rows.nth(i).locator("th").inner_text() == name
        assert float(rows.nth(i).locator("td").first.inner_text()) == pytest.approx(loss, rel=0.01)
    opened.page.click("#race-reset")
    assert "step 0 of 2000" in opened.text("#race-text")


PAINTED = """(id) => { const canvas = document.getElementById(id);
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0; for (let i = 3; i < data.length; i += 4) count += data[i] > 0; return count; }"""


def test_a_race_runs_pauses_and_tells_who_diverged(visit: Visit) -> None:
    opened = visit(still=False)
    assert opened.value(PAINTED, "trails") == 0
    opened.page.click("#race-run")
    assert opened.text("#race-run") == "Pause"
    opened.until("document.querySelector('#lanes').textContent.match(/diverged at/g)?.length == 2")
    opened.page.click("#race-run")
    assert "Diverged: EMA+SGD, SGD." in opened.text("#race-text")  # the paper's rate lies between two limits
    painted = opened.value(PAINTED, "trails")
    assert painted > 500
    opened.page.locator("#lanes input").nth(1).uncheck()  # a method can be hidden
    assert opened.value(PAINTED, "trails") < painted
    opened.page.click("#race-reset")
    assert opened.value(PAINTED, "trails") == 0
    assert opened.value(PAINTED, "contour") > 10_000


def test_every_function_has_its_own_start_rate_and_contour(visit: Visit) -> None:
    opened = visit()
    pictures = set()
    for name in ("Beale", "absolute", "bowl", "quadratic", "Rosenbrock"):
        opened.page.locator(f"#functions input[value={name}]").check(force=True)
        expected = opened.value("(name) => explorer.FUNCTIONS.find(each => each.name == name)", name)
        assert float(opened.page.input_value("#race-lr")) == expected["lr"]
        assert opened.number("#start") == expected["start"][0]
        opened.page.click("#race-run")  # without motion a run is one picture
        assert "step 2000 of 2000" in opened.text("#race-text")
        pictures.add(opened.value("document.getElementById('contour').toDataURL()"))
    assert len(pictures) == 5


# Taking it home ----------------------------------------------------------------------------------------------------


def test_python_is_copied_as_it_is_shown(visit: Visit) -> None:
    opened = visit(address="#m1=2000&m2=500&momentum=0.9")
    opened.page.click("#copy")
    opened.says("#copied", "copied")
    copied = opened.value("navigator.clipboard.readText()")
    assert copied == opened.value("document.getElementById('python').textContent")
    assert "tb.Spring(k=1.0, m1=2000.0, m2=500.0)" in copied
    compile(copied, "copied", "exec")


def test_a_shared_address_shows_the_same_setting_in_another_window(visit: Visit, file: Path) -> None:
    opened = visit()
    opened.page.locator("#presets button", has_text="GPA").click()
    opened.type("lr", "0.05")
    opened.page.click("#plane-frame", position={"x": 200, "y": 60})
    opened.page.click("#share")
    opened.says("#copied", "copied")
    url, hash_ = urldefrag(str(opened.value("navigator.clipboard.readText()")))
    assert url == file.as_uri()
    other = visit(address=f"#{hash_}")
    for selector in ("#sentence", "#numbers", "#race-text", "#python"):
        assert other.text(selector) == opened.text(selector)
    assert other.number("#start") == opened.number("#start")


def test_an_address_that_changes_is_followed_and_a_broken_one_does_no_harm(visit: Visit) -> None:
    opened = visit(address="#k=banana&mode=%ZZ&m1=-1e999&lr=")
    assert opened.text("#sentence").startswith("BELAY, velocity-free")
    opened.value("location.hash = '#mode=nesterov&mu=0.5'")
    opened.says("#sentence", "Nesterov")
    assert opened.page.locator("#mu").is_visible()
    opened.value("location.hash = '#k=100&m1=1'")  # no spring: it would jump past the other mass
    opened.says("#why", "κ1")
    assert "Nesterov" in opened.text("#sentence")


# Everyone ----------------------------------------------------------------------------------------------------------


def test_the_keyboard_alone_moves_everything(visit: Visit) -> None:
    opened = visit()
    press = opened.page.keyboard.press
    opened.tab_to("mass1")
    place = opened.number("#mass1")
    press("ArrowLeft")
    press("Shift+ArrowLeft")
    assert opened.number("#mass1") == pytest.approx(place - 0.22, abs=2e-3)
    opened.tab_to("k-slider")
    k = float(opened.page.input_value("#k"))
    press("ArrowRight")
    opened.settle()
    assert float(opened.page.input_value("#k")) > k
    opened.tab_to("curvature-handle")
    press("End")
    assert opened.number("#curvature-handle") == 10_000
    press("Home")
    press("PageUp")
    assert opened.number("#curvature-handle") == pytest.approx(0.01 * 1.05**10, rel=0.01)
    opened.tab_to("start")
    start = opened.number("#start")
    press("ArrowRight")
    assert opened.number("#start") > start
    opened.tab_to("race-step")
    press("Enter")
    assert "step 1 of 2000" in opened.text("#race-text")
    opened.tab_to("copy")
    press("Enter")
    opened.says("#copied", "copied")


def test_a_finger_taps_figures_and_scrolls_over_them(visit: Visit) -> None:
    opened = visit((390, 844), touch=True)
    before = opened.number("#start")
    opened.page.locator("#plane-frame").scroll_into_view_if_needed()
    opened.page.locator("#plane-frame").dispatch_event("pointerdown", {"pointerType": "touch", "button": 0})
    assert opened.number("#start") == before  # it may become a scroll
    opened.page.locator("#plane-frame").tap(position={"x": 40, "y": 50})
    assert opened.number("#start") != before
    opened.page.locator("#edge").scroll_into_view_if_needed()
    assert opened.number("#curvature-handle") == 5
    swipe(opened, "#locus", (0, -100))  # scrolls
    assert opened.number("#curvature-handle") == 5
    swipe(opened, "#curvature-handle", (60, 8))
    assert 40 < opened.number("#curvature-handle") < 120


def swipe(opened: Opened, selector: str, way: tuple[float, float]) -> None:
    """Draw a finger from the middle of an element along a way."""
    session = opened.page.context.new_cdp_session(opened.page)
    opened.page.locator(selector).scroll_into_view_if_needed()
    x, y = opened.middle(selector)
    session.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    for i in range(1, 11):
        point = {"x": x + way[0] * i / 10, "y": y + way[1] * i / 10}
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [point]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_the_focus_can_be_seen_on_handles(visit: Visit) -> None:
    opened = visit()
    opened.tab_to("mass2")
    halo = "getComputedStyle(document.querySelector('#mass2 .halo')).stroke"
    seen = opened.value(halo)
    opened.page.keyboard.press("Tab")
    assert opened.value(halo) != seen


@pytest.mark.parametrize("size", [(320, 640), (360, 740), (768, 1024)])
def test_it_is_never_wider_than_the_window(visit: Visit, size: tuple[int, int]) -> None:
    opened = visit(size)
    buttons = opened.page.locator("#presets button")
    opened.page.click("#race-run")  # with all words in the table of methods
    for i in range(PRESETS):
        buttons.nth(i).click()
        assert opened.value("document.documentElement.scrollWidth") <= size[0]


def test_light_and_dark_look_as_they_are_called_and_can_be_changed(visit: Visit, tmp_path: Path) -> None:
    def brightness(opened: Opened) -> float:
        path = tmp_path / "shot.png"
        opened.page.screenshot(path=path)
        with Image.open(path) as shot:
            return ImageStat.Stat(shot.convert("L")).mean[0]

    light, dark = visit(scheme="light"), visit(scheme="dark")
    assert brightness(light) > 200
    assert brightness(dark) < 80
    for opened in (light, dark):
        before = opened.value("document.getElementById('contour').toDataURL()")
        opened.page.click("#theme")
        assert opened.value("document.getElementById('contour').toDataURL()") != before  # canvases follow, too
    assert brightness(light) < 80
    assert brightness(dark) > 200
    light.page.reload()
    assert brightness(light) < 80  # it remembers


def test_whoever_asks_for_stillness_gets_no_frames_but_steps(visit: Visit) -> None:
    opened = visit(still=True)
    assert not opened.page.locator("#stage-run").is_visible()
    place = opened.number("#mass2")
    opened.page.click("#stage-step")
    assert opened.number("#mass2") > place
    opened.page.click("#stage-pluck")
    opened.type("k", "0.5")
    x, y = opened.middle("#mass1")
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 60, y)
    opened.page.mouse.up()
    opened.page.click("#race-run")
    assert "step 2000 of 2000" in opened.text("#race-text")
    assert opened.value("window.asked") == 0


def test_motion_asks_for_frames_only_while_something_moves(visit: Visit) -> None:
    opened = visit(still=False)
    opened.says("#stage-run", "Run")
    asked = opened.value("window.asked")
    assert asked > 10
    opened.value("new Promise(done => setTimeout(done, 100))")
    assert opened.value("window.asked") == asked


def test_every_figure_has_words_for_those_who_do_not_see_it(visit: Visit) -> None:
    opened = visit()
    names = opened.value(
        """[...document.querySelectorAll('main svg[id], main canvas')].map(node => {
             if (node.getAttribute('aria-hidden')) return 'hidden';
             const label = node.getAttribute('aria-labelledby');
             return label ? document.getElementById(label).textContent : node.getAttribute('aria-label'); })"""
    )
    assert len(names) == 11
    assert all(names)
    assert sum(len(name) > 60 for name in names) >= 5  # what a figure shows, not only its name
    handles = opened.page.locator("[role=slider]")
    assert handles.count() == 4
    for i in range(4):
        for attribute in ("aria-label", "aria-valuenow", "aria-valuemin", "aria-valuemax", "aria-valuetext"):
            assert handles.nth(i).get_attribute(attribute), attribute

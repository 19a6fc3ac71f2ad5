"""Drawings are well-formed SVG: numbers land on their pixels, and every picture says in words what it shows."""

from xml.etree import ElementTree

import pytest

from torchbelay.lab.pictures import PICTURES
from torchbelay.lab.pictures.curves import draw
from torchbelay.lab.pictures.svg import Axes, Drawing

SVG = "{http://www.w3.org/2000/svg}"


def test_axes_map_numbers_to_pixels_and_hold_what_lies_beyond_at_the_edge() -> None:
    axes = Axes(Drawing(200, 100, ""), (20, 10), (100, 50), (0, 10), (0, 2))
    assert [axes.at(0, 0), axes.at(10, 2), axes.at(5, 1), axes.at(5, 9)] == [(20, 60), (120, 10), (70, 35), (70, 10)]


def test_text_is_escaped() -> None:
    drawing = Drawing(10, 10, "a < b & c")
    drawing.text((1, 2), "p < q")
    root = ElementTree.fromstring(drawing.render())
    assert root.find(f"{SVG}title").text == "a < b & c"
    assert root.find(f"{SVG}text").text == "p < q"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_in_words_what_it_shows_and_stays_inside_its_frame(name: str) -> None:
    root = ElementTree.fromstring(PICTURES[name]())
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(root.find(f"{SVG}title").text.split()) > 10
    for line in root.iter(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x")) <= width
        assert 0 < float(text.get("y")) <= height


def test_curves_fall_as_losses_do_on_a_logarithmic_scale() -> None:
    root = ElementTree.fromstring(draw([1, 50, 100], [1.0, 0.1, 0.01], [1.0, 0.01, 0.001]))
    weights, average = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    )
    assert weights[1][1] - weights[0][1] == pytest.approx(weights[2][1] - weights[1][1], abs=0.15)
    assert average[2][1] > weights[2][1]

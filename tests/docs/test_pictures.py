"""The drawings in docs/images are those that the code draws, and pages show them with words beside them.

`python -m torchbelay.lab.pictures docs/images` draws them anew.
"""

import re

import pytest

from helpers.root import ROOT
from torchbelay.lab.pictures import PICTURES, rooms
from torchbelay.lab.pictures.__main__ import main

IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_what_the_code_draws(name: str) -> None:
    rewrite = "draw it anew with: python -m torchbelay.lab.pictures docs/images"
    assert (IMAGES / name).read_text(encoding="utf-8") == PICTURES[name](), rewrite


def test_the_command_writes_all_of_them(tmp_path) -> None:
    main(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.svg")} == {*PICTURES}


def test_no_drawing_of_a_method_is_left_over() -> None:
    found = {str(path.relative_to(IMAGES)) for path in (IMAGES / "methods").iterdir()}
    assert found == {name for name in PICTURES if name.startswith("methods/")}


def test_every_drawing_is_shown_with_words_for_those_who_do_not_see_it() -> None:
    shown = set()
    for page in PAGES:
        for words, target in re.findall(r"!\[(.*?)\]\((\S+?)\)", page.read_text(encoding="utf-8"), re.S):
            if "://" in target:
                continue  # a badge is its words
            assert len(words.split()) >= 4, f"{page.name}: {target}"
            if target.endswith(".svg"):
                shown.add((page.parent / target).resolve())
    assert {*IMAGES.rglob("*.svg")} <= shown


def test_the_rooms_are_drawn_in_the_order_of_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {name for names, _, _ in rooms.FLOORS for name in names} == {*re.findall(r"^\| `([\w.]+/?)` \|", page, re.M)}
    (arrows,) = re.findall(r"^    (physics.* ──►.*)$", page, re.M)
    floors = [{name.strip() for name in floor.split(",")} for floor in arrows.split("──►")]
    assert floors == [{name.removesuffix(".py").removesuffix("/") for name in names} for names, _, _ in rooms.FLOORS]

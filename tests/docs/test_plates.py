"""The figures in docs/images were drawn from the records that are kept now: each names the digest of its records.

Below each figure a page has the caption that the report has. `PYTHONPATH=src:tests python tests/docs/test_plates.py`
draws the figures anew and writes the captions; with `captions` as argument, only these. Pixels are not compared,
because another version of matplotlib shifts them.
"""

import hashlib
import io
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from helpers import kept_records
from helpers.root import ROOT
from torchbelay.lab.part import Plate
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style

IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))
FIELD = "Records"  # of a picture's metadata
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("paper", "theory", "after-training")]
SHOWN = re.compile(
    r"(?P<picture>^!\[[^]]*\]\(images/(?P<name>[\w-]+)\.png\))"
    r"(?:\n\n<!-- caption: (?P=name) -->\n.*?\n<!-- /caption -->)?",
    re.MULTILINE | re.DOTALL,
)


def part_of(name: str) -> str:
    """Return the part of a plate, which its name begins with."""
    return name.split("-")[0]


def digest(part: str) -> str:
    """Return the digest of a part's kept records."""
    return hashlib.sha256(kept_records.paths()[part].read_bytes()).hexdigest()


@cache
def plates(part: str) -> dict[str, Plate]:
    """Return the plates of a part's kept records, by name."""
    return {plate.name: plate for plate in PARTS[part].draw(kept_records.lines(part))}


def drawn(name: str) -> bytes:
    """Return a plate of the report as PNG, with the digest of its records."""
    part = part_of(name)
    plate = plates(part)[name]
    about, stream = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_text(FIELD, digest(part))
    picture = Image.open(io.BytesIO(style.as_bytes(plate.figure, "png")))  # type: ignore[arg-type]
    picture.save(stream, "png", pnginfo=about, optimize=True)
    return stream.getvalue()


def with_captions(text: str) -> str:
    """Return a page with the caption of each figure below it, in italics."""

    def put(found: re.Match[str]) -> str:
        name = found["name"]
        caption = plates(part_of(name))[name].caption
        assert not re.search(r"[*`[]|<\S", caption), f"{name}: a mark of Markdown in its caption"
        return f"{found['picture']}\n\n<!-- caption: {name} -->\n*{caption}*\n<!-- /caption -->"

    return SHOWN.sub(put, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_below_each_figure_is_the_caption_of_the_report(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert SHOWN.search(text)
    assert text == with_captions(text), "renew it: PYTHONPATH=src:tests python tests/docs/test_plates.py captions"


def test_every_figure_of_the_report_in_these_pages_has_its_caption() -> None:
    shown = [found["name"] for page in PAGES for found in SHOWN.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(shown) == [path.stem for path in IMAGES]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_the_figure_is_drawn_from_the_records_as_they_are(path: Path) -> None:
    found = Image.open(io.BytesIO(path.read_bytes())).info.get(FIELD)
    assert found == digest(part_of(path.stem)), "draw it anew: PYTHONPATH=src:tests python tests/docs/test_plates.py"


def test_a_figure_names_its_records() -> None:
    assert Image.open(io.BytesIO(drawn("figure4-iterations"))).info[FIELD] == digest("figure4")


if __name__ == "__main__":
    for each in IMAGES if sys.argv[1:] != ["captions"] else []:
        each.write_bytes(drawn(each.stem))
    for each in PAGES:
        with_captions(each.read_text(encoding="utf-8"))  # draws what it needs: between the next two lines is no time
        each.write_text(with_captions(each.read_text(encoding="utf-8")), encoding="utf-8")

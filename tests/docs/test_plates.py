"""The figures in docs/images were drawn from the records that are kept now: each names the digest of its records.

`PYTHONPATH=src:tests python tests/docs/test_plates.py` draws them anew. Pixels are not compared, because another
version of matplotlib shifts them.
"""

import hashlib
import io
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from helpers import kept_records
from helpers.root import ROOT
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style

IMAGES = sorted((ROOT / "docs" / "images").glob("*.png"))
FIELD = "Records"  # of a picture's metadata


def part_of(name: str) -> str:
    """Return the part of a plate, which its name begins with."""
    return name.split("-")[0]


def digest(part: str) -> str:
    """Return the digest of a part's kept records."""
    return hashlib.sha256(kept_records.paths()[part].read_bytes()).hexdigest()


def drawn(name: str) -> bytes:
    """Return a plate of the report as PNG, with the digest of its records."""
    part = part_of(name)
    (plate,) = (plate for plate in PARTS[part].draw(kept_records.lines(part)) if plate.name == name)
    about, stream = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_text(FIELD, digest(part))
    picture = Image.open(io.BytesIO(style.as_bytes(plate.figure, "png")))  # type: ignore[arg-type]
    picture.save(stream, "png", pnginfo=about, optimize=True)
    return stream.getvalue()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_the_figure_is_drawn_from_the_records_as_they_are(path: Path) -> None:
    found = Image.open(io.BytesIO(path.read_bytes())).info.get(FIELD)
    assert found == digest(part_of(path.stem)), "draw it anew: PYTHONPATH=src:tests python tests/docs/test_plates.py"


def test_a_figure_names_its_records() -> None:
    assert Image.open(io.BytesIO(drawn("figure4-iterations"))).info[FIELD] == digest("figure4")


if __name__ == "__main__":
    for each in IMAGES:
        each.write_bytes(drawn(each.stem))

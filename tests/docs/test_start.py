"""docs/start.md is followed word by word, and its picture is drawn from what its own run measures.

`PYTHONPATH=src:tests python tests/docs/test_start.py` draws the picture anew.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers import guide
from helpers.root import ROOT
from torchbelay.lab.pictures.curves import draw

PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
PICTURE = ROOT / "docs" / "images" / "start.svg"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PIXELS = 8.0  # on another processor, 1,000 steps of training end elsewhere in the last digits


def picture(names: dict[str, Any]) -> str:
    """Return the picture of the losses that the page's program has kept."""
    return draw(names["steps"], names["weights"], names["average"])


@pytest.mark.thorough
def test_the_page_can_be_followed_and_its_picture_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = guide.follow(PAGE, tmp_path, "start.md")
    assert names["average"][-1] < names["weights"][-1] / 3  # "the average evens the noise out"
    assert names["average"][0] > names["weights"][0]  # "at first its loss is the higher one"
    drawn, kept = picture(names), PICTURE.read_text(encoding="utf-8")
    rewrite = "draw it anew with: PYTHONPATH=src:tests python tests/docs/test_start.py"
    assert NUMBER.sub("", drawn) == NUMBER.sub("", kept), rewrite
    pairs = zip(NUMBER.findall(drawn), NUMBER.findall(kept), strict=True)
    assert max(abs(float(one) - float(other)) for one, other in pairs) < PIXELS, rewrite


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PICTURE.write_text(picture(guide.follow(PAGE, Path(folder))), encoding="utf-8")

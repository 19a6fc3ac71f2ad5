"""Checks of a figure's text: a short caption, and notes below it that say how the figure was made."""

import re

from torchbelay.lab.part import Plate

SENTENCES, WORDS = 2, 50


def full_text(plate: Plate) -> str:
    """Return the caption and the notes."""
    return " ".join((plate.caption, *plate.notes))


def count_sentences(text: str) -> int:
    """Return the number of sentences."""
    return len(re.findall(r"[.!?](?=\s|$)", text))


def check_brevity(plate: Plate) -> None:
    """Check that a caption has at most two sentences and 50 words, and that every note is a sentence."""
    assert 1 <= count_sentences(plate.caption) <= SENTENCES, plate.caption
    assert len(plate.caption.split()) <= WORDS, (len(plate.caption.split()), plate.caption)
    assert plate.notes, plate.name
    for text in (plate.caption, *plate.notes):
        assert re.fullmatch(r"\S.*[.)]", text), text
        assert "  " not in text, text

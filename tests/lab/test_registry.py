"""All plates of all parts, drawn from the kept records: what each of them must say."""

import re
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from helpers import kept_records
from helpers.captions import SENTENCES, check_brevity, count_sentences, full_text
from torchbelay.lab.part import Plate, Table
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style

REPELS = r"θ (= )?[−-]\d|[Rr]epuls|[Rr]epel"  # a spring with θ < 0


@pytest.fixture(scope="module")
def plates() -> dict[str, Plate]:
    return {plate.name: plate for name, part in PARTS.items() for plate in part.draw(kept_records.lines(name))}


def shown(plate: Plate) -> str:
    """Return the words inside a figure or a table."""
    if isinstance(plate.figure, Table):
        return " ".join(cell for row in (plate.figure.columns, *plate.figure.rows) for cell in row)
    return " ".join(text.get_text() for text in plate.figure.findobj(Text))


def test_every_plate_with_a_repelling_spring_names_generalized_primal_averaging(plates: dict[str, Plate]) -> None:
    repelling = [plate for plate in plates.values() if re.search(REPELS, f"{full_text(plate)} {shown(plate)}")]
    assert {"theory-floor", "ring-pairs", "cifar10-samples", "sign-table"} <= {plate.name for plate in repelling}
    unnamed = [plate.name for plate in repelling if "Generalized Primal Averaging" not in full_text(plate)]
    assert not unnamed


def test_every_caption_is_two_short_sentences(plates: dict[str, Plate]) -> None:
    """What one sees, and what follows from it; the notes have the rest."""
    for plate in plates.values():
        check_brevity(plate)
        assert count_sentences(plate.caption) == SENTENCES, plate.caption


def test_titles_and_labels_lie_within_their_figures_and_tick_labels_do_not_run_into_each_other(
    plates: dict[str, Plate],
) -> None:
    cut, collided = [], []
    for plate in plates.values():
        if not isinstance(plate.figure, Figure):
            continue
        with style.house():
            FigureCanvasAgg(plate.figure).draw()
        for ax in plate.figure.axes:
            for text in (
                *(each for each in ax.get_children() if isinstance(each, Text)),
                ax.xaxis.label,
                ax.yaxis.label,
            ):
                box = text.get_window_extent()
                if text.get_text() and not (box.x0 > -1 and box.x1 < plate.figure.bbox.width + 1):
                    cut.append((plate.name, text.get_text()))
            low, high = sorted(ax.get_xlim())
            inside = [t for t in ax.get_xticklabels() if t.get_text() and low <= t.get_position()[0] <= high]
            boxes = [text.get_window_extent() for text in inside]
            if any(one.x1 > other.x0 + 4 and one.overlaps(other) for one, other in pairwise(boxes)):
                collided.append(plate.name)
    assert (cut, collided) == ([], [])

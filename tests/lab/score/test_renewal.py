"""Kept records describe their setting in the words of the present plan, and nothing else in them is renewed."""

import json
from pathlib import Path

import pytest

from helpers import kept_records
from torchbelay.lab.part import LabError, Record
from torchbelay.lab.records import select
from torchbelay.lab.registry import PARTS
from torchbelay.lab.score import renewal
from torchbelay.lab.score.captions import difference_notes
from torchbelay.lab.score.studies import STUDIES


def protocols(part: str) -> list[Record]:
    return select(kept_records.lines(part), "protocol")


@pytest.mark.parametrize("part", STUDIES)
def test_kept_records_differ_from_the_paper_in_the_words_of_the_present_plan(part: str) -> None:
    assert {protocol["study"] for protocol in protocols(part)} == {*STUDIES[part]}
    for protocol in protocols(part):
        assert protocol["differs"] == renewal.present_differences(protocol)


def test_a_note_on_what_happened_in_the_runs_stays(tmp_path: Path) -> None:
    """Nothing but `differs` is renewed, and lines of other kinds keep every byte."""
    kept = kept_records.paths()["mnist"].read_text(encoding="utf-8")
    old = [json.loads(line) for line in kept.splitlines()]
    path = tmp_path / "mnist.jsonl"
    path.write_text(
        "".join(
            json.dumps(line | {"differs": ["Old words."]}) + "\n" if line.get("kind") == "protocol" else text + "\n"
            for line, text in zip(old, kept.splitlines(), strict=True)
        ),
        encoding="utf-8",
    )
    renewal.main([str(path)])
    assert path.read_text(encoding="utf-8") == kept


def test_the_words_follow_from_the_recorded_length_and_network() -> None:
    small, *_, large = protocols("readings")
    for each, features in ((small, 32), (large, 64)):
        assert f"here {features} features, 3,000 steps" in renewal.present_differences(each)[0]
    half = small | {"steps": 1500}
    assert "1,500 steps" in renewal.present_differences(half)[0]
    with pytest.raises(LabError, match="the plan of readings has no such setting"):
        renewal.present_differences(small | {"features": 48})


def test_the_report_prints_the_present_sentences_and_the_remarks() -> None:
    notes = difference_notes(kept_records.lines("mnist"), "table1")
    assert any("§3.3's constant of 10⁶ steps would give k = 200 here" in note for note in notes)
    assert notes[-2].startswith("In seeds 3 and 4, the equal-memory EMA and the matched EMA")
    printed = [note for part in STUDIES for plate in PARTS[part].draw(kept_records.lines(part)) for note in plate.notes]
    assert not [note for note in printed if "Nor does it print" in note or "a step;" in note]

"""docs/score-models.md names parts that have been run."""

import re

from helpers import kept_records
from helpers.root import ROOT


def test_every_part_that_it_names_has_runs() -> None:
    text = (ROOT / "docs" / "score-models.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `torchbelay reproduce (\w+)`:", text, re.M)
    assert {"figure4", "readings", "warmup", "penalty"} <= {*named}
    assert [part for part in named if all(line["kind"] != "run" for line in kept_records.lines(part))] == []

"""docs/score-models.md says which parts have been run."""

import re

from helpers import kept_records
from helpers.root import ROOT


def test_it_says_which_parts_have_not_been_run() -> None:
    text = (ROOT / "docs" / "score-models.md").read_text(encoding="utf-8")
    said = {
        part: bool(note)
        for part, note in re.findall(r"^- `torchbelay reproduce (\w+)`( \(not run so far\))?:", text, re.M)
    }
    assert said == {part: any("pending" in line for line in kept_records.lines(part)) for part in said}
    assert {"figure4", "readings", "warmup", "penalty"} <= said.keys()

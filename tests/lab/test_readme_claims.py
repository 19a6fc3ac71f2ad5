"""What README says of the paper's claims is what the rules find in the records that are kept beside it."""

import re
from pathlib import Path

from torchbelay.lab import records as on_disk
from torchbelay.lab.claims import judge
from torchbelay.lab.parts import PARTS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records"


def table() -> str:
    """The table, made anew; `python tests/lab/test_readme_claims.py` prints it."""
    found = {path.stem: on_disk.read(path)[1] for path in sorted(RECORDS.glob("*.jsonl"))}
    rows = [f"| {v.claim.id} | {v.claim.text} | **{v.finding.answer}** | {v.finding.summary} |" for v in judge(found)]
    return "\n".join(["| | the paper says | verdict | what we found |", "|---|---|---|---|", *rows])


def test_the_table_of_claims_follows_from_the_kept_records() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(r"<!-- claims:.*?-->\n(.*?)\n<!-- /claims -->", readme, re.DOTALL)
    assert said is not None
    assert said[1] == table()


def test_every_part_has_its_records_kept_and_they_are_those_of_a_full_run() -> None:
    heads = {path.stem: on_disk.read(path)[0] for path in RECORDS.glob("*.jsonl")}
    assert set(heads) == set(PARTS)
    assert all(head["quick"] is False and head["seed"] == 0 for head in heads.values())


if __name__ == "__main__":
    print(table())  # noqa: T201

"""What README says of the paper's claims is what the rules find in the records that are kept beside it."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median

import pytest

from torchbelay.lab import records as on_disk
from torchbelay.lab.claims import judge
from torchbelay.lab.parts import PARTS
from torchbelay.lab.score.found import FAILED

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "records"
COMMITTED = Path(str(files("torchbelay.lab.score"))) / "records"  # of what needs a GPU: they come with the package
BEST = (("BELAY", 3e-4), ("EMA", 1e-3))  # of the long runs on MNIST, where images were made


def kept() -> dict[str, Path]:
    """Where each part's records are kept: those of docs come first."""
    return {path.stem: path for folder in (COMMITTED, RECORDS) for path in sorted(folder.glob("*.jsonl"))}


def table() -> str:
    """The table, made anew; `python tests/lab/test_readme_claims.py` prints it and the next one."""
    found = {name: on_disk.read(path)[1] for name, path in kept().items()}
    rows = [f"| {v.claim.id} | {v.claim.text} | **{v.finding.answer}** | {v.finding.summary} |" for v in judge(found)]
    return "\n".join(["| | the paper says | verdict | what we found |", "|---|---|---|---|", *rows])


def sign_table() -> str:
    """What the sign of the spring does on MNIST: medians over seeds, or how many of them are lost."""
    runs = [line for line in on_disk.read(kept()["sign"])[1] if line["kind"] == "run"]
    thetas, lrs = (sorted({line[key] for line in runs}) for key in ("theta", "lr"))
    names = [f"θ = {theta:+g}".replace("-", "−") if theta else "θ = 0 (EMA)" for theta in thetas]
    rows = [f"| learning rate | {' | '.join(names)} |", "|---" * (len(thetas) + 1) + "|"]
    for lr in lrs:
        cells = []
        for theta in thetas:
            losses = [line["final"]["w2"]["test"] for line in runs if (line["theta"], line["lr"]) == (theta, lr)]
            lost = sum(loss is None or loss > FAILED for loss in losses)
            cells.append(f"{lost} of {len(losses)} lost" if lost else f"{median(losses):.4f}")
        rows.append(f"| {lr:g} | {' | '.join(cells)} |")
    return "\n".join(rows)


@pytest.mark.parametrize(("name", "made"), [("claims", table), ("sign", sign_table)])
def test_the_tables_follow_from_the_kept_records(name: str, made: Callable[[], str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.search(rf"<!-- {name}:.*?-->\n(.*?)\n<!-- /{name} -->", readme, re.DOTALL)
    assert said is not None
    assert said[1] == made()


def test_what_is_said_of_table_1_follows_too() -> None:
    lines = on_disk.read(kept()["mnist"])[1]
    drawn = {(line["arm"], line["lr"], line["seed"]): line["fid"] for line in lines if line["kind"] == "fid"}
    belay, ema = ({seed: fid for (a, lr, seed), fid in drawn.items() if (a, lr) == at} for at in BEST)
    losses = {
        (line["arm"], line["lr"], line["seed"]): line["final"]["w2"]["test"]
        for line in lines
        if line["kind"] == "run" and line["study"] == "table1"
    }
    assert None not in belay.values()
    ((known, fid),) = ((seed, fid) for seed, fid in ema.items() if fid is not None)
    assert len(belay) == len(ema) == 2
    assert losses[(*BEST[1], known)] < losses[(*BEST[0], known)]
    assert not [key for key, loss in losses.items() if key[1] == 5e-2 and loss is not None]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"BELAY's FID is {fmean(belay.values()):.1f} over two seeds" in readme
    assert f"EMA's {fid:.1f} in one, where EMA's test loss is even a little the lower one" in readme


def test_every_part_has_its_records_kept_and_they_are_those_of_a_full_run() -> None:
    heads = {name: on_disk.read(path)[0] for name, path in kept().items()}
    assert set(heads) == set(PARTS)
    assert all(head["quick"] is False and head["seed"] == 0 for head in heads.values())


if __name__ == "__main__":
    print(table(), sign_table(), sep="\n\n")  # noqa: T201

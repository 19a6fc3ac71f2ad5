"""What README says of the paper's claims is what the rules find in the records that are kept beside it."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median

import pytest

from helpers.root import ROOT
from torchbelay.lab import records as on_disk
from torchbelay.lab.claims import judge
from torchbelay.lab.registry import PARTS
from torchbelay.lab.score.analysis import ARMS, FAILED, StudyResults, fids, is_lost, rate_of_fids
from torchbelay.lab.score.comparison import compare

RECORDS = ROOT / "docs" / "records"
COMMITTED = Path(str(files("torchbelay.lab.score"))) / "records"  # of what needs a GPU: they come with the package


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
    long = StudyResults(lines, "table1")
    ema, matched, belay = found = [[*fids(lines, long, arm, 3e-4).items()] for arm in ARMS]
    assert all([seed for seed, _ in each] == long.seeds == [3, 4, 5] for each in found)
    assert all(a < b < c for (_, a), (_, b), (_, c) in zip(ema, matched, belay, strict=True))
    assert all(long.lost_count(arm, 5e-2) == 3 for arm in ARMS)
    assert all(long.lost_count(arm, 1e-3) for arm in long.arms)
    assert {rate_of_fids(lines, long, arm) for arm in ARMS} == {3e-4}
    means = [f"{fmean(fid for _, fid in each):.1f}" for each in found]
    to_ema, to_matched, between = (
        compare(dict(a), dict(b)) for a, b in ((belay, ema), (belay, matched), (matched, ema))
    )
    assert [each.reading for each in (to_ema, to_matched, between)] == ["higher", "open", "open"]
    assert not any(map(is_lost, (loss for arm in ARMS for loss in long.losses(arm, 3e-4).values())))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "EMA has an FID of {}, the EMA that is matched to BELAY {} and BELAY {}, the opp".format(*means) in readme
    assert f"BELAY's is {to_ema.size}.".replace(" (", " times EMA's (") in readme
    assert f"the factor is {to_matched.size}." in readme


def test_every_part_has_its_records_kept_and_they_are_those_of_a_full_run() -> None:
    heads = {name: on_disk.read(path)[0] for name, path in kept().items()}
    assert set(heads) == set(PARTS)
    assert all(head["quick"] is False and head["seed"] == 0 for head in heads.values())


if __name__ == "__main__":
    print(table(), sign_table(), sep="\n\n")  # noqa: T201

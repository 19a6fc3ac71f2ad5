"""docs/paper.md says what the rules find in the records that are kept beside it.

`PYTHONPATH=src:tests python tests/docs/test_paper.py` rewrites the page's two tables from the records.
"""

import re
from collections.abc import Callable
from statistics import fmean, median

import pytest

from helpers import kept_records
from helpers.root import ROOT
from torchbelay.lab.claims import judge
from torchbelay.lab.registry import PARTS
from torchbelay.lab.score.analysis import ARMS, FAILED, StudyResults, fids, is_lost, rate_of_fids
from torchbelay.lab.score.comparison import compare

PAGE = ROOT / "docs" / "paper.md"
REWRITE = "rewrite the table with: PYTHONPATH=src:tests python tests/docs/test_paper.py"


def claims_table() -> str:
    """Return the table of claims, computed from the records."""
    found = {name: kept_records.lines(name) for name in kept_records.paths()}
    rows = [f"| {v.claim.id} | {v.claim.text} | **{v.finding.answer}** | {v.finding.summary} |" for v in judge(found)]
    return "\n".join(["| | the paper says | verdict | what we found |", "|---|---|---|---|", *rows])


def sign_table() -> str:
    """Return what the sign of the spring does on MNIST: the median over seeds, or how many seeds are lost."""
    runs = [line for line in kept_records.lines("sign") if line["kind"] == "run"]
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


TABLES: dict[str, Callable[[], str]] = {"claims": claims_table, "sign": sign_table}


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of a generated table between its two comments."""
    return re.compile(rf"(<!-- {name}:.*?-->\n)(.*?)(\n<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_follow_from_the_kept_records(name: str) -> None:
    said, right = block(name).search(PAGE.read_text(encoding="utf-8")), TABLES[name]()
    assert said is not None
    assert said[2] == right, f"{REWRITE}\nthe right table is\n{right}"


def test_what_is_said_of_table_1_follows_too() -> None:
    lines = kept_records.lines("mnist")
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
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "EMA has an FID of {}, the EMA that is matched to BELAY {} and BELAY {}, the opp".format(*means) in page
    assert f"BELAY's is {to_ema.size}.".replace(" (", " times EMA's (") in page
    assert f"the factor is {to_matched.size}." in page


def test_what_is_said_of_the_price_on_cifar10_follows_too() -> None:
    study = StudyResults(kept_records.lines("cifar10"), "cifar10")
    (lr,) = study.lrs
    price = study.compare("θ −0.5", "EMA", lr)
    assert price.above  # within the margin of equality, and still behind EMA
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"θ = −0.5 had {price.size}.".replace(" (", " times EMA's loss (") in page


def test_every_part_has_its_records_kept_and_they_are_those_of_a_full_run() -> None:
    heads = {name: kept_records.head(name) for name in kept_records.paths()}
    assert set(heads) == set(PARTS) - {"gpt"}  # it takes a GPU, and has not been run in full
    assert all(head["quick"] is False and head["seed"] == 0 for head in heads.values())


def rewrite() -> None:
    """Renew both tables of the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, made in TABLES.items():
        right = made()
        page, renewed = block(name).subn(lambda found, right=right: f"{found[1]}{right}{found[3]}", page)  # type: ignore[misc]
        assert renewed == 1, f"{PAGE} must have one table {name!r}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    rewrite()

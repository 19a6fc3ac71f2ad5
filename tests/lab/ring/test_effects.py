"""BELAY against EMA on the ring in three ways: computed a second time, from the lines of the kept records alone."""

import math
from statistics import fmean, stdev

import pytest

from helpers import kept_records
from helpers.captions import check_brevity
from torchbelay.lab.part import Record, Table
from torchbelay.lab.ring.effects import effects, effects_plate, explain_high_rate, high_rate_rows, studies
from torchbelay.lab.score.comparison import Comparison

T = {2: 12.7062, 6: 2.570582, 10: 2.262157}  # Student's 97.5% quantiles for n pairs, from tables
SPRINGS = {  # with the decay of the EMA beside each
    "k 1, m1 2000, m2 500": "decay 0.999",
    "k 4, m1 2000, m2 500": "decay 0.996",
    "k 1, m1 200, m2 200": "decay 0.9975",
}
LINES = kept_records.lines("ring")
RUNS = [line for line in LINES if line["kind"] == "run"]


def losses(arm: str, setting: str, lr: float) -> list[float | None]:
    """The test losses of all seeds, in order; None if the run failed."""
    found = [r for r in RUNS if (r["arm"], r["setting"], r["lr"]) == (arm, setting, lr)]
    return [None if r["failed"] else r["test"] for r in sorted(found, key=lambda r: r["seed"])]


def interval(spring: str, rival: str, lr: float, rivals_lr: float | None = None) -> tuple[float, float, float]:
    """BELAY ÷ rival with its interval, over the seeds that neither lost."""
    setting = SPRINGS[spring] if rival == "EMA" else spring
    ours, theirs = losses("BELAY", spring, lr), losses(rival, setting, rivals_lr or lr)
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    reach = T[len(logs)] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def ends(found: Comparison) -> tuple[float, float, float]:
    assert found.ratio is not None
    return found.ratio.mean, found.ratio.low, found.ratio.high


def test_every_ratio_is_that_of_the_runs() -> None:
    found = effects(LINES)
    assert [effect.study for effect in found] == [*SPRINGS]
    for effect in found:
        assert [*effect.nominal] == [*effect.effective] == [0.00046, 0.001, 0.0022, 0.0046, 0.01, 0.022]
        for rival, way in (("EMA", effect.nominal), ("matched EMA", effect.effective)):
            for lr, each in way.items():
                assert ends(each) == pytest.approx(interval(effect.study, rival, lr), rel=1e-4)
        assert ends(effect.best) == pytest.approx(interval(effect.study, "EMA", 0.01), rel=1e-4)
        assert effect.left_out == ([0.046, 0.1], [0.046, 0.1])


def test_leaving_one_seed_out_chooses_the_rates_that_half_of_the_seeds_chose() -> None:
    """The figure of pairs has the second rule, and the table of effects the first: here they agree."""
    by_halves = {
        (line["contestant"], line["lr"]) for line in LINES if line["kind"] == "choice" and line["contestant"] == "BELAY"
    }
    paper = studies(LINES)[0]
    assert {("BELAY", paper.best_rate("BELAY", without=seed)) for seed in paper.seeds} == by_halves == {("BELAY", 0.01)}


def test_at_the_high_rate_belay_gains_by_its_lower_rate_alone() -> None:
    """EMA of the same nominal rate loses seeds there; the matched EMA loses none, and is better than BELAY."""
    rows = {spring: row for spring, *row in high_rate_rows(LINES)}
    assert rows["k 1, m1 2000, m2 500"] == [
        "4, 5 and 0 of 10",
        "0.889 (0.803 to 0.983), 2 pairs",
        "1.35 (1.05 to 1.73), 6 pairs",
    ]
    paper = "k 1, m1 2000, m2 500"
    assert interval(paper, "EMA", 0.046) == pytest.approx((0.889, 0.803, 0.983), abs=0.001)
    assert interval(paper, "matched EMA", 0.046) == pytest.approx((1.35, 1.049, 1.73), abs=0.006)
    assert {sum(loss is None for loss in losses("matched EMA", spring, 0.046)) for spring in SPRINGS} == {0}
    assert explain_high_rate(LINES).startswith(
        "At 0.046 the matched EMA, which has BELAY's effective rate, loses fewer"
    )


def test_nothing_is_explained_that_the_records_do_not_show() -> None:
    def worse(line: Record) -> Record:
        mine = line["kind"] == "run" and line["arm"] == "matched EMA" and line["lr"] == 0.046
        return line | {"test": 2 * line["test"]} if mine else line

    assert explain_high_rate([worse(line) for line in LINES]) == ""


def test_the_plate_counts_where_belay_is_shown_to_be_better() -> None:
    plate = effects_plate(LINES)
    assert plate is not None
    check_brevity(plate)
    assert isinstance(plate.figure, Table)
    assert len(plate.figure.rows) == len(SPRINGS)
    assert plate.notes[-1] == (
        "Of these 39 comparisons, BELAY is shown to be worse in 22, equal in 11 and better in 1; 5 are undecided. "
        "Better: ring (k 4, m1 2000, m2 500), excess test loss at equal effective rate 0.0022: 0.941 (0.929 to 0.954)."
    )


def test_without_a_run_that_works_there_is_no_plate() -> None:
    assert effects_plate([line | {"failed": True} if line["kind"] == "run" else line for line in LINES]) is None

"""The figures and tables of the language model, on the kept records."""

from statistics import fmean

from helpers import kept_records
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.arms import CONSTANT
from torchbelay.lab.gpt.figures import CHOSEN, draw, lower_elsewhere
from torchbelay.lab.part import Table

LINES = kept_records.lines("gpt")


def test_the_table_says_where_the_rates_are_from_and_which_other_rate_has_a_lower_loss() -> None:
    runs = Runs(LINES)
    means = {lr: fmean(loss or 9.9 for loss in runs.losses(CONSTANT.name, lr).values()) for lr in runs.lrs}
    best = min(means, key=means.__getitem__)
    assert best != runs.best_lr(CONSTANT.name)
    (plate,) = (plate for plate in draw(LINES) if plate.name == "gpt-arms")
    assert isinstance(plate.figure, Table)
    assert plate.figure.columns[1] == CHOSEN
    (note,) = lower_elsewhere(runs)
    assert f"θ = 0 (EMA) at {best:g} ({means[best]:.4f})" in note
    assert note in plate.notes


def test_an_arm_whose_chosen_rate_is_its_best_is_not_named() -> None:
    at_chosen = [r for r in LINES if r.get("split") != "judge" or r["lr"] == Runs(LINES).best_lr(r["arm"])]
    assert lower_elsewhere(Runs(at_chosen)) == ()

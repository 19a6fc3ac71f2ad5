"""The paper's rate under every reading: warm-up and Adam's eps reach the optimizer, and the table says what trains."""

from collections.abc import Iterator

import pytest
import torch

from helpers import score_records
from helpers.captions import check_brevity
from helpers.score_models import squares
from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record, Table
from torchbelay.lab.score import readings, run, studies
from torchbelay.lab.score.experiment import lr_scale, run_group
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.studies import Group
from torchbelay.lab.score.training.learner import Learner
from torchbelay.lab.score.training.speed import build_learners

CPU = torch.device("cpu")
MODEL = NCSN(shape=(1, 8, 8), features=4, levels=Levels(1.0, 0.1, 2, 1, 1e-3))


def tiny() -> Group:
    """Two arms, cold and with four steps of warm-up, at two values of eps."""
    arms = studies.ema(studies.MNIST_EMA), studies.belay(studies.MNIST_BELAY)
    lanes = tuple(Lane(arm, 1e-2, eps, warm_up) for warm_up in (0, 4) for eps in (1e-8, 1e-2) for arm in arms)
    return Group("readings", "mnist", MODEL, lanes, seed=0, steps=6, batch=2, points=1)


def test_eps_reaches_the_optimizer() -> None:
    learners = build_learners(MODEL, tiny().lanes, 0, CPU, "eager")
    assert [each.optimizer.param_groups[0]["eps"] for each in learners.members] == [1e-8, 1e-8, 1e-2, 1e-2] * 2


def test_the_learning_rate_grows_over_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[tuple[int, float, str], list[float]] = {}
    step = Learner._step

    def watched(self: Learner, *given: object) -> None:
        key = self.lane.warm_up, self.lane.eps, self.lane.arm.name
        rates.setdefault(key, []).append(self.optimizer.param_groups[0]["lr"])
        step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "_step", watched)
    found = list(run_group(tiny(), squares(MODEL.shape, train=6, test=6), CPU, "eager", lambda n: None, None, 4))
    assert len(rates) == 8
    for (warm_up, _, _), used in rates.items():
        grown = [0.25e-2, 0.5e-2, 0.75e-2, 1e-2, 1e-2, 1e-2]
        assert used == pytest.approx(grown if warm_up else [1e-2] * 6)
    runs = [line for line in found if line["kind"] == "run"]
    assert [(line["warm_up"], line["eps"], line["features"]) for line in runs] == [
        (lane.warm_up, lane.eps, 4) for lane in tiny().lanes
    ]
    losses = {(line["warm_up"], line["eps"], line["arm"]): line["final"]["w1"]["test"] for line in runs}
    assert len({*losses.values()}) == 8  # every reading trains another network


def test_a_ramp_of_the_whole_group_and_a_warm_up_of_a_lane_do_not_disturb_each_other() -> None:
    group = Group("x", "mnist", MODEL, (), seed=0, steps=10, batch=2, ramp=0.5)
    lane = Lane(studies.ema(studies.MNIST_EMA), 1e-3)
    assert [lr_scale(group, lane, step) for step in (1, 2, 5, 6)] == [0.2, 0.4, 1.0, 1.0]
    assert lr_scale(tiny(), lane, 1) == 1.0


def lines(*given: tuple[int, int, float, float | None]) -> list[Record]:
    """Runs of some readings: features, warm-up, eps, and BELAY's loss over EMA's; None if both are lost."""

    def each() -> Iterator[Record]:
        for features, warm_up, eps, factor in given:
            ema = None if factor is None else 1.0
            for r in score_records.runs("readings", {5e-2: 0.06}, {"EMA": ema, "BELAY": factor}, seeds=5):
                yield r | {"features": features, "warm_up": warm_up, "eps": eps}

    return [*each(), score_records.protocol("readings")]


def test_the_table_says_what_trains() -> None:
    (plate,) = readings.draw(lines((64, 0, 1e-8, None), (64, 500, 1e-3, 0.9), (32, 500, 1e-2, 1.1)))
    check_brevity(plate)
    assert isinstance(plate.figure, Table)
    rows = {row[0]: row[1:] for row in plate.figure.rows}
    assert list(rows) == [
        "500 steps of warm-up, Adam's eps 0.01, 32 features",
        "cold start, Adam's eps 1e-08, 64 features",
        "500 steps of warm-up, Adam's eps 0.001, 64 features",
    ]
    assert rows["cold start, Adam's eps 1e-08, 64 features"] == ("lost", "lost", "both lost in 5 of 5 seeds")
    assert rows["500 steps of warm-up, Adam's eps 0.001, 64 features"][2].startswith("0.9")
    assert plate.caption.endswith(
        "Training works with 500 steps of warm-up, Adam's eps 0.01, 32 features; and with 500 steps of warm-up, Adam's "
        "eps 0.001, 64 features."
    )
    (none,) = readings.draw(lines((64, 0, 1e-8, None)))
    assert none.caption.endswith("No reading trains.")


def test_without_records_there_is_no_table() -> None:
    assert readings.draw([]) == []


def test_the_committed_records_have_every_reading_with_five_seeds() -> None:
    (plate,) = readings.draw(run.read_committed("readings", "There is no GPU here."))
    assert len(plate.figure.rows) == 12
    assert "Training works with 500 steps of warm-up" in plate.caption
    assert "cold start" not in plate.caption


def test_the_note_counts_the_lost_runs_of_all_readings() -> None:
    """Readings share arm, rate and seed, and none may hide another."""
    lines = run.read_committed("readings", "")
    runs = [line for line in lines if line["kind"] == "run"]
    losses = [line["final"].get("w2", {}).get("test") for line in runs]
    lost = sum(loss is None or loss > 0.5 for loss in losses)
    assert 0 < lost < len(runs)
    (plate,) = readings.draw(lines)
    assert f"{lost} of {len(runs)} runs are lost: " in " ".join(plate.notes)


def test_the_settings_list_the_sizes_of_both_networks() -> None:
    (plate,) = readings.draw(run.read_committed("readings", ""))
    (note,) = [note for note in plate.notes if note.startswith("Settings: ")]
    assert note.startswith("Settings: ramp 0, triples 1024, features 32 and 64, noise levels 95, ")

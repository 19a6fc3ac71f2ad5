"""The trial of advice: a tiny run, what the records say, and that the words of the advice follow from them."""

import json
import math
from pathlib import Path

import pytest
import torch

from helpers import image_files, kept_records
from helpers.captions import full_text
from torchbelay.curvature import measure_curvatures
from torchbelay.lab.advice import mnist, study
from torchbelay.lab.advice.analysis import Outcomes, problems
from torchbelay.lab.advice.trial import RATE, Protocol, Run, Setting, describe, marks, measure, measure_probes
from torchbelay.lab.part import Record, Settings, Table
from torchbelay.lab.records import rounded, select
from torchbelay.physics.methods import centred
from torchbelay.physics.recommend import recommend
from torchbelay.physics.spectrum import Spectrum

MEASURED = Spectrum((50.0, 1.0), (1.0, 9.0), lowest=-9.0, products=20, optimizer="Adam", beta1=0.9)
TINY = Protocol(lrs=(0.01, 0.1), seeds=2, steps=40)


def train(settings: list[Setting], seed: int) -> list[Run]:
    """Return made-up runs: the higher the rate, the better, and diverged at 0.1 with an EMA of seed 1."""

    def run(method: centred, lr: float) -> Run:
        bad = seed == 1 and lr == 0.1 and method == centred(0.0, RATE)
        found = [
            {"step": t, "lr": lr, "w1": math.nan if bad else 0.12 + 0.9**t, "w2": 0.1 + 0.92**t}
            for t in sorted(marks(TINY.steps))
        ]
        return Run(found, math.nan if bad else 1 / lr + seed)

    return [run(method, lr) for method, lr in settings]


def made() -> tuple[list[Record], int]:
    ticks: list[int] = []
    records = list(measure("ring", TINY, train, ticks.append))  # type: ignore[arg-type]
    return [describe("ring", TINY, weights=1, batch=1), *records], sum(ticks)


def test_every_run_has_a_record_and_a_run_without_advice_says_why() -> None:
    records, ticks = made()
    assert ticks == TINY.units
    assert len(select(records, "setting")) == 2 * len(TINY.grid)
    assert [(each["seed"], each["lr"]) for each in select(records, "advice")] == [(0, 0.01), (0, 0.1), (1, 0.01)]
    (refusal,) = select(records, "refusal")
    assert "has the loss nan" in refusal["why"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_the_best_of_the_grid_has_the_lowest_mean_and_regrets_are_relative_to_it_seed_by_seed() -> None:
    found = Outcomes.of(made()[0], "ring")
    assert found.best[2] == 0.1
    assert found.best != (0.0, RATE, 0.1)  # diverged with one seed
    first = found.all[0]
    assert first.run == pytest.approx(100 / 10)
    assert first.regret == pytest.approx(select(made()[0], "advice")[0]["loss"] / 10)
    assert first.ratio == pytest.approx(first.regret / first.run)
    assert len(found.refusals) == 1


def test_the_reports_are_at_18_steps() -> None:
    assert (len(marks(1000)), min(marks(1000)), max(marks(1000))) == (18, 3, 1000)


def test_a_quick_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    ticks: list[int] = []
    settings = Settings(quick=True)
    records = study.run(settings, ticks.append)
    assert sum(ticks) == study.plan(settings)[0]
    assert "the records of MNIST that come with the package: There is no copy of MNIST" in study.plan(settings)[1]
    assert problems(records) == ["ring", "MNIST"]
    figure, table, probed = study.draw(records)
    (about,) = select(records, "protocol", problem="MNIST")
    assert f"These are the records that come with the package: {about['why']}" in full_text(figure)
    assert isinstance(table.figure, Table)
    assert len(table.figure.rows) == len(study.QUICK.lrs) + len(study.FULL.lrs)
    assert isinstance(probed.figure, Table)
    assert len(probed.figure.rows) == len(study.FULL.lrs)  # of MNIST alone
    assert len(study.draw([each for each in records if each["kind"] != "probe"])) == 2


def test_a_copy_without_labels_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    assert mnist.obstacle(Settings(data=image_files.npz(tmp_path / "mnist.npz", "mnist"))) is None
    images = image_files.idx(tmp_path / "idx", ".gz")
    assert "no copy of MNIST with labels here" in str(mnist.obstacle(Settings(data=images)))


def test_curvatures_are_those_that_adam_meets_at_the_end_of_the_run() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(40, 784, generator=generator), torch.randint(10, (40,), generator=generator)
    parts = (pixels[:20], labels[:20]), (pixels[20:], labels[20:])
    setting = centred(0.0, RATE), 0.01
    run, found = mnist.prober(parts, 3, 4)(setting, 1)
    again, network, adam = mnist.train_one(parts, setting, 3 * 1_000_003 + 1, 4)
    assert (found.optimizer, found.beta1, found.products) == ("Adam", 0.9, 20)
    assert again == run == mnist.trainer(parts, 3, 4)([setting], 1)[0]
    loss = lambda: torch.nn.functional.cross_entropy(network(pixels[:20]), labels[:20])  # noqa: E731
    assert found == measure_curvatures(network, loss, optimizer=adam)
    assert all(state["step"] == 4 for state in adam.state.values())


# The records that are kept --------------------------------------------------------------------------------------------


def test_the_records_of_the_package_are_those_of_the_documents() -> None:
    kept = [line for line in kept_records.lines("advice") if line["problem"] == mnist.NAME]
    own = [{k: v for k, v in line.items() if k not in ("committed", "why")} for line in mnist.read_committed("")]
    assert own == kept
    (about,) = select(kept, "protocol")
    assert {"date", "device", "device_s", "torch", "torchbelay", "python"} <= {*about}


@pytest.mark.parametrize("problem", ["ring", "MNIST"])
def test_the_words_of_the_advice_are_what_the_records_say(problem: str) -> None:
    said = recommend(300, curvatures=[1.0, 0.1], near=0.1).explain()
    assert "advice from a run at a low learning rate lowered the loss." in said
    assert "From a run at its best learning rate or above, it mostly raised the loss, up to several times." in said
    found = Outcomes.of(kept_records.lines("advice"), problem)
    assert len(found.low) >= 9
    assert all(each.ratio < 1 for each in found.low)
    assert sum(each.worse for each in found.high) >= 0.75 * len(found.high)
    assert max(each.ratio for each in found.high) > 2


def test_the_words_of_advice_from_measured_curvatures_are_what_the_records_say() -> None:
    said = recommend(300, curvatures=Spectrum((1.0, 0.1), (1.0, 1.0), lowest=0.0, products=20)).explain()
    assert (
        "with Adam, advice from measured curvatures was often bad: it made more than half of the runs worse, and"
        in said
    )
    found = Outcomes.of(kept_records.lines("advice"), "MNIST", probed=True)
    assert len(found.all) == len(study.FULL.lrs) * found.about["seeds"]
    assert sum(each.worse for each in found.all) > len(found.all) / 2
    assert 3 < max(each.regret for each in found.all) < 10


def test_advice_from_curvatures_is_followed_and_a_run_without_one_says_why() -> None:
    def probe(setting: Setting, seed: int) -> tuple[Run, Spectrum]:
        if seed == 1 and setting[1] == 0.1:
            raise ValueError("no curvature is positive")
        assert setting[0] == centred(0.0, RATE)
        return train([setting], seed)[0], MEASURED

    ticks: list[int] = []
    records = list(measure_probes("MNIST", TINY, train, probe, 64, ticks.append))  # type: ignore[arg-type]
    assert sum(ticks) == TINY.seeds * len(TINY.lrs)
    (refusal,) = select(records, "probe refusal")
    assert (refusal["seed"], refusal["lr"], refusal["why"]) == (1, 0.1, "no curvature is positive")
    followed = select(records, "probe")
    assert [(each["seed"], each["lr"]) for each in followed] == [(0, 0.01), (0, 0.1), (1, 0.01)]
    advice = recommend(TINY.steps, curvatures=MEASURED, batch=64)
    assert {each["advised_lr"] for each in followed} == {rounded(advice.lr)}
    assert [each["loss"] for each in followed] == [
        rounded(train([(advice.method, advice.lr)], seed)[0].loss)  # type: ignore[list-item]
        for seed in (0, 0, 1)
    ]
    assert all(each["warned"] for each in followed)


@pytest.mark.parametrize("problem", ["ring", "MNIST"])
def test_the_fit_warns_of_most_advice_that_makes_a_run_worse_and_seldom_of_runs_at_low_rates(problem: str) -> None:
    found = Outcomes.of(kept_records.lines("advice"), problem)
    assert all(each.warned for each in found.all if each.ratio > 1.1)
    warned = [each for each in found.all if each.warned]
    assert sum(each.worse for each in warned) > len(warned) / 2
    assert sum(each.warned for each in found.low) < len(found.low) / 2

"""The trial of advice: a tiny run, what the records say, and that the words of the advice follow from them."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import image_files, kept_records
from helpers.captions import full_text
from torchbelay.curvature import measure_curvatures
from torchbelay.lab.advice import mnist, study
from torchbelay.lab.advice.analysis import Outcomes, problems
from torchbelay.lab.advice.figures import GOAL
from torchbelay.lab.advice.trial import RATE, Protocol, Run, Setting, Train, describe, marks, measure, measure_probes
from torchbelay.lab.part import Record, Settings, Table
from torchbelay.lab.records import rounded, select
from torchbelay.physics.methods import centred
from torchbelay.physics.recommend import recommend
from torchbelay.physics.spectrum import Spectrum

MEASURED = Spectrum((50.0, 1.0), (1.0, 9.0), lowest=-9.0, products=20, optimizer="Adam", beta1=0.9)
TINY = Protocol(lrs=(0.01, 0.1), seeds=2, steps=40, rounds=2, first_seed=0)


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
    followed = [(each["seed"], each["lr"], each["round"]) for each in select(records, "advice")]
    assert sorted(followed) == [(0, 0.01, 1), (0, 0.01, 2), (0, 0.1, 1), (0, 0.1, 2), (1, 0.01, 1), (1, 0.01, 2)]
    (refusal,) = select(records, "refusal")
    assert (refusal["lr"], refusal["round"]) == (0.1, 1)
    assert "has the loss nan" in refusal["why"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_the_best_of_the_grid_has_the_lowest_mean_and_regrets_are_relative_to_it_seed_by_seed() -> None:
    records = made()[0]
    found = Outcomes.of(records, "ring")
    assert found.best[2] == 0.1
    assert found.best != (0.0, RATE, 0.1)  # diverged with one seed
    first = found.all[0]
    assert first.run == pytest.approx(100 / 10)
    assert first.regret == pytest.approx(select(records, "advice")[0]["loss"] / 10)
    assert first.ratio == pytest.approx(first.regret / first.run)
    assert len(found.refusals) == 1
    assert found.tuned == pytest.approx((100 + 101) / (10 + 11))


STEPS = 500


def by_rate(loss: Callable[[float], float]) -> Train:
    """Return runs on a quadratic without noise, alike at all learning rates; a function of these adds to the losses."""

    def run(method: centred, lr: float) -> Run:
        end, reports = loss(lr), []
        w1, w2, m = 2.0, 2.0, 0.0
        for t in range(1, STEPS + 1):
            m = 0.9 * m + 0.1 * w1
            w1 -= 0.05 * m
            w2 += float(method.rate) * (w1 - w2)  # type: ignore[arg-type]
            if t in marks(STEPS):
                reports.append({"step": t, "lr": lr, "w1": end + w1**2 / 2, "w2": end + w2**2 / 2})
        return Run(reports, end + 0.5)

    return lambda settings, _: [run(*setting) for setting in settings]


def search(loss: Callable[[float], float], first: float) -> list[Record]:
    """Return the records of the search that begins at a learning rate."""
    how = Protocol(lrs=(first,), seeds=1, steps=STEPS, rounds=9, first_seed=0)
    records = list(measure("ring", how, by_rate(loss), lambda _: None))
    found = select(records, "advice")
    assert [each["round"] for each in found] == list(range(1, len(found) + 1))
    return found


def test_a_search_goes_up_and_ends_between_worse_rates() -> None:
    found = search(lambda lr: 1 + math.log(lr / 0.03) ** 2, 0.01)
    assert found[0]["case"] == "low"
    assert "between" not in [each["case"] for each in found[:-1]]
    assert found[-1]["case"] == "between"
    assert found[-1]["best"] == pytest.approx(1.5, abs=0.02)
    assert found[-1]["best"] == min(each["loss"] for each in found)
    assert {each["run"] for each in found} == {rounded(1.5 + math.log(0.01 / 0.03) ** 2)}


def test_a_search_goes_down_if_the_advice_was_worse_and_keeps_the_first_run_until_a_better_one() -> None:
    found = search(lambda lr: 1 + math.log(lr / 0.002) ** 2, 0.01)
    assert [each["case"] for each in found[:2]] == ["low", "down"]
    assert found[0]["loss"] > found[0]["run"] == found[0]["best"]
    assert found[1]["advised_lr"] == pytest.approx(0.005, rel=0.1)
    assert found[-1]["best"] < 1.7


def test_a_search_takes_a_lost_run_for_a_worse_one() -> None:
    found = search(lambda lr: math.nan if lr > 0.012 else 1 + math.log(lr / 0.01) ** 2, 0.01)
    assert (found[0]["loss"], found[0]["best"]) == (None, 1.5)
    assert [each["case"] for each in found[:3]] == ["low", "down", "between"]
    assert found[-1]["best"] == 1.5


def test_the_reports_are_at_18_steps() -> None:
    assert (len(marks(1000)), min(marks(1000)), max(marks(1000))) == (18, 3, 1000)


def test_a_quick_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    ticks: list[int] = []
    settings = Settings(quick=True)
    records = study.run(settings, ticks.append)
    assert sum(ticks) == study.plan(settings)[0]
    assert "the records of MNIST that come with the package: There is no copy of MNIST" in study.plan(settings)[1]
    assert problems(records) == ["ring", "classifier", "autoencoder", "denoiser"]
    figure, table, probed = study.draw(records)
    about = select(records, "protocol", problem="classifier")[0]
    assert f"These are the records that come with the package: {about['why']}" in full_text(figure)
    assert isinstance(table.figure, Table)
    assert len(table.figure.rows) == len(study.QUICK.lrs) + 3 * len(study.FULL.lrs)
    assert isinstance(probed.figure, Table)
    assert len(probed.figure.rows) == len(study.FULL.lrs)  # of MNIST alone
    assert len(study.draw([each for each in records if each["kind"] != "probe"])) == 2


@pytest.mark.parametrize("task", mnist.TASKS, ids=lambda task: task.name)
def test_a_task_reports_losses_that_fall_and_are_those_of_its_examples(task: mnist.Task) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(60, 784, generator=generator), torch.randint(10, (60,), generator=generator)
    parts = (pixels, labels), (pixels, labels)  # held out are the same examples, so that losses must fall
    run, network, _ = mnist.train_one(task, parts, (centred(0.0, 0.9), 0.003), 0, 60)
    assert run == mnist.trainer(task, parts, 0, 60)([(centred(0.0, 0.9), 0.003)], 0)[0]
    assert run.reports[-1]["w1"] < 0.99 * run.reports[0]["w1"]
    with torch.no_grad():
        assert run.reports[-1]["w1"] == float(task.loss(network, (pixels[:30], labels[:30])))


def test_mnist_has_half_of_the_seeds() -> None:
    assert [mnist.shorter(Protocol(seeds=seeds)).seeds for seeds in (1, 2, 4)] == [1, 1, 2]


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
    again, network, adam = mnist.train_one(mnist.CLASSIFIER, parts, setting, 3 * 1_000_003 + 1, 4)
    assert (found.optimizer, found.beta1, found.products) == ("Adam", 0.9, 20)
    assert again == run == mnist.trainer(mnist.CLASSIFIER, parts, 3, 4)([setting], 1)[0]
    loss = lambda: torch.nn.functional.cross_entropy(network(pixels[:20]), labels[:20])  # noqa: E731
    assert found == measure_curvatures(network, loss, optimizer=adam)
    assert all(state["step"] == 4 for state in adam.state.values())


# The records that are kept --------------------------------------------------------------------------------------------


def test_the_records_of_the_package_are_those_of_the_documents() -> None:
    names = {task.name for task in mnist.TASKS}
    kept = [line for line in kept_records.lines("advice") if line["problem"] in names]
    own = [{k: v for k, v in line.items() if k not in ("committed", "why")} for line in mnist.read_committed("")]
    assert own == kept
    abouts = select(kept, "protocol")
    assert {about["problem"] for about in abouts} == names
    assert all({"date", "device", "device_s", "torch", "torchbelay", "python"} <= {*about} for about in abouts)
    assert {about["first_seed"] for about in select(kept_records.lines("advice"), "protocol")} == {300}


def test_the_words_of_advice_from_runs_are_what_the_records_say() -> None:
    said = recommend(300, curvatures=[1.0, 0.1], near=0.1).explain()
    assert "advice from one run made the loss several times lower at best, and sometimes higher." in said
    assert "with all runs so far, it ended within 10% of the best of a grid in more than half of the cases." in said
    kept = kept_records.lines("advice")
    found = [Outcomes.of(kept, name) for name in problems(kept)]
    ratios = [each.ratio for one in found for each in one.all]
    assert min(ratios) < 1 / 3
    assert 0 < sum(ratio > 1.02 for ratio in ratios) < len(ratios) / 2
    ends = [each for one in found for each in one.ends]
    assert sum(each.regret <= GOAL for each in ends) > len(ends) / 2
    assert all(each.ratio < 1.2 for each in ends)  # the best run is kept, by the losses of other examples


def test_the_words_of_advice_from_measured_curvatures_are_what_the_records_say() -> None:
    said = recommend(300, curvatures=Spectrum((1.0, 0.1), (1.0, 1.0), lowest=0.0, products=20)).explain()
    assert (
        "with Adam, advice from measured curvatures was often bad: it made many of the runs worse, and its loss was up "
        "to many times the best." in said
    )
    found = Outcomes.of(kept_records.lines("advice"), "classifier", probed=True)
    assert len(found.all) == len(study.FULL.lrs) * found.about["seeds"]
    assert sum(each.worse for each in found.all) >= len(found.all) / 3
    assert max(each.regret for each in found.all) > 5


def test_advice_from_curvatures_is_followed_and_a_run_without_one_says_why() -> None:
    def probe(setting: Setting, seed: int) -> tuple[Run, Spectrum]:
        if seed == 1 and setting[1] == 0.1:
            raise ValueError("no curvature is positive")
        assert setting[0] == centred(0.0, RATE)
        return train([setting], seed)[0], MEASURED

    ticks: list[int] = []
    records = list(measure_probes("classifier", TINY, train, probe, 64, ticks.append))  # type: ignore[arg-type]
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

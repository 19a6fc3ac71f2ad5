"""Budgets: what is read as one, and the steps, schedule and masses that follow from it."""

import itertools
from dataclasses import replace

import pytest

from helpers.score_models import EDM_PRESET, NCSN_PRESET
from torchbelay.lab.part import LabError
from torchbelay.lab.score.training.budget import REPORTS, Budget, Plan, Speed, fewest_steps
from torchbelay.lab.score.training.presets import PRESETS, Preset
from torchbelay.physics.spring import Spring


@pytest.mark.parametrize(
    ("text", "seconds", "images"),
    [
        ("90s", 90, None),
        ("10m", 600, None),
        ("10min", 600, None),
        ("1.5h", 5400, None),
        (".5h", 1800, None),
        ("500kimg", None, 500_000),
        ("2Mimg", None, 2_000_000),
        ("0.25 Mimg", None, 250_000),
        ("12345img", None, 12345),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_images(text: str, seconds: float | None, images: int | None) -> None:
    assert Budget.parse(text) == Budget(text, seconds, images)


@pytest.mark.parametrize(
    "text", ["", "10", "10M", "2k", "-3m", "m", "1e3m", "0m", "nanm", "10 minutes", "0img", "1,5h"]
)
def test_what_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(
        LabError, match=r"^--budget '.*' is .*; give a time, as 90s, 10m or 1\.5h, or a number of images"
    ):
        Budget.parse(text)


def test_without_a_budget_the_plan_is_the_presets() -> None:
    preset = PRESETS["table1-belay"]
    plan = Plan.make(preset)
    assert (plan.steps, plan.images, plan.batch) == (200_000, 25_600_000, 128)
    assert plan.lane == preset.lane()
    assert plan.every * REPORTS == 200_000


def test_a_budget_scales_masses_schedule_and_reports() -> None:
    plan = Plan.make(PRESETS["cifar10-belay"], images=20_000_000)
    assert (plan.steps, plan.images) == (39_062, 39_062 * 512)
    share = 39_062 / 390_625
    assert plan.lane.arm.method == Spring(k=1.0, m1=20_000 * share, m2=2000 * share)
    assert plan.lr_scale(1) == pytest.approx(1 / (0.05 * 39_062))
    assert plan.lr_scale(1000) == pytest.approx(1000 / 1953.1)
    assert plan.lr_scale(1954) == plan.lr_scale(39_062) == 1.0
    assert plan.every == 782


def test_a_budget_scales_the_rate_of_an_ema() -> None:
    plan = Plan.make(PRESETS["table1-ema"], images=2_560_000)
    assert isinstance(plan.lane.arm.method, Spring)
    assert plan.lane.arm.method.decay == pytest.approx(0.99)


def test_without_a_ramp_the_rate_is_whole_from_the_first_step() -> None:
    assert Plan.make(NCSN_PRESET).lr_scale(1) == 1.0


@pytest.mark.parametrize("name", ["table1-belay", "table1-ema", "table1-matched", "cifar10-ema", "cifar10-belay"])
def test_the_smallest_budget_that_is_named_is_accepted_and_a_step_less_is_not(name: str) -> None:
    preset = PRESETS[name]
    with pytest.raises(LabError, match=r"steps are too few for .*κ ≥ 1") as refused:
        Plan.make(preset, images=preset.batch)
    named = str(refused.value).split("the smallest budget is ")[1].split(" ")[0]
    images = Budget.parse(named).images
    assert images is not None
    plan = Plan.make(preset, images=images)
    assert isinstance(plan.lane.arm.method, Spring)
    assert 0.9 < plan.lane.arm.method.coupling().rate < 1
    with pytest.raises(LabError, match="too few"):
        Plan.make(preset, images=images - preset.batch)


def test_a_time_is_shared_by_steps_and_reports() -> None:
    plan = Plan.fit_time(100.0, Speed(step_s=0.1, report_s=0.05), EDM_PRESET)
    assert plan.steps == int((100 - 50 * 0.05) / 0.1)
    assert -(-plan.steps // plan.every) <= REPORTS


def test_slow_reports_are_fewer() -> None:
    plan = Plan.fit_time(100.0, Speed(step_s=0.1, report_s=4.0), EDM_PRESET)
    assert (plan.steps, plan.every) == (920, 460)  # 2 of them take 8 s
    plan = Plan.fit_time(100.0, Speed(step_s=0.1, report_s=30.0), EDM_PRESET)
    assert plan.steps == plan.every == 700


def test_reports_that_were_asked_for_are_made() -> None:
    plan = Plan.fit_time(100.0, Speed(step_s=0.1, report_s=4.0), EDM_PRESET, every=10)
    assert (plan.steps, plan.every) == (200, 10)


def test_too_short_a_time_is_refused_with_one_that_is_enough() -> None:
    speed = Speed(step_s=1.0, report_s=2.0)
    with pytest.raises(LabError, match=r"3 s are \d+ steps here, too few .*; give \d+s or more$") as refused:
        Plan.fit_time(3.0, speed, EDM_PRESET)
    enough = Budget.parse(str(refused.value).split("give ")[1].split(" ")[0]).seconds
    assert enough is not None
    assert Plan.fit_time(enough, speed, EDM_PRESET).steps >= fewest_steps(EDM_PRESET)


@pytest.mark.parametrize("every", [None, 1, 3, 50])
@pytest.mark.parametrize(
    "preset", [EDM_PRESET, PRESETS["table1-belay"], PRESETS["mnist-edm-ema"]], ids=lambda preset: preset.name
)
def test_the_time_that_is_named_is_accepted_and_so_is_all_beyond(preset: Preset, every: int | None) -> None:
    times = [0.001, 0.013, 0.1, 0.13, 1.0, 2.0, 7.3, 300.0]
    for step_s, report_s in itertools.product(times, times):
        speed = Speed(step_s, report_s)
        with pytest.raises(LabError, match=r"; give \d+s or more$") as refused:
            Plan.fit_time(1e-4, speed, preset, every=every)
        named = Budget.parse(str(refused.value).split("give ")[1].split(" ")[0]).seconds
        assert named is not None
        for later in (0, 1e-6, 0.5, 1, 2, 3, 7, 20, report_s, 10 * report_s, 20 * report_s, 3 * named):
            assert Plan.fit_time(named + later, speed, preset, every=every).steps >= fewest_steps(preset)


def test_the_time_that_is_named_is_no_longer_than_it_must_be() -> None:
    preset = replace(EDM_PRESET, spring=Spring(k=1.0, m1=1.0, m2=2.0))
    assert fewest_steps(preset) == 13
    for report_s, every, named in ((0.13, None, 15), (2.5, None, 16), (9.5, None, 23), (2.5, 1, 46), (2.5, 4, 22)):
        with pytest.raises(LabError, match=rf"; give {named}s or more$"):
            Plan.fit_time(11.0, Speed(1.0, report_s), preset, every=every)


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_learning_rate_is_refused(lr: float) -> None:
    with pytest.raises(LabError, match=r"--lr .* is not a learning rate; give a number above 0"):
        Plan.make(EDM_PRESET, lr=lr)


def test_reports_at_no_steps_are_refused() -> None:
    with pytest.raises(LabError, match="--every 0"):
        Plan.make(EDM_PRESET, every=0)

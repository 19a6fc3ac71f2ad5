"""The part `gpt`: what runs, in which order, and what is kept."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from torchbelay.lab.gpt import study
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.arms import ARMS, BELAY, CONSTANT, COSINE, HALF, QUARTER, Arm
from torchbelay.lab.gpt.network import Shape
from torchbelay.lab.gpt.study import (
    AT_LAST,
    CURVES,
    FULL,
    MEASURED,
    QUICK,
    STAGES,
    Lane,
    completing,
    count,
    judging,
    refining,
    scouting,
    tracing,
)
from torchbelay.lab.part import LabError, Record, Settings
from torchbelay.lab.records import without_times
from torchbelay.lab.registry import PARTS

TINY = replace(QUICK, shape=Shape(layers=1, width=8, heads=1, context=8), batch=2, steps=4, warmup=1, windows=4)
SETTINGS = Settings(quick=True)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "QUICK", replace(TINY, lrs=(1e-3, 1e-2), judged_on=1, corpus=400_000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_is_a_part() -> None:
    assert PARTS["gpt"] is study


def make_run(arm: Arm, lr: float, seed: int, split: str) -> Record:
    losses = {"w1": 2.0, "w2": 2.0}
    return {"kind": "run", "arm": arm.name, "lr": lr, "seed": seed, "split": split, "losses": losses, "fresh": 2.0}


def watch(monkeypatch: pytest.MonkeyPatch, trained: list[str]) -> None:
    """Let runs be made up, and note the arm of each."""

    def run(self: object, arm: Arm, lr: float, seed: int, split: str) -> Record:
        trained.append(arm.name)
        return make_run(arm, lr, seed, split)

    def trace(self: object, arm: Arm, lr: float, seed: int, looks: tuple[int, ...]) -> Record:
        trained.append(arm.name)
        return {"kind": "curvature", "arm": arm.name, "lr": lr, "seed": seed, "curvatures": [[n, 1.0] for n in looks]}

    monkeypatch.setattr(study.Trainer, "run", run)
    monkeypatch.setattr(study.Trainer, "trace", trace)


def record(lane: Lane) -> Record:
    """Return the record of a run whose weights are best at the second rate, and its average at the third."""
    at = FULL.lrs.index(lane.lr)
    losses = {"w1": 2.0 + abs(at - 1), "w2": 2.0 + abs(at - 2)}
    return {
        "kind": "run",
        "arm": lane.arm.name,
        "lr": lane.lr,
        "seed": lane.seed,
        "split": lane.split,
        "losses": losses,
    }


def whole() -> list[Lane]:
    """Return all runs of a whole study, in their order."""
    found: list[Lane] = []
    for stage in STAGES:
        found += scouting(FULL, stage.tuned)
        for more, arms in ((refining, stage.tuned), (judging, stage.judged)):
            found += more(FULL, arms, Runs([record(lane) for lane in found]))
    return found + completing(FULL, AT_LAST, Runs([record(lane) for lane in found])) + tracing(FULL, MEASURED)


def test_every_arm_is_tuned_on_two_seeds_and_judged_on_five_others() -> None:
    lanes = whole()
    tuned, judged = ([lane for lane in lanes if lane.split == split] for split in ("tune", "judge"))
    assert {lane.seed for lane in tuned} == {0, 1}
    assert {lane.seed for lane in judged} == {1000, 1001, 1002, 1003, 1004}
    for arm in ARMS.values():
        assert {lane.lr for lane in tuned if lane.arm == arm and lane.seed == 0} == {*FULL.lrs}
        assert {lane.seed for lane in judged if lane.arm == arm} == {lane.seed for lane in judged}
    assert len({(lane.arm.name, lane.lr, lane.seed, lane.split) for lane in lanes}) == len(lanes)


def rates(lanes: list[Lane], arm: Arm, seed: int) -> list[float]:
    return [lane.lr for lane in lanes if lane.arm == arm and lane.seed == seed]


def test_the_second_seed_tunes_around_the_best_rate_of_the_first() -> None:
    lanes = whole()
    assert rates(lanes, HALF, 1) == [*FULL.lrs[1:4]]
    assert rates(lanes, COSINE, 1) == [*FULL.lrs[:4]]  # around the best of its weights, and of its average
    first = [record(lane) | {"losses": {"w1": lane.lr, "w2": lane.lr}} for lane in scouting(FULL, [HALF])]
    assert [lane.lr for lane in refining(FULL, [HALF], Runs(first))] == [*FULL.lrs[:2]]  # the best is at an end


def test_curves_are_judged_at_every_rate_and_the_others_first_at_their_best() -> None:
    lanes = whole()
    for arm in (CONSTANT, QUARTER, HALF):
        assert arm in CURVES
        assert rates(lanes, arm, 1000) == [*FULL.lrs]
    assert rates(lanes, BELAY, 1000)[:1] == [FULL.lrs[2]]
    assert rates(lanes, COSINE, 1000)[:2] == [*FULL.lrs[1:3]]


def test_at_last_every_arm_is_judged_at_every_rate_seed_by_seed() -> None:
    lanes = whole()
    for arm in ARMS.values():
        for seed in range(1000, 1005):
            assert sorted(rates(lanes, arm, seed)) == [*FULL.lrs]
    judged = [lane for lane in lanes if lane.split]
    added = judged[-(3 * 5 + 4) * 5 :]  # cosine has two best rates
    assert {lane.arm.name for lane in added} == {arm.name for arm in AT_LAST}
    assert [lane.seed for lane in added] == sorted(lane.seed for lane in added)
    assert not any(Runs([record(lane) for lane in judged[: -len(added)]]).is_judged_everywhere(a.name) for a in AT_LAST)
    assert all(Runs([record(lane) for lane in judged]).is_judged_everywhere(name) for name in ARMS)


def test_what_the_hypotheses_need_comes_first_and_seed_by_seed() -> None:
    lanes = whole()
    best = [lane for lane in lanes if lane.arm != BELAY or lane.lr == FULL.lrs[2]]
    needed = [lane for lane in best if lane.split == "judge" and lane.arm in (*CURVES, BELAY)]
    last = lanes.index(needed[-1])
    assert last + 1 == 122
    assert {lane.arm.name for lane in lanes[:last]} == {arm.name for arm in (*CURVES, BELAY)}
    assert [lane.seed for lane in needed] == sorted(lane.seed for lane in needed)


def test_last_the_curvature_is_measured_along_the_first_runs_for_tuning() -> None:
    lanes = whole()[-3 * len(FULL.lrs) :]
    assert {lane.split for lane in lanes} == {None}
    assert [(lane.arm, lane.lr, lane.seed) for lane in lanes] == [
        (arm, lr, 0) for arm in (CONSTANT, HALF, BELAY) for lr in FULL.lrs
    ]
    assert FULL.looks == (150, 500, 1000, 1500)


def test_there_are_at_most_as_many_runs_as_the_plan_says() -> None:
    assert count(FULL) == 294
    assert len(whole()) == 294 - 2  # the two best rates of cosine share two rates beside them


def test_a_run_does_not_depend_on_how_many_others_there_are(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that gets more seeds, or more rates, goes on with the runs that it has."""
    trained: list[str] = []
    monkeypatch.setattr(study.Trainer, "run", lambda self, arm, *_, **__: trained.append(arm.name) or {})
    lane = Lane(HALF, 1e-3, 0, "tune")
    for how in (study.QUICK, replace(study.QUICK, judged_on=9, tuned_on=3, lrs=(1e-3,))):
        monkeypatch.setattr(study, "QUICK", how)
        study.Study(SETTINGS, lambda _: None)._run(lane)
    assert len(trained) == 1
    monkeypatch.setattr(study, "QUICK", replace(study.QUICK, steps=5))
    study.Study(SETTINGS, lambda _: None)._run(lane)
    assert len(trained) == 2


def test_a_study_whose_time_is_over_returns_what_is_finished(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clocked(study.Deadline):
        def __init__(self, seconds: float | None) -> None:
            super().__init__(seconds, clock=lambda: now[0])

    once = study.Trainer.run

    def slow(*given: object, **more: object) -> object:
        now[0] += 10.0
        return once(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(study, "Deadline", Clocked)
    monkeypatch.setattr(study.Trainer, "run", slow)
    monkeypatch.setattr(study.time, "perf_counter", lambda: now[0])
    about, *first = study.run(replace(SETTINGS, stop_after=35.0), lambda _: None)
    assert len(first) == 3  # a fourth run would end after 40 s
    assert about["complete"] is False
    about, *more = study.run(replace(SETTINGS, stop_after=35.0), lambda _: None)
    assert more[:3] == first
    assert len(more) == 6
    about, *same = study.run(replace(SETTINGS, stop_after=0.0), lambda _: None)
    assert same == more  # without time, what was finished before


def test_an_unfinished_study_that_comes_with_the_package_goes_on(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    watch(monkeypatch, trained)
    about, *runs = study.run(SETTINGS, lambda _: None)
    whole = len(runs)
    for before, expected in (
        ([about | {"complete": False}, *runs[:5]], whole - 5),
        ([about | {"complete": False, "digest": "of another text"}, *runs[:5]], whole),
        ([about | {"complete": False, "code": "another"}, *runs[:5]], whole),
        ([about | {"traced": False}, *runs[:5]], whole - 5),  # the losses are complete, and the curvatures are not
        ([about, *runs[:5]], whole),  # a complete one is run again
        ([], whole),
    ):
        trained.clear()
        monkeypatch.setattr(study, "read_committed", lambda _, found=before: found)
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(os.environ["XDG_CACHE_HOME"]) / "next"))
        again = study.run(SETTINGS, lambda _: None)
        assert len(trained) == expected
        assert [without_times(r) for r in again[1:]] == [without_times(r) for r in runs]


def test_runs_of_earlier_records_are_not_made_again(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    watch(monkeypatch, trained)
    about, *runs = study.run(SETTINGS, lambda _: None)
    for have, expected in (
        ([about, *runs[:5]], len(runs) - 5),  # the study that they are of may have been complete
        ([about | {"code": "another"}, *runs[:5]], len(runs) - 5),  # the caller answers for it
        ([], len(runs)),
    ):
        trained.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(os.environ["XDG_CACHE_HOME"]) / "next"))
        again = study.run(SETTINGS, lambda _: None, have)
        assert len(trained) == expected
        assert [without_times(r) for r in again[1:]] == [without_times(r) for r in runs]
    for key in ("digest", "layers", "width", "context", "batch", "steps", "warmup", "rate", "torch", "device"):
        with pytest.raises(LabError, match=f"have {key} of another"):
            study.run(SETTINGS, lambda _: None, [about | {key: "of another"}, *runs])


def test_every_run_says_which_code_it_is_of(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    about, *runs = study.run(SETTINGS, lambda _: None)
    assert {r["code"] for r in runs} == {study.code_digest()}
    old = [{key: value for key, value in r.items() if key != "code"} for r in runs[:5]]
    for have in ([about | {"code": "another"}, *old], [about, *(r | {"code": "another"} for r in old)]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(Path(os.environ["XDG_CACHE_HOME"]) / "next"))
        again = study.run(SETTINGS, lambda _: None, have)
        assert [r["code"] for r in again[1:]] == ["another"] * 5 + [study.code_digest()] * (len(runs) - 5)


def test_losses_may_be_complete_without_the_curvatures(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise study.OutOfTimeError

    monkeypatch.setattr(study.Trainer, "trace", stop)
    about, *runs = study.run(SETTINGS, lambda _: None)
    assert (about["complete"], about["traced"]) == (True, False)
    assert {r["kind"] for r in runs} == {"run"}


@pytest.mark.thorough
def test_a_stopped_study_goes_on_and_ends_where_an_undisturbed_one_does(
    tiny: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = study.run(SETTINGS, lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    done = []

    def stop(units: int) -> None:
        done.append(units)
        if len(done) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(SETTINGS, stop)
    trained: list[str] = []
    once = study.Trainer._begin

    def counted(*given: object) -> object:
        trained.append("")
        return once(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(study.Trainer, "_begin", counted)
    again = study.run(SETTINGS, lambda _: None)
    assert [without_times(r) for r in again] == [without_times(r) for r in whole]
    assert len(trained) == len(whole) - 1 - 9
    assert study.draw(again)[0].name == "gpt-rates"


def test_without_a_gpu_the_records_that_come_with_the_package_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.torch.cuda, "is_available", lambda: False)
    found = study.run(Settings(), lambda _: None)
    assert all(line["committed"] for line in found if line["kind"] == "protocol")
    assert study.plan(Settings())[0] == 1
    assert study.draw([]) == []

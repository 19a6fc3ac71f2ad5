"""The part `gpt`: what runs, in which order, and what is kept."""

from dataclasses import replace
from pathlib import Path

import pytest

from torchbelay.lab.gpt import study
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.arms import ARMS
from torchbelay.lab.gpt.network import Shape
from torchbelay.lab.gpt.study import FULL, QUICK, judging, tuning
from torchbelay.lab.part import Settings
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


def test_the_seeds_for_judging_are_others_than_those_for_tuning() -> None:
    tuned = tuning(FULL)
    records = [
        {
            "kind": "run",
            "arm": e.arm.name,
            "lr": e.lr,
            "seed": e.seed,
            "split": "tune",
            "losses": {"w1": 1.0, "w2": e.lr},
        }
        for e in tuned
    ]
    judged = judging(FULL, Runs(records))
    assert not {lane.seed for lane in tuned} & {lane.seed for lane in judged}
    assert {lane.split for lane in tuned} == {"tune"}
    assert {lane.split for lane in judged} == {"judge"}
    assert len(tuned) == len(ARMS) * len(FULL.lrs) * FULL.tuned_on
    of_cosine = {lane.lr for lane in judged if lane.arm.name == "cosine"}
    assert of_cosine == {FULL.lrs[0]}  # the best of tuning, for w1 and for w2
    assert len({(lane.arm.name, lane.lr, lane.seed) for lane in judged}) == len(judged)


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
    once = study.Trainer.run

    def counted(*given: object, **more: object) -> object:
        trained.append("")
        return once(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(study.Trainer, "run", counted)
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

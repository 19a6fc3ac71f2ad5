"""The parts of the report that need a GPU: run where they can be, and shown from the package's records elsewhere."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.small_score import Brightness, group, images
from torchbelay.lab.part import LabError, Record, Settings
from torchbelay.lab.score import cache, experiment, run, studies
from torchbelay.lab.score.cache import Kept
from torchbelay.lab.score.studies import Group
from torchbelay.lab.score.training.learner import Together

PARTS = ("mnist", "sign", "cifar10")
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PARTS)
def test_without_a_gpu_the_packages_records_are_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ticks: list[int] = []
    found = run.run(name, Settings(), ticks.append)
    (origin,) = (line for line in found if line["kind"] == "origin")
    assert origin["committed"]
    assert origin["why"] == "There is no GPU here."
    assert origin["device"] == "NVIDIA H200"
    assert sum(ticks) == run.plan(name, Settings())[0]
    assert "the records that come with the package" in run.plan(name, Settings())[1]


def test_without_data_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "available", lambda name, path: False)
    assert run.obstacle("cifar10", Settings()) == "There is no copy of cifar10 here; name one with --data."


def runs(name: str) -> list[Record]:
    return [line for line in run.committed(name, "") if line["kind"] == "run"]


def table1() -> list[Group]:
    """The long runs, at the rates that the committed short ones chose."""
    return list(studies.table1(run.best_rates(run.committed("mnist", ""))))


def test_the_committed_records_are_of_the_studies_as_they_stand() -> None:
    """Every lane of every group, and nothing else."""
    planned = {"mnist": [*studies.rates(), *table1()], "sign": studies.sign(), "cifar10": studies.cifar10()}
    for name, groups in planned.items():
        expected = sorted(
            (each.study, lane.arm.name, lane.lr, each.seed, repr(lane.arm.method), each.steps, each.batch)
            for each in groups
            for lane in each.lanes
        )
        keys = ("study", "arm", "lr", "seed", "method", "steps", "batch")
        assert sorted(tuple(line[key] for key in keys) for line in runs(name)) == expected


def test_it_is_said_which_fids_of_table_1_were_not_taken() -> None:
    lines = run.committed("mnist", "")
    drawn = {(line["arm"], line["lr"], line["seed"]) for line in lines if line["kind"] == "fid"}
    wanted = {(each.lanes[i].arm.name, each.lanes[i].lr, each.seed) for each in table1() for i in each.fids}
    tuned = "BELAY m1 2e4"
    assert wanted - drawn == {("matched EMA", 1e-3, 4), ("matched EMA", 1e-3, 5), (tuned, 1e-3, 3), (tuned, 1e-3, 4)}
    assert drawn <= wanted
    (differs,) = (line["differs"] for line in lines if line["kind"] == "protocol" and line["study"] == "table1")
    assert any("FID of the matched EMA was taken for one seed of three" in line for line in differs)
    assert any(f"that of {tuned} for one" in line for line in differs)


@pytest.mark.parametrize("name", PARTS)
def test_every_committed_run_says_where_and_how_long(name: str) -> None:
    assert all(
        line["device"] == "NVIDIA H200" and line["torch"] and line["wall_s"] > 0 and line["how"] for line in runs(name)
    )


def test_the_fid_chain_was_checked_against_torch_fidelitys_number() -> None:
    (check,) = (line for line in run.committed("cifar10", "") if line["kind"] == "fid check")
    assert check["fid"] == pytest.approx(check["recorded"], abs=1e-3)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Group]:
    """As if this were a GPU with data, and the studies small; the groups that were trained are listed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "available", lambda name, path: True)
    monkeypatch.setattr(run, "load", lambda name, path: images())
    monkeypatch.setattr(run, "DEVICE", CPU)
    monkeypatch.setattr(run, "HOW", "eager")
    monkeypatch.setattr(run, "throughput", lambda *args, **kwargs: {"kind": "throughput"})
    monkeypatch.setattr(experiment, "TRIPLES", 4)

    def rates(share: float = 1.0) -> Iterator[Group]:
        for seed in range(2):
            yield replace(group(steps=round(50 * share)), seed=seed)

    def table1(best: dict[str, float], share: float = 1.0) -> Iterator[Group]:
        lanes = tuple(replace(lane, lr=best[lane.arm.name]) for lane in group().lanes[:3])
        yield replace(group(steps=round(50 * share)), study="table1", lanes=lanes, fids=(0,))

    monkeypatch.setattr(studies, "rates", rates)
    monkeypatch.setattr(studies, "table1", table1)
    trained: list[Group] = []
    original = run.experiment

    def spy(each: Group, *args: object) -> Iterator[Record]:
        trained.append(each)
        return original(each, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "experiment", spy)
    return trained


def test_a_study_is_run_where_it_can_be(here: list[Group]) -> None:
    settings, ticks = Settings(budget="8img"), []  # type: ignore[var-annotated]
    found = run.run("mnist", settings, ticks.append)
    kinds = [line["kind"] for line in found]
    assert kinds[0] == "origin"
    assert "committed" not in found[0]
    assert [(each.study, each.seed, each.steps) for each in here] == [
        ("rates", 0, 2),
        ("rates", 1, 2),
        ("table1", 0, 2),
    ]
    assert kinds.count("run") == 15
    assert kinds.count("grid") == 1  # no FID: its network is not here
    assert kinds.count("throughput") == 4
    assert sum(ticks) == run.UNITS


def test_table_1_takes_the_rates_that_the_short_runs_chose(here: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"EMA": 0.011, "matched EMA": 0.012, "BELAY": 0.013}
    asked: list[list[tuple[str, int]]] = []

    def best_rates(lines: list[Record]) -> dict[str, float]:
        asked.append([(line["study"], line["seed"]) for line in lines if line["kind"] == "run"])
        return chosen

    monkeypatch.setattr(run, "best_rates", best_rates)
    run.run("mnist", Settings(budget="8img"), lambda n: None)
    assert asked[-1] == [("rates", seed) for seed in range(2) for _ in range(6)]
    assert {lane.arm.name: lane.lr for lane in here[-1].lanes} == chosen


def test_a_best_rate_is_an_arms_own() -> None:
    runs = [("EMA", 1e-3, 0.1), ("EMA", 3e-3, 0.2), ("BELAY", 1e-3, None), ("BELAY", 3e-3, 0.3)]
    lines = [
        {"kind": "run", "study": "rates", "seed": 0, "arm": arm, "lr": lr, "final": {"w2": {"train": x, "test": x}}}
        for arm, lr, x in runs
    ]
    assert run.best_rates(lines) == {"EMA": 1e-3, "matched EMA": studies.USUAL_RATE, "BELAY": 3e-3}


def test_a_heavier_belay_is_among_them_only_if_it_is_better() -> None:
    def lines(*heavier: tuple[str, float]) -> list[Record]:
        runs = (("EMA", 0.1), ("matched EMA", 0.1), ("BELAY", 0.2), *heavier)
        return [
            {"kind": "run", "study": "rates", "seed": 0, "arm": a, "lr": 1e-3, "final": {"w2": {"train": x, "test": x}}}
            for a, x in runs
        ]

    assert set(run.best_rates(lines(("BELAY m1 2e4", 0.3)))) == set(studies.THREE)
    found = run.best_rates(lines(("BELAY m1 2e4", 0.15), ("BELAY m1 2e5", 0.12)))
    assert set(found) == {*studies.THREE, "BELAY m1 2e5"}


def test_what_is_finished_is_not_trained_again(here: list[Group], tmp_path: Path) -> None:
    settings = Settings(budget="8img")
    first = run.run("mnist", settings, lambda n: None)
    count = len(here)
    ticks: list[int] = []
    second = run.run("mnist", settings, ticks.append)
    assert len(here) == count == 3
    assert sum(ticks) == run.UNITS
    assert [line for line in first if line["kind"] == "run"] == [line for line in second if line["kind"] == "run"]
    assert first[0]["device_s"] == second[0]["device_s"]  # what it took then
    run.run("mnist", replace(settings, anew=True), lambda n: None)
    assert len(here) == 2 * count
    for path in tmp_path.rglob("rates-*.jsonl"):
        path.write_text("{")
    run.run("mnist", settings, lambda n: None)
    assert len(here) == 2 * count + 2  # damaged ones are no use


def test_images_are_made_again_once_fids_network_is_there(here: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(budget="8img")
    assert not [line for line in run.run("mnist", settings, lambda n: None) if line["kind"] == "fid"]
    monkeypatch.setattr(run.fid, "Inception", lambda device, weights: Brightness())
    found = [line for line in run.run("mnist", settings, lambda n: None) if line["kind"] == "fid"]
    assert [each.study for each in here] == ["rates", "rates", "table1", "table1"]
    assert [line["network"] for line in found] == ["brightness"]


@pytest.mark.parametrize("change", ["code", "settings", "machine"])
def test_what_is_kept_belongs_to_all_that_it_depends_on(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Kept("x", "settings", "machine").write([{"found": 1}], 2.5)
    assert Kept("x", "settings", "machine").read() == (2.5, [{"found": 1}])
    if change == "code":
        monkeypatch.setattr(cache, "source", lambda: "another")
    depends = ("other" if change == "settings" else "settings", "other" if change == "machine" else "machine")
    assert Kept("x", *depends).read() is None


def test_another_seed_is_another_study(here: list[Group]) -> None:
    run.run("mnist", Settings(seed=3, budget="8img"), lambda n: None)
    assert [each.seed for each in here] == [300, 301, 300]


def test_a_budget_of_time_is_measured(here: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """150 steps of a group at 20 ms are 3 s; a budget of 0.12 s is a twenty-fifth of that."""
    timed: list[int] = []

    def pace(groups: list[Together], *args: object, **options: object) -> list[float]:
        timed.append(len(groups[0].trainees))
        return [0.02]

    monkeypatch.setattr(run, "seconds_a_step", pace)
    run.run("mnist", Settings(budget="0.12s"), lambda n: None)
    assert timed == [6, 6, 3]
    assert [each.steps for each in here] == [2, 2, 2]


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the studies, as they stand, could be run."""
    monkeypatch.setattr(run, "obstacle", lambda name, settings: None)


@pytest.mark.usefixtures("possible")
def test_a_budget_too_small_for_the_spring_is_refused() -> None:
    with pytest.raises(LabError, match="--budget 100img is too small for cifar10: κ"):
        run.plan("cifar10", Settings(budget="100img"))


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("options", [{}, {"quick": True}, {"budget": "200kimg"}, {"budget": "9m"}])
def test_every_study_can_be_planned(name: str, options: dict[str, object]) -> None:
    units, line = run.plan(name, Settings(**options))  # type: ignore[arg-type]
    assert units == run.UNITS
    assert "networks on" in line
    assert ("as many steps as fit into 9m" in line) == (options.get("budget") == "9m")


@pytest.mark.usefixtures("possible")
def test_a_plan_has_the_budgets_steps() -> None:
    """Of 18 networks and 5 seeds in batches of 32."""
    assert f"{18 * 5 * 1000:,} steps in all" in run.plan("sign", Settings(budget="32kimg"))[1]


@pytest.mark.usefixtures("possible")
def test_a_plan_knows_table_1s_networks_and_images() -> None:
    """Three arms at three rates and a tuned one, of three seeds: only BELAY at EMA's rate has no images."""
    line = run.plan("mnist", Settings())[1]
    assert f"{3 * 22 + 3 * 10} networks" in line
    assert line.endswith(f"; besides, images of {3 * (10 - 1)} of them and their FID")
    assert "images of" not in run.plan("mnist", Settings(quick=True))[1]


def test_a_bar_that_has_more_steps_than_planned_stays_full() -> None:
    ticks: list[int] = []
    share = run._Share(ticks.append, 10)
    for _ in range(3):
        share(6)
    assert sum(ticks) == run.UNITS

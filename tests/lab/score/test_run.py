"""The parts of the report that need a GPU: run if that is possible, and else shown from the package's records."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from helpers import score_records
from helpers.score_models import Brightness, study_group, study_images
from torchbelay.lab.part import LabError, Record, Settings
from torchbelay.lab.registry import PARTS as REGISTRY
from torchbelay.lab.score import run, studies
from torchbelay.lab.score.experiment import FidReference, run_group
from torchbelay.lab.score.formats import DATASETS
from torchbelay.lab.score.run import Resources
from torchbelay.lab.score.studies import Group
from torchbelay.lab.score.training.learner import LearnerGroup
from torchbelay.physics.identity import describe

PARTS = ("mnist", "figure4", "sign", "cifar10", "warmup", "penalty")
ARMS = ("equal-memory EMA", "matched EMA", "BELAY")
CPU = torch.device("cpu")


# Without a GPU or data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
def test_without_a_gpu_the_packages_records_are_shown(name: str) -> None:
    resources, ticks = Resources(device=None), []  # type: ignore[var-annotated]
    found = run.run(name, Settings(), ticks.append, resources)
    (origin,) = (line for line in found if line["kind"] == "origin")
    assert origin["committed"]
    assert origin["why"] == "There is no GPU here."
    assert origin["device"] == "NVIDIA H200"
    assert sum(ticks) == run.plan(name, Settings(), resources)[0]
    assert "the records that come with the package" in run.plan(name, Settings(), resources)[1]


@pytest.mark.parametrize("present", [True, False])
def test_by_default_the_device_is_the_gpu_if_there_is_one(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert Resources().device == (torch.device("cuda") if present else None)
    if not present:
        assert "There is no GPU here." in run.plan("sign", Settings())[1]


def test_without_data_too_and_the_files_are_named() -> None:
    why = run.obstacle("cifar10", Settings(), Resources(device=CPU, is_available=lambda name, path: False))
    assert why == f"There is no copy of CIFAR-10 here; give one with --data: {DATASETS['cifar10'].accepted}."


# The committed records ------------------------------------------------------------------------------------------------


def runs(name: str) -> list[Record]:
    return [line for line in run.read_committed(name, "") if line["kind"] == "run"]


def table1() -> list[Group]:
    """The long runs, at the rates that the committed short ones chose."""
    return list(studies.table1(run.best_rates(run.read_committed("mnist", ""))))


def test_the_committed_records_are_of_the_studies_as_they_stand() -> None:
    """Every lane of every group, and nothing else."""
    planned = {name: list(studies.PLANS[name]()) for name in ("sign", "cifar10", "readings", "warmup", "penalty")}
    planned["mnist"] = [*studies.rates(), *table1()]
    for name, groups in planned.items():
        expected = sorted(
            (each.study, lane.arm.name, lane.lr, each.seed, describe(lane.arm.method), each.steps, each.batch)
            for each in groups
            for lane in each.lanes
        )
        keys = ("study", "arm", "lr", "seed", "method", "steps", "batch")
        assert sorted(tuple(line[key] for key in keys) for line in runs(name)) == expected


def test_the_records_say_which_fids_of_table_1_were_not_measured() -> None:
    lines = run.read_committed("mnist", "")
    drawn = {(line["arm"], line["lr"], line["seed"]) for line in lines if line["kind"] == "fid"}
    wanted = {(each.lanes[i].arm.name, each.lanes[i].lr, each.seed) for each in table1() for i in each.fids}
    tuned = "BELAY m1 2e4"
    assert wanted - drawn == {("matched EMA", 1e-3, 4), ("matched EMA", 1e-3, 5), (tuned, 1e-3, 3), (tuned, 1e-3, 4)}
    assert drawn <= wanted
    (remarks,) = (line["remarks"] for line in lines if line["kind"] == "protocol" and line["study"] == "table1")
    assert any("FID of the matched EMA was taken for one seed of three" in line for line in remarks)
    assert any(f"that of {tuned} for one" in line for line in remarks)


@pytest.mark.parametrize("name", PARTS)
def test_every_committed_run_says_where_and_how_long(name: str) -> None:
    assert all(
        line["device"] == "NVIDIA H200" and line["torch"] and line["wall_s"] > 0 and line["how"] for line in runs(name)
    )


def test_the_fid_computation_was_checked_against_torch_fidelitys_number() -> None:
    (check,) = (line for line in run.read_committed("cifar10", "") if line["kind"] == "fid check")
    assert check["fid"] == pytest.approx(check["recorded"], abs=1e-3)


# A small study on the CPU ---------------------------------------------------------------------------------------------


def rates(share: float = 1.0) -> Iterator[Group]:
    for seed in range(2):
        yield replace(study_group(steps=round(50 * share)), seed=seed)


def small_table1(best: dict[str, float], share: float = 1.0) -> Iterator[Group]:
    lanes = tuple(replace(lane, lr=best[lane.arm.name]) for lane in study_group().lanes[:3])
    yield replace(study_group(steps=round(50 * share)), study="table1", lanes=lanes, fids=(0,))


def no_inception(device: torch.device, weights: Path | None) -> Brightness:
    raise LabError("it is not installed")


@dataclass
class Laboratory:
    """Resources for small studies on the CPU; `trained` lists the groups that were trained, not read from the cache."""

    trained: list[Group] = field(default_factory=list)
    final: dict[tuple[str, float], float] = field(default_factory=dict)  # training losses to report instead

    def run_group(self, group: Group, *rest: object) -> Iterator[Record]:
        self.trained.append(group)
        for line in run_group(group, *rest, triples=4):  # type: ignore[arg-type]
            if line["kind"] == "run" and self.final:
                loss = self.final[line["arm"], line["lr"]]
                line = line | {"final": {"w2": {"train": loss, "test": loss}}}
            yield line

    @property
    def resources(self) -> Resources:
        return Resources(
            device=CPU,
            mode="eager",
            load=lambda name, path: study_images(),
            is_available=lambda name, path: True,
            inception=no_inception,
            plans={"rates": rates, "table1": small_table1},
            run_group=self.run_group,
            throughput=lambda *args, **options: {"kind": "throughput"},
        )

    def run(self, settings: Settings, **changes: object) -> list[Record]:
        resources = replace(self.resources, **changes)  # type: ignore[arg-type]
        return run.run("mnist", settings, lambda n: None, resources)


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Laboratory:
    """A laboratory with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Laboratory()


SMALL = Settings(budget="8img")  # two steps


def test_a_study_is_run_if_it_can_be(laboratory: Laboratory) -> None:
    ticks: list[int] = []
    found = run.run("mnist", SMALL, ticks.append, laboratory.resources)
    kinds = [line["kind"] for line in found]
    assert kinds[0] == "origin"
    assert "committed" not in found[0]
    assert [(each.study, each.seed, each.steps) for each in laboratory.trained] == [
        ("rates", 0, 2),
        ("rates", 1, 2),
        ("table1", 0, 2),
    ]
    assert kinds.count("run") == 15
    assert kinds.count("grid") == 1
    assert "fid" not in kinds  # its network is not installed
    assert kinds.count("throughput") == 4
    assert sum(ticks) == run.UNITS


def test_speeds_are_measured_for_one_network_and_for_as_many_as_train_side_by_side(laboratory: Laboratory) -> None:
    counts: list[object] = []

    def throughput(*args: object, **options: object) -> Record:
        counts.append((options["side_by_side"], options["mode"]))
        return {"kind": "throughput"}

    found = laboratory.run(SMALL, throughput=throughput)
    assert counts == [(1, "eager"), (6, "eager"), (1, "eager"), (3, "eager")]
    speeds = [(line["study"], line["dataset"]) for line in found if line["kind"] == "throughput"]
    assert speeds == [("rates", "mnist")] * 2 + [("table1", "mnist")] * 2


def test_a_part_without_a_table_of_speeds_measures_none(laboratory: Laboratory) -> None:
    plans = {"figure4": rates}
    found = run.run("figure4", SMALL, lambda n: None, replace(laboratory.resources, plans=plans))
    assert {line["kind"] for line in found} >= {"origin", "run"}
    assert not [line for line in found if line["kind"] == "throughput"]


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_whose_speeds_are_measured_are_those_that_show_them(part: str) -> None:
    lines = [*run.read_committed(part, ""), score_records.throughput("mnist", "ncsnv2")]
    drawn = {plate.name for plate in REGISTRY[part].draw(lines)}
    assert (f"{part}-speed" in drawn) is (part in run.SPEED_SHOWN)


def test_table_1_takes_the_rates_that_the_short_runs_chose(laboratory: Laboratory) -> None:
    """The losses decide, and not the rates of the committed records."""
    best = {"equal-memory EMA": 3e-3, "matched EMA": 1e-3, "BELAY": 3e-3}
    laboratory.final = {(arm, lr): 0.1 if lr == best[arm] else 0.2 for arm in best for lr in (1e-3, 3e-3)}
    laboratory.run(SMALL)
    assert {lane.arm.name: lane.lr for lane in laboratory.trained[-1].lanes} == best
    assert best != {arm: run.best_rates(run.read_committed("mnist", ""))[arm] for arm in best}


def test_a_best_rate_is_an_arms_own() -> None:
    runs = [
        ("equal-memory EMA", 1e-3, 0.1),
        ("equal-memory EMA", 3e-3, 0.2),
        ("BELAY", 1e-3, None),
        ("BELAY", 3e-3, 0.3),
    ]
    lines = [
        {"kind": "run", "study": "rates", "seed": 0, "arm": arm, "lr": lr, "final": {"w2": {"train": x, "test": x}}}
        for arm, lr, x in runs
    ]
    assert run.best_rates(lines) == {"equal-memory EMA": 1e-3, "matched EMA": studies.USUAL_RATE, "BELAY": 3e-3}


def test_a_heavier_belay_is_among_them_only_if_it_is_better() -> None:
    def lines(*heavier: tuple[str, float]) -> list[Record]:
        runs = (("equal-memory EMA", 0.1), ("matched EMA", 0.1), ("BELAY", 0.2), *heavier)
        return [
            {"kind": "run", "study": "rates", "seed": 0, "arm": a, "lr": 1e-3, "final": {"w2": {"train": x, "test": x}}}
            for a, x in runs
        ]

    assert set(run.best_rates(lines(("BELAY m1 2e4", 0.3)))) == set(ARMS)
    found = run.best_rates(lines(("BELAY m1 2e4", 0.15), ("BELAY m1 2e5", 0.12)))
    assert set(found) == {*ARMS, "BELAY m1 2e5"}


def test_what_is_finished_is_not_trained_again(laboratory: Laboratory, tmp_path: Path) -> None:
    first = laboratory.run(SMALL)
    count = len(laboratory.trained)
    ticks: list[int] = []
    second = run.run("mnist", SMALL, ticks.append, laboratory.resources)
    assert len(laboratory.trained) == count == 3
    assert sum(ticks) == run.UNITS
    assert [line for line in first if line["kind"] == "run"] == [line for line in second if line["kind"] == "run"]
    assert first[0]["device_s"] == second[0]["device_s"]  # the time of the first run
    laboratory.run(replace(SMALL, anew=True))
    assert len(laboratory.trained) == 2 * count
    for path in tmp_path.rglob("rates-*.jsonl"):
        path.write_text("{")
    laboratory.run(SMALL)
    assert len(laboratory.trained) == 2 * count + 2  # damaged files are not used


def test_words_about_a_group_do_not_train_it_again(laboratory: Laboratory) -> None:
    laboratory.run(SMALL)
    count = len(laboratory.trained)

    def said(share: float = 1.0) -> Iterator[Group]:
        return (replace(each, differs=("Another sentence.",)) for each in rates(share))

    laboratory.run(SMALL, plans={"rates": said, "table1": small_table1})
    assert len(laboratory.trained) == count


def test_images_are_made_again_once_fids_network_is_installed(laboratory: Laboratory) -> None:
    assert not [line for line in laboratory.run(SMALL) if line["kind"] == "fid"]
    found = [line for line in laboratory.run(SMALL, inception=lambda *_: Brightness()) if line["kind"] == "fid"]
    assert [each.study for each in laboratory.trained] == ["rates", "rates", "table1", "table1"]
    assert [(line["network"], line["reference"]) for line in found] == [("brightness", "mnist train, 12 images")]


def test_weights_of_fids_network_that_were_given_must_be_usable(laboratory: Laboratory) -> None:
    with pytest.raises(LabError, match="it is not installed"):
        laboratory.run(replace(SMALL, inception=Path("weights.pth")))


def test_the_resources_reach_the_experiment(laboratory: Laboratory) -> None:
    given: list[tuple[object, ...]] = []

    def spy(group: Group, *rest: object) -> Iterator[Record]:
        given.append(rest)
        return laboratory.run_group(group, *rest)

    laboratory.run(SMALL, run_group=spy, inception=lambda *_: Brightness())
    assert {(device, mode) for _, device, mode, _, _ in given} == {(CPU, "eager")}
    assert [isinstance(reference, FidReference) for *_, reference in given] == [False, False, True]


def test_another_seed_is_another_study(laboratory: Laboratory) -> None:
    laboratory.run(Settings(seed=3, budget="8img"))
    assert [each.seed for each in laboratory.trained] == [300, 301, 300]


def test_a_budget_of_time_is_measured_once(laboratory: Laboratory) -> None:
    """150 steps of a group at 20 ms are 3 s; a budget of 0.12 s is a twenty-fifth of that."""
    timed: list[int] = []

    def seconds_per_step(groups: list[LearnerGroup], *args: object, **options: object) -> list[float]:
        timed.append(len(groups[0].members))
        return [0.02]

    for _ in range(2):
        laboratory.run(Settings(budget="0.12s"), seconds_per_step=seconds_per_step)
        assert timed == [6, 3]  # two seeds of a study are as fast as each other
        assert [each.steps for each in laboratory.trained] == [2, 2, 2]


# Plans ----------------------------------------------------------------------------------------------------------------

POSSIBLE = Resources(device=CPU, is_available=lambda name, path: True)  # the studies as they stand


def test_a_budget_too_small_for_the_spring_is_refused() -> None:
    with pytest.raises(LabError, match="--budget 100img is too small for cifar10: κ"):
        run.plan("cifar10", Settings(budget="100img"), POSSIBLE)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("options", [{}, {"quick": True}, {"budget": "200kimg"}, {"budget": "9m"}])
def test_every_study_can_be_planned(name: str, options: dict[str, object]) -> None:
    units, line = run.plan(name, Settings(**options), POSSIBLE)  # type: ignore[arg-type]
    assert units == run.UNITS
    assert "networks on" in line
    assert ("as many steps as fit into 9m" in line) == (options.get("budget") == "9m")


def test_a_plan_has_the_budgets_steps() -> None:
    """Of 18 networks and 5 seeds in batches of 32."""
    assert f"{18 * 5 * 1000:,} steps in all" in run.plan("sign", Settings(budget="32kimg"), POSSIBLE)[1]


def test_a_plan_knows_table_1s_networks_and_images() -> None:
    """Three arms at three rates and a tuned one, of three seeds: only BELAY at EMA's rate has no images."""
    line = run.plan("mnist", Settings(), POSSIBLE)[1]
    assert f"{3 * 22 + 3 * 10} networks" in line
    assert line.endswith(f"; besides, images of {3 * (10 - 1)} of them and their FID")
    assert "images of" not in run.plan("mnist", Settings(quick=True), POSSIBLE)[1]


def test_a_bar_that_has_more_steps_than_planned_stays_full() -> None:
    ticks: list[int] = []
    progress = run.StepProgress(ticks.append, 10)
    for _ in range(3):
        progress(6)
    assert sum(ticks) == run.UNITS


# Within a time --------------------------------------------------------------------------------------------------------


def test_a_study_whose_time_is_over_returns_what_is_finished(
    laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Clocked(run.Deadline):
        def __init__(self, seconds: float | None) -> None:
            super().__init__(seconds, clock=lambda: now[0])

    def slow(group: Group, *rest: object) -> Iterator[Record]:
        now[0] += 10.0
        return laboratory.run_group(group, *rest)

    monkeypatch.setattr(run, "Deadline", Clocked)
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    limited = replace(SMALL, stop_after=15.0)
    origin, *first = laboratory.run(limited, run_group=slow)
    assert origin["complete"] is False
    assert {line["seed"] for line in first if line["kind"] == "run"} == {0}  # a second group would end after 20 s
    assert len(laboratory.trained) == 1
    origin, *more = laboratory.run(limited, run_group=slow)
    assert more[: len(first)] == first
    assert [group.seed for group in laboratory.trained] == [0, 1]
    origin, *_ = laboratory.run(SMALL, run_group=slow)
    assert origin["complete"] is True


def test_a_study_without_a_pulling_spring_has_no_speed_to_measure(laboratory: Laboratory) -> None:
    def alone(share: float = 1.0) -> Iterator[Group]:
        yield replace(study_group(steps=2), study="rates", lanes=study_group().lanes[:1])

    changes = {"plans": {"rates": alone, "table1": small_table1}}
    found = laboratory.run(Settings(), **changes)
    assert {line["study"] for line in found if line["kind"] == "throughput"} == {"table1"}

"""Figure 4: losses and FIDs during training. A tiny study is run on the CPU, stopped and continued, and drawn."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import score_records
from helpers.captions import check_brevity
from helpers.score_models import STUDY_SPRING, squares, study_group
from torchbelay.lab import records as on_disk
from torchbelay.lab.arms import BELAY, EMA, Lane
from torchbelay.lab.deadline import Deadline, OutOfTimeError
from torchbelay.lab.part import Record, Settings, Table
from torchbelay.lab.report import style
from torchbelay.lab.score import fid, fid_curve, figure4, run, studies
from torchbelay.lab.score.experiment import ImageSampler
from torchbelay.lab.score.models.ncsn import NCSN
from torchbelay.lab.score.models.noise_levels import Levels
from torchbelay.lab.score.run import Resources
from torchbelay.lab.score.studies import Group
from torchbelay.lab.score.training.batches import Batches
from torchbelay.physics.spring import Spring

CPU = torch.device("cpu")
MODEL = NCSN(shape=(1, 8, 8), features=4, levels=Levels(1.0, 0.1, 2, 1, 1e-3))
IMAGES = squares(MODEL.shape, train=6, test=6)


class Brightness:
    """Stands for FID's network; the features are the mean brightness of each quarter."""

    identity = "brightness"

    def features(self, pictures: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pictures.float(), 4).flatten(1)


LANES = tuple(
    Lane(arm, 1e-3)
    for arm in (
        studies.ema(Spring.ema(decay=0.9)),
        *studies.standard_arms(STUDY_SPRING),
        studies.belay(replace(STUDY_SPRING, m1=200.0), "BELAY m1 2e4"),
        studies.belay(replace(STUDY_SPRING, m1=2000.0), "BELAY m1 2e5"),
    )
)


def tiny(share: float = 1.0) -> Iterator[Group]:
    """Figure 4 with four steps, all of them measured, two of them with FIDs."""
    for seed in (6, 7):
        group = study_group(objective=MODEL, lanes=LANES, steps=4, points=4, batch=2, samples=4, fids=(0, 3))
        yield replace(group, study="figure4", seed=seed, fid_points=2)


def resources() -> Resources:
    return Resources(
        device=CPU,
        mode="eager",
        load=lambda name, path: IMAGES,
        is_available=lambda name, path: True,
        inception=lambda device, path: Brightness(),
        plans={**studies.PLANS, "figure4": tiny},
        throughput=lambda *args, **options: {"kind": "throughput"},
    )


@pytest.fixture(autouse=True, scope="module")
def few_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "FEWEST", 4)
        yield


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return run.run("figure4", Settings(), lambda n: None, resources())


# The experiment -------------------------------------------------------------------------------------------------------


def test_fids_are_measured_at_points_of_the_losses_and_at_the_end() -> None:
    assert fid_curve.fid_steps(next(studies.figure4())) == [625, 1250, 1875, 2500, 3125, 3750, 4375, 5000]
    assert fid_curve.fid_steps(next(tiny())) == [2, 4]
    assert fid_curve.pieces(next(tiny())) == [(i, *at) for i in (0, 3) for at in ((2, "w2"), (4, "w2"), (4, "w1"))]


def test_the_records_have_losses_of_all_arms_and_fids_of_two(records: list[Record]) -> None:
    runs = [line for line in records if line["kind"] == "run"]
    assert len(runs) == 2 * len(LANES)
    assert all([point["step"] for point in line["curve"]] == [1, 2, 3, 4] for line in runs)
    assert all({"train", "test"} == set(point[w]) for line in runs for point in line["curve"] for w in ("w1", "w2"))
    fids = [line for line in records if "fid" in line]
    keys = sorted((line["kind"], line["arm"], line["seed"], line["step"], line["weights"]) for line in fids)
    assert keys == sorted(
        (kind, arm, seed, step, weights)
        for arm in (EMA, BELAY)
        for seed in (6, 7)
        for kind, step, weights in ((figure4.DURING, 2, "w2"), ("fid", 4, "w2"), ("fid", 4, "w1"))
    )
    assert {(line["seed"], line["sample_seed"]) for line in fids} == {(6, 6), (7, 7)}
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_a_fid_is_that_of_the_average_at_its_step(records: list[Record]) -> None:
    """Trained again by hand up to the step, and sampled by hand."""
    group = next(tiny())
    learners = fid_curve.build_learners(MODEL, group.lanes, group.seed, CPU, "eager")
    batches = Batches(IMAGES.train, MODEL, group.batch, seed=1000 + group.seed)
    for _ in range(2):
        learners.step(*batches.next())
    sampler = ImageSampler(MODEL, CPU, "eager")
    sampler.network.load_state_dict(learners.members[3].belay.average_state_dict())
    made = sampler.make(group.samples, seed=group.seed)
    network = Brightness()
    expected = fid.distance(made, fid.statistics(network.features(IMAGES.train)), network)
    (found,) = [
        line["fid"]
        for line in records
        if line["kind"] == figure4.DURING and line["arm"] == BELAY and line["seed"] == group.seed
    ]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.thorough
def test_a_study_that_is_stopped_goes_on_with_the_next_fid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained: list[int] = []
    train, measure = fid_curve._train, fid_curve._measure
    measured: list[tuple[int, int, str]] = []

    def counted_train(group: Group, *rest: object) -> Iterator[Record]:
        trained.append(group.seed)
        return train(group, *rest)  # type: ignore[arg-type]

    def stops(group: Group, piece: tuple[int, int, str], *rest: object) -> Iterator[Record]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(piece)
        return measure(group, piece, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fid_curve, "_train", counted_train)
    monkeypatch.setattr(fid_curve, "_measure", stops)
    with pytest.raises(KeyboardInterrupt):
        run.run("figure4", Settings(), lambda n: None, resources())
    assert (trained, len(measured)) == ([6], 2)
    monkeypatch.setattr(fid_curve, "_measure", lambda *given: measured.append(given[1]) or measure(*given))
    found = run.run("figure4", Settings(), lambda n: None, resources())
    assert trained == [6, 7]  # the first seed was not trained again
    assert len(measured) == 12  # and no FID was measured twice
    assert len([line for line in found if "fid" in line]) == 12
    assert list(tmp_path.rglob("*.weights")) == []  # the weights are gone, the records have all that is needed
    again = run.run("figure4", Settings(), lambda n: None, resources())
    assert [line for line in again if "fid" in line] == [line for line in found if "fid" in line]
    assert (trained, len(measured)) == ([6, 7], 12)
    run.run("figure4", Settings(anew=True), lambda n: None, resources())
    assert trained == [6, 7, 6, 7]
    assert len(measured) == 24


@pytest.mark.thorough
def test_a_study_whose_time_is_over_keeps_its_fids_and_counts_all_of_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checks: list[int] = []

    class FourUnits(Deadline):  # of a group or a FID
        def check(self) -> None:
            checks.append(0)
            if len(checks) % 5 == 0:
                raise OutOfTimeError

    monkeypatch.setattr(run, "Deadline", FourUnits)
    origin, *lines = run.run("figure4", Settings(stop_after=1.0), lambda n: None, resources())
    assert (origin["complete"], lines) == (False, [])  # three FIDs of the first seed's six
    assert len(list(tmp_path.rglob("figure4-0-*.jsonl"))) == 3
    while not origin["complete"]:
        origin, *lines = run.run("figure4", Settings(stop_after=1.0), lambda n: None, resources())
    assert len([line for line in lines if "fid" in line]) == 12
    assert len(checks) == 4 + 12 + 3  # groups that were begun or continued, FIDs, and stops
    pieces = [on_disk.read(path)[0]["wall_s"] for path in tmp_path.rglob("figure4-*-*.jsonl")]
    groups = [on_disk.read(path)[0]["wall_s"] for path in tmp_path.rglob("figure4-????????????????.jsonl")]
    assert len(groups) == 2
    assert sum(groups) == pytest.approx(sum(pieces), abs=0.1)


def test_complete_seeds_of_earlier_records_are_not_run_again(
    records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fid_curve, "_train", lambda group, *rest: pytest.fail(f"seed {group.seed} is trained"))
    some = [line for line in records if not (line.get("seed") == 7 and line.get("weights") == "w1")]
    assert run.adopt("figure4", Settings(), some, resources()) == [6]  # of seed 7 two FIDs are missing
    with pytest.raises(pytest.fail.Exception, match="seed 7 is trained"):
        run.run("figure4", Settings(), lambda n: None, resources())
    assert run.adopt("figure4", Settings(), records, resources()) == [6, 7]
    origin, *found = run.run("figure4", Settings(), lambda n: None, resources())
    assert found == records[1:]
    assert origin["complete"]
    for changed in ({"steps": 5}, {"batch": 3}, {"lr": 0.1}, {"method": "swa()"}, {"samples": 5}):
        others = [line | {key: changed[key] for key in changed.keys() & line.keys()} for line in records]
        assert run.adopt("figure4", Settings(), others, resources()) == []
    other = [line | {"torch": "1.0"} if "torch" in line else line for line in records]
    run.adopt("figure4", Settings(), other, resources())  # under a name that nothing here looks for
    assert len(list(tmp_path.rglob("figure4-????????????????.jsonl"))) == 4


# The figures ----------------------------------------------------------------------------------------------------------


def test_without_records_there_is_no_figure() -> None:
    assert figure4.draw([]) == []


def made_up() -> list[Record]:
    """Records of a study whose networks train."""
    arms = (EMA, "equal-memory EMA", "matched EMA", BELAY, "BELAY m1 2e4", "BELAY m1 2e5")
    lines = score_records.runs("figure4", {3e-4: 0.05}, dict.fromkeys(arms, 1.0))
    for arm in (EMA, BELAY):
        for seed in range(3):
            for step, weights in ((2500, "w2"), (5000, "w2"), (5000, "w1")):
                made = score_records.fid("figure4", arm, 3e-4, 10 + seed + 1e4 / step, seed, weights)
                kind = "fid" if step == 5000 else figure4.DURING
                lines.append(made | {"kind": kind, "step": step, "sample_seed": seed})
        lines.append(score_records.grid("figure4", arm, 3e-4))
    return [*lines, score_records.protocol("figure4")]


def test_the_figures_are_drawn_from_records_that_have_been_on_disk() -> None:
    plates = {plate.name: plate for plate in figure4.draw(json.loads(json.dumps(made_up())))}
    assert list(plates) == ["figure4-iterations", "figure4-table", "figure4-effects", "figure4-m1", "figure4-samples"]
    for plate in plates.values():
        check_brevity(plate)
        if not isinstance(plate.figure, Table):
            assert len(style.as_bytes(plate.figure, "png")) > 10_000
    above, below = plates["figure4-iterations"].figure.axes  # type: ignore[union-attr]
    assert above.get_ylabel() == "test loss, mean over pixels"
    assert (below.get_ylabel(), below.get_xlabel()) == ("FID", "iteration")
    lines = {line.get_label(): line for line in below.lines}
    assert list(lines[BELAY].get_xdata()) == list(lines[EMA].get_xdata()) == [2500, 5000]
    assert list(lines[BELAY].get_ydata()) == pytest.approx([15.0, 13.0])  # the medians
    train, test = plates["figure4-m1"].figure.axes  # type: ignore[union-attr]
    assert train.get_title(loc="left").startswith("train loss")
    assert test.get_title(loc="left").startswith("test loss")
    assert {line.get_label() for line in test.lines} >= {EMA, BELAY, "BELAY m1 2e4", "BELAY m1 2e5"}
    rows = plates["figure4-table"].figure.rows  # type: ignore[union-attr]
    assert [row[0] for row in rows][:4] == [
        "The paper: BELAY at 0.05",
        "The paper: EMA at 0.05",
        "EMA at 0.0003",
        "equal-memory EMA at 0.0003",
    ]


@pytest.mark.parametrize("complete", [True, False])
def test_a_part_that_was_stopped_says_how_many_seeds_it_has(complete: bool) -> None:
    plates = figure4.draw([score_records.origin() | {"complete": complete}, *made_up()])
    said = "The part is not complete: losses of 3 of 3 seeds, FIDs of 3." in plates[0].notes
    assert said is not complete


def test_a_seed_without_fids_has_losses_all_the_same() -> None:
    some = [line for line in made_up() if line.get("seed") == 0 or "fid" not in line["kind"]]
    plates = {plate.name: plate for plate in figure4.draw([score_records.origin() | {"complete": False}, *some])}
    assert "The part is not complete: losses of 3 of 3 seeds, FIDs of 1." in plates["figure4-iterations"].notes
    losses, fids = plates["figure4-effects"].figure.rows  # type: ignore[union-attr]
    assert (losses[0], losses[1]) == ("runs of 5,000 steps, test loss", "3")
    assert (fids[0], fids[1]) == ("runs of 5,000 steps, FID", "1")
    assert "(one seed)" in fids[2]
    assert "(one seed)" not in losses[2]


def test_networks_that_are_all_lost_are_drawn_too(records: list[Record]) -> None:
    plates = {plate.name: plate for plate in figure4.draw(records)}
    assert list(plates) == ["figure4-iterations", "figure4-table", "figure4-m1"]  # no ratio, no samples
    assert "4 of 4 runs are lost" in " ".join(plates["figure4-iterations"].notes)


def test_the_curve_of_fids_is_that_of_the_records() -> None:
    lines = [
        score_records.fid("figure4", BELAY, 3e-4, 10.0 * step + seed, seed)
        | {"kind": "fid" if step == 8 else figure4.DURING, "step": step, "sample_seed": seed}
        for seed in (6, 7)
        for step in (4, 8)
    ]
    assert figure4.fid_curve(lines, BELAY, 3e-4) == {4: [46.0, 47.0], 8: [86.0, 87.0]}
    assert figure4.fid_curve(lines, BELAY, 3e-4, "w1") == {}

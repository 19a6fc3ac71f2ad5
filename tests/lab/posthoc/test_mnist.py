"""Averages of a score model made after training: a tiny run on made-up images, and the records that are kept."""

import json
from pathlib import Path

import pytest
import torch

from helpers import image_files, kept_records
from torchbelay.lab.advice import mnist as advice
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.posthoc import figures, mnist, study
from torchbelay.lab.records import select, without_times
from torchbelay.lab.score.data import Images

TINY = mnist.Protocol(steps=20, batch=2, channels=16, triples=4, every=2, half_lives=(4, 8))
NETWORK, ABOUT = "mnist network", "mnist protocol"


def tiny_run(seed: int = 0) -> tuple[list[Record], int]:
    """Train on made-up images; return the records and the units of work that were ticked."""
    train, test = (torch.from_numpy(part) for part in image_files.pixels("mnist"))
    ticks: list[int] = []
    return list(mnist.train(TINY, Images("mnist", train, test), seed, ticks.append)), sum(ticks)


@pytest.fixture(scope="module")
def made() -> tuple[list[Record], int]:
    return tiny_run()


# A tiny run -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_averages_made_afterwards_are_those_trained_along_as_predicted(made: tuple[list[Record], int]) -> None:
    records, ticks = made
    assert ticks == TINY.steps
    lines = select(records, NETWORK)
    assert [each["half_life"] for each in lines] == [4, 8]
    (plain,) = select(records, "mnist weights")
    for each in lines:
        assert 0 < each["predicted"] <= figures.ACCEPTED
        assert 0 < each["actual"] < 5 * each["predicted"]
        assert each["made"] == pytest.approx(each["along"], rel=1e-3)
        assert abs(each["along"] - plain["loss"]) > 10 * abs(each["made"] - each["along"])  # the average did something


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_records(made: tuple[list[Record], int]) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(12345)  # no record may depend on it
    before = torch.get_rng_state()
    again, _ = tiny_run()
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    assert [without_times(line) for line in again] == [without_times(line) for line in made[0]]
    assert json.loads(json.dumps(made[0], allow_nan=False)) == made[0]


@pytest.mark.thorough
def test_a_copy_of_mnist_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    monkeypatch.setattr(mnist, "QUICK", TINY)
    settings = Settings(quick=True, data=image_files.npz(tmp_path / "mnist.npz", "mnist"))
    ticks: list[int] = []
    (about,) = select(mnist.run(settings, ticks.append), ABOUT)
    assert "committed" not in about
    assert about["trained_steps"] == TINY.steps
    assert (sum(ticks), "a score model of MNIST with 2 averages, 20 steps") == mnist.plan(settings)


def test_a_copy_at_hand_is_trained_on_if_it_is_given_or_the_part_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    copy = image_files.npz(tmp_path / "mnist.npz", "mnist")
    monkeypatch.setenv("TORCHBELAY_DATA", str(tmp_path))
    for obstacle in (mnist.obstacle, advice.obstacle):
        assert "give a copy with --data" in str(obstacle(Settings()))
        assert obstacle(Settings(quick=True)) is None
        assert obstacle(Settings(data=copy)) is None


# The records that are kept --------------------------------------------------------------------------------------------


def test_without_a_copy_the_committed_records_are_shown_and_the_figure_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_files.make_sets_small(monkeypatch, tmp_path)
    ticks: list[int] = []
    found = mnist.run(Settings(), ticks.append)
    assert sum(ticks) == mnist.plan(Settings())[0] == 1
    (about,) = select(found, ABOUT)
    assert about["committed"] is True
    assert about["why"] == "Training on MNIST takes minutes on a CPU; give a copy with --data to do it."
    assert str(mnist.obstacle(Settings(quick=True))).startswith("There is no copy of MNIST here; give one with --data")
    ring = [line for line in kept_records.lines("posthoc") if not line["kind"].startswith("mnist")]
    said = " ".join(study.draw([*ring, *found])[-1].notes)
    assert f"These are the records that come with the package: {about['why']}" in said
    assert "come with the package" not in " ".join(study.draw(kept_records.lines("posthoc"))[-1].notes)


def test_the_records_of_the_package_are_those_of_the_documents() -> None:
    kept = [line for line in kept_records.lines("posthoc") if line["kind"].startswith("mnist")]
    own = [{k: v for k, v in line.items() if k not in ("committed", "why")} for line in mnist.read_committed("")]
    assert own == kept
    (about,) = select(kept, ABOUT)
    assert {"date", "device", "device_s", "torch", "torchbelay", "python"} <= {*about}
    full = mnist.FULL
    assert [about[key] for key in ("trained_steps", "batch", "lr", "every", "triples", "channels")] == [
        full.steps, full.batch, full.lr, full.every, full.triples, full.channels,
    ]  # fmt: skip
    assert [each["half_life"] for each in select(kept, NETWORK)] == [*full.half_lives]


def test_the_kept_errors_are_near_the_predicted_ones_and_the_losses_agree() -> None:
    lines = select(kept_records.lines("posthoc"), NETWORK)
    assert all(1 / 5 < each["actual"] / each["predicted"] < 5 for each in lines)
    good = [each for each in lines if each["predicted"] <= figures.ACCEPTED]
    assert len(good) >= 4
    assert all(each["made"] == pytest.approx(each["along"], rel=0.01) for each in good)

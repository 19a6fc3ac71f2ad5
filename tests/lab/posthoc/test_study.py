"""Averages made after training, as a part of the laboratory: its quick version from start to end, and its figures."""

import json
from collections.abc import Iterator
from statistics import fmean

import pytest
import torch

from helpers import image_files, kept_records
from helpers.captions import check_brevity, full_text
from torchbelay.lab.part import Plate, Record, Settings
from torchbelay.lab.posthoc import figures, study
from torchbelay.lab.records import select
from torchbelay.lab.registry import PARTS
from torchbelay.lab.report import style

QUICK = Settings(quick=True)

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def no_images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide any copy of MNIST that this machine may have."""
    with pytest.MonkeyPatch.context() as patch:
        image_files.make_sets_small(patch, tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="module")
def made(no_images: None) -> tuple[list[Record], int]:
    """Run the quick version; return the records and the units of work that were ticked."""
    done = 0

    def tick(units: int) -> None:
        nonlocal done
        done += units

    return study.run(QUICK, tick), done


@pytest.fixture(scope="module")
def records(made: tuple[list[Record], int]) -> list[Record]:
    return made[0]


# Running --------------------------------------------------------------------------------------------------------------


def test_it_is_a_part_and_the_plan_says_how_much_is_done(made: tuple[list[Record], int]) -> None:
    assert PARTS["posthoc"] is study
    units, line = study.plan(QUICK)
    assert made[1] == units
    assert "12 networks with 8 averages" in study.plan(Settings())[1]
    assert "4 networks with 5 averages" in line
    assert "the records of MNIST that come with the package: There is no copy of MNIST here; give one" in line


def test_the_same_settings_make_the_same_records(records: list[Record]) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(12345)  # no record may depend on it
    again = study.run(QUICK, lambda n: None)
    torch.set_rng_state(state)
    assert again == records
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_on_white_updates_the_error_is_the_predicted_one(records: list[Record]) -> None:
    white = select(records, "white")
    assert len(white) == len(study.TARGETS) * len(study.COUNTS)
    assert all(0.85 < each["actual"] / each["predicted"] < 1.15 for each in white)  # of 200 weights


def test_errors_fall_with_the_number_of_snapshots_and_faster_than_with_checkpoints(records: list[Record]) -> None:
    for target in {each["target"] for each in select(records, "error")}:
        ours, plain = (select(records, "error", target=target, recorded=kind) for kind in ("averages", "weights"))
        for lines in (ours, plain):
            found = [each["predicted"] for each in lines]
            assert found == sorted(found, reverse=True)
        assert ours[-1]["predicted"] < plain[-1]["predicted"] / 1000


def test_networks_with_averages_made_afterwards_do_as_well(records: list[Record]) -> None:
    good = [each for each in select(records, "network") if each["predicted"] <= figures.ACCEPTED]
    assert len(good) >= 4
    for each in good:
        assert fmean(each["made"]) == pytest.approx(fmean(each["along"]), rel=0.01)
        assert all(each["predicted"] / 5 < actual < 5 * each["predicted"] for actual in each["actual"])


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plates(records: list[Record]) -> list[Plate]:
    return study.draw(records)


def test_every_plate_has_a_short_caption_and_notes(plates: list[Plate]) -> None:
    assert [plate.name for plate in plates] == ["posthoc-profiles", "posthoc-errors", "posthoc-losses"]
    for plate in plates:
        check_brevity(plate)
        assert style.as_bytes(plate.figure, "png")[:4] == b"\x89PNG"


def test_what_captions_say_follows_from_the_records(records: list[Record], plates: list[Plate]) -> None:
    texts = {plate.name: full_text(plate) for plate in plates}
    ratios = [each["actual"] / each["predicted"] for each in select(records, "white")]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times" in texts["posthoc-errors"]
    factors = [a / each["predicted"] for each in select(records, "network") for a in each["actual"]]
    factors += [each["actual"] / each["predicted"] for each in select(records, "mnist network")]
    assert f"{min(factors):.2g} to {max(factors):.2g} times the predicted" in texts["posthoc-losses"]


def test_other_records_make_other_captions(records: list[Record]) -> None:
    changed = json.loads(json.dumps(records))
    for each in select(changed, "white"):
        each["actual"] *= 3
    assert "2.9" in study.draw(changed)[1].caption or "3." in study.draw(changed)[1].caption


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("decay(300)", "linear decay over 300"),
        ("power_ema(gamma=3.0)", "power_ema(gamma=3.0)"),
        ("swa()", "swa()"),
        ("ema(decay=0.9)", "ema(decay=0.9)"),
    ],
)
def test_targets_have_names_for_readers(target: str, name: str) -> None:
    assert figures.short(target) == name


def test_a_sweep_of_many_targets_can_be_drawn() -> None:
    curve = [1.0, 0.5, 0.0]
    fig = figures.draw_sweep([(f"window({n})", curve, curve, 0.1) for n in range(9)], at=3)
    assert style.as_bytes(fig, "png")[:4] == b"\x89PNG"
    assert len(fig.axes) == 2


# The records that are kept --------------------------------------------------------------------------------------------


def test_the_kept_records_hold_what_the_documents_promise() -> None:
    kept = kept_records.lines("posthoc")
    assert all(0.95 < each["actual"] / each["predicted"] < 1.06 for each in select(kept, "white"))
    factors = [a / each["predicted"] for each in select(kept, "network") for a in each["actual"]]
    assert max(factors) < 5
    assert min(factors) > 1 / 5
    assert [plate.name for plate in study.draw(kept)] == ["posthoc-profiles", "posthoc-errors", "posthoc-losses"]

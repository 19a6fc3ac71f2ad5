"""The part `cifar10`: what is drawn from its records, and from what is left when some of them are missing."""

from collections.abc import Callable
from typing import cast

import pytest

from helpers import score_records
from helpers.captions import full_text
from helpers.score_records import without
from torchbelay.lab.part import Part, Plate, Record, Table
from torchbelay.lab.report import style
from torchbelay.lab.score import cifar10

ALL = ["cifar10-curves", "cifar10-pairs", "cifar10-table", "cifar10-effects", "cifar10-samples", "cifar10-speed"]
WITHOUT_EFFECTS = [name for name in ALL if name != "cifar10-effects"]


def drawn(records: list[Record]) -> dict[str, Plate]:
    return score_records.drawn(cast("Part", cifar10), records)


@pytest.fixture(scope="module")
def plates() -> dict[str, Plate]:
    return drawn(score_records.cifar10(1.02))


def test_everything_is_drawn(plates: dict[str, Plate]) -> None:
    assert list(plates) == ALL


def test_curves_go_over_images_and_stand_beside_ema() -> None:
    left, right = drawn(score_records.cifar10(1.5, spread=0.0, noise=0.0))["cifar10-curves"].figure.axes
    (belay,) = [each for each in left.lines if each.get_label() == "BELAY"]
    assert list(belay.get_xdata()) == pytest.approx([share * 20_000 * 256 / 1e3 for share in (0.1, 0.2, 0.4, 0.7, 1.0)])
    assert belay.get_ydata()[-1] == pytest.approx(1.5 * 0.19)
    (beside,) = [each for each in right.lines if each.get_color() == style.colour("BELAY")]
    assert list(beside.get_ydata()) == pytest.approx([1.5] * 5)


def test_the_table_has_the_papers_numbers_beside_ours(plates: dict[str, Plate]) -> None:
    table = plates["cifar10-table"].figure
    assert isinstance(table, Table)
    assert table.rows[0][:4] == ("The paper: BELAY", "0.176", "0.170", "1.99")
    assert table.rows[1][:4] == ("The paper: EMA", "0.175", "0.168", "1.98")
    assert [row[0] for row in table.rows[2:]] == [
        f"{arm} at 0.001" for arm in ("EMA", "matched EMA", "BELAY", "θ −0.5")
    ]
    assert "9.3 times as large" in plates["cifar10-table"].caption


def test_pairs_are_of_losses_and_of_fids(plates: dict[str, Plate]) -> None:
    losses, drawn_images = plates["cifar10-pairs"].figure.axes
    names = [text.get_text().replace("\n", " ") for text in losses.get_xticklabels()]
    assert names == ["BELAY ÷ EMA", "BELAY ÷ matched EMA", "matched EMA ÷ EMA", "θ −0.5 ÷ EMA"]
    assert len(losses.containers) == len(drawn_images.containers) == 4
    said = " and each one's best: test loss 1.022, 1.021, 1.022; FID 1.001, 1.007, 1.001."
    assert plates["cifar10-pairs"].caption.endswith(said)
    assert plates["cifar10-curves"].caption.endswith(" and each one's best: test loss 1.022, 1.021, 1.022.")
    assert "Ratios of test loss: BELAY ÷ EMA 1.022 (" in full_text(plates["cifar10-pairs"])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda r: [], []),
        (lambda r: without(r, kind="run"), ["cifar10-samples", "cifar10-speed"]),
        (lambda r: without(r, kind="fid"), ALL),
        (lambda r: [x | {"fid": None} if x["kind"] == "fid" else x for x in r], ALL),
        (lambda r: without(r, kind="grid"), [name for name in ALL if name != "cifar10-samples"]),
        (lambda r: [x for x in r if x.get("seed", 0) == 0], ALL),
        (lambda r: without(r, arm="EMA"), ALL),
        (lambda r: without(r, arm="BELAY"), WITHOUT_EFFECTS),
        (
            lambda r: [x for x in r if x.get("arm", "EMA") == "EMA"],
            [name for name in WITHOUT_EFFECTS if name != "cifar10-pairs"],
        ),
        (lambda r: r + [x | {"lr": 2e-3} for x in r if x["kind"] == "run"], ALL),
        (lambda r: without(r, kind="protocol"), ALL),
    ],
    ids=[
        "nothing", "no runs", "no FID", "FID null", "no grids", "one seed", "no EMA", "no BELAY", "EMA alone",
        "two rates", "no protocol",
    ],
)  # fmt: skip
def test_what_is_missing_is_left_out(change: Callable[[list[Record]], list[Record]], names: list[str]) -> None:
    assert list(drawn(change(score_records.cifar10()))) == names


def test_that_fid_was_not_run_is_said() -> None:
    plate = drawn(without(score_records.cifar10(), kind="fid"))["cifar10-pairs"]
    assert [text.get_text() for text in plate.figure.axes[1].texts] == ["not run"]
    assert plate.caption.endswith(" test loss 1.002, 1.001, 1.002; FID not run.")
    assert "FID has not been run." in plate.notes
    assert "Ratios of FID" not in full_text(plate)


def test_the_ratios_of_fid_are_told() -> None:
    plate = drawn(score_records.cifar10(fid_ratio=0.5))["cifar10-pairs"]
    assert "Ratios of FID: BELAY ÷ EMA 0.500 (0.470 to 0.533);" in full_text(
        plate
    )  # 0.491 to 0.509 over the seeds alone
    assert plate.caption.endswith("; FID 0.500, 0.503, 0.500.")


def test_the_noise_of_a_fid_is_in_the_bars_as_in_the_words() -> None:
    plate = drawn(score_records.cifar10(fid_ratio=0.5))["cifar10-pairs"]
    (bar, *_) = plate.figure.axes[1].containers
    ((_, low), (_, high)) = bar[2][0].get_segments()[0]
    assert [low, high] == pytest.approx([0.47, 0.533], abs=5e-4)


def test_runs_that_are_all_lost_are_drawn_too() -> None:
    assert list(drawn(score_records.cifar10(None, None, fid_ratio=None, other_sign=None))) == WITHOUT_EFFECTS


def test_the_check_of_fid_the_times_and_the_other_sign_are_notes() -> None:
    check = {"kind": "fid check", "fid": 10.323329, "recorded": 10.32333, "images": "some against others"}
    made = drawn([*score_records.cifar10(other_sign=1.5, noise=0.0), check])
    notes = made["cifar10-table"].notes
    assert notes[-1].startswith("Check of the FID computation, on some against others: it gives 10.323329; ")
    assert notes[-1].endswith("torch-fidelity records 10.32333.")
    assert any("41.5 s with 6 side by side." in note for note in notes)
    (sign,) = [note for note in made["cifar10-pairs"].notes if "sign of the spring" in note]
    loss = "at 0.001 θ −0.5 (Generalized Primal Averaging) has 1.50 (1.50 to 1.50) times EMA's test loss and "
    assert sign.startswith(f"The sign of the spring: {loss}")
    assert sign.endswith(" times its FID.")
    without_fid = drawn(without(score_records.cifar10(), kind="fid"))["cifar10-pairs"].notes
    assert any(note.endswith("; its FID has not been run.") for note in without_fid)

"""The part `mnist`: what is drawn from its records, and from what is left when some of them are missing."""

import math
from collections.abc import Callable
from typing import cast

import matplotlib.colors
import pytest
from matplotlib.lines import Line2D

from helpers import score_records
from helpers.captions import full_text
from helpers.score_records import RATES, table1, with_table1, without
from torchbelay.lab.part import Part, Plate, Record, Settings, Table
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.score import cifar10, mnist, sign
from torchbelay.lab.score import run as run_module
from torchbelay.lab.score.analysis import StudyResults
from torchbelay.lab.score.effects import WAYS, loss_effect, spans

ALL = ["mnist-rates", "mnist-effects", "mnist-pairs", "mnist-table1", "mnist-samples", "mnist-m1", "mnist-speed"]


def drawn(records: list[Record]) -> dict[str, Plate]:
    return score_records.drawn(cast("Part", mnist), records)


@pytest.fixture(scope="module")
def plates() -> dict[str, Plate]:
    return drawn(score_records.everything()["mnist"])


@pytest.fixture(scope="module")
def planned() -> dict[str, Plate]:
    """With long runs as they are planned: each arm at its best rate, and lost at the paper's."""
    return drawn(with_table1(score_records.mnist(), table1()))


def line(plate: Plate, panel: int, label: str) -> Line2D:
    (found,) = [each for each in plate.figure.axes[panel].lines if each.get_label() == label]
    return found


def cells(plate: Plate, row: str) -> dict[str, str]:
    assert isinstance(plate.figure, Table)
    (found,) = [each for each in plate.figure.rows if each[0] == row]
    return dict(zip(plate.figure.columns, found, strict=True))


def test_everything_is_drawn(plates: dict[str, Plate]) -> None:
    assert list(plates) == ALL


def test_curves_are_the_medians_of_the_records_at_the_nominal_and_the_effective_rate(plates: dict[str, Plate]) -> None:
    made = score_records.mnist(2.0, 1.0, spread=0.0, noise=0.0)
    plate = drawn(made)["mnist-rates"]
    for panel, scale in ((0, 1.0), (1, 0.8)):
        x, y = line(plate, panel, "BELAY").get_data()
        assert list(x) == pytest.approx([scale * lr for lr in RATES])
        assert list(y) == pytest.approx([2 * loss for loss in RATES.values()])
        none = line(plate, panel, "no averaging")
        assert list(none.get_xdata()) == pytest.approx(list(RATES))  # w1 of EMA's run
        assert list(none.get_ydata()) == pytest.approx([1.12 * loss for loss in RATES.values()])
    stars = [each.get_ydata()[0] for each in plate.figure.axes[0].lines if each.get_marker() == "*"]
    assert stars == [0.040, 0.061]
    assert "No run is lost." in plate.notes


def lose(records: list[Record], arm: str, lr: float, seeds: tuple[int, ...]) -> list[Record]:
    """Some seeds of an arm stay at a plateau."""
    for r in records:
        if r["kind"] == "run" and (r["study"], r["arm"], r["lr"]) == ("rates", arm, lr) and r["seed"] in seeds:
            r["final"] = {weights: {"train": 0.7, "test": 0.7} for weights in ("w1", "w2")}
    return records


def test_a_lost_seed_leaves_the_median_and_is_counted_beside_it() -> None:
    records = lose(score_records.mnist(spread=0.0, noise=0.0), "BELAY", 1e-3, (1,))
    made = drawn(lose(records, "matched EMA", 3e-3, (0, 2)))
    ax = made["mnist-rates"].figure.axes[0]
    assert dict(zip(*line(made["mnist-rates"], 0, "BELAY").get_data(), strict=True))[1e-3] == RATES[1e-3]
    assert "1 of 3 lost" in [text.get_text() for text in ax.texts]
    matched = dict(zip(*line(made["mnist-rates"], 0, "matched EMA").get_data(), strict=True))
    assert math.isnan(matched[3e-3])  # two of three: there is a cross instead, above all losses
    (cross,) = [each for each in ax.lines if each.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_color()) == (3e-3, style.colour("matched EMA"))
    assert cross.get_ydata()[0] > 1.12 * max(RATES.values())
    assert "2 of 3" in [text.get_text() for text in ax.texts]
    assert "3 of 54 runs are lost" in full_text(made["mnist-rates"])
    assert "runs that work end below 0.24 and collapsed runs end above 0.7." in full_text(made["mnist-rates"])
    assert "0.001 (BELAY)" in made["mnist-rates"].caption  # one lost seed does not bend the choice of a rate
    assert "2 of 3" in [text.get_text() for text in made["mnist-pairs"].figure.axes[0].texts]


def test_bands_reach_from_the_best_to_the_worst_seed() -> None:
    records = score_records.mnist(noise=0.0)
    (band,) = [
        each
        for each in drawn(records)["mnist-rates"].figure.axes[0].collections
        if matplotlib.colors.same_color(each.get_facecolor()[0][:3], style.colour("BELAY"))
    ]
    there = [y for x, y in band.get_paths()[0].vertices if x == 1e-3]
    losses = [
        r["final"]["w2"]["test"]
        for r in records
        if r["kind"] == "run" and r["study"] == "rates" and (r["arm"], r["lr"]) == ("BELAY", 1e-3)
    ]
    assert (min(there), max(there)) == pytest.approx((min(losses), max(losses)))


def test_runs_that_were_lost_are_marked_and_counted(plates: dict[str, Plate]) -> None:
    crosses = [each for each in plates["mnist-rates"].figure.axes[0].lines if each.get_marker() == "X"]
    assert {float(each.get_xdata()[0]) for each in crosses} == {5e-2}
    assert {each.get_color() for each in crosses} == {style.colour("matched EMA")}
    assert "3 of 54 runs are lost" in full_text(plates["mnist-rates"])


def test_pairs_are_at_equal_nominal_rate_then_at_equal_effective_rate_then_at_the_best(
    plates: dict[str, Plate],
) -> None:
    plate = plates["mnist-pairs"]
    titles = [ax.get_title(loc="left") for ax in plate.figure.axes]
    assert [title.split(":\n")[0] for title in titles] == [*WAYS]
    assert [title.split(":\n")[1:] for title in titles] == [["BELAY ÷ EMA"], ["BELAY ÷ matched EMA"], []]
    assert "At the paper's rate, 0.05: BELAY ÷ EMA 0.794 (0.772 to 0.817)" in full_text(plate)
    assert "At the best rates: BELAY ÷ EMA 1.0" in full_text(plate)
    effect = loss_effect(StudyResults(score_records.everything()["mnist"], "rates"))
    said = f" BELAY's is {listed(spans([effect]))} times EMA's, the matched EMA's and EMA's."
    assert plate.caption.endswith(said)
    assert "matched EMA lost" in [text.get_text() for text in plate.figure.axes[1].texts]
    assert "both lost" not in [text.get_text() for text in plate.figure.axes[1].texts]


def test_a_ratio_that_is_out_of_sight_is_told_at_the_edge() -> None:
    far = {**dict.fromkeys(RATES, 1.0), 1e-3: 0.05, 3e-3: 10.0}
    ax = drawn(score_records.mnist(far, noise=0.0))["mnist-pairs"].figure.axes[0]
    assert [text.get_text() for text in ax.texts] == ["↓ 0.05", "↑ 10"]
    low, high = ax.get_ylim()
    assert low > 0.05
    assert high < 10


def test_the_table_has_the_papers_numbers_beside_ours(plates: dict[str, Plate]) -> None:
    plate = drawn(score_records.mnist(long_belay=2.0, spread=0.0, noise=0.0))["mnist-table1"]
    paper = cells(plate, "The paper: BELAY at 0.05")
    assert (paper["w2 train"], paper["w2 test"], paper["w2 FID"]) == ("0.042", "0.040", "15.2")
    ours = cells(plate, "BELAY at 0.05")
    assert (ours["w2 test"], ours["w1 test"], ours["Seeds"]) == ("0.240 ± 0", "0.269 ± 0", "3")
    assert ours["w2 test ÷ EMA's"] == "2.00 (2.00 to 2.00)"
    assert ours["w2 FID"].startswith("60")
    assert "w1 FID" not in ours  # of which there is none
    networks, *differs, time = plate.notes[-4:]
    assert networks.startswith("NCSNv2 with 1,862,337 weights, 30,000 steps")
    assert differs == score_records.protocol("table1")["differs"]
    assert time.endswith(": 41.5 s with 6 side by side.")
    assert "10,000 samples" in full_text(plate)


def test_without_long_runs_the_table_is_of_the_short_ones(plates: dict[str, Plate]) -> None:
    records = without(without(score_records.mnist(), study="table1"), kind="protocol")
    plate = drawn(records)["mnist-table1"]
    assert isinstance(plate.figure, Table)
    assert [row[0] for row in plate.figure.rows[2:4]] == ["EMA at 0.001", "EMA at 0.05"]
    assert "the long runs with FID are still to come" in plate.title
    assert plate.caption.startswith("The long runs with FID have not been run yet")
    assert [note.split(" ")[0] for note in plate.notes] == ["Cells:", "NCSNv2"]
    assert "mnist-samples" not in drawn(records)


def test_the_long_runs_are_shown_as_soon_as_there_are_any(plates: dict[str, Plate]) -> None:
    plate = plates["mnist-table1"]
    assert "still to come" not in plate.title
    assert "not been run" not in full_text(plate)
    assert "10,000 samples" in full_text(plate)
    assert "FID, mean over seeds: EMA at 0.001" in full_text(plates["mnist-samples"])
    no_fid = drawn(without(score_records.mnist(), kind="fid"))["mnist-table1"]
    assert "FID has not been run." in no_fid.caption


def test_the_table_of_the_long_runs_goes_by_arm_and_rate_and_ends_with_the_tuned_one(planned: dict[str, Plate]) -> None:
    plate = planned["mnist-table1"]
    assert isinstance(plate.figure, Table)
    three = [f"{arm} at {lr:g}" for arm in ("EMA", "matched EMA", "BELAY") for lr in (3e-4, 1e-3, 5e-2)]
    assert [row[0] for row in plate.figure.rows[2:]] == [*three, "BELAY m1 2e4 at 0.001"]
    assert "BELAY m1 2e4 is BELAY with rate and mass tuned on the short runs." in plate.notes
    assert cells(plate, "BELAY m1 2e4 at 0.001")["w2 test ÷ EMA's"].startswith("1.0")
    untuned = drawn(with_table1(score_records.mnist(), without(table1(), arm="BELAY m1 2e4")))["mnist-table1"]
    assert "tuned" not in full_text(untuned)


def test_a_fid_that_is_lost_is_not_one_that_was_not_asked_for(planned: dict[str, Plate]) -> None:
    at = [f"BELAY at {lr}" for lr in ("0.0003", "0.001", "0.05")]
    assert [cells(planned["mnist-table1"], row)["w2 FID"] for row in at] == ["12.0 ± 0.8", "–", "lost"]


def test_fids_are_compared_each_at_its_own_best_rate(planned: dict[str, Plate]) -> None:
    low, high = (math.exp(math.log(0.8) + side * 4.302653 * math.sqrt(2) * 0.01) for side in (-1, 1))  # noise alone
    ratio = f"0.800 ({low:.3f} to {high:.3f})"
    tuned = f"1.20 ({1.5 * low:.2f} to {1.5 * high:.2f})"
    said = f"BELAY ÷ EMA {ratio}; BELAY ÷ matched EMA {ratio}; BELAY m1 2e4 ÷ EMA {tuned}."
    rates = "EMA at 0.001, matched EMA at 0.001, BELAY at 0.0003, BELAY m1 2e4 at 0.001, so that rates are compared"
    assert f"each at its own best rate, seed by seed: {said} {rates}" in full_text(planned["mnist-table1"])
    order = "at equal nominal rate, at equal effective rate (the matched EMA) and at each one's best"
    assert f"BELAY's FID over the EMA's {order}: –; –; {ratio}." in planned["mnist-table1"].notes
    losses = "0.996 to 1.29, 0.986 to 1.30, 1.066"
    three = "BELAY ÷ EMA at equal nominal rate, equal effective rate (matched EMA) and each one's best"
    said = f" {three}: test loss {losses}; FID not run, not run, 0.800."
    assert planned["mnist-table1"].caption.endswith(said)
    few = drawn(with_table1(score_records.mnist(), without(table1(fid_seeds=1), arm="matched EMA")))["mnist-table1"]
    ones = "BELAY ÷ EMA 0.800 (one seed), 1 of 3 seeds drawn; BELAY m1 2e4 ÷ EMA 1.20 (one seed), 1 of 3 seeds drawn."
    assert f"seed by seed: {ones}" in full_text(few)
    none = drawn(with_table1(score_records.mnist(), without(table1(), kind="fid")))["mnist-table1"]
    assert "FID of w2" not in full_text(none)


def test_the_masses_are_drawn_where_there_are_any(plates: dict[str, Plate]) -> None:
    labels = [text.get_text() for text in plates["mnist-m1"].figure.axes[0].get_legend().get_texts()]
    assert labels == ["EMA", "BELAY", "BELAY m1 2e4", "BELAY m1 2e5"]
    assert [ax.get_title(loc="left") for ax in plates["mnist-m1"].figure.axes] == [
        f"{images} loss, learning rate {lr}" for lr in ("0.001", "0.05") for images in ("train", "test")
    ]
    train, test = plates["mnist-m1"].figure.axes[:2]
    ends = [{line.get_label(): line.get_ydata()[-1] for line in ax.lines} for ax in (train, test)]
    assert ends[0]["BELAY"] == pytest.approx(0.98 * ends[1]["BELAY"])  # as the records are made


def test_without_the_papers_ema_the_masses_are_drawn_beside_the_one_of_equal_memory() -> None:
    renamed = [r | {"arm": "equal-memory EMA"} if r.get("arm") == "EMA" else r for r in score_records.mnist()]
    plate = drawn(renamed)["mnist-m1"]
    labels = [text.get_text() for text in plate.figure.axes[0].get_legend().get_texts()]
    assert labels == ["equal-memory EMA", "BELAY", "BELAY m1 2e4", "BELAY m1 2e5"]
    assert plate.caption.endswith("The limit, an EMA of decay 0.999, was not run here: equal-memory EMA stands beside.")
    assert any("BELAY m1 2e5 ÷ equal-memory EMA" in note for note in plate.notes)


def test_a_rate_at_which_all_is_lost_is_told_and_not_drawn() -> None:
    gone = {**dict.fromkeys(RATES, 1.0), 5e-2: None}
    records = score_records.mnist(gone, gone, ema=gone)
    for r in records:
        if r["kind"] == "run" and r["arm"].startswith("BELAY m1") and r["lr"] == 5e-2:
            r["final"] = {"w1": {"train": None, "test": None}, "w2": {"train": None, "test": None}}
    plate = drawn(records)["mnist-m1"]
    assert [ax.get_title(loc="left") for ax in plate.figure.axes] == [
        f"{images} loss, learning rate 0.001" for images in ("train", "test")
    ]
    assert "At 0.05 every run of every arm is lost." in plate.notes


def test_every_grid_is_drawn_as_it_is(plates: dict[str, Plate]) -> None:
    axes = plates["mnist-samples"].figure.axes
    assert [ax.get_title() for ax in axes[:3]] == ["EMA, 0.001", "matched EMA, 0.001", "BELAY, 0.001"]
    assert {ax.images[0].get_array().shape[:2] for ax in axes} == {(score_records.SIDE, score_records.SIDE)}


def pictures(plate: Plate) -> list[tuple[int, str]]:
    """In which row of the figure each picture is, and what stands above it."""
    with_pixels = [ax for ax in plate.figure.axes if ax.images]
    assert {ax.axison for ax in plate.figure.axes} == {False}  # no empty frames
    return [(ax.get_subplotspec().rowspan.start, ax.get_title()) for ax in with_pixels]


def test_pictures_of_arms_at_rates_of_their_own_stand_in_one_row(planned: dict[str, Plate]) -> None:
    own = ["EMA, 0.001", "matched EMA, 0.001", "BELAY, 0.0003", "BELAY m1 2e4, 0.001"]
    assert pictures(planned["mnist-samples"]) == [(0, title) for title in own]
    told = "EMA at 0.001 15.0 ± 1; matched EMA at 0.001 15.0 ± 1; BELAY at 0.0003 12.0 ± 0.8; BELAY m1 2e4"
    assert f"FID, mean over seeds: {told}" in full_text(planned["mnist-samples"])
    span = "Their FID goes from 11.2 (BELAY at 0.0003) to 16.8 (BELAY m1 2e4 at 0.001)."  # of seed 3, not the means
    assert planned["mnist-samples"].caption.endswith(span)
    assert "of seed 3, from the same noise for every arm" in planned["mnist-samples"].caption
    two_more = [score_records.grid("table1", arm, 3e-4) | {"seed": 3} for arm in ("EMA", "matched EMA")]
    made = drawn(with_table1(score_records.mnist(), [*table1(), *two_more]))["mnist-samples"]
    first = ["EMA, 0.0003", own[0], "matched EMA, 0.0003", own[1], own[2]]
    assert pictures(made) == [*((0, title) for title in first), (1, own[3])]


def test_what_a_collapsed_network_makes_is_not_drawn() -> None:
    """Another seed of it works, of which there are no images: it is not called lost as a whole."""
    arm = "BELAY m1 2e4"
    long = [line for line in table1() if line["kind"] != "fid" or line["arm"] != arm or line["seed"] == 3]
    made = drawn(with_table1(score_records.mnist(), [*map(collapsed(arm), long)]))
    plate, table = made["mnist-samples"], made["mnist-table1"]
    assert [title for _, title in pictures(plate)] == ["EMA, 0.001", "matched EMA, 0.001", "BELAY, 0.0003"]
    assert arm not in full_text(plate)
    assert f"; {arm} ÷ EMA: {arm} lost in 1 of 1 seeds, 1 of 3 seeds drawn." in full_text(table)
    assert f"{arm} at 0.001" not in full_text(table)
    assert cells(table, f"{arm} at 0.001")["w2 FID"] == "lost, 1 of 3 drawn"


def collapsed(arm: str) -> Callable[[Record], Record]:
    """The records, but with an arm that predicts nothing in seed 3."""
    end = {weights: {"train": 1.0, "test": 1.0} for weights in ("w1", "w2")}

    def change(line: Record) -> Record:
        return line | {"final": end} if (line["kind"], line.get("arm"), line.get("seed")) == ("run", arm, 3) else line

    return change


def test_it_is_said_what_is_lost_and_cannot_be_drawn(planned: dict[str, Plate], plates: dict[str, Plate]) -> None:
    said = "Not shown, because every seed is lost: at 0.05 EMA, matched EMA and BELAY."
    assert planned["mnist-samples"].notes[-1] == said
    assert "lost" not in full_text(plates["mnist-samples"])
    more = [*lost_fids(), score_records.fid("table1", "BELAY", 1e-2, None, seed=3)]
    works = table1()[1] | {"lr": 5e-2, "seed": 4}  # a run of EMA
    long = without(without(table1(), kind="fid"), kind="run", arm="EMA", lr=5e-2)
    plate = drawn(with_table1(score_records.mnist(), [*long, works, *more]))["mnist-samples"]
    assert plate.notes[-1].endswith("every seed is lost: at 0.01 BELAY; at 0.05 matched EMA and BELAY.")


def lost_fids() -> list[Record]:
    return [r for r in table1() if r["kind"] == "fid" and r["fid"] is None]


def test_speeds_stand_beside_their_limit(plates: dict[str, Plate]) -> None:
    row = cells(plates["mnist-speed"], "NCSNv2 on MNIST, compiled and captured")
    assert (row["Images/s"], row["Limit"], row["Of the limit"]) == ("41,234", "111,000", "37%")
    assert row["Averaging takes"] == "0.4%"
    noise = [r | {"averaging_share": -0.012} if r["kind"] == "throughput" else r for r in score_records.mnist()]
    plate = drawn(noise)["mnist-speed"]
    assert cells(plate, row[""])["Averaging takes"] == "within noise (−1.2%)"
    assert plate.caption.endswith("Averaging costs nothing that exceeds the noise; the target is under 1%.")
    cost = "Averaging takes at most 0.4% of a step; the target is under 1%."
    assert plates["mnist-speed"].caption.endswith(cost)
    unknown = {"device": "a CPU", "limit_tflops": None, "arithmetic_limit_images_per_s": None}
    elsewhere = [r | unknown if r["kind"] == "throughput" else r for r in score_records.mnist()]
    assert cells(drawn(elsewhere)["mnist-speed"], row[""])["Limit"] == "–"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda r: [], []),
        (lambda r: [x for x in r if x["kind"] == "origin"], []),
        (lambda r: without(r, study="table1"), [name for name in ALL if name != "mnist-samples"]),
        (lambda r: without(r, study="rates"), ["mnist-effects", "mnist-table1", "mnist-samples", "mnist-speed"]),
        (lambda r: without(r, kind="grid"), [name for name in ALL if name != "mnist-samples"]),
        (lambda r: without(r, kind="throughput"), ALL[:-1]),
        (lambda r: without(r, kind="fid"), ALL),
        (lambda r: [x | {"fid": None} if x["kind"] == "fid" else x for x in r], ALL),
        (lambda r: without(r, kind="protocol"), ALL),
        (lambda r: [x for x in r if x.get("seed", 0) == 0], ALL),
        (lambda r: without(r, arm="EMA"), ALL),
        (lambda r: without(r, arm="matched EMA"), ALL),
        (lambda r: without(r, arm="BELAY"), [name for name in ALL if name != "mnist-effects"]),
        (lambda r: [x for x in r if x.get("arm", "EMA") == "EMA"], [ALL[0], *ALL[3:5], ALL[6]]),
        (lambda r: without(r, lr=5e-2), ALL),
        (lambda r: [x for x in r if x.get("lr", 1e-3) == 1e-3], ALL),
        (lambda r: without(r, arm="BELAY", lr=1e-3), ALL),
        (lambda r: without(r, arm="BELAY", seed=1), ALL),
    ],
    ids=[
        "nothing", "origin alone", "no table1", "no rates", "no grids", "no speeds", "no FID", "FID null",
        "no protocol", "one seed", "no EMA", "no matched EMA", "no BELAY", "EMA alone", "not at 5e-2",
        "one rate", "a hole", "a seed",
    ],
)  # fmt: skip
def test_what_is_missing_is_left_out(change: Callable[[list[Record]], list[Record]], names: list[str]) -> None:
    assert list(drawn(change(score_records.mnist()))) == names


def test_runs_that_are_all_lost_are_drawn_too() -> None:
    made = drawn(score_records.mnist(None, None, ema=None, long_belay=None))
    assert list(made) == [name for name in ALL if name != "mnist-effects"]
    assert cells(made["mnist-table1"], "BELAY at 0.05")["w2 test"] == "lost"


def test_what_is_run_and_planned_is_the_studys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, Settings]] = []

    def run(name: str, settings: Settings, tick: object) -> list[Record]:
        asked.append(("run", name, settings))
        return [{"kind": "origin"}]

    def plan(name: str, settings: Settings) -> tuple[int, str]:
        asked.append(("plan", name, settings))
        return 3, name

    monkeypatch.setattr(run_module, "run", run)
    monkeypatch.setattr(run_module, "plan", plan)
    for part in (mnist, sign, cifar10):
        assert part.run(Settings(seed=4), lambda units: None) == [{"kind": "origin"}]
        assert part.plan(Settings(quick=True)) == (3, part.NAME)
    names = [("run", Settings(seed=4)), ("plan", Settings(quick=True))]
    assert asked == [(what, part, given) for part in ("mnist", "sign", "cifar10") for what, given in names]

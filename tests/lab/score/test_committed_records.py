"""What the report prints for the committed records of score models is what the lines of their files say.

Everything is computed here a second time, from the JSON alone and with none of the laboratory's own functions.
"""

import json
import math
import re
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from torchbelay.lab.claims.score import judge_cifar10, judge_mnist
from torchbelay.lab.claims.trained import NEGATIVE, compare_signs, count_lost_by_sign
from torchbelay.lab.part import Plate, Record, Table
from torchbelay.lab.registry import PARTS

FOLDER = Path(str(files("torchbelay.lab.score"))) / "records"
T = {1: 12.7062, 2: 4.302653, 4: 2.776445}  # Student's 97.5% quantiles, from tables
BAR = 0.5
EMA = "equal-memory EMA"  # Table 1's own EMA was not run

Line = dict[str, Any]


def lines(part: str) -> list[Line]:
    return [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()][1:]


ALL = {part: lines(part) for part in ("mnist", "sign", "cifar10")}


@pytest.fixture(scope="module")
def plates() -> dict[str, Plate]:
    return {plate.name: plate for part, records in ALL.items() for plate in PARTS[part].draw(records)}


def rows(plate: Plate) -> dict[str, dict[str, str]]:
    assert isinstance(plate.figure, Table)
    return {row[0]: dict(zip(plate.figure.columns, row, strict=True)) for row in plate.figure.rows}


def losses(part: str, study: str, arm: str, lr: float, weights: str = "w2", images: str = "test") -> list[float]:
    """The losses of all seeds, in order; infinite if a loss is missing."""
    runs = [r for r in ALL[part] if r["kind"] == "run" and (r["study"], r["arm"], r["lr"]) == (study, arm, lr)]
    found = [run["final"][weights][images] for run in sorted(runs, key=lambda run: run["seed"])]
    return [math.inf if x is None else x for x in found]


def ended(part: str, drawn: Record) -> float:
    """The test loss of the network that images were made with."""
    same = ("study", "arm", "lr", "seed")
    (run,) = [r for r in ALL[part] if r["kind"] == "run" and all(r[key] == drawn[key] for key in same)]
    loss = run["final"][drawn["weights"]]["test"]
    return math.inf if loss is None else float(loss)


def ratio(ones: list[float], others: list[float]) -> tuple[float, float, float]:
    """The geometric mean of the pairs that neither lost, and its interval."""
    logs = [math.log(a / b) for a, b in zip(ones, others, strict=True) if a <= BAR and b <= BAR]
    reach = T[len(logs) - 1] * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def numbers(text: str) -> list[float]:
    """Those of "1.079 (1.067 to 1.090)" or "0.0642 ± 0.002"."""
    return [float(word) for word in text.translate(str.maketrans("()", "  ", ",;:")).split() if word[0].isdigit()]


def is_mean(text: str, known: list[float]) -> None:
    average, *spread = numbers(text)[:2]
    assert average == pytest.approx(fmean(known), rel=0.006)  # three digits
    if len(known) > 1:
        assert spread == [pytest.approx(stdev(known), rel=0.51)]  # one digit


@pytest.mark.parametrize(
    ("plate", "part", "study"), [("mnist-table1", "mnist", "rates"), ("cifar10-table", "cifar10", "cifar10")]
)
def test_tables_of_results(plates: dict[str, Plate], plate: str, part: str, study: str) -> None:
    if part == "mnist" and any(r.get("study") == "table1" for r in ALL["mnist"]):
        study = "table1"
    checked = 0
    for name, row in rows(plates[plate]).items():
        if name.startswith("The paper"):
            continue
        arm, rate = name.rsplit(" at ", 1)
        lr = float(rate)
        for weights in ("w1", "w2"):
            for images in ("train", "test"):
                found = losses(part, study, arm, lr, weights, images)
                known, text = [x for x in found if x <= BAR], row[f"{weights} {images}"]
                if not known:
                    assert text == "lost"
                else:
                    is_mean(text, known)
                    checked += 1
                assert (f"{len(found) - len(known)} of {len(found)} lost" in text) is (0 < len(known) < len(found))
        (ratio_column,) = [column for column in row if column.startswith("w2 test ÷ ")]
        if arm != EMA and (shown := numbers(row[ratio_column])):
            pair = losses(part, study, arm, lr), losses(part, study, EMA, lr)
            if len(shown) > 1:
                assert shown[:3] == pytest.approx(ratio(*pair), rel=0.006)
                checked += 1
        drawn = [
            r
            for r in ALL[part]
            if r["kind"] == "fid" and (r["study"], r["arm"], r["lr"], r["weights"]) == (study, arm, lr, "w2")
        ]
        fids = [r["fid"] for r in drawn if r["fid"] is not None and ended(part, r) <= BAR]
        if fids:
            assert numbers(row["w2 FID"])[0] == pytest.approx(fmean(fids), abs=0.051)
            checked += 1
        else:
            assert row["w2 FID"].partition(",")[0] == ("lost" if drawn else "–")
        trained = len(losses(part, study, arm, lr))
        assert (f"{len(drawn)} of {trained} drawn" in row["w2 FID"]) is (0 < len(drawn) < trained)
        assert int(row["Seeds"]) == len(losses(part, study, arm, lr))
    assert checked >= 10


def test_the_table_of_theta(plates: dict[str, Plate]) -> None:
    found = rows(plates["sign-table"])
    runs = [r for r in ALL["sign"] if r["kind"] == "run"]
    arms = {r["theta"]: r["arm"] for r in runs}
    assert len(found) == len(arms)
    for theta, arm in arms.items():
        row = found[f"θ = {'0' if not theta else f'{theta:+g}'.replace('-', '−')}"]
        for lr in sorted({r["lr"] for r in runs}):
            ours, none = losses("sign", "sign", arm, lr), losses("sign", "sign", "θ 0", lr)
            lost, lost_by_none = (sum(x > BAR for x in each) for each in (ours, none))
            if 2 * lost >= len(ours):
                assert row[f"{lr:g}: loss"] == f"{lost} of {len(ours)} lost"
            else:
                assert float(row[f"{lr:g}: loss"].split(",")[0]) == pytest.approx(median(ours), rel=0.006)
            text = row[f"{lr:g}: ÷ θ = 0"]
            if theta and lost == lost_by_none == 0:
                assert numbers(text) == pytest.approx(ratio(ours, none), abs=6e-4)
            elif theta and lost != lost_by_none:
                pairs = [(a > BAR, b > BAR) for a, b in zip(ours, none, strict=True)]
                differ = [pair for pair in pairs if len({*pair}) == 2]
                most = max(differ.count((True, False)), differ.count((False, True)))
                ways = sum(math.comb(len(differ), k) for k in range(most, len(differ) + 1))  # of a fair coin
                assert f"{'fewer' if lost < lost_by_none else 'more'} lost" in text
                assert float(text.split("p = ")[1]) == pytest.approx(ways / 2 ** len(differ), rel=0.05)


def test_speeds_and_times(plates: dict[str, Plate]) -> None:
    for part in ALL:
        plate = plates[f"{part}-speed"]
        assert isinstance(plate.figure, Table)
        made = [r for r in ALL[part] if r["kind"] == "throughput"]
        for r, row in zip(made, plate.figure.rows, strict=True):
            share = r["averaging_share"]
            assert row[3] == f"{r['images_per_s']:,}"
            assert row[4] == f"{round(r['limit_tflops'] * 1e12 / r['flops_per_image']):,}"
            assert float(row[5].rstrip("%")) == pytest.approx(
                100 * r["images_per_s"] * r["flops_per_image"] / (r["limit_tflops"] * 1e12), abs=0.51
            )
            assert row[6] == (
                "–" if share is None else f"{share:.1%}" if share >= 0 else f"within noise (−{-share:.1%})"
            )
        table = {"mnist": "mnist-rates", "sign": "sign-table", "cifar10": "cifar10-table"}[part]
        (note,) = [note for note in plates[table].notes if note.startswith("Time per run")]
        runs = [r for r in ALL[part] if r["kind"] == "run" and r["study"] != "table1"]
        seconds = [r["wall_s"] for r in runs if not r.get("shared_gpu")]
        for end in {min(seconds), max(seconds)} if seconds else ():
            assert f"{end:.3g}" in note
        shared = any(r.get("shared_gpu") for r in runs)
        assert ("not to be compared" in note) is shared


def test_the_check_of_fid(plates: dict[str, Plate]) -> None:
    (check,) = [r for r in ALL["cifar10"] if r["kind"] == "fid check"]
    assert abs(check["fid"] - check["recorded"]) < 1e-4
    (note,) = [note for note in plates["cifar10-table"].notes if note.startswith("Check")]
    assert f"{check['fid']:.6f}" in note
    assert f"records {check['recorded']}." in note


def test_captions_are_short(plates: dict[str, Plate]) -> None:
    """At most two sentences: what one sees, and what follows. The rest is in the notes."""
    for plate in plates.values():
        assert len(re.findall(r"\.(?= |$)", plate.caption)) == 2, plate.caption
        assert len(plate.caption.split()) <= 50, plate.caption  # with signs and numbers
        assert plate.notes
        if isinstance(plate.figure, Table):
            assert max(len(cell.split()) for row in plate.figure.rows for cell in row) <= 25


def test_the_bar_lies_in_a_gap_of_every_part() -> None:
    for part, records in ALL.items():
        every = [r["final"][w]["test"] for r in records if r["kind"] == "run" for w in ("w1", "w2")]
        known = [x for x in every if x is not None]
        assert not [x for x in known if 0.25 < x < 0.55], part  # any bar between says the same


def test_the_verdicts() -> None:
    c9, c10 = judge_mnist({"mnist": ALL["mnist"]}), judge_cifar10({"cifar10": ALL["cifar10"]})
    if not any(r.get("study") == "table1" for r in ALL["mnist"]):
        assert c9.summary.endswith("FID was not run.")
    studies = ("rates", "table1")
    everyone = [
        x for study in studies for arm in (EMA, "matched EMA", "BELAY") for x in losses("mnist", study, arm, 0.05)
    ]
    assert min(everyone) > BAR
    assert c9.answer == "not reproduced"
    assert c9.summary.startswith("At the paper's rate of 0.05 no method trains.")
    found = dict(c10.numbers)
    for rival in (EMA, "matched EMA"):
        pair = losses("cifar10", "cifar10", "BELAY", 1e-3), losses("cifar10", "cifar10", rival, 1e-3)
        assert numbers(found[f"test loss: BELAY ÷ {rival}"])[:3] == pytest.approx(ratio(*pair), abs=6e-4)
    signs = dict([*count_lost_by_sign(ALL), *compare_signs(ALL)])
    below, none, above = (
        sum(x > BAR for r in {r["arm"] for r in ALL["sign"] if r["kind"] == "run" and side(r["theta"])}
            for x in losses("sign", "sign", r, 1.2e-2))
        for side in (lambda t: t < 0, lambda t: t == 0, lambda t: t > 0)
    )  # fmt: skip
    lost = signs[f"MNIST at 0.012: runs lost with {NEGATIVE}, θ = 0 (EMA), θ > 0"]
    assert lost == f"{below} of 15, {none} of 5, {above} of 10"
    other = ratio(losses("cifar10", "cifar10", "θ −0.5", 1e-3), losses("cifar10", "cifar10", EMA, 1e-3))
    on_cifar10 = signs["CIFAR-10 at 0.001: test loss with θ = −0.5 ÷ the equal-memory EMA's"]
    assert on_cifar10 == "{:.3f} ({:.3f} to {:.3f})".format(*other)


def test_the_effects_in_three_ways() -> None:
    """At equal nominal rate, at equal effective rate, and at each one's best: 1e-3 for both, in the short runs."""
    found = dict(judge_mnist({"mnist": ALL["mnist"]}).numbers)
    for lr in (1e-4, 3e-4):
        for way, rival in (("nominal", EMA), ("effective", "matched EMA")):
            text = found[f"test loss, rates, at equal {way} rate: BELAY ÷ {rival}"]
            (part,) = [part for part in text.split("; ") if part.startswith(f"rate {lr:g}: ")]
            pair = losses("mnist", "rates", "BELAY", lr), losses("mnist", "rates", rival, lr)
            assert numbers(part)[1:4] == pytest.approx(ratio(*pair), rel=0.004)
    best = found[f"test loss, rates, at each one's best: BELAY ÷ {EMA}"]
    pair = losses("mnist", "rates", "BELAY", 1e-3), losses("mnist", "rates", EMA, 1e-3)
    assert numbers(best)[:3] == pytest.approx(ratio(*pair), rel=0.004)
    assert best.endswith("BELAY lost in 1 of 3 seeds")


def fids(part: str, arm: str, lr: float) -> list[float]:
    made = [r for r in ALL[part] if r["kind"] == "fid" and (r["arm"], r["lr"], r["weights"]) == (arm, lr, "w2")]
    return [r["fid"] for r in sorted(made, key=lambda r: r["seed"])]


@pytest.mark.parametrize(
    ("part", "arm", "lr"), [("mnist", "BELAY", 3e-4), ("cifar10", "BELAY", 1e-3), ("cifar10", "θ −0.5", 1e-3)]
)
def test_the_interval_of_a_fid_has_the_noise_of_its_samples(part: str, arm: str, lr: float) -> None:
    """All seeds share their random numbers, so 1% for each of the two FIDs is added to the standard error."""
    logs = [math.log(a / b) for a, b in zip(fids(part, arm, lr), fids(part, EMA, lr), strict=True)]
    error = math.sqrt(stdev(logs) ** 2 / len(logs) + 2 * 0.01**2)
    ends = [math.exp(fmean(logs) + side * T[2] * error) for side in (0, -1, 1)]
    if arm == "BELAY":
        study = {"mnist": "table1", "cifar10": "cifar10"}[part]
        judge = judge_mnist if part == "mnist" else judge_cifar10
        text = dict(judge({part: ALL[part]}).numbers)[f"FID, {study}, at equal nominal rate: BELAY ÷ {EMA}"]
        assert numbers(text)[1:4] == pytest.approx(ends, rel=0.006)
    else:
        text = dict(compare_signs(ALL))["CIFAR-10 at 0.001: FID with θ = −0.5 ÷ the equal-memory EMA's"]
        assert numbers(text)[:3] == pytest.approx(ends, rel=0.006)
        assert ends[0] == pytest.approx(1.25, abs=0.005)


@pytest.mark.parametrize(("part", "seed"), [("mnist", 3), ("cifar10", 0), ("figure4", 6)])
def test_the_caption_of_samples_has_the_fids_of_the_networks_that_made_them(part: str, seed: int) -> None:
    """Not the means over the seeds, which have another order on CIFAR-10."""
    made = lines(part)
    (caption,) = [plate.caption for plate in PARTS[part].draw(made) if plate.name == f"{part}-samples"]
    shown = {(r["arm"], r["lr"]) for r in made if r["kind"] == "grid" and r["seed"] == seed}
    found = {
        f"{r['arm']} at {r['lr']:g}": r["fid"]
        for r in made
        if r["kind"] == "fid" and r["seed"] == seed and r["weights"] == "w2" and (r["arm"], r["lr"]) in shown
    }
    low, high = min(found, key=lambda name: found[name]), max(found, key=lambda name: found[name])
    assert f"of seed {seed}, from the same noise" in caption
    assert caption.endswith(f" Their FID goes from {found[low]:.1f} ({low}) to {found[high]:.1f} ({high}).")

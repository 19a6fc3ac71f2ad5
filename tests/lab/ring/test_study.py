"""The ring as a part of the laboratory: its quick version from start to end, and its figures."""

import copy
import json

import matplotlib as mpl
import pytest
import torch
from matplotlib.text import Text

from helpers.captions import check_brevity, full_text
from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE, Lane
from torchbelay.lab.part import Plate, Record, Settings, Table
from torchbelay.lab.records import select
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed
from torchbelay.lab.ring import statistics, study
from torchbelay.lab.ring.effects import effects
from torchbelay.lab.ring.mixture import Ring
from torchbelay.lab.ring.networks import Networks, train
from torchbelay.lab.ring.statistics import MIXTURE
from torchbelay.lab.score.effects import spans

QUICK = Settings(quick=True)


@pytest.fixture(scope="module")
def made() -> tuple[list[Record], int]:
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


def test_the_plan_says_how_much_is_done(made: tuple[list[Record], int]) -> None:
    units, line = study.plan(QUICK)
    assert made[1] == units
    assert "128 networks" in line
    assert "640 networks" in study.plan(Settings())[1]


def test_the_same_settings_make_the_same_records(records: list[Record]) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(12345)  # no record may depend on it
    assert study.run(QUICK, lambda n: None) == records
    torch.set_rng_state(state)


def test_records_are_plain_json(records: list[Record]) -> None:
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_there_is_a_run_for_every_curve_rate_and_seed(records: list[Record]) -> None:
    how = study.QUICK
    found = {(r["arm"], r["setting"], r["lr"], r["seed"]) for r in select(records, "run")}
    expected = {(c.name, c.setting, lr, seed) for c in study.curves() for lr in how.lrs for seed in range(how.seeds)}
    assert found == expected
    assert len(select(records, "run")) == len(expected)


def test_no_averaging_is_the_w1_of_the_ema_run(records: list[Record]) -> None:
    for plain in select(records, "run", arm=PLAIN):
        emas = select(records, "run", arm=EMA, lr=plain["lr"], seed=plain["seed"])
        assert len(emas) == len(study.DECAYS)
        for ema in emas:
            assert ema["w1_test"] == plain["w1_test"] == plain["test"]
            assert ema["train_loss"] == plain["train_loss"]
            assert ema["test"] == ema["w2_test"] != ema["w1_test"]


def test_rates_are_what_the_inner_optimizer_and_the_weights_get(records: list[Record]) -> None:
    scale = study.SPRINGS[0].effective_lr_scale
    assert scale == pytest.approx(0.7998, abs=1e-4)
    setting = "k 1, m1 2000, m2 500"
    for run in select(records, "run", arm=MATCHED, setting=setting):
        assert run["inner_lr"] == run["effective_lr"] == pytest.approx(scale * run["lr"], rel=1e-12)
    for run in select(records, "run", arm=BELAY, setting=setting):
        assert run["inner_lr"] == run["lr"]
        assert run["effective_lr"] == pytest.approx(scale * run["lr"], rel=1e-12)
    for run in select(records, "run", arm=REPULSIVE):
        assert run["inner_lr"] == run["effective_lr"] == run["lr"]


def test_the_emas_are_the_springs_of_an_infinitely_heavy_model() -> None:
    for spring, decay in zip(study.SPRINGS, study.DECAYS, strict=True):
        assert decay == 1 - spring.k / (2 * spring.m2)
    methods = {(c.name, c.setting): c.method for c in study.curves()}
    for spring in study.SPRINGS:
        setting = f"k {spring.k:g}, m1 {spring.m1:g}, m2 {spring.m2:g}"
        assert methods[BELAY, setting] == spring
        assert methods[MATCHED, setting] == spring.matched_ema()


def test_matched_pairs_share_starts_and_batches() -> None:
    springs = [curve for curve in study.curves() if curve.name in (BELAY, MATCHED)]
    lanes = [Lane(curve.arm, 0.01) for curve in springs]
    how = study.QUICK
    generator = torch.Generator().manual_seed(3)
    networks = Networks(how.shape, lanes, how.shape.initial(generator)[None])
    batches = study.batches(Ring(), [generator], how.batch)
    first = networks.step(*next(batches))
    torch.testing.assert_close(first, first[:1].expand_as(first), rtol=1e-6, atol=0)  # float32, rounded elsewhere
    second = networks.step(*next(batches))
    assert (second / second[0] - 1).abs().max() > 1e-3


def test_a_seeds_batches_do_not_depend_on_the_other_seeds() -> None:
    def some(seeds: list[int]) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return next(study.batches(Ring(), generators, 8))[0]

    both, one = some([1, 2]), some([2])
    assert both.shape == (2, 8, 11)
    assert torch.equal(both[1], one[0])
    assert not torch.equal(both[0], both[1])


def test_the_excess_is_zero_for_the_truth_and_grows_with_the_distance() -> None:
    how, mixture = study.QUICK, Ring()
    triples = mixture.triples((300,), torch.Generator().manual_seed(4))
    silent = torch.zeros(1, 1, how.shape.numbers, dtype=torch.float64)  # its output is 0: the best linear denoiser
    found = study.excess_loss(how.shape, silent, triples)
    exact = mixture.denoise(triples.noisy, triples.sigma)
    slope = mixture.sigma_data**2 / (mixture.sigma_data**2 + triples.sigma**2)
    weight = (triples.sigma**2 + 0.25) / (0.5 * triples.sigma) ** 2
    expected = (weight * (slope * triples.noisy - exact) ** 2).mean()
    torch.testing.assert_close(found, expected[None, None], rtol=1e-9, atol=0)


def test_training_brings_the_networks_closer_to_the_truth(records: list[Record]) -> None:
    (about,) = select(records, "protocol")
    good = [r["w1_test"] for r in select(records, "run", arm=PLAIN, lr=0.01)]
    assert max(good) < 0.7 * about["linear"]
    assert not any(r["failed"] for r in select(records, "run", arm=PLAIN, lr=0.01))


def test_every_seed_gives_a_different_run(records: list[Record]) -> None:
    for curve in study.curves():
        found = [r["w1_test"] for r in select(records, "run", arm=curve.name, setting=curve.setting, lr=0.01)]
        assert len(set(found)) == study.QUICK.seeds


def test_validation_and_test_have_different_points(records: list[Record]) -> None:
    assert all(r["w1_validation"] != r["w1_test"] for r in select(records, "run"))


def test_a_run_that_is_not_finite_is_recorded_as_lost() -> None:
    curve = next(c for c in study.curves() if c.name == BELAY)
    measured = {"w1_test": 0.02, "w1_validation": 0.02, "w2_test": 0.01, "w2_validation": 0.01}
    well = {"validation": 0.01, "test": 0.01, "diverged": False, "failed": False}
    lost = {"validation": None, "test": None, "diverged": True, "failed": True}
    assert study._judge_run(measured, curve, 0.1, finite=True) == well
    assert study._judge_run(measured, curve, 0.1, finite=False) == lost
    assert study._judge_run(measured | {"w2_test": None}, curve, 0.1, finite=True) == lost
    worse = measured | {"w2_test": 0.095}
    assert study._judge_run(worse, curve, 0.1, finite=True) == well | {"test": 0.095, "failed": True}


def test_samples_are_drawn_at_the_chosen_and_at_a_high_rate(records: list[Record]) -> None:
    how, drawn = study.QUICK, select(records, "samples")
    assert [r["contestant"] for r in drawn if r["rate"] == "chosen"] == list(study.SAMPLED)
    assert {r["lr"] for r in drawn if r["rate"] == "high"} == {how.high_lr}
    (true,) = select(records, "samples", contestant=MIXTURE)
    assert true["near"] > 0.85
    for record in drawn:
        assert len(record["points"]) == how.samples
        assert all(round(x, 3) == x for point in record["points"] for x in point)
    for record in (r for r in drawn if r["rate"] == "chosen"):
        (choice,) = [c for c in select(records, "choice", contestant=record["contestant"]) if 0 in c["reported_on"]]
        assert (record["lr"], record["setting"]) == (choice["lr"], choice["setting"])


def test_another_seed_gives_different_networks() -> None:
    generators = [study._generator(Settings(seed=seed), 0) for seed in (0, 1)]
    first, second = (study.QUICK.shape.initial(generator) for generator in generators)
    assert not torch.equal(first, second)


def test_all_arms_of_the_full_version_can_be_trained() -> None:
    how, lanes = study.FULL, study._lanes(study.FULL)
    generator = torch.Generator().manual_seed(5)
    networks = Networks(how.shape, lanes, how.shape.initial(generator)[None], study._spectators())
    found = train(networks, study.batches(Ring(), [generator], how.batch), steps=2, tick=lambda n: None)
    assert found.w1.shape == (len(lanes), 1, how.shape.numbers)
    assert set(found.averages) == {c.average for c in study.curves() if c.average}


# Drawing --------------------------------------------------------------------------------------------------------------

NAMES = ["ring-curves", "ring-effects", "ring-pairs", "ring-ranges", "ring-samples"]
DRAWN = [name for name in NAMES if name != "ring-effects"]  # which is a table


@pytest.fixture(scope="module")
def plates(records: list[Record]) -> list[Plate]:
    """Draw the figures once, from records as they come back from disk."""
    return study.draw(json.loads(json.dumps(records)))


def test_every_plate_is_drawn_and_has_a_caption(plates: list[Plate]) -> None:
    assert [plate.name for plate in plates] == NAMES
    for plate in plates:
        assert plate.title
        check_brevity(plate)
        assert len(full_text(plate)) > 200
        if plate.name not in DRAWN:
            assert isinstance(plate.figure, Table)
            continue
        assert plate.figure.get_figwidth() <= 9
        assert style.as_bytes(plate.figure, "png").startswith(b"\x89PNG")


def test_captions_and_notes_state_steps_seeds_and_results(plates: list[Plate], records: list[Record]) -> None:
    how = study.QUICK
    by_name = {plate.name: full_text(plate) for plate in plates}
    for name in NAMES[:4]:
        assert f"{how.steps:,} steps" in by_name[name]
        assert f"{how.seeds} seeds" in by_name[name]
    (pair,) = select(records, "pair", scope="chosen", one="BELAY, tuned", other="EMA, tuned")
    interval = f"{pair['ratio']:.3g}; {pair['low']:.3g} to {pair['high']:.3g}"
    assert interval in by_name["ring-pairs"]
    (caption,) = [plate.caption for plate in plates if plate.name == "ring-pairs"]
    assert caption.endswith(f"BELAY ÷ EMA is {listed(spans(effects(records)[:1]))}.")
    for scope in ("width", "width_shared"):
        for other in (EMA, MATCHED):
            first = select(records, "pair", scope=scope, one=BELAY, other=other)[0]
            assert f"{first['ratio']:.3g} ({first['low']:.3g} to {first['high']:.3g}) times" in by_name["ring-ranges"]
    for end in select(records, "pair", scope="high_effective", one=BELAY, other=MATCHED):
        reach = f"{end['ratio']:.3g} ({end['low']:.3g} to {end['high']:.3g}) at {end['one_setting']}"
        assert reach in by_name["ring-curves"]


def test_no_text_is_smaller_than_eight_points(plates: list[Plate]) -> None:
    for plate in (plate for plate in plates if plate.name in DRAWN):
        sizes = [t.get_fontsize() for t in plate.figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
        assert min(sizes) >= 8


def test_lost_runs_are_drawn_and_not_dropped(records: list[Record]) -> None:
    spoiled = copy.deepcopy(records)
    highest = max(study.QUICK.lrs)
    for run in select(spoiled, "run", lr=highest, arm=BELAY):
        run.update(dict.fromkeys(("validation", "test", "w2_test", "w2_validation", "w1_test", "w1_validation")))
        run.update(diverged=True, failed=True)
    runs = select(spoiled, "run")
    kept = [r for r in spoiled if r["kind"] in ("protocol", "samples")]
    for record in select(kept, "samples", rate="high"):
        record.update(points=None, near=None)
    again = [*kept, *runs, *statistics.derive_records(runs)]
    plates = {plate.name: plate for plate in study.draw(again)}
    lost = len(select(runs, "run", lr=highest, arm=BELAY))
    assert f"{lost} of them not finite" in full_text(plates["ring-curves"])
    top = 2 * select(again, "protocol")[0]["linear"]
    for ax in plates["ring-curves"].figure.axes:
        marks = [line for line in ax.lines if line.get_marker() == "^" and line.get_markersize() == 8]
        assert [float(y) for line in marks for y in line.get_ydata()] == [top]  # BELAY's, at the top of its panel
    texts = [t.get_text() for ax in plates["ring-samples"].figure.axes for t in ax.texts]
    assert texts.count("lost") == len(study.SAMPLED)
    for name in DRAWN:
        plates[name].figure.draw_without_rendering()


def test_drawing_changes_neither_records_nor_the_users_style(records: list[Record]) -> None:
    before, style_before = copy.deepcopy(records), dict(mpl.rcParams)
    study.draw(records)
    assert records == before
    assert dict(mpl.rcParams) == style_before

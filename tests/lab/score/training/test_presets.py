"""The presets: the paper's numbers, networks of the right size, and the same masses whatever the length of the run."""

import math
import re

import pytest
import torch

from torchbelay.lab.part import LabError
from torchbelay.lab.score.studies import PAPER_RATE, SAFE_RATE, stretch
from torchbelay.lab.score.training.presets import PRESETS, Preset, find
from torchbelay.physics.spring import Spring

NAMES = [
    *("table1-belay", "table1-ema", "table1-equal", "table1-matched", "appendix-m1-2e4", "appendix-m1-2e5"),
    *("cifar10-belay", "cifar10-ema", "cifar10-equal", "cifar10-matched"),
    *("cifar10-small-belay", "cifar10-small-ema", "cifar10-small-equal", "cifar10-small-matched"),
    *("mnist-edm-belay", "mnist-edm-ema", "mnist-edm-equal", "mnist-edm-matched"),
]
PARAMETERS = {"table1": 7_426_881, "appendix": 7_426_881, "cifar10-small": 5_021_699, "mnist-edm": 1_259_393}
PARAMETERS["cifar10"] = 55_733_891


def method(name: str) -> Spring:
    found = PRESETS[name].lane().arm.method
    assert isinstance(found, Spring)
    return found


def test_they_are_all_there() -> None:
    assert list(PRESETS) == NAMES
    assert all(name == preset.name for name, preset in PRESETS.items())


@pytest.mark.parametrize("name", NAMES)
def test_each_network_has_its_size_and_its_data_set_fits(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        network = preset.objective.network()
    stem = next(stem for stem in sorted(PARAMETERS, key=len, reverse=True) if name.startswith(stem))
    assert sum(weight.numel() for weight in network.parameters()) == PARAMETERS[stem]
    assert preset.objective.shape == ((1, 28, 28) if preset.dataset == "mnist" else (3, 32, 32))
    assert preset.images == preset.steps * preset.batch


def test_table_1_has_the_papers_numbers() -> None:
    preset = PRESETS["table1-belay"]
    assert (preset.lr, preset.batch, preset.steps, preset.ramp) == (5e-2, 128, 200_000, 0.0)
    assert method("table1-belay") == Spring(k=1.0, m1=2000.0, m2=500.0)
    assert method("table1-ema") == Spring.ema(decay=0.999)
    assert method("appendix-m1-2e4") == Spring(k=1.0, m1=2e4, m2=500.0)
    assert method("appendix-m1-2e5") == Spring(k=1.0, m1=2e5, m2=500.0)
    assert all(value in preset.paper for value in (".042", ".040", "15.2"))
    assert all(value in PRESETS["table1-ema"].paper for value in (".056", ".061", "18.1"))
    assert method("table1-ema").decay == pytest.approx(Spring(k=1.0, m1=math.inf, m2=500.0).decay)  # BELAY as m1 → ∞
    assert method("table1-equal").decay == pytest.approx(0.99875)


def test_presets_at_the_papers_rate_name_the_rate_at_which_no_network_is_lost() -> None:
    cautious = [name for name, preset in PRESETS.items() if preset.caution()]
    assert cautious == [name for name, preset in PRESETS.items() if preset.lr == PAPER_RATE] == NAMES[:6]
    for name in cautious:
        assert float(PRESETS[name].caution().rpartition("--lr ")[2]) == SAFE_RATE
        assert not PRESETS[name].caution(SAFE_RATE)


def test_the_appendixs_masses_say_what_the_paper_draws_of_them() -> None:
    for name in ("appendix-m1-2e4", "appendix-m1-2e5"):
        assert PRESETS[name].paper == "train and test loss over iterations, drawn without numbers"


def test_cifar10_has_the_papers_and_edms_numbers() -> None:
    preset = PRESETS["cifar10-belay"]
    assert (preset.lr, preset.batch, preset.images) == (1e-3, 512, 200_000_000)
    assert preset.ramp * preset.images == 10_000_000
    said = preset.objective.describe()
    assert (said["dropout"], said["augment"]) == (0.13, 0.12)
    assert method("cifar10-belay") == Spring(k=1.0, m1=20_000.0, m2=2000.0)
    assert method("cifar10-ema").half_life * 512 == pytest.approx(500_000)
    assert "1.99" in preset.paper
    assert "1.98" in PRESETS["cifar10-ema"].paper


@pytest.mark.parametrize("stem", ["table1", "cifar10", "cifar10-small", "mnist-edm"])
def test_the_matched_ema_averages_and_advances_like_belay(stem: str) -> None:
    belay, matched = (PRESETS[f"{stem}-{kind}"].lane() for kind in ("belay", "matched"))
    assert method(f"{stem}-matched") == method(f"{stem}-belay").matched_ema()
    assert matched.actual_lr == matched.effective_lr == pytest.approx(belay.effective_lr)
    assert matched.actual_lr < belay.actual_lr


@pytest.mark.parametrize("stem", ["table1", "cifar10", "cifar10-small", "mnist-edm"])
def test_the_equal_memory_ema_averages_like_belay_at_its_nominal_rate(stem: str) -> None:
    belay, equal = (PRESETS[f"{stem}-{kind}"].lane() for kind in ("belay", "equal"))
    assert 1 - method(f"{stem}-equal").decay == pytest.approx(method(f"{stem}-belay").coupling().rate)
    assert equal.actual_lr == belay.actual_lr


def test_each_says_what_it_is_and_no_two_the_same() -> None:
    said = {(preset.about, preset.averaged) for preset in PRESETS.values()}
    assert len(said) == len(PRESETS)
    for name, preset in PRESETS.items():
        kinds = {"ema": "EMA: ", "equal": "the EMA of BELAY's averaging rate", "matched": "the EMA matched to BELAY: "}
        kind = kinds.get(name.rpartition("-")[2], "BELAY")
        assert preset.averaged.startswith(kind)


def test_the_small_cifar10_forgets_over_the_same_share_of_its_run() -> None:
    for kind in ("belay", "ema", "matched"):
        large, small = (PRESETS[f"{stem}-{kind}"] for stem in ("cifar10", "cifar10-small"))
        shares = [method(p.name).coupling().rate * p.steps for p in (large, small)]
        assert shares[0] == pytest.approx(shares[1])


@pytest.mark.parametrize("preset", PRESETS.values(), ids=NAMES)
def test_another_length_keeps_what_is_averaged_over(preset: Preset) -> None:
    whole, quarter = (preset.lane(share).arm.method for share in (1.0, 0.25))
    assert isinstance(whole, Spring)
    assert isinstance(quarter, Spring)
    assert quarter.kappa1 == pytest.approx(4 * whole.kappa1)
    assert quarter.kappa2 == pytest.approx(4 * whole.kappa2)
    assert (quarter.follow, quarter.theta) == (whole.follow, pytest.approx(whole.theta))


def test_an_ema_stays_one_when_it_is_stretched() -> None:
    assert repr(stretch(Spring.ema(0.5), 2.0)) == "Spring.ema(decay=0.75)"
    assert stretch(Spring(k=1.0, m1=math.inf, m2=4.0), 2.0).kappa2 == 1 / 16


def test_another_rate_is_scaled_like_the_presets() -> None:
    lane = PRESETS["table1-matched"].lane(lr=1e-3)
    assert lane.lr == 1e-3
    assert lane.actual_lr == pytest.approx(1e-3 * PRESETS["table1-belay"].spring.effective_lr_scale)


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(LabError, match=r"^unknown preset 'tabel1-belay'; did you mean table1-belay or .*--list"):
        find("tabel1-belay")
    with pytest.raises(LabError, match=re.escape("unknown preset 'xyz'; torchbelay train --list shows them all")):
        find("xyz")

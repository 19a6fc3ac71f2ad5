"""`identify` on averaging code of others: the four numbers that each library's documentation or source promises."""

import pytest
from torch.optim.swa_utils import get_ema_multi_avg_fn

from helpers import averaging_code as code
from torchbelay.testing import Identification, identify


def rates(found: Identification) -> list[float]:
    """Return b of every update; the code only follows the weights it sees, so that b = q, a = 0 and p = 1."""
    assert found.reason is None
    assert all(c.a == 0 and c.p == 1 and c.b == pytest.approx(c.q, abs=1e-9) for c in found.couplings)
    return [c.b for c in found.couplings]


def habits(found: Identification) -> list[str]:
    return [str(found.buffers), str(found.integers), str(found.frozen), str(found.tied)]


# torch ---------------------------------------------------------------------------------------------------------------


def test_torchs_averaged_model_is_the_uniform_mean() -> None:
    found = identify(code.averaged_model(), steps=40)
    assert rates(found) == pytest.approx([1 / t for t in range(1, 41)], abs=1e-7)  # it makes 1/t in float32
    assert found.warmup.law == "mean"
    assert habits(found) == ["copied", "copied", "averaged", "averaged"]
    assert found.problems == ()


def test_torchs_ema_copies_at_its_first_update_and_has_no_warm_up() -> None:
    found = identify(code.averaged_model(multi_avg_fn=get_ema_multi_avg_fn(0.99)), steps=40)
    assert rates(found) == pytest.approx([1.0, *[0.01] * 39], abs=1e-12)
    assert (found.warmup.law, found.warmup.copies, found.warmup.decay) == ("none", 1, 0.99)
    assert found.growth == pytest.approx(0.99, abs=1e-12)
    assert found.eigenvalues == pytest.approx((1, 0.99))
    assert [(low.average, low.accumulates) for low in found.sixteen_bit] == [("bfloat16", False), ("float16", False)]
    assert found.problems == ()


def test_torchs_ema_with_use_buffers_averages_them() -> None:
    found = identify(code.averaged_model(multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True), steps=40)
    assert str(found.buffers) == "averaged"
    assert str(found.integers) not in ("copied", "averaged")  # a count of batches that is no count any more


# ema-pytorch, torch-ema ----------------------------------------------------------------------------------------------


def test_ema_pytorch_as_it_comes_copies_for_100_updates_and_moves_at_every_tenth() -> None:
    found = identify(code.ema_pytorch(), steps=180, every=10)
    expected = [
        0.0 if (t - 1) % 10 else 1.0 if t <= 101 else (t - 100) ** (-2 / 3) for t in range(1, 181)
    ]  # its epoch is t − 101
    assert rates(found) == pytest.approx(expected, abs=1e-6)  # it computes decays in float32
    warmup = found.warmup
    assert (warmup.law, warmup.every, warmup.copies, warmup.copied_until) == ("inverse-power", 10, 11, 101)
    assert warmup.numbers == pytest.approx({"power": 2 / 3, "inv_gamma": 1.0, "from": 101.0}, abs=2e-3)
    assert habits(found) == ["averaged", "ignored", "averaged", "averaged"]
    assert found.problems == ()
    (problem,) = identify(code.ema_pytorch(), steps=180).problems
    assert "Only every 10th update() moves the average" in problem
    assert "every=10" in problem


def test_ema_pytorch_that_copies_itself_into_the_model_is_seen_to_move_the_weights() -> None:
    options = {"beta": 0.9, "min_value": 0.9, "update_every": 1, "update_after_step": 0}
    found = identify(code.ema_pytorch(**options, update_model_with_ema_every=4), steps=30)
    sync = found.couplings[8]  # its step counts from 0: the copy is in update 9
    assert (sync.a, sync.b, sync.p, sync.q) == pytest.approx((0.9, 0.1, 0.1, 0.1), abs=1e-6)
    between = found.couplings[9]
    assert (between.a, between.p, between.q) == pytest.approx((0, 1, 0.1), abs=1e-6)


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_torch_ema_warms_up_by_the_ratio(decay: float) -> None:
    found = identify(code.torch_ema(decay=decay), steps=40)
    assert rates(found) == pytest.approx([max(1 - decay, 9 / (10 + t)) for t in range(1, 41)], abs=1e-12)
    assert (found.warmup.law, found.warmup.decay) == ("ratio", decay if decay == 0.5 else None)
    assert found.idle == "counts"
    assert str(found.buffers) == "left out"
    assert found.problems == ()


# timm, diffusers, Lightning ------------------------------------------------------------------------------------------


def test_timm_copies_first_then_warms_up_and_moves_tied_weights_twice() -> None:
    found = identify(code.timm(decay=0.9, use_warmup=True), steps=60)
    expected = [1.0, *(max(0.1, t ** (-2 / 3)) for t in range(2, 61))]
    assert rates(found) == pytest.approx(expected, abs=1e-12)
    assert (found.warmup.law, found.warmup.copies, found.warmup.decay) == ("inverse-power", 1, 0.9)
    assert habits(found) == ["averaged", "copied", "averaged", "otherwise"]
    assert "twice per update" in str(found)
    # Newer versions round bfloat16 stochastically, older ones do not.
    assert [low.accumulates for low in found.sixteen_bit] in ([True, False], [False, False])


def test_timm_that_is_not_told_the_step_has_no_warm_up_at_all() -> None:
    found = identify(code.timm(counted=False, decay=0.9, use_warmup=True), steps=30)
    assert rates(found) == pytest.approx([0.1] * 30, abs=1e-12)
    assert (found.warmup.law, found.warmup.copies) == ("none", 0)


def test_diffusers_copies_first_then_warms_up_by_the_ratio_one_update_late() -> None:
    found = identify(code.diffusers(decay=0.9999), steps=40)
    assert rates(found) == pytest.approx([1.0, *(9 / (9 + t) for t in range(2, 41))], abs=1e-12)
    assert (found.warmup.law, found.warmup.copies, found.warmup.numbers) == ("ratio", 1, {"from": 1.0})
    assert habits(found) == ["left out", "left out", "copied", "averaged"]
    assert found.problems == ()


def test_diffusers_with_its_warm_up_is_crowsons_one_update_late() -> None:
    found = identify(code.diffusers(decay=0.9, use_ema_warmup=True, inv_gamma=2.0, power=0.75), steps=120)
    expected = [1.0, *(max(0.1, (1 + (t - 1) / 2) ** -0.75) for t in range(2, 121))]
    assert rates(found) == pytest.approx(expected, abs=1e-12)
    assert found.warmup.law == "inverse-power"
    assert found.warmup.numbers == pytest.approx({"power": 0.75, "inv_gamma": 2.0, "from": 1.0}, abs=1e-3)


def test_lightnings_callback_is_torchs_ema_at_every_nth_step() -> None:
    found = identify(code.lightning(decay=0.9, update_every_n_steps=3), steps=40, every=3)
    expected = [1.0 if t == 1 else 0.0 if (t - 1) % 3 else 0.1 for t in range(1, 41)]
    assert rates(found) == pytest.approx(expected, abs=1e-12)
    assert (found.warmup.law, found.warmup.copies, found.warmup.every) == ("none", 1, 3)
    assert str(found.buffers) == "averaged"
    assert found.problems == ()


def test_lightnings_callback_that_starts_late_ignores_the_updates_before() -> None:
    found = identify(code.lightning(decay=0.9, update_starting_at_step=20), steps=40)
    assert rates(found) == pytest.approx([0.0] * 20 + [1.0] + [0.1] * 19, abs=1e-12)
    assert (found.warmup.ignored, found.warmup.copies) == (20, 1)
    assert found.problems == ()

"""The weights of a merge: their sums, the decay of the learning rate that they stand for, and errors."""

import math
import re

import pytest
import torch

from torchbelay.snapshots import merge_weights

DECAYS = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 + 0.5 * math.cos(math.pi * x),
    "1-sqrt": lambda x: 1 - x**0.5,
}


@pytest.mark.parametrize("weights", ["uniform", *DECAYS, "ema:0.9", "ema:0"])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_weights_add_up_to_1_and_are_not_negative(weights: str, count: int) -> None:
    found = merge_weights(weights, count)
    assert len(found) == count
    assert math.fsum(found) == pytest.approx(1, abs=1e-15)
    assert min(found) >= 0


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("count", [2, 5, 12])
def test_a_merge_is_the_run_whose_updates_had_decayed(name: str, count: int) -> None:
    """The merge of w_1, …, w_n equals w_1 plus the updates, each times the rate of the decay at its place."""
    torch.manual_seed(0)
    updates = torch.randn(count, 4, dtype=torch.float64)
    checkpoints = updates.cumsum(0)
    rates = torch.tensor([1.0] + [DECAYS[name](j / count) for j in range(1, count)], dtype=torch.float64)
    decayed = (rates[:, None] * updates).sum(0)
    merged = torch.tensor(merge_weights(name, count), dtype=torch.float64) @ checkpoints
    torch.testing.assert_close(merged, decayed, rtol=1e-13, atol=1e-13)


def test_the_linear_decay_is_the_uniform_merge() -> None:
    assert merge_weights("linear", 7) == pytest.approx(merge_weights("uniform", 7), abs=1e-15)


def test_an_ema_takes_one_step_per_checkpoint() -> None:
    checkpoints = [3.0, -1.0, 4.0, 10.0]
    average = checkpoints[0]
    for value in checkpoints[1:]:
        average = 0.8 * average + 0.2 * value
    weights = merge_weights("ema:0.8", 4)
    assert sum(w * x for w, x in zip(weights, checkpoints, strict=True)) == pytest.approx(average, rel=1e-15)


def test_numbers_are_taken_as_they_are_or_divided_by_their_sum() -> None:
    assert merge_weights("0.2,0.3,0.5", 3) == (0.2, 0.3, 0.5) == merge_weights([0.2, 0.3, 0.5], 3)
    assert merge_weights("1, 3", 2, normalize=True) == (0.25, 0.75)
    assert merge_weights([1.5, -0.5], 2) == (1.5, -0.5)


@pytest.mark.parametrize(
    ("weights", "count", "message"),
    [
        ("0.2,0.3", 2, "weights='0.2,0.3' add up to 0.5 instead of 1; correct them, or use normalize=True"),
        ("0.2,0.8", 3, "weights='0.2,0.8' has 2 numbers for 3 checkpoints; give one per checkpoint"),
        ([0.5, math.nan], 2, "holds a number that is not finite"),
        ("inf,1", 2, "holds a number that is not finite"),
        ("even", 2, "weights='even' is unknown; give 'uniform', 'linear', 'cosine', '1-sqrt', 'ema:0.9' or numbers"),
        ("linear:3", 2, "weights='linear:3' is unknown"),
        ("", 2, "weights='' is unknown"),
        ("ema", 2, "weights='ema' is unknown"),
        ("ema:1", 2, "weights='ema:1' needs a decay of at least 0 and below 1"),
        ("ema:x", 2, "weights='ema:x' needs a decay"),
        ("ema:nan", 2, "weights='ema:nan' needs a decay"),
        (None, 2, "weights=None is unknown; give 'uniform', 'linear', 'cosine', '1-sqrt', 'ema:0.9' or numbers"),
        (0.5, 2, "weights=0.5 is unknown; give 'uniform'"),
        ([0.5, None], 2, "weights=[0.5, None] is unknown; give 'uniform'"),
        (["half", "half"], 2, "weights=['half', 'half'] is unknown; give 'uniform'"),
    ],
)
def test_what_cannot_be_weights_is_refused_with_the_cure(weights, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        merge_weights(weights, count)


def test_a_sum_that_cannot_become_1_is_refused() -> None:
    with pytest.raises(ValueError, match="add up to 0, which cannot be made 1"):
        merge_weights([1, -1], 2, normalize=True)


def test_the_number_of_checkpoints_is_checked() -> None:
    with pytest.raises(ValueError, match="count=0 is too small"):
        merge_weights("uniform", 0)

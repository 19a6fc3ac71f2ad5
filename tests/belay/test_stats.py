"""Numbers to log, the kind of motion, and the decay."""

import math
from typing import Any

import pytest
import torch

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, attached, mlp, same, snapshot, train

WARM = tb.methods.ema(0.9, warmup="ratio")


@pytest.mark.parametrize("method", [BELAY, SWINGING, EMA, tb.methods.lookahead(k=3), WARM], ids=str)
def test_stats_are_numbers_alone_whatever_the_method(method: Any) -> None:
    model, optimizer, belay = attached(method, spectators={"short": EMA})
    train(model, optimizer, 2)
    found = belay.stats()
    assert list(found) == ["step", "tension", "tension_ratio", "effective_lr"]
    assert all(type(number) in (int, float) and math.isfinite(number) for number in found.values())


def test_a_prefix_is_put_before_every_name() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    plain = belay.stats()
    assert belay.stats(prefix="belay/") == {f"belay/{name}": number for name, number in plain.items()}
    with pytest.raises(TypeError, match=r"prefix=None is not a text; give one as 'belay/'"):
        belay.stats(prefix=None)  # type: ignore[arg-type]


def test_they_go_straight_into_a_summary_writer_that_takes_numbers() -> None:
    """What TensorBoard, W&B, MLflow and Lightning ask of a value: float() takes it."""
    model, optimizer, belay = attached(BELAY)
    train(model, optimizer, 2)
    assert {name: float(number) for name, number in belay.stats("belay/").items()}["belay/step"] == 2.0


# The decay --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "steps", "decay"),
    [
        (EMA, 0, 0.9),
        (EMA, 5, 0.9),
        (tb.methods.ema(0.999), 3, 0.999),
        (WARM, 0, WARM.coupling(1, 0.0)),
        (WARM, 4, WARM.coupling(4, 0.0)),
        (tb.methods.swa(), 5, 1 - 1 / 5),
        (BELAY, 3, BELAY.beta),
        (tb.methods.lookahead(k=3, alpha=0.25), 3, 0.75),
        (tb.methods.lookahead(k=3, alpha=0.25), 4, 1.0),
        (tb.methods.heavy_ball(0.9), 3, 0.0),
    ],
    ids=str,
)
def test_the_decay_is_the_share_that_the_average_kept_at_its_last_step(method: Any, steps: int, decay: Any) -> None:
    model, optimizer, belay = attached(method)
    train(model, optimizer, steps)
    assert belay.decay == pytest.approx(decay if isinstance(decay, float) else 1 - decay.b, rel=1e-12)


def test_it_is_what_the_average_really_kept() -> None:
    model, optimizer, belay = attached(WARM, model=mlp(torch.float64))
    train(model, optimizer, 3)
    before = belay.average_state_dict()["0.weight"]
    train(model, optimizer, 1, first=3)
    after, weights = belay.average_state_dict()["0.weight"], model[0].weight.detach()
    kept = (after - weights) / (before - weights)
    assert torch.allclose(kept, torch.full_like(kept, belay.decay), rtol=1e-9)


def test_with_every_it_is_that_of_all_steps_together() -> None:
    model, optimizer, belay = attached(EMA, every=3)
    assert belay.decay == pytest.approx(0.9**3)
    train(model, optimizer, 4)
    assert belay.decay == pytest.approx(0.9**3)


def test_before_the_averages_begin_it_is_that_of_their_first_step() -> None:
    model, optimizer, belay = attached(tb.methods.ema(0.9, warmup="ratio"), start=3)
    train(model, optimizer, 2)
    assert belay.decay == pytest.approx(1 - WARM.coupling(1, 0.0).b)
    assert belay.regime == "ema"


def test_methods_that_differ_are_told_by_parameter() -> None:
    model, optimizer, belay = attached(lambda name, p: EMA if "weight" in name else tb.methods.swa())
    train(model, optimizer, 4)
    assert belay.decay == {"0.weight": 0.9, "0.bias": 0.75, "2.weight": 0.9, "2.bias": 0.75}
    assert belay.regime == {"0.weight": "velocity-free", "0.bias": "swa", "2.weight": "velocity-free", "2.bias": "swa"}


def test_a_parameter_that_came_later_has_the_decay_of_its_own_age() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.swa())
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 1, first=3)
    assert belay.decay == {"0.weight": 0.75, "0.bias": 0.75, "2.weight": 0.0, "2.bias": 0.0}


@pytest.mark.parametrize("method", [tb.methods.schedule_free(0.9), tb.methods.heavy_ball(0.9)], ids=str)
def test_asking_is_not_remembered_and_right_inside_the_block_too(method: Any) -> None:
    model, optimizer, belay = attached(method)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    outside = (belay.decay, belay.regime)
    with belay.averaged():
        assert (belay.decay, belay.regime) == outside
    assert same(snapshot(model, belay), before)


def test_an_average_whose_parameters_have_all_left_has_none() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if name.startswith("2.") else None)
    train(model, optimizer, 1)
    del optimizer.param_groups[1]
    with pytest.warns(tb.BelayWarning, match="averages them no more"):
        train(model, optimizer, 1)
    assert belay.decay == belay.regime == {}


def test_a_belay_whose_optimizer_was_emptied_does_not_say_that_it_is_yet_to_begin() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 4)
    optimizer.param_groups[0]["params"] = []
    with pytest.warns(tb.BelayWarning, match="were taken from the optimizer"):
        optimizer.step()
    assert "averages nothing" in repr(belay)
    assert "begins after" not in repr(belay)

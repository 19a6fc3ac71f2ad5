"""The buffers of a live module: refreshed from the model, averaged, or copied once, and always its own memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import torchbelay as tb
from helpers import seams
from helpers.live import assert_is, output, shared
from helpers.small import EMA, attached, batch, mlp, same, train, values, with_batchnorm


def statistics(model: Any) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def test_with_copy_they_are_the_models_after_every_step() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    made = belay.module()
    for step in range(3):
        train(model, optimizer, 1, first=step)
        assert same(statistics(made), statistics(model))
        assert not any(shared(x, y) for x, y in zip(made.buffers(), model.buffers(), strict=True))


def test_with_average_they_are_averaged_and_cast_to_the_models_dtype() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm().bfloat16(), buffers="average")
    made = belay.module()
    wide = model[1].running_mean.float()
    for step in range(4):
        train(model, optimizer, 1, first=step)
        wide = torch.lerp(wide, model[1].running_mean.float(), 0.1)
        torch.testing.assert_close(made[1].running_mean, wide.bfloat16(), rtol=2**-7, atol=0)
        assert_is(made, belay)
        assert made[1].num_batches_tracked == model[1].num_batches_tracked == step + 1
    made.train()
    output(made, batch(9).bfloat16())  # writes to its own, not to the average
    assert not same(made[1].running_mean, belay.average_state_dict()["1.running_mean"])
    train(model, optimizer, 1, first=4)
    assert_is(made, belay)


def test_with_ignore_they_are_copied_once() -> None:
    """A teacher in train mode has statistics of its own inputs."""
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="ignore")
    train(model, optimizer, 1)
    made = belay.module().train()
    before = statistics(model)
    train(model, optimizer, 2, first=1)
    assert same(statistics(made), before)
    expected = nn.BatchNorm1d(5)
    expected.load_state_dict({"weight": torch.ones(5), "bias": torch.zeros(5)} | values_of_norm(made))
    expected(output(made[0], batch(7)))
    output(made, batch(7))
    train(model, optimizer, 1, first=3)
    assert same(made[1].running_var, expected.running_var)
    assert same(made[0].weight.detach(), belay.average_state_dict()["0.weight"])
    belay.reset()
    assert same(made[1].running_var, expected.running_var)


def values_of_norm(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix("1."): b for name, b in statistics(model).items()}


@pytest.mark.parametrize("mode", ["copy", "average", "ignore"])
def test_update_bn_of_the_module_lasts_until_the_next_step_unless_they_are_its_own(mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers=mode)
    made = belay.module()
    train(model, optimizer, 2)
    own = statistics(model)
    update_bn([batch(1), batch(2)], made)
    assert not made.training
    seen = made[0](torch.cat([batch(1), batch(2)])).detach()
    torch.testing.assert_close(made[1].running_mean, seen.mean(0))
    assert same(statistics(model), own)
    found = statistics(made)
    train(model, optimizer, 1, first=2)
    assert same(statistics(made), found) is (mode == "ignore")
    if mode != "ignore":
        assert_is(made, belay)


class Odd(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("table", torch.ones(2, 3))
        self.register_buffer("nothing", None)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("whole", torch.arange(3))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("counted", torch.zeros(2), persistent=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.layer.register_buffer("shared", torch.zeros(2))
        self.other.register_buffer("shared", self.layer.shared)
        with torch.inference_mode():
            self.register_buffer("inferred", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.other(x)


@pytest.mark.parametrize("mode", ["copy", "average"])
def test_buffers_of_every_kind_follow_what_the_model_does_to_them(mode: str) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, EMA, buffers=mode)
    made = belay.module()
    assert made.layer.shared is made.other.shared

    def step(number: int) -> None:
        train(model, optimizer, 1, first=number)
        assert_is(made, belay)
        if model.layer.shared is not model.other.shared:
            assert made.layer.shared is not made.other.shared

    step(0)
    model.table.fill_(2.0)
    model.whole.add_(1)
    model.layer.shared.add_(1.0)
    model.counted.add_(1.0)
    step(1)
    if mode == "copy":
        assert same(made.counted, model.counted)
    model.table = torch.randn(3, 1)  # resized
    model.nothing = torch.ones(2)
    model.sparse = 2 * torch.eye(3).to_sparse()
    model.whole = None
    model.register_buffer("late", torch.ones(3))
    step(2)
    assert made.whole is None
    model.to(torch.float64)
    step(3)
    assert made.table.dtype == torch.float64
    assert made.layer.shared.dtype == torch.float64
    del model.late
    step(4)
    model.other.shared = model.layer.shared
    step(5)
    model.other.shared = model.layer.shared + 1.0
    step(6)


def test_a_cache_that_the_model_or_the_module_replaces_belongs_to_its_module() -> None:
    """It is not persistent: a module may remember beside it what it is good for."""
    for who in ("model", "module"):
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        belay = tb.Belay(model, optimizer, EMA)
        made = belay.module()
        model.cache.fill_(1.0)
        train(model, optimizer, 1)
        assert same(made.cache, torch.ones(2))  # written in place: refreshed like any other
        model.double()
        train(model, optimizer, 1, first=1)
        assert same(made.cache, torch.ones(2, dtype=torch.float64))  # a cast does not replace it
        (model if who == "model" else made).cache = torch.full((2,), 7.0, dtype=torch.float64)
        before = made.cache.clone()
        for number in range(2, 4):
            train(model, optimizer, 1, first=number)
            assert same(made.cache, before), who
            model.cache.fill_(9.0)


def test_a_skipped_step_refreshes_them_all_the_same() -> None:
    """What is copied from the model is the model's, whether the step counts or not."""
    for waits in (False, True):
        model = with_batchnorm()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        belay = tb.Belay(model, optimizer, EMA)
        made = belay.module()
        train(model, optimizer, 1)
        with pytest.MonkeyPatch.context() as patch:
            seams.set_waiting(patch, waits)
            optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
            train(model, optimizer, 1, first=1)
        assert belay.step == 1
        assert same(statistics(made), statistics(model))


def test_a_module_that_the_user_casts_keeps_buffers_of_that_dtype() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    made = belay.module().double()
    for step in range(2):
        train(model, optimizer, 1, first=step)
        assert same(made[1].running_mean, model[1].running_mean.double())
    made.float()
    train(model, optimizer, 1, first=2)
    model.bfloat16()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, first=3)
    assert made[1].running_mean.dtype == torch.bfloat16  # as the model's, which it was again
    assert_is(made, belay)


def test_weights_that_are_not_averaged_are_refreshed_in_a_module_of_another_dtype() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if name == "0.weight" else None)
    made = belay.module().double()
    for step in range(3):
        train(model, optimizer, 1, first=step)
        assert same(made[2].bias.detach(), model[2].bias.detach().double())
        assert same(made[0].weight.detach(), belay.tensors()["0.weight"].double())
    model.load_state_dict({name: torch.zeros_like(t) for name, t in values(model).items()})
    train(model, optimizer, 1, first=3)
    assert same(made[2].bias.detach(), model[2].bias.detach().double())

"""Buffers, such as BatchNorm's: what the average holds in each of the three modes."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torchbelay as tb
from helpers.small import EMA, attached, batch, same, train, values, with_batchnorm

LOADER = [batch(100 + i) for i in range(4)]


def is_buffer(name: str) -> bool:
    return "running" in name or "tracked" in name


def buffers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if is_buffer(name)}


@pytest.mark.parametrize("mode", ["copy", "ignore"])
def test_copied_or_ignored_buffers_are_the_models_own(mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers=mode)
    train(model, optimizer, 5)
    assert same(buffers(belay.average_state_dict()), buffers(values(model)))


def test_update_bn_inside_averaged_is_the_averages_until_the_next_step() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 5)
    own = buffers(values(model))
    with belay.averaged():
        update_bn(LOADER, model)
        fitted = buffers(values(model))
        assert same(buffers(belay.average_state_dict()), fitted)
    assert same(buffers(values(model)), own)
    assert same(buffers(belay.average_state_dict()), fitted)
    assert not same(fitted, own)
    with belay.averaged():
        assert same(buffers(values(model)), fitted)
    train(model, optimizer, 1, first=5)
    assert same(buffers(belay.average_state_dict()), buffers(values(model)))


def test_buffers_that_nobody_wrote_inside_are_saved_as_the_model_has_them() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
        model = with_batchnorm()
        model.register_buffer("table", torch.arange(1.0, 4.0))
        return attached(EMA, model=model, spectators={"short": EMA})

    model, optimizer, belay = made()
    train(model, optimizer, 2)
    with belay.averaged():
        model[1].running_mean.fill_(3.0)
    exported = belay.average_state_dict()
    assert exported["table"].tolist() == [1.0, 2.0, 3.0]
    states = [copy.deepcopy(belay.state_dict())]
    with belay.averaged("short"):
        model.table.fill_(7.0)  # the spectator's, not the average's
        states.append(copy.deepcopy(belay.state_dict()))
    weights = model.state_dict()
    for state in states:
        other, _, resumed = made()
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert same(dict(resumed.average_state_dict()), dict(exported))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_update_bn_found_in_another_dtype_than_the_models_is_resumed(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 2)
    with belay.averaged():
        update_bn(LOADER, model)
    model[1].running_mean = model[1].running_mean.to(dtype)
    state = copy.deepcopy(belay.state_dict())
    other, _, resumed = attached(EMA, model=with_batchnorm())
    other[1].running_mean = other[1].running_mean.to(dtype)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    assert same(dict(resumed.average_state_dict()), dict(belay.average_state_dict()))
    assert same(resumed.state_dict()["averages"]["average"]["buffers"], state["averages"]["average"]["buffers"])


def test_an_evaluation_that_writes_no_buffer_leaves_none_behind() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 2)
    with belay.averaged():
        model.eval()(batch(0))
    model.train()(batch(1))  # the model's own statistics go on
    assert same(buffers(belay.average_state_dict()), buffers(values(model)))


def test_averaged_buffers_equal_torchs_averaged_model() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    peer.update_parameters(model)
    for step in range(10):
        train(model, optimizer, 1, first=step)
        peer.update_parameters(model)
    ours, theirs = belay.average_state_dict(), peer.module.state_dict()
    for name in ("1.running_mean", "1.running_var", "0.weight"):
        assert torch.equal(ours[name], theirs[name])
    assert ours["1.num_batches_tracked"] == model[1].num_batches_tracked  # counted, not averaged


def test_averaged_buffers_are_swapped_exported_saved_and_reset() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    train(model, optimizer, 4)
    own, averaged = buffers(values(model)), buffers(belay.average_state_dict())
    assert not same(own, averaged)
    with belay.averaged():
        assert same(buffers(values(model)), averaged)
    assert same(buffers(values(model)), own)
    other_model, _, other = attached(EMA, model=with_batchnorm(), buffers="average")
    other.load_state_dict(belay.state_dict())
    assert same(buffers(other.average_state_dict()), averaged)
    assert same(buffers(values(other_model)), buffers(values(with_batchnorm())))
    belay.reset()
    assert same(buffers(belay.average_state_dict()), own)


def test_copy_to_model_takes_the_averages_buffers_along() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    train(model, optimizer, 4)
    average = belay.average_state_dict()
    belay.copy_to_model()
    assert same(values(model), average)


def test_ignored_buffers_that_change_inside_averaged_stay_changed() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="ignore")
    train(model, optimizer, 2)
    with belay.averaged():
        update_bn(LOADER, model)
        fitted = buffers(values(model))
    assert same(buffers(values(model)), fitted)


def test_a_buffer_replaced_inside_averaged_is_put_back() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 2)
    own = model[1].running_mean
    kept = own.clone()
    with belay.averaged():
        model[1].running_mean = torch.full((5,), 9.0)
    assert model[1].running_mean is own
    assert torch.equal(own, kept)
    assert torch.equal(belay.average_state_dict()["1.running_mean"], torch.full((5,), 9.0))


def test_buffers_of_spectators_are_their_own() -> None:
    model, optimizer, belay = attached(
        EMA, model=with_batchnorm(), buffers="average", spectators={"short": tb.Spring.ema(decay=0.1)}
    )
    train(model, optimizer, 4)
    assert not same(buffers(belay.average_state_dict()), buffers(belay.average_state_dict("short")))


class Shared(nn.Module):
    """Two names for one module, and one buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)
        self.a = self.again = nn.BatchNorm1d(3)
        self.b = nn.BatchNorm1d(3)
        self.b.running_var = self.a.running_var

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.b(self.again(self.a(self.inner(x)))))


@pytest.mark.parametrize("mode", ["copy", "average"])
def test_buffers_that_modules_share_come_back_as_they_were(mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=Shared(), buffers=mode)
    train(model, optimizer, 4)
    own = buffers(values(model))
    with belay.averaged():
        update_bn(LOADER, model)
        fitted = buffers(values(model))
    assert same(buffers(values(model)), own)
    with belay.averaged():
        assert same(buffers(values(model)), fitted)
    assert same(buffers(values(model)), own)
    assert model.b.running_var is model.a.running_var


def test_a_state_from_before_the_start_leaves_no_buffers_behind() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average", start=2)
    early = belay.state_dict()
    train(model, optimizer, 4)
    belay.load_state_dict(early)
    assert same(belay.average_state_dict(), values(model))


def test_buffers_without_values_are_left_alone() -> None:
    """A frozen part on the meta device, as of a model that is loaded later."""
    model = nn.Module()
    model.net, model.rest = nn.Linear(4, 3), nn.BatchNorm1d(3, device="meta").requires_grad_(False)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.5))
    before, rest = model.net.weight.detach().clone(), dict(model.rest.named_buffers())
    model.net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with belay.averaged():
        assert torch.allclose(model.net.weight, before - 0.05)
    assert torch.allclose(model.net.weight, before - 0.1)
    assert all(buffer is rest[name] and buffer.is_meta for name, buffer in model.rest.named_buffers())

"""Models as users have them: locks and streams, views and strides, caches, groups, 16-bit weights."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import torchbelay as tb
from helpers.small import BELAY, EMA, attached, batch, mlp, same, snapshot, train, values
from torchbelay.testing import CONTRACTS, check


class Stubborn(nn.Module):
    """A model that holds what cannot be copied: a lock, and an activation that is part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.lock = mlp(), threading.Lock()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.last = self.layers(x)
        return self.last


def test_a_model_that_cannot_be_deep_copied_is_averaged_like_any_other() -> None:
    model = Stubborn()
    with pytest.raises(TypeError, match="pickle"):
        AveragedModel(model)
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, BELAY)
    train(model, optimizer, 4)
    plain, plain_optimizer, plain_belay = attached(BELAY)
    train(plain, plain_optimizer, 4)
    assert same(values(model.layers), values(plain))
    exported = belay.average_state_dict()
    assert list(exported) == [f"layers.{name}" for name in plain_belay.average_state_dict()]
    assert same(list(exported.values()), list(plain_belay.average_state_dict().values()))
    before = values(model)
    with belay.averaged():
        assert same(values(model), dict(exported))
    assert same(values(model), before)
    Stubborn().load_state_dict(exported, strict=True)


class Odd(nn.Module):
    """Parameters that are views of one memory, transposed, channels-last, empty, a single number, and None."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(12)
        self.flat = flat  # an ordinary attribute, not a parameter
        self.upper, self.lower = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(2, 3))
        self.transposed = nn.Parameter(torch.randn(2, 4).t())
        self.conv = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
        self.empty, self.gain = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.register_parameter("absent", None)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach().mean(0)  # replaced, not written to: as caches are
        hidden = torch.cat([x @ self.upper.t(), x @ self.lower.t()], 1) @ self.transposed
        image = hidden[:, :, None, None].expand(-1, 2, 2, 2)
        return self.gain * self.conv(image).flatten(1).tanh() + self.empty.sum()


@pytest.mark.parametrize("method", [BELAY, EMA, tb.methods.lookahead(k=2)], ids=["belay", "ema", "lookahead"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_contract_holds_for_odd_tensors(method: tb.Method, optimizer: Any) -> None:
    report = check(Odd, lambda model: optimizer(model.parameters(), lr=0.05), batch=batch, method=method, steps=4)
    assert report.passed == tuple(CONTRACTS)


def test_views_strides_and_tensors_themselves_survive_a_swap() -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    places = {name: (id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    with belay.averaged():
        assert {name: (id(p), p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == places
        assert torch.equal(model.flat[:6].view(2, 3), model.upper)
    assert torch.equal(model.flat[6:].view(2, 3), model.lower)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert "cache" not in belay.average_state_dict()


def test_a_method_for_each_group_and_none_for_another() -> None:
    """A rule sees the parameter itself: whatever tells groups apart can choose their methods."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    methods = [BELAY, tb.methods.swa(), None]
    groups = [{"params": list(layer.parameters()), "lr": 0.1 / (1 + i)} for i, layer in enumerate(model)]
    chosen = {id(p): methods[i] for i, group in enumerate(groups) for p in group["params"]}
    optimizer = torch.optim.SGD(groups)
    start = values(model)
    belay = tb.Belay(model, optimizer, lambda name, p: chosen[id(p)])
    track = [values(model)]
    for step in range(3):
        train(model, optimizer, 1, first=step)
        track.append(values(model))
    saved, exported = belay.state_dict()["averages"]["average"], belay.average_state_dict()
    assert {name: method.split("(")[0] for name, method in saved["methods"].items()} == {
        "0.weight": "Spring",
        "0.bias": "Spring",
        "1.weight": "swa",
        "1.bias": "swa",
    }
    torch.testing.assert_close(exported["1.weight"], sum(w["1.weight"] for w in track[1:]) / 3)
    assert torch.equal(exported["2.weight"], model[2].weight)
    lagged = start["0.weight"]
    for w in track[:-1]:  # Algorithm 1: the average follows the weights from before each step
        lagged = lagged + (w["0.weight"] - lagged) / 40
    torch.testing.assert_close(exported["0.weight"], lagged)
    assert belay.stats()["effective_lr/1"] == pytest.approx(0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", [tb.Spring.ema(decay=0.9999), tb.methods.ema(0.9999)], ids=["spring", "method"])
def test_the_average_of_a_16_bit_model_moves_by_18_percent_in_2000_steps(method: tb.Method, dtype: torch.dtype) -> None:
    """1 − 0.9999^2000 = 18.13% of the way from 1 to 2; in 16 bits a step of 1e-4 of it would round away."""
    model = nn.Linear(2, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    belay = tb.Belay(model, optimizer, method)
    for step in range(2000):
        model.weight.grad = torch.full_like(model.weight, 0.0 if step else -1.0)
        optimizer.step()
    assert (model.weight == 2).all()
    average = belay.state_dict()["averages"]["average"]["weights"]["weight"]
    # float32 rounds 2,000 times, by at most half of 1.2e-7 each
    torch.testing.assert_close(average, torch.full((1, 2), 2 - 0.9999**2000), rtol=0, atol=1.2e-4)
    rounded = belay.average_state_dict()["weight"]
    assert rounded.dtype == dtype
    assert torch.equal(rounded, average.to(dtype))


def test_a_bfloat16_average_that_was_asked_for_stands_still() -> None:
    """This is why float32 is the default; bfloat16 saves memory if asked for."""
    model = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(tb.BelayWarning, match="will hardly move. Leave dtype=torch.bfloat16 out, or give bits=24"):
        belay = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9999), dtype=torch.bfloat16)
    for step in range(100):
        model.weight.grad = torch.full_like(model.weight, 0.0 if step else -1.0)
        optimizer.step()
    assert (belay.state_dict()["averages"]["average"]["weights"]["weight"] == 1).all()


def test_weights_loaded_after_construction_are_known_after_reset() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    model.load_state_dict(mlp(seed=5).state_dict())
    assert not same(values(model), dict(belay.average_state_dict()))
    belay.reset()
    assert same(values(model), dict(belay.average_state_dict()))
    fresh, fresh_optimizer, fresh_belay = attached(EMA, model=mlp(seed=5))
    fresh_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (fresh, fresh_optimizer)):
        train(*each, 3, first=2)
    assert same(dict(belay.average_state_dict()), dict(fresh_belay.average_state_dict()))


def test_a_graph_of_gradients_through_the_average_leaves_everything_as_it_was() -> None:
    """Gradients taken inside averaged() are gradients at the average, and the step after it is not disturbed."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    plain = mlp()
    plain.load_state_dict(belay.average_state_dict())
    before = snapshot(model, belay)
    with belay.averaged():
        ours = torch.autograd.grad(model(batch(9)).square().mean(), list(model.parameters()))
    theirs = torch.autograd.grad(plain(batch(9)).square().mean(), list(plain.parameters()))
    assert all(map(torch.equal, ours, theirs))
    assert same(snapshot(model, belay), before)

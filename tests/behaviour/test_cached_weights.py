"""What torch computes from the weights and uses again: autocast's copies in 16 bits, and cached parametrizations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torchbelay as tb
from helpers.small import EMA, attached, batch, mlp, same, train, values


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> nn.Module:
    model = mlp()
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", Doubled())
    return model


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


CACHES = {"autocast": (autocast, mlp), "parametrize.cached": (parametrize.cached, parametrized)}
every_cache = pytest.mark.parametrize(("caching", "make"), CACHES.values(), ids=CACHES)


def outputs(caching: Any, model: nn.Module) -> Tensor:
    """What the model computes, in a block of its own."""
    with caching():
        return model(batch(0)).detach()


@every_cache
def test_the_cache_is_one_indeed(caching: Any, make: Any) -> None:
    """Weights that are written within a block are not seen: this is what the tests below would see."""
    model = make()
    with caching():
        before = model(batch(0))
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 2:
                    p.mul_(1.5)
        assert torch.equal(model(batch(0)), before)


@every_cache
def test_weights_average_and_weights_again_are_each_computed_with_within_one_block(caching: Any, make: Any) -> None:
    model, optimizer, belay = attached(EMA, model=make())
    train(model, optimizer, 5)
    raw = outputs(caching, model)
    with belay.averaged():
        averaged = outputs(caching, model)
    assert not torch.equal(raw, averaged)
    with caching():
        assert torch.equal(model(batch(0)), raw)
        for _ in range(2):
            with belay.averaged():
                assert torch.equal(model(batch(0)), averaged)
                with belay.averaged():
                    assert torch.equal(model(batch(0)), averaged)
                assert torch.equal(model(batch(0)), averaged)
            assert torch.equal(model(batch(0)), raw)
        belay.copy_to_model()
        assert torch.equal(model(batch(0)), averaged)


@every_cache
def test_a_student_learns_from_the_average_and_not_as_the_average(caching: Any, make: Any) -> None:
    """Teacher, then student, in one block; the gradients are those of the weights."""

    def learn(model: nn.Module, belay: tb.Belay, optimizer: Any, *, apart: bool) -> None:
        optimizer.zero_grad()
        with caching():
            with torch.no_grad(), belay.averaged():
                target = model(batch(1))
            if not apart:
                loss = (model(batch(0)) - target).float().square().mean()
        if apart:
            with caching():
                loss = (model(batch(0)) - target).float().square().mean()
        loss.backward()
        optimizer.step()

    found = []
    for apart in (True, False):
        model, optimizer, belay = attached(EMA, model=make())
        train(model, optimizer, 5)
        for _ in range(3):
            learn(model, belay, optimizer, apart=apart)
        found.append(values(model))
    assert same(*found)


def test_a_graph_that_autocast_has_recorded_keeps_its_gradients() -> None:
    """The copies that a graph holds stay; only the cache forgets them."""
    found = []
    for swapped in (False, True):
        model, optimizer, belay = attached(EMA)
        train(model, optimizer, 5)
        optimizer.zero_grad()
        with autocast():
            loss = model(batch(0)).float().square().mean()
            torch.clear_autocast_cache()  # else both terms are summed in 16 bits, in the copy that they share
            if swapped:
                with belay.averaged():
                    model(batch(1))
            loss = loss + model(batch(2)).float().square().mean()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))

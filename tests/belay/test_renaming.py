"""A mask or parametrization that is taken away is not applied to the average any more, and that is said."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import torchbelay as tb
from helpers.small import EMA, attached, batch, mlp, train
from torchbelay.belay.departures import EVERY


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w

    def right_inverse(self, w: Tensor) -> Tensor:
        return w / 2


def pruned() -> tuple[nn.Module, Any, tb.Belay, Tensor]:
    """Return a trained run whose first weight is pruned, and what its average computes."""
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model, optimizer, belay = attached(EMA, model=model)
    train(model, optimizer, 5)
    with torch.no_grad(), belay.averaged():
        return model, optimizer, belay, model(batch(0))


REMOVED = (
    r"parameter '0\.weight_orig' is '0\.weight' now.*Save the average before prune\.remove\(\).*reset\(\).*"
    r"prune\.custom_from_mask\(module, 'weight', module\.weight != 0\)"
)


@pytest.mark.parametrize("use", ["average_state_dict", "averaged", "state_dict", "copy_to_model"])
def test_a_mask_that_is_removed_before_the_average_is_used_is_told_of_once(use: str) -> None:
    model, _, belay, _ = pruned()
    prune.remove(model[0], "weight")
    with pytest.warns(tb.BelayWarning, match=REMOVED):
        belay.averaged().__enter__() if use == "averaged" else getattr(belay, use)()


def test_the_mask_may_be_put_back() -> None:
    model, _, belay, computed = pruned()
    prune.remove(model[0], "weight")
    with pytest.warns(tb.BelayWarning, match=REMOVED):
        exported = belay.average_state_dict()
    assert (exported["0.weight"] == 0).sum() == 0
    prune.custom_from_mask(model[0], "weight", model[0].weight != 0)
    with torch.no_grad(), belay.averaged():
        assert torch.equal(model(batch(0)), computed)


def test_an_average_may_begin_again_at_what_is_left_without_a_warning() -> None:
    model, _, belay, _ = pruned()
    prune.remove(model[0], "weight")
    belay.reset()
    exported = belay.average_state_dict()
    assert torch.equal(exported["0.weight"], model[0].weight)
    assert (exported["0.weight"] == 0).sum() == 8  # of 15


def test_a_training_that_goes_on_without_the_mask_is_told_at_one_of_the_next_steps() -> None:
    model, optimizer, _, _ = pruned()
    prune.remove(model[0], "weight")
    with pytest.warns(tb.BelayWarning, match=REMOVED) as caught:
        train(model, optimizer, EVERY, first=5)
    assert len(caught) == 1


def test_a_mask_that_comes_later_is_applied_to_the_average() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    average = belay.average_state_dict()["0.weight"]
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    with torch.no_grad(), belay.averaged():
        model(batch(0))
        assert torch.equal(model[0].weight, average * model[0].weight_mask)
    train(model, optimizer, 2 * EVERY, first=3)


@pytest.mark.parametrize("kept", [False, True])
def test_a_parametrization_that_is_removed(kept: bool) -> None:
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Double())
    model, optimizer, belay = attached(EMA, model=model)
    train(model, optimizer, 5)
    average = belay.average_state_dict()["0.parametrizations.weight.original"]
    with torch.no_grad(), belay.averaged():
        computed = model(batch(0))
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=kept)
    if not kept:  # warnings are errors
        assert torch.equal(belay.average_state_dict()["0.weight"], average)
        return
    said = r"'0\.parametrizations\.weight\.original' is '0\.weight' now.*remove_parametrizations\(\).*nothing to do"
    with pytest.warns(tb.BelayWarning, match=said):
        exported = belay.average_state_dict()
    assert torch.equal(exported["0.weight"], average)
    parametrize.register_parametrization(model[0], "weight", Double())
    with torch.no_grad(), belay.averaged():
        assert torch.equal(model(batch(0)), computed)


class Turned(nn.Module):
    """A parametrization that returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def test_a_parametrization_that_is_a_view_of_the_weight_is_told_of_when_it_is_removed() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    parametrize.register_parametrization(model[0], "weight", Turned())
    model, optimizer, belay = attached(EMA, model=model)
    train(model, optimizer, 3)
    belay.average_state_dict()
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=True)
    with pytest.warns(tb.BelayWarning, match=r"'0\.parametrizations\.weight\.original' is '0\.weight' now"):
        belay.average_state_dict()


def test_a_training_that_goes_on_with_the_unparametrized_weight_is_not_warned() -> None:
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Double())
    model, optimizer, _ = attached(EMA, model=model)
    train(model, optimizer, 5)
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    train(model, optimizer, 2 * EVERY, first=5)


@pytest.mark.parametrize("run", range(10))
def test_memory_that_is_used_again_does_not_hide_that_a_mask_is_gone(run: int) -> None:
    """An address that was freed is often given to what is made next."""
    model = nn.Sequential(nn.Linear(64, 64))
    prune.l1_unstructured(model[0], "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    belay.average_state_dict()
    for p in model.parameters():
        p.data = p.data.clone()
    prune.remove(model[0], "weight")
    with pytest.warns(tb.BelayWarning, match="the mask that"):
        belay.average_state_dict()


def test_a_parametrization_that_was_removed_before_anybody_looked_is_told_of_to_be_safe() -> None:
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Double())
    model, _, belay = attached(EMA, model=model)
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    with pytest.warns(tb.BelayWarning, match="with leave_parametrized=False there is nothing to do"):
        belay.average_state_dict()

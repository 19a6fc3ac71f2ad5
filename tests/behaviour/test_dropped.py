"""A Belay that was dropped without `detach()`: it goes if nobody can read its average, and stays in any other case."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers import seams
from helpers.small import BELAY, EMA, mlp, train
from torchbelay.belay import company
from torchbelay.belay.company import members

WARNED = r"an earlier Belay of this optimizer was dropped without detach\(\), as by a cell that ran again"


def made() -> tuple[nn.Module, Optimizer]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def following(optimizer: Optimizer) -> int:
    """How many Belays move at a step of an optimizer."""
    return sum(
        stepper.optimizer is optimizer and stepper.attached for member in members() for stepper in member.steppers()
    )


def test_a_cell_that_runs_ten_times_leaves_two_averages_at_most() -> None:
    model, optimizer = made()
    found, warned = [], []
    belay = None
    for _ in range(10):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            belay = tb.Belay(model, optimizer, EMA)
        warned.append([str(each.message) for each in caught])
        found.append(following(optimizer))
        train(model, optimizer, 1)
    assert found == [1] + [2] * 9  # while one is made, the variable still holds the one before
    assert [len(each) for each in warned] == [0, 0] + [1] * 8
    assert warned[-1][0].startswith("an earlier Belay of this optimizer was dropped")
    assert belay is not None
    assert belay.step == 1


def test_the_numbers_of_the_last_are_those_of_one_alone() -> None:
    averages = []
    for times in (1, 4):
        model, optimizer = made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(times):
                belay = tb.Belay(model, optimizer, EMA)
        train(model, optimizer, 5)
        averages.append([*belay.average_state_dict().values(), *model.state_dict().values()])
        del belay
    assert all(map(torch.equal, *averages))


@pytest.mark.filterwarnings("error")
def test_detach_before_is_the_cure() -> None:
    model, optimizer = made()
    for _ in range(5):
        belay = tb.Belay(model, optimizer, EMA)
        train(model, optimizer, 1)
        belay.detach()
    assert following(optimizer) == 0


USED: dict[str, Callable[[tb.Belay, Path], object]] = {
    "the Belay": lambda belay, folder: belay,
    "a method of it": lambda belay, folder: belay.stats,
    "a block": lambda belay, folder: belay.averaged(),
    "a module": lambda belay, folder: belay.module(),
    "tensors": lambda belay, folder: belay.tensors(),
    "one tensor": lambda belay, folder: belay.tensors()["0.weight"],
    "a state": lambda belay, folder: belay.state_dict(),
    "a recorder": lambda belay, folder: tb.snapshots.Recorder(belay, folder, every=1),
}


@pytest.mark.parametrize("use", USED)
@pytest.mark.filterwarnings("error")
def test_whoever_has_something_of_the_average_keeps_it(use: str, tmp_path: Path) -> None:
    model, optimizer = made()
    held: Any = USED[use](tb.Belay(model, optimizer, EMA), tmp_path)
    others = [tb.Belay(model, optimizer, EMA) for _ in range(2)]
    assert following(optimizer) == 3
    if use == "a module":
        train(model, optimizer, 3)
        expected = others[0].average_state_dict()
        assert all(torch.equal(expected[name], tensor) for name, tensor in held.state_dict().items())
    if use == "a block":
        with held:
            pass
    if use == "a recorder":
        held.close()


def test_a_module_of_several_optimizers_in_another_dtype_keeps_its_average() -> None:
    """It has memory of its own, and follows an average of all parts together."""
    model = mlp()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    held = tb.Belay(model, optimizers, EMA, dtype=torch.float64).module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = tb.Belay(model, optimizers, EMA, dtype=torch.float64)
    assert following(optimizers[0]) == 2
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(held.state_dict()[name], t) for name, t in other.average_state_dict().items())


OPTIONS: dict[str, dict[str, Any]] = {
    "it pulls": {"method": BELAY},
    "the optimizer's state has it": {"method": EMA, "save_with_optimizer": True},
}


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.filterwarnings("error")
def test_one_that_does_something_without_its_user_stays(how: str) -> None:
    model, optimizer = made()
    tb.Belay(model, optimizer, **OPTIONS[how])
    others = [tb.Belay(model, optimizer, EMA) for _ in range(2)]
    assert following(optimizer) == 3
    train(model, optimizer, 2)
    assert [each.step for each in others] == [2, 2]


@pytest.mark.filterwarnings("error")
def test_one_whose_step_was_captured_stays_because_a_graph_would_write_to_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = made()
    tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 1)
    with monkeypatch.context() as patch:
        seams.set_capturing(patch)
        train(model, optimizer, 1)
    tb.Belay(model, optimizer, EMA)
    assert following(optimizer) == 2


@pytest.mark.filterwarnings("error")
def test_one_of_another_optimizer_stays() -> None:
    model, optimizer = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, EMA)
    belays = [tb.Belay(model, other, EMA) for _ in range(2)]
    gc.collect()
    assert (following(optimizer), following(other), len(belays)) == (1, 2, 2)


def test_several_optimizers_are_let_go_together() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2]))
    tb.Belay(model, [first, second], EMA)
    assert (following(first), following(second)) == (1, 1)
    with pytest.warns(tb.BelayWarning, match=WARNED):
        belay = tb.Belay(model, [first, second], EMA)
    assert (following(first), following(second), belay.step) == (1, 1, 0)


@pytest.mark.parametrize("options", [{}, {"save_with_optimizer": True}], ids=["alone", "with the optimizer"])
def test_a_warning_that_is_an_error_leaves_nothing_attached(options: dict[str, Any]) -> None:
    model, optimizer = made()
    tb.Belay(model, optimizer, EMA)
    before, hooks = [p.detach().clone() for p in model.parameters()], dict(optimizer._optimizer_state_dict_post_hooks)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.BelayWarning)
        with pytest.raises(tb.BelayWarning, match=WARNED):
            tb.Belay(model, optimizer, BELAY, **options)
    assert following(optimizer) == 0
    assert dict(optimizer._optimizer_state_dict_post_hooks) == hooks
    other = mlp()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    other.load_state_dict(dict(zip(model.state_dict(), before, strict=True)))
    train(model, optimizer, 5)
    train(other, plain, 5)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    tb.Belay(model, optimizer, BELAY, **options)  # nobody is in its way


def test_a_warning_that_is_an_error_leaves_the_one_that_was_to_be_replaced() -> None:
    model, optimizer = made()
    pulling = tb.Belay(model, optimizer, BELAY)
    tb.Belay(model, optimizer, EMA)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.BelayWarning)
        with pytest.raises(tb.BelayWarning, match=WARNED):
            tb.Belay(model, optimizer, BELAY, replace=True)
    train(model, optimizer, 2)
    assert (following(optimizer), pulling.step) == (1, 2)


def test_an_interruption_between_the_hooks_on_the_optimizers_state_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "register_load_state_dict_pre_hook", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tb.Belay(model, optimizer, EMA, save_with_optimizer=True)
    assert not optimizer._optimizer_state_dict_post_hooks
    tb.Belay(model, optimizer, EMA, save_with_optimizer=True)


def test_an_interruption_while_it_is_attached_leaves_nothing_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(company, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tb.Belay(model, optimizers, BELAY)
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in optimizers)
    tb.Belay(model, optimizers, BELAY)

"""Optimizers in the backward: one per parameter, which steps in a hook as soon as its gradient is accumulated."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.methods_under_test import METHODS
from helpers.problems import MLP, different, everything, f32, f64
from helpers.small import BELAY, EMA
from helpers.small import same as deeply_same
from torchbelay import optim

WHERE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
everywhere = pytest.mark.parametrize("device", WHERE)


class InBackward:
    """A model whose parameters are stepped in its backward."""

    def __init__(
        self,
        method: Any,
        kind: Callable[..., Optimizer] = torch.optim.AdamW,
        *,
        device: str = "cpu",
        dtype: torch.dtype = f64,
        **options: Any,
    ) -> None:
        self.model = MLP.model(dtype).to(device)
        self.optimizers = {name: kind([p], lr=0.01) for name, p in self.model.named_parameters()}
        self.belay = tb.Belay(self.model, self.optimizers.values(), method, **options)
        self.paused = False  # gradients are accumulated, and nothing steps
        self.threads: set[int] = set()
        for name, p in self.model.named_parameters():
            p.register_post_accumulate_grad_hook(self._stepping(self.optimizers[name]))

    def _stepping(self, optimizer: Optimizer) -> Callable[[Tensor], None]:
        def step(_: Tensor) -> None:
            self.threads.add(threading.get_ident())
            if not self.paused:
                optimizer.step()
                optimizer.zero_grad()

        return step

    def train(self, steps: range) -> None:
        for step in steps:
            MLP.loss(self.model, step).backward()


def plain(method: Any, *, device: str = "cpu", dtype: torch.dtype = f64, **options: Any) -> tuple[Any, Any, tb.Belay]:
    model = MLP.model(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, tb.Belay(model, optimizer, method, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        MLP.loss(model, step).backward()
        optimizer.step()


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-12, atol=1e-14) for name in one
    )


@everywhere
@pytest.mark.parametrize("how", METHODS)
def test_training_and_average_are_those_of_one_optimizer_after_the_backward(how: str, device: str) -> None:
    run = InBackward(METHODS[how](), device=device)
    model, optimizer, belay = plain(METHODS[how](), device=device)
    run.train(range(6))
    train(model, optimizer, range(6))
    assert run.belay.step == belay.step == 6
    assert close(dict(run.model.state_dict()), dict(model.state_dict()))
    assert close(dict(run.belay.average_state_dict()), dict(belay.average_state_dict()))
    assert run.belay.state_dict()["averages"]["average"]["ages"] == dict.fromkeys(run.optimizers, 6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on the host the backward runs in the main thread")
def test_on_a_gpu_the_steps_are_taken_in_a_thread_of_autograd() -> None:
    run = InBackward(BELAY, device="cuda")
    run.train(range(2))
    assert run.threads
    assert threading.get_ident() not in run.threads


def test_steps_in_another_thread_are_steps() -> None:
    """As autograd's threads take them, for weights on a GPU."""
    run, other = InBackward(BELAY), InBackward(BELAY)
    for step in range(3):
        run.train(range(step, step + 1))
        worker = threading.Thread(target=other.train, args=(range(step, step + 1),))
        worker.start()
        worker.join()
    assert threading.get_ident() in run.threads
    assert threading.get_ident() not in other.threads
    assert deeply_same(run.belay.state_dict(), other.belay.state_dict())


def test_a_swap_in_the_main_thread_refuses_steps_in_others() -> None:
    run = InBackward(BELAY)
    caught: list[Exception] = []

    def backward() -> None:
        try:
            run.train(range(1))
        except RuntimeError as error:
            caught.append(error)

    with run.belay.averaged():
        worker = threading.Thread(target=backward)
        worker.start()
        worker.join()
    assert "an optimizer step inside averaged" in str(caught[0])


@everywhere
@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.SGD])
def test_other_optimizers_do_too(kind: Any, device: str) -> None:
    run = InBackward(BELAY, kind, device=device, dtype=f32)
    run.train(range(3))
    assert run.belay.step == 3
    before = dict(run.model.state_dict())
    assert not any(torch.equal(before[name], t) for name, t in run.belay.average_state_dict().items())


def test_optimizers_that_torch_applies_in_the_backward_are_followed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which this module of torch uses
        from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
    model, (other, optimizer, alone) = MLP.model(f64), plain(EMA)
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.01})
    belay = tb.Belay(model, _get_in_backward_optimizers(model), EMA)
    for step in range(4):
        MLP.loss(model, step).backward()
    train(other, optimizer, range(4))
    assert belay.step == 4
    assert close(dict(belay.average_state_dict()), dict(alone.average_state_dict()))


def test_gradients_that_are_accumulated_over_several_backwards_are_one_step() -> None:
    run = InBackward(EMA)
    model, optimizer, belay = plain(EMA)
    for step in range(0, 6, 3):
        optimizer.zero_grad()
        for part in range(3):
            run.paused = part < 2
            MLP.loss(run.model, step + part).backward()
            MLP.loss(model, step + part).backward()
        optimizer.step()
    assert run.belay.step == belay.step == 2
    assert close(dict(run.belay.average_state_dict()), dict(belay.average_state_dict()))


def test_a_graph_that_is_kept_for_a_second_backward_steps_twice() -> None:
    run = InBackward(EMA)
    loss = run.model(torch.ones(2, 3, dtype=f64)).sum()
    bias = run.model.inner.bias  # which the second backward does not need
    loss.backward(retain_graph=True, inputs=[bias])
    loss.backward(inputs=[bias])
    ages = run.belay.state_dict()["averages"]["average"]["ages"]
    assert ages == {name: 2 * (name == "inner.bias") for name in run.optimizers}
    assert run.belay.step == 2


def test_a_parameter_without_a_gradient_keeps_its_count() -> None:
    run = InBackward(tb.methods.swa())
    run.train(range(2))
    run.model.gain.requires_grad_(False)
    run.train(range(2, 5))
    ages = run.belay.state_dict()["averages"]["average"]["ages"]
    assert ages.pop("gain") == 2
    assert set(ages.values()) == {5}
    assert run.belay.step == 5


@everywhere
def test_a_backward_inside_averaged_is_refused_before_any_weight_moves(device: str) -> None:
    run = InBackward(BELAY, device=device)
    run.train(range(2))
    before = everything(model=run.model, belay=run.belay)
    with run.belay.averaged():
        inside = everything(model=run.model)
        with pytest.raises(RuntimeError, match="an optimizer step inside averaged"):
            MLP.loss(run.model, 2).backward()
        assert different(everything(model=run.model), inside) == []
    assert different(everything(model=run.model, belay=run.belay), before) == []
    run.model.zero_grad()
    run.train(range(2, 3))
    assert run.belay.step == 3


def test_a_backward_that_raises_half_way_leaves_each_average_with_its_own_weights() -> None:
    run = InBackward(EMA)
    run.train(range(2))

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = run.model.inner.weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run.train(range(2, 3))
    handle.remove()
    ages = run.belay.state_dict()["averages"]["average"]["ages"]
    assert ages["inner.weight"] == 2
    assert ages["outer.weight"] == 3
    run.model.zero_grad()
    run.train(range(3, 4))
    assert run.belay.state_dict()["averages"]["average"]["ages"]["inner.weight"] == 3


@pytest.mark.parametrize("how", METHODS)
def test_a_run_in_the_backward_is_resumed_bit_for_bit(how: str) -> None:
    run, again = InBackward(METHODS[how]()), InBackward(METHODS[how]())
    run.train(range(3))
    again.model.load_state_dict(run.model.state_dict())
    again.belay.load_state_dict(copy.deepcopy(run.belay.state_dict()))
    for name, optimizer in again.optimizers.items():
        optimizer.load_state_dict(copy.deepcopy(run.optimizers[name].state_dict()))
    for each in (run, again):
        each.train(range(3, 6))
    ours, theirs = (each.belay.state_dict() for each in (run, again))
    assert deeply_same(ours, theirs)


def test_a_checkpoint_goes_on_with_one_optimizer_after_the_backward() -> None:
    run = InBackward(BELAY)
    run.train(range(4))
    model, optimizer, belay = plain(BELAY)
    model.load_state_dict(run.model.state_dict())
    belay.load_state_dict(run.belay.state_dict())
    assert belay.step == 4
    train(model, optimizer, range(4, 5))
    assert belay.step == 5

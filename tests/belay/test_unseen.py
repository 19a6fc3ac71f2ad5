"""Using an average that never moved although the weights did: Belay warns, once, with the cure."""

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, attached, batch, mlp, same, train, values

UNSEEN = "the weights have changed, but no step was seen"


class Sam(torch.optim.Optimizer):
    """SAM as its public code has it: two half steps, and an optimizer inside."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def patched_step(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def own(self: torch.optim.Optimizer) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)

    optimizer.step = types.MethodType(own, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(model, number).backward()
        optimizer.step()

    return optimizer, step


def sam(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1)

    def step(number: int) -> None:
        for half in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss(model, number).backward()
            half()

    return optimizer, step


def no_optimizer_yet(model: nn.Module) -> tuple[None, Callable[[int], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return None, lambda number: train(model, optimizer, 1, first=number)


def replaced_data(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(model, number).backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad

    return optimizer, step


UNHOOKED = {f.__name__: f for f in (patched_step, sam, no_optimizer_yet, replaced_data)}
USES: dict[str, Callable[[tb.Belay, Path], Any]] = {
    "averaged": lambda belay, _: belay.averaged().__enter__(),
    "average_state_dict": lambda belay, _: belay.average_state_dict(),
    "save_average": lambda belay, folder: belay.save_average(folder / "average"),
    "copy_to_model": lambda belay, _: belay.copy_to_model(),
    "state_dict": lambda belay, _: belay.state_dict(),
    "stats": lambda belay, _: belay.stats(),
}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("make", UNHOOKED.values(), ids=UNHOOKED)
def test_an_average_that_never_moved_warns_when_it_is_used(tmp_path: Path, make: Any, use: Any) -> None:
    model = mlp()
    optimizer, step = make(model)
    belay = tb.Belay(model, optimizer, EMA)
    with quiet():
        use(tb.Belay(mlp(), None, EMA), tmp_path)  # weights that are as they were
        step(0)
    cure = r"optimizer=None: call before_step\(\)" if optimizer is None else r"give Belay the optimizer whose own step"
    with pytest.warns(tb.BelayWarning, match=rf"{UNSEEN}.*{cure}.*call reset\(\)") as caught:
        use(belay, tmp_path)
    assert len(caught) == 1


@pytest.mark.parametrize("options", [{"start": 5}, {"every": 3}, {"dtype": torch.bfloat16}], ids=str)
def test_it_warns_once_whatever_the_options(options: Any) -> None:
    model = mlp()
    optimizer, step = patched_step(model)
    belay = tb.Belay(model, optimizer, EMA, **options)
    step(0)
    with pytest.warns(tb.BelayWarning, match=UNSEEN):
        belay.state_dict()
    with quiet():
        step(1)
        belay.average_state_dict()


def test_the_cures_work() -> None:
    model = mlp()
    optimizer, step = sam(model)
    belay = tb.Belay(model, optimizer.base_optimizer, BELAY)
    other = mlp()
    reference = tb.Belay(other, None, BELAY)
    other_optimizer, other_step = sam(other)
    inner = other_optimizer.base_optimizer.step

    def by_hand() -> None:
        reference.before_step()
        inner()
        reference.after_step()

    other_optimizer.base_optimizer.step = by_hand
    with quiet():
        for number in range(3):
            step(number)
            other_step(number)
        assert same(dict(belay.average_state_dict()), dict(reference.average_state_dict()))
    assert belay.step == reference.step == 3
    assert not same(dict(belay.average_state_dict()), values(model))


def test_steps_by_hand_that_never_end_are_not_seen() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, None, EMA)
    for number in range(3):
        belay.before_step()
        train(model, optimizer, 1, first=number)
    with pytest.warns(tb.BelayWarning, match=UNSEEN):
        belay.average_state_dict()


@pytest.mark.parametrize("by_hand", [False, True])
def test_weights_loaded_after_construction_and_trained_at_once_warn_once(by_hand: bool) -> None:
    def made() -> tuple[nn.Sequential, torch.optim.Optimizer, tb.Belay]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, tb.Belay(model, None if by_hand else optimizer, EMA)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, belay: tb.Belay) -> None:
        if by_hand:
            belay.before_step()
        train(model, optimizer, 1)
        if by_hand:
            belay.after_step()

    model, optimizer, belay = made()
    model.load_state_dict(mlp(seed=1).state_dict())
    with pytest.warns(tb.BelayWarning, match=r"before the first step.*call reset\(\)"):
        step(model, optimizer, belay)
    step(model, optimizer, belay)
    belay.average_state_dict()
    for cure in ("reset", "load_state_dict"):
        model, optimizer, belay = made()
        state = belay.state_dict()
        if cure == "load_state_dict":
            belay.load_state_dict(state)
        model.load_state_dict(mlp(seed=1).state_dict())
        if cure == "reset":
            belay.reset()
        step(model, optimizer, belay)  # no warning, which would be an error


def test_weights_that_change_before_averages_begin_or_by_rounding_are_no_reason_to_warn() -> None:
    model, optimizer, belay = attached(EMA, start=1)
    model.load_state_dict(mlp(seed=1).state_dict())
    train(model, optimizer, 2)
    model, optimizer, belay = attached(EMA)
    model.bfloat16().float()
    train(model, optimizer, 1)
    model, optimizer, belay = attached(EMA)
    with torch.no_grad():  # as SAM does
        for p in model.parameters():
            p.add_(0.3).sub_(0.3)
    train(model, optimizer, 1)
    model = mlp()
    belay = tb.Belay(model, None, EMA)
    model.load_state_dict(mlp(seed=1).state_dict())
    belay.update()  # follows whatever the weights are
    assert belay.step == 1


def test_weights_loaded_after_construction_warn_until_reset() -> None:
    model, _, belay = attached(EMA)
    model.load_state_dict(mlp(seed=1).state_dict())
    with pytest.warns(tb.BelayWarning, match=r"If you loaded weights into the model, call reset\(\)"):
        belay.average_state_dict()
    model, _, belay = attached(EMA)
    model.load_state_dict(mlp(seed=1).state_dict())
    with quiet():
        belay.reset()
        assert same(dict(belay.average_state_dict()), values(model))


@pytest.mark.parametrize("order", [("belay", "model"), ("model", "belay")], ids=" then ".join)
def test_a_checkpoint_may_be_loaded_in_any_order_and_evaluated(order: tuple[str, str]) -> None:
    model, optimizer, belay = attached(BELAY)
    train(model, optimizer, 3)
    saved = copy.deepcopy({"model": model.state_dict(), "belay": belay.state_dict()})
    average = dict(belay.average_state_dict())
    other = mlp(seed=1)
    new = tb.Belay(other, torch.optim.AdamW(other.parameters()), BELAY)
    with quiet():
        for part in order:
            {"model": other, "belay": new}[part].load_state_dict(saved[part])
        for _ in range(2):
            with new.averaged():
                assert same(values(other), average)
            assert same(values(other), dict(saved["model"]))
        new.copy_to_model()
        assert same(dict(new.average_state_dict()), average)


def test_after_a_checkpoint_weights_that_change_between_two_uses_warn() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    other = mlp()
    unhooked, step = patched_step(other)
    new = tb.Belay(other, unhooked, EMA)
    with quiet():
        new.load_state_dict(belay.state_dict())
        other.load_state_dict(model.state_dict())
        new.average_state_dict()
        step(0)
    with pytest.warns(tb.BelayWarning, match=UNSEEN):
        new.average_state_dict()


class Frozen:
    """A method that leaves the average where it is."""

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, 0.0, 1.0, 0.0)


STILL: dict[str, Any] = {
    "a method that waits": {"method": Frozen()},
    "a long rhythm": {"method": EMA, "every": 100},
    "a late start": {"method": EMA, "start": 100},
    "a tether": {"method": tb.Spring(k=1.0, m1=10.0, m2=float("inf"))},
}


@pytest.mark.parametrize("setting", STILL.values(), ids=STILL)
def test_an_average_that_stays_because_its_method_says_so_does_not_warn(setting: dict[str, Any]) -> None:
    model, optimizer, belay = attached(**setting)
    with quiet():
        train(model, optimizer, 3)
        belay.average_state_dict()
        belay.state_dict()


def test_the_first_step_is_seen_while_another_thread_takes_it() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ThreadPoolExecutor(1) as pool:
        optimizer.register_step_post_hook(lambda *_: asked.append(pool.submit(belay.stats).result()))  # in its middle
        belay, asked = tb.Belay(model, optimizer, EMA), list[Any]()
        with quiet():
            train(model, optimizer, 2)
    assert [each["step"] for each in asked] == [0, 1]


def test_a_step_that_left_bad_weights_was_seen() -> None:
    model, optimizer, belay = attached(EMA, on_nonfinite="skip")
    model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
    with quiet():
        optimizer.step()
        belay.average_state_dict()
    assert belay.step == 0


@pytest.mark.parametrize("convert", [lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to("cpu")])
def test_a_model_that_was_converted_has_the_weights_that_it_had(convert: Any) -> None:
    model, _, belay = attached(EMA)
    convert(model)
    with quiet():
        belay.average_state_dict()


def test_nan_is_no_change_and_neither_is_use_after_detach() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias.fill_(torch.nan)
    optimizer, step = patched_step(model)
    belay = tb.Belay(model, optimizer, EMA)
    with quiet():
        belay.average_state_dict()
        belay.detach()
        step(0)
        belay.average_state_dict()


def test_a_first_step_that_is_still_under_way_is_seen() -> None:
    """A hook of the user's own, or the closure of LBFGS, may use the average when the weights have moved."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer.register_step_post_hook(lambda *_: belay.average_state_dict() and None)
    belay = tb.Belay(model, optimizer, EMA)
    started = belay.average_state_dict()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(1)).square().mean()
        loss.backward()
        assert same(belay.average_state_dict(), started)
        return loss

    optimizer.step(closure)
    assert belay.step == 1


def test_what_steps_by_hand_is_called_so() -> None:
    assert "steps by hand" in repr(tb.Belay(mlp(), None, EMA))
    assert "by hand" not in repr(attached(EMA)[2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.uint16])
def test_the_optimizer_may_hold_what_cannot_be_computed_with(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("k", nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, _: None if name == "k" else tb.methods.ema(0.9))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert belay.step == 1

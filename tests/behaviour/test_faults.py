"""What goes wrong around a training: steps and hooks that raise, weights on the meta device, use after detach()."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, attached, mlp, same, snapshot, train, values

LAGGED = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)
METHODS = {
    "belay": BELAY,
    "ema": EMA,
    "lagged": LAGGED,
    "swinging": SWINGING,
    "lookahead": tb.methods.lookahead(k=2),
    "heavy ball": tb.methods.heavy_ball(0.9),
    "schedule-free": tb.methods.schedule_free(0.9),
}


def fails(*_: object) -> None:
    raise KeyError("no luck")


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        train(model, optimizer, 1, first=step)


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_that_raised_leaves_no_trace_under_a_schedule(how: str, resumed: bool) -> None:
    """Methods that keep learning rates are asked again; a checkpoint from in between holds no trace of the failure."""
    model, optimizer, belay = attached(METHODS[how])
    scheduled(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 5.0  # it never comes to a step at this rate
    handle = optimizer.register_step_pre_hook(fails)
    before = copy.deepcopy(belay.state_dict())
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    assert same(belay.state_dict(), before)
    if resumed:
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), belay.state_dict()])
        model, optimizer, belay = attached(METHODS[how], model=mlp(seed=1))
        for target, state in zip((model, optimizer, belay), saved, strict=True):
            target.load_state_dict(state)
    scheduled(model, optimizer, range(3, 6))
    other, other_optimizer, other_belay = attached(METHODS[how])
    scheduled(other, other_optimizer, range(6))
    assert same(snapshot(model, belay), snapshot(other, other_belay))


@pytest.mark.parametrize("how", METHODS)
def test_a_step_that_raised_in_the_middle_may_be_taken_again(how: str) -> None:
    """The user repairs what the optimizer had half done; Belay had done nothing."""

    class Stumbling(torch.optim.SGD):
        stumbles = False

        def step(self, closure: Any = None) -> Any:
            if self.stumbles:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].add_(1.0)
                raise ArithmeticError("in the middle")
            return super().step(closure)

    runs = []
    for stumbles in (True, False):
        model = mlp()
        optimizer = Stumbling(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, METHODS[how])
        train(model, optimizer, 3)
        if stumbles:
            good, optimizer.stumbles = values(model), True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.stumbles = False
            model.load_state_dict(good)
        train(model, optimizer, 2, first=3)
        runs.append(snapshot(model, belay))
    assert same(*runs)


def test_an_exception_in_a_hook_of_ours_never_lets_the_weights_move() -> None:
    """What is refused in the middle of training is refused before the optimizer moves anything."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    stranger = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [stranger]})
    before = values(model)
    with pytest.raises(ValueError, match="is not in the model"):
        optimizer.step()
    assert same(values(model), before)
    del optimizer.param_groups[1]
    train(model, optimizer, 1, first=2)
    assert belay.step == 3


META = {
    "all": lambda m: m.to("meta"),
    "one": lambda m: setattr(m[2], "bias", nn.Parameter(torch.empty(1, device="meta"))),
}


@pytest.mark.parametrize("which", META)
def test_weights_on_the_meta_device_are_refused_with_the_cure(which: str) -> None:
    model = mlp()
    META[which](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'.*' is on the meta device; materialise the model \(to_empty"):
        tb.Belay(model, optimizer, EMA)
    assert not optimizer._optimizer_step_pre_hooks
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)  # the cure works
    train(model, optimizer, 2)
    assert belay.step == 2


def test_a_late_parameter_on_the_meta_device_is_refused_before_anything_moves() -> None:
    model, optimizer, _ = attached(EMA)
    train(model, optimizer, 2)
    model.append(nn.Linear(1, 1, device="meta"))
    optimizer.add_param_group({"params": model[3].parameters()})
    before = values(model[:3])
    with pytest.raises(ValueError, match=r"'3.weight' is on the meta device"):
        optimizer.step()
    assert same(values(model[:3]), before)


def test_frozen_weights_on_the_meta_device_are_nobodys_business() -> None:
    model = nn.Sequential(*mlp(), nn.Linear(1, 1, device="meta"))
    belay = tb.Belay(model, torch.optim.SGD(model[:3].parameters(), lr=0.1), EMA)
    assert belay.average_state_dict()["3.weight"].is_meta


class Mixed(nn.Module):
    """Real, complex and integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Parameter(torch.randn(3))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.real[self.index] * self.complex).abs().sum(1, keepdim=True)


@pytest.mark.parametrize("how", METHODS)
def test_complex_and_integer_parameters_train_swap_and_resume(how: str) -> None:
    runs = []
    for _ in range(2):
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        runs.append((model, optimizer, tb.Belay(model, optimizer, METHODS[how], on_nonfinite="skip")))
    (model, optimizer, belay), (other, other_optimizer, other_belay) = runs
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged():
        assert same(values(model), dict(belay.average_state_dict()))
        assert torch.equal(model.index, torch.tensor([2, 0, 1]))
    assert same(snapshot(model, belay), before)
    assert belay.average_state_dict()["complex"].dtype == torch.complex64
    assert not torch.equal(belay.average_state_dict()["complex"], model.complex)
    for target, state in ((other, model), (other_optimizer, optimizer), (other_belay, belay)):
        target.load_state_dict(copy.deepcopy(state.state_dict()))
    train(model, optimizer, 2, first=3)
    train(other, other_optimizer, 2, first=3)
    assert same(snapshot(other, other_belay), snapshot(model, belay))


def test_after_detach_everything_but_the_steps_still_works() -> None:
    model, optimizer, belay = attached(BELAY, spectators={"short": EMA})
    train(model, optimizer, 3)
    state = copy.deepcopy(belay.state_dict())
    belay.detach()
    train(model, optimizer, 2, first=3)
    assert same(belay.state_dict(), state)
    assert belay.step == 3
    belay.load_state_dict(state)
    with belay.averaged("short"):
        assert same(values(model), dict(belay.average_state_dict("short")))
    assert "step 3" in repr(belay)
    assert belay.stats()["step"] == 3
    belay.copy_to_model()
    assert same(values(model), dict(belay.average_state_dict()))
    belay.reset()
    again = tb.Belay(model, optimizer, BELAY)
    train(model, optimizer, 1)
    assert (again.step, belay.step) == (1, 3)


def test_steps_by_hand_after_detach_are_refused() -> None:
    belay = tb.Belay(mlp(), None, EMA)
    belay.detach()
    for call in (belay.before_step, belay.after_step):
        with pytest.raises(RuntimeError, match=r"after detach\(\): .* make a new one"):
            call()


def test_weights_loaded_into_the_model_are_the_average_after_reset() -> None:
    model, optimizer, belay = attached(SWINGING, spectators={"short": EMA})
    train(model, optimizer, 3)
    model.load_state_dict(mlp(seed=7).state_dict())
    belay.reset()
    for name in ("average", "short"):
        assert same(dict(belay.average_state_dict(name)), values(mlp(seed=7)))
    train(model, optimizer, 1)
    assert belay.state_dict()["averages"]["average"]["ages"]["0.weight"] == 1
    assert belay.step == 4

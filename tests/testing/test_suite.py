"""The contract suite notices every broken promise, and names mistakes in its arguments."""

import inspect
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, batch, mlp
from torchbelay import Belay, testing
from torchbelay.belay import checkpoint
from torchbelay.belay.averages import Averages
from torchbelay.belay.company import Member
from torchbelay.belay.hooks import StepHooks
from torchbelay.belay.stepper import Stepper
from torchbelay.belay.swap import Swap
from torchbelay.ops import arithmetic
from torchbelay.ops.trade import ListTrade
from torchbelay.testing import CONTRACTS, ContractError, Report, check

LAGGED = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def examine(model: Callable[[], nn.Module] = mlp, optimizer: Any = adamw, **more: Any) -> Report:
    return check(model, optimizer, **{"batch": batch, "steps": 4} | more)


def test_the_names_of_the_suite_are_those_of_the_package() -> None:
    """`check` and `identify` are functions, although the package has many modules."""
    assert testing.__all__ == ["CONTRACTS", "ContractError", "Identification", "Report", "check", "identify"]
    assert inspect.isfunction(testing.check)
    assert inspect.isfunction(testing.identify)
    assert issubclass(testing.ContractError, AssertionError)
    assert (tb.Spring(k=1.0, m1=10.0, m2=20.0), tb.Spring.ema(decay=0.9)) == (testing.DEFAULT, testing.WATCHING)
    model, x = mlp(), batch(0)
    assert torch.equal(testing.mean_square(model, x), model(x).square().mean())


def test_a_correct_library_passes_and_the_report_names_every_contract() -> None:
    report = examine()
    assert report == Report(tuple(CONTRACTS), {})
    assert str(report).splitlines() == [f"  ok  {name}" for name in CONTRACTS]


# Sabotage: each function breaks one promise, and the suite must notice.


def pull_too_much(patch: pytest.MonkeyPatch) -> None:
    right = arithmetic.couple_

    def wrong(w1: Any, w2: Any, copy: Any, numbers: Any, *more: Any, **others: Any) -> None:
        a, b, p, q = numbers
        right(w1, w2, copy, (a * 1.001, b, p, q), *more, **others)

    patch.setattr(arithmetic, "couple_", wrong)


def follow_too_little(patch: pytest.MonkeyPatch) -> None:
    right = arithmetic.pull_together_
    patch.setattr(
        arithmetic, "pull_together_", lambda w1, w2, pull, follow, keep: right(w1, w2, pull, follow * 0.999, keep)
    )


def average_one_less(patch: pytest.MonkeyPatch) -> None:
    right = Averages.wanted
    patch.setattr(Averages, "wanted", lambda *args: {name: found[1:] for name, found in right(*args).items()})


def keep_the_average_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swap, "undo", lambda self: None)


def put_nothing_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ListTrade, "go", lambda self: None)


def let_steps_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "refuse_step", lambda self: None)


def round_what_is_loaded(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint.restore

    def wrong(average: Any, *more: Any) -> None:
        right(average, *more)
        for entry in average.entries.values():
            entry.w2.copy_(entry.w2.bfloat16())

    patch.setattr(checkpoint, "restore", wrong)


def forget_ages(patch: pytest.MonkeyPatch) -> None:
    right = checkpoint.saved

    def wrong(*arguments: Any) -> Any:
        state = right(*arguments)
        return state | {"ages": dict.fromkeys(state["ages"], 0)}

    patch.setattr(checkpoint, "saved", wrong)


def disturb_gradients(patch: pytest.MonkeyPatch) -> None:
    right = Stepper.after

    def wrong(self: Stepper) -> None:
        right(self)
        for group in self.optimizer.param_groups:
            group["params"][0].grad.add_(1e-3)

    patch.setattr(Stepper, "after", wrong)


def export_the_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Belay, "average_state_dict", lambda self: self._model.state_dict())


def export_less(patch: pytest.MonkeyPatch) -> None:
    right = Belay.average_state_dict
    patch.setattr(Belay, "average_state_dict", lambda self: dict(list(right(self).items())[1:]))


def accept_every_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "checked", lambda state, *_: state["averages"])


def move_too_early(patch: pytest.MonkeyPatch) -> None:
    right = Stepper.before

    def wrong(self: Stepper) -> None:
        right(self)
        self._state.work.prepared.finish(None)

    patch.setattr(Stepper, "before", wrong)


def nothing(kind: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(kind, name, lambda self, *_: None)


SABOTAGE: dict[str, tuple[Any, Any, str]] = {
    "pull too much": (pull_too_much, BELAY, "every step is the linear map: w1 of"),
    "follow too little": (follow_too_little, EMA, "every step is the linear map: w2 of"),
    "average one less": (average_one_less, EMA, "'0.weight' is not averaged"),
    "keep the average in": (keep_the_average_in, EMA, "gives every bit back: averaged() changed 'model/0.weight'"),
    "put nothing in": (put_nothing_in, EMA, "inside averaged() '0.weight' is not the average"),
    "let steps through": (
        let_steps_through,
        EMA,
        "a step inside averaged() is refused and changes nothing: a refused step changed",
    ),
    "round what is loaded": (round_what_is_loaded, EMA, "a run that was stopped after 2 steps ends with other values"),
    "forget ages": (forget_ages, tb.methods.swa(), "bit for bit: a run that was stopped"),
    "disturb gradients": (disturb_gradients, EMA, "changed the training: 'gradient/0.weight'"),
    "export the weights": (export_the_weights, EMA, "does not hold the average of '0.weight'"),
    "export less": (export_less, EMA, "does not load into a new model"),
    "accept every state": (accept_every_state, EMA, "a state of another method was loaded"),
    "move too early": (move_too_early, LAGGED, "were repeated end with other values"),
    "copy nothing": (nothing(Belay, "copy_to_model"), EMA, "after copy_to_model() '0.weight' is not the average"),
    "reset nothing": (nothing(Averages, "restart"), EMA, "after reset() the average of '0.weight' is not its weight"),
    "leave the hooks": (nothing(StepHooks, "remove"), EMA, "after detach() the optimizer has other"),
}


@pytest.mark.parametrize(("sabotage", "method", "message"), SABOTAGE.values(), ids=SABOTAGE)
def test_a_broken_promise_is_noticed(monkeypatch: pytest.MonkeyPatch, sabotage: Any, method: Any, message: str) -> None:
    examine(method=method)
    sabotage(monkeypatch)
    with pytest.raises(ContractError, match=re.escape(message)):
        examine(method=method)


def test_an_exception_inside_a_contract_is_reported_and_the_others_are_still_checked(monkeypatch) -> None:
    def gone(self: Belay) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(Belay, "reset", gone)
    monkeypatch.setattr(Belay, "copy_to_model", lambda self: None)
    with pytest.raises(ContractError) as caught:
        examine()
    said = str(caught.value)
    assert said.startswith(f"2 of {len(CONTRACTS)} contracts do not hold:")
    assert "reset() begins again at the weights: raised KeyError: 'gone'" in said
    assert "after copy_to_model()" in said
    assert caught.value.__cause__ is not None


# Models, optimizers and arguments


class Forgetful(nn.Linear):
    """A layer whose output depends on a number outside its state_dict."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale += self.training
        return self.scale * super().forward(x)


def test_state_outside_the_state_dict_is_noticed() -> None:
    with pytest.raises(ContractError, match=r"depends on something that its state_dict\(\) does not hold"):
        examine(Forgetful, method=EMA)


def test_a_training_that_does_not_repeat_itself_is_checked_as_far_as_possible() -> None:
    numbers = itertools.count()
    report = examine(loss=lambda model, x: (model(x) - next(numbers)).square().mean())
    assert set(report.passed) | set(report.skipped) == set(CONTRACTS)
    assert len(report.passed) > 5
    for why in report.skipped.values():
        assert re.search(r"does not repeat itself .* even without Belay .*'model/0.weight'", why)
    assert "  --  every step is the linear map: the training" in str(report)


class Amnesiac(torch.optim.SGD):
    """SGD whose rate falls with a count outside its state."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(self.count)
        return super().step(closure)


def test_an_optimizer_that_does_not_resume_is_named_as_the_reason() -> None:
    report = examine(optimizer=lambda model: Amnesiac(model.parameters(), lr=0.1), method=EMA)
    assert list(report.skipped) == ["a run goes on from a checkpoint bit for bit"]
    assert "does not resume bit for bit, even without Belay" in next(iter(report.skipped.values()))


def sgd(lr: float) -> Any:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr)


SHARED = mlp()
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no closure": (
        {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
        ValueError,
        r"closure=False: LBFGS\.step\(\) cannot be called without a closure; give closure=True",
    ),
    "one model": ({"model": lambda: SHARED}, ValueError, "the same model twice"),
    "no model": ({"model": dict}, TypeError, "returned dict"),
    "one step": ({"steps": 1}, ValueError, "steps=1"),
    "no motion": ({"loss": lambda m, x: 0 * m(x).sum(), "optimizer": sgd(1.0)}, ValueError, "moves nothing"),
    "no optimizer": ({"optimizer": lambda model: None}, AttributeError, "None"),
    "no number": ({"model": lambda: nn.Sequential(mlp(), Argmax())}, ValueError, "with no number to minimise"),
    "divergence": ({"optimizer": sgd(1e30)}, ValueError, "breaks down without"),
}


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax()


@pytest.mark.parametrize(("given", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_the_arguments_is_named(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        examine(**given)


class Many(nn.Linear):
    """A layer that takes two arguments and returns an object with a loss, or a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__(3, 1)
        self.kind = kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = super().forward(x) - y
        return SimpleNamespace(loss=out.square().mean()) if self.kind == "loss" else {"out": [out], "rest": "…"}


@pytest.mark.parametrize("kind", ["loss", "dict"])
@pytest.mark.parametrize("given", [lambda step: (batch(step), batch(step)[:, :1]), {"x": batch(0), "y": batch(1)}])
def test_batches_are_unpacked_and_losses_found(kind: str, given: Any) -> None:
    assert examine(lambda: Many(kind), batch=given).passed == tuple(CONTRACTS)


def test_the_callers_generators_and_filters_are_restored() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    examine(lambda: mlp(torch.bfloat16), batch=lambda step: batch(step, torch.bfloat16))  # outside the suite this warns
    assert torch.equal(torch.rand(3), expected)
    with pytest.warns(tb.BelayWarning):
        Belay(model := mlp(torch.bfloat16), adamw(model), BELAY)

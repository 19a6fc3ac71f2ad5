"""A repelling spring around an optimizer with momentum of its own: Belay warns, with the floor and the cure."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, mlp, train
from torchbelay.physics.inner_momentum import stable_range

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-2), r"AdamW with betas=\(0\.9, …\)"),
    "tb.optim.AdamW": (lambda p: tb.optim.AdamW(p, lr=1e-2), r"AdamW with betas=\(0\.9, …\)"),
    "Adam, tensors": (
        lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False, capturable=False),
        r"Adam with betas=\(0\.9, …\)",
    ),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=1e-2), r"NAdam with betas=\(0\.9, …\)"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "SGD with momentum=0.9"),
    "SGD, nesterov": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True), "SGD with momentum=0.9"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9), "RMSprop with momentum=0.9"),
}
TWICE = {
    "schedule-free": tb.methods.schedule_free(0.9),
    "primal averaging": tb.methods.primal_averaging(mu_x=0.95, mu_y=0.9),
    "centred": tb.methods.centred(-0.9, 0.05),
    "centred, before": tb.methods.centred(-0.9, 0.05, follow="before"),
    "heavy ball": tb.methods.heavy_ball(0.9),
    "nesterov": tb.methods.nesterov(0.9),
    "EMA-Nesterov": tb.methods.ema_nesterov(0.9, 0.5),
    "EMA-Nesterov, faded in": tb.methods.ema_nesterov(tb.schedules.linear(0.0, 0.9, 1000), 0.5),
    "centred, falling": tb.methods.centred(tb.schedules.cosine(0.5, -0.9, 1000), 0.05),
    "centred, ever faster": tb.methods.centred(-0.9, tb.schedules.linear(0.01, 0.5, 1000)),
}
ONCE: dict[str, Any] = {
    "EMA": EMA,
    "BELAY": BELAY,
    "Lookahead": tb.methods.lookahead(),
    "Switch EMA": tb.methods.switch_ema(decay=0.9, every=3),
    "EASGD": tb.methods.easgd(rho=0.1),
    "SWA": tb.methods.swa(),
    "centred, attracting": tb.methods.centred(1.0, 0.05),
    "centred, above the floor": tb.methods.centred(-0.68, 0.05),
    # while θ rises, a step pushes weights and average apart, and still nothing repels
    "centred, rising": tb.methods.centred(tb.schedules.linear(0.0, 2.0, 5), 0.05),
    "centred, falling to above the floor": tb.methods.centred(tb.schedules.linear(0.0, -0.6, 100), 0.05),
    "centred, a function": tb.methods.centred(lambda step: 0.1 * (step % 3), 0.05),
    "hard sync": tb.methods.hard_sync(10),
    "EMA, scheduled": tb.methods.ema(tb.schedules.cosine(0.9, 1.0, 100)),
}


def quiet(make: Callable[[], tb.Belay]) -> tb.Belay:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return make()


@pytest.mark.parametrize("method", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize(("optimizer", "said"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_momentum_twice_warns_with_the_cure(
    optimizer: Callable[[Any], torch.optim.Optimizer], said: str, method: tb.Method
) -> None:
    model = mlp()
    cure = r"(betas=\(0\.0, …\)|momentum=0\.0)"
    with pytest.warns(tb.BelayWarning, match=rf"around {said} is momentum twice: .*Give \w+ {cure}") as caught:
        tb.Belay(model, optimizer(model.parameters()), method)
    assert len(caught) == 1


def test_the_warning_names_theta_its_floor_and_what_is_left_of_the_range() -> None:
    model = mlp()
    floor = tb.physics.theta_floor(0.9, 0.5)
    assert f"{floor:.3g}" == "-0.182"
    with pytest.warns(tb.BelayWarning, match=r"at step 2 its θ = -0\.9, below the floor -0\.182, .* shrinks to 0\.037"):
        tb.Belay(model, torch.optim.AdamW(model.parameters()), tb.methods.schedule_free(0.9))


def test_where_the_range_is_wider_than_the_optimizers_own_the_warning_does_not_say_that_it_shrinks() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.999))
    with pytest.warns(tb.BelayWarning, match=r"learning rates ends at 2\.3 times AdamW's own\. Give AdamW"):
        tb.Belay(model, optimizer, tb.methods.centred(-0.8, 0.3))


def test_the_warning_names_the_step_and_the_theta_of_a_schedule_that_falls_below_the_floor_later() -> None:
    model, theta = mlp(), tb.schedules.linear(0.0, -0.8, 1001)
    assert theta(500) > tb.physics.theta_floor(0.9, 0.05) > theta(1000)
    with pytest.warns(tb.BelayWarning, match=r"at step 1001 its θ = -0\.8, below the floor -0\.69, "):
        tb.Belay(model, torch.optim.AdamW(model.parameters()), tb.methods.centred(theta, 0.05))


def test_the_warning_says_what_theta_below_zero_is() -> None:
    model = mlp()
    said = r"θ < 0 is Generalized Primal Averaging, and schedule-free its case c = 1/t"
    with pytest.warns(tb.BelayWarning, match=said):
        tb.Belay(model, torch.optim.AdamW(model.parameters()), tb.methods.centred(-0.9, 0.05))


@pytest.mark.parametrize("method", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize(("optimizer", "_"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_does_not_repel_below_the_floor_does_not_warn(
    optimizer: Callable[[Any], torch.optim.Optimizer], _: str, method: tb.Method
) -> None:
    model = mlp()
    assert quiet(lambda: tb.Belay(model, optimizer(model.parameters()), method)).step == 0


@pytest.mark.parametrize("method", TWICE.values(), ids=TWICE)
def test_without_momentum_of_the_optimizer_nothing_warns(method: tb.Method) -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, betas=(0.0, 0.999)),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.Adagrad(p),
    ):
        model = mlp()
        optimizer = make(model.parameters())
        assert quiet(lambda model=model, optimizer=optimizer: tb.Belay(model, optimizer, method)).step == 0
    assert quiet(lambda: tb.Belay(mlp(), None, method)).step == 0


def test_each_group_counts_with_its_own_momentum() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "momentum": 0.0}, {"params": model[2].parameters(), "momentum": 0.8}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.warns(tb.BelayWarning, match="momentum=0.8"):
        tb.Belay(model, optimizer, tb.methods.schedule_free(0.9))
    model = mlp()
    groups = [{"params": model[0].parameters(), "momentum": 0.0}, {"params": model[2].parameters(), "momentum": 0.8}]
    rule = lambda name, p: tb.methods.schedule_free(0.9) if name.startswith("0.") else EMA  # noqa: E731
    assert quiet(lambda: tb.Belay(model, torch.optim.SGD(groups, lr=0.1), rule)).step == 0


def test_a_group_with_momentum_that_comes_later_warns_too() -> None:
    model = nn.Sequential(mlp(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    tb.Belay(model, optimizer, tb.methods.schedule_free(0.9))
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": model[1].parameters(), "momentum": 0.9})
    with pytest.warns(tb.BelayWarning) as caught:
        train(model, optimizer, 1)
    assert [True for w in caught if "momentum twice" in str(w.message)] == [True]


def test_the_question_is_not_remembered_by_the_method() -> None:
    """Belay asks for the first steps in advance; a method with a memory still begins its run at the first step."""
    model = mlp(torch.float64)
    method = tb.methods.schedule_free(0.5)
    tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1), method)
    assert method.memory == ()


@pytest.mark.parametrize("rate", [0.8, 1.2], ids=["below the limit", "above the limit"])
def test_a_training_by_torchs_sgd_is_stable_below_the_limit_and_not_above_it(rate: float) -> None:
    method = tb.methods.centred(-0.9, 0.05)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    lr = rate * stable_range(method.coupling(1, 0.1), 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, dampening=0.9)
    with pytest.warns(tb.BelayWarning, match="momentum twice"):
        tb.Belay(model, optimizer, method)
    for _ in range(2000):
        model.weight.grad = model.weight.detach().clone()
        optimizer.step()
    assert abs(model.weight.item()) < 0.1 if rate < 1 else abs(model.weight.item()) > 10

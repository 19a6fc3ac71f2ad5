"""Weights that are moved, cast, laid out anew or replaced, by users between two steps and by optimizers within one.

Every run is compared with the same training on the reference backend and torch's plainest optimizer, which look at no
address and no layout.
"""

import weakref
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.problems import different, everything
from torchbelay import optim

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "ema": tb.Spring.ema(decay=0.9),
    "lagged": tb.Spring(k=0.2, m1=inf, m2=1.0),
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "swa": tb.methods.swa(),
}
every_method = pytest.mark.parametrize("how", METHODS)


class Replacing(Optimizer):
    """SGD that puts new memory in place of the weights, as some optimizers from papers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class Perturbing(Replacing):
    """A step to the side and back, as sharpness-aware optimizers take: the old memory comes back in the end."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        kept = [p.data for p in weights]
        for p in weights:
            p.data = p.data + 0.1 * p.grad
        for p, old in zip(weights, kept, strict=True):
            p.data = old.clone()
        super().step.__wrapped__(self)


class Turning(Replacing):
    """SGD whose new memory is laid out in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                new = p.data - group["lr"] * p.grad
                p.data = new.transpose(0, -1).contiguous().transpose(0, -1) if new.dim() > 1 else new


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "our AdamW": lambda ps: optim.AdamW(ps, lr=0.05),
    "our SGD": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9),
}
PLAIN: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
    "our AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=False),
    "our SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, foreach=False),
}


class Net(nn.Module):
    """A convolution, whose layout may change, square matrices, whose strides alone may, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.point = nn.Conv2d(4, 4, 1)
        self.square = nn.Linear(4, 4)
        self.free = nn.Parameter(torch.randn(5))


def step(net: Net, optimizer: Optimizer, number: int) -> None:
    """Give every weight a gradient that depends on its place, so that scrambled weights show."""
    for i, p in enumerate(net.parameters()):
        drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
        p.grad = torch.zeros_like(p)
        p.grad.copy_(drawn.to(p.device) * (1 + p.detach().float().abs()))
    optimizer.step()


class Run:
    def __init__(self, make: Callable[[Any], Optimizer], how: str, impl: str) -> None:
        self.net = Net().to(WHERE)
        self.optimizer = make(self.net.parameters())
        self.belay = tb.Belay(self.net, self.optimizer, METHODS[how], spectators={"short": METHODS["ema"]}, impl=impl)

    def go(self, event: Callable[[Net], Any]) -> "Run":
        for number in range(2):
            step(self.net, self.optimizer, number)
        repr(self.belay)
        event(self.net)
        for number in range(2, 4):
            step(self.net, self.optimizer, number)
        return self

    def numbers(self) -> dict[str, Tensor]:
        averages = self.belay.state_dict()["averages"]
        found = {f"weights/{name}": p.detach() for name, p in self.net.named_parameters()}
        for average, saved in averages.items():
            for kind in ("weights", "velocities1", "velocities2"):
                found |= {f"{average}/{kind}/{name}": t for name, t in saved[kind].items()}
        return found


def agree(mine: Run, theirs: Run, tolerance: float = 1e-5) -> None:
    x, y = mine.numbers(), theirs.numbers()
    assert x.keys() == y.keys()
    for name in x:
        torch.testing.assert_close(
            x[name].double(), y[name].double(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def turn(net: Net) -> None:
    """Square weights at the same address, with other strides."""
    for p in (net.square.weight, net.point.weight):
        p.data = p.data.transpose(0, 1)


def turn_inside_out(net: Net) -> None:
    for p in net.parameters():
        p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1) if p.dim() > 1 else p.data.flip(0)


def spread_out(net: Net) -> None:
    """Weights with gaps between them in memory."""
    for p in net.parameters():
        wide = torch.zeros(*p.shape, 2, dtype=p.dtype, device=p.device)
        wide[..., 0] = p.data
        p.data = wide[..., 0]


EVENTS: dict[str, Callable[[Net], Any]] = {
    "channels last": lambda net: net.to(memory_format=torch.channels_last),
    "channels last, one layer": lambda net: net.conv.to(memory_format=torch.channels_last),
    "float64": lambda net: net.double(),
    "bfloat16 and back": lambda net: net.bfloat16().float(),
    "one layer in float64": lambda net: net.square.double(),
    "other memory": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
    "other memory, twice": lambda net: [setattr(p, "data", p.data.clone().clone()) for p in net.parameters()],
    "other strides": turn,
    "other memory and strides": turn_inside_out,
    "gaps": spread_out,
}


# torch's AdamW itself refuses float64 weights with float32 state.
CASES = [(o, e) for o in OPTIMIZERS for e in EVENTS if not (o.endswith("AdamW") and "float64" in e)]


@pytest.mark.parametrize(("optimizer", "event"), CASES)
@pytest.mark.parametrize(("impl", "how"), [("foreach", "belay"), ("foreach", "ema"), ("triton", "belay")])
def test_between_two_steps(event: str, impl: str, optimizer: str, how: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    mine = Run(OPTIMIZERS[optimizer], how, impl).go(EVENTS[event])
    theirs = Run(PLAIN[optimizer], how, "reference").go(EVENTS[event])
    agree(mine, theirs)


@pytest.mark.parametrize("kind", [Replacing, Perturbing, Turning])
@pytest.mark.parametrize("impl", ["foreach", "triton"])
@every_method
def test_within_a_step(kind: type[Replacing], impl: str, how: str) -> None:
    if impl == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    mine, theirs = (Run(lambda ps: kind(ps, 0.05), how, i).go(lambda net: None) for i in (impl, "reference"))
    agree(mine, theirs)


def test_after_a_new_layout_the_pass_is_one_again() -> None:
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    run = Run(OPTIMIZERS["our AdamW"], "belay", "triton")
    run.go(EVENTS["channels last"])
    assert "in one pass with the optimizer" in repr(run.belay)
    state = run.optimizer.state[run.net.conv.weight]
    for t in (run.belay.state_dict()["averages"]["average"]["weights"]["conv.weight"], state["exp_avg"]):
        assert t.is_contiguous(memory_format=torch.channels_last)


def test_what_a_step_replaces_is_not_kept_alive() -> None:
    """Weights that were moved away are freed, and not held by what remembers where they were."""
    run = Run(OPTIMIZERS["our AdamW"], "belay", "triton")
    run.go(lambda net: None)
    held = weakref.ref(run.net.square.weight.untyped_storage())
    run.net.square.weight.data = run.net.square.weight.data.clone()
    assert held() is None


def test_the_events_change_something() -> None:
    """A model that is turned computes something else: the comparison would see it."""
    turned, plain = (Run(PLAIN["AdamW"], "ema", "reference").go(e) for e in (EVENTS["other strides"], lambda net: None))
    assert different(everything(model=turned.net), everything(model=plain.net))


# Another shape


@pytest.mark.parametrize("impl", ["foreach", "triton"])
@pytest.mark.parametrize("rows", [2, 6])
def test_a_weight_of_another_shape_is_refused_before_anything_moves(impl: str, rows: int) -> None:
    """A part of the old memory, or more: the same strides, and for a part the same address."""
    run = Run(lambda ps: torch.optim.SGD(ps, lr=0.05), "belay", impl)
    run.go(lambda net: None)
    weight = run.net.square.weight
    weight.data = weight.data[:rows] if rows < 4 else torch.cat([weight.data, weight.data[:2]])
    before = everything(model=run.net, optimizer=run.optimizer)
    for use in (lambda: step(run.net, run.optimizer, 6), run.belay.averaged().__enter__, run.belay.stats):
        with pytest.raises(RuntimeError, match=r"'square.weight' has the shape \(\d, 4\) now.*\(4, 4\).*reset\(\)"):
            use()
    assert different(everything(model=run.net, optimizer=run.optimizer), before) == []
    run.belay.reset()
    step(run.net, run.optimizer, 6)
    assert run.belay.average_state_dict()["square.weight"].shape == (rows, 4)


@pytest.mark.parametrize("method", ["ema", "belay"])
@pytest.mark.parametrize("impl", ["reference", "foreach", "triton"])
def test_a_weight_of_another_shape_with_as_many_elements_is_refused_before_anything_moves(
    impl: str, method: str
) -> None:
    run = Run(lambda ps: torch.optim.SGD(ps, lr=0.05), method, impl)
    run.go(lambda net: None)
    weight = run.net.square.weight
    weight.data, weight.grad = weight.data.reshape(2, 8), torch.ones(2, 8, device=weight.device)
    before = everything(model=run.net, optimizer=run.optimizer)
    with pytest.raises(RuntimeError, match=r"'square.weight' has the shape \(2, 8\) now.*\(4, 4\).*reset\(\)"):
        run.optimizer.step()
    assert different(everything(model=run.net, optimizer=run.optimizer), before) == []
    weight.data, weight.grad = weight.data.reshape(4, 4), None
    step(run.net, run.optimizer, 6)  # nothing was torn

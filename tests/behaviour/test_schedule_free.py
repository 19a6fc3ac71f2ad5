"""What `schedule_free` costs beside the authors' package: some rounding, and AdamW's first moment."""

from typing import Any

import pytest
import torch
from torch import Tensor

import torchbelay as tb

schedulefree = pytest.importorskip("schedulefree", reason="schedule_free is compared with the authors' package")
f32, f64 = torch.float32, torch.float64
CURVATURES = torch.linspace(0.01, 1, 64, dtype=f64)
BETA, LR = 0.9, 0.5


def noise(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(64, generator=generator, dtype=f64)


def trained(package: bool, precision: torch.dtype, seed: int, steps: int, **options: Any) -> Tensor:
    """The average x after these steps on a noisy quadratic; weights and noise are those of the seed."""
    draw = noise(seed)
    w = torch.nn.Parameter(draw().to(f32).to(precision))
    model = torch.nn.ParameterList([w])
    if package:
        optimizer = schedulefree.SGDScheduleFree([w], lr=LR, momentum=BETA)
        optimizer.train()
    else:
        optimizer = torch.optim.SGD([w], lr=LR)
        belay = tb.Belay(model, optimizer, tb.methods.schedule_free(BETA), **options)
    for _ in range(steps):
        w.grad = (CURVATURES * w.detach().to(f64) + 0.1 * draw()).to(precision)
        optimizer.step()
    if package:
        optimizer.eval()
    return (w.detach() if package else belay.average_state_dict()["0"]).to(f64)


def error(package: bool, steps: int, **options: Any) -> float:
    """The mean relative error of a run in float32."""
    found = []
    for seed in range(10):
        exact = trained(True, f64, seed, steps)
        found.append(float((trained(package, f32, seed, steps, **options) - exact).norm() / exact.norm()))
    return sum(found) / len(found)


def test_early_rounding_is_about_ten_times_that_of_the_package() -> None:
    ours, theirs = error(False, 10), error(True, 10)
    assert 3e-8 < theirs < 2e-7
    assert 3e-7 < ours < 1e-6
    assert 3 < ours / theirs < 12
    assert error(False, 300) < 3e-6  # it does not go on growing


def test_a_wider_average_does_not_help_because_it_is_y_that_is_rounded() -> None:
    assert error(False, 10, dtype=f64) > 0.5 * error(False, 10)


def test_in_float64_both_are_the_same() -> None:
    torch.testing.assert_close(trained(False, f64, 0, 100), trained(True, f64, 0, 100), rtol=1e-12, atol=1e-13)


def kept(optimizer: Any, w: Tensor) -> set[str]:
    return {name for name, value in optimizer.state[w].items() if torch.is_tensor(value) and value.shape == w.shape}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, tb.optim.AdamW], ids=["torch", "tb.optim"])
def test_adamw_keeps_its_first_moment_without_momentum_too(kind: Any) -> None:
    w, other = torch.nn.Parameter(torch.ones(64)), torch.nn.Parameter(torch.ones(64))
    optimizer = kind([w], betas=(0.0, 0.99))
    belay = tb.Belay(torch.nn.ParameterList([w]), optimizer, tb.methods.schedule_free(BETA))
    package = schedulefree.AdamWScheduleFree([other])
    package.train()
    for p, each in ((w, optimizer), (other, package)):
        p.grad = torch.ones(64)
        each.step()
    assert kept(optimizer, w) == {"exp_avg", "exp_avg_sq"}
    assert kept(package, other) == {"z", "exp_avg_sq"}
    assert len(belay.state_dict()["averages"]["average"]["weights"]) == 1

"""docs/memory.md: its numbers on the rounding of float32 averages; other files count its bytes."""

import re
from itertools import repeat

import pytest
import torch

import torchbelay as tb
from helpers.root import ROOT

PAGE = " ".join((ROOT / "docs" / "memory.md").read_text(encoding="utf-8").split())
SAID = re.search(
    r"Weights near 1 that made a random walk of (?P<walk>\S+) per step, with a drift of (?P<drift>\S+), had this error "
    r"after (?P<steps>[\d,]+) steps, as a share of ‖w2 − w1‖: about (?P<errors>.+?)\. `dtype=torch\.float64`",
    PAGE,
)


def averages(dtype: torch.dtype | None, weights: torch.nn.Parameter, decays: list[float]) -> tb.Belay:
    method, *others = map(tb.methods.ema, decays)
    spectators = {str(number): other for number, other in enumerate(others)}
    return tb.Belay.from_parameters([weights], None, method, spectators=spectators, dtype=dtype)


def values(belay: tb.Belay) -> list[torch.Tensor]:
    return [torch.cat([t.double() for t in belay.tensors(name).values()]) for name in ("average", "0", "1")]


@pytest.mark.thorough
def test_the_rounding_errors_of_float32_averages_are_those_of_a_simulation() -> None:
    assert SAID is not None
    told = re.findall(r"([\d.]+)% at (?:decay )?([\d.]+)", SAID["errors"])
    decays = [float(decay) for _, decay in told]
    assert decays == [0.999, 0.9999, 0.99999]
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.ones(2000))
    single, double = averages(None, weights, decays), averages(torch.float64, weights, decays)
    for _ in repeat(None, int(SAID["steps"].replace(",", ""))):
        noise = torch.randn(len(weights), generator=generator)
        weights.data += float(SAID["drift"]) + float(SAID["walk"]) * noise
        single.update()
        double.update()
    found = [
        100 * float((rounded - exact).norm() / (exact - weights.detach()).norm())
        for rounded, exact in zip(values(single), values(double), strict=True)
    ]
    # Over 12 seeds errors differ by up to 6%.
    assert found == pytest.approx([float(percent) for percent, _ in told], rel=0.08)

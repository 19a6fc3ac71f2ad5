"""On a GPU the gradient is compiled and captured; the run is that of an ordinary loop, up to rounding."""

from dataclasses import replace

import pytest
import torch

from torchbelay.lab.gpt import training
from torchbelay.lab.gpt.arms import CONSTANT, HALF, Arm
from torchbelay.lab.gpt.corpus import Corpus
from torchbelay.lab.gpt.network import Shape
from torchbelay.lab.gpt.study import QUICK
from torchbelay.lab.gpt.training import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU captures")]
SMALL = replace(
    QUICK, shape=Shape(layers=2, width=64, heads=2, context=32), batch=8, steps=50, warmup=5, windows=16, corpus=0
)


@pytest.mark.parametrize("arm", [CONSTANT, HALF], ids=lambda arm: arm.name)
def test_a_captured_run_is_an_ordinary_one(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "unigram_loss", lambda *_: 10.0)
    text = torch.randint(0, 9, (3, 4000), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    corpus, device = Corpus(text[0], text[1], text[2], packages=3), torch.device("cuda")
    captured, ordinary = (Trainer(SMALL, corpus, device) for _ in range(2))
    ordinary._forward, ordinary._gradient = ordinary._eager, ordinary._pass
    for seed in (1, 2):  # the second run reuses the capture of the first
        one, other = (trainer.run(arm, 1e-2, seed, "tune") for trainer in (captured, ordinary))
        assert one["losses"] == pytest.approx(other["losses"], rel=0.02)
        assert one["train"] == pytest.approx(other["train"], rel=0.02)
    trained = [p.clone() for p in captured.network.parameters()]
    found = captured.trace(arm, 1e-2, seed, SMALL.looks)["curvatures"]
    assert all(curvature is not None for _, curvature in found)
    for p, expected in zip(captured.network.parameters(), trained, strict=True):  # measuring disturbs no replay
        torch.testing.assert_close(p, expected, rtol=0.02, atol=1e-3)

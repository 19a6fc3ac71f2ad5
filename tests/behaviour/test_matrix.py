"""The contract suite that users run, over models × optimizers × precision and over methods."""

import itertools
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchbelay as tb
import torchbelay.optim
from helpers.small import BELAY, EMA, SWINGING
from helpers.zoo import ZOO
from torchbelay.testing import CONTRACTS, Report, check


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def two_groups(model: nn.Module) -> Optimizer:
    """The usual two groups: no weight decay, and another rate, for parameters that are not matrices."""
    matrices, others = ([p for p in trained(model) if (p.ndim > 1) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05)


def schedule_free(model: nn.Module) -> Optimizer:
    """An optimizer of another library, which swaps the weights itself."""
    optimizer = schedulefree.AdamWScheduleFree(trained(model), lr=0.05)
    optimizer.train()
    return optimizer


OPTIMIZERS = {
    "AdamW, two groups": two_groups,
    "AdamW, foreach": lambda model: torch.optim.AdamW(trained(model), lr=0.05, foreach=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(trained(model), lr=0.05, fused=True),
    "SGD": lambda model: torch.optim.SGD(trained(model), lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda model: torch.optim.RMSprop(trained(model), lr=0.01, momentum=0.5),
    "Adafactor": lambda model: torch.optim.Adafactor(trained(model), lr=0.05),
    "ours": lambda model: torchbelay.optim.AdamW(trained(model), lr=0.05),
    "schedule-free": schedule_free,
}
REFUSED = {  # by the optimizers themselves: they do not take complex weights
    ("complex", "AdamW, fused"),
    ("complex", "Adafactor"),
    ("complex", "schedule-free"),
}

METHODS = {
    "belay": BELAY,
    "ema": EMA,
    "ema, lagged": tb.Spring(k=0.2, m1=float("inf"), m2=1.0),
    "velocities": SWINGING,
    "swa": tb.methods.swa(),
    "power ema": tb.methods.power_ema(sigma_rel=0.1),
    "lookahead": tb.methods.lookahead(k=2),
    "switch ema": tb.methods.switch_ema(decay=0.9, every=2),
    "easgd": tb.methods.easgd(rho=1.0),
    "heavy ball": tb.methods.heavy_ball(0.9),
    "nesterov": tb.methods.nesterov(0.9),
    "schedule-free": tb.methods.schedule_free(0.9),
    "primal averaging": tb.methods.primal_averaging(mu_x=0.9, mu_y=0.5),
    "by parameter": lambda name, p: None if p.ndim < 2 else tb.methods.swa() if "head" in name else BELAY,
}


def examine(animal: str, optimizer: Any, dtype: torch.dtype | None = None, **more: Any) -> Report:
    each = ZOO[animal]
    settings = {"batch": each.batch, "loss": each.loss, "steps": 3} | more
    report = check(lambda: each.model(dtype, seed=torch.initial_seed()), optimizer, **settings)
    assert report.passed == tuple(CONTRACTS)  # nothing was skipped
    return report


@pytest.mark.parametrize(
    ("animal", "optimizer"), [pair for pair in itertools.product(ZOO, OPTIMIZERS) if pair not in REFUSED]
)
def test_the_contract_holds_for_every_model_and_optimizer(animal: str, optimizer: str) -> None:
    examine(animal, OPTIMIZERS[optimizer])


# fused SGD is not here: torch's own does not repeat itself bit for bit in 16 bits on the CPU, with or without Belay
SMALL = {"eps": 1e-4}  # 1e-8 is 0 in float16
PRECISE = {
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True, **SMALL),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True, **SMALL),
    "ours": lambda model: torchbelay.optim.AdamW(model.parameters(), lr=0.05, **SMALL),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", PRECISE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("animal", ["mlp", "transformer"])
def test_the_contract_holds_in_every_precision(animal: str, dtype: torch.dtype, optimizer: str) -> None:
    examine(animal, PRECISE[optimizer], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("animal", ["mlp", "transformer", "convolutional"])
def test_the_contract_holds_under_autocast(animal: str, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return ZOO[animal].loss(model, batch)

    examine(animal, two_groups, loss=loss)


@pytest.mark.parametrize("method", METHODS)
def test_the_contract_holds_for_every_method(method: str) -> None:
    examine("mixed", two_groups, method=METHODS[method], steps=6)


OPTIONS: dict[str, dict[str, Any]] = {
    "start": {"start": 2},
    "every": {"every": 2},
    "start and every": {"start": 1, "every": 2},
    "averaged buffers": {"buffers": "average"},
    "ignored buffers": {"buffers": "ignore"},
    "float64 average": {"dtype": torch.float64},
    "bfloat16 average": {"dtype": torch.bfloat16},
    "reference": {"impl": "reference"},
    "bad steps skipped": {"on_nonfinite": "skip"},
    "bad steps raised": {"on_nonfinite": "raise"},
    "in host memory": {"device": "cpu", "method": EMA},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_contract_holds_with_every_option(options: str) -> None:
    examine("mlp", two_groups, **OPTIONS[options])


def test_the_contract_holds_for_an_optimizer_that_evaluates_the_loss_itself() -> None:
    examine("transformer", lambda m: torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3), method=EMA, closure=True)


def test_the_contract_holds_for_a_sparse_embedding() -> None:
    check(
        lambda: nn.Embedding(7, 3, sparse=True),
        lambda model: torch.optim.SparseAdam(model.parameters(), lr=0.1),
        batch=lambda step: torch.tensor([step % 7, 3]),
    )


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_the_contract_holds_for_a_wrapped_model(wrap: Any) -> None:
    each = ZOO["transformer"]
    where = "cuda" if wrap is torch.nn.DataParallel and torch.cuda.is_available() else "cpu"  # it takes the model there
    check(
        lambda: wrap(each.make().to(where)),
        OPTIMIZERS["AdamW, foreach"],
        batch=lambda step: each.batch(step).to(where),
        loss=each.loss,
        steps=2,
    )

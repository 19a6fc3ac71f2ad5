"""DeepSpeed's ZeRO on real processes of gloo: `python deepspeed_ranks.py FOLDER` writes FOLDER/said.json.

It has the result of every check: null, or the error of the first process that failed. Two processes run `CHECKS`, then
three run `THREE`, which go on from what the two have saved.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

import torchbelay as tb
from helpers.two_processes import Check, main
from torchbelay.integrations.deepspeed import ZeroBelay, attach

LIMIT = 250.0
EMA = tb.Spring.ema(decay=0.9)
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
STAGES = (1, 2, 3)

CHECKS: dict[str, Check] = {}
THREE: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """A small net with a frozen and a tied weight, a buffer, and sizes that no number of ranks divides."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.second = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        h = self.frozen(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.tied(torch.tanh(self.second(h)))))


def batch(step: int) -> Tensor:
    """The rows of all ranks."""
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x).float() - x.sin().sum(1, keepdim=True)).square().mean()


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different learning rates."""
    trained = [p for p in net.parameters() if p.requires_grad]
    return [{"params": trained[:2]}, {"params": trained[2:], "lr": 3e-3}]


class Run:
    """A net that ZeRO trains."""

    def __init__(self, stage: int, method: Any = EMA, *, seed: int = 0, config: Any = None, **options: Any) -> None:
        net = Net(seed)
        optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 8} | (config or {}).pop("zero_optimization", {})
        self.engine = deepspeed.initialize(
            model=net,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # by default it is 1
                "zero_optimization": zero,
                **(config or {}),
            },
        )[0]
        self.belay: ZeroBelay = attach(self.engine, method, **options)

    def train(self, steps: range) -> "Run":
        rank, world = dist.get_rank(), dist.get_world_size()
        for step in steps:
            x = batch(step)
            rows = len(x) // world
            self.engine.backward(loss_of(self.engine, x[rank * rows :][:rows]))
            self.engine.step()
        return self

    def average(self) -> dict[str, Tensor]:
        return self.belay.average_state_dict()

    def masters(self) -> list[Tensor]:
        return [t.clone() for t in self.belay._layout.tensors.values()]

    def weights(self) -> dict[str, Tensor]:
        """All that the net computes with, whole, on every rank."""
        found = {}
        for name, p in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        return found


class Plain:
    """The same training in one process, by torch and Belay."""

    def __init__(self, method: Any = EMA, *, seed: int = 0, **options: Any) -> None:
        self.net = Net(seed)
        self.optimizer = torch.optim.AdamW(groups(self.net), lr=1e-2)
        self.belay = tb.Belay(self.net, self.optimizer, method, **options)

    def train(self, steps: range) -> "Plain":
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.net, batch(step)).backward()
            self.optimizer.step()
        return self


def same(one: Any, two: Any, *, within: float = 0.0, but: tuple[str, ...] = ()) -> None:
    """The same names, shapes and dtypes, and the same numbers."""
    assert list(one) == list(two), (list(one), list(two))
    for name in one:
        if name not in but:
            torch.testing.assert_close(one[name], two[name], rtol=0.0, atol=within, msg=lambda m, n=name: f"{n}: {m}")


def is_first() -> bool:
    return dist.get_rank() == 0


def equals_one_process(stage: int, method: Any, folder: Path) -> None:
    run, plain = Run(stage, method).train(range(12)), Plain(method).train(range(12))
    found = run.average()
    assert run.belay.step == 12
    if is_first():
        same(found, plain.belay.average_state_dict(), within=1e-6)
        assert found["tied.weight"].data_ptr() == found["second.weight"].data_ptr()
        Net(5).load_state_dict(found)
    else:
        assert found == {}
    same(run.weights(), {n: p.detach() for n, p in plain.net.named_parameters()}, within=1e-6)
    for key, number in plain.belay.stats().items():
        assert abs(run.belay.stats()[key] - number) <= 1e-6 * max(1.0, abs(number)), key
    holds_the_average(run, plain)


def holds_the_average(run: Run, plain: Plain) -> None:
    """`averaged()` puts the average everywhere, and the weights back bit for bit, also after an exception."""
    weights, masters, x = run.weights(), run.masters(), batch(50)
    before = run.average()
    run.engine.eval(), plain.net.eval()
    with torch.no_grad(), plain.belay.averaged():
        expected = plain.net(x)
        average = {n: p.detach().clone() for n, p in plain.net.named_parameters()}
    with torch.no_grad(), run.belay.averaged() as engine:
        assert engine is run.engine
        torch.testing.assert_close(engine(x), expected, rtol=0, atol=1e-6)
        same(run.weights(), average, within=1e-6)
        for name, p in run.engine.module.named_parameters():
            if p.requires_grad:
                whole = safe_get_full_fp32_param(p)
                torch.testing.assert_close(whole, average[name], rtol=0, atol=1e-6)
        same(run.average(), before)
        with run.belay.averaged():
            torch.testing.assert_close(engine(x), expected, rtol=0, atol=1e-6)
        with pytest.raises(RuntimeError, match=r"engine.step\(\) inside averaged"):
            run.engine.step()
        with pytest.raises(RuntimeError, match="save_checkpoint"):
            run.engine.save_checkpoint("nowhere")
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), run.belay.averaged():
        run.engine(x)
        raise ZeroDivisionError
    for one, two in zip(run.masters(), masters, strict=True):
        assert torch.equal(one, two)
    same(run.weights(), weights)
    same(run.average(), before)
    run.engine.train(), plain.net.train()
    run.train(range(12, 14)), plain.train(range(12, 14))
    same(run.weights(), {n: p.detach() for n, p in plain.net.named_parameters()}, within=1e-6)


for _stage in STAGES:
    for _name, _method in (("ema", EMA), ("spring", BELAY)):
        CHECKS[f"zero{_stage}_with_{_name}_equals_one_process"] = partial(equals_one_process, _stage, _method)


def prepare() -> None:
    """Let DeepSpeed talk by gloo alone: it would compile a module of its own, which takes a minute."""
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.logger.setLevel("ERROR")
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    prepare()
    main(CHECKS, limit=LIMIT)

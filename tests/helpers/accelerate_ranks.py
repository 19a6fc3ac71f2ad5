"""Accelerate on two real processes of gloo: `python accelerate_ranks.py FOLDER` writes FOLDER/said.json.

It has the result of every check: null, or the error of the first process that failed. Accelerate knows FSDP on
accelerators only; here the checks tell its state that these processes shard, and everything after that is its own.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from helpers.small import mlp
from helpers.two_processes import WORLD, Check, main
from torchbelay.integrations.accelerate import attach

LIMIT = 600.0  # seconds; on an idle machine it takes a tenth of that
EMA = tb.Spring.ema(decay=0.9)
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def batch(step: int) -> Tensor:
    """The rows of all processes."""
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).double() - x.double().sin().sum(1, keepdim=True)).square().mean()


class Run:
    """A model in training; `kind` is the plugin's state_dict_type for FSDP2, None for DDP."""

    def __init__(
        self, method: Any = EMA, kind: str | None = None, *, seed: int = 0, dtype: Any = torch.float64, **settings: Any
    ) -> None:
        options = settings.pop("options", {})
        self.accelerator = accelerator(kind, **settings)
        net = mlp(dtype, seed=seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.dtype = dtype
        self.belay = attach(self.accelerator, self.model, self.optimizer, method, **options)

    def train(self, steps: Any) -> "Run":
        for step in steps:
            mine = batch(step).chunk(WORLD)[dist.get_rank()].to(self.dtype)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, mine))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def everything(self) -> dict[str, Tensor]:
        """This process's parts of weights and average, and the number of steps."""
        average = self.belay.state_dict()["averages"]["average"]["weights"]
        parts = {f"average {name}": here(t) for name, t in average.items()}
        parts |= {f"weight {name}": here(p) for name, p in self.model.named_parameters()}
        return parts | {"step": torch.tensor(self.belay.step)}


def accelerator(kind: str | None, **settings: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    PartialState().distributed_type = DistributedType.MULTI_CPU  # an earlier check may have said FSDP
    if kind is None:
        return Accelerator(cpu=True, **settings)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False)
    found = Accelerator(cpu=True, fsdp_plugin=plugin, **settings)
    if found.mixed_precision != "no":
        plugin.set_mixed_precision(found.mixed_precision)
    PartialState().distributed_type = found.state.distributed_type = DistributedType.FSDP
    found.state.fsdp_plugin = plugin
    assert found.is_fsdp2
    return found


def here(t: Tensor) -> Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()


def assert_equal(x: dict[str, Tensor], y: dict[str, Tensor]) -> None:
    assert list(x) == list(y)
    assert [name for name in x if not torch.equal(x[name], y[name])] == []


def one_process(steps: int, accumulated: int = 1) -> dict[str, Tensor]:
    """The EMA of a plain loop over the rows of all processes."""
    model = mlp(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(steps):
        for part in range(accumulated):
            (loss_of(model, batch(step * accumulated + part)) / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.detach()
    return average


def assert_is_the_average_of_one_process(run: Run, steps: int, accumulated: int = 1) -> None:
    found = run.belay.average_state_dict(full=True)
    if dist.get_rank():
        assert found == {}
        return
    expected = one_process(steps, accumulated)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def resumes(folder: Path, method: Any, kind: str | None, **settings: Any) -> None:
    run = Run(method, kind, **settings).train(range(4))
    run.accelerator.save_state(str(folder))
    dist.barrier()
    went_on = run.train(range(4, 8)).everything()
    again = Run(method, kind, seed=7, **settings)
    again.accelerator.load_state(str(folder))
    assert again.belay.step == 4 // settings.get("gradient_accumulation_steps", 1)
    assert_equal(again.train(range(4, 8)).everything(), went_on)


# DDP ------------------------------------------------------------------------------------------------------------------


@check
def replicas_of_ddp_have_the_average_of_one_process(folder: Path) -> None:
    for accumulated in (1, 2):
        run = Run(gradient_accumulation_steps=accumulated).train(range(4 * accumulated))
        assert isinstance(run.model, DistributedDataParallel)
        assert run.belay.step == 4
        assert_is_the_average_of_one_process(run, 4, accumulated)


@check
def a_run_of_ddp_resumes_bit_for_bit(folder: Path) -> None:
    resumes(folder / "plain", BELAY, None)
    resumes(folder / "accumulation", BELAY, None, gradient_accumulation_steps=2)
    resumes(folder / "bf16", BELAY, None, mixed_precision="bf16", dtype=torch.float32)
    assert (folder / "plain" / "custom_checkpoint_0.pkl").is_file()
    assert not (folder / "plain" / "torchbelay_0").exists()


@check
def replicas_that_share_one_average_resume_bit_for_bit(folder: Path) -> None:
    resumes(folder / "shared", BELAY, None, options={"shard": dist.group.WORLD})
    assert (folder / "shared" / "torchbelay_0").is_dir()


# FSDP2 ----------------------------------------------------------------------------------------------------------------


@check
def shards_of_fsdp2_have_the_average_of_one_process(folder: Path) -> None:
    for accumulated in (1, 2):
        run = Run(kind="SHARDED_STATE_DICT", gradient_accumulation_steps=accumulated).train(range(4 * accumulated))
        assert all(isinstance(p, DTensor) for p in run.model.parameters())
        assert run.belay.step == 4
        assert_is_the_average_of_one_process(run, 4, accumulated)


@check
def a_run_of_fsdp2_resumes_bit_for_bit(folder: Path) -> None:
    resumes(folder / "sharded", BELAY, "SHARDED_STATE_DICT")
    resumes(folder / "full", BELAY, "FULL_STATE_DICT")
    resumes(folder / "accumulation", BELAY, "SHARDED_STATE_DICT", gradient_accumulation_steps=2)
    resumes(folder / "bf16", BELAY, "SHARDED_STATE_DICT", mixed_precision="bf16", dtype=torch.float32)
    assert (folder / "sharded" / "torchbelay_0" / ".metadata").is_file()


@check
def two_averages_of_fsdp2_have_a_folder_each(folder: Path) -> None:
    runs = []
    for seed in (0, 1):
        run = Run(EMA, "SHARDED_STATE_DICT", seed=seed)
        short = attach(run.accelerator, run.model, run.optimizer, tb.Spring.ema(decay=0.5))
        if seed == 0:
            run.train(range(3)).accelerator.save_state(str(folder))
            dist.barrier()
        else:
            run.accelerator.load_state(str(folder))
        weights = short.state_dict()["averages"]["average"]["weights"]
        runs.append(run.everything() | {f"short {name}": here(t) for name, t in weights.items()})
    assert_equal(*runs)
    if not dist.get_rank():
        assert sorted(path.name for path in folder.glob("torchbelay_*")) == ["torchbelay_0", "torchbelay_1"]


@check
def attach_before_prepare_is_refused_under_fsdp2_with_the_reason(folder: Path) -> None:
    found, net = accelerator("SHARDED_STATE_DICT"), mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"under FSDP2, prepare\(\) gives the optimizer other parameters"):
        attach(found, net, optimizer, EMA)
    assert not optimizer._optimizer_step_pre_hooks
    assert not found._custom_objects


@check
def states_are_not_saved_inside_averaged_under_fsdp2(folder: Path) -> None:
    run = Run(EMA, "SHARDED_STATE_DICT").train(range(2))
    before = run.everything()
    with run.belay.averaged(), pytest.raises(RuntimeError, match=r"save_state\(\) inside averaged"):
        run.accelerator.save_state(str(folder))
    assert_equal(run.everything(), before)
    assert not (folder / "torchbelay_0").exists()


@check
def a_checkpoint_whose_registered_object_is_no_sharded_average_is_refused(folder: Path) -> None:
    run = Run(EMA, "SHARDED_STATE_DICT").train(range(2))
    run.accelerator.save_state(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"something": "else"}, folder / "custom_checkpoint_0.pkl")
    dist.barrier()
    with pytest.raises(ValueError, match="has no folder 'torchbelay_0'"):
        run.accelerator.load_state(str(folder))


if __name__ == "__main__":
    main(CHECKS, limit=LIMIT)

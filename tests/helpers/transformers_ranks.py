"""Trainers on two real processes of gloo: `python transformers_ranks.py FOLDER` writes FOLDER/said.json.

It has the result of every check: null, or the error of the first process that failed. Accelerate knows FSDP on
accelerators only, and a Trainer on CPUs ignores `fsdp`; here the checks tell both that these processes shard, and
everything after that is their own.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from helpers.trainers import BELAY, EMA, Run, ema, gpt2, plain
from helpers.two_processes import Check, main

LIMIT = 600.0  # seconds; on an idle machine it takes a tenth of that

CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def made(folder: Path, method: Any = EMA, kind: str | None = None, *, seed: int = 0, **settings: Any) -> Run:
    """A Trainer with an average; `kind` is the plugin's state_dict_type for FSDP2, None for DDP."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    PartialState().distributed_type = DistributedType.MULTI_CPU  # an earlier check may have said FSDP
    trainer = plain(folder, model=gpt2(seed), **settings)
    if kind is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=kind,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
        state = trainer.accelerator.state
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
        if settings.get("bf16"):
            plugin.set_mixed_precision("bf16")
        trainer.is_fsdp_enabled = True
        assert trainer.accelerator.is_fsdp2
    return Run(folder, method, made=trainer)


def here(found: Any) -> Any:
    """This process's parts of all tensors."""
    if isinstance(found, dict):
        return {key: here(value) for key, value in found.items()}
    if isinstance(found, DTensor):
        found = found.to_local()
    return found.detach().clone() if isinstance(found, Tensor) else found


def same(x: Any, y: Any) -> bool:
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    return torch.equal(x, y) if isinstance(x, Tensor) else bool(x == y)


def resumes(folder: Path, kind: str | None, **settings: Any) -> Run:
    went_on = made(folder / "one", BELAY, kind, **settings).train()
    again = made(folder / "two", BELAY, kind, seed=7, **settings)
    again.train(str(folder / "one" / "checkpoint-3"))
    assert again.belay.step == 6
    assert len(again.observer.after) == 3
    assert same(here(again.observer.before[0]), here(went_on.observer.before[3]))
    assert same(here(again.everything()), here(went_on.everything()))
    return again


def best_is_found_again(folder: Path, kind: str | None) -> None:
    for greater in (True, False):
        run = made(folder / str(greater), EMA, kind, load_best_model_at_end=True, greater_is_better=greater).train()
        state = run.trainer.state
        losses = {row["step"]: row["eval_loss"] for row in state.log_history if "eval_loss" in row}
        expected = (max if greater else min)(losses, key=losses.__getitem__)
        assert state.best_model_checkpoint == str(folder / str(greater) / f"checkpoint-{expected}")
        assert run.trainer.evaluate()["eval_loss"] == state.best_metric


def expected_average(run: Run, steps: int) -> dict[str, Tensor]:
    """The EMA of this process's parts of the weights."""
    return ema(here(run.observer.before[0]), [here(each) for each in run.observer.after[:steps]])


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(expected) <= set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=1e-6)


# DDP ------------------------------------------------------------------------------------------------------------------


@check
def a_run_of_ddp_resumes_bit_for_bit(folder: Path) -> None:
    run = resumes(folder / "plain", None)
    assert isinstance(run.trainer.model_wrapped, DistributedDataParallel)
    resumes(folder / "accumulation", None, gradient_accumulation_steps=2)
    resumes(folder / "bf16", None, bf16=True)


@check
def a_checkpoint_of_ddp_is_the_average(folder: Path) -> None:
    run = made(folder).train()
    close(load_file(folder / "checkpoint-3" / "model.safetensors"), expected_average(run, 3))
    close(here(dict(run.belay.average_state_dict())), expected_average(run, 6))


@check
def the_best_metric_of_ddp_is_found_again(folder: Path) -> None:
    best_is_found_again(folder, None)


# FSDP2 ----------------------------------------------------------------------------------------------------------------


@check
def a_run_of_fsdp2_resumes_bit_for_bit(folder: Path) -> None:
    run = resumes(folder / "sharded", "SHARDED_STATE_DICT")
    assert all(isinstance(p, DTensor) for p in run.trainer.model.parameters())
    resumes(folder / "full", "FULL_STATE_DICT")
    resumes(folder / "accumulation", "SHARDED_STATE_DICT", gradient_accumulation_steps=2)
    resumes(folder / "bf16", "SHARDED_STATE_DICT", bf16=True)


@check
def a_checkpoint_of_fsdp2_is_the_average(folder: Path) -> None:
    run = made(folder, EMA, "FULL_STATE_DICT").train()
    average = run.belay.state_dict()["averages"]["average"]["weights"]
    close(here(average), expected_average(run, 6))
    whole = run.belay.average_state_dict(full=True)
    run.trainer.save_model(str(folder / "saved"))
    if dist.get_rank() == 0:
        for file in (folder / "saved", folder / "checkpoint-6"):
            close(load_file(file / "model.safetensors"), {n: t for n, t in whole.items() if n != "lm_head.weight"})
        other = transformers.GPT2LMHeadModel.from_pretrained(folder / "checkpoint-6")
        close(dict(other.state_dict()), whole)


@check
def the_best_metric_of_fsdp2_is_found_again(folder: Path) -> None:
    # With SHARDED_STATE_DICT a Trainer looks for the folder of the best checkpoint before it has written one.
    best_is_found_again(folder, "FULL_STATE_DICT")


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(CHECKS, limit=LIMIT)

"""DeepSpeed's ZeRO on real processes of gloo: `python deepspeed_ranks.py FOLDER [WORD …]` writes FOLDER/said.json.

It has the result of every check (of those whose names have one of the words): null, or the error of the first process
that failed. Two processes run `CHECKS`, then three run `THREE`, which go on from what the two have saved.
"""

import os
import sys
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchbelay as tb
from helpers.two_processes import Check, main

if __name__ == "__main__":  # pytest wants the names of the checks alone, and to import DeepSpeed takes seconds
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils import safe_get_full_fp32_param

    from torchbelay.integrations.accelerate import attach as attach_prepared
    from torchbelay.integrations.deepspeed import ZeroBelay, _check, attach

LIMIT = 300.0  # seconds for the checks of one number of ranks; on an idle machine they take 30
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
        h = self.frozen(torch.tanh(self.first(x.to(self.frozen.weight.dtype))))
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


def engine_of(stage: int, *, seed: int = 0, config: Any = None) -> Any:
    net, config = Net(seed), dict(config or {})
    zero = {"stage": stage, "stage3_param_persistence_threshold": 8} | config.pop("zero_optimization", {})
    return deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(groups(net), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # by default it is 1
            "zero_optimization": zero,
            **config,
        },
    )[0]


class Run:
    """A net that ZeRO trains."""

    def __init__(self, stage: int, method: Any = EMA, *, seed: int = 0, config: Any = None, **options: Any) -> None:
        self.engine = engine_of(stage, seed=seed, config=config)
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
    with suppress(ZeroDivisionError), torch.inference_mode(), run.belay.averaged():
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


# Checkpoints ----------------------------------------------------------------------------------------------------------


def resumes(stage: int, folder: Path) -> None:
    """A run that is stopped and goes on ends where an undisturbed one does, bit for bit."""
    options = {"spectators": {"short": EMA}, "keep_initial": True}
    through = Run(stage, BELAY, **options).train(range(7))
    half = Run(stage, BELAY, **options).train(range(4))
    half.engine.save_checkpoint(str(folder), client_state={"mine": 3})
    again = Run(stage, BELAY, seed=9, **options)
    path, mine = again.engine.load_checkpoint(str(folder))
    assert path is not None
    assert mine["mine"] == 3
    assert again.belay.step == 4
    for run in (again, half):
        run.train(range(4, 7))
        same(run.average(), through.average())
        same(run.belay.average_state_dict("short"), through.belay.average_state_dict("short"))
        same(run.weights(), through.weights())
        for one, two in zip(run.masters(), through.masters(), strict=True):
            assert torch.equal(one, two)
        bema = tb.readouts.bema()
        same(run.belay.average_state_dict(readout=bema), through.belay.average_state_dict(readout=bema))


def fits_everywhere(stage: int, folder: Path) -> None:
    """A full state fits one process, and another stage; then what it says is saved for three ranks."""
    run = Run(stage, BELAY).train(range(4))
    full, average = run.belay.state_dict(full=True), run.average()
    shared = folder.parent / f"full{stage}.pt"
    if is_first():
        plain = Plain(BELAY, seed=7)
        plain.belay.load_state_dict(full)
        assert plain.belay.step == 4
        same(plain.belay.state_dict()["averages"]["average"]["weights"], full["averages"]["average"]["weights"])
        torch.save([full, average], shared)
    else:
        assert full == {}
    dist.barrier()
    state, average = torch.load(shared)
    other = Run(stage % 3 + 1, BELAY, seed=7)
    other.belay.load_state_dict(state)
    assert other.belay.step == 4
    back = other.belay.state_dict(full=True)
    if is_first():
        same(back["averages"]["average"]["weights"], full["averages"]["average"]["weights"])
    mine = other.belay.state_dict()
    with pytest.raises(ValueError, match="damaged" if is_first() else "rank 0 could not go on"):
        other.belay.load_state_dict({"format": 7} if is_first() else mine)  # one rank cannot
    state["averages"]["average"]["weights"]["last.weight"] = torch.zeros(2, 7)
    with pytest.raises(ValueError, match=r"'last.weight' .* has the shape \(2, 7\) in the checkpoint, and \(1, 7\)"):
        other.belay.load_state_dict(state)
    same(other.belay.state_dict()["averages"]["average"]["weights"], mine["averages"]["average"]["weights"])
    if stage > 1:
        with pytest.raises(ValueError, match="other pieces"):
            other.belay.load_state_dict(run.belay.state_dict())
    if stage < 3:
        run.engine.save_checkpoint(str(folder.parent / f"files{stage}"), tag="last")


for _stage in STAGES:
    CHECKS[f"zero{_stage}_resumes"] = partial(resumes, _stage)
    CHECKS[f"zero{_stage}_has_a_state_that_fits_everywhere"] = partial(fits_everywhere, _stage)


def goes_on_with_three(stage: int, folder: Path) -> None:
    """Three ranks go on from what two have saved: from a full state, and from files of ranks."""
    state, average = torch.load(folder.parent / f"full{stage}.pt")
    run = Run(stage, BELAY, seed=7)
    run.belay.load_state_dict(state)
    full = run.belay.state_dict(full=True)
    if is_first():
        same(full["averages"]["average"]["weights"], state["averages"]["average"]["weights"])
        assert full["step"] == 4
    if stage < 3:  # three ranks cannot read the weights that ZeRO-3 saved on two
        again = Run(stage, BELAY, seed=7)
        again.engine.load_checkpoint(str(folder.parent / f"files{stage}"), load_optimizer_states=False)
        assert again.belay.step == 4
        found = again.average()
        if is_first():
            same(found, average)
        again.train(range(4, 5))
        assert again.belay.step == 5


for _stage in STAGES:
    THREE[f"zero{_stage}_goes_on_with_three_ranks"] = partial(goes_on_with_three, _stage)


@check
def a_checkpoint_without_an_average_begins_it_anew(folder: Path) -> None:
    run = Run(2).train(range(3))
    run.belay.detach()
    run.engine.save_checkpoint(str(folder), tag="bare")
    assert not list((folder / "bare").glob("torchbelay*"))
    again = Run(2, seed=7).train(range(1))
    with pytest.warns(tb.BelayWarning, match=r"has no torchbelay_0_\*.pt: the average begins at the weights"):
        again.engine.load_checkpoint(str(folder), tag="bare")
    assert again.belay.stats()["tension"] == 0.0
    same(again.weights(), run.weights())
    assert again.engine.load_checkpoint(str(folder / "nothing")) == (None, None)
    run = Run(1).train(range(3))
    run.engine.save_checkpoint(str(folder), tag="both")
    again = Run(1, seed=7)
    again.engine.load_checkpoint(str(folder), tag="both", load_module_only=True)
    assert again.belay.stats()["tension"] == 0.0
    same(again.weights(), run.weights())


# Sixteen bits, and steps that do not take place -----------------------------------------------------------------------


def masters_of(run: Run) -> dict[str, Tensor]:
    named = run.engine.module.named_parameters()
    return {name: safe_get_full_fp32_param(p).cpu().clone() for name, p in named if p.requires_grad}


def follows_masters(stage: int, config: dict[str, Any], folder: Path) -> None:
    """The average is that of float32 masters, and the model gets what was pulled."""
    ema, spring = Run(stage, EMA, config=config), Run(stage, BELAY, config=config)
    by_hand, applied = masters_of(ema), 0
    for step in range(10):
        ema.train(range(step, step + 1))
        spring.train(range(step, step + 1))
        if ema.engine.was_step_applied():
            applied += 1
            for name, master in masters_of(ema).items():
                by_hand[name] += 0.1 * (master - by_hand[name])
    assert ema.belay.step == applied == 10 // ema.engine.gradient_accumulation_steps() - ema.engine.skipped_steps
    assert (ema.engine.skipped_steps > 1) is ("fp16" in config)
    full = ema.belay.state_dict(full=True)
    if is_first():
        same(full["averages"]["average"]["weights"], by_hand, within=1e-6)
    for run in (ema, spring):
        weights = run.weights()
        for name, master in masters_of(run).items():
            assert torch.equal(weights[name], master.to(weights[name].dtype)), name
        kept, average = run.masters(), run.average()
        with run.belay.averaged():
            inside = run.weights()
            same(run.average(), average)
        if is_first():
            same({name: average[name] for name in inside}, inside)
        same(run.weights(), weights)
        for one, two in zip(run.masters(), kept, strict=True):
            assert torch.equal(one, two)
    ema.belay.save_average(folder.parent / f"{folder.name}.safetensors", dtype=torch.float32)
    if is_first():
        plain = Net(3)
        assert tb.load_average(folder.parent / f"{folder.name}.safetensors", plain)["step"] == str(applied)
        named = dict(plain.named_parameters())
        same({name: named[name].detach() for name in by_hand}, by_hand, within=1e-6)


BF16 = {"bf16": {"enabled": True}}
WIDE = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
# The first steps overflow, and are skipped.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
TWICE = {"gradient_accumulation_steps": 2}
SMALL = {"zero_optimization": {"sub_group_size": 30}}
HOST = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
}
for _name, _stage, _config in (
    ("zero1_in_bfloat16", 1, BF16),
    ("zero1_in_bfloat16_with_float32_gradients", 1, WIDE),
    ("zero2_in_bfloat16", 2, BF16),
    ("zero3_in_bfloat16_with_small_groups", 3, BF16 | SMALL),
    ("zero1_that_skips_steps", 1, FP16),
    ("zero3_that_skips_steps", 3, FP16),
    ("zero1_in_bfloat16_with_masters_in_host_memory", 1, BF16 | HOST),
    ("zero3_in_bfloat16_with_masters_in_host_memory", 3, BF16 | HOST),
    ("zero2_that_accumulates", 2, BF16 | TWICE),
    ("zero3_that_accumulates", 3, TWICE),
):
    CHECKS[_name] = partial(follows_masters, _stage, _config)


# What it costs --------------------------------------------------------------------------------------------------------


def messages(act: Any) -> Counter[str]:
    """What is sent and received, by kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        act()
    return Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))


@check
def a_step_sends_nothing_more_and_a_rank_keeps_its_share(folder: Path) -> None:
    weights = sum(p.numel() for p in Net().parameters() if p.requires_grad)
    for stage in STAGES:
        run, bare = Run(stage, BELAY).train(range(1)), Run(stage)
        bare.belay.detach()
        bare.train(range(1))
        sent = messages(lambda run=run: run.train(range(1, 2)))
        assert sum(sent.values()) > 0
        assert sent == messages(lambda bare=bare: bare.train(range(1, 2)))
        kept = run.belay.state_dict()["averages"]["average"]["weights"].values()
        mine = sum(t.numel() for t in kept)
        assert all(t.dtype == torch.float32 for t in kept)
        total = torch.tensor(mine)
        dist.all_reduce(total)
        assert total == weights
        assert mine <= -(-weights // dist.get_world_size()) + 8 * len(kept)  # pieces are of whole rows of padding
        context = run.belay.averaged()
        entering = messages(context.__enter__)
        assert all("gather" in kind for kind in entering), entering
        small = sum(getattr(p, "ds_persist", False) for p in run.engine.module.parameters())
        assert sum(entering.values()) <= (2 if stage < 3 else small), (stage, entering)  # per group, or parameter
        assert not messages(lambda context=context: context.__exit__(None, None, None))


# Options, changes and refusals ----------------------------------------------------------------------------------------


def by_name(name: str, parameter: Tensor) -> Any:
    """A method for each parameter, by its name and its whole shape."""
    assert parameter.is_meta
    if name == "second.bias":
        return None
    return BELAY if parameter.ndim > 1 else EMA


@check
def rules_start_and_spectators_are_as_in_one_process(folder: Path) -> None:
    for stage in (2, 3):
        options: dict[str, Any] = {"start": 2, "spectators": {"warm": tb.methods.ema(0.99, warmup="ratio")}}
        run, plain = Run(stage, by_name, **options), Plain(lambda n, p: by_name(n, p.to("meta")), **options)
        for number in (1, 4):
            run.train(range(number)), plain.train(range(number))
            for name in ("average", "warm"):
                found = run.belay.average_state_dict(name)
                if is_first():
                    same(found, plain.belay.average_state_dict(name), within=1e-6)
            assert run.belay.regime == plain.belay.regime
            assert run.belay.decay == plain.belay.decay
        run.belay.change(tb.Spring.ema(decay=0.5)), plain.belay.change(tb.Spring.ema(decay=0.5))
        run.train(range(5, 7)), plain.train(range(5, 7))
        blend = tb.readouts.blend(share=0.3)
        found = run.belay.average_state_dict(readout=blend)
        if is_first():
            same(found, plain.belay.average_state_dict(readout=blend), within=1e-6)
        with run.belay.averaged(readout=blend):
            inside = run.weights()
        if is_first():
            same(inside, {name: found[name] for name in inside}, within=1e-6)
        run.belay.copy_to_model(), plain.belay.copy_to_model()
        same(run.weights(), {n: p.detach() for n, p in plain.net.named_parameters()}, within=1e-6)
        run.train(range(7, 9)), plain.train(range(7, 9))
        same(run.weights(), {n: p.detach() for n, p in plain.net.named_parameters()}, within=1e-6)
        run.belay.reset()
        assert run.belay.stats("a/")["a/tension"] == 0.0


@check
def what_accelerate_has_prepared_is_an_engine(folder: Path) -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
    batches = {"train_micro_batch_size_per_gpu": 6, "train_batch_size": 12}
    plugin.deepspeed_config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0, **batches}
    os.environ["ACCELERATE_USE_CPU"] = "no"  # of all devices, Accelerate knows DeepSpeed on accelerators only
    accelerator = Accelerator(deepspeed_plugin=plugin)
    net, plain = Net(), Plain(BELAY)
    engine, optimizer = accelerator.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
    belay = attach(engine, BELAY)
    for step in range(4):
        accelerator.backward(loss_of(engine, batch(step)[6 * dist.get_rank() :][:6]))
        optimizer.step()
        optimizer.zero_grad()
    plain.train(range(4))
    assert belay.step == 4
    found = belay.average_state_dict()
    if is_first():
        same(found, plain.belay.average_state_dict(), within=1e-6)
    with pytest.raises(ValueError, match=r"integrations.deepspeed.attach\(engine, method\)"):
        attach_prepared(accelerator, engine, optimizer, BELAY)


@check
def buffers_are_averaged(folder: Path) -> None:
    run = Run(3, EMA, buffers="average").train(range(3))
    by_hand = 0.0
    for seen in (1.0, 2.0, 3.0):
        by_hand += 0.1 * (seen - by_hand)
    found = run.average()
    if is_first():
        assert abs(found["seen"].item() - by_hand) < 1e-6
    with run.belay.averaged():
        assert abs(run.engine.module.seen.item() - by_hand) < 1e-6
    assert run.engine.module.seen.item() == 3.0


@check
def states_that_go_away_and_come_back_are_followed(folder: Path) -> None:
    for stage in (1, 3):
        run, still = (Run(stage, BELAY, config=BF16).train(range(3)) for _ in range(2))
        masters = [each._master for each in run.belay._layout.optimizers]

        def moved(masters: Any = masters, **how: Any) -> None:
            for master in masters:
                master.data = master.data.clone()

        zero = run.engine.optimizer  # on a CPU, weights are already where they would go
        zero.offload_states = zero.reload_states = moved
        run.engine.offload_states()
        run.engine.reload_states()
        pieces = {t.untyped_storage().data_ptr() for t in run.belay._layout.tensors.values() if t.numel()}
        assert pieces <= {master.untyped_storage().data_ptr() for master in masters}
        run.train(range(3, 5)), still.train(range(3, 5))
        same(run.average(), still.average())
        same(run.weights(), still.weights())
        masters[0].data = torch.empty(0)
        with pytest.raises(RuntimeError, match="have 0 elements now"):
            run.belay.stats()


@check
def two_on_one_engine_know_of_each_other(folder: Path) -> None:
    run = Run(2, BELAY)
    with pytest.raises(ValueError, match="another Belay pulls parameter"):
        attach(run.engine, BELAY)
    watching = attach(run.engine, EMA)
    run.train(range(3))
    with run.belay.averaged(), pytest.raises(RuntimeError, match="of another Belay"), watching.averaged():
        pass
    run.engine.save_checkpoint(str(folder), tag=5)
    names = sorted(each.name for each in (folder / "5").glob("torchbelay*"))
    assert names == [f"torchbelay_{i}_rank_{rank}_of_2.pt" for i in (0, 1) for rank in (0, 1)]
    again = Run(2, BELAY, seed=7)
    other = attach(again.engine, EMA)
    again.engine.load_checkpoint(str(folder))
    same(again.average(), run.average())
    same(other.average_state_dict(), watching.average_state_dict())
    replacing = attach(run.engine, BELAY, replace=True)
    watching.detach()
    before = watching.step
    run.train(range(3, 4))
    assert (watching.step, replacing.step, run.belay.step) == (before, 1, 3)


@check
def what_ranks_disagree_about_is_refused_on_all(folder: Path) -> None:
    run = Run(2)
    hooks = len(run.engine.optimizer.optimizer._optimizer_step_pre_hooks)
    with pytest.raises(ValueError, match=r"disagree about methods of 'average'.*decay=0.9\b.*decay=0.5"):
        attach(run.engine, EMA if is_first() else tb.Spring.ema(decay=0.5))
    with pytest.raises(ValueError, match="disagree about options: 'start' is 0 on rank 0 and 1 on rank 1"):
        attach(run.engine, EMA, start=dist.get_rank())
    with pytest.raises(ValueError, match="every=0" if is_first() else "rank 0 could not go on.*every=0"):
        attach(run.engine, EMA, every=dist.get_rank())
    with pytest.raises(ValueError, match="disagree about new methods of 'average'"):
        run.belay.change(tb.Spring.ema(decay=0.5) if is_first() else BELAY)
    assert run.belay.decay == 0.9
    with pytest.raises(ValueError, match="nothing to average"):
        attach(run.engine, lambda name, parameter: None)
    assert len(run.engine.optimizer.optimizer._optimizer_step_pre_hooks) == hooks
    path = folder.parent / "no" / "folder" / "average"
    with pytest.raises((FileNotFoundError, ValueError), match="there is no folder"):
        run.belay.save_average(path)
    (folder.parent / "file").write_text("")
    with pytest.raises((OSError, ValueError), match="file"):
        run.engine.save_checkpoint(str(folder.parent / "file"), tag="x")
    run.train(range(1))


class Refused:
    """An engine that would need a GPU, as far as it is looked at."""

    def __init__(self, **zero: Any) -> None:
        zero = {"stage": 3, **zero}
        self._config, self.optimizer = DeepSpeedZeroConfig(**zero), None

    def zero_offload_optimizer(self) -> Any:
        return self._config.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self._config.offload_param


@check
def what_cannot_be_averaged_is_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"engine=Net is not the engine that deepspeed.initialize\(\) returned"):
        attach(Net(), EMA)  # type: ignore[arg-type]
    run = Run.__new__(Run)
    run.engine = engine = engine_of(0)
    with pytest.raises(ValueError, match=r"ZeRO stage 0.*Belay\(engine.module, engine.optimizer, method\)"):
        attach(engine, EMA)
    belay, plain = tb.Belay(engine.module, engine.optimizer, EMA), Plain(EMA).train(range(3))
    run.train(range(3))
    same(belay.average_state_dict(), plain.belay.average_state_dict(), within=1e-6)
    with pytest.raises(ValueError, match=r"optimizer FP16_UnfusedOptimizer.*\"stage\": 1"):
        Run(0, config={"bf16": {"enabled": True}})
    disk = {"device": "nvme", "nvme_path": str(folder)}
    for engine, match in (
        (Refused(offload_param={"device": "cpu"}), "offload_param with device='cpu'"),
        (Refused(offload_optimizer=disk), r"offload_optimizer with device='nvme' and ratio=1.0, and only"),
        (Refused(offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio=0.5"),
    ):
        with pytest.raises(ValueError, match=match):
            _check(engine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_nonfinite='skip' would let each rank decide"):
        Run(1, on_nonfinite="skip")
    with pytest.raises(ValueError, match="save_with_optimizer=True does not go with this engine"):
        Run(1, save_with_optimizer=True)
    with pytest.raises(ValueError, match="PipelineEngine, whose ranks hold different layers"):
        _check(PipelineEngine.__new__(PipelineEngine))
    run = Run(1)
    run.engine.has_moe_layers = True
    with pytest.raises(ValueError, match="engine uses MoE layers"):
        attach(run.engine, EMA)
    with pytest.raises(ValueError, match=r"holds 0 of its \d+ weights.*ZeRO-3 has partitioned it"):
        tb.Belay(Run(3).engine.module, None, EMA)  # there, the module's parameters are empty between two uses


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__ = {}  # talk by gloo alone: to compile DeepSpeed's own module takes a minute
    deepspeed.logger.setLevel("ERROR")
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed says that a CPU cannot, and torch can
    for world, checks in ((2, CHECKS), (3, THREE)):
        words = sys.argv[2:] or [""]
        asked = {name: each for name, each in checks.items() if any(word in name for word in words)}
        main(asked, limit=LIMIT, world=world)

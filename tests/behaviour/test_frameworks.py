"""Models and optimizers as accelerate, Fabric, Lightning and Transformers' trainer have them.

The wrappers of Fabric and Lightning are tested twice: the real ones if the package is installed, and stand-ins with the
same names and attributes, so that what Belay does is tested without the package.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, batch, mlp, same, train, values

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def plain_run(steps: int, method: tb.Method = BELAY) -> dict[str, torch.Tensor]:
    """The average after these steps of an optimizer that nothing wraps."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, method)
    train(model, optimizer, steps)
    return dict(belay.average_state_dict())


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = batch(step)
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


# accelerate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate() -> Any:
    module = pytest.importorskip("accelerate")
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    module.state.GradientState._reset_state()


def prepared(accelerate: Any, **settings: Any) -> tuple[Any, nn.Module, Any, torch.optim.Optimizer]:
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer), optimizer


def test_an_accelerated_optimizer_is_unwrapped(accelerate: Any) -> None:
    accelerator, model, wrapped, optimizer = prepared(accelerate)
    belay = tb.Belay(model, wrapped, BELAY)
    assert type(wrapped) is not type(optimizer)
    for step in range(4):
        wrapped.zero_grad()
        accelerator.backward(loss(model, step))
        wrapped.step()
    assert belay.step == 4
    assert same(dict(belay.average_state_dict()), plain_run(4))


def test_steps_that_accelerate_only_accumulates_do_not_count(accelerate: Any) -> None:
    accelerator, model, wrapped, _ = prepared(accelerate, gradient_accumulation_steps=2)
    belay = tb.Belay(model, wrapped, EMA)
    counts, moved = [], []
    for step in range(6):
        before = values(model)
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, step))
            wrapped.step()
            wrapped.zero_grad()
        counts.append(belay.step)
        moved.append(not same(values(model), before))
    assert counts == [0, 1, 1, 2, 2, 3]
    assert moved == [False, True] * 3


def test_a_step_that_accelerates_gradscaler_skips_does_not_count(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    belay = tb.Belay(model, wrapped, EMA)
    counts = []
    for step in range(4):
        wrapped.zero_grad()
        scaler.scale(loss(model, step)).backward()
        if step == 1:
            model[0].weight.grad[0, 0] = torch.inf
        before = dict(belay.average_state_dict())
        wrapped.step()
        counts.append(belay.step)
        assert same(dict(belay.average_state_dict()), before) is (step == 1) is wrapped.step_was_skipped
    assert counts == [1, 1, 2, 3]
    assert accelerator.optimizer_step_was_skipped is False


def test_several_accelerated_optimizers_are_unwrapped_each(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = mlp()
    halves = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (model[0], model[2])]
    model, *wrapped = accelerator.prepare(model, *halves)
    with pytest.raises(ValueError, match=r"optimizer\[2\], AdamW, is in the sequence twice"):
        tb.Belay(model, [*wrapped, halves[0]], EMA)
    belay = tb.Belay(model, wrapped, EMA)
    for step in range(4):
        model.zero_grad()
        accelerator.backward(loss(model, step))
        for each in wrapped:
            each.step()
    assert belay.step == 4
    assert same(dict(belay.average_state_dict()), plain_run(4, EMA))


# Fabric and Lightning, the real ones --------------------------------------------------------------------------------


def test_what_fabric_sets_up_is_looked_through() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    inner, reference = mlp(), plain_run(3)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    model, wrapped = fabric.setup(inner, optimizer)
    belay = tb.Belay(model, wrapped, BELAY)
    for step in range(3):
        wrapped.zero_grad()
        fabric.backward(loss(model, step))
        wrapped.step()
    check_fabric(belay, model, inner, reference)


def test_an_optimizer_of_lightning_is_unwrapped() -> None:
    kind = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer
    inner = mlp()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    belay = tb.Belay(inner, kind(optimizer), BELAY)
    train(inner, optimizer, 3)
    assert belay.step == 3
    assert same(dict(belay.average_state_dict()), plain_run(3))


def check_fabric(belay: tb.Belay, model: nn.Module, inner: nn.Module, reference: dict[str, torch.Tensor]) -> None:
    """Names are those of the inner model, and the average is that of a plain run."""
    assert belay.step == 3
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == NAMES
    assert same(dict(belay.average_state_dict()), reference)
    weights = values(inner)
    with belay.averaged():
        assert same(values(inner), reference)
        inside = model(batch(0))
    assert same(values(inner), weights)
    inner.load_state_dict(reference)
    assert torch.equal(model(batch(0)), inside)


# Stand-ins ----------------------------------------------------------------------------------------------------------


class StandInModule(nn.Module):
    """What Fabric puts around a model: it holds the model twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._forward_module = inner
        self._original_module = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)


class StandInOptimizer:
    """What Fabric, Lightning and accelerate put around an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self) -> None:
        self._optimizer.step()


def stand_in(patch: pytest.MonkeyPatch, where: str, **names: Any) -> None:
    """Register a module of this name, as if the package had been imported."""
    module = ModuleType(where)
    for name, value in names.items():
        setattr(module, name, value)
    patch.setitem(sys.modules, where, module)


@pytest.mark.parametrize("where", ["lightning.fabric.wrappers", "lightning_fabric.wrappers"])
def test_a_module_of_fabric_is_looked_through(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    stand_in(monkeypatch, where, _FabricModule=StandInModule, _FabricOptimizer=StandInOptimizer)
    inner, reference = mlp(), plain_run(3)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    model: Any = StandInModule(inner)
    belay = tb.Belay(model, StandInOptimizer(optimizer), BELAY)
    train(model, optimizer, 3)
    check_fabric(belay, model, inner, reference)


WRAPPERS = {
    "accelerate.optimizer": "AcceleratedOptimizer",
    "lightning.fabric.wrappers": "_FabricOptimizer",
    "lightning_fabric.wrappers": "_FabricOptimizer",
    "lightning.pytorch.core.optimizer": "LightningOptimizer",
    "pytorch_lightning.core.optimizer": "LightningOptimizer",
}


@pytest.mark.parametrize(("where", "name"), WRAPPERS.items(), ids=WRAPPERS)
def test_wrappers_of_optimizers_are_unwrapped_one_in_the_other(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str
) -> None:
    stand_in(monkeypatch, where, **{name: StandInOptimizer})
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped: Any = StandInOptimizer(StandInOptimizer(optimizer))
    belay = tb.Belay(model, wrapped, BELAY)
    train(model, optimizer, 3)
    assert belay.step == 3
    assert same(dict(belay.average_state_dict()), plain_run(3))
    belay.detach()
    assert not optimizer._optimizer_step_pre_hooks


def test_what_a_wrapper_holds_is_checked_and_named_with_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "accelerate.optimizer", AcceleratedOptimizer=StandInOptimizer)
    with pytest.raises(TypeError, match="optimizer=str inside StandInOptimizer is not"):
        tb.Belay(mlp(), StandInOptimizer("adam"), EMA)  # type: ignore[arg-type]


# Transformers -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_resumes_averages_that_are_saved_with_its_optimizer(tmp_path: Path) -> None:
    """The trainer saves and loads model, optimizer and scheduler, and knows nothing of Belay."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    words = [torch.randint(12, (5,), generator=torch.Generator().manual_seed(i)) for i in range(12)]

    def trained(folder: str, seed: int, **how: Any) -> tuple[nn.Module, tb.Belay]:
        torch.manual_seed(seed)
        shape = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=1, eos_token_id=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        belay = tb.Belay(model, optimizer, tb.methods.ema(0.9, warmup="ratio"), save_with_optimizer=True)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=6, save_steps=3, per_device_train_batch_size=2, report_to=[],
            use_cpu=True, disable_tqdm=True, seed=1, logging_strategy="no",
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
        data = [{"input_ids": each, "labels": each} for each in words]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train(**how)
        return model, belay

    model, belay = trained("first", 0)
    again, again_belay = trained("second", 5, resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    assert again_belay.step == belay.step == 6
    assert same(values(again), values(model))
    assert same(again_belay.state_dict(), belay.state_dict())

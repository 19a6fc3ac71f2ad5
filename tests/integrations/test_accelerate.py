"""`integrations.accelerate.attach`: one process here, two processes by helpers/accelerate_ranks.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, batch, mlp, same, snapshot, values, with_batchnorm
from helpers.two_processes import Results, results

accelerate = pytest.importorskip("accelerate", reason="accelerate is the framework that this test is about")

from helpers import accelerate_ranks  # noqa: E402
from torchbelay.integrations.accelerate import attach  # noqa: E402


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps one state per process; a test begins and ends without it."""
    forget()
    yield
    forget()


class Prepared:
    """A model in training under an Accelerator of its own."""

    def __init__(self, method: Any = BELAY, *, seed: int = 0, model: nn.Module | None = None, **settings: Any) -> None:
        forget()
        options = settings.pop("options", {})
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        net = mlp(seed=seed) if model is None else model
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)
        self.belay = attach(self.accelerator, self.model, self.optimizer, method, **options)

    def train(self, steps: Any) -> "Prepared":
        for step in steps:
            x = batch(step)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - x.sin().sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def everything(self) -> dict[str, Any]:
        return {**snapshot(self.model, self.belay), "lr": self.scheduler.get_last_lr()}


def by_hand(steps: int, accumulated: int = 1) -> dict[str, Tensor]:
    """The EMA of a plain loop, computed here."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    average, decay = values(model), 0.9
    for step in range(steps):
        for part in range(accumulated):
            x = batch(step * accumulated + part)
            ((model(x) - x.sin().sum(1, keepdim=True)).square().mean() / accumulated).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average = {name: decay * average[name] + (1 - decay) * w for name, w in values(model).items()}
    return average


# The step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_average_is_that_of_a_plain_loop(accumulated: int) -> None:
    run = Prepared(EMA, gradient_accumulation_steps=accumulated).train(range(6 * accumulated))
    assert run.belay.step == 6
    found, expected = run.belay.average_state_dict(), by_hand(6, accumulated)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_options_and_spectators_reach_belay() -> None:
    run = Prepared(EMA, options={"start": 4, "spectators": {"short": tb.Spring.ema(decay=0.5)}}).train(range(3))
    assert same(dict(run.belay.average_state_dict("short")), values(run.model))
    assert "short" in repr(run.belay)


def test_bfloat16_has_float32_averages_and_evaluates_them_under_autocast() -> None:
    run = Prepared(EMA, mixed_precision="bf16").train(range(4))
    weights = run.belay.state_dict()["averages"]["average"]["weights"]
    assert {t.dtype for t in weights.values()} == {torch.float32}
    before = run.model(batch(0))
    with run.belay.averaged(), torch.no_grad():
        inside = run.model(batch(0))
    plain = mlp()
    plain.load_state_dict(run.belay.average_state_dict())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = plain(batch(0)).float()
    assert torch.equal(inside, expected)
    assert not torch.equal(inside, before)


def test_save_model_inside_averaged_writes_the_average(tmp_path: Path) -> None:
    run = Prepared(EMA).train(range(4))
    with run.belay.averaged():
        run.accelerator.save_model(run.model, tmp_path)
    from safetensors.torch import load_file

    found, average = load_file(tmp_path / "model.safetensors"), run.belay.average_state_dict()
    assert set(found) == set(average)
    assert all(torch.equal(found[name], average[name]) for name in found)
    assert not torch.equal(found["0.weight"], run.model[0].weight)


def test_the_module_inside_a_prepared_model_will_do_and_so_will_several_optimizers() -> None:
    accelerator, model = accelerate.Accelerator(cpu=True), mlp()
    halves = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (model[0], model[2])]
    prepared, *wrapped = accelerator.prepare(model, *halves)
    belay = attach(accelerator, accelerator.unwrap_model(prepared), iter(wrapped), EMA)
    other = attach(accelerator, iter([prepared]), [each.optimizer for each in wrapped], EMA)
    prepared(batch(0)).sum().backward()
    for each in wrapped:
        each.step()
    assert (belay.step, other.step) == (1, 1)


def test_without_an_optimizer_one_steps_by_hand() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(mlp())
    belay = attach(accelerator, model, None, EMA)
    belay.update()
    assert belay.step == 1


# Checkpoints ----------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}
METHODS = {
    "belay": BELAY,
    "ema": tb.methods.ema(0.9, warmup="ratio"),
    "schedule_free": tb.methods.schedule_free(0.9),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_bit_for_bit(method: str, setting: str, tmp_path: Path) -> None:
    run = Prepared(METHODS[method], **SETTINGS[setting]).train(range(4))
    run.accelerator.save_state(tmp_path / "saved")
    went_on = run.train(range(4, 8)).everything()
    again = Prepared(METHODS[method], seed=7, **SETTINGS[setting]).train(range(2))
    again.accelerator.load_state(tmp_path / "saved")
    assert again.belay.step == 4 // SETTINGS[setting].get("gradient_accumulation_steps", 1)
    assert same(again.train(range(4, 8)).everything(), went_on)


def test_a_method_with_a_function_resumes_with_a_warning(tmp_path: Path) -> None:
    run = Prepared(tb.methods.ema(lambda step: 1 - 1 / step)).train(range(4))
    run.accelerator.save_state(tmp_path / "saved")
    went_on = run.train(range(4, 8)).everything()
    again = Prepared(tb.methods.ema(lambda step: 1 - 1 / step), seed=7)
    with pytest.warns(tb.BelayWarning, match=r"ema\.decay=<function"):
        again.accelerator.load_state(tmp_path / "saved")
    assert same(again.train(range(4, 8)).everything(), went_on)


def test_buffers_and_spectators_resume_too(tmp_path: Path) -> None:
    how: dict[str, Any] = {"options": {"buffers": "average", "spectators": {"short": tb.Spring.ema(decay=0.5)}}}
    run = Prepared(EMA, model=with_batchnorm(), **how).train(range(3))
    run.accelerator.save_state(tmp_path / "saved")
    went_on = run.train(range(3, 6)).everything()
    again = Prepared(EMA, model=with_batchnorm(seed=3), **how)
    again.accelerator.load_state(tmp_path / "saved")
    assert same(again.train(range(3, 6)).everything(), went_on)


def test_two_averages_and_another_registered_object_resume(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Prepared, tb.Belay, Any]:
        run = Prepared(EMA, seed=seed)
        other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))
        run.accelerator.register_for_checkpointing(other)
        return run, attach(run.accelerator, run.model, run.optimizer, tb.Spring.ema(decay=0.5)), other

    run, second, _ = made(0)
    run.train(range(3)).accelerator.save_state(tmp_path / "saved")
    again, its_second, _ = made(1)
    again.accelerator.load_state(tmp_path / "saved")
    assert same(again.everything(), run.everything())
    assert same(its_second.state_dict(), second.state_dict())
    assert not same(second.average_state_dict(), run.belay.average_state_dict())


def test_a_checkpoint_of_another_decay_is_refused_and_the_decay_may_change_afterwards(tmp_path: Path) -> None:
    Prepared(EMA).train(range(2)).accelerator.save_state(tmp_path / "saved")
    other = Prepared(tb.Spring.ema(decay=0.5))
    with pytest.raises(ValueError, match=r"the method of .* differs"):
        other.accelerator.load_state(tmp_path / "saved")
    again = Prepared(EMA)
    again.accelerator.load_state(tmp_path / "saved")
    again.belay.change(tb.Spring.ema(decay=0.5))
    before = again.belay.average_state_dict()
    again.train([2])
    for name, value in again.belay.average_state_dict().items():
        torch.testing.assert_close(value, 0.5 * before[name] + 0.5 * values(again.model)[name], rtol=0, atol=1e-6)


def test_a_checkpoint_without_an_average_is_loaded_before_attach(tmp_path: Path) -> None:
    def prepared(seed: int) -> tuple[Any, nn.Module, Any]:
        forget()
        accelerator, model = accelerate.Accelerator(cpu=True), mlp(seed=seed)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    accelerator, model, _ = prepared(2)
    accelerator.save_state(tmp_path / "saved")
    accelerator, other, optimizer = prepared(3)
    attach(accelerator, other, optimizer, EMA)
    with pytest.raises(RuntimeError, match="Registered objects: 1"):
        accelerator.load_state(tmp_path / "saved")
    accelerator, other, optimizer = prepared(3)
    accelerator.load_state(tmp_path / "saved")
    belay = attach(accelerator, other, optimizer, EMA)
    assert same(dict(belay.average_state_dict()), values(model))


def test_states_are_neither_saved_nor_loaded_inside_averaged(tmp_path: Path) -> None:
    run = Prepared(EMA).train(range(3))
    run.accelerator.save_state(tmp_path / "saved")
    run.train(range(3, 5))
    before = run.everything()
    with run.belay.averaged():
        with pytest.raises(RuntimeError, match=r"accelerator.save_state\(\) inside averaged"):
            run.accelerator.save_state(tmp_path / "wrong")
        with pytest.raises(RuntimeError, match=r"accelerator.load_state\(\) inside averaged"):
            run.accelerator.load_state(tmp_path / "saved")
    assert same(run.everything(), before)
    assert not (tmp_path / "wrong").exists()


def test_a_save_that_is_refused_removes_no_older_checkpoint(tmp_path: Path) -> None:
    limited = accelerate.utils.ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    run = Prepared(EMA, project_config=limited)
    for step in range(2):
        run.train([step]).accelerator.save_state()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with run.belay.averaged(), pytest.raises(RuntimeError, match=r"accelerator.save_state\(\) inside averaged"):
        run.accelerator.save_state()
    assert before
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    run.accelerator.save_state()  # outside, the oldest one makes room for a new one
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize("inside", ["first", "second"])
def test_each_of_two_averages_keeps_states_from_being_saved(inside: str, tmp_path: Path) -> None:
    run = Prepared(EMA)
    second = attach(run.accelerator, run.model, run.optimizer, tb.methods.swa())
    run.train(range(3))
    belay = run.belay if inside == "first" else second
    with belay.averaged(), pytest.raises(RuntimeError, match=r"accelerator.save_state\(\) inside averaged"):
        run.accelerator.save_state(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


# What is refused ------------------------------------------------------------------------------------------------------


def test_what_was_not_prepared_is_refused_and_nothing_is_attached() -> None:
    accelerator, model = accelerate.Accelerator(cpu=True), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"model=Sequential was not prepared .* call accelerator.prepare"):
        attach(accelerator, model, optimizer, EMA)
    prepared = accelerator.prepare(model)
    with pytest.raises(ValueError, match=r"optimizer=AdamW was not prepared .* call accelerator.prepare"):
        attach(accelerator, prepared, optimizer, EMA)
    with pytest.raises(ValueError, match=r"optimizer=AdamW was not prepared"):
        attach(accelerator, prepared, [optimizer], EMA)
    assert not optimizer._optimizer_step_pre_hooks
    assert not accelerator._custom_objects


def test_a_wrong_accelerator_model_or_optimizer_is_named() -> None:
    with pytest.raises(TypeError, match=r"accelerator=Sequential is not an accelerate.Accelerator"):
        attach(mlp(), mlp(), None, EMA)  # type: ignore[arg-type]
    run = Prepared(EMA)
    with pytest.raises(TypeError, match=r"model=str is not a torch.nn.Module"):
        attach(run.accelerator, "model", run.optimizer, EMA)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give list\(optimizers.values\(\)\)"):
        attach(run.accelerator, run.model, {"adam": run.optimizer}, EMA)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer is an empty sequence"):
        attach(run.accelerator, run.model, [], EMA)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines_with_steps_of_their_own_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Prepared(EMA)
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", accelerate.utils.DistributedType[kind])
    with pytest.raises(ValueError, match=rf"distributed_type={kind}, which keeps flat pieces .* use FSDP2"):
        attach(run.accelerator, run.model, run.optimizer, EMA)


# Two processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Results:
    return results(accelerate_ranks.__file__, tmp_path_factory.getbasetemp(), worker_id, limit=accelerate_ranks.LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", accelerate_ranks.CHECKS)
def test_on_two_processes(said: Results, name: str) -> None:
    assert name in said, "an earlier check stopped the processes"
    assert said[name] is None, said[name]

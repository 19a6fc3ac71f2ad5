"""`integrations.transformers`: one process here, two processes by helpers/transformers_ranks.py."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import same
from helpers.two_processes import Results, results

transformers = pytest.importorskip("transformers", reason="transformers is the framework that this test is about")
accelerate = pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import GPT2LMHeadModel, Trainer, TrainerCallback  # noqa: E402

from helpers import transformers_ranks  # noqa: E402
from helpers.trainers import BELAY, EMA, QUIET, STEPS, Observer, Run, ema, gpt2, plain, texts, weights  # noqa: E402
from torchbelay.integrations.transformers import BelayCallback, attach  # noqa: E402


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps one state per process; Transformers' progress bars and logs stay out of the output."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def loss_of(model: nn.Module, folder: Path) -> float:
    """The loss that `evaluate()` of a Trainer without an average finds."""
    found: float = plain(folder / "judge", model=copy.deepcopy(model)).evaluate()["eval_loss"]
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(expected) <= set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=1e-6)


# What is evaluated and saved ------------------------------------------------------------------------------------------


def test_evaluations_and_predictions_are_those_of_the_average(tmp_path: Path) -> None:
    model = gpt2()
    first = weights(model)
    run = Run(tmp_path, model=model).train()
    assert run.belay.step == 6
    expected = gpt2(1)
    expected.load_state_dict({name: value.float() for name, value in ema(first, run.observer.after).items()}, False)
    own = gpt2(2)
    own.load_state_dict(run.observer.after[-1], False)
    run.callback.use_weights()
    found = run.trainer.evaluate()["eval_loss"]
    assert run.trainer.state.log_history[-3]["eval_loss"] == found  # the last one of train()
    assert found == pytest.approx(loss_of(expected, tmp_path), abs=1e-6)
    assert found != pytest.approx(loss_of(own, tmp_path), abs=1e-4)
    run.callback.use_weights()
    predicted = run.trainer.predict(texts(8)).predictions
    with torch.no_grad():
        logits = expected.eval()(input_ids=torch.stack([row["input_ids"] for row in texts(8)])).logits
    torch.testing.assert_close(torch.as_tensor(predicted), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("export", [True, False])
def test_an_evaluation_in_a_block_of_the_user_leaves_the_average_there(tmp_path: Path, export: bool) -> None:
    run = Run(tmp_path, options={"export": export}).train()
    names = weights(run.trainer.model)
    average = {name: tensor for name, tensor in run.belay.average_state_dict().items() if name in names}
    with run.belay.averaged():
        assert same(weights(run.trainer.model), average)
        run.trainer.evaluate()
        assert same(weights(run.trainer.model), average)
        run.trainer.save_model(str(tmp_path / "saved"))
        assert same(weights(run.trainer.model), average)
    assert same(weights(run.trainer.model), average) is export
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = average if export else run.belay.model_state_dict()
    assert all(torch.equal(saved[name], expected[name]) for name in names)


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_model_of_a_checkpoint_is_the_average_and_the_weights_are_with_the_optimizer(
    tmp_path: Path, evaluated: bool
) -> None:
    model = gpt2()
    first = weights(model)
    run = Run(tmp_path, model=model, eval_strategy="steps" if evaluated else "no").train()
    folder = tmp_path / "checkpoint-3"
    saved, after = load_file(folder / "model.safetensors"), run.observer.after
    close(saved, ema(first, after[:3]))
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    carried = {
        key.removeprefix("torchbelay//weights/"): value
        for entries in state["state"].values()
        for key, value in entries.items()
        if key.startswith("torchbelay//weights/")
    }
    assert same(dict(sorted(carried.items())), dict(sorted(after[2].items())))
    again = GPT2LMHeadModel.from_pretrained(folder)
    assert same({name: again.state_dict()[name] for name in saved}, saved)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    }


def test_training_itself_is_not_touched_by_an_average_that_only_watches(tmp_path: Path) -> None:
    bare, observer = plain(tmp_path / "bare", model=gpt2()), Observer()
    bare.add_callback(observer)
    bare.train()
    run = Run(tmp_path / "averaged", model=gpt2()).train()
    assert same(run.observer.after, observer.after)
    assert same(run.observer.before, observer.before)


@pytest.mark.parametrize("best", [min, max])  # one of them is not the last
def test_the_best_metric_is_what_evaluate_finds_afterwards(tmp_path: Path, best: Any) -> None:
    run = Run(tmp_path, load_best_model_at_end=True, greater_is_better=best is max).train()
    state = run.trainer.state
    losses = {row["step"]: row["eval_loss"] for row in state.log_history if "eval_loss" in row}
    assert list(losses) == [3, 6]
    assert state.best_metric == best(losses.values())
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best(losses, key=losses.__getitem__)}")
    assert run.trainer.evaluate()["eval_loss"] == state.best_metric
    other = plain(tmp_path / "other", model=GPT2LMHeadModel.from_pretrained(state.best_model_checkpoint))
    assert other.evaluate()["eval_loss"] == state.best_metric
    run.trainer.save_model(str(tmp_path / "final"))
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert same(saved, load_file(Path(state.best_model_checkpoint) / "model.safetensors"))


def test_a_best_model_that_is_gone_leaves_the_average(tmp_path: Path) -> None:
    run = Run(tmp_path, save_total_limit=2).train()
    expected = dict(run.belay.average_state_dict())
    run.trainer.state.best_model_checkpoint = str(tmp_path / "gone")
    run.trainer._load_best_model()
    assert same(dict(run.belay.average_state_dict()), expected)


def test_saved_and_pushed_models_are_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", eval_strategy="no").train()
    average = run.belay.average_state_dict()
    run.callback.use_weights()
    run.trainer.save_model(str(tmp_path / "saved"))
    close(load_file(tmp_path / "saved" / "model.safetensors"), weights_in(average))
    own = weights(run.trainer.model)
    assert same(own, run.observer.after[-1])

    pushed: list[dict[str, Tensor]] = []

    class Hub:
        def upload_folder(self, folder_path: str, **how: Any) -> None:
            pushed.append(load_file(Path(folder_path) / "model.safetensors"))

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    monkeypatch.setattr(run.trainer, "create_model_card", lambda **how: None)
    run.trainer.hub_model_id = "somebody/something"
    run.trainer.push_to_hub()
    assert len(pushed) == 1
    assert all(torch.equal(value, average[name]) for name, value in pushed[0].items())


def weights_in(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "lm_head.weight"}  # tied, saved once


def test_after_training_the_model_is_the_average_also_when_nothing_else_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path, eval_strategy="no").train()
    model, average = run.trainer.model, weights_in(run.belay.average_state_dict())
    assert same(weights(model), average)
    del run
    gc.collect()
    assert same(weights(model), average)
    copied = copy.deepcopy(model)
    assert same(weights(copied), average)


@pytest.mark.thorough
def test_a_trainer_is_not_kept_alive(tmp_path: Path) -> None:
    import weakref

    gc.collect()
    gc.disable()
    try:
        run = Run(tmp_path, max_steps=2, eval_strategy="no").train()
        watched = [weakref.ref(each) for each in (run.callback, run.belay)]
        bare = plain(tmp_path / "bare", max_steps=2, eval_strategy="no")
        bare.train()
        trainers = [weakref.ref(run.trainer), weakref.ref(bare)]
        del run, bare
        if trainers[1]() is None:  # as far as Transformers lets go itself
            assert trainers[0]() is None
            assert [each() for each in watched] == [None, None]
        gc.collect()
        assert [each() for each in (*watched, *trainers)] == [None] * 4
    finally:
        gc.enable()


def test_with_export_false_files_are_the_weights_and_evaluations_the_average(tmp_path: Path) -> None:
    run = Run(tmp_path, options={"export": False}).train()
    after = run.observer.after
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert same({name: saved[name] for name in after[2]}, after[2])
    assert same(weights(run.trainer.model), after[-1])
    averaged = gpt2(1)
    averaged.load_state_dict(run.belay.average_state_dict())
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(averaged, tmp_path), abs=1e-6)
    assert same(weights(run.trainer.model), after[-1])
    run.trainer.predict(texts(8))
    assert same(weights(run.trainer.model), after[-1])
    run.callback.use_average()
    run.trainer.save_model(str(tmp_path / "saved"))
    assert same({name: load_file(tmp_path / "saved" / "model.safetensors")[name] for name in after[-1]}, after[-1])
    state = torch.load(tmp_path / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert not any("torchbelay//" in key for entries in state["state"].values() for key in entries)
    again = Run(tmp_path, model=gpt2(8), options={"export": False}).train(str(tmp_path / "checkpoint-3"))
    assert same(again.everything(), run.everything())


# Resuming -------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}
METHODS: dict[str, Any] = {
    "belay": BELAY,
    "warmup": tb.methods.ema(0.9, warmup="ratio"),
    "schedule_free": tb.methods.schedule_free(0.9),
}


@pytest.mark.thorough
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_bit_for_bit(tmp_path: Path, method: str, setting: str) -> None:
    went_on = Run(tmp_path / "one", METHODS[method], **SETTINGS[setting]).train()
    again = Run(tmp_path / "two", METHODS[method], model=gpt2(7), **SETTINGS[setting])
    again.train(str(tmp_path / "one" / "checkpoint-3"))  # from elsewhere
    assert again.belay.step == 6
    assert len(again.observer.after) == 3
    assert same(again.observer.before[0], went_on.observer.before[3])
    assert same(again.everything(), went_on.everything())
    ends = [load_file(tmp_path / run / "checkpoint-6" / "model.safetensors") for run in ("one", "two")]
    assert same(*ends)


def test_a_method_with_a_function_resumes_with_a_warning(tmp_path: Path) -> None:
    went_on = Run(tmp_path / "one", tb.methods.ema(lambda step: 1 - 1 / step)).train()
    again = Run(tmp_path / "two", tb.methods.ema(lambda step: 1 - 1 / step), model=gpt2(7))
    with pytest.warns(tb.BelayWarning, match=r"ema\.decay=<function"):
        again.train(str(tmp_path / "one" / "checkpoint-3"))
    assert same(again.everything(), went_on.everything())


def test_a_run_that_was_stopped_resumes_from_its_own_folder(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = True
            return control

    went_on = Run(tmp_path / "one", BELAY, load_best_model_at_end=True).train()
    stopped = Run(tmp_path / "two", BELAY)
    stopped.trainer.add_callback(Stop())
    stopped.train()
    assert stopped.belay.step == 3
    again = Run(tmp_path / "two", BELAY, model=gpt2(7), load_best_model_at_end=True).train(resume=True)
    assert same(again.everything(), went_on.everything())
    assert again.trainer.state.best_metric == went_on.trainer.state.best_metric


def test_one_trainer_goes_back_to_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, BELAY).train()
    ended = copy.deepcopy(run.everything())
    run.trainer.evaluate()  # the model holds the average
    run.train(str(tmp_path / "checkpoint-3"))
    assert same(run.everything(), ended)


def test_weights_in_bfloat16_resume_with_averages_in_float32(tmp_path: Path) -> None:
    went_on = Run(tmp_path / "one", model=gpt2().bfloat16()).train()
    average = went_on.belay.state_dict()["averages"]["average"]["weights"]
    assert {value.dtype for value in average.values()} == {torch.float32}
    again = Run(tmp_path / "two", model=gpt2(7).bfloat16()).train(str(tmp_path / "one" / "checkpoint-3"))
    assert same(again.everything(), went_on.everything())


class Normed(nn.Module):
    """A model that is not of Transformers, with buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(input_ids.float())
        return {"loss": (found - labels.float().sum(1, keepdim=True) / 10).square().mean(), "logits": found}


def test_buffers_spectators_and_a_late_start_resume(tmp_path: Path) -> None:
    options = {"buffers": "average", "start": 2, "spectators": {"short": tb.Spring.ema(decay=0.2)}}
    went_on = Run(tmp_path / "one", model=Normed(), options=options).train()
    again = Run(tmp_path / "two", model=Normed(4), options=options)
    again.train(str(tmp_path / "one" / "checkpoint-3"))
    assert same(again.everything(), went_on.everything())
    buffers = [dict(run.trainer.model.named_buffers()) for run in (went_on, again)]
    assert same(*buffers)
    saved = load_file(tmp_path / "one" / "checkpoint-6" / "model.safetensors")["layers.1.running_mean"]
    assert torch.equal(saved, went_on.belay.average_state_dict()["layers.1.running_mean"])
    assert not torch.equal(saved, buffers[0]["layers.1.running_mean"])


def test_a_checkpoint_without_an_average_is_the_beginning_of_one_with_a_warning(tmp_path: Path) -> None:
    plain(tmp_path / "bare").train()
    run = Run(tmp_path / "averaged")
    with pytest.warns(tb.BelayWarning, match="this optimizer's state has no averages"):
        run.train(str(tmp_path / "bare" / "checkpoint-3"))
    first = load_file(tmp_path / "bare" / "checkpoint-3" / "model.safetensors")
    assert same(run.observer.before[0], {name: first[name] for name in run.observer.before[0]})
    close(dict(run.belay.average_state_dict()), ema(run.observer.before[0], run.observer.after))


def test_a_checkpoint_of_the_model_alone_is_resumed_with_a_warning(tmp_path: Path) -> None:
    Run(tmp_path / "one", save_only_model=True).train()
    run = Run(tmp_path / "two", model=gpt2(3))
    with pytest.warns(tb.BelayWarning, match=r"checkpoint-3' has no state of the optimizer"):
        run.train(str(tmp_path / "one" / "checkpoint-3"))
    saved = load_file(tmp_path / "one" / "checkpoint-3" / "model.safetensors")
    assert same(run.observer.before[0], {name: saved[name] for name in run.observer.before[0]})


def test_a_checkpoint_of_another_decay_is_refused_and_a_callback_may_change_it(tmp_path: Path) -> None:
    Run(tmp_path / "one").train()
    path = str(tmp_path / "one" / "checkpoint-3")
    message = (
        r"do not fit, and nothing was loaded: the method of .* differs.* callback\.belay\.change\(method\) in on_tr"
    )
    with pytest.raises(ValueError, match=message) as refused:
        Run(tmp_path / "two", tb.Spring.ema(decay=0.9)).train(path)
    assert "strict=False" not in str(refused.value)
    run = Run(tmp_path / "three")
    begun: dict[str, Tensor] = {}

    class Change(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.belay.change(tb.Spring.ema(decay=0.9))
            begun.update(run.belay.average_state_dict())

    run.trainer.add_callback(Change())
    run.train(path)
    for after in run.observer.after:
        begun |= {name: 0.9 * begun[name] + 0.1 * value for name, value in after.items()}
    assert len(run.observer.after) == 3
    close(dict(run.belay.average_state_dict()), {name: begun[name] for name in run.observer.after[0]})


# LoRA -----------------------------------------------------------------------------------------------------------------


def lora(seed: int = 0) -> Any:
    peft = pytest.importorskip("peft", reason="peft makes the adapters that this test is about")
    config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True, lora_dropout=0.1)
    base = gpt2()
    torch.manual_seed(seed)
    return peft.get_peft_model(base, config)


def test_the_adapter_of_a_checkpoint_is_the_average_and_the_only_one(tmp_path: Path) -> None:
    import peft

    model = lora()
    first = weights(model)
    run = Run(tmp_path, model=model).train()
    folder = tmp_path / "checkpoint-3"
    saved = load_file(folder / "adapter_model.safetensors")
    expected = ema(first, run.observer.after[:3])
    close(saved, {name.replace(".default", ""): value for name, value in expected.items()})
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(gpt2(), folder)
    assert list(loaded.peft_config) == ["default"]
    found = peft.get_peft_model_state_dict(loaded)
    assert same(dict(sorted(found.items())), dict(sorted(saved.items())))


@pytest.mark.thorough
def test_lora_resumes_bit_for_bit_and_its_best_metric_is_found_again(tmp_path: Path) -> None:
    import peft

    went_on = Run(tmp_path / "one", BELAY, model=lora()).train()
    again = Run(tmp_path / "two", BELAY, model=lora(5)).train(str(tmp_path / "one" / "checkpoint-3"))
    assert list(again.trainer.model.peft_config) == ["default"]
    assert same(again.everything(), went_on.everything())
    for greater in (True, False):
        folder = tmp_path / f"best {greater}"
        run = Run(folder, BELAY, model=lora(), load_best_model_at_end=True, greater_is_better=greater).train()
        state = run.trainer.state
        assert run.trainer.evaluate()["eval_loss"] == state.best_metric
        loaded = peft.PeftModel.from_pretrained(gpt2(), state.best_model_checkpoint)
        assert plain(tmp_path / "other", model=loaded).evaluate()["eval_loss"] == state.best_metric


# The life of a Trainer ------------------------------------------------------------------------------------------------


def test_a_second_train_goes_on_from_the_weights_with_the_same_average(tmp_path: Path) -> None:
    model = gpt2()
    first = weights(model)
    run = Run(tmp_path, model=model, max_steps=3, eval_strategy="no").train()
    belay = run.belay
    assert same(weights(model), weights_in(belay.average_state_dict()))
    run.train()
    assert run.belay is belay
    assert belay.step == 6
    assert same(run.observer.before[3], run.observer.after[2])
    close(dict(belay.average_state_dict()), ema(first, run.observer.after))


@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
def test_another_trainer_goes_on_with_the_average_that_the_first_has_left(tmp_path: Path, method: Any) -> None:
    model = gpt2()
    first = Run(tmp_path / "first", method, model=model, max_steps=2, eval_strategy="no").train()
    left = weights(model)
    second = Run(tmp_path / "second", method, model=model, max_steps=2, eval_strategy="no").train()
    assert same(second.observer.before[0], left)
    found = weights(model)
    assert same(found, weights_in(second.belay.average_state_dict()))
    if method is EMA:
        close(found, ema(left, second.observer.after))
    loss = second.trainer.evaluate()["eval_loss"]
    assert first.trainer.evaluate()["eval_loss"] == loss  # the first has the model as it is
    first.trainer.save_model(str(tmp_path / "saved"))
    assert same(weights(GPT2LMHeadModel.from_pretrained(tmp_path / "saved")), found)
    first.train()
    assert same(first.observer.before[2], found)
    assert first.belay.step == 2  # an average of its own


def test_weights_that_were_loaded_after_train_are_those_that_are_trained_next(tmp_path: Path) -> None:
    model = gpt2()
    run = Run(tmp_path, model=model, max_steps=2, eval_strategy="no").train()
    run.trainer.evaluate()
    model.load_state_dict(gpt2(7).state_dict())
    loaded = weights(model)
    with pytest.warns(
        UserWarning, match=r"the model was written to after train\(\): training goes on from what it holds"
    ):
        run.train()
    assert same(run.observer.before[2], loaded)
    close(weights(model), ema(loaded, run.observer.after[2:]))


def test_a_loop_of_the_users_own_may_train_the_model_after_train(tmp_path: Path) -> None:
    """The model is the average then, but in no block: a step is refused only inside `averaged()`."""
    model = gpt2()
    run = Run(tmp_path, model=model, max_steps=2, eval_strategy="no").train()
    run.trainer.evaluate()
    average = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with run.belay.averaged(), pytest.raises(RuntimeError, match="an optimizer step inside averaged"):
        optimizer.step()
    optimizer.step()
    close(weights(model), {name: value - 0.5 for name, value in average.items() if value.is_floating_point()})


def test_a_model_of_model_init_has_an_average_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, model_init=lambda: gpt2(3), max_steps=3, eval_strategy="no").train()
    before, model = run.belay, run.trainer.model
    run.train()
    assert run.belay is not before
    assert run.trainer.model is not model
    assert run.belay.step == 3
    close(dict(run.belay.average_state_dict()), ema(run.observer.before[3], run.observer.after[3:]))
    assert same(dict(run.belay.average_state_dict()), dict(before.average_state_dict()))


def test_an_exception_in_an_evaluation_gives_the_weights_back_and_training_goes_on(tmp_path: Path) -> None:
    class Broken(Trainer):
        broken = True

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.broken:
                raise OSError("no disk")
            return super().prediction_step(*args, **kwargs)

    run = Run(tmp_path, made=plain(tmp_path, kind=Broken))
    with pytest.raises(OSError, match="no disk"):
        run.train()
    assert same(weights(run.trainer.model), run.observer.after[2])
    run.trainer.broken = False
    run.train()
    assert same(run.observer.before[3], run.observer.after[2])
    assert run.belay.step == 9


def test_a_subclass_that_never_calls_the_optimizers_train_mode_trains_the_weights(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    run = Run(tmp_path, made=plain(tmp_path, kind=Own)).train()
    assert same(run.observer.before[3], run.observer.after[2])
    assert run.belay.step == 6


def test_an_optimizer_with_modes_of_its_own_is_told_them_while_it_has_its_weights(tmp_path: Path) -> None:
    said: list[tuple[str, dict[str, Tensor]]] = []

    class Moded(torch.optim.SGD):
        def eval(self) -> None:
            said.append(("eval", weights(model)))

        def train(self) -> None:
            said.append(("train", weights(model)))

    model = gpt2()
    optimizer = Moded(model.parameters(), lr=1e-1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run = Run(tmp_path, model=model, optimizers=(optimizer, schedule)).train()
    evaluated = [seen for mode, seen in said if mode == "eval"]
    assert len(evaluated) == 2
    assert same(evaluated[0], run.observer.after[2])
    trained = [seen for mode, seen in said if mode == "train"]
    assert same(trained[3], run.observer.before[3])
    assert run.trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(run.trainer.model, tmp_path), abs=1e-6)


def test_an_evaluation_on_start_is_that_of_the_first_weights(tmp_path: Path) -> None:
    run = Run(tmp_path, eval_on_start=True).train()
    first = next(row for row in run.trainer.state.log_history if "eval_loss" in row)
    assert first["eval_loss"] == pytest.approx(loss_of(gpt2(), tmp_path), abs=1e-6)
    assert run.belay.step == 6


# TRL ------------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_trainer_of_trl_evaluates_saves_and_resumes_the_average(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="TRL needs datasets")
    trl = pytest.importorskip("trl", reason="TRL is the subclass that this test is about")
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer of nine words")
    words = [*"abcdefgh"]
    known = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    processing = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    rows = torch.randint(8, (24, 6), generator=torch.Generator().manual_seed(5)).tolist()
    data = datasets.Dataset.from_dict({"text": [" ".join(words[i] for i in row) for row in rows]})

    def made(name: str, seed: int = 0, **settings: Any) -> Run:
        how = QUIET | STEPS | {"max_length": 8, "bf16": False, "gradient_checkpointing": False} | settings
        trainer = trl.SFTTrainer(
            model=gpt2(seed),
            args=trl.SFTConfig(str(tmp_path / name), **how),
            train_dataset=data,
            eval_dataset=data.select(range(8)),
            processing_class=processing,
        )
        return Run(tmp_path / name, made=trainer)

    went_on = made("one").train()
    assert isinstance(went_on.trainer, trl.SFTTrainer)
    saved = load_file(tmp_path / "one" / "checkpoint-3" / "model.safetensors")
    close(saved, ema(went_on.observer.before[0], went_on.observer.after[:3]))
    again = made("two", 7).train(str(tmp_path / "one" / "checkpoint-3"))
    assert same(again.everything(), went_on.everything())
    for greater in (True, False):
        best = made(f"best {greater}", load_best_model_at_end=True, greater_is_better=greater).train()
        assert best.trainer.evaluate()["eval_loss"] == best.trainer.state.best_metric


# Reports --------------------------------------------------------------------------------------------------------------


def test_numbers_reach_tensorboard_and_reporters_of_any_order(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="reads TensorBoard")

    class Reporter(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(dict(kwargs["logs"]))

    reporter = Reporter()
    run = Run(tmp_path / "run", report_to=["tensorboard"], callbacks=[reporter])
    metrics: list[dict[str, Any]] = []
    run.train()
    metrics.append(run.trainer.evaluate())
    found = events.EventAccumulator(str(next((tmp_path / "run").rglob("events.out.tfevents.*")).parent)).Reload()
    history = [row for row in run.trainer.state.log_history if "loss" in row]
    assert len(history) == 6
    for tag in ("tension", "tension_ratio", "effective_lr", "step"):
        written = [scalar.value for scalar in found.Scalars(f"train/belay/{tag}")]
        assert written == pytest.approx([row[f"belay/{tag}"] for row in history])
        assert [row[f"belay/{tag}"] for row in reporter.seen if "loss" in row] == [
            row[f"belay/{tag}"] for row in history
        ]
    assert [row["belay/step"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1]["belay/tension"] == run.belay.stats()["tension"]
    assert not any(key.startswith("belay/") for key in metrics[0])


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_callback_alone_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be one of callbacks=\[...\].*attach\(trainer, method\)"):
        plain(tmp_path, callbacks=[BelayCallback(EMA)])
    trainer = plain(tmp_path)
    trainer.add_callback(BelayCallback(EMA))
    with pytest.raises(RuntimeError, match=r"added to a Trainer and not attached; write trainer"):
        trainer.train()


def test_wrong_arguments_are_named_and_nothing_is_attached(tmp_path: Path) -> None:
    trainer = plain(tmp_path)
    with pytest.raises(TypeError, match=r"trainer=GPT2LMHeadModel is not a transformers.Trainer"):
        attach(trainer.model, EMA)
    with pytest.raises(TypeError, match="method=7 is neither an averaging method"):
        attach(trainer, 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="export='yes' is neither True nor False"):
        attach(trainer, EMA, export="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="save_with_optimizer is always True"):
        attach(trainer, EMA, save_with_optimizer=False)
    with pytest.raises(TypeError, match=r"decay=0\.9 is not an option of Belay"):
        attach(trainer, EMA, decay=0.9)
    with pytest.raises(ValueError, match="every=0"):
        attach(trainer, EMA, every=0)
    assert type(trainer) is Trainer
    callback = attach(trainer, EMA)
    with pytest.raises(RuntimeError, match=r"there is no Belay yet: train\(\) makes it"):
        _ = callback.belay
    with pytest.raises(ValueError, match="trainer has a BelayCallback already"):
        attach(trainer, EMA)
    with pytest.raises(ValueError, match="this BelayCallback has a Trainer already"):
        callback.attach(plain(tmp_path))


def test_the_best_of_weights_that_were_not_measured_is_refused(tmp_path: Path) -> None:
    trainer = plain(tmp_path, load_best_model_at_end=True)
    with pytest.raises(ValueError, match="export=False does not go with load_best_model_at_end=True"):
        attach(trainer, EMA, export=False)


def test_flat_pieces_of_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain(tmp_path)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(ValueError, match="trainer uses DeepSpeed or Megatron-LM"):
        attach(trainer, EMA)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", None, raising=False)
    with pytest.raises(ValueError, match=r"trainer uses FSDP1.*fsdp_config=\{'version': 2\}"):
        attach(trainer, EMA)


def test_attach_inside_train_is_refused(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            attach(trainer, EMA)

    trainer = plain(tmp_path, callbacks=[Late()])
    with pytest.raises(RuntimeError, match=r"attach\(\) inside train\(\)"):
        trainer.train()


# Two processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Results:
    return results(
        transformers_ranks.__file__, tmp_path_factory.getbasetemp(), worker_id, limit=transformers_ranks.LIMIT
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", transformers_ranks.CHECKS)
def test_on_two_processes(said: Results, name: str) -> None:
    assert name in said, "an earlier check stopped the processes"
    assert said[name] is None, said[name]

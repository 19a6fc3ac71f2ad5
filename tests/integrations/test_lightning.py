"""Lightning's Trainer with `BelayCallback`; every training is compared with an account of its own, or bit for bit."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the callback is for Lightning, which is not installed")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchbelay as tb
from helpers.lightning_ranks import Begins
from helpers.lightning_training import (
    NOISE,
    Account,
    Regression,
    every_epoch,
    load,
    loader,
    loss,
    parameters,
    state,
    trainer,
)
from helpers.root import ROOT
from helpers.small import BELAY, SWINGING, same
from torchbelay.integrations.lightning import BelayCallback

pytestmark = [pytest.mark.filterwarnings(line) for line in NOISE]

EMA = tb.methods.ema(0.9)
SHORT = tb.methods.ema(0.5)


def fitted(folder: Path, *callbacks: Callback, model: Regression | None = None, **settings: Any) -> Regression:
    model = Regression() if model is None else model
    ckpt_path = settings.pop("ckpt_path", None)
    trainer(folder, *callbacks, **settings).fit(model, loader(), loader(1), ckpt_path=ckpt_path)
    return model


def score(model: nn.Module) -> float:
    """The mean loss of the validation's batches."""
    model.eval()
    with torch.no_grad():
        return torch.stack([loss(model, batch) for batch in loader(1)]).mean().item()


def plain() -> Any:
    return Regression().net


# What a training gives ----------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_average_with_the_weights_beside_it(tmp_path: Path) -> None:
    callback, account = BelayCallback(EMA), Account(0.9)
    model = fitted(tmp_path, callback, account, every_epoch(tmp_path))
    saved = load(tmp_path / "epoch=2.ckpt")
    assert account.is_average(saved["state_dict"])
    assert account.is_weights(saved["current_model_state"])
    assert not account.is_weights(saved["state_dict"])
    assert list(saved["state_dict"]) == list(saved["current_model_state"]) == list(model.state_dict())
    assert saved["torchbelay"][callback.state_key]["step"] == 12
    assert same(state(model), saved["state_dict"])  # the finished model
    assert callback.belay is not None
    assert same(dict(callback.belay.average_state_dict()), saved["state_dict"])
    again = Regression.load_from_checkpoint(tmp_path / "epoch=2.ckpt", weights_only=False)
    assert account.is_average(state(again))


def test_a_pull_is_that_of_a_loop_without_lightning(tmp_path: Path) -> None:
    fitted(tmp_path, BelayCallback(BELAY), every_epoch(tmp_path))
    saved = load(tmp_path / "epoch=2.ckpt")
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, BELAY)
    for _ in range(3):
        for batch in loader():
            optimizer.zero_grad()
            loss(model.net, batch).backward()
            optimizer.step()
    assert same(saved["current_model_state"], state(model))
    assert same(saved["state_dict"], dict(belay.average_state_dict()))


class Watching(Regression):
    """Keeps what it holds in each hook of its own."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account
        self.seen: list[tuple[str, bool, bool]] = []

    def look(self, where: str) -> None:
        if not self.trainer.sanity_checking:
            now = state(self)
            self.seen.append((where, self.account.is_average(now), self.account.is_weights(now)))

    def on_validation_start(self) -> None:
        self.look("start")

    def validation_step(self, batch: Tensor) -> None:
        super().validation_step(batch)
        self.look("step")

    def on_validation_epoch_end(self) -> None:
        self.look("epoch end")

    def on_train_epoch_end(self) -> None:
        self.look("train epoch end")


@pytest.mark.parametrize("chosen", ["average", None])
def test_a_validation_sees_the_average_up_to_the_modules_own_epoch_end(tmp_path: Path, chosen: str | None) -> None:
    account = Account(0.9)
    model = fitted(tmp_path, BelayCallback(EMA, validate=chosen), account, model=Watching(account), epochs=2)
    inside = ("start", "step", "step", "step", "step", "epoch end")
    epoch = [(where, chosen is not None, chosen is None) for where in inside] + [("train epoch end", False, True)]
    assert model.seen == 2 * epoch


def test_weights_are_what_is_trained_checkpointed_and_left_if_asked_for(tmp_path: Path) -> None:
    account = Account(0.9)
    callback = BelayCallback(EMA, validate=None, checkpoint=None, finish=None)
    watch = every_epoch(tmp_path)
    model = fitted(tmp_path, callback, account, watch)
    saved = load(tmp_path / "epoch=2.ckpt")
    assert account.is_weights(saved["state_dict"])
    assert "current_model_state" not in saved
    assert account.is_weights(state(model))
    assert callback.belay is not None
    assert account.is_average(dict(callback.belay.average_state_dict()))
    assert watch.current_score is not None
    assert watch.current_score.item() == pytest.approx(score(model.net), rel=1e-5)


def test_spectators_are_validated_checkpointed_and_left_by_name(tmp_path: Path) -> None:
    long, short = Account(0.9), Account(0.5)
    callback = BelayCallback(EMA, spectators={"short": SHORT}, validate="short", checkpoint="short", finish="average")
    watch = every_epoch(tmp_path)
    model = fitted(tmp_path, callback, long, short, watch)
    saved = load(tmp_path / "epoch=2.ckpt")
    assert short.is_average(saved["state_dict"])
    assert not long.is_average(saved["state_dict"])
    assert long.is_average(state(model))
    net = plain()
    net.load_state_dict({name.removeprefix("net."): t for name, t in saved["state_dict"].items()})
    assert watch.current_score is not None
    assert watch.current_score.item() == pytest.approx(score(net), rel=1e-5)


def test_until_the_average_begins_the_weights_are_used(tmp_path: Path) -> None:
    account = Account(0.9)
    model = fitted(tmp_path, BelayCallback(EMA, start=100), account, every_epoch(tmp_path), epochs=1)
    saved = load(tmp_path / "epoch=0.ckpt")
    assert account.is_weights(saved["state_dict"])
    assert account.is_weights(saved["current_model_state"])
    assert account.is_weights(state(model))


@pytest.mark.parametrize("buffers", ["copy", "ignore"])
def test_a_buffer_that_a_validation_changes_stays_with_the_average_unless_they_share_it(
    tmp_path: Path, buffers: Any
) -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("validations", torch.zeros(()))

        def on_validation_epoch_end(self) -> None:
            self.validations += 1

    callback = BelayCallback(EMA, buffers=buffers, finish=None)
    model = fitted(tmp_path, callback, model=Counting(), num_sanity_val_steps=0)
    assert model.validations.item() == (3 if buffers == "ignore" else 0)
    assert callback.belay is not None
    assert callback.belay.average_state_dict()["validations"].item() == (3 if buffers == "ignore" else 1)


# Scores --------------------------------------------------------------------------------------------------------------


def test_the_best_score_is_that_of_a_test_of_the_best_checkpoint(tmp_path: Path) -> None:
    watch = every_epoch(tmp_path, save_top_k=1)
    callback = BelayCallback(EMA)
    first, model = trainer(tmp_path, callback, watch, epochs=4), Regression(lr=0.1)
    first.fit(model, loader(), loader(1))
    assert watch.best_model_score is not None
    best = pytest.approx(watch.best_model_score.item(), rel=1e-6)
    assert first.test(dataloaders=loader(1), ckpt_path="best", verbose=False)[0]["score"] == best
    assert first.validate(model, loader(1), ckpt_path="best", verbose=False)[0]["score"] == best
    path = watch.best_model_path
    again = trainer(tmp_path, BelayCallback(EMA))
    with pytest.warns(UserWarning, match="Please add the following callbacks"):  # the new Trainer saves nothing
        assert again.test(Regression(), loader(1), ckpt_path=path, verbose=False)[0]["score"] == best
    with pytest.warns(UserWarning, match="Please add the following callbacks"):
        assert trainer(tmp_path).test(Regression(), loader(1), ckpt_path=path, verbose=False)[0]["score"] == best
    assert score(Regression.load_from_checkpoint(path, weights_only=False).net) == pytest.approx(
        best.expected, rel=1e-5
    )


def test_outside_of_fit_the_model_is_used_as_it_is(tmp_path: Path) -> None:
    callback = BelayCallback(EMA, finish=None)
    chief, model = trainer(tmp_path, callback), Regression()
    chief.fit(model, loader(), loader(1))
    before = state(model)
    expected = pytest.approx(score(model.net), rel=1e-5)
    assert chief.validate(model, loader(1), verbose=False)[0]["score"] == expected
    assert chief.test(model, loader(1), verbose=False)[0]["score"] == expected
    predicted: Any = chief.predict(model, loader(1))
    assert torch.equal(predicted[0], model.eval().net(next(iter(loader(1)))))
    assert same(state(model), before)


def test_early_stopping_goes_by_the_average(tmp_path: Path) -> None:
    scores: list[float] = []

    class Noted(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                scores.append(trainer.callback_metrics["score"].item())

    account, stop = Account(0.99), EarlyStopping("score", patience=1, min_delta=1e9)
    chief, model = (
        trainer(tmp_path, BelayCallback(tb.methods.ema(0.99)), Noted(), account, stop, epochs=9),
        Regression(),
    )
    chief.fit(model, loader(), loader(1))
    assert chief.current_epoch == 2
    assert account.is_average(state(model))
    assert scores[-1] == pytest.approx(score(model.net), rel=1e-5)


# Resuming ------------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "clipping": {"gradient_clip_val": 0.1},
}
METHODS: dict[str, dict[str, Any]] = {
    "ema": {"method": EMA},
    "pull": {"method": BELAY},
    "velocities": {"method": SWINGING},
    "spectators and averaged buffers": {"method": EMA, "spectators": {"short": SHORT}, "buffers": "average"},
    "a start and a rhythm": {"method": EMA, "start": 3, "every": 2},
    "a warm-up": {"method": tb.methods.ema(0.99, warmup="ratio")},
    "weights": {"method": EMA, "checkpoint": None},
}
CASES = [("ema", setting) for setting in SETTINGS] + [(method, "plain") for method in METHODS if method != "ema"]


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_a_resumed_training_is_the_training_bit_for_bit(tmp_path: Path, method: str, setting: str) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
        callback = BelayCallback(**METHODS[method])
        fitted(folder, callback, every_epoch(folder), epochs=4, ckpt_path=ckpt_path, **SETTINGS[setting])
        return load(folder / "epoch=3.ckpt")

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", tmp_path / "whole" / "epoch=1.ckpt")
    assert not (tmp_path / "resumed" / "epoch=1.ckpt").exists()
    for key in ("state_dict", "current_model_state", "torchbelay", "optimizer_states"):
        assert same(whole.get(key), resumed.get(key)), key
    weights = whole["state_dict"] if method == "weights" else whole["current_model_state"]
    (average,) = whole["torchbelay"].values()
    kept = average["averages"]["average"]["weights"]
    assert not any(torch.equal(kept[name].to(weights[name].dtype), weights[name]) for name in kept)


def test_a_method_with_a_function_resumes_with_a_warning(tmp_path: Path) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
        callback = BelayCallback(tb.methods.ema(lambda step: 1 - 1 / step))
        fitted(folder, callback, every_epoch(folder), epochs=4, ckpt_path=ckpt_path)
        return load(folder / "epoch=3.ckpt")["torchbelay"]

    whole = run(tmp_path / "whole")
    with pytest.warns(tb.BelayWarning, match=r"ema\.decay=<function"):
        resumed = run(tmp_path / "resumed", tmp_path / "whole" / "epoch=1.ckpt")
    assert same(whole, resumed)


def test_a_checkpoint_of_16_bit_weights_has_the_average_in_32(tmp_path: Path) -> None:
    fitted(tmp_path, callback := BelayCallback(EMA), every_epoch(tmp_path), precision="bf16-true")
    saved = load(tmp_path / "epoch=2.ckpt")
    average = saved["torchbelay"][callback.state_key]["averages"]["average"]["weights"]
    for name, w2 in average.items():
        assert w2.dtype is torch.float32
        assert torch.equal(saved["state_dict"][name], w2.bfloat16())


def test_a_checkpoint_that_is_saved_after_the_fit_goes_on_too(tmp_path: Path) -> None:
    fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path), epochs=4)
    chief, model = trainer(tmp_path, BelayCallback(EMA), epochs=2), Regression()
    chief.fit(model, loader(), loader(1))
    chief.save_checkpoint(tmp_path / "after.ckpt")
    assert same(load(tmp_path / "after.ckpt")["state_dict"], state(model))
    other = tmp_path / "other"
    fitted(other, BelayCallback(EMA), every_epoch(other), epochs=4, ckpt_path=tmp_path / "after.ckpt")
    whole, resumed = load(tmp_path / "epoch=3.ckpt"), load(other / "epoch=3.ckpt")
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(whole[key], resumed[key]), key


def test_weights_that_are_changed_after_the_fit_are_saved_as_they_are(tmp_path: Path) -> None:
    chief, model = trainer(tmp_path, BelayCallback(EMA)), Regression()
    chief.fit(model, loader(), loader(1))
    nn.init.zeros_(model.net[0].weight)
    chief.save_checkpoint(tmp_path / "after.ckpt")
    assert not load(tmp_path / "after.ckpt")["state_dict"]["net.0.weight"].any()


def test_a_finished_training_that_is_resumed_leaves_the_average(tmp_path: Path) -> None:
    whole = fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path))
    resumed = fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path), ckpt_path=tmp_path / "epoch=2.ckpt")
    assert same(state(resumed), state(whole))


def test_a_checkpoint_that_is_saved_during_a_validation_is_like_any_other(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            inside = state(pl_module)
            trainer.save_checkpoint(tmp_path / "inside.ckpt")
            assert same(state(pl_module), inside)  # the validation goes on with the average

    account = Account(0.9)
    fitted(tmp_path, BelayCallback(EMA), account, Saving(), every_epoch(tmp_path))
    inside, after = load(tmp_path / "inside.ckpt"), load(tmp_path / "epoch=2.ckpt")
    assert account.is_weights(inside["current_model_state"])
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(inside[key], after[key]), key


@pytest.mark.parametrize("moment", ["on_validation_epoch_end", "on_train_epoch_end"])
def test_a_checkpoint_that_is_saved_in_a_block_of_the_user_is_like_any_other(tmp_path: Path, moment: str) -> None:
    def save(trainer: Any, pl_module: Any) -> None:
        assert callback.belay is not None
        with callback.belay.averaged():
            inside = state(pl_module)
            trainer.save_checkpoint(tmp_path / "inside.ckpt")
            assert same(state(pl_module), inside)  # the block goes on with the average

    account, callback, saving = Account(0.9), BelayCallback(EMA), Callback()
    setattr(saving, moment, save)
    fitted(tmp_path, callback, account, saving, every_epoch(tmp_path))
    inside, after = load(tmp_path / "inside.ckpt"), load(tmp_path / "epoch=2.ckpt")
    assert account.is_weights(inside["current_model_state"])
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(inside[key], after[key]), key


@pytest.mark.parametrize("method", [EMA, BELAY])
def test_a_checkpoint_that_is_saved_in_the_middle_of_a_step_disturbs_nothing(tmp_path: Path, method: Any) -> None:
    class Saving(Regression):
        def training_step(self, batch: Tensor) -> Tensor:  # Lightning calls it inside of optimizer.step()
            if self.trainer.global_step == 6:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")
            return super().training_step(batch)

    undisturbed = fitted(tmp_path, BelayCallback(method))
    account = Account(0.9)
    disturbed = fitted(tmp_path, BelayCallback(method), account, model=Saving())
    assert same(state(disturbed), state(undisturbed))
    middle, (averages,) = load(tmp_path / "middle.ckpt"), load(tmp_path / "middle.ckpt")["torchbelay"].values()
    assert averages["step"] == 6
    names = averages["averages"]["average"]["weights"]
    assert all(torch.equal(middle["state_dict"][name], w2) for name, w2 in names.items())


def test_another_method_is_refused_with_the_difference(tmp_path: Path) -> None:
    fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path))
    with pytest.raises(ValueError, match=r"(?s)decay.*0\.9.*0\.5"):
        fitted(tmp_path, BelayCallback(SHORT), every_epoch(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt")


class Tuned(Regression):
    """Trains what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Unfreeze(BaseFinetuning):
    """Adds the first layer to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)
        elif epoch > 1:
            self.make_trainable(pl_module.net[0])  # in a resumed fit it has been frozen again


@pytest.mark.filterwarnings(r"ignore:2 parameter\(s\) were added to the optimizer:torchbelay.BelayWarning")
@pytest.mark.parametrize("method", [EMA, SWINGING], ids=["ema", "velocities"])
@pytest.mark.parametrize("first", ["average", "finetuning"])
def test_a_finetuning_is_resumed_bit_for_bit_in_either_order_of_callbacks(
    tmp_path: Path, first: str, method: Any
) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> Regression:
        average, tuning = BelayCallback(method), Unfreeze()
        callbacks = (average, tuning) if first == "average" else (tuning, average)
        return fitted(folder, *callbacks, every_epoch(folder), model=Tuned(), epochs=4, ckpt_path=ckpt_path)

    run(tmp_path)
    whole = load(tmp_path / "epoch=3.ckpt")
    for epoch in (0, 2):  # before and after the layer was added
        folder = tmp_path / f"from {epoch}"
        run(folder, tmp_path / f"epoch={epoch}.ckpt")
        resumed = load(folder / "epoch=3.ckpt")
        for key in ("state_dict", "current_model_state", "torchbelay", "optimizer_states"):
            assert same(whole[key], resumed[key]), key
    (average,) = whole["torchbelay"].values()
    assert average["averages"]["average"]["ages"] == {
        name: 12 if "net.0" in name else 16 for name in whole["state_dict"] if name.endswith(("weight", "bias"))
    }
    finished = run(tmp_path / "finished", tmp_path / "epoch=3.ckpt")  # no step is taken
    assert same(state(finished), whole["state_dict"])


@pytest.mark.filterwarnings(r"ignore:2 parameter\(s\) were added to the optimizer:torchbelay.BelayWarning")
def test_a_checkpoint_that_is_saved_before_the_first_step_of_a_resumed_finetuning_has_its_average(
    tmp_path: Path,
) -> None:
    class Saving(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "again.ckpt")

    def run(*others: Callback, **given: Any) -> None:
        folder = tmp_path / str(len(others))
        fitted(folder, *others, BelayCallback(EMA), Unfreeze(), every_epoch(folder), model=Tuned(), **given)

    run(epochs=2)
    path = tmp_path / "0" / "epoch=1.ckpt"
    run(Saving(), epochs=3, ckpt_path=path)
    before, again = load(path), load(tmp_path / "again.ckpt")
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(before[key], again[key]), key


def test_a_finetuning_with_another_method_is_refused_before_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []

    class Noted(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)

    fitted(tmp_path, BelayCallback(EMA), Unfreeze(), every_epoch(tmp_path), model=Tuned(), epochs=1)
    with pytest.raises(
        ValueError, match=r"decay=0\.9.*decay=0\.5.* or remove 'torchbelay' from the checkpoint for a new"
    ):
        fitted(
            tmp_path,
            BelayCallback(SHORT),
            Noted(),
            Unfreeze(),
            every_epoch(tmp_path),
            model=Tuned(),
            ckpt_path=tmp_path / "epoch=0.ckpt",
        )
    assert steps == []


# Checkpoints of others -----------------------------------------------------------------------------------------------


def test_a_checkpoint_without_an_average_goes_on_with_a_warning(tmp_path: Path) -> None:
    fitted(tmp_path, every_epoch(tmp_path), epochs=2)
    account = Account(0.9)
    path = tmp_path / "epoch=1.ckpt"
    with pytest.warns(tb.BelayWarning, match="the checkpoint has no average of BelayCallback"):
        model = fitted(
            tmp_path, callback := BelayCallback(EMA), account, every_epoch(tmp_path), epochs=4, ckpt_path=path
        )
    assert account.is_average(state(model))  # the account begins at the checkpoint's weights
    assert callback.belay is not None
    assert callback.belay.step == 8
    weights = fitted(tmp_path, every_epoch(tmp_path), epochs=4)  # an EMA does not change the training
    assert account.is_weights(state(weights))


def test_a_checkpoint_of_lightnings_own_average_goes_on_with_its_weights(tmp_path: Path) -> None:
    fitted(tmp_path, EMAWeightAveraging(decay=0.9), every_epoch(tmp_path), epochs=2)
    account = Account(0.9)
    with (
        pytest.warns(tb.BelayWarning, match="the checkpoint has no average"),
        pytest.warns(UserWarning, match="Please add the following callbacks"),
    ):
        fitted(
            tmp_path, BelayCallback(EMA), account, every_epoch(tmp_path), epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt"
        )
    assert account.is_weights(state(fitted(tmp_path, every_epoch(tmp_path), epochs=4)))


class Changing(Regression):
    """Changes the decay when training begins, as docs/lightning.md says, and keeps an average of its own from there."""

    def __init__(self, callback: BelayCallback) -> None:
        super().__init__()
        self.callback, self.expected = callback, {}

    def on_train_start(self) -> None:
        assert self.callback.belay is not None
        self.callback.belay.change(SHORT)
        average = self.callback.belay.average_state_dict()
        self.expected = {name: average[name] for name in parameters(self)}

    def on_train_batch_end(self, *_: Any) -> None:
        self.expected = {name: 0.5 * self.expected[name] + 0.5 * w for name, w in parameters(self).items()}


def test_a_resumed_fit_may_change_the_decay(tmp_path: Path) -> None:
    fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path))
    path = tmp_path / "epoch=0.ckpt"
    message = r"differs: ema\(decay=0.9, …\) in the checkpoint, ema\(decay=0.5, …\) here; .* call belay.change"
    with pytest.raises(ValueError, match=message) as refused:
        fitted(tmp_path / "refused", BelayCallback(SHORT), every_epoch(tmp_path / "refused"), ckpt_path=path)
    assert "callback.belay.change(method) in on_train_start of your module" in str(refused.value)
    assert "strict=False" not in str(refused.value)
    callback = BelayCallback(EMA)
    watch = every_epoch(tmp_path / "changed")
    model = fitted(tmp_path / "changed", callback, watch, model=Changing(callback), ckpt_path=path)
    assert callback.belay is not None
    assert callback.belay.step == 12
    average = callback.belay.average_state_dict()
    for name, value in model.expected.items():
        torch.testing.assert_close(average[name], value, rtol=0, atol=1e-6)


def test_a_resume_without_the_callback_warns(tmp_path: Path) -> None:
    fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path), epochs=2)
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: .*BelayCallback"):
        fitted(tmp_path, every_epoch(tmp_path), ckpt_path=tmp_path / "epoch=1.ckpt")


def test_checkpoints_of_weights_alone_warn(tmp_path: Path) -> None:
    watch = every_epoch(tmp_path, save_weights_only=True)
    account = Account(0.9)
    with pytest.warns(tb.BelayWarning, match="save_weights_only=True.*they hold the weights and not the average"):
        fitted(tmp_path, BelayCallback(EMA), account, watch)
    assert account.is_weights(load(tmp_path / "epoch=2.ckpt")["state_dict"])
    fitted(tmp_path, BelayCallback(EMA, checkpoint=None), watch)  # is what was asked for


# Interruptions and repetitions ---------------------------------------------------------------------------------------


class Failing(Regression):
    """Fails once, in a validation or in a training step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where: str | None = where

    def fail(self, where: str, epoch: int = 1) -> None:
        if self.where == where and self.trainer.current_epoch == epoch and not self.trainer.sanity_checking:
            self.where = None
            raise RuntimeError("failed")

    def training_step(self, batch: Tensor) -> Tensor:
        self.fail("training")
        return super().training_step(batch)

    def validation_step(self, batch: Tensor) -> None:
        self.fail("validation")
        super().validation_step(batch)


@pytest.mark.parametrize("where", ["validation", "training"])
def test_after_an_exception_the_model_has_its_weights(tmp_path: Path, where: str) -> None:
    callback, account, model = BelayCallback(EMA), Account(0.9), Failing(where)
    save = every_epoch(tmp_path, save_on_exception=True, save_last=True)
    with pytest.raises(RuntimeError, match="failed"):
        fitted(tmp_path, callback, account, save, model=model)
    assert account.is_weights(state(model))
    saved = load(tmp_path / "last.ckpt")
    assert account.is_average(saved["state_dict"])
    assert account.is_weights(saved["current_model_state"])
    model.train()  # Lightning leaves it in the mode that it failed in
    resumed = fitted(tmp_path, callback, every_epoch(tmp_path), model=model, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(state(resumed), state(fitted(tmp_path, BelayCallback(EMA))))


def test_an_exception_in_the_sanity_check_leaves_the_weights(tmp_path: Path) -> None:
    class Broken(Regression):
        def validation_step(self, batch: Tensor) -> None:
            raise RuntimeError("failed")

    model, before = Broken(), state(Regression())
    with pytest.raises(RuntimeError, match="failed"):
        fitted(tmp_path, BelayCallback(EMA), model=model)
    assert same(state(model), before)


def test_a_second_fit_begins_at_what_the_model_holds(tmp_path: Path) -> None:
    callback, account = BelayCallback(BELAY), Account(0.9)
    chief, model = trainer(tmp_path, callback, account), Regression()
    chief.fit(model, loader(), loader(1))
    first, middle = callback.belay, state(model)
    chief.fit_loop.max_epochs = 5
    begin: dict[str, Tensor] = {}

    class Noted(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begin.update(state(pl_module))
            assert callback.belay is not None
            assert same(dict(callback.belay.average_state_dict()), begin)

    chief.callbacks.append(Noted())
    chief.fit(model, loader(), loader(1))
    assert same(begin, middle)
    assert callback.belay is not first
    assert callback.belay is not None
    assert callback.belay.step == 8
    assert same(dict(callback.belay.average_state_dict()), state(model))


def test_an_optimizer_that_is_used_after_the_fit_moves_no_average(tmp_path: Path) -> None:
    chief, model = trainer(tmp_path, callback := BelayCallback(BELAY)), Regression()
    chief.fit(model, loader(), loader(1))
    assert callback.belay is not None
    average = dict(callback.belay.average_state_dict())
    loss(model.net, next(iter(loader()))).backward()
    chief.optimizers[0].step()
    assert callback.belay.step == 12
    found = callback.belay.average_state_dict()
    assert all(torch.equal(found[name], average[name]) for name, _ in model.named_parameters())


class Searching(LearningRateFinder):
    """Keeps the model from before and after its search."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=8, early_stop_threshold=None, update_attr=False)
        self.seen: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(state(pl_module))
        super().on_fit_start(trainer, pl_module)
        self.seen.append(state(pl_module))
        assert self.optimal_lr is not None
        assert len(self.optimal_lr.results["loss"]) == 8


def test_a_search_for_a_learning_rate_leaves_no_trace(tmp_path: Path) -> None:
    finder = Searching()
    fitted(tmp_path / "searched", finder, BelayCallback(BELAY), every_epoch(tmp_path / "searched"))
    fitted(tmp_path, BelayCallback(BELAY), every_epoch(tmp_path))
    assert same(*finder.seen)
    searched, unsearched = load(tmp_path / "searched" / "epoch=2.ckpt"), load(tmp_path / "epoch=2.ckpt")
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(searched[key], unsearched[key]), key


def test_a_search_in_a_resumed_fit_keeps_weights_and_average(tmp_path: Path) -> None:
    # The epochs and the optimizer's state of the checkpoint are lost then, with or without an average: Lightning reads
    # its own checkpoint of the search last.
    fitted(tmp_path, callback := BelayCallback(BELAY), every_epoch(tmp_path), epochs=2)
    saved = load(tmp_path / "epoch=1.ckpt")

    class Noted(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert same(state(pl_module), saved["current_model_state"])
            assert callback.belay is not None
            assert same(callback.belay.state_dict(), saved["torchbelay"][callback.state_key])
            trainer.should_stop = True

    finder, path = Searching(), tmp_path / "epoch=1.ckpt"
    fitted(tmp_path, finder, callback, Noted(), every_epoch(tmp_path), epochs=4, ckpt_path=path)
    assert same(*finder.seen)


@pytest.mark.parametrize("mode", ["fit", "validate"])
def test_a_search_for_a_batch_size_leaves_no_trace(tmp_path: Path, mode: str) -> None:
    class Sized(Regression):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(loader().dataset, batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(loader(1).dataset, batch_size=self.batch_size)

    account, model = Account(0.9), Sized()
    finder = BatchSizeFinder(max_trials=2, steps_per_trial=3)
    chief = trainer(tmp_path, BelayCallback(EMA), account, finder)
    chief.fit(model) if mode == "fit" else chief.validate(model, verbose=False)
    assert model.batch_size > 2
    if mode == "fit":
        assert account.is_average(state(model))
    else:
        assert same(state(model), state(Regression()))


# Optimizers ----------------------------------------------------------------------------------------------------------


class Pair(Regression):
    """Two networks, each with an optimizer of its own, which steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(3, 1)

    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss(net, batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2), torch.optim.SGD(self.other.parameters(), lr=1e-1)


GIVEN: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "the first": ([{}], ["net"]),
    "the second": ([{"optimizer": 1}], ["other"]),
    "both": ([{"optimizer": [0, 1]}], ["net", "other"]),
    "all": ([{"optimizer": "all"}], ["net", "other"]),
    "two callbacks": ([{"optimizer": 1}, {"optimizer": 0}], ["net", "other"]),
}


@pytest.mark.parametrize("given", GIVEN)
def test_each_parameter_follows_its_own_optimizer(tmp_path: Path, given: str) -> None:
    arguments, averaged = GIVEN[given]

    def run(folder: Path, account: Account, path: Path | None = None) -> tuple[dict[str, Any], Regression]:
        callbacks = [BelayCallback(EMA, **each) for each in arguments]
        model = fitted(folder, *callbacks, account, every_epoch(folder), model=Pair(), ckpt_path=path)
        return load(folder / "epoch=2.ckpt"), model

    account = Account(0.9)
    saved, model = run(tmp_path, account)
    assert account.is_weights(saved["current_model_state"])
    for found in (saved["state_dict"], state(model)):
        for name, w1 in account.weights.items():
            is_averaged = name.partition(".")[0] in averaged
            assert torch.equal(found[name], w1) is not is_averaged
            assert torch.allclose(found[name].double(), account.average[name], rtol=0, atol=1e-6) is is_averaged
    assert len(saved["torchbelay"]) == len(arguments)
    resumed, _ = run(tmp_path / "resumed", Account(0.9), tmp_path / "epoch=0.ckpt")
    for key in ("state_dict", "current_model_state", "torchbelay"):
        assert same(saved[key], resumed[key]), key


def test_validations_of_two_callbacks_see_both_averages(tmp_path: Path) -> None:
    account = Account(0.9)

    class Seen(Pair):
        seen = 0

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                assert account.is_average(state(self))
                self.seen += 1

    callbacks = [BelayCallback(EMA, optimizer=i) for i in (0, 1)]
    model: Any = fitted(tmp_path, *callbacks, account, model=Seen())
    assert model.seen == 3


def test_two_callbacks_for_one_optimizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `BelayCallback`"):
        trainer(tmp_path, BelayCallback(EMA), BelayCallback(SHORT))


def test_an_optimizer_that_was_not_made_is_refused_by_its_position(tmp_path: Path) -> None:
    model, before = Regression(), state(Regression())
    with pytest.raises(ValueError, match=r"optimizer=1 asks for position 1, and .* returned 1 optimizer"):
        fitted(tmp_path, BelayCallback(EMA, optimizer=1), model=model)
    assert same(state(model), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": tb.methods.ema}, "was not called"),
        ({"method": EMA, "spectators": {"short": 0.5}}, "neither an averaging method"),
        ({"method": EMA, "validate": "weights"}, "validate='weights' is no average; choose one of 'average', or None"),
        ({"method": EMA, "spectators": {"short": SHORT}, "checkpoint": "x"}, "choose one of 'average', 'short'"),
        ({"method": EMA, "finish": False}, "finish=False is no average"),
        ({"method": EMA, "optimizer": -1}, "optimizer=-1 is no position"),
        ({"method": EMA, "optimizer": []}, r"optimizer=\[\] is no position"),
        ({"method": EMA, "optimizer": True}, "optimizer=True is no position"),
        ({"method": EMA, "optimizer": "every"}, "optimizer='every' is no position"),
        ({"method": EMA, "log_every_n_steps": 0}, "log_every_n_steps"),
        ({"method": EMA, "every": 0}, "every"),
        ({"method": EMA, "decay": 0.9}, "decay=0.9 is not an option of Belay"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        BelayCallback(**arguments)


# Numbers and configurations ------------------------------------------------------------------------------------------


def test_numbers_are_logged_as_often_as_asked(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")
    account = Account(0.9)
    fitted(tmp_path, callback := BelayCallback(EMA, log_every_n_steps=5, finish=None), account, logger=logger)
    rows = [row.split(",") for row in (tmp_path / "csv" / "metrics.csv").read_text().splitlines()]
    names = [name for name in rows[0] if name.startswith("belay/")]
    assert sorted(names) == ["belay/effective_lr", "belay/step", "belay/tension", "belay/tension_ratio"]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    logged = [row for row in table if row["belay/step"]]
    assert [int(row["belay/step"]) for row in logged] == [5, 10]
    assert [int(row["step"]) for row in logged] == [4, 9]  # Lightning counts from 0
    assert callback.belay is not None
    expected = math.sqrt(sum((account.weights[n] - a).square().sum().item() for n, a in account.average.items()))
    assert callback.belay.stats()["tension"] == pytest.approx(expected, rel=1e-5)


def test_tensorboard_has_the_numbers_too(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="board", version="")
    fitted(tmp_path, BelayCallback(EMA, log_every_n_steps=4), logger=logger, accumulate_grad_batches=2)
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in found.Scalars("belay/step")] == [4.0]
    assert found.Scalars("belay/tension")[0].value > 0


def test_numbers_without_a_logger_warn(tmp_path: Path) -> None:
    with pytest.warns(tb.BelayWarning, match="log_every_n_steps=5 has no effect: the Trainer has no logger"):
        fitted(tmp_path, BelayCallback(EMA, log_every_n_steps=5), epochs=1)


CONFIGURATION = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  max_epochs: 3
  callbacks:
    - class_path: torchbelay.integrations.lightning.BelayCallback
      init_args:
        method:
          class_path: torchbelay.methods.ema
          init_args:
            decay: 0.9
        finish: short
        buffers: average
        spectators:
          short:
            class_path: torchbelay.methods.ema
            init_args:
              decay: 0.5
"""


def configured(monkeypatch: pytest.MonkeyPatch, file: Path, text: str) -> Any:
    pytest.importorskip("jsonargparse", reason="Lightning's command line needs it")
    from lightning.pytorch.cli import LightningCLI

    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning calls what jsonargparse has renamed
    settings: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    return LightningCLI(Regression, args=["--config", str(file)], run=False, **settings)


def test_a_configuration_file_makes_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = configured(monkeypatch, tmp_path / "config.yaml", CONFIGURATION)
    (callback,) = (each for each in made.trainer.callbacks if isinstance(each, BelayCallback))
    account = Account(0.5)
    made.trainer.callbacks.append(account)
    made.trainer.fit(made.model, loader(), loader(1))
    assert account.is_average(state(made.model))
    assert callback.belay is not None
    assert "ema(decay=0.9" in repr(callback.belay)
    written = made.parser.dump(made.config)  # what Lightning keeps beside the logs makes the same callback
    again = configured(monkeypatch, tmp_path / "again.yaml", written)
    assert again.parser.dump(again.config) == written


def test_a_configuration_that_cannot_be_meant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="finish='long' is no average"):
        configured(monkeypatch, tmp_path / "config.yaml", CONFIGURATION.replace("finish: short", "finish: long"))


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "file", "directory"])
def test_two_processes_resume_bit_for_bit_and_test_the_score_that_they_watched(tmp_path: Path, kind: str) -> None:
    model = Regression(norm=kind == "ddp")
    fitted(tmp_path, BelayCallback(EMA), every_epoch(tmp_path), model=model, epochs=1)
    (tmp_path / "epoch=0.ckpt").rename(tmp_path / "alone.ckpt")
    program = ROOT / "tests" / "helpers" / "lightning_ranks.py"
    done = subprocess.run(
        [sys.executable, str(program), kind, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it holds" in done.stdout
    if kind != "directory":  # a file of two processes is one of a single process too
        path = tmp_path / "ema" / "first" / "epoch=0.ckpt"
        model = Regression(norm=kind == "ddp")
        fitted(tmp_path, BelayCallback(EMA), Begins(path), every_epoch(tmp_path), model=model, ckpt_path=path)

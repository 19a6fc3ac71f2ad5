"""Trainers of Transformers with tiny models, for the tests of `integrations.transformers`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

import torchbelay as tb
from torchbelay.integrations.transformers import BelayCallback, attach

EMA = tb.Spring.ema(decay=0.5)
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}

STEPS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-2,
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "logging_steps": 1,
}


def gpt2(seed: int = 0, *, dropout: float = 0.1) -> GPT2LMHeadModel:
    """A language model with tied weights, and dropout, so that a resume needs the generators too."""
    torch.manual_seed(seed)
    kept = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 11, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, **kept, resid_pdrop=dropout))


def texts(rows: int = 24) -> list[dict[str, Tensor]]:
    found = torch.randint(11, (rows, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in found]


class Observer(TrainerCallback):
    """Remembers the weights after every optimizer step, and before every step; costs the Trainer nothing."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.before: list[dict[str, Tensor]] = []

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.before.append(weights(kwargs["model"]))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.after.append(weights(kwargs["model"]))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Run:
    """A Trainer with an average, and what it did."""

    def __init__(
        self,
        folder: Path,
        method: Any = EMA,
        *,
        model: nn.Module | None = None,
        options: dict[str, Any] | None = None,
        made: Trainer | None = None,
        **settings: Any,
    ) -> None:
        self.trainer = plain(folder, model=model, **settings) if made is None else made
        self.callback: BelayCallback = attach(self.trainer, method, **(options or {}))
        self.observer = Observer()
        self.trainer.add_callback(self.observer)

    def train(self, resume: Any = None) -> "Run":
        self.trainer.train(resume_from_checkpoint=resume)
        return self

    @property
    def belay(self) -> tb.Belay:
        return self.callback.belay

    def everything(self) -> dict[str, Any]:
        """Weights, averages, counts, and what the optimizer knows."""
        self.callback.use_weights()
        optimizer = self.trainer.optimizer
        return {
            "weights": weights(self.trainer.model),
            "belay": self.belay.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
            "lr": self.trainer.lr_scheduler.get_last_lr(),
        }


def plain(folder: Path, *, model: nn.Module | None = None, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """A Trainer without an average: six steps of four rows, a checkpoint and an evaluation after three."""
    given: dict[str, Any] = {"train_dataset": texts(), "eval_dataset": texts(8)}
    given |= {name: settings.pop(name) for name in ("callbacks", "model_init", "optimizers") if name in settings}
    if "model_init" not in given:
        given["model"] = gpt2() if model is None else model
    args = TrainingArguments(str(folder), **QUIET | STEPS | settings)
    return kind(args=args, **given)


def ema(first: dict[str, Tensor], then: list[dict[str, Tensor]], decay: float = 0.5) -> dict[str, Tensor]:
    """The average of the weights, computed here."""
    found = {name: value.double() for name, value in first.items()}
    for each in then:
        found = {name: decay * found[name] + (1 - decay) * value.double() for name, value in each.items()}
    return found

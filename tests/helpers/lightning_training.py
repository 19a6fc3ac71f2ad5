"""Small trainings with Lightning's Trainer, and an account of their averages that knows nothing of torchbelay."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

BATCHES = 4  # of an epoch

# What Lightning says of small trainings on a CPU.
NOISE = [
    r"ignore:The '\w+' does not have many workers",
    r"ignore:The number of training batches \(\d+\) is smaller than the logging interval",
    r"ignore:The dirpath has changed from",
    r"ignore:Checkpoint directory .* exists and is not empty",
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    target = x.sin().sum(1, keepdim=True)
    return (model(x) - target).float().square().mean()


class Regression(LightningModule):
    """A small regression with a norm, whose statistics are buffers."""

    def __init__(self, lr: float = 1e-2, norm: bool = True) -> None:
        super().__init__()
        self.lr = lr
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.GELU()
        self.net = nn.Sequential(nn.Linear(3, 8), middle, nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return loss(self.net, batch)

    def validation_step(self, batch: Tensor) -> None:
        self.log("score", loss(self.net, batch), sync_dist=True)

    def test_step(self, batch: Tensor) -> None:
        self.log("score", loss(self.net, batch), sync_dist=True)

    def predict_step(self, batch: Tensor) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loader(seed: int = 0) -> DataLoader:
    data = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, batch_size=4)


def trainer(folder: Path, *callbacks: Callback, epochs: int = 3, **settings: Any) -> Trainer:
    """A Trainer that is silent, on a CPU."""
    given: dict[str, Any] = {"devices": 1, "logger": False, "enable_checkpointing": any(map(_saves, callbacks))}
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **given | settings,
    )


def _saves(callback: Callback) -> bool:
    return isinstance(callback, ModelCheckpoint)


def every_epoch(folder: Path, **settings: Any) -> ModelCheckpoint:
    """Save a checkpoint `epoch=N.ckpt` after each epoch, counted from 0."""
    given = {"monitor": "score", "save_top_k": -1, "filename": "{epoch}", "enable_version_counter": False}
    return ModelCheckpoint(dirpath=folder, **given | settings)


def load(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


class Account(Callback):
    """An EMA in float64, and the weights, after every step of training."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = parameters(pl_module)
        self.average = {name: w.double() for name, w in self.weights.items()}
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.weights = parameters(pl_module)
            for name, w in self.weights.items():
                self.average[name] = self.decay * self.average[name] + (1 - self.decay) * w.double()

    def is_average(self, found: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
        return all(torch.allclose(found[n].double(), a, rtol=0, atol=tolerance) for n, a in self.average.items())

    def is_weights(self, found: dict[str, Tensor]) -> bool:
        return all(torch.equal(found[name], w) for name, w in self.weights.items())

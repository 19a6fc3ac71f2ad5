"""A program that trains on two processes with Lightning, resumes, and compares: `lightning_ranks.py KIND FOLDER`.

Lightning starts the second process, by running this program again. KIND is "ddp", or "file" or "directory" for FSDP2
with checkpoints of that form. FOLDER may hold `alone.ckpt`, of a training in one process.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchbelay as tb
from helpers.lightning_training import Account, Regression, every_epoch, load, loader, trainer
from torchbelay.integrations.lightning import BelayCallback

METHOD = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.methods.ema(0.9)


class Sharded(Regression):
    """A regression whose layers FSDP2 shards."""

    def __init__(self) -> None:
        super().__init__(norm=False)

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            mesh: Any = self.device_mesh
            for module in (self.net[0], self.net[3], self.net):
                fully_shard(module, mesh=mesh["data_parallel"])


def whole(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors that are gathered; a collective."""
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for name, t in tensors.items()}


def same(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return list(x) == list(y) and all(torch.equal(x[name], y[name]) for name in x)


class Run:
    """One training: its callback, its account, and what was left."""

    def __init__(self, kind: str, folder: Path, method: Any, ckpt_path: Path | None = None, *others: Callback) -> None:
        strategy: Any = "ddp"
        if kind != "ddp":
            strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=kind == "directory")
        self.callback, self.account, self.watch = BelayCallback(method), Account(0.9), every_epoch(folder)
        self.model = Regression() if kind == "ddp" else Sharded()
        callbacks = (*others, self.callback, self.account, self.watch)
        self.trainer = trainer(folder, *callbacks, epochs=3, devices=2, strategy=strategy)
        self.trainer.fit(self.model, loader(), loader(1), ckpt_path=ckpt_path)
        self.average, self.weights = whole(self.model.state_dict()), whole(self.account.weights)
        assert self.callback.belay is not None
        assert same(whole(self.callback.belay.average_state_dict()), self.average)


class Begins(Callback):
    """Checks that a training begins with the weights and the average of a file."""

    def __init__(self, path: Path) -> None:
        self.saved = load(path)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, BelayCallback))
        assert callback.belay is not None
        assert same(whole(pl_module.state_dict()), self.saved["current_model_state"])
        assert same(whole(callback.belay.average_state_dict()), self.saved["state_dict"])
        assert callback.belay.step == self.saved["global_step"] > 0
        trainer.should_stop = True


def main(kind: str, folder: Path) -> None:
    for method in (METHOD, EMA):
        name = "ema" if method is EMA else "pull"
        first = Run(kind, folder / name / "first", method)
        again = Run(kind, folder / name / "again", method, folder / name / "first" / "epoch=0.ckpt")
        assert same(first.average, again.average)
        assert same(first.weights, again.weights)
        assert not any(torch.equal(first.average[name], w1) for name, w1 in first.weights.items())
        # The score that was watched is that of the checkpoint.
        assert first.watch.best_model_score is not None
        found = first.trainer.test(dataloaders=loader(1), ckpt_path="best", verbose=False)[0]["score"]
        assert abs(found - first.watch.best_model_score.item()) < 1e-6
    first.account.average = whole(first.account.average)
    assert first.account.is_average(first.average)
    if (folder / "alone.ckpt").exists():
        Run(kind, folder / "joined", EMA, folder / "alone.ckpt", Begins(folder / "alone.ckpt"))
    if first.trainer.is_global_zero:
        sys.stdout.write("all of it holds\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))

"""A training that records snapshots at every few steps, for machines that may vanish at any moment.

    python tests/helpers/killed_recording.py FOLDER STEPS

Started again, it goes on from its checkpoint. Every step depends on its number alone, so that the averages after each
step are the same in every run.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchbelay as tb

EVERY, CHECKPOINTS = 3, 10


class Training:
    """A small network with two averages to record."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.belay = tb.Belay(self.model, self.optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())

    def step(self) -> None:
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(self.belay.step))
        self.optimizer.zero_grad()
        (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {part: getattr(self, part).state_dict() for part in ("model", "optimizer", "belay")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, value in state.items():
            getattr(self, part).load_state_dict(value)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    training, checkpoint = Training(), folder / "checkpoint.pt"
    if checkpoint.exists():
        training.load_state_dict(torch.load(checkpoint, weights_only=True))
    elif (folder / "snapshots").exists():  # killed before the first checkpoint: this is a new run
        for path in (folder / "snapshots").iterdir():
            path.unlink()
    with tb.snapshots.Recorder(training.belay, folder / "snapshots", every=EVERY):
        while training.belay.step < steps:
            training.step()
            if training.belay.step % CHECKPOINTS == 0:
                temporary = folder / "checkpoint.tmp"
                torch.save(training.state_dict(), temporary)
                os.replace(temporary, checkpoint)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A training as one writes it for machines that may vanish at any moment.

    python tests/helpers/killed_training.py FOLDER STEPS

Everything goes into one checkpoint, written beside the old one and renamed over it when it is whole. The program,
started again, goes on from that checkpoint. Mixed precision with skipped steps, dropout and a schedule are part of it
because all of them have state that is easily forgotten.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import OneCycleLR

import torchbelay as tb

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.zoo import Transformer, next_word, sentences

EVERY = 3  # steps between two checkpoints


class Training:
    """Everything that has state."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.schedule = OneCycleLR(self.optimizer, max_lr=0.02, total_steps=steps + 1)
        self.scaler = GradScaler("cpu", growth_interval=20)
        self.belay = tb.Belay(
            self.model,
            self.optimizer,
            lambda name, p: tb.methods.schedule_free(0.9) if "mlp" in name else tb.Spring(k=1.0, m1=10.0, m2=20.0),
            spectators={"short": tb.methods.ema(0.9, warmup="ratio"), "swa": tb.methods.swa()},
        )
        self.done = 0

    PARTS = ("model", "optimizer", "schedule", "scaler", "belay")

    def state_dict(self) -> dict[str, Any]:
        parts = {part: getattr(self, part).state_dict() for part in self.PARTS}
        return {"done": self.done, "dice": torch.get_rng_state(), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.PARTS:
            getattr(self, part).load_state_dict(state[part])
        self.done = state["done"]
        torch.set_rng_state(state["dice"])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(next_word(self.model, sentences(self.done))).backward()
        if self.done % 7 == 5:
            self.model.position.grad[0, 0] = float("inf")  # the scaler will skip this one
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.done += 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Write the whole state, or leave the old file."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    training, checkpoint = Training(steps), folder / "checkpoint.pt"
    if checkpoint.exists():
        training.load_state_dict(torch.load(checkpoint, weights_only=True))
    with (folder / "lives.txt").open("a") as lives:
        lives.write(f"{training.done}\n")
    while training.done < steps:
        training.step()
        if training.done % EVERY == 0 or training.done == steps:
            save(checkpoint, training.state_dict())
            training.belay.save_average(folder / "average.safetensors")  # whole or not there, by itself


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

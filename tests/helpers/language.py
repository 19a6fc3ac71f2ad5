"""Made-up runs of the language model, whose answers are known."""

from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.arms import ARMS, BELAY, CONSTANT, HALF, QUARTER
from torchbelay.lab.part import Record

ABOUT = {
    "kind": "protocol",
    "complete": True,
    "layers": 1,
    "width": 8,
    "context": 8,
    "batch": 2,
    "steps": 10,
    "warmup": 1,
    "rate": 0.01,
    "bytes": {"train": 1, "tune": 1, "judge": 1},
    "packages": 1,
    "digest": "0" * 64,
    "device_s": 1,
    "date": "2026-01",
    "device": "CPU",
    "torch": "2",
}
LRS = (0.001, 0.002, 0.004, 0.008)


def make(arm: str, lr: float, seed: int, loss: float | None, split: str = "judge") -> Record:
    losses = {"w1": loss, "w2": loss, **dict.fromkeys(ARMS[arm].spectators, loss)}
    theta = ARMS[arm].theta
    key = {"kind": "run", "arm": arm, "theta": theta, "lr": lr, "seed": seed, "split": split}
    return {**key, "losses": losses, "fresh": loss}


def curve(arm: str, losses: list[float | None], seeds: int = 5) -> list[Record]:
    """Runs of an arm at all rates: two seeds for tuning, and some for judging, all a little different."""
    found = []
    for split, first, count in (("tune", 0, 2), ("judge", 1000, seeds)):
        for seed in range(first, first + count):
            for lr, loss in zip(LRS, losses, strict=True):
                noisy = None if loss is None else loss * (1 + 1e-4 * (seed % 7) + 1e-5 * ((seed * len(arm)) % 5))
                found.append(make(arm, lr, seed, noisy, split))
    return found


def study(seeds: int = 5, **special: list[float | None]) -> Runs:
    losses = {
        CONSTANT.name: [1.1, 1.0, 1.1, 1.3],
        QUARTER.name: [1.1, 1.0, 1.01, 1.015],
        HALF.name: [1.1, 1.0, 1.1, 1.3],
        BELAY.name: [1.1, 1.0, 1.1, 1.3],
    }
    losses |= special
    return Runs([record for arm, values in losses.items() for record in curve(arm, values, seeds)])

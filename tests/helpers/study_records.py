"""Records of the study on the spring's sign as its parts write them, made up: losses are chosen, None is lost."""

from collections.abc import Mapping, Sequence

from torchbelay.lab.part import Record
from torchbelay.lab.score.prediction import Cell

Loss = float | None


def _run(study: str, theta: float, seed: int, **fields: object) -> Record:
    arm = "θ 0" if theta == 0 else "θ −0.5"
    key = {"kind": "run", "study": study, "arm": arm, "theta": theta, "seed": seed}
    return {**key, "steps": 1000, "batch": 32, "effective_lr": 1e-3, "model": "edm", "parameters": 9, **fields}


def _final(**losses: Loss) -> Record:
    return {weights: {"train": loss, "test": loss} for weights, loss in losses.items()}


def warmup(cold: Sequence[Loss], warm: Sequence[Loss], other: Loss = 0.165, lr: float = 0.012) -> list[Record]:
    """EMA's losses by seed, cold and warmed up; θ = −0.5 has the same loss everywhere."""
    return [
        _run("warmup", theta, seed, lr=lr, warm_up=steps, rate=0.005, final=_final(w1=loss, w2=loss))
        for steps, losses in ((0, cold), (200, warm))
        for seed, own in enumerate(losses, 10)
        for theta, loss in ((0.0, own), (-0.5, other))
    ]


def penalty(ratios: Mapping[Cell, Sequence[Loss]], ema: float = 0.2) -> list[Record]:
    """The loss of θ = −0.5 over EMA's, by seed, in each cell (β1, c)."""
    found = []
    for beta1 in (0.9, 0.0):
        shared = {"lr": 1e-3, "beta1": beta1}
        for seed in range(10, 10 + len(ratios[0.9, 0.0895])):
            watched = _final(w1=ema, w2=ema) | {"c 0.005": {"train": 2 * ema, "test": 2 * ema}}
            found.append(_run("penalty", 0.0, seed, rate=0.0895, final=watched, **shared))
            for rate, loss in ((0.0895, ema), (0.005, 2 * ema)):
                factor = ratios[beta1, rate][seed - 10]
                end = None if factor is None else loss * factor
                found.append(_run("penalty", -0.5, seed, rate=rate, final=_final(w1=end, w2=end), **shared))
    return found

"""Records of score models as the experiments write them, made up: the numbers are chosen, the noise is drawn.

Factors on the test loss of the average say what each arm gains or loses, so that every outcome of every claim can be
made. `python tests/helpers/score_records.py FOLDER` writes the three parts' records, to look at the page.
"""

import base64
import io
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave

from torchbelay.lab import records as on_disk
from torchbelay.lab.part import Part, Plate, Record, Settings
from torchbelay.lab.report import style
from torchbelay.physics.spring import Spring

Factor = float | None | Mapping[float, float | None]  # of the loss, at each rate if it differs; None: lost
Factors = Mapping[str, Factor]

RATES = {1e-4: 0.058, 3e-4: 0.047, 1e-3: 0.042, 3e-3: 0.043, 1e-2: 0.055, 5e-2: 0.21}  # of the EMA, as made up
SIGN_RATES = {1e-3: 0.101, 4e-3: 0.105, 1.2e-2: 0.15}
THETAS = {"θ −0.9": -0.9, "θ −0.5": -0.5, "θ −0.25": -0.25, "θ 0": 0.0, "θ +0.25": 0.25, "θ +1": 1.0}
SIDE = 64  # pixels, of a grid
ARMS = ("EMA", "matched EMA", "BELAY")
TUNED = "BELAY m1 2e4"
ORIGIN: Record = {
    "kind": "origin",
    "committed": True,
    "why": "There is no GPU here.",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "python": "3.12.3",
    "date": "2026-11",
    "device_s": 5400.0,
}
_SCALE = {"BELAY": 0.8, "matched EMA": 0.8}  # effective learning rate for a nominal one


def origin(*, committed: bool = True) -> Record:
    """Where records were made; those that were not shipped say nothing of why."""
    kept = ORIGIN if committed else {key: ORIGIN[key] for key in ORIGIN if key not in ("committed", "why")}
    return dict(kept)


def runs(
    study: str,
    base: Mapping[float, float],
    factors: Factors,
    *,
    seeds: int = 3,
    spread: float = 0.04,  # between seeds, the same for all arms
    noise: float = 0.01,  # between the arms of a seed
    steps: int = 5000,
    batch: int = 128,
    **about: object,
) -> list[Record]:
    """A network for every arm, rate and seed."""
    made = []
    for arm, factor in factors.items():
        for lr, loss in base.items():
            for seed in range(seeds):
                times = factor[lr] if isinstance(factor, Mapping) else factor
                shared = random.Random(f"{study} {lr} {seed}").gauss(0, spread)
                own = random.Random(f"{study} {arm} {lr} {seed}").gauss(0, noise)
                end = None if times is None else loss * times * (1 + shared + own)
                made.append(_run(study, arm, lr, seed, end, steps, batch) | about)
    return made


def _run(study: str, arm: str, lr: float, seed: int, end: float | None, steps: int, batch: int) -> Record:
    scale = _SCALE.get(arm, 1.0)
    theta = THETAS.get(arm, 0.25 if arm == "BELAY" else 0.0)
    points = [round(steps * share) for share in (0.1, 0.2, 0.4, 0.7, 1.0)]
    curve = [
        {"step": step, "batch_loss": _times(end, 1.2 * (steps / step) ** 0.5), **_losses(end, (steps / step) ** 0.4)}
        for step in points
    ]
    return {
        "kind": "run",
        "study": study,
        "dataset": "mnist",
        "model": "ncsnv2",
        "preset": "mnist-small",
        "parameters": 1_862_337,
        "arm": arm,
        "method": f"method of {arm}",
        "theta": theta,
        "rate": 0.00125,
        "k": 1.0 if arm.startswith("BELAY") else None,
        "m1": 2000.0 if arm.startswith("BELAY") else None,
        "m2": 500.0 if arm.startswith("BELAY") else None,
        "lr": lr,
        "optimizer_lr": lr * (scale if arm == "matched EMA" else 1),
        "effective_lr": lr * scale,
        "seed": seed,
        "steps": steps,
        "steps_taken": steps if end is not None else steps // 5,
        "batch": batch,
        "images": steps * batch,
        "reduction": "pixel_mean",
        "curve": curve,
        "final": _losses(end, 1.0),
        "finite": end is not None,
        "side_by_side": 6,
        "wall_s": 41.5,
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "torchbelay": "0.1.0",
    }


def _times(loss: float | None, factor: float) -> float | None:
    return None if loss is None else loss * factor


def _losses(end: float | None, factor: float) -> Record:
    return {
        weights: {"train": _times(end, 0.98 * worse * factor), "test": _times(end, worse * factor)}
        for weights, worse in (("w1", 1.12), ("w2", 1.0))
    }


def fid(study: str, arm: str, lr: float, value: float | None, seed: int = 0, weights: str = "w2") -> Record:
    """A FID."""
    return {
        "kind": "fid",
        "study": study,
        "arm": arm,
        "lr": lr,
        "seed": seed,
        "weights": weights,
        "fid": value,
        "samples": 10_000,
        "sample_seed": 0,
        "sampler": "annealed Langevin, 95 levels × 5",
        "reference": "mnist train, 60000 images",
        "network": "Inception-v3 (torch-fidelity)",
        "wall_s": 33.0,
    }


def grid(study: str, arm: str, lr: float, channels: int = 1) -> Record:
    """A grid of samples: patches of noise, brighter from row to row."""
    noise = np.random.default_rng(len(arm)).random((SIDE, SIDE, channels))
    pixels = noise * np.linspace(0, 1, SIDE)[:, None, None]
    file = io.BytesIO()
    imsave(file, np.repeat(pixels, 3 // channels, axis=2), format="png")
    png = base64.b64encode(file.getvalue()).decode()
    about = {"kind": "grid", "study": study, "arm": arm, "lr": lr, "seed": 0, "weights": "w2", "sample_seed": 0}
    return about | {"rows": 8, "columns": 8, "png": png}


def throughput(dataset: str, model: str) -> Record:
    """How fast it was."""
    return {
        "kind": "throughput",
        "model": model,
        "dataset": dataset,
        "parameters": 7_432_833,
        "batch": 128,
        "side_by_side": 6,
        "how": "compiled and captured",
        "images_per_s": 41_234.5,
        "flops_per_image": 7.1e9,
        "arithmetic_limit_images_per_s": 111_000.0,
        "limit_tflops": 790,
        "averaging_share": 0.0042,
        "device": "NVIDIA H200",
    }


def protocol(study: str) -> Record:
    """The settings."""
    return {
        "kind": "protocol",
        "study": study,
        "noise_levels": 95,
        "sigma_max": 17.0,
        "sigma_min": 0.01,
        "triples": 4096,
        "differs": [
            "The paper does not say how large the network is: ours is small.",
            "Nor is the number of steps said.",
        ],
    }


# The three parts ------------------------------------------------------------------------------------------------------


def mnist(
    belay: Factor = 1.0,
    matched: Factor = 1.0,
    *,
    long_belay: Factor = 1.0,
    fid_ratio: float | None = 1.0,
    seeds: int = 3,
    ema: Factor = 1.0,
    **more: float,
) -> list[Record]:
    """All studies of the part `mnist`; the factors are against the made-up EMA."""
    arms = {"EMA": ema, "matched EMA": matched, "BELAY": belay}
    heavier = {"BELAY m1 2e4": 1.01, "BELAY m1 2e5": 1.0}
    best = {1e-3: 0.035, 5e-2: 0.12}
    made = [protocol("rates"), *runs("rates", RATES, arms, seeds=seeds, **more)]
    made += runs("rates", {lr: RATES[lr] for lr in (1e-3, 5e-2)}, heavier, seeds=seeds, **more)
    made += [protocol("table1")]
    made += runs(
        "table1", best, {"EMA": 1.0, "matched EMA": 1.0, "BELAY": long_belay}, seeds=seeds, steps=30_000, **more
    )
    for lr, value in ((1e-3, 14.0), (5e-2, 60.0)):
        for arm in ARMS:
            times = fid_ratio if arm == "BELAY" else 1.0
            for seed in range(seeds):
                noise = 1 + random.Random(f"{arm} {lr} {seed}").gauss(0, 0.005)
                made.append(fid("table1", arm, lr, None if times is None else value * times * noise, seed))
            made.append(grid("table1", arm, lr))
    return [*made, throughput("mnist", "ncsnv2"), origin()]


def table1(belay_fid: float = 0.8, tuned_fid: float = 1.2, *, fid_seeds: int = 3) -> list[Record]:
    """The long runs as they are planned: each arm at three rates and the tuned one at its own, from fresh seeds.

    Images are made at each arm's best rate, for `fid_seeds` seeds, and at the paper's rate, at which every network is
    lost. The FIDs are factors on EMA's, which all seeds share.
    """
    base = {3e-4: 0.04, 1e-3: 0.035, 5e-2: 0.12}
    lost = dict.fromkeys(base, 1.0) | {5e-2: None}
    made = runs("table1", base, {"EMA": lost, "matched EMA": lost, "BELAY": lost | {1e-3: 1.3}})
    made += runs("table1", {1e-3: base[1e-3]}, {TUNED: 1.02})
    own = {("EMA", 1e-3): 1.0, ("matched EMA", 1e-3): 1.0, ("BELAY", 3e-4): belay_fid, (TUNED, 1e-3): tuned_fid}
    for (arm, lr), times in own.items():
        made += [fid("table1", arm, lr, (14 + seed) * times, seed) for seed in range(fid_seeds)]
        made.append(grid("table1", arm, lr))
    made += [fid("table1", arm, 5e-2, None, seed) for arm in ARMS for seed in range(3)]
    return [protocol("table1"), *(r | {"seed": r["seed"] + 3} for r in made)]


def with_table1(records: Sequence[Record], long: Sequence[Record]) -> list[Record]:
    """The part `mnist` with other long runs."""
    return [*without(records, study="table1"), *long]


def sign(factors: Factors | None = None, *, seeds: int = 5, **more: float) -> list[Record]:
    """The part `sign`."""
    made_up: Factors = {
        "θ −0.9": {1e-3: 1.09, 4e-3: 1.0, 1.2e-2: 0.74},
        "θ −0.5": {1e-3: 1.0, 4e-3: 0.97, 1.2e-2: 0.8},
        "θ −0.25": {1e-3: 1.0, 4e-3: 0.98, 1.2e-2: 0.9},
        "θ 0": 1.0,
        "θ +0.25": {1e-3: 1.0, 4e-3: 1.02, 1.2e-2: 1.3},
        "θ +1": {1e-3: 1.01, 4e-3: 1.05, 1.2e-2: 6.5},
    }
    edm = {"model": "edm", "preset": "mnist-edm", "reduction": "edm", "parameters": 2_212_097}
    made = runs("sign", SIGN_RATES, factors or made_up, seeds=seeds, steps=2500, **more)
    return [protocol("sign"), *(run | edm for run in made), throughput("mnist", "edm"), origin()]


def cifar10(
    belay: Factor = 1.0,
    matched: Factor = 1.0,
    *,
    fid_ratio: float | None = 1.0,
    other_sign: Factor = 0.99,
    seeds: int = 3,
    noise: float = 0.005,
    spread: float = 0.04,
) -> list[Record]:
    """The part `cifar10`."""
    factors = {"EMA": 1.0, "matched EMA": matched, "BELAY": belay, "θ −0.5": other_sign}
    made = runs("cifar10", {1e-3: 0.19}, factors, seeds=seeds, noise=noise, spread=spread, steps=20_000, batch=256)
    edm = {"dataset": "cifar10", "model": "edm", "preset": "cifar10-small", "reduction": "edm", "parameters": 6_000_000}
    found = [protocol("cifar10"), *(run | edm for run in made)]
    for arm in factors:
        times = fid_ratio if arm == "BELAY" else 1.0
        for seed in range(seeds):
            jitter = 1 + random.Random(f"{arm} {seed}").gauss(0, 0.005)
            found.append(fid("cifar10", arm, 1e-3, None if times is None else 24 * times * jitter, seed))
        found.append(grid("cifar10", arm, 1e-3, channels=3))
    return [*found, throughput("cifar10", "edm"), origin()]


def everything() -> dict[str, list[Record]]:
    """The three parts, with a few runs lost."""
    lost = RATES.keys() - {5e-2}
    return {
        "mnist": mnist({**dict.fromkeys(lost, 1.01), 5e-2: 0.8}, {**dict.fromkeys(lost, 1.0), 5e-2: None}),
        "sign": sign(),
        "cifar10": cifar10(1.01),
    }


def without(records: Sequence[Record], **fields: object) -> list[Record]:
    """What is left when those with these fields are taken away."""
    return [r for r in records if not all(r.get(key) == value for key, value in fields.items())]


def write(folder: Path) -> None:
    """As files of records."""
    for name, lines in everything().items():
        on_disk.write(folder / f"{name}.jsonl", on_disk.header(name, Settings(), 0.1), json.loads(json.dumps(lines)))


assert abs(Spring(k=1.0, m1=2000.0, m2=500.0).effective_lr_scale - _SCALE["BELAY"]) < 0.001


def drawn(part: Part, records: Sequence[Record]) -> dict[str, Plate]:
    """The plates of a part, by name, laid out as the report lays them out; what every one of them must keep to."""
    found = {plate.name: plate for plate in part.draw(json.loads(json.dumps(records)))}
    for plate in found.values():
        if isinstance(plate.figure, Figure):
            style.as_bytes(plate.figure, "svg")  # some figures find out only now that they cannot be laid out
        else:
            assert {len(row) for row in plate.figure.rows} == {len(plate.figure.columns)}
            assert max(len(cell.split()) for row in plate.figure.rows for cell in row) <= 25
        assert 1 <= len(re.findall(r"\.(?= |$)", plate.caption)) <= 2, plate.caption  # what one sees, what follows
        for text in (plate.caption, *plate.notes):
            assert "\n" not in text
            assert "  " not in text
            assert text.endswith(".")
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Runs of a small classifier of MNIST, with Adam, on the CPU if there is a copy of MNIST.

Without a copy, the records that come with the package are shown.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchbelay.belay import Belay
from torchbelay.curvature import measure_curvatures
from torchbelay.lab import records as on_disk
from torchbelay.lab.part import Record, Settings, Tick
from torchbelay.lab.score.data import find_copy, is_available, load
from torchbelay.lab.score.formats import DAMAGE
from torchbelay.lab.versions import versions
from torchbelay.physics.spectrum import Spectrum

from .trial import BETA1, Probe, Protocol, Report, Run, Setting, Train, describe, marks, measure, measure_probes

NAME = "MNIST"
HIDDEN, BATCH = 32, 64
EXAMPLES = 2048  # on which curvatures are measured
Part = tuple[Tensor, Tensor]  # pixels (n, 784) and labels
Parts = tuple[Part, Part]  # for training, and held out


def plan(settings: Settings, how: Protocol) -> tuple[int, str]:
    """Return the units of work, and some words that say what would run."""
    if why := obstacle(settings):
        return 1, f"the records of MNIST that come with the package: {why}"
    how = shorter(how)
    units = how.units + how.seeds * len(how.lrs)
    return units, f"the same with classifiers of MNIST, {how.seeds} seeds, and advice from their curvatures"


def run(settings: Settings, how: Protocol, tick: Tick) -> list[Record]:
    """Train and measure; without a copy of MNIST, return the records that come with the package."""
    if why := obstacle(settings):
        tick(1)
        return read_committed(why)
    how, begin = shorter(how), time.perf_counter()
    path = find_npz(settings)
    assert path is not None
    parts = read(path)
    train, probe = trainer(parts, settings.seed, how.steps), prober(parts, settings.seed, how.steps)
    found = [*measure(NAME, how, train, tick), *measure_probes(NAME, how, train, probe, BATCH, tick)]
    return [_about(how) | {"device_s": round(time.perf_counter() - begin)}, *found]


def shorter(how: Protocol) -> Protocol:
    """Return the protocol with one seed fewer, if it has several: networks of MNIST are trained one by one."""
    return replace(how, seeds=max(1, how.seeds - 1))


def obstacle(settings: Settings) -> str | None:
    """Return why the networks cannot be trained here, as a sentence; None if they can."""
    if find_npz(settings):
        return None
    return "There is no copy of MNIST with labels here; give one with --data: mnist.npz, or a folder with it."


def read_committed(why: str) -> list[Record]:
    """Read the records that come with the package; the protocol says why they are shown."""
    with as_file(files(__package__) / "records" / "mnist.jsonl") as path:
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "protocol" else line for line in found]


def find_npz(settings: Settings) -> Path | None:
    """Return the copy of MNIST, if it is a file that has labels too: mnist.npz."""
    if not is_available("mnist", settings.data):
        return None
    copy = find_copy("mnist", settings.data)
    assert copy is not None
    with suppress(*DAMAGE), np.load(copy.paths[0]) as data:
        return copy.paths[0] if {"y_train", "y_test"} <= {*data.files} else None
    return None


def read(path: Path) -> Parts:
    """Return pixels between 0 and 1, and labels, of the training and the test images."""
    load("mnist", path)  # refuses other pixels than the published ones
    with np.load(path) as data:
        train, test = (
            (torch.from_numpy(data[f"x_{part}"]).flatten(1).float() / 255, torch.from_numpy(data[f"y_{part}"]).long())
            for part in ("train", "test")
        )
    return train, test


def trainer(parts: Parts, seed: int, steps: int) -> Train:
    """Return the function that trains networks one by one, all from the same start on the same batches."""

    def train(chosen: Sequence[Setting], stream: int) -> list[Run]:
        return [train_one(parts, each, seed * 1_000_003 + stream, steps)[0] for each in chosen]

    return train


def prober(parts: Parts, seed: int, steps: int) -> Probe:
    """Return the function that trains a network, and measures the curvatures that its Adam meets at the end."""
    (x, y), _ = parts

    def probe(setting: Setting, stream: int) -> tuple[Run, Spectrum]:
        run, network, adam = train_one(parts, setting, seed * 1_000_003 + stream, steps)
        loss = lambda: cross_entropy(network(x[:EXAMPLES]), y[:EXAMPLES])  # noqa: E731
        return run, measure_curvatures(network, loss, optimizer=adam)

    return probe


def train_one(parts: Parts, setting: Setting, stream: int, steps: int) -> tuple[Run, nn.Module, torch.optim.Adam]:
    """Train a network; return what it reported and its loss, and the network and its optimizer as they are then."""
    (x, y), (held_out, answers) = parts
    (method, lr), half, reported = setting, len(answers) // 2, marks(steps)
    generator = torch.Generator().manual_seed(stream)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream)
        network = nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, betas=(BETA1, 0.999))
    belay = Belay(network, optimizer, method)
    reports: list[Report] = []
    for t in range(1, steps + 1):
        chosen = torch.randint(len(y), (BATCH,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(network(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if t in reported:
            w1 = _loss(network, held_out[:half], answers[:half])
            with belay.averaged():
                w2 = _loss(network, held_out[:half], answers[:half])
            reports.append({"step": t, "lr": lr, "w1": w1, "w2": w2})
    with belay.averaged():
        loss = _loss(network, held_out[half:], answers[half:])
    belay.detach()
    return Run(reports, loss), network, optimizer


@torch.no_grad()
def _loss(network: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(cross_entropy(network(x), y))


def _about(how: Protocol) -> Record:
    return {
        **describe(NAME, how, weights=795 * HIDDEN + 10, batch=BATCH),
        "date": time.strftime("%Y-%m"),
        **versions(torch.device("cpu")),
    }

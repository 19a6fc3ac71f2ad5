"""Runs of small networks on MNIST, with Adam, on the CPU: a classifier, an autoencoder and a denoiser.

They are trained if a copy of MNIST is given, or if one is at hand and the part is quick. Else the records that come
with the package are shown.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchbelay.belay import Belay
from torchbelay.curvature import measure_curvatures
from torchbelay.lab import records as on_disk
from torchbelay.lab.part import Record, Settings, Tick
from torchbelay.lab.score.data import UNASKED, find_copy, is_available, load
from torchbelay.lab.score.formats import DAMAGE
from torchbelay.lab.versions import versions
from torchbelay.physics.spectrum import Spectrum

from .trial import BETA1, Probe, Protocol, Report, Run, Setting, Train, describe, marks, measure, measure_probes

HIDDEN, BATCH = 32, 64
EXAMPLES = 2048  # on which curvatures and losses are measured
PIXELS, LABELS = 784, 10
Part = tuple[Tensor, Tensor]  # pixels (n, 784) and labels
Parts = tuple[Part, Part]  # for training, and held out


@dataclass(frozen=True)
class Task:
    """What a small network learns."""

    name: str
    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Part], Tensor]  # for some examples


def _perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def _normalised() -> nn.Module:
    """Return a deeper network, with a normalised layer."""
    layers = [nn.Linear(PIXELS, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, PIXELS))


def _denoise(network: nn.Module, part: Part) -> Tensor:
    """Return how well the network finds images below noise, which follows from them, so that losses can be repeated."""
    x, _ = part
    seed = int((255 * x).round().long().sum())
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return mse_loss(network(x + noise / 2), x)


CLASSIFIER = Task(
    "classifier", lambda: _perceptron(LABELS), lambda network, part: cross_entropy(network(part[0]), part[1])
)
AUTOENCODER = Task(
    "autoencoder", lambda: _perceptron(PIXELS), lambda network, part: mse_loss(network(part[0]), part[0])
)
DENOISER = Task("denoiser", _normalised, _denoise)
TASKS = (CLASSIFIER, AUTOENCODER, DENOISER)


def plan(settings: Settings, how: Protocol) -> tuple[int, str]:
    """Return the units of work, and some words that say what would run."""
    if why := obstacle(settings):
        return 1, f"the records of MNIST that come with the package: {why}"
    how = shorter(how)
    units = len(TASKS) * how.units + how.seeds * len(how.lrs)
    return units, (
        f"the same with classifiers, autoencoders and denoisers of MNIST, {how.seeds} seeds, and advice from the "
        "classifiers' curvatures"
    )


def run(settings: Settings, how: Protocol, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible or was not asked for, return the records that come with the package."""
    if why := obstacle(settings):
        tick(1)
        return read_committed(why)
    path = find_npz(settings)
    assert path is not None
    parts, how = read(path), shorter(how)
    return [record for task in TASKS for record in _try(task, parts, settings.seed, how, tick)]


def _try(task: Task, parts: Parts, seed: int, how: Protocol, tick: Tick) -> list[Record]:
    """Return the records of one task; classifiers are also advised by their curvatures."""
    begin, train = time.perf_counter(), trainer(task, parts, seed, how.steps)
    found = list(measure(task.name, how, train, tick))
    if task is CLASSIFIER:
        found += measure_probes(task.name, how, train, prober(parts, seed, how.steps), BATCH, tick)
    return [_about(task, how) | {"device_s": round(time.perf_counter() - begin)}, *found]


def shorter(how: Protocol) -> Protocol:
    """Return the protocol with half of the seeds: networks of MNIST are trained one by one."""
    return replace(how, seeds=max(1, how.seeds // 2))


def obstacle(settings: Settings) -> str | None:
    """Return why the networks are not trained here, as a sentence; None if they are."""
    if settings.data is None and not settings.quick:
        return UNASKED
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


def trainer(task: Task, parts: Parts, seed: int, steps: int) -> Train:
    """Return the function that trains networks one by one, all from the same start on the same batches."""

    def train(chosen: Sequence[Setting], stream: int) -> list[Run]:
        return [train_one(task, parts, each, seed * 1_000_003 + stream, steps)[0] for each in chosen]

    return train


def prober(parts: Parts, seed: int, steps: int) -> Probe:
    """Return the function that trains a classifier, and measures the curvatures that its Adam meets at the end."""
    x, y = (each[:EXAMPLES] for each in parts[0])

    def probe(setting: Setting, stream: int) -> tuple[Run, Spectrum]:
        run, network, adam = train_one(CLASSIFIER, parts, setting, seed * 1_000_003 + stream, steps)
        return run, measure_curvatures(network, lambda: CLASSIFIER.loss(network, (x, y)), optimizer=adam)

    return probe


def train_one(
    task: Task, parts: Parts, setting: Setting, stream: int, steps: int
) -> tuple[Run, nn.Module, torch.optim.Adam]:
    """Train a network; return what it reported and its loss, and the network and its optimizer as they are then."""
    (x, y), (held_out, answers) = parts
    (method, lr), half, reported = setting, min(EXAMPLES, len(answers) // 2), marks(steps)
    seen, unseen = (held_out[:half], answers[:half]), (held_out[-half:], answers[-half:])
    generator = torch.Generator().manual_seed(stream)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream)
        network = task.network()
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, betas=(BETA1, 0.999))
    belay = Belay(network, optimizer, method)

    @torch.no_grad()
    def loss(part: Part) -> float:
        return float(task.loss(network, part))

    reports: list[Report] = []
    for t in range(1, steps + 1):
        chosen = torch.randint(len(y), (BATCH,), generator=generator)
        optimizer.zero_grad()
        task.loss(network, (x[chosen], y[chosen])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if t in reported:
            w1 = loss(seen)
            with belay.averaged():
                w2 = loss(seen)
            reports.append({"step": t, "lr": lr, "w1": w1, "w2": w2})
    with belay.averaged():
        end = loss(unseen)
    belay.detach()
    return Run(reports, end), network, optimizer


def _about(task: Task, how: Protocol) -> Record:
    weights = sum(each.numel() for each in task.network().parameters())
    return {
        **describe(task.name, how, weights=weights, batch=BATCH),
        "date": time.strftime("%Y-%m-%d"),
        **versions(torch.device("cpu")),
    }

"""A small score model on MNIST: the loss over averaging lengths, made afterwards beside trained along.

It is trained on the CPU if a copy of MNIST is given, or if one is at hand and the part is quick. Else the records that
come with the package are shown.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay
from torchbelay.lab import records as on_disk
from torchbelay.lab.part import Record, Settings, Tick
from torchbelay.lab.records import rounded
from torchbelay.lab.score.data import UNASKED, Images, is_available, load
from torchbelay.lab.score.formats import DATASETS
from torchbelay.lab.score.models.edm import EDM
from torchbelay.lab.score.models.unet import UNetShape
from torchbelay.lab.score.training.batches import Batches
from torchbelay.lab.score.training.validation import Validation
from torchbelay.lab.versions import versions
from torchbelay.physics.methods import ema
from torchbelay.snapshots import Recorder, defaults
from torchbelay.snapshots.synthesis import synthesize_all
from torchbelay.snapshots.targets import label

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Protocol:
    """The size of the training."""

    steps: int = 1000
    batch: int = 16
    lr: float = 0.002
    channels: int = 16
    triples: int = 512  # of test image, noise level and noise
    every: int = 25
    half_lives: tuple[int, ...] = (10, 20, 40, 80, 160, 320)

    @property
    def objective(self) -> EDM:
        """A small EDM: two resolutions, one block each, no attention."""
        return EDM((1, 28, 28), UNetShape(self.channels, (1, 2), blocks=1, attention=(), dropout=0.0))


FULL = Protocol()
QUICK = Protocol(steps=40, batch=4, triples=32, every=5, half_lives=(5, 10, 20))


def choose(settings: Settings) -> Protocol:
    """Return the protocol of these settings."""
    return QUICK if settings.quick else FULL


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and some words that say what would run."""
    how = choose(settings)
    if why := obstacle(settings):
        return 1, f"the records of MNIST that come with the package: {why}"
    return how.steps, f"a score model of MNIST with {len(how.half_lives)} averages, {how.steps:,} steps"


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train and measure; if that is impossible or was not asked for, return the records that come with the package."""
    if why := obstacle(settings):
        tick(1)
        return read_committed(why)
    return list(train(choose(settings), load("mnist", settings.data), settings.seed, tick))


def obstacle(settings: Settings) -> str | None:
    """Return why the network is not trained here, as a sentence; None if it is."""
    if settings.data is None and not settings.quick:
        return UNASKED
    if is_available("mnist", settings.data):
        return None
    return f"There is no copy of MNIST here; give one with --data: {DATASETS['mnist'].accepted}."


def read_committed(why: str) -> list[Record]:
    """Read the records that come with the package; the protocol says why they are shown."""
    with as_file(files(__package__) / "records" / "mnist.jsonl") as path:
        _, found = on_disk.read(path)
    return [line | {"committed": True, "why": why} if line["kind"] == "mnist protocol" else line for line in found]


def train(how: Protocol, images: Images, seed: int, tick: Tick) -> Iterator[Record]:
    """Train a network with many averages, record two of them, and make the others from the snapshots."""
    begin, objective = time.perf_counter(), how.objective
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = objective.network()
    targets = {f"half-life {h}": ema(half_life=float(h)) for h in how.half_lives}
    optimizer = torch.optim.Adam(network.parameters(), lr=how.lr)
    belay = Belay(network, optimizer, ema(half_life=float(how.half_lives[0])), spectators={**defaults(), **targets})
    batches = Batches(images.train, objective, how.batch, seed=1000 + seed)
    with TemporaryDirectory() as folder:
        with Recorder(belay, folder, every=how.every, averages=list(defaults())):
            for _ in range(how.steps):
                optimizer.zero_grad()
                objective.loss(network, *batches.next()).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                tick(1)
        found = synthesize_all(Path(folder), list(targets.values()), max_error=None)
        made = [synthesis.state_dict() for synthesis in found]
    along = [belay.average_state_dict(name) for name in targets]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    names = [name for name, _ in network.named_parameters()]
    belay.detach()

    validation = Validation.make(images, objective, CPU, count=how.triples)
    held_out = Validation({"test": validation.triples["test"]}, validation.batch)

    def loss(state: dict[str, Tensor]) -> float | None:
        network.load_state_dict(state)
        return held_out.measure(objective.loss, network)["test"]

    results: list[Record] = [{"kind": "mnist weights", "loss": loss(weights)}]
    for method, synthesis, one, other in zip(targets.values(), found, made, along, strict=True):
        missed, away = _distance(one, other, names), _distance(other, weights, names)
        results.append(
            {
                "kind": "mnist network",
                "target": label(method),
                "half_life": method.half_life,
                "predicted": rounded(synthesis.predicted_error),
                "actual": rounded(missed / away),
                "along": loss(other),
                "made": loss(one),
            }
        )
    yield _about(how, network, seed) | {"device_s": round(time.perf_counter() - begin)}
    yield from results


def _about(how: Protocol, network: nn.Module, seed: int) -> Record:
    return {
        "kind": "mnist protocol",
        "weights": sum(p.numel() for p in network.parameters()),
        "channels": how.channels,
        "trained_steps": how.steps,
        "batch": how.batch,
        "lr": how.lr,
        "every": how.every,
        "triples": how.triples,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **versions(CPU),
    }


def _distance(one: dict[str, Tensor], other: dict[str, Tensor], names: list[str]) -> float:
    """Return the distance of two sets of weights, over all parameters."""
    return float(torch.stack([(one[name].double() - other[name].double()).norm() for name in names]).norm())

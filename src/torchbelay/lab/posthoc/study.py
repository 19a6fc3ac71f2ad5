"""Averages made after training: their profiles, their errors, and the loss of networks over the averaging length.

Three questions. What does an average hold of each update, and how well do snapshots of two power functions imitate it?
How does the error fall with the number of snapshots, and is it the predicted one? Does an average that was made after
training do for a network what the same average does that was trained along? The networks are those of the ring here,
and that of MNIST in `mnist.py`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchbelay.belay import Belay
from torchbelay.lab.arms import EMA, Arm, Lane
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded
from torchbelay.lab.ring.mixture import FEATURES, Ring
from torchbelay.lab.ring.networks import Networks, Shape
from torchbelay.lab.ring.study import batches, excess_loss
from torchbelay.lab.threads import one_thread
from torchbelay.physics.methods import ema, power_ema
from torchbelay.snapshots import Recorder, Synthesis, decay, defaults, window
from torchbelay.snapshots.least_squares import Column, Life, combine, matrix
from torchbelay.snapshots.profiles import filter_of, profile
from torchbelay.snapshots.synthesis import synthesize_all
from torchbelay.snapshots.targets import Target, aim_at, label

from . import figures, mnist

NAME = "posthoc"
TITLE = "Averages made after training"

STEPS = 4000  # of the run whose profiles are compared
TARGETS: tuple[Target, ...] = (
    window(1000),
    ema(half_life=400.0),
    power_ema(sigma_rel=0.15),
    decay(1500, "cosine"),
)
COUNTS = (4, 8, 16, 32, 64, 128)  # steps that have snapshots
SHOWN = 16  # snapshots of each average in the figure of profiles
POINTS = 160  # of a curve in a record


@dataclass(frozen=True)
class Protocol:
    """The size of the part that is measured."""

    size: int = 2000  # weights that walk at random
    lrs: tuple[float, ...] = (0.0022, 0.01)
    seeds: int = 6
    steps: int = 3000
    batch: int = 32
    hidden: tuple[int, ...] = (48, 48)
    triples: int = 2048
    every: int = 100
    half_lives: tuple[int, ...] = (10, 20, 40, 80, 160, 320, 640, 1280)

    @property
    def shape(self) -> Shape:
        """The shape of the networks."""
        return Shape((FEATURES, *self.hidden, 2))


FULL = Protocol()
QUICK = Protocol(size=200, seeds=2, steps=300, hidden=(24, 24), triples=512, every=20, half_lives=(5, 10, 20, 40, 80))


def _protocol(settings: Settings) -> Protocol:
    return QUICK if settings.quick else FULL


def _generator(settings: Settings, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + 500_000 + stream)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    how = _protocol(settings)
    more, images = mnist.plan(settings)
    return STEPS + how.steps + more, (
        f"profiles of {len(TARGETS)} targets; a random walk of {how.size:,} weights over {STEPS:,} steps; "
        f"{len(how.lrs) * how.seeds} networks with {len(how.half_lives)} averages, {how.steps:,} steps; {images}"
    )


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Compute profiles and predicted errors, then measure errors and losses."""
    how = _protocol(settings)
    with one_thread():
        return [
            _about(how),
            *_profiles(),
            *_predictions(),
            *_walk(settings, how, tick),
            *_networks(settings, how, tick),
            *mnist.run(settings, tick),
        ]


def _about(how: Protocol) -> Record:
    return {
        "kind": "protocol",
        "steps": STEPS,
        "size": how.size,
        "network": list(how.shape.sizes),
        "weights": how.shape.numbers,
        "trained_steps": how.steps,
        "batch": how.batch,
        "every": how.every,
        "seeds": how.seeds,
    }


# Profiles and predicted errors ----------------------------------------------------------------------------------------


def _lives() -> dict[str, Life]:
    return {name: Life(filter_of(method, STEPS), 0) for name, method in defaults().items()}


def _columns(count: int, kind: str) -> list[Column]:
    """Return the snapshots at so many steps, and the first weights, which a Recorder writes too."""
    steps = [STEPS * (k + 1) // count for k in range(count)]
    if kind == "weights":
        return [Column(None, step) for step in (0, *steps)]
    return [Column(None, 0), *(Column(life, step) for life in _lives().values() for step in steps)]


def _profile(column: Column) -> Tensor:
    life, step, state = column
    found = profile(None if life is None else life.filter, 0 if life is None else life.born, step, state)
    return torch.nn.functional.pad(found, (0, STEPS - step))


def _thin(p: Tensor) -> list[float]:
    """Return a curve of the record's length, first and last number included."""
    at = torch.linspace(0, len(p) - 1, POINTS, dtype=torch.float64).round().long()
    return [round(float(x), 5) for x in p[at]]


def _profiles() -> Iterator[Record]:
    at = [int(x) + 1 for x in torch.linspace(0, STEPS - 1, POINTS, dtype=torch.float64).round()]
    yield {"kind": "updates", "at": at}
    columns = _columns(SHOWN, "averages")
    for name, life in _lives().items():
        for k in range(SHOWN // 4, SHOWN + 1, SHOWN // 4):
            step = STEPS * k // SHOWN
            yield {"kind": "recorded", "average": name, "step": step, "p": _thin(_profile(Column(life, step)))}
    for target in TARGETS:
        aim, rows, x, _ = _combined(columns, target)
        made = sum(w * _profile(column) for w, column in zip(x.tolist(), columns, strict=True))
        assert isinstance(made, Tensor)
        yield {
            "kind": "profile",
            "target": label(target),
            "snapshots": SHOWN,
            "error": _error(rows, x),
            "p": _thin(_profile(aim)),
            "made": _thin(made),
        }


def _combined(columns: Sequence[Column], target: Target) -> tuple[Column, Tensor, Tensor, float]:
    """Return a target, the matrix of all columns, the shares of the snapshots in the target, and the condition.

    The last two columns of the matrix are the target and the weights.
    """
    aim = Column(aim_at(target, STEPS).life, STEPS)
    rows = matrix([*columns, aim, Column(None, STEPS)])
    return aim, rows, *combine(rows[:, :-2], rows[:, -2])


def _error(rows: Tensor, x: Tensor) -> float | None:
    """Return the predicted error; the last two columns are the target and the weights."""
    wanted = rows[:, -2]
    return rounded(float((rows[:, :-2] @ x - wanted).norm() / (wanted - rows[:, -1]).norm()))


def _predictions() -> Iterator[Record]:
    for kind in ("averages", "weights"):
        for count in COUNTS:
            columns = _columns(count, kind)
            for target in TARGETS:
                _, rows, x, condition = _combined(columns, target)
                yield {
                    "kind": "error",
                    "recorded": kind,
                    "target": label(target),
                    "steps": count,
                    "files": len(columns),
                    "predicted": _error(rows, x),
                    "condition": rounded(condition, 3),
                }


# White updates --------------------------------------------------------------------------------------------------------


def _walk(settings: Settings, how: Protocol, tick: Tick) -> Iterator[Record]:
    """Let weights walk at random under a Belay, and compare what snapshots make with the targets themselves."""
    generator = _generator(settings, 0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(how.size, dtype=torch.float64))])
    (weight,) = model.parameters()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    belay = Belay(model, optimizer, ema(half_life=400.0), spectators=defaults())
    due = {column.step for count in COUNTS for column in _columns(count, "weights")}
    taken: dict[tuple[str, int], Tensor] = {}
    points = [weight.detach().clone()]
    for step in range(1, STEPS + 1):
        weight.grad = torch.randn(how.size, dtype=torch.float64, generator=generator)
        optimizer.step()
        points.append(weight.detach().clone())
        if step in due:
            taken |= {(name, step): belay.average_state_dict(name)["0"] for name in defaults()}
        tick(1)
    walked = torch.stack(points)
    updates = walked.diff(dim=0)
    for count in COUNTS:
        columns = _columns(count, "averages")
        names = [None, *(name for name in defaults() for _ in range(count))]
        values = torch.stack(
            [walked[0] if n is None else taken[n, c.step] for n, c in zip(names, columns, strict=True)]
        )
        for target in TARGETS:
            aim, rows, x, _ = _combined(columns, target)
            truth = walked[0] + _profile(aim) @ updates
            actual = float((x @ values - truth).norm() / (truth - walked[-1]).norm())
            yield {
                "kind": "white",
                "target": label(target),
                "steps": count,
                "predicted": _error(rows, x),
                "actual": rounded(actual),
            }


# Networks -------------------------------------------------------------------------------------------------------------


def _networks(settings: Settings, how: Protocol, tick: Tick) -> Iterator[Record]:
    """Train networks with many averages, record two of them, and make the others from the snapshots."""
    ring = Ring()
    generators = [_generator(settings, 10 + seed) for seed in range(how.seeds)]
    starts = torch.stack([how.shape.initial(generator) for generator in generators])
    lanes = [Lane(Arm(EMA, "Adam", ema(half_life=float(how.half_lives[0]))), lr) for lr in how.lrs]
    targets = {f"half-life {h}": ema(half_life=float(h)) for h in how.half_lives}
    spectators = {name: (lambda lane, m=method: m) for name, method in {**defaults(), **targets}.items()}
    networks = Networks(how.shape, lanes, starts, spectators)
    with tempfile.TemporaryDirectory() as folder:
        with Recorder(networks.belay, folder, every=how.every, averages=list(defaults())):
            for _, (x, y) in zip(range(how.steps), batches(ring, generators, how.batch), strict=False):
                networks.step(x, y)
                tick(1)
        found = synthesize_all(Path(folder), list(targets.values()), max_error=None)
        held_out = ring.triples((how.triples,), _generator(settings, 5))
        plain = excess_loss(how.shape, networks.w, held_out)
        for i, lr in enumerate(how.lrs):
            yield {"kind": "weights", "lr": lr, "loss": _numbers(plain[i])}
        for (name, method), synthesis in zip(targets.items(), found, strict=True):
            along, made = networks.average(name), _rows(synthesis, lanes)
            losses = [excess_loss(how.shape, rows, held_out) for rows in (along, made)]
            away, missed = (along - networks.w).norm(dim=-1), (made - along).norm(dim=-1)
            for i, lr in enumerate(how.lrs):
                yield {
                    "kind": "network",
                    "lr": lr,
                    "target": label(method),
                    "half_life": method.half_life,
                    "predicted": rounded(synthesis.predicted_error),
                    "actual": _numbers(missed[i] / away[i]),
                    "along": _numbers(losses[0][i]),
                    "made": _numbers(losses[1][i]),
                }


def _rows(synthesis: Synthesis, lanes: Sequence[Lane]) -> Tensor:
    """Return the weights of a synthesis as the networks have them: (lanes, seeds, numbers)."""
    state = synthesis.state_dict()
    return torch.stack([state[f"rows.{i}"] for i in range(len(lanes))])


def _numbers(values: Tensor) -> list[float | None]:
    return [rounded(float(value)) for value in values]


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the figures, from the records alone."""
    return figures.draw_plates(records)

"""A score model of eight Gaussians whose exact denoiser is known: the paper's comparison at the size of a laptop.

The question is whether BELAY makes a better score model than EMA, and over more learning rates. All methods train the
same networks on the same batches, at every learning rate. Each has as many trials as the methods it is compared with,
is tuned on other seeds than those it is judged on, and is judged by its last weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchbelay.lab.arms import BELAY, EMA, MATCHED, PLAIN, REPULSIVE, Arm, Lane, belay_arm, matched_arm
from torchbelay.lab.part import Plate, Record, Settings, Tick
from torchbelay.lab.records import rounded, select
from torchbelay.lab.threads import one_thread
from torchbelay.physics.identity import describe
from torchbelay.physics.method import Method
from torchbelay.physics.methods import centred
from torchbelay.physics.spring import Spring

from . import figures, statistics
from .mixture import FEATURES, LOG_SIGMA, Ring, Triples, draw_samples
from .networks import Batch, Networks, Shape, TrainedNetworks, compute_outputs, train
from .statistics import DIGITS, MIXTURE, TUNED, Choice

NAME = "ring"
TITLE = "A score model of eight Gaussians"

SPRINGS = (  # the paper's for MNIST; a shorter memory; a shorter memory and a stronger pull (θ = 1)
    Spring(k=1.0, m1=2000.0, m2=500.0),
    Spring(k=4.0, m1=2000.0, m2=500.0),
    Spring(k=1.0, m1=200.0, m2=200.0),
)
DECAYS = tuple(spring.beta for spring in SPRINGS)  # of each spring with an infinitely heavy model
THETA, RATE = -0.5, 1 - DECAYS[1]  # the other sign of the spring; θ = 0 is EMA at the second decay

SAMPLED = (PLAIN, EMA + TUNED, MATCHED + TUNED, BELAY, BELAY + TUNED)  # the contestants whose samples are drawn

FAILED = 0.9  # a run has failed if its loss is above this share of the best linear denoiser's excess loss
BLOCK = 100  # batches that are drawn at a time


@dataclass(frozen=True)
class Protocol:
    """The size of the study."""

    lrs: tuple[float, ...] = (0.00046, 0.001, 0.0022, 0.0046, 0.01, 0.022, 0.046, 0.1)
    seeds: int = 10
    steps: int = 3000
    batch: int = 32
    hidden: tuple[int, ...] = (48, 48)
    triples: int = 2048  # of points, noise levels and noise in the validation set, and as many in the test set
    samples: int = 300

    @property
    def shape(self) -> Shape:
        """The shape of the networks."""
        return Shape((FEATURES, *self.hidden, 2))

    @property
    def high_lr(self) -> float:
        """The high rate at which samples are drawn, too: the last but one, at which some methods still work."""
        return self.lrs[-2]


FULL = Protocol()
QUICK = Protocol(lrs=(0.001, 0.01, 0.046, 0.1), seeds=4, steps=300, hidden=(24, 24), triples=512, samples=100)


@dataclass(frozen=True)
class Curve:
    """Weights of an arm's runs that are measured over learning rates: w1, or one of the averages."""

    name: str  # of the arm, in records
    setting: str
    arm: Arm
    method: Method | None  # None: the weights themselves
    average: str | None = "average"  # which average of the run


def _setting(spring: Spring) -> str:
    return f"k {spring.k:g}, m1 {spring.m1:g}, m2 {spring.m2:g}"


def curves() -> list[Curve]:
    """Return all curves that are compared. All EMAs, and the weights themselves, come from the same runs."""
    first = Arm(EMA, "Adam", Spring.ema(DECAYS[0]))
    found = [Curve(PLAIN, "none", first, None, None)]
    for i, decay in enumerate(DECAYS):
        found.append(Curve(EMA, f"decay {decay:g}", first, Spring.ema(decay), f"decay {decay:g}" if i else "average"))
    for name, make in ((MATCHED, matched_arm), (BELAY, belay_arm)):
        for spring in SPRINGS:
            arm = make("Adam", spring)
            found.append(Curve(name, _setting(spring), arm, arm.method))
    other_sign = centred(theta=THETA, rate=RATE)
    scale = other_sign.coupling(1, 0.0).effective_lr_scale
    arm = Arm(REPULSIVE, "Adam", other_sign, effective_scale=scale)
    return [*found, Curve(REPULSIVE, f"θ −{-THETA:g}, rate {RATE:g}", arm, other_sign)]


def _spectators() -> dict[str, Callable[[Lane], Method | None]]:
    def watch(method: Spring, lane: Lane) -> Method | None:
        return method if lane.arm.name == EMA else None

    return {f"decay {decay:g}": partial(watch, Spring.ema(decay)) for decay in DECAYS[1:]}


def _protocol(settings: Settings) -> Protocol:
    return QUICK if settings.quick else FULL


def _generator(settings: Settings, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(settings.seed * 1_000_003 + stream)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    how = _protocol(settings)
    arms = len(_lanes(how)) // len(how.lrs)
    return 2 * how.steps, (
        f"{arms * len(how.lrs) * how.seeds} networks at once: {arms} ways to train × {len(how.lrs)} learning "
        f"rates × {how.seeds} seeds, {how.steps} steps of Adam on batches of {how.batch}"
    )


def _lanes(how: Protocol) -> list[Lane]:
    arms = dict.fromkeys(curve.arm for curve in curves())  # each once
    return [Lane(arm, lr) for arm in arms for lr in how.lrs]


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Train all networks, measure them against the exact denoiser, and compare."""
    how, ring, lanes = _protocol(settings), Ring(), _lanes(_protocol(settings))
    with one_thread():
        # half of the seeds at a time: all of them do not fit the processor's cache
        halves = statistics.split_seeds(range(how.seeds))
        trained = TrainedNetworks.join([_train(settings, how, ring, lanes, half, tick) for half in halves])
        return _make_records(settings, how, ring, lanes, trained)


def _train(
    settings: Settings, how: Protocol, ring: Ring, lanes: Sequence[Lane], seeds: Sequence[int], tick: Tick
) -> TrainedNetworks:
    generators = [_generator(settings, seed) for seed in seeds]
    starts = torch.stack([how.shape.initial(generator) for generator in generators])
    networks = Networks(how.shape, lanes, starts, _spectators())
    return train(networks, batches(ring, generators, how.batch), steps=how.steps, tick=tick)


def _make_records(
    settings: Settings, how: Protocol, ring: Ring, lanes: Sequence[Lane], trained: TrainedNetworks
) -> list[Record]:
    """Return all records of the trained networks."""
    held_out = {
        name: ring.triples((how.triples,), _generator(settings, 1000 + i))
        for i, name in enumerate(("validation", "test"))
    }
    linear = float(held_out["test"].truth.square().mean())
    runs = _run_records(how, lanes, trained, held_out, linear)
    found = statistics.derive_records(runs)
    about: Record = {
        "kind": "protocol",
        "modes": ring.modes,
        "spread": ring.spread,
        "radius": round(ring.radius, 6),
        "sigma_data": ring.sigma_data,
        "log_sigma": list(LOG_SIGMA),
        "network": list(how.shape.sizes),
        "weights": how.shape.numbers,
        "optimizer": "Adam",
        "steps": how.steps,
        "batch": how.batch,
        "seeds": how.seeds,
        "lrs": list(how.lrs),
        "high_lr": how.high_lr,
        "triples": how.triples,
        "linear": rounded(linear, DIGITS),
        "failed_above": rounded(FAILED * linear, DIGITS),
    }
    choices = [Choice.from_record(record) for record in select(found, "choice")]
    return [about, *runs, *found, *_sample_records(settings, how, ring, lanes, trained, choices)]


def batches(ring: Ring, generators: Sequence[torch.Generator], size: int) -> Iterator[Batch]:
    """Yield fresh batches of every seed, without end; a seed's batches depend on its own generator alone."""
    while True:
        drawn = [ring.triples((BLOCK, size), generator) for generator in generators]
        x = torch.stack([each.features for each in drawn], dim=1).float()
        y = torch.stack([each.targets for each in drawn], dim=1).float()
        yield from zip(x, y, strict=True)


def excess_loss(shape: Shape, weights: Tensor, triples: Triples) -> Tensor:
    """Return the mean squared distance to the exact denoiser, weighted as EDM's loss: (lanes, seeds)."""
    x, truth = triples.features.to(weights), triples.truth.to(weights)
    return torch.stack([(compute_outputs(shape, rows, x) - truth).square().mean((-1, -2)) for rows in weights])


def _run_records(
    how: Protocol, lanes: Sequence[Lane], trained: TrainedNetworks, held_out: dict[str, Triples], linear: float
) -> list[Record]:
    """Return one record per curve, learning rate and seed."""
    found: list[Record] = []
    for curve in curves():
        mine = [i for i, lane in enumerate(lanes) if lane.arm == curve.arm]
        weights = {"w1": trained.w1[mine]}
        if curve.average is not None:
            weights["w2"] = trained.averages[curve.average][mine]
        losses = {
            f"{w}_{part}": excess_loss(how.shape, weights[w], held_out[part]) for w in weights for part in held_out
        }
        finite = weights["w1"].isfinite().all(-1)
        for at, i in enumerate(mine):
            options = lanes[i].options() | {"arm": curve.name, "setting": curve.setting}
            options["method"] = None if curve.method is None else describe(curve.method)
            for seed in range(how.seeds):
                measured = {name: rounded(float(loss[at, seed]), DIGITS) for name, loss in losses.items()}
                run = {"kind": "run", **options, "seed": seed, "steps": how.steps, "batch": how.batch}
                run |= {
                    "train_loss": rounded(float(trained.loss[i, seed]), DIGITS),
                    "w2_validation": None,
                    "w2_test": None,
                }
                run |= measured | _judge_run(measured, curve, linear, finite=bool(finite[at, seed]))
                found.append(run)
    return found


def _judge_run(measured: Record, curve: Curve, linear: float, *, finite: bool) -> Record:
    """Return the losses of the curve's weights, and whether the run diverged or failed."""
    which = "w1" if curve.average is None else "w2"
    diverged = not finite or measured[f"{which}_test"] is None
    validation, test = (None if diverged else measured[f"{which}_{part}"] for part in ("validation", "test"))
    failed = test is None or test > FAILED * linear
    return {"validation": validation, "test": test, "diverged": diverged, "failed": failed}


def _sample_records(
    settings: Settings,
    how: Protocol,
    ring: Ring,
    lanes: Sequence[Lane],
    trained: TrainedNetworks,
    choices: Sequence[Choice],
) -> Iterator[Record]:
    """Draw points with the first seed's networks, at the rate that other seeds chose for each and at a high one."""
    latents = torch.randn(how.samples, 2, generator=_generator(settings, 2000), dtype=torch.float64)
    true = ring.sample((how.samples,), _generator(settings, 2001))
    yield _sample_record(MIXTURE, "", None, "true", true, ring)
    by_name = {(curve.name, curve.setting): curve for curve in curves()}
    chosen = {choice.contestant: choice for choice in choices if 0 in choice.reported_on}
    for choice in (chosen[name] for name in SAMPLED):
        curve = by_name[choice.arm, choice.setting]
        weights = trained.w1 if curve.average is None else trained.averages[curve.average]
        for lr, rate in ((choice.lr, "chosen"), (how.high_lr, "high")):
            row = weights[lanes.index(Lane(curve.arm, lr)), :1]
            points = draw_samples(partial(_denoise, how.shape, ring, row), latents)
            yield _sample_record(choice.contestant, choice.setting, lr, rate, points, ring)


def _denoise(shape: Shape, ring: Ring, row: Tensor, y: Tensor, sigma: Tensor) -> Tensor:
    output = compute_outputs(shape, row, ring.features(y, sigma).to(row))[0]
    return ring.decode_output(y, sigma, output.to(y))


def _sample_record(contestant: str, setting: str, lr: float | None, rate: str, points: Tensor, ring: Ring) -> Record:
    finite = bool(points.isfinite().all())
    return {
        "kind": "samples",
        "contestant": contestant,
        "setting": setting,
        "lr": lr,
        "rate": rate,
        "seed": 0,
        "near": round(ring.share_near(points), 4) if finite else None,
        "points": [[round(x, 3), round(y, 3)] for x, y in points.tolist()] if finite else None,
    }


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw the figures, from the records alone."""
    return figures.draw_plates(records)

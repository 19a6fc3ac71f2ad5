"""What an average costs: time of a training step and bytes per weight, with no average, EMA, BELAY, and velocities.

Times are processor time on one thread, so other programs on the machine hardly matter. Steps of all arms take turns in
random order, so a slow moment hits all alike and no arm always follows the same one. Every turn begins at the same
weights, because a pass through a network takes another time at other weights: ReLU and max pooling are faster if most
units are off. Every arm has several copies, because a model's place in memory matters as much as a small overhead. Only
ratios are compared. Bytes are counted tensor by tensor; those that live only during a step are found by watching every
allocation.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchbelay.belay import Belay
from torchbelay.physics.spring import Spring

from .arms import BELAY, EMA, PLAIN
from .ledger import Ledger, count_bytes, tensors
from .part import Plate, Record, Settings, Tick
from .report import style
from .report.words import listed
from .threads import one_thread

NAME = "overhead"
TITLE = "What BELAY costs"

SPRING = Spring(k=1.0, m1=2000.0, m2=500.0)  # the paper's setting for MNIST
DAMPED = Spring.critical(k=1.0, m1=2000.0, m2=500.0)  # the same masses with non-trivial damping: both keep a velocity
DECAY = 0.999
RESAMPLES = 2000  # bootstrap samples of the rounds
TORCH, VELOCITIES = "EMA (torch)", "BELAY (velocities)"
ARMS = (PLAIN, TORCH, EMA, BELAY, VELOCITIES)
SPRINGS = {EMA: Spring.ema(decay=DECAY), BELAY: SPRING, VELOCITIES: DAMPED}


@dataclass(frozen=True)
class Network:
    """A network for images of 28 × 28 and ten classes."""

    name: str
    layers: Callable[[], nn.Module]
    batch: int


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


# A step of the first does little work per weight, a step of the second a lot: two extremes.
NETWORKS = (Network("MLP", _mlp, batch=128), Network("convolutional", _convolutional, batch=16))


@dataclass
class TimedModel:
    """A model in training: `step()` is forward, backward and update, `update()` the last of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    classes: Tensor
    update: Callable[[], object]
    averages: Callable[[], Iterable[Tensor]]
    start: tuple[Tensor, ...]  # the weights at which every turn begins

    def restore(self) -> None:
        """Set the weights back to those of the start."""
        with torch.no_grad():
            for weight, value in zip(self.model.parameters(), self.start, strict=True):
                weight.copy_(value)

    def backward(self) -> None:
        """Compute gradients of one batch, always the same one."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.classes).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take one training step."""
        self.backward()
        self.update()


def build_model(network: Network, arm: str, seed: int) -> TimedModel:
    """Return a network with AdamW and the average of an arm; weights and batch are the same for all arms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.layers()
        images, classes = torch.randn(network.batch, 1, 28, 28), torch.randint(10, (network.batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update: Callable[[], object] = optimizer.step
    averages: Callable[[], Iterable[Tensor]] = tuple
    if arm == TORCH:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
        averaged.update_parameters(model)

        def update() -> None:
            optimizer.step()
            averaged.update_parameters(model)

        averages = averaged.state_dict().values
    elif arm != PLAIN:
        belay = Belay(model, optimizer, SPRINGS[arm])
        averages = lambda: tensors(belay.state_dict())  # noqa: E731
    start = tuple(weight.detach().clone() for weight in model.parameters())
    return TimedModel(model, optimizer, images, classes, update, averages, start)


# Bytes ---------------------------------------------------------------------------------------------------------------


def measure_bytes(network: Network, arm: str, seed: int) -> tuple[dict[str, int], int, int]:
    """Return the bytes that stay, by purpose, those that the first update left, and the most that a second allocates.

    The first leaves the optimizer's state, and what else is kept for the next one.
    """
    one = build_model(network, arm, seed)
    ledgers = Ledger(), Ledger()
    for ledger in ledgers:
        one.backward()
        with ledger:
            one.update()
    weights = list(one.model.parameters())
    kept = {
        "weights": count_bytes(weights),
        "gradients": count_bytes(w.grad for w in weights if w.grad is not None),
        "AdamW": count_bytes(tensors(list(one.optimizer.state.values()))),
        "average": count_bytes(one.averages()),
    }
    return kept, ledgers[0].alive, ledgers[1].peak


# Times ---------------------------------------------------------------------------------------------------------------


def measure_times(network: Network, seed: int, copies: int, rounds: int, tick: Tick) -> Tensor:
    """Return the processor time of a step of every arm, for all rounds of each copy: (arms, copies × rounds).

    Arms are built and take turns in random order. Every turn begins at the same weights. Its first step is not timed:
    it brings the arm's own tensors back into the cache, as the step before does in training.
    """
    found = torch.zeros(len(ARMS), copies * rounds, dtype=torch.float64)
    orders = random.Random(seed)
    for turn in range(copies * rounds):
        if turn % rounds == 0:
            models = {arm: build_model(network, arm, seed) for arm in orders.sample(ARMS, len(ARMS))}
            for one in models.values():  # the first steps allocate what stays
                one.step()
                one.step()
        for which in orders.sample(range(len(ARMS)), len(ARMS)):
            one = models[ARMS[which]]
            one.restore()
            one.step()
            start = time.process_time()
            one.step()
            found[which, turn] = time.process_time() - start
        tick(1)
    return found


def median_ratio(times: Tensor, baseline: Tensor, seed: int) -> tuple[float, float, float]:
    """Return the ratio of the medians over the rounds, and its 95% interval by resampling the rounds."""
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(len(times), (RESAMPLES, len(times)), generator=generator)
    drawn = times[rounds].median(dim=1).values / baseline[rounds].median(dim=1).values
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=times.dtype)).tolist()
    return float(times.median() / baseline.median()), low, high


# The part ------------------------------------------------------------------------------------------------------------


def _size(settings: Settings) -> tuple[int, int]:
    """Return the copies of every model and the rounds of each; their product is odd, so that a median exists."""
    return (1, 5) if settings.quick else (5, 31)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    rounds = math.prod(_size(settings))
    line = (
        f"{rounds} rounds of a training step of {len(NETWORKS)} networks, {len(ARMS)} ways, and a count of their bytes"
    )
    return rounds * len(NETWORKS), line


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Measure the times and the bytes of all networks and arms."""
    with one_thread():
        return [record for network in NETWORKS for record in _costs(network, settings, tick)]


def _costs(network: Network, settings: Settings, tick: Tick) -> Iterator[Record]:
    found = measure_times(network, settings.seed, *_size(settings), tick)
    alone, ema = (found[ARMS.index(arm)] for arm in (PLAIN, EMA))
    counted = {arm: measure_bytes(network, arm, settings.seed) for arm in ARMS}
    for arm, seconds in zip(ARMS, found, strict=True):
        kept, left, peak = counted[arm]
        kept |= {"copy": left - counted[PLAIN][1]}
        yield {
            "kind": "cost",
            "network": network.name,
            "weights": kept["weights"] // torch.float32.itemsize,
            "batch": network.batch,
            "arm": arm,
            "method": repr(SPRINGS[arm]) if arm in (BELAY, VELOCITIES) else None if arm == PLAIN else f"decay {DECAY}",
            "rounds": len(seconds),
            "threads": 1,
            "same_weights": True,  # at the beginning of every turn
            "bytes": kept,
            "bytes_during_update": peak - counted[PLAIN][2],
            "timing_s": {
                "median": float(seconds.median()),
                "to_plain": dict(
                    zip(("ratio", "low", "high"), median_ratio(seconds, alone, settings.seed), strict=True)
                ),
                "to_ema": dict(zip(("ratio", "low", "high"), median_ratio(seconds, ema, settings.seed), strict=True)),
            },
        }


def cost(records: Sequence[Record], network: str, arm: str) -> Record:
    """Return the record of a network and an arm."""
    (found,) = (r for r in records if (r["network"], r["arm"]) == (network, arm))
    return found


def bytes_per_weight(record: Record) -> float:
    """Return the bytes per weight that stay from step to step."""
    return float(sum(record["bytes"].values()) / record["weights"])


# Figure --------------------------------------------------------------------------------------------------------------

_PARTS = {"weights": "#bbbbbb", "gradients": "#dddddd", "AdamW": "#999999", "average": style.EMA_COLOUR}
_PARTS |= {"copy": style.BELAY_COLOUR}
_DURING: dict[str, Any] = {"color": "white", "ec": style.BELAY_COLOUR, "hatch": "////", "lw": 0.8}


def _draw_times(ax: Axes, records: Sequence[Record]) -> None:
    for network, offset, mark in zip(NETWORKS, (0.17, -0.17), "os", strict=True):
        for y, arm in enumerate(reversed(ARMS)):
            t, hue = cost(records, network.name, arm)["timing_s"]["to_plain"], style.colour(arm.split(" (")[0])
            ax.plot([t["low"], t["high"]], [y + offset] * 2, color=hue, lw=2)
            ax.plot(t["ratio"], y + offset, mark, color=hue)
            if arm != PLAIN:
                _annotate(ax, f"{t['ratio'] - 1:+.1%}".replace("-", "−"), t["high"], y + offset)
        ax.plot([], [], mark, color=style.PLAIN_COLOUR, label=f"{network.name} network")
    ax.axvline(1, color="#999999", lw=0.8)
    ax.set(yticks=range(len(ARMS)), yticklabels=list(reversed(ARMS)), xlabel="÷ AdamW alone")
    ax.margins(x=0.25)
    ax.set_title("time of a training step")


def _draw_bytes(ax: Axes, records: Sequence[Record]) -> None:
    for y, arm in enumerate(reversed(ARMS)):
        record, left = cost(records, NETWORKS[0].name, arm), 0.0
        for part, hue in _PARTS.items():
            wide = record["bytes"][part] / record["weights"]
            ax.barh(y, wide, left=left, color=hue, height=0.6, ec="white", lw=0.8)
            left += wide
        during = record["bytes_during_update"] / record["weights"]
        if during > 0.05:
            ax.barh(y, during, left=left, height=0.6, **_DURING)
            _annotate(ax, f"{left:.1f} + {during:.1f}", left + during, y)
        else:
            _annotate(ax, f"{left:.1f}", left, y)
    for part, hue in _PARTS.items():
        ax.barh(0, 0, color=hue, label=part)
    ax.barh(0, 0, label="during the update", **_DURING)
    ax.set(xlabel="bytes per weight", yticks=range(len(ARMS)), yticklabels=[""] * len(ARMS))
    ax.set_xlim(0, 1.3 * ax.dataLim.x1)  # with room for the numbers beside the bars
    ax.set_title("memory, float32, without activations")


def _annotate(ax: Axes, text: str, x: float, y: float) -> None:
    ax.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _draw(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 4.1)
    left, right = fig.subplots(1, 2)
    _draw_times(left, records)
    _draw_bytes(right, records)
    for ax in (left, right):
        ax.set_ylim(-0.5, len(ARMS) - 0.5)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return fig


def _error_notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return what ratios below 1 say, as a note; nothing if an arm that does more work always takes longer."""
    more_work = ((arm, key, name) for arm in ARMS[1:] for key, name in (("to_plain", PLAIN), ("to_ema", EMA)))
    pairs = [pair for pair in more_work if pair[1] == "to_plain" or pair[0] in (BELAY, VELOCITIES)]
    below = [
        f"{arm} ÷ {name} {ratio:.3f} ({network.name} network)"
        for network in NETWORKS
        for arm, key, name in pairs
        if (ratio := cost(records, network.name, arm)["timing_s"][key]["ratio"]) < 1
    ]
    if not below:
        return ()
    note = (
        "An arm that does more work cannot save time: a ratio below 1 shows the size of the error. Here: "
        f"{listed(below)}."
    )
    if all(r.get("same_weights") for r in records):
        return (note,)
    cause = (
        "In these records every arm trained to weights of its own. Passes through the network take another time at "
        "other weights, and that difference is in the ratios."
    )
    return note, cause


def draw(records: Sequence[Record]) -> list[Plate]:
    """Draw one figure: ratios of times, and bytes."""
    mlp, convolutional = (cost(records, network.name, BELAY) for network in NETWORKS)
    more = [f"{r['timing_s']['to_plain']['ratio'] - 1:+.1%}".replace("-", "−") for r in (mlp, convolutional)]
    caption = (
        f"Time of a training step with BELAY, relative to no averaging: {more[0]} for the MLP and {more[1]} for the "
        "convolutional network. BELAY keeps an average, as an EMA does, and on a CPU a copy of the weights for the "
        "next step."
    )
    notes = (
        "Left: processor time of a whole training step (forward, backward, AdamW) on one thread. Ratios of medians "
        f"over {mlp['rounds']} interleaved rounds, with 95% bootstrap intervals.",
        f"The MLP has {mlp['weights']:,} weights at batch {mlp['batch']}: little work per weight. The convolutional "
        f"network has {convolutional['weights']:,} weights at batch {convolutional['batch']}: much work per weight.",
        f"BELAY ({mlp['method']}) runs through Belay; EMA (decay {DECAY}) runs through torchbelay and through torch's "
        "AveragedModel.",
        f"With velocities: {cost(records, NETWORKS[0].name, VELOCITIES)['method']}, which is critically damped. Every "
        "experiment of the paper is without velocities.",
        "Right: bytes per weight of the MLP, counted. BELAY needs the copy because its average follows the weights "
        "from before the step. It is kept on a CPU alone: new memory at every step would take more time.",
        *_error_notes(records),
    )
    with style.house():
        return [Plate("overhead", "What an average costs", caption, _draw(records), notes)]

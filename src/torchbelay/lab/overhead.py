"""What an average costs: time of a training step, and bytes for each weight, of no average, EMA and BELAY.

Times are processor time on one thread, so that other programs on the machine hardly count, interleaved and in changing
order, so that a slow moment hits all alike, of several copies of each, since where in memory a model happens to lie
matters as much as a small overhead; what is compared are ratios. Bytes are counted, tensor by tensor, and for
those that live only during a step by watching every allocation.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchbelay.belay import Belay
from torchbelay.physics.spring import Spring

from .part import Plate, Record, Settings, Tick
from .report import style
from .threads import one_thread

NAME = "overhead"
TITLE = "What BELAY costs"

SPRING = Spring(k=1.0, m1=2000.0, m2=500.0)  # the paper's setting for MNIST
DECAY = 0.999
RESAMPLED = 2000  # bootstrap samples of the rounds
PLAIN, EMA, TORCH, BELAY = "no averaging", "EMA", "EMA (torch)", "BELAY"
ARMS = (PLAIN, TORCH, EMA, BELAY)


@dataclass(frozen=True)
class Network:
    """What is trained; images of 28 × 28, ten classes."""

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


# A step of the first does little work for each weight, one of the second a lot: the two ends of what people train.
NETWORKS = (Network("MLP", _mlp, batch=128), Network("convolutional", _convolutional, batch=16))


@dataclass
class Trainee:
    """A model in training: `step()` is forward, backward and update, `update()` the last of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    classes: Tensor
    update: Callable[[], object]
    averages: Callable[[], Iterable[Tensor]]

    def backward(self) -> None:
        """Gradients of one batch, always the same one."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.classes).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """One training step."""
        self.backward()
        self.update()


def trainee(network: Network, arm: str, seed: int) -> Trainee:
    """A network with AdamW and the average of an arm, from the same weights on the same batch for all arms."""
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
        belay = Belay(model, optimizer, SPRING if arm == BELAY else Spring.ema(decay=DECAY))
        averages = lambda: _tensors(belay.state_dict())  # noqa: E731
    return Trainee(model, optimizer, images, classes, update, averages)


# Bytes ---------------------------------------------------------------------------------------------------------------


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


class Ledger(TorchDispatchMode):
    """Watches what is allocated inside a block: `peak` is the most that was alive at a time, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(out):
            if t.untyped_storage().data_ptr() not in given:  # neither in place nor a view
                self._count(t.untyped_storage().nbytes())
                weakref.finalize(t, self._count, -t.untyped_storage().nbytes())
        return out

    def _count(self, change: int) -> None:
        self.alive += change
        self.peak = max(self.peak, self.alive)


def bytes_of(network: Network, arm: str, seed: int) -> tuple[dict[str, int], int]:
    """Bytes that stay from step to step, by what they are for; and the most that an update allocates meanwhile."""
    one = trainee(network, arm, seed)
    one.step()
    one.backward()
    with Ledger() as ledger:
        one.update()
    weights = list(one.model.parameters())
    kept = {
        "weights": size(weights),
        "gradients": size(w.grad for w in weights if w.grad is not None),
        "AdamW": size(_tensors(list(one.optimizer.state.values()))),
        "average": size(one.averages()),
    }
    return kept, ledger.peak


# Times ---------------------------------------------------------------------------------------------------------------


def times(network: Network, seed: int, copies: int, rounds: int, tick: Tick) -> Tensor:
    """Processor time of a step of every arm, in so many rounds of each copy: (arms, copies × rounds)."""
    found = torch.zeros(len(ARMS), copies * rounds, dtype=torch.float64)
    for turn in range(copies * rounds):
        if turn % rounds == 0:
            trainees = [trainee(network, arm, seed) for arm in ARMS]
            for one in trainees:  # the first steps allocate what stays
                one.step()
                one.step()
        for position in range(len(ARMS)):
            which = (turn + position) % len(ARMS)  # nobody is always after the same one
            start = time.process_time()
            trainees[which].step()
            found[which, turn] = time.process_time() - start
        tick(1)
    return found


def ratio(of: Tensor, to: Tensor, seed: int) -> tuple[float, float, float]:
    """The ratio of the medians over the rounds, and its 95% interval by resampling the rounds."""
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(len(of), (RESAMPLED, len(of)), generator=generator)
    drawn = of[rounds].median(dim=1).values / to[rounds].median(dim=1).values
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=of.dtype)).tolist()
    return float(of.median() / to.median()), low, high


# The part ------------------------------------------------------------------------------------------------------------


def _size(settings: Settings) -> tuple[int, int]:
    """Copies of every trainee, one after another, and rounds of each; odd in all, so that there is a middle one."""
    return (1, 5) if settings.quick else (3, 21)


def plan(settings: Settings) -> tuple[int, str]:
    """Units of work, and one line that says what would be run."""
    rounds = math.prod(_size(settings))
    line = f"{rounds} rounds of a training step of {len(NETWORKS)} networks, {len(ARMS)} ways; and every byte counted"
    return rounds * len(NETWORKS), line


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Count and time everything."""
    with one_thread():
        return [record for network in NETWORKS for record in _costs(network, settings, tick)]


def _costs(network: Network, settings: Settings, tick: Tick) -> Iterator[Record]:
    found = times(network, settings.seed, *_size(settings), tick)
    alone, ema = (found[ARMS.index(arm)] for arm in (PLAIN, EMA))
    counted = {arm: bytes_of(network, arm, settings.seed) for arm in ARMS}
    for arm, seconds in zip(ARMS, found, strict=True):
        kept, peak = counted[arm]
        yield {
            "kind": "cost",
            "network": network.name,
            "weights": kept["weights"] // torch.float32.itemsize,
            "batch": network.batch,
            "arm": arm,
            "method": {BELAY: repr(SPRING), PLAIN: None}.get(arm, f"decay {DECAY}"),
            "rounds": len(seconds),
            "threads": 1,
            "bytes": kept,
            "bytes_during_update": peak - counted[PLAIN][1],
            "timing_s": {
                "median": float(seconds.median()),
                "to_plain": dict(zip(("ratio", "low", "high"), ratio(seconds, alone, settings.seed), strict=True)),
                "to_ema": dict(zip(("ratio", "low", "high"), ratio(seconds, ema, settings.seed), strict=True)),
            },
        }


def cost(records: Sequence[Record], network: str, arm: str) -> Record:
    """The record of a network and an arm."""
    (found,) = (r for r in records if (r["network"], r["arm"]) == (network, arm))
    return found


def bytes_a_weight(record: Record) -> float:
    """What stays from step to step, for each weight."""
    return float(sum(record["bytes"].values()) / record["weights"])


# Figure --------------------------------------------------------------------------------------------------------------

_PARTS = {"weights": "#bbbbbb", "gradients": "#dddddd", "AdamW": "#999999", "average": style.EMA_COLOUR}
_DURING: dict[str, Any] = {"color": "white", "ec": style.BELAY_COLOUR, "hatch": "////", "lw": 0.8}


def _draw_times(ax: Axes, records: Sequence[Record]) -> None:
    for network, offset, mark in zip(NETWORKS, (0.17, -0.17), "os", strict=True):
        for y, arm in enumerate(reversed(ARMS)):
            t, hue = cost(records, network.name, arm)["timing_s"]["to_plain"], style.colour(arm.split(" (")[0])
            ax.plot([t["low"], t["high"]], [y + offset] * 2, color=hue, lw=2)
            ax.plot(t["ratio"], y + offset, mark, color=hue)
            if arm != PLAIN:
                _beside(ax, f"{t['ratio'] - 1:+.1%}".replace("-", "−"), t["high"], y + offset)
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
            _beside(ax, f"{left:.1f} + {during:.1f}", left + during, y)
        else:
            _beside(ax, f"{left:.1f}", left, y)
    for part, hue in _PARTS.items():
        ax.barh(0, 0, color=hue, label=part)
    ax.barh(0, 0, label="during the update", **_DURING)
    ax.set(xlabel="bytes for each weight", xlim=(0, 31), yticks=range(len(ARMS)), yticklabels=[""] * len(ARMS))
    ax.set_title("memory, float32, without activations")


def _beside(ax: Axes, text: str, x: float, y: float) -> None:
    ax.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _draw(records: Sequence[Record]) -> Figure:
    fig = style.figure(8.6, 3.6)
    left, right = fig.subplots(1, 2)
    _draw_times(left, records)
    _draw_bytes(right, records)
    for ax in (left, right):
        ax.set_ylim(-0.5, len(ARMS) - 0.5)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    fig.legend(loc="outside lower center", ncols=4, fontsize=8.5)
    return fig


def draw(records: Sequence[Record]) -> list[Plate]:
    """One figure: ratios of times, and bytes."""
    mlp, convolutional = (cost(records, network.name, BELAY) for network in NETWORKS)
    with style.house():
        return [
            Plate(
                "overhead",
                "What an average costs",
                "Left: processor time of a whole training step (forward, backward, AdamW) on one thread, as a ratio of "
                f"medians over {mlp['rounds']} interleaved rounds, with 95% bootstrap intervals: an MLP of "
                f"{mlp['weights']:,} weights at batch {mlp['batch']}, with little work for each weight, and a "
                f"convolutional network of {convolutional['weights']:,} at batch {convolutional['batch']}, with a lot. "
                f"BELAY ({mlp['method']}) through Belay; EMA (decay {DECAY}) by torchbelay and by torch's "
                "AveragedModel. Right: bytes for each weight of the MLP, counted. BELAY keeps one copy of the weights, "
                "as an EMA does, and a second one while the optimizer steps, because the average follows the weights "
                "from before the step.",
                _draw(records),
            )
        ]

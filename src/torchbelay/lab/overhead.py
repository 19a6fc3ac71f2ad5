"""What an average costs: time of a training step and bytes per weight, with no average, EMA, BELAY, and velocities.

Only ratios of times are compared (`timing`). Bytes are counted tensor by tensor; those that live only during a step are
found by watching every allocation.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .arms import BELAY, EMA, PLAIN
from .ledger import Ledger, count_bytes, tensors
from .part import Plate, Record, Settings, Tick
from .report import style
from .report.words import excess, listed
from .threads import one_thread
from .timed_models import ARMS, DECAY, NETWORKS, SPRINGS, VELOCITIES, Network, build_model
from .timing import measure_in_processes, ratio

NAME = "overhead"
TITLE = "What BELAY costs"

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


# The part ------------------------------------------------------------------------------------------------------------


def _size(settings: Settings) -> tuple[int, int]:
    """Return the number of processes and the rounds of each, which is odd, so that a median exists."""
    return (1, 5) if settings.quick else (7, 31)


def plan(settings: Settings) -> tuple[int, str]:
    """Return the units of work, and one line that says what would run."""
    processes, rounds = _size(settings)
    line = (
        f"{rounds} rounds of a training step in each of {processes} processes, {len(NETWORKS)} networks, {len(ARMS)} "
        "ways, and a count of their bytes"
    )
    return processes * rounds * len(NETWORKS), line


def run(settings: Settings, tick: Tick) -> list[Record]:
    """Measure the times and the bytes of all networks and arms."""
    with one_thread():
        return [record for network in NETWORKS for record in _costs(network, settings, tick)]


def _costs(network: Network, settings: Settings, tick: Tick) -> Iterator[Record]:
    processes, rounds = _size(settings)
    found = measure_in_processes(network, settings.seed, processes, rounds, tick)
    times = {arm: [each[index] for each in found] for index, arm in enumerate(ARMS)}
    counted = {arm: measure_bytes(network, arm, settings.seed) for arm in ARMS}
    for arm in ARMS:
        kept, left, peak = counted[arm]
        kept |= {"copy": left - counted[PLAIN][1]}
        yield {
            "kind": "cost",
            "network": network.name,
            "weights": kept["weights"] // 4,  # float32
            "batch": network.batch,
            "arm": arm,
            "method": repr(SPRINGS[arm]) if arm in (BELAY, VELOCITIES) else None if arm == PLAIN else f"decay {DECAY}",
            "processes": processes,
            "rounds": rounds,
            "threads": 1,
            "same_weights": True,  # at the beginning of every turn
            "bytes": kept,
            "bytes_during_update": peak - counted[PLAIN][2],
            "timing_s": {
                "median": float(sum(each.median() for each in times[arm]) / processes),
                "to_plain": ratio(times[arm], times[PLAIN], settings.seed),
                "to_ema": ratio(times[arm], times[EMA], settings.seed),
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
                _annotate(ax, excess(t["ratio"]), t["high"], y + offset)
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
    more = [excess(r["timing_s"]["to_plain"]["ratio"]) for r in (mlp, convolutional)]
    caption = (
        f"Time of a training step with BELAY, relative to no averaging: {more[0]} for the MLP and {more[1]} for the "
        "convolutional network. BELAY keeps an average, as an EMA does, and on a CPU a copy of the weights for the "
        "next step."
    )
    notes = (
        "Left: processor time of a whole training step (forward, backward, AdamW) on one thread. Ratios "
        f"of medians over {mlp['rounds']} interleaved rounds: the mean over {mlp['processes']} processes, and its 95% "
        "interval.",
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

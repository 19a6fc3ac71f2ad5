"""What the score models show besides charts: tables of results beside the paper's, of speeds, and grids of samples."""

import base64
import io
import math
from collections.abc import Collection, Iterable, Sequence
from statistics import stdev
from typing import Any

from matplotlib import image

from torchbelay.lab.arms import EMA
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.report import style

from .analysis import ARMS, Study, fids, is_lost, of
from .figures import MODELS, colour, listed

_DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
TARGET = 0.01  # of a step's time: averaging should take less
ABREAST = 5  # pictures of samples in a row, where they do not make columns

# Tables ---------------------------------------------------------------------------------------------------------------

RATIO = "w2 test ÷ EMA's there"  # at the same learning rate
COLUMNS = ("", "w2 train", "w2 test", "w2 FID", RATIO, "w1 train", "w1 test", "w1 FID", "Seeds")


def results(rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of these rows, without the columns of which nothing is known."""
    known = [i for i in range(len(COLUMNS)) if any(row[i] != MISSING for row in rows)]
    return Table(tuple(COLUMNS[i] for i in known), tuple(tuple(row[i] for i in known) for row in rows))


def printed(name: str, train: str, test: str, fid: str) -> tuple[str, ...]:
    """A row of the paper's own table; it does not say how many runs it is from."""
    return (f"The paper: {name}", train, test, fid, *[MISSING] * 5)


def result(records: Sequence[Record], study: Study, arm: str, lr: float) -> tuple[str, ...]:
    """A row of ours: the mean over the seeds that are not lost and, of several, their standard deviation."""
    cells = [f"{arm} at {lr:g}"]
    for weights in ("w2", "w1"):
        for images in ("train", "test"):
            losses = study.losses(arm, lr, weights, images).values()
            cells.append(cell((None if is_lost(loss) else loss for loss in losses), "#.3g"))
        cells.append(fid_cell(records, study, arm, lr, weights))
        if weights == "w2":
            cells.append(_against_ema(study, arm, lr))
    return (*cells, str(len(study.at(arm, lr))))


def _against_ema(study: Study, arm: str, lr: float) -> str:
    """The ratio of the seeds that neither lost; how many were, the losses beside it say."""
    found = study.compare(arm, EMA, lr)
    if arm == EMA:
        return "1" if found.point else MISSING
    some = found.unpaired and found.ratio is not None
    return f"{found.size or MISSING}{f', {found.seeds - found.unpaired} of {found.seeds} pairs' if some else ''}"


def cell(values: Iterable[float | None], form: str) -> str:
    """Mean ± standard deviation; None is lost.

    >>> cell([0.0412, 0.0408, None], "#.3g"), cell([], ".1f"), cell([None], "#.3g")
    ('0.0410 ± 0.0003, 1 of 3 lost', '–', 'lost')
    """
    values = list(values)
    known = [value for value in values if value is not None]
    if not known:
        return "lost" if values else MISSING
    average = math.fsum(known) / len(known)
    text = f"{average:{form}}" + (f" ± {_short(stdev(known))}" if len(known) > 1 else "")
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} of {len(values)} lost"


def fid_cell(records: Sequence[Record], study: Study, arm: str, lr: float, weights: str = "w2") -> str:
    """The FIDs of the seeds, and of how many there are any, if not of all."""
    found, trained = fids(records, study, arm, lr, weights), len(study.at(arm, lr))
    return cell(found.values(), ".1f") + (f", {len(found)} of {trained} drawn" if 0 < len(found) < trained else "")


def _short(value: float) -> str:
    """One digit, never as a power of ten.

    >>> _short(0.000063), _short(0.0), _short(3.2)
    ('0.00006', '0', '3')
    """
    return f"{float(f'{value:.1g}'):.7f}".rstrip("0").rstrip(".")


def sampling(records: Sequence[Record], study: str) -> str:
    """How the FIDs were computed, as a sentence; that they were not, if so."""
    found = of(records, "fid", study=study)
    if not found:
        return "FID has not been run."
    counts, samplers, references, networks = (
        listed(
            [f"{value:,}" if isinstance(value, int) else str(value) for value in dict.fromkeys(r[key] for r in found)]
        )
        for key in ("samples", "sampler", "reference", "network")
    )
    return f"FID: {counts} samples ({samplers}) against {references}, by {networks}."


def fid_checks(records: Sequence[Record]) -> tuple[str, ...]:
    """What all that computes a FID gives where the answer is known, as notes."""
    return tuple(
        f"A check of all that computes FID, on {r['images']}: it gives {r['fid']:.8g}, and torch-fidelity records "
        f"{r['recorded']:.8g}."
        for r in of(records, "fid check")
    )


def speed(records: Sequence[Record], part: str) -> Plate | None:
    """How many images a second, beside what the arithmetic of the device would allow."""
    found = of(records, "throughput")
    if not found:
        return None
    rows = [
        (
            f"{MODELS.get(r['model'], r['model'])} on {_DATA.get(r['dataset'], r['dataset'])}, {r['how']}",
            f"{r['parameters']:,}",
            f"{r['batch']} × {r['side_by_side']}",
            f"{r['images_per_s']:,.0f}",
            *_limit(r),
            _share(r.get("averaging_share")),
        )
        for r in found
    ]
    columns = ("", "Weights", "Batch × side by side", "Images/s", "Limit", "Of the limit", "Averaging takes")
    devices = listed(
        [
            name if limit is None else f"{name} ({limit:g} TFLOP/s)"
            for name, limit in dict.fromkeys((r["device"], r["limit_tflops"]) for r in found)
        ]
    )
    caption = (
        f"Training, forward and backward, on {devices}: images a second of all networks that train side by side, and "
        "the most that the device could do if it did nothing but their arithmetic. What averaging takes of a step: two "
        "groups of networks, with and without the average, take turns, and the medians of five rounds are compared; a "
        f"share below 0 is noise. The target is under {TARGET:.0%}."
    )
    return Plate(f"{part}-speed", "How fast it trains", caption, Table(columns, tuple(rows)))


def _limit(record: Record) -> tuple[str, str]:
    """What the arithmetic allows, and how near to it this is; not known of every device."""
    most = record["arithmetic_limit_images_per_s"]
    return (MISSING, MISSING) if most is None else (f"{most:,.0f}", f"{record['images_per_s'] / most:.0%}")


def _share(share: float | None) -> str:
    """Of a step's time.

    >>> _share(0.0042), _share(-0.012), _share(None)
    ('0.4%', 'within noise (−1.2%)', '–')
    """
    if share is None:
        return MISSING
    return f"{share:.1%}" if share >= 0 else f"within noise (−{-share:.1%})"


# Samples --------------------------------------------------------------------------------------------------------------


def samples(records: Sequence[Record], part: str, title: str) -> Plate | None:
    """Grids of samples, and which arms have none, as they are lost."""
    drawn = of(records, "grid", weights="w2") or of(records, "grid")
    studies = {name: Study(records, name) for name in {r["study"] for r in drawn}}
    found = [r for r in drawn if _works(studies[r["study"]], r)]
    if not found:
        return None
    first = {(r["arm"], r["lr"]): r for r in reversed(found)}
    order, columns = _places(first)
    rows, size = math.ceil(len(order) / columns), min(2.9, 8.8 / columns)
    fig = style.figure(min(9.0, 0.2 + size * columns), 0.05 + (size + 0.25) * rows)
    axes: Any = fig.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for ax, (arm, lr) in zip(axes.flat, order, strict=False):  # the last row may have room left
        pixels = image.imread(io.BytesIO(base64.b64decode(first[arm, lr]["png"])), format="png")
        ax.imshow(pixels, cmap="gray", interpolation="none")
        ax.set_title(f"{arm}, {lr:g}", fontsize=9, loc="center", color=colour(arm))
    seeds = sorted({r["seed"] for r in first.values()})
    same = f"of seed {seeds[0]}, from the same noise everywhere" if len(seeds) == 1 else "of several seeds"
    told = {(arm, lr): fid_cell(records, studies[first[arm, lr]["study"]], arm, lr) for arm, lr in order}
    said = "; ".join(f"{arm} at {lr:g} {fid}" for (arm, lr), fid in told.items() if fid != MISSING)
    caption = (
        f"Drawn with the average's weights at the end of training, {same}: the first ones, not chosen. Above each its "
        f"arm and learning rate.{f' FID, mean over seeds: {said}.' if said else ''}{_nothing_to_draw(records)}"
    )
    return Plate(f"{part}-samples", title, caption, fig)


Key = tuple[str, float]  # an arm and its learning rate


def _places(keys: Collection[Key]) -> tuple[list[Key], int]:
    """In which order pictures stand, and how many in a row.

    An arm a column and a learning rate a row, if every arm is at every rate; else arm after arm, without holes.

    >>> _places([("BELAY", 0.1), ("EMA", 0.2), ("BELAY", 0.2), ("EMA", 0.1)])
    ([('EMA', 0.1), ('BELAY', 0.1), ('EMA', 0.2), ('BELAY', 0.2)], 2)
    >>> _places([("BELAY", 0.1), ("EMA", 0.2), ("BELAY", 0.2)])
    ([('EMA', 0.2), ('BELAY', 0.1), ('BELAY', 0.2)], 3)
    """
    arms, lrs = {arm for arm, _ in keys}, {lr for _, lr in keys}
    if len(keys) == len(arms) * len(lrs):
        return sorted(keys, key=_by_rate), len(arms)
    return sorted(keys, key=lambda key: (_rank(key[0]), key[1])), min(ABREAST, len(keys))


def _works(study: Study, grid: Record) -> bool:
    """Whether the network that made a grid is not lost: a collapsed one makes noise."""
    losses = study.kept(grid["arm"], grid["lr"], grid["weights"])
    return losses.get(grid["seed"], 0.0) is not None


def _nothing_to_draw(records: Sequence[Record]) -> str:
    """Which arms lost every seed at which rates, as a sentence, where a FID was asked for."""
    gone: dict[float, list[str]] = {}
    asked = {(r["arm"], r["lr"]): Study(records, r["study"]) for r in of(records, "fid")}
    for arm, lr in sorted(asked, key=_by_rate):
        seeds = asked[arm, lr].kept(arm, lr) or fids(records, asked[arm, lr], arm, lr)  # a FID's run may be missing
        if not any(seeds.values()):
            gone.setdefault(lr, []).append(arm)
    said = [f"at {lr:g} {listed(arms)}" for lr, arms in gone.items()]
    return f" Lost, so that there is nothing to draw: {'; '.join(said)}." if said else ""


def _by_rate(key: Key) -> tuple[float, tuple[int, str]]:
    return key[1], _rank(key[0])


def _rank(arm: str) -> tuple[int, str]:
    return (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)

"""The tables and sample grids of the score models: results beside the paper's, speeds, images."""

import base64
import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any

from matplotlib import image

from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.report import style
from torchbelay.lab.report.words import listed

from .analysis import ARMS, StudyResults, fids, is_lost, select
from .captions import MODELS, sign_note
from .figures import arm_colour
from .formats import DATASETS

TARGET = 0.01  # the share of a step's time that averaging should stay below
ABREAST = 5  # grids per row, if arms and rates do not fill columns and rows

# Tables ---------------------------------------------------------------------------------------------------------------


def results_table(rows: Sequence[tuple[str, ...]], rival: str) -> Table:
    """Return a table of these rows, without columns that would be empty; ratios are to the EMA `rival`."""
    ratio = f"w2 test ÷ {rival}'s"  # at the same learning rate
    columns = ("", "w2 train", "w2 test", "w2 FID", ratio, "w1 train", "w1 test", "w1 FID", "Seeds")
    known = [i for i in range(len(columns)) if any(row[i] != MISSING for row in rows)]
    return Table(tuple(columns[i] for i in known), tuple(tuple(row[i] for i in known) for row in rows))


def paper_row(name: str, train: str, test: str, fid: str) -> tuple[str, ...]:
    """Return a row with the paper's numbers; the paper does not print the number of runs."""
    return (f"The paper: {name}", train, test, fid, *[MISSING] * 5)


def results_row(records: Sequence[Record], study: StudyResults, arm: str, lr: float) -> tuple[str, ...]:
    """Return a row of ours: the mean over the seeds that are not lost and, for several, their standard deviation."""
    cells = [f"{arm} at {lr:g}"]
    for weights in ("w2", "w1"):
        for images in ("train", "test"):
            losses = study.losses(arm, lr, weights, images).values()
            cells.append(mean_cell((None if is_lost(loss) else loss for loss in losses), "#.3g"))
        cells.append(fid_cell(records, study, arm, lr, weights))
        if weights == "w2":
            cells.append(_against_ema(study, arm, lr))
    return (*cells, str(len(study.runs_at(arm, lr))))


def _against_ema(study: StudyResults, arm: str, lr: float) -> str:
    """Return the ratio to the study's EMA over the seeds that neither arm lost; other cells count the lost ones."""
    found = study.compare(arm, study.ema, lr)
    if arm == study.ema:
        return "1" if found.point else MISSING
    partial = found.unpaired and found.ratio is not None
    return f"{found.size or MISSING}{f', {found.seeds - found.unpaired} of {found.seeds} pairs' if partial else ''}"


def mean_cell(values: Iterable[float | None], form: str) -> str:
    """Return mean ± standard deviation; None counts as lost.

    >>> mean_cell([0.0412, 0.0408, None], "#.3g"), mean_cell([], ".1f"), mean_cell([None], "#.3g")
    ('0.0410 ± 0.0003, 1 of 3 lost', '–', 'lost')
    """
    values = list(values)
    known = [value for value in values if value is not None]
    if not known:
        return "lost" if values else MISSING
    average = math.fsum(known) / len(known)
    text = f"{average:{form}}" + (f" ± {_one_digit(stdev(known))}" if len(known) > 1 else "")
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} of {len(values)} lost"


def fid_cell(records: Sequence[Record], study: StudyResults, arm: str, lr: float, weights: str = "w2") -> str:
    """Return the mean FID over the seeds, and how many seeds have one, if not all."""
    found, trained = fids(records, study, arm, lr, weights), len(study.runs_at(arm, lr))
    return mean_cell(found.values(), ".1f") + (f", {len(found)} of {trained} drawn" if 0 < len(found) < trained else "")


def _one_digit(value: float) -> str:
    """Return a number with one digit, never as a power of ten.

    >>> _one_digit(0.000063), _one_digit(0.0), _one_digit(3.2)
    ('0.00006', '0', '3')
    """
    return f"{float(f'{value:.1g}'):.7f}".rstrip("0").rstrip(".")


def describe_sampling(records: Sequence[Record], study: str) -> str:
    """Return how the FIDs were computed, or that they were not, as a sentence."""
    found = select(records, "fid", study=study)
    if not found:
        return "FID has not been run."
    counts, samplers, references, networks = (
        listed(
            [f"{value:,}" if isinstance(value, int) else str(value) for value in dict.fromkeys(r[key] for r in found)]
        )
        for key in ("samples", "sampler", "reference", "network")
    )
    return f"FID: {counts} samples ({samplers}) against {references}, by {networks}."


def fid_check_notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return notes on the check of the FID computation against a known value."""
    return tuple(
        f"Check of the FID computation, on {r['images']}: it gives {r['fid']:.8g}; torch-fidelity records "
        f"{r['recorded']:.8g}."
        for r in select(records, "fid check")
    )


def speed_plate(records: Sequence[Record], part: str) -> Plate | None:
    """Return the images per second, beside the limit of the device's arithmetic; None without records."""
    found = select(records, "throughput")
    if not found:
        return None
    rows = [
        (
            f"{MODELS.get(r['model'], r['model'])} on {DATASETS[r['dataset']].title}, {r['how']}",
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
    shares = [r["averaging_share"] for r in found if r.get("averaging_share") is not None]
    most = max(shares, default=0.0)
    cost = f"takes at most {most:.1%} of a step" if most > 0 else "costs nothing that exceeds the noise"
    cost = f" Averaging {cost}; the target is under {TARGET:.0%}." if shares else ""
    caption = f"Images per second of all networks that train side by side, beside the limit of the arithmetic.{cost}"
    notes = (
        f"Measured for forward and backward passes on {devices}. The limit is the speed at which the device would do "
        "nothing but the networks' arithmetic.",
        "The cost of averaging: two groups of networks, with and without the average, take turns, and the medians of "
        "five rounds are compared. A share below 0 is noise.",
    )
    return Plate(f"{part}-speed", "How fast it trains", caption, Table(columns, tuple(rows)), notes)


def _limit(record: Record) -> tuple[str, str]:
    """Return the limit of the arithmetic and the share of it that is reached; unknown for some devices."""
    most = record["arithmetic_limit_images_per_s"]
    return (MISSING, MISSING) if most is None else (f"{most:,.0f}", f"{record['images_per_s'] / most:.0%}")


def _share(share: float | None) -> str:
    """Return the share of a step's time that averaging takes, as text.

    >>> _share(0.0042), _share(-0.012), _share(None)
    ('0.4%', 'within noise (−1.2%)', '–')
    """
    if share is None:
        return MISSING
    return f"{share:.1%}" if share >= 0 else f"within noise (−{-share:.1%})"


# Samples --------------------------------------------------------------------------------------------------------------


def samples_plate(records: Sequence[Record], part: str, title: str) -> Plate | None:
    """Return grids of samples; a note names the arms that have none because they are lost."""
    drawn = select(records, "grid", weights="w2") or select(records, "grid")
    studies = {name: StudyResults(records, name) for name in {r["study"] for r in drawn}}
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
    for ax, (arm, lr) in zip(axes.flat, order, strict=False):  # the last row may be shorter
        pixels = image.imread(io.BytesIO(base64.b64decode(first[arm, lr]["png"])), format="png")
        ax.imshow(pixels, cmap="gray", interpolation="none")
        ax.set_title(f"{arm}, {lr:g}", fontsize=9, loc="center", color=arm_colour(arm))
    seeds = sorted({r["seed"] for r in first.values()})
    source = f"of seed {seeds[0]}, from the same noise for every arm" if len(seeds) == 1 else "of several seeds"
    fid_range = _fid_range(records, studies, first)
    caption = f"The first samples of each arm and learning rate, not selected, {source}.{fid_range}"
    cells = {(arm, lr): fid_cell(records, studies[first[arm, lr]["study"]], arm, lr) for arm, lr in order}
    values = "; ".join(f"{arm} at {lr:g} {fid}" for (arm, lr), fid in cells.items() if fid != MISSING)
    notes = (
        "Made with the average w2 at the end of training.",
        *([f"FID, mean over seeds: {values}."] if values else []),
        *sign_note(arm for arm, _ in order),
        *_lost_note(records),
    )
    return Plate(f"{part}-samples", title, caption, fig, notes)


def _fid_range(records: Sequence[Record], studies: Mapping[str, StudyResults], grids: Mapping["Key", Record]) -> str:
    """Return the lowest and the highest FID of the networks that made the grids, as a sentence; empty without FIDs."""
    found = {
        f"{arm} at {lr:g}": fid
        for (arm, lr), grid in grids.items()
        if (fid := fids(records, studies[grid["study"]], arm, lr, grid["weights"]).get(grid["seed"])) is not None
    }
    if not found:
        return ""
    low, high = (choose(found, key=lambda name: found[name]) for choose in (min, max))
    return f" Their FID goes from {found[low]:.1f} ({low}) to {found[high]:.1f} ({high})."


Key = tuple[str, float]  # an arm and its learning rate


def _places(keys: Collection[Key]) -> tuple[list[Key], int]:
    """Return the order of the grids, and how many stand in a row.

    If every arm is at every rate, arms are columns and learning rates are rows; else arm follows arm without gaps.

    >>> _places([("BELAY", 0.1), ("EMA", 0.2), ("BELAY", 0.2), ("EMA", 0.1)])
    ([('EMA', 0.1), ('BELAY', 0.1), ('EMA', 0.2), ('BELAY', 0.2)], 2)
    >>> _places([("BELAY", 0.1), ("EMA", 0.2), ("BELAY", 0.2)])
    ([('EMA', 0.2), ('BELAY', 0.1), ('BELAY', 0.2)], 3)
    """
    arms, lrs = {arm for arm, _ in keys}, {lr for _, lr in keys}
    if len(keys) == len(arms) * len(lrs):
        return sorted(keys, key=_by_rate), len(arms)
    return sorted(keys, key=lambda key: (_rank(key[0]), key[1])), min(ABREAST, len(keys))


def _works(study: StudyResults, grid: Record) -> bool:
    """Whether the network that made a grid is not lost: a collapsed network makes noise."""
    losses = study.valid_losses(grid["arm"], grid["lr"], grid["weights"])
    return losses.get(grid["seed"], 0.0) is not None


def _lost_note(records: Sequence[Record]) -> tuple[str, ...]:
    """Return which arms with FID records lost every seed, and at which rates, as a note."""
    lost: dict[float, list[str]] = {}
    measured = {(r["arm"], r["lr"]): StudyResults(records, r["study"]) for r in select(records, "fid")}
    for arm, lr in sorted(measured, key=_by_rate):
        seeds = measured[arm, lr].valid_losses(arm, lr) or fids(
            records, measured[arm, lr], arm, lr
        )  # its run may be missing
        if not any(seeds.values()):
            lost.setdefault(lr, []).append(arm)
    texts = [f"at {lr:g} {listed(arms)}" for lr, arms in lost.items()]
    return (f"Not shown, because every seed is lost: {'; '.join(texts)}.",) if texts else ()


def _by_rate(key: Key) -> tuple[float, tuple[int, str]]:
    return key[1], _rank(key[0])


def _rank(arm: str) -> tuple[int, str]:
    return (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)

"""The sentences of docs/performance.md whose numbers come from the recorded runs; test_readme.py checks its tables."""

import json
from typing import Any

import pytest

from helpers import measured
from helpers.root import ROOT

REPORT = measured.load_report()
RESULT: dict[str, Any] = json.loads(REPORT.RESULT.read_text(encoding="utf-8"))
LATER: dict[str, Any] = REPORT.recorded("steps")
ALONE, BELAY = REPORT.ALONE, REPORT.BELAY
PAGE = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())


def step(model: str, name: str, kind: str = "wall", result: dict[str, Any] = RESULT) -> float:
    """The median time of a whole step, in milliseconds."""
    return float(REPORT.ms(result, model, "step", name, kind))


def bandwidth(averages: int) -> float:
    """The bandwidth of one pass as a share of a copy's: w1 is read, and every average is read and written."""
    row = RESULT["scaling"]["averages"][str(averages)][f"{averages} in one pass"]
    bytes_moved = (4 + 8 * averages) * 256 * 2**20
    return float(bytes_moved / (row["device"]["median"] / 1e3) / RESULT["copy_bandwidth"])


def added_bytes(name: str) -> float:
    held = RESULT["models"]["unet"]["memory"]
    return float(held[name]["held"] - held[ALONE]["held"])


@pytest.mark.parametrize(
    "sentence",
    [
        f"The device takes {step('unet', BELAY, 'device'):.2f} and {step('small', BELAY, 'device'):.2f} ms.",
        f"takes {step('small', ALONE) / step('small', BELAY):.1f} times as long as BELAY in one pass at 2,000 tensors. "
        "In the later run [below](#an-ema-beside-adamw) it takes "
        f"{step('small', ALONE, result=LATER) / step('small', REPORT.ONE_PASS, result=LATER):.1f} times as long as EMA "
        "in one pass.",
        f"the kernel itself takes {REPORT.ms(RESULT, 'small', 'average', REPORT.EMA, 'device'):.2f} ms.",
        f"a pass over w1 and one average reaches {bandwidth(1):.2f} of a copy's bandwidth, and a pass over w1 and four "
        f"averages {bandwidth(4):.2f}.",
        f"of which the allocator makes {added_bytes(BELAY):.2f}, and "
        f"{added_bytes('torch AdamW, then AveragedModel (EMA)'):.2f} for a plain copy",
        f"beyond the {step('medium', REPORT.HOOKS, 'device', LATER) - step('medium', ALONE, 'device', LATER):.2f} ms "
        "of the memory",
    ],
)
def test_why_targets_are_missed_is_said_with_measured_numbers(sentence: str) -> None:
    assert sentence in PAGE


def test_it_says_with_how_many_tensors_an_ema_takes_less_than_torchs() -> None:
    names, rows = (REPORT.EMA, "torch AveragedModel"), RESULT["scaling"]["tensors"].items()
    both = {
        kind: {int(n): [row[name][kind]["median"] for name in names] for n, row in rows} for kind in ("wall", "device")
    }
    longer = [n for n, (ours, theirs) in both["wall"].items() if ours > theirs]
    first = min(n for n in both["wall"] if n > max(longer))
    ours, theirs = both["wall"][longer[-1]]
    assert (
        f"takes longer than AveragedModel with {' and '.join(map(str, longer))} tensors ({ours:.3f} against "
        f"{theirs:.3f} ms with {longer[-1]}), and less with {first} tensors or more."
    ) in PAGE
    assert all(ours < theirs for ours, theirs in both["device"].values())
    assert "For the device alone it takes less in all these cases." in PAGE


def test_the_run_of_the_whole_steps_is_older_than_that_of_an_ema_beside_adamw() -> None:
    assert RESULT["date"] < LATER["date"]
    assert "It is older than the run of [An EMA beside AdamW](#an-ema-beside-adamw)" in PAGE


def test_the_table_of_drop_ins_on_a_gpu_has_both_types_in_a_row() -> None:
    result = REPORT.recorded("compat_cpu")
    head, _, *rows = REPORT.drop_ins(result).splitlines()
    assert head == "| class, model | theirs, float32 | ours | ratio | theirs, bfloat16 | ours | ratio |"
    first = {row["dtype"]: (row["theirs"]["done"], row["ours"]["done"]) for row in result["rows"][:2]}
    cells = [f"{x:.2f}" for theirs, ours in first.values() for x in (theirs, ours, ours / theirs)]
    assert rows[0] == f"| AveragedModel, EMA by `multi_avg_fn`, 10M in 200 | {' | '.join(cells)} |"

"""A sample report, made by hand: every answer, parts that ran and one that did not, and small figures."""

from collections.abc import Sequence
from pathlib import Path

from torchbelay.lab import records
from torchbelay.lab.claims.verdict import Answer, Claim, Finding, Verdict
from torchbelay.lab.part import MISSING, Plate, Record, Settings, Table
from torchbelay.lab.report import style
from torchbelay.lab.report.build import build as build_report

ANSWERS = {
    "C1": Answer.IN_PART,
    "C2": Answer.IN_PART,
    "C3": Answer.FAILS,
    "C5": Answer.HOLDS,
    "C6": Answer.HOLDS,
    "C9": Answer.OPEN,
    "C11": Answer.FAILS,
    "C12": Answer.OPEN,
}
NEEDS = {"C9": ("mnist",), "C12": ("ring",)}  # mnist is not in TITLES: no command can run it
TITLES = {"fig2": "Figure 2: three learning rates", "robustness": "How robust?", "ring": "A ring of eight Gaussians"}


def verdict(name: str, answer: Answer, summary: str | None = None, plate: str | None = "paths") -> Verdict:
    claim = Claim(
        name,
        f"the paper's claim {name}, that `η < 2/h` & more, in words long enough for a line or two of a table",
        f"rule of {name}: holds if more than half of the starts converge, in part if any does",
        NEEDS.get(name, ("fig2",)),
        lambda _: finding,
        plate,
    )
    finding = Finding(
        answer,
        summary
        or f"finding of {name}: from 90% of 200 starts BELAY converges at 0.01, and SGD at 0.0032 from all of them",
        ()
        if answer is Answer.OPEN
        else (("starts that converge", "180 of 200"), ("limit of η, from theory", "0.010158")),
    )
    return Verdict(claim, finding)


def sample() -> list[Verdict]:
    return [verdict(name, answer) for name, answer in ANSWERS.items()]


def plate(name: str) -> Plate:
    with style.house():
        figure = style.figure(9.0, 4.5)
        axes = figure.subplots()
        axes.plot(range(30), [(x * 37 % 101) / 101 for x in range(30)], color=style.colour("BELAY"))
        axes.set_xlabel("step")
    return Plate(name, f"Title of {name} <b>", f"Caption of {name}: 30 steps from (0.05, 0.05) & seed 7.", figure)


def table(name: str) -> Plate:
    """A table with more columns and longer cells than any real one."""
    columns = ("", "w2 train", "w2 test", "w2 FID", "w2 test ÷ EMA's", "w1 train", "w1 test", "w1 FID", "Seeds")
    numbers = ("0.0363 ± 0.0006", "0.0371 ± 0.0006", "55.4 ± 40", "0.989 (0.981 to 0.998)", "0.0406 ± 0.0007")
    lost = [f"{text}, {'2 of 3 pairs' if '(' in text else '1 of 3 lost'}" for text in numbers]
    rows = (
        ("The paper: BELAY at 0.05", "0.042", "0.040", "15.2", *[MISSING] * 5),
        ("matched EMA at 0.001 & <b>", *lost, "0.0414 ± 0.0007, 1 of 3 lost", "14.1, 1 of 3 drawn", "3"),
    )
    notes = ("The paper does not say `T` & <i>.", "Nor how long it trained.")
    return Plate(name, f"Title of {name} <b>", f"Caption of {name}; what differs:", Table(columns, rows), notes)


def heads(*quick: str) -> dict[str, Record]:
    """The headers of the two parts that ran; the parts named in `quick` ran in the quick version."""
    took = {"fig2": 2.34, "robustness": 100.2}
    return {name: records.header(name, Settings(seed=7, quick=name in quick), s) for name, s in took.items()}


ORIGIN: Record = {"kind": "origin", "device": "NVIDIA H200", "torch": "2.11.0+cu130", "python": "3.12.3"}


def build(out: Path, *quick: str, verdicts: Sequence[Verdict] | None = None, elsewhere: bool = False) -> Path:
    """Build a report of two parts that ran, with three figures and a table, and one part that did not run.

    With `elsewhere`, another machine made the records of one part, so that the table of records has all its columns.
    """
    plates = {"fig2": [plate("paths")], "robustness": [plate("shares"), plate("limits"), table("results")]}
    lines: dict[str, list[Record]] = {"fig2": [{"kind": "run"}] * 3, "robustness": [{"kind": "share"}] * 1234}
    lines["robustness"] += [ORIGIN] if elsewhere else []
    return build_report(out, heads(*quick), lines, sample() if verdicts is None else verdicts, plates, titles=TITLES)

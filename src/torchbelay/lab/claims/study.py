"""The study of the spring's sign with its controls: all hypotheses, judged together. study.md states the rules."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

from torchbelay.lab.answer import Answer
from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.analysis import hypotheses as of_language
from torchbelay.lab.gpt.study import NAME as LANGUAGE
from torchbelay.lab.hypotheses import FAMILY, GPA, LEVEL, Hypothesis, judge
from torchbelay.lab.part import MISSING, Plate, Record, Table
from torchbelay.lab.report.words import listed
from torchbelay.lab.score import penalty, warm_up
from torchbelay.lab.score.studies import LOSING_RATE
from torchbelay.lab.statistics import mcnemar

from .verdict import Records

PARTS = (warm_up.NAME, penalty.NAME, LANGUAGE)


def read_study() -> str:
    """Return the text of study.md."""
    return (files(__package__) / "study.md").read_text(encoding="utf-8")


def judge_study(records: Records) -> list[Hypothesis]:
    """Return all hypotheses with their answers, from whatever parts have records.

    >>> {str(each.answer) for each in judge_study({})}
    {'not run'}
    """
    found = [
        *warm_up.hypotheses(records.get(warm_up.NAME, ())),
        *of_language(Runs(records.get(LANGUAGE, ()))),
        *penalty.hypotheses(records.get(penalty.NAME, ())),
    ]
    return judge(sorted(found, key=lambda each: FAMILY.index(each.id)))


def holm_bars(ps: Sequence[float]) -> list[str]:
    """Return the bar that Holm's rule sets each test of the family, and whether its p met it, in words.

    The smallest p has the lowest bar. The first that misses its own ends the rule, and the others have none.

    >>> holm_bars([0.5, 0.001, 0.02, 0.5, 0.5, 0.5, 0.5])[:3]
    ['not reached', '0.05/7 = 0.00714, met', '0.05/6 = 0.00833, missed']
    """
    words, stopped = ["not reached"] * len(ps), False
    for place, k in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if stopped:
            break
        left = len(FAMILY) - place
        stopped = ps[k] > LEVEL / left
        words[k] = f"{LEVEL:g}/{left} = {LEVEL / left:.3g}, {'missed' if stopped else 'met'}"
    return words


def study_plate(records: Records) -> Plate:
    """Return the table of all hypotheses: what was measured, p, Holm's bar and the answer."""
    found = judge_study(records)
    given = {answer: [h.id for h in found if h.answer is answer] for answer in Answer}
    told = "; ".join(f"{answer}: {listed(names)}" for answer, names in given.items() if names)
    caption = f"All {len(FAMILY)} tests of the study together, by Holm's rule. {told[0].upper()}{told[1:]}."
    notes = (
        "p: how likely such numbers are if the hypothesis is wrong, by a one-sided test over seeds. In order of p, the "
        f"tests are compared with {LEVEL:g}/{len(FAMILY)}, {LEVEL:g}/{len(FAMILY) - 1} and so on. The first that "
        "misses its bar ends Holm's rule. That test and the rest are undecided, unless the opposite of one is shown by "
        "the same rule.",
        *_other_test(found, records.get(warm_up.NAME, ())),
        *([f"H4: {penalty.HOW_TO_READ}"] if any(h.seeds for h in found if h.id in penalty.ELSEWHERE) else ()),
        "Intervals are of 95%, over paired seeds. A test that is not run counts with p = 1.",
        GPA,
    )
    columns = ("", "Hypothesis", "Measured", "Seeds", "p", "Holm's bar", "Answer")
    table = Table(columns, tuple(_rows(found)), prose=("Hypothesis", "Measured"))
    return Plate("study-hypotheses", "All hypotheses of the study", caption, table, notes)


def _rows(found: Sequence[Hypothesis]) -> list[tuple[str, ...]]:
    bars = holm_bars([h.p if h.judged else 1.0 for h in found])
    opposites = holm_bars([h.against if h.judged else 1.0 for h in found])
    return [_row(h, bar, opposite) for h, bar, opposite in zip(found, bars, opposites, strict=True)]


def _row(h: Hypothesis, bar: str, opposite: str) -> tuple[str, ...]:
    if not h.seeds:
        return h.id, h.claim, "not run", "0", MISSING, MISSING, str(h.answer)
    if not h.judged:
        bar = f"too few seeds, {h.least} are needed"
    elif h.answer is Answer.FAILS:
        bar = f"{bar}; its opposite, p = {h.against:.3g}: {opposite}"
    return h.id, h.claim, h.numbers, f"{h.seeds}", f"{h.p:.3g}", bar, str(h.answer)


def _other_test(found: Sequence[Hypothesis], records: Sequence[Record]) -> tuple[str, ...]:
    """Return what McNemar's test would say of H1, if it differs: it leaves out seeds that are lost both times."""
    groups = warm_up.by_warm_up(records)
    if len(groups) < 2:
        return ()
    cold, warm = (groups[steps].valid_losses(warm_up.ZERO, LOSING_RATE) for steps in (min(groups), max(groups)))
    lost = [(cold[seed] is None, warm[seed] is None) for seed in {*cold} & {*warm}]
    both, only_cold, only_warm = map(lost.count, ((True, True), (True, False), (False, True)))
    if not both:
        return ()
    p, against = mcnemar(only_warm, only_cold), mcnemar(only_cold, only_warm)
    (registered,) = (h for h in found if h.id == "H1")
    others = judge([replace(h, p=p, against=against) if h is registered else h for h in found])
    (answer,) = (h.answer for h in others if h.id == "H1")
    seeds = "seed that EMA loses" if both == 1 else "seeds that EMA loses"
    return (
        f"H1: the test that was registered counts the {both} {seeds} both cold and warmed up against the hypothesis: "
        f"{only_cold} to {only_warm + both}, p = {registered.p:.3g}. McNemar's test, as `claims/protocol.md` has it, "
        f"leaves such seeds out: {only_cold} to {only_warm}, p = {p:.3g}. With it, the answer would be "
        f"“{answer}”. The registered test counts.",
    )

"""BELAY against EMA on the ring, in the three ways of `score.effects` and by the same rules.

A run that failed counts as lost. The best rate of a seed is chosen by the validation loss of the other seeds, because
every batch of the ring is new and no training data are left to measure a loss on.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchbelay.lab.arms import BELAY, EMA, MATCHED
from torchbelay.lab.part import MISSING, Plate, Record
from torchbelay.lab.records import select
from torchbelay.lab.report.words import listed
from torchbelay.lab.score.analysis import StudyResults
from torchbelay.lab.score.comparison import Comparison
from torchbelay.lab.score.effects import (
    CHOICE,
    RATIOS,
    TITLE,
    WAYS,
    Effect,
    describe_better,
    describe_left_out,
    effects_table,
    loss_effect,
    spans,
)

from .statistics import RunTable

QUANTITY = "excess test loss"


def studies(records: Sequence[Record]) -> list[StudyResults]:
    """Return, for each spring, its runs with those of its EMA and of its matched EMA; failed runs are lost."""
    table = RunTable(select(records, "run"))
    found = []
    for spring, ema in zip(table.settings(BELAY), table.settings(EMA), strict=True):
        settings = {BELAY: spring, MATCHED: spring, EMA: ema}
        mine = [run for run in select(records, "run") if settings.get(run["arm"]) == run["setting"]]
        found.append(StudyResults([_as_score_run(run, spring) for run in mine], spring))
    return found


def _as_score_run(run: Record, study: str) -> Record:
    """Return a run in the form of the score models' runs, with the validation loss in place of the training loss."""
    losses = {"train": run["validation"], "test": run["test"]}
    return run | {"study": study, "final": {"w2": dict.fromkeys(losses) if run["failed"] else losses}}


def effects(records: Sequence[Record]) -> list[Effect]:
    """Return the effect of every spring on the excess test loss; the paper's spring for MNIST is the first."""
    found = (replace(loss_effect(study), quantity=QUANTITY) for study in studies(records))
    return [effect for effect in found if effect]


def names(found: Sequence[Effect]) -> dict[str, str]:
    """Return what the springs are called."""
    return {each.study: f"ring ({each.study})" for each in found}


def effects_plate(records: Sequence[Record]) -> Plate | None:
    """Return the table of effects; None if every run failed."""
    found = effects(records)
    if not found:
        return None
    (about,) = select(records, "protocol")
    caption = (
        f"BELAY's excess test loss over EMA's: at {WAYS[0]}, at {WAYS[1]} (the matched EMA) and at {WAYS[2]}. With "
        f"{found[0].study} it is {listed(spans(found[:1]))}."
    )
    bar = about["failed_above"] / about["linear"]
    notes = (
        f"{RATIOS}. {about['seeds']} seeds, {about['steps']:,} steps.",
        "The EMA of the first way and of the third is the spring with an infinitely heavy model. The matched EMA has "
        "BELAY's effective rate and memory.",
        CHOICE.replace("training loss", "validation loss"),
        f"A run is lost if its loss is above {bar:.2g} of the best linear denoiser's.",
        describe_left_out(found, names(found)),
        *_high_rate_notes(records),
        describe_better(found, names(found)),
    )
    return Plate("ring-effects", TITLE, caption, effects_table(found, names(found)), notes)


def high_rate_rows(records: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """Return what happens at the high rate, which the first two ways leave out if a run is lost there.

    A row has a spring, the seeds that BELAY, EMA and the matched EMA lose, BELAY ÷ EMA and BELAY ÷ matched EMA.
    """
    (about,) = select(records, "protocol")
    lr, rows = about["high_lr"], []
    for study in studies(records):
        lost = [f"{study.lost_count(arm, lr)}" for arm in (BELAY, study.ema, MATCHED)]
        nominal, effective = (_size(study.compare(BELAY, other, lr)) for other in (study.ema, MATCHED))
        rows.append((study.name, f"{listed(lost)} of {about['seeds']}", nominal, effective))
    return rows


def _size(found: Comparison) -> str:
    """Return a ratio with its interval and the number of its pairs."""
    return f"{found.size}, {found.seeds - found.unpaired} pairs" if found.ratio else found.size or MISSING


def explain_high_rate(records: Sequence[Record]) -> str:
    """Return why BELAY may look better than EMA at the high rate, as a sentence; empty without evidence of it."""
    (about,) = select(records, "protocol")
    lr, found = about["high_lr"], studies(records)
    if not all(each.lost_count(MATCHED, lr) < each.lost_count(each.ema, lr) for each in found):
        return ""
    if not all(each.compare(BELAY, MATCHED, lr).higher for each in found):
        return ""
    return (
        f"At {lr:g} the matched EMA, which has BELAY's effective rate, loses fewer seeds than EMA and has a lower loss "
        "than BELAY: what BELAY gains over EMA there is due to its lower rate, not to the pull."
    )


def _high_rate_notes(records: Sequence[Record]) -> list[str]:
    (about,) = select(records, "protocol")
    found = [
        f"At {about['high_lr']:g}, with {spring}, BELAY, EMA and the matched EMA lose {lost} seeds; BELAY ÷ EMA is "
        f"{nominal}, and BELAY ÷ matched EMA {effective}, over the seeds that neither loses."
        for spring, lost, nominal, effective in high_rate_rows(records)
    ]
    return [*found, *filter(None, [explain_high_rate(records)])]

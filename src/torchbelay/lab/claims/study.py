"""The study of the spring's sign with its controls: all hypotheses, judged together. study.md states the rules."""

from importlib.resources import files

from torchbelay.lab.gpt.analysis import Runs
from torchbelay.lab.gpt.analysis import hypotheses as of_language
from torchbelay.lab.hypotheses import FAMILY, Hypothesis, judge
from torchbelay.lab.score import penalty, warm_up

from .verdict import Records


def read_study() -> str:
    """Return the text of study.md."""
    return (files(__package__) / "study.md").read_text(encoding="utf-8")


def judge_study(records: Records) -> list[Hypothesis]:
    """Return all hypotheses with their answers, from whatever parts have records.

    >>> {str(each.answer) for each in judge_study({})}
    {'not run'}
    """
    found = [
        *warm_up.hypotheses(records.get("warmup", ())),
        *of_language(Runs(records.get("gpt", ()))),
        *penalty.hypotheses(records.get("penalty", ())),
    ]
    return judge(sorted(found, key=lambda each: FAMILY.index(each.id)))

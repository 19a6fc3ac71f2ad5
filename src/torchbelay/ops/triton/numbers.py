"""The numbers of every cohort as rows that the kernels read."""

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.ops.backend import Motion, Move
from torchbelay.physics.coupling import Coupling, Split
from torchbelay.physics.method import Law

from . import kernels
from .table import upload

LAWS = {"power": kernels.POWER, "relative": kernels.RELATIVE}
RESTING = [0.0, 0.0, 1.0, *[0.0] * 13]  # a row that moves nothing


def row(motion: Motion, form: str) -> list[float]:
    """A motion's numbers: "whole" with w1 from before the step at hand, else its part "before" or "after" the step."""
    c = motion.coupling
    if form == "whole":
        relax1, relax2 = _same(c.p, 1 - c.a), _same(c.q, c.b)
        meets = relax1 and relax2 and isclose(c.a + c.b, 1, rel_tol=1e-15) and c.a != 0 and not motion.swings
        inertias = [*(motion.swing1.inertia if motion.swing1 else (0.0,) * 4)]
        inertias += motion.swing2.inertia if motion.swing2 else (0.0,) * 4
        numbers = [c.a, c.b, c.p, c.q, *inertias, float(meets), float(relax1), float(relax2)]
        return [*numbers, float(motion.swings or not is_idle(c))]
    split = c.split()
    assert split is not None
    pull, follow = (0.0, split.before) if form == "before" else (split.pull, split.follow)
    meets = isclose(pull + follow, 1, rel_tol=1e-15) and pull != 0
    return [pull, follow, 1 - pull, follow, *[0.0] * 8, float(meets), 1.0, 1.0, float(pull != 0 or follow != 0)]


def is_idle(c: Coupling) -> bool:
    """Whether a coupling does nothing at all."""
    return c.a == 0 and c.b == 0 and c.p == 1 and c.q == 0


def splits(motions: Sequence[Motion]) -> list[Split] | None:
    """The motions as work around a step without a copy, or None where one of them needs the copy."""
    found = [None if motion.swings else motion.coupling.split() for motion in motions]
    return None if None in found else [split for split in found if split is not None]


class Numbers(NamedTuple):
    """Numbers of several cohorts on the device; a row of rest comes last, for tensors that an average leaves out."""

    rows: Tensor
    plans: Tensor
    laws: Tensor
    current: Tensor
    cohorts: int
    varies: bool  # a kernel must look which row it is the turn of
    rests: bool  # some row does nothing

    @staticmethod
    def of(moves: Sequence[Move], form: str, device: torch.device) -> "Numbers":
        """Write down what the moves say, for now or for ever."""
        rows: list[list[float]] = []
        plans: list[list[int]] = []
        laws: list[list[float]] = []
        for move in moves:
            found = [row(motion, form) for motion in move.motions]
            law = move.score.law if move.score and form != "before" else None  # laws follow the stepped weights
            plans.append([len(rows), len(found), move.lists.born, LAWS[law.kind].value if law else 0])
            laws.append(_terms(law))
            rows += found
        rests = any(r[-1] == 0 for r in rows) or any(law[-1] > 1 for law in laws)
        varies = any(plan[1] > 1 or plan[3] for plan in plans)
        plans.append([len(rows), 1, 0, 0])
        laws.append(_terms(None))
        rows.append(RESTING)
        table = upload(rows, torch.float32, device)
        current = torch.empty(len(plans), int(kernels.NUMBERS), device=device) if varies else table
        both = upload(plans, torch.int64, device), upload(laws, torch.float64, device)
        return Numbers(table, *both, current, len(plans), varies, rests)


def _terms(law: Law | None) -> list[float]:
    return [0.0, 0.0, 0.0, 0.0, 1.0] if law is None else [law.floor, law.scale, law.shift, law.exponent, law.every]


def _same(x: float, y: float) -> bool:
    return isclose(x, y, rel_tol=1e-14, abs_tol=1e-15)

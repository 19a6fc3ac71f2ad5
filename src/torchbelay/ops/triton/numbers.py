"""The numbers of every group as rows that the kernels read."""

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from torchbelay.ops.step import Motion, Move
from torchbelay.physics.method import Law

from . import layout
from .table import upload

LAWS = {"power": layout.POWER, "relative": layout.RELATIVE}
RESTING = [0.0, 0.0, 1.0, *[0.0] * 13]  # a row that moves nothing


def row(motion: Motion, form: str) -> list[float]:
    """Return a motion's numbers: "whole" if w1 from before the step is at hand, "stepped" if w1* alone is."""
    c = motion.coupling
    if form == "whole":
        relax1, relax2 = _same(c.p, 1 - c.a), _same(c.q, c.b)
        meets = motion.meets and motion.pulls
        inertias = [*(motion.swing1.inertia if motion.swing1 else (0.0,) * 4)]
        inertias += motion.swing2.inertia if motion.swing2 else (0.0,) * 4
        numbers = [c.a, c.b, c.p, c.q, *inertias, float(meets), float(relax1), float(relax2)]
        return [*numbers, float(not motion.rests)]
    pull, follow = c.a, c.q
    meets = isclose(pull + follow, 1, rel_tol=1e-15) and pull != 0
    return [pull, follow, 1 - pull, follow, *[0.0] * 8, float(meets), 1.0, 1.0, float(pull != 0 or follow != 0)]


class Numbers(NamedTuple):
    """Numbers of several groups on the device; a row of rest comes last, for tensors that an average leaves out."""

    rows: Tensor
    plans: Tensor
    laws: Tensor
    current: Tensor
    cohorts: int
    varies: bool  # the kernel `look` must choose the row of each step
    rests: bool  # some row does nothing

    @staticmethod
    def of(moves: Sequence[Move], form: str, device: torch.device) -> "Numbers":
        """Write the numbers of the moves down, for this step or for every step of their schedules."""
        rows: list[list[float]] = []
        plans: list[list[int]] = []
        laws: list[list[float]] = []
        for move in moves:
            found = [row(motion, form) for motion in move.motions]
            law = move.schedule.law if move.schedule else None
            plans.append([len(rows), len(found), move.group.born, LAWS[law.kind].value if law else 0])
            laws.append(_terms(law))
            rows += found
        rests = any(r[-1] == 0 for r in rows) or any(law[-1] > 1 for law in laws)
        varies = any(plan[1] > 1 or plan[3] for plan in plans)
        plans.append([len(rows), 1, 0, 0])
        laws.append(_terms(None))
        rows.append(RESTING)
        table = upload(rows, torch.float32, device)
        current = torch.empty(len(plans), int(layout.NUMBERS), dtype=torch.float32, device=device) if varies else table
        both = upload(plans, torch.int64, device), upload(laws, torch.float64, device)
        return Numbers(table, *both, current, len(plans), varies, rests)


def _terms(law: Law | None) -> list[float]:
    return [0.0, 0.0, 0.0, 0.0, 1.0] if law is None else [law.floor, law.scale, law.shift, law.exponent, law.every]


def _same(x: float, y: float) -> bool:
    return isclose(x, y, rel_tol=1e-14, abs_tol=1e-15)

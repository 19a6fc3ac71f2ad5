"""The couplings of averages whose method does not tell them: those that depend on learning rates, or are the user's.

They are noted while the run goes on, equal ones in a row once: (how many steps, a, b, p, q).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchbelay.belay import Belay
from torchbelay.belay.average import Average
from torchbelay.belay.cohort import Cohort
from torchbelay.belay.plan import Work

from .folder import Folder
from .profiles import couplings
from .session import Session
from .stories import untold

Run = tuple[int, float, float, float, float]
Numbers = tuple[float, float, float, float]

_REST: Numbers = (0.0, 0.0, 1.0, 0.0)


class History:
    """Notes the couplings that no text tells, since the last `cut`."""

    def __init__(self, averages: Sequence[Average], step: int) -> None:
        self._averages = averages
        self._cohorts: list[list[Cohort]] = []  # as they were when `_tables` was made
        self._tables: dict[str, Cohort] = {}
        self.restart(step)

    @property
    def low(self) -> int:
        """The step of the last cut."""
        return self._low

    def restart(self, step: int) -> None:
        """Begin after this step."""
        self._low = self._seen = step
        self._first = True  # no cut since
        self._runs: dict[str, list[Run]] = {}

    def _current(self) -> dict[str, Cohort]:
        """Return the tables that are needed now."""
        now = [average.cohorts for average in self._averages]
        if len(now) != len(self._cohorts) or any(a is not b for a, b in zip(now, self._cohorts, strict=True)):
            self._cohorts = now
            self._tables = {name: cohort for average in self._averages for name, cohort in untold(average).items()}
        return self._tables

    def observe(self, work: Work, belay: Belay) -> None:
        """Note the couplings of a step that has been taken; nothing if texts tell all of them."""
        tables = self._current()
        asked = {name: cohort for name, cohort in tables.items() if cohort.varies not in ("never", "step")}
        if not asked:
            return
        step = belay.step  # known to the host: such methods are asked by it at every step
        if step == self._seen + 1:
            moves = {id(move.group): move.motion for move in work.moves}
            for name, cohort in asked.items():
                if cohort.born < step:
                    motion = moves.get(id(cohort))
                    note(self._runs.setdefault(name, []), _REST if motion is None else motion.numbers)
        self._seen = step

    def cut(self, step: int) -> dict[tuple[int, int], dict[str, Tensor]]:
        """Return the couplings of the steps since the last cut, by the steps before and up to them; begin again.

        What can be computed is told from its beginning at the first cut: the folder may be a new one.
        """
        computed: dict[str, Tensor] = {}
        observed: dict[str, Tensor] = {}
        low = 0 if self._first else self._low
        for name, cohort in self._current().items():
            if cohort.varies in ("never", "step") and cohort.born < step:
                runs: list[Run] = []
                rows = couplings(cohort.method, step - cohort.born, every=cohort.every)[max(low - cohort.born, 0) :]
                for row in rows.tolist():
                    note(runs, (row[0], row[1], row[2], row[3]))
                computed[name] = torch.tensor(runs, dtype=torch.float64)
            elif name in self._runs:
                observed[name] = torch.tensor(self._runs[name], dtype=torch.float64)
        found = {(low, step): computed}
        found[self._low, step] = found.get((self._low, step), {}) | observed
        self._low, self._first, self._runs = step, False, {}
        return {(low, high): tables for (low, high), tables in found.items() if tables and high > low}

    def missing(self, folder: Folder, sessions: tuple[Session, ...]) -> list[str]:
        """Return the tables whose first steps neither these sessions in the folder nor this process know."""
        found = []
        for name, cohort in self._current().items():
            asked = cohort.varies not in ("never", "step")
            early = asked and cohort.born < self._low
            if early and folder.couplings(name, cohort.born, self._low, sessions) is None:
                found.append(name)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what was noted since the last cut."""
        return {"low": self._low, "runs": {name: [list(run) for run in runs] for name, runs in self._runs.items()}}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from a state that was saved after this step."""
        try:
            low = int(state["low"])
            found: dict[str, list[Run]] = {}
            for name, runs in state["runs"].items():
                found[str(name)] = [(int(n), float(a), float(b), float(p), float(q)) for n, a, b, p, q in runs]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is not what Recorder.state_dict() returned: {problem!r}") from problem
        if low > step:
            raise ValueError(f"this state of a Recorder was saved after step {low}, and the Belay is at step {step}")
        self._low, self._seen = low, step
        self._runs = found


def note(runs: list[Run], row: Numbers) -> None:
    """Add the coupling of a step.

    >>> runs = []
    >>> for b in (0.5, 0.5, 0.25):
    ...     note(runs, (0.0, b, 1.0, b))
    >>> runs
    [(2, 0.0, 0.5, 1.0, 0.5), (1, 0.0, 0.25, 1.0, 0.25)]
    """
    if runs and runs[-1][1:] == row:
        runs[-1] = (runs[-1][0] + 1, *row)
    else:
        runs.append((1, *row))

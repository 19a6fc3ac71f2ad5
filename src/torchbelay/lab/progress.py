"""The progress of parts: bars on a terminal, and elsewhere, as in a file of nohup, a line per part and quarter."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .report.words import duration


class PartsProgress:
    """Shows how much of each part is done; `plans` has a part's units of work, and a line on what it runs."""

    def __init__(self, console: Console, plans: Mapping[str, tuple[int, str]]) -> None:
        self._console, self._plans, self._begin = console, plans, time.monotonic()
        self._done = dict.fromkeys(plans, 0)
        columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._tasks = {name: self._bars.add_task(name, total=units) for name, (units, _) in plans.items()}

    def __enter__(self) -> Self:
        self._bars.start()
        for name, (_, text) in self._plans.items():
            self._say(f"{name}: {text}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def advance(self, name: str, units: int) -> None:
        """Count some units of a part."""
        self._bars.advance(self._tasks[name], units)
        total, before = max(1, self._plans[name][0]), self._done[name]
        self._done[name] = after = min(total, before + units)
        if 4 * after // total > 4 * before // total:
            self._say(f"{name}: {after / total:.0%} after {duration(time.monotonic() - self._begin)}")

    def finish(self, name: str) -> None:
        """Count what is left of a part."""
        self.advance(name, self._plans[name][0] - self._done[name])

    def stop(self, name: str) -> None:
        """Stop the bar of a part that failed."""
        self._bars.stop_task(self._tasks[name])

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

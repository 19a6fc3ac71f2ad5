"""A progress bar on stderr, in plain text; a line per quarter if stderr is not a terminal."""

import shutil
import sys
import time
from types import TracebackType
from typing import Self


class Bar:
    """A bar that `bar(done, total)` moves, with bytes as its unit. It clears its line at the end."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.began = time.monotonic()
        self.quarters = 0
        self.drawn = False

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done."""
        share = done / total if total else 1.0
        if sys.stderr.isatty():
            self._draw(share, done)
        elif int(4 * share) > self.quarters:
            self.quarters = int(4 * share)
            sys.stderr.write(f"{self.label}: {share:.0%}\n")

    def _draw(self, share: float, done: int) -> None:
        elapsed = time.monotonic() - self.began
        left = f"{elapsed * (1 - share) / share:.0f} s left" if share > 0 else ""
        numbers = f" {share:4.0%}  {done / 1e6 / max(elapsed, 1e-3):,.0f} MB/s  {left}"
        room = shutil.get_terminal_size().columns - len(self.label) - len(numbers) - 4
        bar = "" if room < 5 else f" [{'#' * round(share * min(room, 40)):<{min(room, 40)}}]"
        sys.stderr.write(f"\r\x1b[K{self.label}{bar}{numbers}")
        sys.stderr.flush()
        self.drawn = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

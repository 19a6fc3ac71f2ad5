"""The command in this process: `run("explain --decay 0.9")` returns status, stdout and stderr."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from torchbelay.cli import main


class Printed(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def table(self) -> dict[str, str]:
        """The lines below the paragraph, with wrapped values joined."""
        _, lines = self.out.split("\n\n")
        lines = re.sub(r"\n {3,}", " ", lines)  # the label "  plain SGD" has two
        return {k.strip(): v for k, v in (re.split(r"(?<=\S) {2,}", line) for line in lines.splitlines())}

    @property
    def json(self) -> dict[str, Any]:
        """The object, read by a parser that refuses Infinity and NaN."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    def mistake(self, verb: str, *, own_words: str = "") -> str:
        """The one line that a mistake gets, with status 2 and an empty stdout.

        `own_words` is a pattern of what the user's own code prints before it.
        """
        assert (self.status, self.out) == (2, "")
        line = re.fullmatch(rf"{own_words}torchbelay {verb}: ([^\n]+)\n", self.err)
        assert line, self.err
        return line[1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str | list[str]], Printed]:
    """Run `torchbelay ARGUMENTS`, given as one line of text or as a list."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(line: str | list[str]) -> Printed:
        status = main(line.split() if isinstance(line, str) else line)
        return Printed(status, *capsys.readouterr())

    return run

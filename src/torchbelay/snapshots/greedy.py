"""Greedy soup: add checkpoints to a mean, the best first, and keep those that do not make it worse.

Wortsman et al. 2022, "Model soups", arXiv 2203.05482, Recipe 1.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchbelay.belay.files import destination

from .merger import Merge, Merged, merge

Members = tuple[str, ...]

_BEGINNING = b'{"members": ['  # of every line of a log


@dataclass(frozen=True)
class Soup:
    """What a greedy soup found: its members in the order given, its score, and every score by the members of a mean."""

    members: Members
    score: float
    scores: dict[Members, float]
    merged: Merged


def greedy(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    evaluate: Callable[[Path], float],
    *,
    lower: bool = False,
    log: str | os.PathLike[str] | None = None,
    key: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
) -> Soup:
    """Write the even mean of the checkpoints that do not make it worse, tried from the best to the worst.

    `evaluate(path)` loads a checkpoint of the layout of the inputs and returns its score. Higher is better, unless
    `lower`; NaN is worst. Every score is appended to the file `log`, and a call with the same file goes on there. `say`
    gets a line per score. The other arguments are those of `merge`.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> for number in (1.0, 2.0, 9.0):
    ...     torch.save({"w": torch.tensor([number])}, f"{folder}/{number:g}.pt")
    >>> distance = lambda path: abs(torch.load(path)["w"].item() - 1.4)
    >>> soup = greedy([f"{folder}/{number}.pt" for number in (1, 2, 9)], f"{folder}/soup.pt", distance, lower=True)
    >>> [Path(member).name for member in soup.members], torch.load(f"{folder}/soup.pt")["w"].item()
    (['1.pt', '2.pt'], 1.5)
    """
    names = [os.fspath(path) for path in paths]
    if len({*map(os.path.realpath, names)}) < len(names):
        raise ValueError("paths: a checkpoint is given twice; give each of them once")
    with Merge(names, key=key) as whole:  # refuse what cannot be merged, before the first evaluation
        whole.check(out, overwrite=overwrite)
    if log is not None and os.path.realpath(log) == os.path.realpath(out):
        raise ValueError(f"log={os.fspath(log)!r} is also where the soup goes; give another file")
    scores = _Scores(log)

    def score(members: Members) -> float:
        if members not in scores.known:
            scores.add(members, _evaluate(members, Path(out), evaluate, key))
        value = scores.known[members]
        if say is not None:
            say(f"{value:<12.6g} {', '.join(map(os.path.basename, members))}")
        if math.isnan(value):
            return -math.inf
        return -value if lower else value

    alone = {name: score((name,)) for name in names}
    first, *others = sorted(names, key=lambda name: -alone[name])
    if alone[first] == -math.inf:
        raise ValueError("evaluate returned no finite score for any checkpoint; it must return a number to compare")
    members: Members = (first,)
    best = alone[first]
    for other in others:
        trial = tuple(name for name in names if name in (*members, other))
        if (value := score(trial)) >= best:
            members, best = trial, value
    merged = merge(members, out, key=key, overwrite=overwrite)
    return Soup(members, scores.known[members], scores.known, merged)


def _evaluate(members: Members, out: Path, evaluate: Callable[[Path], float], key: str | None) -> float:
    """Return the score of a checkpoint, or of a mean that exists for the length of the evaluation only."""
    if len(members) == 1:
        return float(evaluate(Path(members[0])))
    parent = Path(os.path.realpath(out)).parent
    with tempfile.TemporaryDirectory(prefix=".greedy.", dir=parent) as folder, Merge(members, key=key) as mean:
        trial = Path(folder, out.name)
        mean.write(trial)
        return float(evaluate(trial))


class _Scores:
    """Scores by members, kept in a file with one JSON object per line."""

    def __init__(self, log: str | os.PathLike[str] | None) -> None:
        self.log = None if log is None else Path(log)
        self.known: dict[Members, float] = {}
        if self.log is None:
            return
        if destination(self.log, argument="log").exists():
            self._read(self.log)
        with open(self.log, "ab"):  # refuse what cannot be written, before the first evaluation
            pass

    def _read(self, log: Path) -> None:
        """Take over the scores of a log; cut off half a line, which a killed process may have left."""
        content = log.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        half = content[len(complete) :]
        lines = complete.decode(errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.known[tuple(record["members"])] = float(record["score"])
            except (ValueError, KeyError, TypeError) as problem:
                raise ValueError(f"log={str(log)!r} has no score in line {number}; give the log of a soup") from problem
        if not _BEGINNING.startswith(half[: len(_BEGINNING)]):  # another file, of which nothing must be lost
            raise ValueError(f"log={str(log)!r} has no score in line {len(lines) + 1}; give the log of a soup")
        if half:
            os.truncate(log, len(complete))  # never a moment without the scores, each of which took an evaluation

    def add(self, members: Members, score: float) -> None:
        """Remember a score, on the disk too."""
        self.known[members] = score
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"members": members, "score": score}) + "\n")
                file.flush()
                os.fsync(file.fileno())

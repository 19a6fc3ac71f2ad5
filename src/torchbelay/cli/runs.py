"""The runs of `torchbelay recommend --from-run`: their reports, and the options beside them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbelay.physics.run_fit import RunFit, fit_run

from .run_options import RunOptions, read_options

_NO_BETA1 = "β1 is taken as 0, because there is no options.json beside the run; for Adam give --beta1, most often 0.9."


@dataclass(frozen=True)
class Runs:
    """What some runs say."""

    fits: list[RunFit]
    beta1: float | None  # of their optimizer, if it is known
    read: str | None  # what was read from their options
    caveats: list[str]


def read_runs(paths: Sequence[Path], decays: Sequence[float] | None, beta1: float | None) -> Runs:
    """Return the quadratics behind the runs; the decays and β1 that are not given are those of their options."""
    if decays is not None and len(decays) not in (1, len(paths)):
        runs = "1 run" if len(paths) == 1 else f"{len(paths)} runs"
        raise ValueError(f"--decay has {len(decays)} values for {runs}; give one, or one per run")
    given = [None] * len(paths) if decays is None else [*decays] * (len(paths) // len(decays))
    options = [_options(path, decay, beta1) for path, decay in zip(paths, given, strict=True)]
    if beta1 is None:
        found = sorted({each.beta1 for each in options if each is not None})
        if len(found) > 1:
            raise ValueError(f"the runs have β1 of {found[0]:g} to {found[-1]:g}; give runs with one β1")
        beta = found[0] if found else None
    else:
        beta = beta1
    fits, said, caveats = [], [], [_NO_BETA1] if beta is None else []
    if beta1 is None and beta is not None and None in options:
        caveats.append(f"β1 = {beta:g} is taken for all runs, and some have no options.json beside them.")
    for path, decay, each in zip(paths, given, options, strict=True):
        read = []
        if each is not None and decay is None:
            decay = each.decay
            read.append(f"decay = {decay:.6g}")
        if each is not None and beta1 is None:
            read.append(f"β1 = {each.beta1:g}")
        if each is not None and read:
            said.append(f"From {each.path}: {', '.join(read)}.")
        if each is not None and each.pulls is not None:
            which = "The run" if len(paths) == 1 else f"The run of {path}"
            caveats.append(f"{which} had {each.pulls}, which pulls the weights; the fit takes it for an EMA.")
        reports = read_reports(path)
        try:
            fits.append(fit_run(reports, decay=decay, beta1=beta or 0.0))
        except (ValueError, TypeError, ArithmeticError) as error:
            if len(paths) == 1:
                raise
            raise ValueError(f"{path}: {error}") from error
    return Runs(fits, beta, " ".join(said) or None, caveats)


def _options(path: Path, decay: float | None, beta1: float | None) -> RunOptions | None:
    try:
        return read_options(path)
    except ValueError:
        if decay is None or beta1 is None:
            raise
        return None  # a file of another program, of which nothing is needed


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of reports."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; give one JSON object per line") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    found = []
    for count, line in enumerate(text.split("\n"), 1):  # splitlines() would also split at characters inside of texts
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON in line {count}: {error}; give one object per line") from error
        if not isinstance(value, dict):
            raise ValueError(f"{path} has no object in line {count}; give one object per line")
        found.append(value)
    return found

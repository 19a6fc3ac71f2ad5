"""The command `torchbelay`, one file per verb. It reads arguments and prints; formulas and experiments live elsewhere.

A verb is a module with `add(commands)`, which declares its arguments, and `run(args)`, which returns the exit status. A
mistake in the arguments ends in one line on stderr and exit status 2. `explain`, `explore` and `recommend` need the
library alone, without torch, and `plan`, `identify`, `synthesize`, `merge` and `recommend --probe` need torch too; the
other verbs need the extra `lab`.
"""

import io
import os
import sys

from torchbelay._version import __version__

from . import explain, explore, fid, identify, merge, plan, recommend, reproduce, sample, synthesize, train
from .parser import Parser

__all__ = ["main"]

_VERBS = (
    explain,
    explore,
    recommend,
    plan,
    identify,
    synthesize,
    merge,
    reproduce,
    train,
    sample,
    fid,
)  # as `torchbelay --help`


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (by default that of the process) and return the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without α must not end the command
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for instance, is done; leave nothing for the interpreter to flush
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE, as shells report it
    return status


def _run(argv: list[str] | None) -> int:
    parser = Parser(
        "torchbelay",
        description="Weight averaging as two masses on a damped spring.",
        epilog="example: torchbelay explain --k 1 --m1 2000 --m2 500     (torchbelay COMMAND --help has more)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for verb in _VERBS:
        verb.add(commands)
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # reported here, because argparse would not name the verb
            getattr(args, "parser", parser).error(f"unknown argument: {' '.join(unknown)}")
        if not hasattr(args, "run"):
            parser.print_help(sys.stderr)
            return 2
        return int(args.run(args))
    except SystemExit as end:  # argparse ends this way
        return int(end.code or 0)

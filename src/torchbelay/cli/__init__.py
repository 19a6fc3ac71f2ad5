"""The command `torchbelay`, one file per verb. It reads arguments and prints; formulas and experiments live elsewhere.

A verb is a module with `add(commands)`, which declares its arguments, and `run(args)`, which returns the exit status. A
mistake in the arguments ends in one line on stderr and exit status 2. `explain`, `explore` and `recommend` need the
library alone, without torch, and `plan`, `identify`, `synthesize`, `merge` and `recommend --probe` need torch too; the
other verbs need the extra `lab`.
"""

import errno
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


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # what writing to a file or a terminal may end with


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (by default that of the process) and return the exit status."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without α must not end the command
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for instance, is done
        _discard_stdout()
        return 141  # 128 + SIGPIPE, as shells report it
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        sys.stderr.write(f"torchbelay: cannot write the output: {error.strerror}; make room, or send it elsewhere\n")
        _discard_stdout()
        return 2
    except KeyboardInterrupt:  # verbs that leave something behind say what
        sys.stderr.write("torchbelay: stopped\n")
        return 130  # 128 + SIGINT, as shells report it
    return status


def _open_streams() -> None:
    """Give the process the streams that it was started without (`>&-`); Python has None in their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _discard_stdout() -> None:
    """Leave nothing for the interpreter to flush, which would fail once more."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(argv: list[str] | None) -> int:
    parser = Parser(
        "torchbelay",
        description="Explain, recommend and check averages of a model's weights, merge checkpoints, and repeat the "
        "experiments of the paper on BELAY.",
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

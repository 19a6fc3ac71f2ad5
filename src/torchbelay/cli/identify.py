"""`torchbelay identify`: what somebody's averaging code really does, as a paragraph or as JSON."""

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchbelay.physics import arguments

from .loading import LoadError, load_function
from .parser import add_verb, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay identify train:averaging                 averaging(model) in train.py returns (update, read)
  torchbelay identify train:averaging --every 10      if its average is meant to move at every tenth update()
  torchbelay identify train:averaging --steps 1000    looks at a longer warm-up
  torchbelay identify train:averaging --json

update() is called after every change of the model's weights. read() returns the average: a state dict or another
mapping name -> tensor, a module, or tensors in the order of model.parameters(). The module is looked for in the current
folder first.

exit status: 0 if nothing looks wrong, 1 if something does, 2 if the arguments are wrong, 3 if the code cannot be
identified because it raises or is no linear map
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay identify`."""
    parser = add_verb(
        commands,
        "identify",
        run=run,
        summary="say what somebody's averaging code really does, and what looks wrong",
        description="Find out by impulses on a toy model what averaging code does, its own or a library's.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("factory", metavar="MODULE:FACTORY", help="a function that takes a model and returns (update, read)")
    option("--steps", type=_updates, default=256, metavar="N", help="updates to look at, at least 4 (default: 256)")
    option("--every", type=steps, default=1, metavar="N", help="the average is to move at every N-th update()")
    option("--json", action="store_true", help="one JSON object with every digit")


def _updates(text: str) -> int:
    """Read a number of updates; `identify` refuses one that is too large."""
    try:
        return arguments.whole("--steps", steps(text), low=4)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 4") from None


def run(args: argparse.Namespace) -> int:
    """Print a paragraph, and a line for each problem; or one JSON object."""
    from torchbelay.testing import identify

    try:
        with redirect_stdout(sys.stderr):  # what the code prints must not get into the JSON
            found = identify(_load(args.factory), steps=args.steps, every=args.every)
    except (LoadError, ValueError, TypeError) as error:
        args.parser.error(str(error))
    found = replace(found, problems=tuple(map(_with_flags, found.problems)))
    if args.json:
        print(json.dumps(asdict(found), indent=2, allow_nan=False))
    else:
        print(textwrap.fill(str(found), max(40, shutil.get_terminal_size().columns)))
    if found.reason is not None:
        return 3
    return 1 if found.problems else 0


def _with_flags(problem: str) -> str:
    """Return a problem with the names that the command has for the arguments of `identify`.

    >>> _with_flags("If that is meant, say so by every=10."), _with_flags("look at more of them by steps=.")
    ('If that is meant, say so by --every 10.', 'look at more of them by --steps.')
    """
    flag = re.compile(r"\b(by|as) (steps|every)=(\d*)")
    return flag.sub(lambda m: f"{m[1]} --{m[2]} {m[3]}".rstrip(), problem)


def _load(target: str) -> Callable[..., Any]:
    """Return the function that MODULE:FACTORY names."""
    name, colon, attribute = target.partition(":")
    if name.endswith(".py"):
        raise LoadError(
            f"{target!r} names a file; give the module: {Path(name).stem}:{attribute or 'FACTORY'}, from its folder"
        )
    if not (name and colon and attribute):
        raise LoadError(f"{target!r} is not MODULE:FACTORY; give a module and a function in it, as train:averaging")
    return load_function(target, "takes a model and returns (update, read)")

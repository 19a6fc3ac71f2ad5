"""The parts that the verbs of `torchbelay` share: the parser, the types of arguments, and errors as one line."""

import argparse
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

LARGEST_COUNT = 10**18  # of weights or tensors
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LARGEST_SEED = 2**32 - 1  # experiments derive several seeds from this one, and torch takes 64 bits


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a single line, and for which -1e-3 and -1,2 are values."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # As Python has it from 3.14 on. Before, -1 and -0.5 are values, but -1e-3 and -1,2 are taken for options.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        """Print the message as one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def add_verb(
    commands: "Commands",
    name: str,
    *,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    examples: str,
) -> Parser:
    """Add a verb to the command and return its parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_image_arguments(parser: Parser) -> None:
    """Declare the arguments that `sample` and `fid` share."""
    add = parser.add_argument
    add("path", type=Path, metavar="RUN", help="the folder of a run of torchbelay train")
    add("--weights", choices=("w1", "w2"), default="w2", help="the model's weights, w1, or their average (default)")
    add("--seed", type=seed, default=0, metavar="N", help="seed of the images (default: 0)")
    add("--device", metavar="D", help="cuda, cuda:1 or cpu (default: a GPU, if there is one)")


def number(text: str) -> float:
    """Read a number, `inf` included; the spring itself refuses `inf` if it must."""
    return float(text)


def steps(text: str) -> int:
    """Read a whole number of at least 1; 1e6 is allowed."""
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not (count.is_integer() and count >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(count)


def many(text: str) -> int:
    """Read a large whole number, which may end in K, M, B or T.

    >>> many("7B"), many("1.5e9"), many("350M")
    (7000000000, 1500000000, 350000000)
    """
    digits, factor = text, 1
    if text[-1:].upper() in _SUFFIXES:
        digits, factor = text[:-1], _SUFFIXES[text[-1].upper()]
    try:
        count = Decimal(digits) * factor
    except ArithmeticError:
        count = Decimal(0)
    if not (count.is_finite() and 1 <= count <= LARGEST_COUNT and count == count.to_integral_value()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 1 to {LARGEST_COUNT:.0e}; write 7B, 7e9 or 7000000000 (K, M, B and T "
            "are 1e3, 1e6, 1e9 and 1e12)"
        )
    return int(count)


def seed(text: str) -> int:
    """Read a seed."""
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {LARGEST_SEED}")
    return int(text)


def minutes(text: str) -> float:
    """Read a time in minutes, 0 included."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes; give 0 or more")
    return value


def run_lab(args: argparse.Namespace, load: Callable[[], Callable[[], int]], interrupted: str) -> int:
    """Call `load`, which imports the lab and returns the work, then do the work; report errors of both as one line."""
    parser: Parser = args.parser
    try:
        try:
            from torchbelay.lab.part import LabError

            work = load()
        except ModuleNotFoundError as missing:
            parser.error(f"this needs {missing.name}: pip install '.[lab]' in a clone of torchbelay")
        try:
            return work()
        except LabError as error:
            sys.stderr.write(f"{parser.prog}: {error}\n")
            return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: {interrupted}\n")
        return 130  # 128 + SIGINT, as shells report it

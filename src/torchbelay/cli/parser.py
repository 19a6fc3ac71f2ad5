"""What the subcommands of `torchbelay` share: how arguments are read, and how it is said what is wrong."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is a single line."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def number(text: str) -> float:
    """Read a number, `inf` included; the spring itself says where it accepts that."""
    return float(text)


def steps(text: str) -> int:
    """Read a number of steps; 1e6 is one."""
    count = float(text)
    if not (count.is_integer() and count >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(count)


LARGEST_SEED = 2**32 - 1  # parts make several seeds of it, which torch wants to be of 64 bits


def seed(text: str) -> int:
    """Read a seed."""
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {LARGEST_SEED}")
    return int(text)


def in_lab(args: argparse.Namespace, load: Callable[[], Callable[[], int]], interrupted: str) -> int:
    """Do the work that `load` imports and returns; what goes wrong in the laboratory is one line."""
    parser: Parser = args.parser
    try:
        try:
            from torchbelay.lab.part import LabError

            work = load()
        except ModuleNotFoundError as missing:
            parser.error(f"this needs {missing.name}: pip install 'torchbelay[lab]'")
        try:
            return work()
        except LabError as error:
            sys.stderr.write(f"{parser.prog}: {error}\n")
            return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: {interrupted}\n")
        return 130  # 128 + SIGINT, as shells report it

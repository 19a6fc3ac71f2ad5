"""`torchbelay sample`: make images with the weights of a run."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_image_arguments, add_verb, run_lab, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay sample runs/mnist-edm-belay-seed0
  torchbelay sample runs/mnist-edm-belay-seed0 --weights w1 --count 100 --out w1.png
  torchbelay sample runs/mnist-edm-belay-seed0 --count 50000 --out many.npz
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay sample`."""
    parser = add_verb(
        commands,
        "sample",
        run=run,
        summary="make images with the weights of a run",
        description="Make images with the weights of a run.",
        examples=_EXAMPLES,
    )
    add_image_arguments(parser)
    parser.add_argument("--count", type=steps, default=64, metavar="N", help="number of images (default: 64)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".png, or .npz for the bytes (default: a PNG in RUN)")


def run(args: argparse.Namespace) -> int:
    """Make images and write them to a file."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.score.training import commands

        chosen = {"count": args.count, "weights": args.weights, "seed": args.seed, "device": args.device}
        return lambda: commands.sample(args.path, out=args.out, **chosen)

    return run_lab(args, load, "stopped; nothing was written")

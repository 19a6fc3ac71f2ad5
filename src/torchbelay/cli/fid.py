"""`torchbelay fid`: measure how far images of a run are from the training images."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_image_arguments, add_verb, run_lab, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay fid runs/mnist-edm-belay-seed0
  torchbelay fid runs/mnist-edm-belay-seed0 --samples 50000 --weights w1

Fewer samples give a larger distance: compare only equal numbers of samples. Needs pip install '.[fid]' in a
clone of torchbelay.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay fid`."""
    parser = add_verb(
        commands,
        "fid",
        run=run,
        summary="measure how far images of a run are from the training images",
        description="Measure how far images of a run are from the training images.",
        examples=_EXAMPLES,
    )
    add_image_arguments(parser)
    option = parser.add_argument
    option("--samples", type=steps, default=10_000, metavar="N", help="number of images (default: 10000)")
    option("--inception", type=Path, metavar="PATH", help="torch-fidelity's weights (default: a download)")
    option("--data", type=Path, metavar="PATH", help="a copy of the data set")


def run(args: argparse.Namespace) -> int:
    """Print the Fréchet distance of a run's images."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.score.training import commands

        chosen = {"samples": args.samples, "weights": args.weights, "seed": args.seed, "device": args.device}
        return lambda: commands.fid(args.path, inception=args.inception, dataset=args.data, **chosen)

    return run_lab(args, load, "stopped; nothing was written")

"""`torchbelay train`, `sample` and `fid`: score models, trained as the paper did, and what they make."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from .parser import Parser, in_lab, number, seed, steps

_TRAIN_EXAMPLES = """\
examples:
  torchbelay train --list                              the presets, and what the paper has of each
  torchbelay train mnist-edm-belay --budget 10m        what can be learned in ten minutes here
  torchbelay train cifar10-small-ema --budget 2Mimg    by two million images; masses and schedule are scaled to it
  torchbelay train table1-belay --lr 1e-3 --out runs/trial --dry-run
  torchrun --nproc-per-node 8 -m torchbelay.cli train cifar10-belay

Ctrl-C stops after the step and keeps it; the same command goes on there, bit for bit. RUN has options.json,
stats.jsonl (a line a report), checkpoint.pt and, at the end, samples.png. A loss or weights that are no numbers stop
the run, whose checkpoint stays the last one before them, unless --keep-going is given.
"""

_SAMPLE_EXAMPLES = """\
examples:
  torchbelay sample runs/mnist-edm-belay-seed0
  torchbelay sample runs/mnist-edm-belay-seed0 --weights w1 --count 100 --out w1.png
  torchbelay sample runs/mnist-edm-belay-seed0 --count 50000 --out many.npz
"""

_FID_EXAMPLES = """\
examples:
  torchbelay fid runs/mnist-edm-belay-seed0
  torchbelay fid runs/mnist-edm-belay-seed0 --samples 50000 --weights w1

The fewer the samples, the larger the distance: compare only equal numbers of them. Needs torchbelay[fid].
"""


def _minutes(text: str) -> float:
    """Read a time between two checkpoints; 0 is one after every step."""
    minutes = float(text)
    if not 0 <= minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes; give 0 or more")
    return minutes


def _add_train(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a score model by a preset named after the paper's tables",
        description="Train a score model with BELAY or EMA, as the paper did or for as long as there is time.",
        epilog=_TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("preset", nargs="?", metavar="PRESET", help="what to train; --list shows the names")
    add("--list", action="store_true", help="show the presets, and train nothing")
    add("--out", type=Path, metavar="RUN", help="the run's folder (default: runs/PRESET-seedN)")
    add("--data", type=Path, metavar="PATH", help="a copy of the data set (default: TORCHBELAY_DATA, or a download)")
    add("--seed", type=seed, default=0, metavar="N", help="of weights, batches and noise (default: 0)")
    add("--budget", metavar="B", help="how long: 90s, 10m, 1.5h; or 500kimg, 2Mimg images (default: the preset's)")
    add("--lr", type=number, help="another learning rate than the preset's")
    add("--every", type=steps, metavar="N", help="steps between two reports (default: 50 reports)")
    add("--checkpoint", type=_minutes, default=5.0, metavar="MIN", help="minutes between two checkpoints (default: 5)")
    add("--device", metavar="D", help="cuda, cuda:1 or cpu (default: a GPU, if there is one)")
    add("--compile", action="store_true", help="compile the network, too")
    add("--keep-going", action="store_true", help="go on even if loss or weights are no numbers any more")
    add("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.set_defaults(run=train, parser=parser)


def train(args: argparse.Namespace) -> int:
    """`torchbelay train`: a run, or the rest of it."""
    if args.preset is None and not args.list:
        args.parser.error("PRESET is missing; --list shows the names")

    def load() -> Callable[[], int]:
        from torchbelay.lab.score.training import commands
        from torchbelay.lab.score.training.budget import Budget
        from torchbelay.lab.score.training.presets import find
        from torchbelay.lab.score.training.request import TrainingRequest

        if args.list:
            return commands.show_presets

        def work() -> int:
            request = TrainingRequest(
                find(args.preset),
                args.out or Path("runs", f"{args.preset}-seed{args.seed}"),
                data=args.data,
                seed=args.seed,
                budget=None if args.budget is None else Budget.parse(args.budget),
                lr=args.lr,
                every=args.every,
                compile=args.compile,
                device=args.device,
                keep_going=args.keep_going,
                checkpoint_s=60 * args.checkpoint,
            )
            return commands.train(request, dry_run=args.dry_run)

        return work

    return in_lab(args, load, "ended at once; the last checkpoint is kept, and the same command goes on from it")


def _add_images(commands: "argparse._SubParsersAction[Parser]", name: str, examples: str, about: str) -> Parser:
    """What `sample` and `fid` have in common."""
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="the folder of a run of torchbelay train")
    parser.add_argument("--weights", choices=("w1", "w2"), default="w2", help="the model's, or their average (default)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the images (default: 0)")
    parser.add_argument("--device", metavar="D", help="cuda, cuda:1 or cpu (default: a GPU, if there is one)")
    return parser


def _add_sample(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_images(commands, "sample", _SAMPLE_EXAMPLES, "make images with the weights of a run")
    parser.add_argument("--count", type=steps, default=64, metavar="N", help="how many (default: 64)")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".png, or .npz for the bytes (default: a PNG in RUN)")
    parser.set_defaults(run=sample, parser=parser)


def sample(args: argparse.Namespace) -> int:
    """`torchbelay sample`: images."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.score.training import commands

        chosen = {"count": args.count, "weights": args.weights, "seed": args.seed, "device": args.device}
        return lambda: commands.sample(args.path, out=args.out, **chosen)

    return in_lab(args, load, "stopped; nothing was written")


def _add_fid(commands: "argparse._SubParsersAction[Parser]") -> None:
    parser = _add_images(commands, "fid", _FID_EXAMPLES, "measure how far images of a run are from the training images")
    parser.add_argument("--samples", type=steps, default=10_000, metavar="N", help="how many images (default: 10000)")
    parser.add_argument("--inception", type=Path, metavar="PATH", help="torch-fidelity's weights (default: a download)")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a copy of the data set")
    parser.set_defaults(run=fid, parser=parser)


def fid(args: argparse.Namespace) -> int:
    """`torchbelay fid`: a distance."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.score.training import commands

        chosen = {"samples": args.samples, "weights": args.weights, "seed": args.seed, "device": args.device}
        return lambda: commands.fid(args.path, inception=args.inception, dataset=args.data, **chosen)

    return in_lab(args, load, "stopped; nothing was written")


SCORE_COMMANDS = (_add_train, _add_sample, _add_fid)

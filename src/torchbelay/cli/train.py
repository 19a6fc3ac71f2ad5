"""`torchbelay train`: train a score model by a preset, or continue a run."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_verb, minutes, number, run_lab, seed, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay train --list                              the presets, with the paper's results
  torchbelay train mnist-edm-belay --budget 10m        ten minutes on this machine
  torchbelay train cifar10-small-ema --budget 2Mimg    two million images; masses and schedule are scaled to them
  torchbelay train table1-belay --lr 3e-4 --out runs/trial --dry-run
  torchrun --nproc-per-node 8 -m torchbelay.cli train cifar10-belay

Ctrl-C stops after the step and saves it; the same command continues from there, bit for bit. RUN holds options.json,
stats.jsonl (one line per report), checkpoint.pt and, at the end, samples.png. If the loss or the weights are not
finite, the run stops and keeps the checkpoint from before, unless --keep-going is given.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay train`."""
    parser = add_verb(
        commands,
        "train",
        run=run,
        summary="train a score model by a preset named after the paper's tables",
        description="Train a score model with BELAY or EMA, for as long as the paper did or within a budget.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("preset", nargs="?", metavar="PRESET", help="the preset to train; --list shows the names")
    option("--list", action="store_true", help="show the presets, and train nothing")
    option("--out", type=Path, metavar="RUN", help="the run's folder (default: runs/PRESET-seedN)")
    option("--data", type=Path, metavar="PATH", help="a copy of the data set (default: TORCHBELAY_DATA, or a download)")
    option("--seed", type=seed, default=0, metavar="N", help="seed of weights, batches and noise (default: 0)")
    option("--budget", metavar="B", help="a time (90s, 10m, 1.5h) or images (500kimg, 2Mimg) (default: the preset's)")
    option("--lr", type=number, help="learning rate (default: the preset's)")
    option("--every", type=steps, metavar="N", help="steps between two reports (default: 50 reports)")
    option(
        "--checkpoint", type=minutes, default=5.0, metavar="MIN", help="minutes between two checkpoints (default: 5)"
    )
    option("--device", metavar="D", help="cuda, cuda:1 or cpu (default: a GPU, if there is one)")
    option("--compile", action="store_true", help="compile the network")
    option("--keep-going", action="store_true", help="continue even if the loss or the weights are not finite")
    option("--dry-run", action="store_true", help="print the plan of the run, and run nothing")


def run(args: argparse.Namespace) -> int:
    """Train by a preset, continue a run, or list the presets."""
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

    return run_lab(args, load, "ended at once; the last checkpoint is kept, and the same command goes on from it")

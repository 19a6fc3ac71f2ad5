"""`torchbelay reproduce`: run the paper's experiments and write the report."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_verb, run_lab, seed, steps

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay reproduce                       all parts, in some minutes, into the folder report
  torchbelay reproduce fig2 robustness       two parts; after a stop, the same command continues
  torchbelay reproduce --quick --out trial   a small version of all parts, to see that they work
  torchbelay reproduce --dry-run             what each part is about, and what would run
  torchbelay reproduce cifar10 --data cifar-10-binary.tar.gz --budget 10m --out trial

Without a GPU or without the data, mnist, figure4, readings, sign, cifar10, warmup, penalty and gpt show the records
that come with the package. So do advice and posthoc for MNIST, without --data: they train on a CPU, for minutes.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay reproduce`."""
    parser = add_verb(
        commands,
        "reproduce",
        run=run,
        summary="run the paper's experiments and write a report that says which of its claims hold",
        description="Run the paper's experiments, with the controls that it lacks, and write DIR/index.html.",
        examples=_EXAMPLES,
    )
    parts = (
        "fig1, fig2, fig3, robustness, momentum, invariance, theory, overhead, ring, advice, posthoc, mnist, "
        "figure4, readings, sign, cifar10, warmup, penalty, gpt or all (default); --dry-run says what each is about"
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    parser.add_argument("--out", default="report", metavar="DIR", help="the folder of the report (default: report)")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of all random numbers (default: 0)")
    parser.add_argument("--quick", action="store_true", help="run a small version; its verdicts mean little")
    parser.add_argument("--force", action="store_true", help="run parts again that are finished")
    parser.add_argument("--jobs", type=steps, metavar="N", help="parts to run at a time (default: the number of cores)")
    parser.add_argument("--dry-run", action="store_true", help="say what each part is about; run nothing")
    option = parser.add_argument_group(
        "mnist, figure4, readings, sign, cifar10, warmup and penalty, which train on images with a GPU"
    ).add_argument
    option("--data", type=Path, metavar="PATH", help="a copy of the data set (default: TORCHBELAY_DATA, or the cache)")
    option("--inception", type=Path, metavar="PATH", help="FID's weights (default: torch-fidelity downloads them)")
    option(
        "--budget",
        metavar="B",
        help="per part: a time of training (10m), without compiling and FIDs, or images per network (100kimg); "
        "BELAY's masses and EMA's decay are adapted to the shorter run",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen parts and write the report."""

    def load() -> Callable[[], int]:
        from torchbelay.lab.part import Settings
        from torchbelay.lab.reproduce import reproduce
        from torchbelay.lab.score.training.budget import Budget

        def work() -> int:
            if args.budget is not None:
                Budget.parse(args.budget)  # refuse a wrong budget before any part runs
            on_gpu = {"data": args.data, "inception": args.inception, "budget": args.budget, "anew": args.force}
            settings = Settings(seed=args.seed, quick=args.quick, **on_gpu)
            options = {"jobs": args.jobs or _cores(), "force": args.force, "dry_run": args.dry_run}
            return reproduce(args.parts, Path(args.out), settings, **options)

        return work

    again = "the same command without --force" if args.force else "the same command"
    return run_lab(args, load, f"stopped; what is finished is kept, and {again} goes on")


def _cores() -> int:
    """Return how many cores this process may use; in a container that can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

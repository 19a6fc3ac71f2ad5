"""`torchbelay merge`: write the weighted mean of checkpoints."""

import argparse
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .loading import LoadError, load_function
from .parser import Parser, add_verb, steps
from .progress import Bar

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
weights, for checkpoints given from the oldest to the newest:
  uniform              the average of a window (SWA, LAWA)
  linear               a learning rate that decays linearly over the window: the same as uniform
  cosine, 1-sqrt       a learning rate that decays in this way (WSM, arXiv 2507.17634)
  ema:0.9              an average with decay 0.9, one step per checkpoint
  0.2,0.3,0.5          these numbers, which must add up to 1; --normalize divides them by their sum

examples:
  torchbelay merge run/checkpoint-8000 run/checkpoint-9000 run/checkpoint-10000 --out merged
  torchbelay merge $(ls -dv run/checkpoint-*) --weights 1-sqrt --out merged
  torchbelay merge step1.pt step2.pt --weights 0.3,0.7 --key model --out mean.pt
  torchbelay merge a b c --greedy my_evaluation:accuracy --log soup.jsonl --out soup

A checkpoint is a safetensors file, a file of torch.save, or a folder of save_pretrained or of
torch.distributed.checkpoint. The merge has the layout of the last one. Ctrl-C, errors and kills leave what is at --out
as it was. A shell sorts checkpoint-10000 before checkpoint-9000: $(ls -dv run/checkpoint-*) has the order of numbers.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay merge`."""
    parser = add_verb(
        commands,
        "merge",
        run=run,
        summary="write the weighted mean of checkpoints: an average of weights after training",
        description="Write the weighted mean of checkpoints, streamed tensor by tensor.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("paths", nargs="+", metavar="CHECKPOINT", help="files or folders, from the oldest to the newest")
    option("--out", required=True, metavar="PATH", help="where to write: a folder if the last checkpoint is one")
    option("--weights", metavar="W", help="uniform (default), linear, cosine, 1-sqrt, ema:DECAY or numbers")
    option("--normalize", action="store_true", help="divide the numbers of --weights by their sum")
    option("--key", metavar="NAME", help="the entry of a training checkpoint that holds the weights, as in model")
    option("--precision", choices=("float32", "float64"), default="float32", help="of the sums (default: float32)")
    option("--threads", type=steps, metavar="N", help="threads that read (default: twice the number of cores)")
    option("--overwrite", action="store_true", help="replace what is at --out, once the merge is complete")
    option("--dry-run", action="store_true", help="say what would be done, and write nothing")
    option = parser.add_argument_group(
        "a greedy soup: keep the checkpoints that do not make the mean worse"
    ).add_argument
    option("--greedy", metavar="M:F", help="function F of module M, which returns the score of a checkpoint's path")
    option("--lower", action="store_true", help="a lower score is better")
    option("--log", metavar="FILE", help="keep all scores in FILE, one per line; the same command goes on there")


def run(args: argparse.Namespace) -> int:
    """Merge checkpoints, or try a greedy soup."""
    parser: Parser = args.parser
    try:
        return _soup(args) if args.greedy else _merge(args)
    except (ValueError, TypeError, OSError) as error:
        message = str(error).replace("key='...'", "--key NAME")
        parser.error(message.replace(f"key={args.key!r} ", f"--key {args.key} ", 1))
    except KeyboardInterrupt:
        kept = f", but the scores in {args.log}" if args.log else ""
        sys.stderr.write(f"{parser.prog}: stopped; nothing was written{kept}\n")
        return 130  # 128 + SIGINT, as shells report it


def _merge(args: argparse.Namespace) -> int:
    from torchbelay.snapshots.merger import Merge, size

    for given, name in ((args.lower, "--lower"), (args.log, "--log")):
        if given:
            args.parser.error(f"{name} is about --greedy; give both, or none")
    weights = args.weights or "uniform"
    with Merge(args.paths, weights, normalize=args.normalize, key=args.key, precision=args.precision) as merge:
        merge.check(args.out, overwrite=args.overwrite)
        width = max(len(str(checkpoint.path)) for checkpoint in merge.inputs)
        for checkpoint, weight in zip(merge.inputs, merge.weights, strict=True):
            print(f"{checkpoint.path!s:<{width}}  {weight:<9.6g} {checkpoint.layout}, {size(checkpoint.nbytes)}")
        _say_notes(args, merge.notes)
        if args.dry_run:
            return 0
        with Bar(f"merge to {args.out}") as bar:
            done = merge.write(args.out, overwrite=args.overwrite, threads=args.threads, progress=bar)
    print(f"{done.path}: {done.tensors} tensors, {size(done.bytes_written)}, in {done.seconds:.1f} s")
    return 0


def _soup(args: argparse.Namespace) -> int:
    from torchbelay.snapshots.greedy import greedy

    given = {"--weights": args.weights, "--normalize": args.normalize, "--dry-run": args.dry_run}
    given |= {"--threads": args.threads, "--precision": args.precision != "float32"}
    if wrong := [name for name, value in given.items() if value]:
        args.parser.error(f"{', '.join(wrong)} and --greedy exclude each other; a soup is an even mean")
    evaluate = _function(args)
    options = {"lower": args.lower, "log": args.log, "key": args.key, "overwrite": args.overwrite}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        soup = greedy(args.paths, args.out, evaluate, say=lambda line: print(line, flush=True), **options)
    _say_notes(args, [str(warning.message) for warning in caught])
    print(f"{args.out}: the mean of {len(soup.members)} of {len(args.paths)}, score {soup.score:.6g}")
    return 0


def _function(args: argparse.Namespace) -> Callable[[Path], float]:
    """Return the function that --greedy names; modules of the current folder are found."""
    if not all(args.greedy.rpartition(":")):
        args.parser.error(f"--greedy {args.greedy}: give a module and a function, as in my_evaluation:accuracy")
    try:
        found = load_function(args.greedy, "takes a path and returns a score")
    except LoadError as problem:
        args.parser.error(f"--greedy {args.greedy}: {problem}")

    def evaluate(path: Path) -> float:
        try:
            return float(found(path))
        except (Exception, SystemExit) as problem:
            traceback.print_exc()  # the mistake is in the user's code, of which one line says too little
            raise ValueError(f"--greedy {args.greedy} failed for {path}: {problem!r}") from problem

    return evaluate


def _say_notes(args: argparse.Namespace, notes: list[str]) -> None:
    for note in notes:
        sys.stderr.write(f"{args.parser.prog}: note: {note}\n")

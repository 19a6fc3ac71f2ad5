"""`torchbelay plan`: what an average takes and sends on many machines, before one is rented."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from math import sqrt
from typing import TYPE_CHECKING

from .parser import add_verb, many, steps

if TYPE_CHECKING:
    from torchbelay.belay.cost import Cost, Sent

    from .parser import Commands

_MODES = ("ddp", "ddp-sharded", "fsdp2", "zero3", "workers")  # as in belay/cost.py, which imports torch
_WHOLE = ("zero3", "workers")  # these keep whole float32 numbers
_MOST_TENSORS = 100_000  # of which the costs take about a second; models have some thousands
_EXAMPLES = """\
examples:
  torchbelay plan --params 70B --ranks 1024                     all modes
  torchbelay plan --params 70B --ranks 1024 --mode ddp-sharded --bits 24
  torchbelay plan --params 1e9 --ranks 8 --mode workers --every 500

modes:
  ddp          every rank keeps the whole average
  ddp-sharded  Belay(..., shard=group): each rank keeps a part of it
  fsdp2        a model that FSDP2 has sharded
  zero3        DeepSpeed's ZeRO-3; ZeRO-1 and 2 also send the model's weights on entering averaged()
  workers      Belay(..., workers=group): each rank trains weights of its own

A rank is a process with a GPU. Bytes are those that a rank stores and sends; a sum over all ranks goes around a ring.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay plan`."""
    parser = add_verb(
        commands,
        "plan",
        run=run,
        summary="say what an average stores and sends on many machines",
        description="Compute what one average of float32 weights stores on each rank, and what it sends in a step.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("--params", type=many, required=True, metavar="P", help="weights of the model, as 70B or 70e9")
    option("--ranks", type=steps, required=True, metavar="N", help="processes, one per GPU")
    option("--mode", choices=_MODES, help="how the model is spread (default: all modes)")
    option("--bits", type=int, choices=(32, 24), default=32, help="of each number of the average (default: 32)")
    option("--tensors", type=many, default=500, metavar="T", help="tensors that have the weights (default: 500)")
    option("--every", type=steps, default=1, metavar="H", help="steps between two syncs of workers (default: 1)")
    option("--json", action="store_true", help="one JSON object with every digit")


def run(args: argparse.Namespace) -> int:
    """Print a block of lines per mode, or one JSON object."""
    from torchbelay.belay.cost import MODES, cost_of

    if args.tensors > _MOST_TENSORS:
        args.parser.error(f"--tensors {args.tensors} is too large; give at most {_MOST_TENSORS}")
    if args.every > 1 and args.mode not in (None, "workers"):
        args.parser.error(f"--every {args.every} is for workers; other modes do not sync: leave it out")
    if args.bits == 24 and args.mode in _WHOLE:
        args.parser.error(f"--bits 24 is not for {args.mode}, which keeps float32 averages; leave it out")
    modes = [mode for mode in MODES if args.mode in (None, mode) and not (args.bits == 24 and mode in _WHOLE)]
    shapes = list(model_of(args.params, args.tensors))
    found = {mode: cost_of(mode, shapes, args.ranks, bits=args.bits) for mode in modes}
    if args.json:
        print(json.dumps({mode: asdict(cost) for mode, cost in found.items()}, indent=2))
        return 0
    print(f"One average of {args.bits} bits, {args.params:,} weights, {args.ranks:,} rank{'s' * (args.ranks > 1)}")
    for mode, cost in found.items():
        print("\n" + "\n".join(_lines(mode, cost, args.every)))
    return 0


def model_of(weights: int, tensors: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of equal matrices, and of a vector that has the rest of the weights.

    >>> list(model_of(1_000_000, 3))
    [(651, 512), (651, 512), (651, 512), (64,)]
    """
    tensors = min(tensors, weights)
    columns = 1
    while columns * 2 <= sqrt(weights / tensors):
        columns *= 2
    rows = weights // tensors // columns
    yield from [(rows, columns)] * tensors
    if rest := weights - tensors * rows * columns:
        yield (rest,)


def _lines(mode: str, cost: "Cost", every: int) -> Iterator[str]:
    yield mode
    yield f"  stored on a rank                {size(cost.stored)}"
    if mode == "workers":
        yield f"  sent by a rank at a sync        {_sent(cost.pulling)}"
        if every > 1:
            yield f"  per step, with one in {every:<9,} {size(cost.pulling.bytes / every)}"
        return
    yield f"  sent in a step, only watching   {_sent(cost.watching)}"
    yield f"  sent in a step that pulls       {_sent(cost.pulling)}"
    yield f"  sent on entering averaged()     {_sent(cost.evaluating)}"


def _sent(sent: "Sent") -> str:
    if not sent.messages:
        return "nothing"
    return f"{size(sent.bytes)} in {sent.messages:,} message{'s' * (sent.messages > 1)}"


def size(count: float) -> str:
    """Return a number of bytes with three digits.

    >>> size(0), size(999), size(273_437_500), size(4e12)
    ('0 B', '999 B', '273 MB', '4 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"
        count /= 1000
    raise AssertionError

"""Run parts of the report that need a GPU for some minutes at a time: the study of the spring's sign, and Figure 4.

    python benchmarks/study.py gpt --data DIR --out DIR --stop-after 540

It needs torch, numpy and scipy, and draws nothing. Finished runs stay in the cache, $XDG_CACHE_HOME/torchbelay/studies:
the same command goes on with the next. If the cache is gone, `--have figure4.jsonl` takes the complete seeds of these
records, and `--have gpt.jsonl` all runs, which is right as long as the code of the runs is what it was. The records of
all finished runs are written to DIR/PART.jsonl, also if the part is not complete. It prints how many runs are finished,
and no result: `claims/study.md` says when those are read.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchbelay.lab import records as on_disk
from torchbelay.lab.gpt import study as gpt
from torchbelay.lab.part import LabError, Record, Settings, Tick
from torchbelay.lab.score import run as images

PARTS = ("warmup", "penalty", "gpt", "figure4")
QUIET = 10.0  # seconds between two lines about progress
START = 120.0  # seconds that a further part needs for its first runs, with which it is compiled


def run(name: str, settings: Settings, tick: Tick, have: Sequence[Record] = ()) -> list[Record]:
    """Run a part until it is complete or its time is over; return the records of what is finished."""
    if name == "gpt":
        return gpt.run(settings, tick, have)
    return images.run(name, settings, tick)


def units(name: str, settings: Settings) -> int:
    """Return the units of work of a part."""
    return (gpt.plan(settings) if name == "gpt" else images.plan(name, settings))[0]


def teller(name: str, most: int, clock: Callable[[], float] = time.monotonic) -> Tick:
    """Return what prints the progress of a part, now and then."""
    begin = last = clock()
    done = 0

    def tick(count: int) -> None:
        nonlocal last, done
        done += count
        if (now := clock()) - last >= QUIET:
            print(f"{name}: {done} of at most {most} units, {now - begin:.0f} s", flush=True)
            last = now

    return tick


def main() -> None:
    """Run the parts one after the other within the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder with images and text")
    parser.add_argument("--inception", type=Path, metavar="PATH", help="FID's weights, for figure4")
    parser.add_argument("--out", type=Path, default=Path("study"), metavar="DIR", help="for the records")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin nothing that would end later")
    parser.add_argument("--have", type=Path, metavar="FILE", help="records whose runs are not made again")
    parser.add_argument("--quick", action="store_true", help="a small version; gpt runs it without a GPU too")
    args = parser.parse_args()
    begin = time.monotonic()
    have: dict[str, list[Record]] = {}
    if args.have is not None:
        head, lines = on_disk.read(args.have)
        have = {head["part"]: lines}
        if head["part"] != "gpt":
            seeds = images.adopt(head["part"], Settings(seed=head["seed"], quick=head["quick"]), lines)
            print(
                f"{head['part']}: seeds {', '.join(map(str, seeds)) or 'none'} are taken from {args.have}", flush=True
            )
    for name in args.parts:
        left = None if args.stop_after is None else args.stop_after - (time.monotonic() - begin)
        if left is not None and left < START and name != args.parts[0]:
            print(f"{name}: not begun, because {left:.0f} s are left", flush=True)
            continue
        settings = Settings(quick=args.quick, data=args.data, inception=args.inception, stop_after=left)
        found = run(name, settings, teller(name, units(name, settings)), have.get(name, ()))
        about = next(
            (line for line in found if line["kind"] in ("protocol", "origin")), {"why": gpt.obstacle(settings)}
        )
        if about.get("why"):  # the records are those of the package, and an earlier run's file stays
            print(f"{name}: nothing was run. {about['why']}", flush=True)
            continue
        took = float(about.get("device_s", 0.0))
        head = on_disk.header(name, settings, took) | {"device": about.get("device")}
        on_disk.write(args.out / f"{name}.jsonl", head, found)
        runs = sum(line["kind"] in ("run", "curvature") for line in found)
        is_whole = about.get("complete") and about.get("traced", True)
        state = "complete" if is_whole else f"not complete{'' if runs else f' ({about})'}"
        print(f"{name}: {runs} runs are finished, {took:.0f} s in all, {state}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"study.py: {error}")

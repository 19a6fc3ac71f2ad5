"""`torchbelay synthesize`: make an average after training, from a folder of snapshots."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .parser import Parser, add_verb, number, steps
from .progress import Bar

if TYPE_CHECKING:
    from torchbelay.snapshots import Synthesis
    from torchbelay.snapshots.folder import Folder

    from .parser import Commands

_EXAMPLES = """\
targets (a text in quotes; methods begin with the run, as a copy of its first weights):
  ema(half_life=2000)            any method of torchbelay.methods; also Spring(k=1, m1=2000, m2=500)
  power_ema(sigma_rel=0.1)       a power function, as of EDM2
  window(1000)                   the mean of the last 1000 weights: SWA, LAWA
  decay(1000, 'cosine')          as if the learning rate had decayed over the last 1000 steps; also 'linear', '1-sqrt'

examples:
  torchbelay synthesize snapshots --list
  torchbelay synthesize snapshots --target 'ema(half_life=2000)' --at 40000 --out avg.safetensors
  torchbelay synthesize snapshots --target 'window(1000)'
  torchbelay synthesize snapshots --sweep 'ema(half_life=[500, 1000, 2000, 4000])' --picture sweep.png --out averages

Without --out nothing is written: the predicted error is printed. It is the expected distance from the average that
would have been trained along, relative to its distance from the weights, if updates are white; no weight is read for
it. A --sweep with --out writes one file per target into that folder. Ctrl-C leaves nothing half-written.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay synthesize`."""
    parser = add_verb(
        commands,
        "synthesize",
        run=run,
        summary="make any average after training, from the snapshots of a Recorder",
        description="Make an average after training, as a combination of snapshots, with an error that is predicted.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("folder", type=Path, metavar="FOLDER", help="the folder that torchbelay.snapshots.Recorder wrote to")
    option("--list", action="store_true", help="show what the folder holds")
    option("--target", metavar="CALL", help="the average to make, as 'ema(half_life=2000)'")
    option("--sweep", metavar="CALL", help="several: a list in place of a value, as 'window([500, 1000])'")
    option("--at", type=steps, metavar="STEP", help="the step whose average is made (default: the last one recorded)")
    option("--out", type=Path, metavar="PATH", help="the safetensors file to write; with --sweep, a folder for them")
    option("--picture", type=Path, metavar="PNG", help="draw the profiles of targets and of what is made of snapshots")
    option(
        "--norm", choices=("updates", "profile"), default="updates",
        help="what is minimised: the predicted error (default), or the distance of profiles as in EDM2",
    )  # fmt: skip
    option(
        "--max-error", type=number, default=0.01, metavar="E", help="refuse a larger predicted error (default: 0.01)"
    )
    option("--overwrite", action="store_true", help="replace what is at --out")


def run(args: argparse.Namespace) -> int:
    """List a folder, or make one average or several."""
    parser: Parser = args.parser
    asked = [name for name in ("list", "target", "sweep") if getattr(args, name)]
    if len(asked) != 1:
        parser.error(f"give one of --list, --target and --sweep{'; got --' + ' and --'.join(asked) if asked else ''}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return _list(args) if args.list else _make(args)
        except (ValueError, TypeError, OSError) as error:
            parser.error(str(error))
        except ModuleNotFoundError as missing:
            parser.error(f"--picture needs {missing.name}: pip install '.[lab]' in a clone of torchbelay")
        except KeyboardInterrupt:
            sys.stderr.write(f"{parser.prog}: stopped; nothing is half-written\n")
            return 130  # 128 + SIGINT, as shells report it
        finally:
            for each in caught:
                sys.stderr.write(f"{parser.prog}: note: {each.message}\n")


# What a folder holds --------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from torchbelay.snapshots.folder import Folder

    folder = Folder(args.folder)
    if not folder.snapshots:
        raise ValueError(f"{args.folder} holds no snapshots; give the folder of a Recorder")
    rows = [("average", "method", "snapshots", "steps", "size"), *_rows(folder)]
    _print_table(rows)
    begins = dict.fromkeys(session.begin for session in folder.sessions if session.begin)
    if resumes := [str(session.start) for session in folder.sessions[1:] if session.start not in begins]:
        print(f"resumed after step {', '.join(resumes)}")
    if begins:
        print(f"begun again by reset() after step {', '.join(map(str, begins))}")
    if files := folder.rest_files(folder.last):
        print(f"what is not trained: {files[0].name}" + (f", and {len(files) - 1} before it" if files[1:] else ""))
    if folder.stale:
        print(f"not part of this run, but of steps that were taken again: {len(folder.stale)} files")
    return 0


def _rows(folder: "Folder") -> list[tuple[str, ...]]:
    """Return a row per average: its methods, and the steps that have snapshots."""
    from torchbelay.snapshots.merger import size

    found: list[tuple[str, ...]] = []
    for average in dict.fromkeys(each.average for each in folder.snapshots):
        mine = [each for each in folder.snapshots if each.average == average]
        texts = dict.fromkeys(story.method for each in mine for story in each.told.stories)
        at = [each.step for each in mine]
        gaps = {later - earlier for earlier, later in pairwise(at)}
        often = f", every {gaps.pop()}" if len(gaps) == 1 else ""
        span = f"{at[0]} to {at[-1]}{often}" if len(at) > 1 else str(at[0])
        name = "(weights)" if average is None else average
        found.append((name, _methods(texts), str(len(mine)), span, size(sum(map(_bytes, mine)))))
    return found


def _methods(texts: dict[str, None]) -> str:
    from torchbelay.snapshots.targets import label, parse

    shown = []
    for text in texts:
        try:
            shown.append(label(parse(text)))
        except ValueError:
            shown.append(text)
    return "; ".join(shown[:2]) + (f"; and {len(shown) - 2} more" if len(shown) > 2 else "")


def _bytes(snapshot: Any) -> int:
    path: Path = snapshot.path
    return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# Making averages ------------------------------------------------------------------------------------------------------


def _make(args: argparse.Namespace) -> int:
    from torchbelay.physics import arguments
    from torchbelay.snapshots.merger import size
    from torchbelay.snapshots.synthesis import refusal, synthesize_all
    from torchbelay.snapshots.targets import label, parse, parse_family

    arguments.number("--max-error", args.max_error, low=0)
    targets = parse_family(args.sweep) if args.sweep else [parse(args.target)]
    names = [label(target) for target in targets]
    places = _places(args, names)
    if args.picture is not None:
        _check_picture(args.picture)
    found = synthesize_all(args.folder, targets, at=args.at, norm=args.norm, max_error=None)
    if args.target and not found[0].predicted_error <= args.max_error:
        raise ValueError(refusal(found[0], args.max_error).replace("max_error", "--max-error"))
    for each, place in zip(found, places, strict=True):
        if place is not None:
            each.check_place(place)
    if args.sweep:
        rows = [("target", "predicted error", "condition number", "")]
        for name, each in zip(names, found, strict=True):
            refused = "" if each.predicted_error <= args.max_error else f"above --max-error {args.max_error:g}"
            rows.append((name, f"{each.predicted_error:.2g}", f"{each.condition:.2g}", refused))
        _print_table(rows)
    else:
        print(found[0])
    if args.picture is not None:
        _draw(args.picture, names, found)
        print(f"profiles: {args.picture}")
    for each, place in zip(found, places, strict=True):
        if place is not None and each.predicted_error <= args.max_error:
            place.parent.mkdir(parents=True, exist_ok=True)
            with Bar(f"write {place}") as bar:
                each.save(place, progress=bar)
            print(f"{place}: {size(place.stat().st_size)}")
    return 0


def _places(args: argparse.Namespace, names: Sequence[str]) -> list[Path | None]:
    """Return the file of each target; refuse, before anything is read, what cannot be written or exists."""
    from torchbelay.belay.files import destination

    if args.out is None:
        return [None] * len(names)
    if args.sweep:
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is a file, and --sweep writes several; give a folder")
        found = [args.out / f"{quote(name, safe=' (),=.')}.safetensors" for name in names]
    else:
        found = [destination(args.out, argument="--out")]
    for path in found:
        if path.exists() and not args.overwrite:
            raise FileExistsError(f"{path} exists; give another --out, or --overwrite")
    return list(found)


def _check_picture(path: Path) -> None:
    """Refuse, before the work, a picture that could not be drawn or written."""
    import matplotlib  # noqa: F401  # ModuleNotFoundError is told with its cure

    if path.suffix.lower() != ".png":
        raise ValueError(f"--picture {path} does not end in .png; give the name of a PNG file")
    if not os.path.isdir(path.parent):
        raise FileNotFoundError(f"--picture {path}: there is no folder {path.parent}; make it first")


def _draw(path: Path, names: Sequence[str], found: Sequence["Synthesis"]) -> None:
    from torchbelay.lab.posthoc.figures import draw_sweep
    from torchbelay.lab.records import write_bytes
    from torchbelay.lab.report import style

    curves = []
    for name, each in zip(names, found, strict=True):
        target, made = each.profiles()
        curves.append((name, target.tolist(), made.tolist(), each.predicted_error))
    write_bytes(path, style.as_bytes(draw_sweep(curves, found[0].at), "png"))

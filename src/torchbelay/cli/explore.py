"""`torchbelay explore`: a page in the browser with a spring to play with."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from torchbelay import explorer

from .parser import add_verb

if TYPE_CHECKING:
    from .parser import Commands

_EXAMPLES = """\
examples:
  torchbelay explore                                write explorer.html and open it in the browser
  torchbelay explore --output ~/spring.html         another file
  torchbelay explore --no-open                      write it only, for instance on a server

The page is one file. It needs no network and no server, and it runs this package's formulas in the browser.
"""


def add(commands: "Commands") -> None:
    """Declare the arguments of `torchbelay explore`."""
    parser = add_verb(
        commands,
        "explore",
        run=run,
        summary="open a page with a spring to play with: drag the masses, see what follows, race the methods",
        description="Write a page with a spring to play with, and open it in the browser.",
        examples=_EXAMPLES,
    )
    option = parser.add_argument
    option("--output", type=Path, default=Path(explorer.NAME), metavar="FILE", help=f"default: {explorer.NAME}")
    option("--no-open", action="store_true", help="write the page without opening it")


def run(args: argparse.Namespace) -> int:
    """Write the page, print its path, and open it."""
    path: Path = args.output
    try:
        path = path.expanduser()
        explorer.write(path)
    except (OSError, RuntimeError) as error:  # the latter: nobody has the name after ~
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        args.parser.error(f"cannot write {path}: {why}; choose another file with --output")
    print(path)
    if not args.no_open and not _open(path):
        print(f"{args.parser.prog}: no browser was found; open the file above in one")
    return 0


def _open(path: Path) -> bool:
    """Open the page in the browser; return whether there is one."""
    import webbrowser  # only here: it takes a while to load

    try:
        return webbrowser.open(path.resolve().as_uri())
    except webbrowser.Error:
        return False

"""Write the drawings of the documentation into a folder: `python -m torchbelay.lab.pictures docs/images`."""

import sys
from pathlib import Path

from . import PICTURES


def main(folder: Path) -> None:
    """Draw every picture into its place below a folder."""
    for name, draw in PICTURES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

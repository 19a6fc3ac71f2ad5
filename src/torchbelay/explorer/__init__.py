"""The explorer's page as one file, which a browser opens from disk. Its sources are HTML, CSS and JavaScript alone.

The repository has them in docs/explorer, as the site shows them; a wheel has them beside this file. Browsers do not
load a module from a folder on disk, so the script is written into the page, and with it the style.
"""

import os
import uuid
from contextlib import suppress
from pathlib import Path

NAME = "explorer.html"
_STYLE, _SCRIPT = '<link rel="stylesheet" href="explorer.css">', '<script type="module" src="explorer.js"></script>'


def page() -> str:
    """Return the page as one HTML document that needs no other file and no network.

    >>> "<style>" in page(), "explorer.js" in page()
    (True, False)
    """
    document, style, script = (_read(name) for name in ("index.html", "explorer.css", "explorer.js"))
    document = _replace(document, _STYLE, f"<style>\n{style}</style>")
    return _replace(document, _SCRIPT, f'<script type="module">\n{script}</script>')


def write(path: Path) -> None:
    """Write the page to a file, as a whole or not at all; the file of a symbolic link is replaced, and the link stays.

    This room cannot have `belay.files.replacing`, which would import torch.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():  # a device or a pipe takes the page; a folder refuses it
        _write(real)
        return
    temporary = real.with_name(f".{real.name}.{uuid.uuid4().hex[:8]}.tmp")  # same folder: a rename crosses no disks
    try:
        _write(temporary)
        os.replace(temporary, real)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _write(path: Path) -> None:
    path.write_text(page(), encoding="utf-8", newline="\n")


def sources() -> Path:
    """Return the folder that has the page's sources."""
    here = Path(__file__).resolve().parent
    return here if (here / "index.html").is_file() else here.parents[2] / "docs" / "explorer"


def _read(name: str) -> str:
    return (sources() / name).read_text(encoding="utf-8")


def _replace(document: str, link: str, content: str) -> str:
    before, found, after = document.partition(link)
    if not found:
        raise ValueError(f"index.html of the explorer has no line {link}; without it the page cannot be one file")
    return before + content + after

"""axe-core, which finds what keeps people from using a page. It comes from npm, if npm can be reached."""

import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.14.0"
LIMIT = 60  # seconds for npm


def script() -> str:
    """Return axe's program: of the file that TORCHBELAY_AXE names, or of npm. Skip the test if there is neither."""
    if given := os.environ.get("TORCHBELAY_AXE"):
        return Path(given).read_text(encoding="utf-8")
    found, why = _fetched()
    if not found:
        pytest.skip(f"{why}; TORCHBELAY_AXE can name a file axe.min.js")
    return found


@functools.cache  # also of a failure: without a network every test would wait for npm again
def _fetched() -> tuple[str, str]:
    """Return axe's program from npm; if it cannot be had, nothing and why."""
    npm = shutil.which("npm")
    if npm is None:
        return "", "no npm to get axe-core with"
    with tempfile.TemporaryDirectory() as folder:
        words = [npm, "pack", f"axe-core@{VERSION}", "--silent", "--fetch-retries=0", f"--pack-destination={folder}"]
        try:
            subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=LIMIT)
        except (subprocess.SubprocessError, OSError) as error:
            return "", f"npm cannot get axe-core {VERSION} ({error})"
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            file = archive.extractfile("package/axe.min.js")
            assert file is not None
            return file.read().decode("utf-8"), ""


def serious(page: Any) -> list[str]:
    """Return what axe calls serious or critical on a page of playwright, with the first places."""
    page.evaluate(script())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']} ({each['impact']}, {len(each['nodes'])} times): "
        + "; ".join(f"{node['target']} {node['html'][:120]}" for node in each["nodes"][:3])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]

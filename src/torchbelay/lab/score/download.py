"""The usual download of MNIST and CIFAR-10, kept in the cache folder."""

import hashlib
import http.client
import os
import urllib.request
from pathlib import Path

from torchbelay.belay.files import replacing
from torchbelay.lab.part import LabError

from .formats import Copy, DatasetInfo, DatasetName, find_info, read_idx, read_tar

_CHUNK = 1 << 20


def cache_folder() -> Path:
    """Return the folder that keeps downloads: torchbelay in XDG_CACHE_HOME, by default in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchbelay"


def download(name: DatasetName) -> Copy:
    """Download the files of a data set that the cache lacks; after an interruption, only the rest."""
    info = find_info(name)
    paths = [cache_folder() / file for file in info.md5]
    for path in paths:
        if not path.exists():
            _download_file(info, path)
    return Copy(read_idx if name == "mnist" else read_tar, paths)


def _download_file(info: DatasetInfo, path: Path) -> None:
    """Fetch one file; it appears at `path` only if it is complete and its md5 is the published one."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    address, md5 = info.source + path.name, info.md5[path.name]
    cure = f"give a copy with --data: {info.accepted}"
    sums = hashlib.md5(usedforsecurity=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            with (
                temporary.open("wb") as file,
                urllib.request.urlopen(address, timeout=30) as answer,
                Progress(*columns, console=Console(stderr=True)) as progress,
            ):
                task = progress.add_task(path.name, total=int(answer.headers.get("Content-Length") or 0) or None)
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    sums.update(chunk)
                    progress.advance(task, len(chunk))
            if sums.hexdigest() != md5:  # the exception leaves no file behind
                raise LabError(f"{address} came damaged (md5 {sums.hexdigest()}, not {md5}); try again, or {cure}")
    except (OSError, http.client.HTTPException) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise LabError(f"cannot download {address} to {path.parent} ({why}); {cure}") from error

"""The checksums of a zip file whose contents were written in place: `torch.load` ignores them, `unzip` does not."""

import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from torchbelay.snapshots.files import FilePart
from torchbelay.snapshots.stream import usual_threads

_BLOCK = 1 << 22  # bytes
_DESCRIPTOR = b"PK\x07\x08"  # begins what may follow the bytes of an entry: its checksum and its size


def renew_checksums(path: Path, begin: int = 0, size: int | None = None) -> None:
    """Compute the checksums of all entries, which must be stored as they are, and write them where they belong.

    The zip file is all of the file, or the part of it that begins at `begin` and has this size.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.zip"
    >>> with zipfile.ZipFile(path, "w") as archive:
    ...     archive.writestr("entry", b"first")
    >>> _ = path.write_bytes(path.read_bytes().replace(b"first", b"later"))
    >>> renew_checksums(path)
    >>> with zipfile.ZipFile(path) as archive:
    ...     archive.testzip(), archive.read("entry")
    (None, b'later')
    """
    with open(path, "r+b") as file:
        part: Any = FilePart(file, begin, path.stat().st_size - begin if size is None else size)
        with zipfile.ZipFile(part) as archive:
            entries, place = archive.infolist(), begin + archive.start_dir
        places = [(begin + data_position(part, entry), entry.file_size) for entry in entries]
        with ThreadPoolExecutor(min(usual_threads(), len(places)), "torchbelay") as pool:
            checksums = list(pool.map(lambda each: _checksum(path, *each), places))
        for entry, (data, length), checksum in zip(entries, places, checksums, strict=True):
            packed = struct.pack("<I", checksum)
            if _read(file, data + length, 4) == _DESCRIPTOR:
                _write(file, data + length + 4, packed)
            else:
                _write(file, begin + entry.header_offset + 14, packed)
            _write(file, place + 16, packed)  # in the directory at the end of the file
            place += 46 + sum(struct.unpack("<HHH", _read(file, place + 28, 6)))


def data_position(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Return where in a zip file the bytes of an entry begin."""
    name, extra = struct.unpack("<HH", _read(file, entry.header_offset + 26, 4))
    return int(entry.header_offset + 30 + name + extra)


def _checksum(path: Path, begin: int, size: int) -> int:
    found, block = 0, memoryview(bytearray(min(size, _BLOCK)))
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while size:
            count = file.readinto(block[: min(size, _BLOCK)])
            found = zlib.crc32(block[:count], found)
            size -= count
    return found


def _read(file: IO[bytes], position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _write(file: IO[bytes], position: int, data: bytes) -> None:
    file.seek(position)
    file.write(data)

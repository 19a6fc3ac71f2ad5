"""The checksums of a zip file whose contents were written in place: `torch.load` ignores them, `unzip` does not."""

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

_BLOCK = 1 << 22  # bytes
_DESCRIPTOR = b"PK\x07\x08"  # begins what may follow the bytes of an entry: its checksum and its size


def renew_checksums(path: Path) -> None:
    """Compute the checksums of all entries, which must be stored as they are, and write them where they belong.

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
    with zipfile.ZipFile(path) as archive:
        entries, place = archive.infolist(), archive.start_dir
    with open(path, "r+b") as file:
        for entry in entries:
            name, extra = struct.unpack("<HH", _read(file, entry.header_offset + 26, 4))
            begin = entry.header_offset + 30 + name + extra
            checksum = struct.pack("<I", _checksum(file, begin, entry.file_size))
            if _read(file, begin + entry.file_size, 4) == _DESCRIPTOR:
                _write(file, begin + entry.file_size + 4, checksum)
            else:
                _write(file, entry.header_offset + 14, checksum)
            _write(file, place + 16, checksum)  # in the directory at the end of the file
            place += 46 + sum(struct.unpack("<HHH", _read(file, place + 28, 6)))


def _checksum(file: IO[bytes], begin: int, size: int) -> int:
    found = 0
    for start in range(0, size, _BLOCK):
        found = zlib.crc32(_read(file, begin + start, min(_BLOCK, size - start)), found)
    return found


def _read(file: IO[bytes], position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _write(file: IO[bytes], position: int, data: bytes) -> None:
    file.seek(position)
    file.write(data)

"""Safetensors files are read and written as the package safetensors does it, and damaged ones are refused."""

import json
import re
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from helpers.checkpoints import same_bits
from torchbelay.snapshots import open_checkpoint
from torchbelay.snapshots.checkpoint import TensorInfo
from torchbelay.snapshots.layouts.safetensors import SafetensorsWriter, read_header

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {str(dtype): (10 * torch.rand(3, 5)).to(dtype) for dtype in DTYPES}
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "odd": torch.arange(7, dtype=torch.uint8)}


def test_every_dtype_is_read_as_the_package_wrote_it(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "a.safetensors", {"step": "7"})
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert {*checkpoint.names} == {*state()}
        assert checkpoint.metadata == {"step": "7"}
        for name, tensor in state().items():
            assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tensor.shape, tensor.dtype)
            assert same_bits(checkpoint.read(name), tensor)


def test_the_package_reads_what_is_written_here(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    infos = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in state().items()}
    with SafetensorsWriter(path, infos, {"format": "pt", "é": "ü"}) as writer:
        for name, tensor in reversed(state().items()):
            writer.write(name, tensor)
    loaded = load_file(path)
    assert all(same_bits(loaded[name], tensor) for name, tensor in state().items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "é": "ü"}


def test_parts_are_read_and_written_by_several_threads(tmp_path: Path) -> None:
    values = torch.arange(40_000, dtype=torch.float32)
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path, {"x": TensorInfo(torch.float32, (200, 200)), "y": TensorInfo(torch.int8, (3,))}) as w:
        w.write("y", torch.ones(3, dtype=torch.int8))
        parts = range(0, 40_000, 1000)
        threads = [threading.Thread(target=w.write, args=("x", values[start : start + 1000], start)) for start in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(load_file(path)["x"].flatten(), values)
    with open_checkpoint(path) as checkpoint:
        part = torch.empty(77)
        checkpoint.read_into("x", 123, part)
        assert torch.equal(part, values[123:200])


def test_tensors_of_a_model_are_written_wherever_and_however_they_lie(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    with SafetensorsWriter(tmp_path / "a.safetensors", {"t": TensorInfo(torch.float32, (3, 4))}) as writer:
        writer.write("t", weight.T)  # not contiguous, and requires a gradient
    assert torch.equal(load_file(tmp_path / "a.safetensors")["t"], weight.detach().T)


def test_a_file_that_is_not_written_whole_is_refused(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / "a.safetensors", {"x": TensorInfo(torch.float32, (4,))})
    writer.write("x", torch.ones(3))
    with pytest.raises(ValueError, match="not written whole: x; write every element once"):
        writer.finish()


def test_what_was_not_announced_is_refused(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "a.safetensors", {"x": TensorInfo(torch.float32, (4,))}) as writer:
        for values, start in ((torch.ones(4).double(), 0), (torch.ones(3), 2)):
            with pytest.raises(ValueError, match=r"'x' is announced as torch\.float32 of 4 elements; got"):
                writer.write("x", values, start)
        writer.write("x", torch.ones(4))


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'x' is torch\.complex128, which safetensors cannot hold"):
        SafetensorsWriter(tmp_path / "a.safetensors", {"x": TensorInfo(torch.complex128, (4,))})


def damaged(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


DAMAGED = {
    "holes": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8), "are not where its shape puts"),
    "overlap": (
        {k: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for k in "xy"},
        bytes(4),
        "are not where its shape puts them",
    ),
    "size": ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), "are not where its shape puts"),
    "short": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3), "instead of"),
    "long": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5), "instead of"),
    "negative": ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4), "not of safetensors"),
    "no offsets": ({"x": {"dtype": "F32", "shape": [1]}}, bytes(4), "not of safetensors"),
    "a list": ([1, 2], b"", "not of safetensors"),
    "no JSON": (b"{", b"", "not of safetensors"),
    "dtype": ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1), "dtype F4, which torch cannot"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    header, data, message = DAMAGED[kind]
    with pytest.raises(ValueError, match=f"a.safetensors.*{re.escape(message)}"):
        read_header(damaged(tmp_path / "a.safetensors", header, data))
    if kind != "dtype":  # the package agrees that these are damaged
        with pytest.raises((SafetensorError, KeyError)):
            load_file(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**60), struct.pack("<Q", 50) + b"{}"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file, or only the beginning of one"):
        read_header(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / "a.safetensors")
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        with open(tmp_path / "a.safetensors", "r+b") as file:
            file.truncate(300)
        with pytest.raises(ValueError, match=r"ends .* bytes too early"):
            checkpoint.read("x")

"""The average as a file: written whole or not at all, with metadata that say what it is."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, attached, batch, mlp, same, snapshot, train, values, with_batchnorm
from torchbelay.physics.identity import describe


def trained(method: Any = EMA, **options: Any) -> tuple[nn.Module, Any, tb.Belay]:
    model, optimizer, belay = attached(method, **options)
    train(model, optimizer, 3)
    return model, optimizer, belay


def about(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize("name", ["average", "short"])
def test_the_file_loads_strictly_into_a_plain_model_and_is_the_average(tmp_path: Path, name: str) -> None:
    model, _, belay = trained(model=with_batchnorm(), spectators={"short": tb.Spring.ema(decay=0.5)})
    belay.save_average(tmp_path / "average.safetensors", name)
    plain = with_batchnorm(seed=1)
    plain.load_state_dict(load_file(tmp_path / "average.safetensors"), strict=True)
    assert same(values(plain), dict(belay.average_state_dict(name)))
    with belay.averaged(name), torch.no_grad():
        assert torch.equal(plain.eval()(batch(0)), model.eval()(batch(0)))


def test_the_metadata_say_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a"
    _, _, belay = trained(lambda name, p: BELAY if "weight" in name else EMA, spectators={"swa": tb.methods.swa()})
    belay.save_average(str(path))
    expected = {"format": "pt", "average": "average", "step": "3", "torchbelay": tb.__version__}
    assert about(path) == expected | {"method": f"{BELAY!r}; {EMA!r}"}
    belay.save_average(path, "swa")
    assert about(path) == expected | {"average": "swa", "method": describe(tb.methods.swa())}
    _, _, late = trained(start=5)
    late.save_average(path)
    assert about(path)["method"] == "none before step 5"


def test_inside_averaged_it_is_the_same_file(tmp_path: Path) -> None:
    _, _, belay = trained(model=mlp(torch.bfloat16), spectators={"short": EMA})
    belay.save_average(tmp_path / "outside")
    for name in ("average", "short"):
        with belay.averaged(name):
            belay.save_average(tmp_path / "inside")
        assert same(load_file(tmp_path / "inside"), load_file(tmp_path / "outside"))
        assert about(tmp_path / "inside") == about(tmp_path / "outside")


def test_tied_empty_and_transposed_weights_have_each_their_own_place(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": torch.randn(3, 3), "empty": torch.zeros(0, 4), "turned": torch.randn(4, 2).t()})
    model["b"] = model["a"]
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    exported = belay.average_state_dict()
    assert exported["a"] is exported["b"]  # tied, as in the model's own state
    belay.save_average(tmp_path / "average")
    found = load_file(tmp_path / "average")
    assert set(found) == {"a", "b", "empty", "turned"}
    assert all(torch.equal(found[name], model[name]) for name in found)


class Crash(BaseException):
    """An exception that `except Exception` does not catch."""


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_whoever_is_stopped_on_the_way_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    model, optimizer, belay = trained()
    path = tmp_path / "average"
    belay.save_average(path)
    old = path.read_bytes()
    train(model, optimizer, 1)

    def stopped(*args: Any, **_: Any) -> None:
        if at == "write":
            Path(args[1]).write_bytes(b"half a fi")
        raise Crash

    target = {"write": "safetensors.torch.save_file", "fsync": "os.fsync", "replace": "os.replace"}[at]
    with monkeypatch.context() as patched:
        patched.setattr(target, stopped)
        with pytest.raises(Crash):
            belay.save_average(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    belay.save_average(path)
    assert path.read_bytes() != old


def test_file_and_folder_are_on_the_disk_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is: the file's contents, its name, the folder that has the name."""
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        sync(handle)

    def replaced(source: Any, to: Any) -> None:
        assert Path(source).parent == Path(to).parent == tmp_path  # a rename crosses no disks
        calls.append("name")
        replace(source, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    _, _, belay = trained()
    belay.save_average(tmp_path / "average")
    assert calls == ["file", "name", "folder"]
    assert same(load_file(tmp_path / "average"), dict(sorted(belay.average_state_dict().items())))


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a folder": (lambda folder: folder, IsADirectoryError, "is a folder; give the name of a file in it"),
    "a folder that is not there": (lambda folder: f"{folder}/new/", IsADirectoryError, "is a folder; give the name"),
    "a link to a folder": (lambda folder: linked(folder / "link", folder), IsADirectoryError, "is a folder"),
    "no folder": (lambda folder: folder / "none" / "a", FileNotFoundError, "there is no folder '.*none'; make it"),
    "a file as a folder": (lambda folder: folder / "old" / "a", FileNotFoundError, "there is no folder '.*old'; make"),
    "a link to nowhere": (
        lambda folder: linked(folder / "link", folder / "none" / "a"),
        FileNotFoundError,
        "there is no folder '.*none'; make it first",
    ),
    "a circle of links": (
        lambda folder: linked(folder / "link", linked(folder / "other", folder / "link")),
        OSError,
        "leads back to itself; remove it",
    ),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe") or folder / "pipe", OSError, "is not a file but a device, a"),
    "no name": (lambda folder: "", IsADirectoryError, "path='' is a folder"),
    **{
        f"a name in {ending}": (
            lambda folder, ending=ending: folder / f"average{ending}",
            ValueError,
            r"path='.*average\.\w+' has the name of a file of torch\.save.* give a name that ends in \.safetensors",
        )
        for ending in (".pt", ".pth", ".bin", ".ckpt", ".PT")
    },
}


def linked(link: Path, to: Path) -> Path:
    link.symlink_to(to)
    return link


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_path_where_no_file_can_be_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    _, _, belay = trained()
    (tmp_path / "old").write_text("old")
    path = make(tmp_path)
    there = sorted(tmp_path.iterdir())
    monkeypatch.setattr(tb.Belay, "_exported", lambda *_, **__: pytest.fail("the average was copied"))
    with pytest.raises(error, match=message):
        belay.save_average(path)
    assert sorted(tmp_path.iterdir()) == there
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "to no file yet"])
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, exists: bool) -> None:
    _, _, belay = trained()
    (tmp_path / "store").mkdir()
    target = tmp_path / "store" / "run1"
    if exists:
        target.write_text("old")
    second = linked(tmp_path / "latest", Path("store/run1"))
    link = linked(tmp_path / "link", second)
    belay.save_average(link)
    assert link.is_symlink()
    assert second.is_symlink()
    assert not target.is_symlink()
    assert same(load_file(target), dict(sorted(belay.average_state_dict().items())))
    assert list((tmp_path / "store").iterdir()) == [target]


def test_a_file_that_was_never_written_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, belay = trained()
    (tmp_path / "average").write_text("old")
    monkeypatch.setattr("safetensors.torch.save_file", lambda *_: None)
    with pytest.raises(FileNotFoundError):
        belay.save_average(tmp_path / "average")
    assert (tmp_path / "average").read_text() == "old"
    assert list(tmp_path.iterdir()) == [tmp_path / "average"]


def test_others_may_read_the_file(tmp_path: Path) -> None:
    """The file has the usual rights, not those of a temporary file, which only its owner may read."""
    _, _, belay = trained()
    belay.save_average(tmp_path / "average")
    (tmp_path / "usual").touch()
    assert (tmp_path / "average").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_extra_state_is_refused_with_the_cure_and_nothing_is_written(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            pass

    model = nn.Sequential(Counting(3, 1))
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    with pytest.raises(ValueError, match=r"'0._extra_state' .* is int.* torch.save\(belay.average_state_dict"):
        belay.save_average(tmp_path / "average")
    assert not list(tmp_path.iterdir())


def test_what_the_format_cannot_hold_is_refused_with_the_cure(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex128))])
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    with pytest.raises(ValueError, match=r"complex128.*torch.save\(belay.average_state_dict"):
        belay.save_average(tmp_path / "average")
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_cure_is_named_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, belay = trained()
    before = snapshot(model, belay)
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install safetensors.*torch.save\(belay.average_state_dict"):
        belay.save_average(tmp_path / "average")
    assert not list(tmp_path.iterdir())
    assert same(snapshot(model, belay), before)


def test_an_unknown_average_is_refused(tmp_path: Path) -> None:
    _, _, belay = trained()
    with pytest.raises(ValueError, match="name='long' is no average"):
        belay.save_average(tmp_path / "average", "long")


# In another dtype ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, "average", "short"], ids=["outside", "inside", "inside another"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
def test_an_average_is_saved_in_any_dtype_and_not_rounded_to_the_models_before(
    tmp_path: Path, dtype: torch.dtype, model: torch.dtype, inside: str | None
) -> None:
    _, _, belay = trained(model=with_batchnorm().to(model), spectators={"short": tb.Spring.ema(decay=0.5)})
    kept = belay.state_dict()["averages"]["average"]["weights"]
    statistics = {name: t for name, t in belay.average_state_dict().items() if name not in kept}
    with nullcontext() if inside is None else belay.averaged(inside):
        belay.save_average(tmp_path / "average", dtype=dtype)
    found = load_file(tmp_path / "average")
    expected = {name: t.to(dtype) for name, t in kept.items()}
    expected |= {name: t.to(dtype) if t.is_floating_point() else t for name, t in statistics.items()}
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("inside", [None, "average", "the readout", "short"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
def test_so_is_a_readout(tmp_path: Path, dtype: torch.dtype | None, model: torch.dtype, inside: str | None) -> None:
    net, _, belay = trained(model=mlp(model), spectators={"short": tb.Spring.ema(decay=0.5)})
    kept = belay.state_dict()["averages"]["average"]["weights"]
    expected = {name: 0.25 * p.detach().double() + 0.75 * kept[name].double() for name, p in net.named_parameters()}
    readout = tb.readouts.blend(0.75)
    blocks = {"the readout": {"readout": readout}, "short": {"name": "short"}, "average": {}}
    with nullcontext() if inside is None else belay.averaged(**blocks[inside]):
        belay.save_average(tmp_path / "average", readout=readout, dtype=dtype)
    found = load_file(tmp_path / "average")
    assert {t.dtype for t in found.values()} == {model if dtype is None else dtype}
    rough = model == torch.bfloat16 and dtype is None
    for name, t in expected.items():
        torch.testing.assert_close(found[name].double(), t, rtol=1e-2 if rough else 1e-6, atol=1e-7)


def test_averaged_buffers_are_not_rounded_before_either(tmp_path: Path) -> None:
    _, _, belay = trained(model=with_batchnorm().to(torch.bfloat16), buffers="average")
    belay.save_average(tmp_path / "average", dtype=torch.float32)
    kept = belay.state_dict()["averages"]["average"]["buffers"]["1.running_mean"]
    assert kept.dtype == torch.float32
    assert not torch.equal(kept, kept.bfloat16().float())
    assert torch.equal(load_file(tmp_path / "average")["1.running_mean"], kept)


def test_tied_weights_of_another_dtype_stay_equal_and_complex_ones_complex(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": torch.randn(3), "z": torch.randn(3, dtype=torch.complex128)})
    model["b"] = model["a"]
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    belay.save_average(tmp_path / "average", dtype=torch.float32)
    found = load_file(tmp_path / "average")
    assert found["z"].dtype == torch.complex64
    assert torch.equal(found["a"], found["b"])


@pytest.mark.parametrize("dtype", [torch.int64, "float32", torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_hold_an_average_is_refused(tmp_path: Path, dtype: Any) -> None:
    _, _, belay = trained()
    with pytest.raises(ValueError, match=r"dtype=.* cannot hold an average; use one of torch\.float32"):
        belay.save_average(tmp_path / "average", dtype=dtype)
    assert not list(tmp_path.iterdir())


# The model's own weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_weights_are_at_hand_inside_the_block_too(dtype: torch.dtype, buffers: Any) -> None:
    model, optimizer, belay = trained(model=with_batchnorm().to(dtype), buffers=buffers, spectators={"short": EMA})
    own = values(model)
    assert same(dict(belay.model_state_dict()), own)
    for name in ("average", "short"):
        with belay.averaged(name):
            assert not torch.equal(model.state_dict()["0.weight"], own["0.weight"])
            assert same(dict(belay.model_state_dict()), own)
    kept = belay.model_state_dict()
    assert kept._metadata == model.state_dict()._metadata
    train(model, optimizer, 1)
    assert same(dict(kept), own)  # copies
    assert same(dict(belay.model_state_dict(full=True)), values(model))


def test_they_are_the_models_own_inside_the_block_of_another_belay_and_after_detach() -> None:
    model, optimizer, belay = trained()
    other = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.5))
    train(model, optimizer, 2)
    own = values(model)
    with other.averaged():
        assert same(dict(belay.model_state_dict()), own)
        belay.detach()
        assert same(dict(belay.model_state_dict()), own)


def test_they_have_clean_names_and_load_into_a_plain_model() -> None:
    model = torch.compile(with_batchnorm(), backend="eager")
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    with torch.inference_mode(), belay.averaged():
        found = belay.model_state_dict()
    plain = with_batchnorm(seed=1)
    plain.load_state_dict(found, strict=True)
    assert same(values(plain), values(model._orig_mod))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_export_of_one_process_is_the_export_on_the_host(dtype: torch.dtype) -> None:
    _, _, belay = trained(model=mlp(dtype))
    full = belay.average_state_dict(full=True)
    assert same(dict(full), dict(belay.average_state_dict()))
    assert all(t.dtype == dtype and t.device.type == "cpu" for t in full.values())
    assert full._metadata == belay.average_state_dict()._metadata

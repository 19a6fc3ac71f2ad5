"""Merged checkpoints: their numbers, their layout, what is carried along, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchbelay as tb
from helpers.checkpoints import SAVE, State, load, same_bits, save_safetensors, save_sharded, save_torch, states
from torchbelay.snapshots import merge, merger
from torchbelay.snapshots.merger import Merge

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:entries beside the weights:torchbelay.BelayWarning"),
]


def exact(made: Sequence[State], weights: Sequence[float], name: str) -> torch.Tensor:
    return sum(weight * state[name].double() for weight, state in zip(weights, made, strict=True))


def check(found: State, made: Sequence[State], weights: Sequence[float]) -> None:
    """Compare a merge with the mean in float64; integers are those of the last."""
    assert found.keys() == made[-1].keys()
    for name, like in made[-1].items():
        assert (found[name].dtype, found[name].shape) == (like.dtype, like.shape)
        if like.is_floating_point():
            sums = torch.finfo(torch.float64 if like.dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(
                found[name].double(),
                exact(made, weights, name),
                rtol=0.51 * torch.finfo(like.dtype).eps,  # rounded once
                atol=16 * sums.eps,
            )
        else:
            assert torch.equal(found[name], like)


# Numbers and layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_every_layout_merges_into_itself(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    made = states(3, dtype)
    paths = [SAVE[layout](tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    out = tmp_path / f"out{paths[-1].suffix}"
    merged = merge(paths, out, "cosine")
    check(load(out), made, merged.weights)
    assert merged.weights == tb.snapshots.merge_weights("cosine", 3)
    assert merged.bytes_written == sum(t.numel() * t.element_size() for t in made[-1].values())


@pytest.mark.parametrize("last", SAVE)
def test_layouts_and_shards_may_differ_and_the_last_one_counts(tmp_path: Path, last: str) -> None:
    made = states(3)
    paths = [save_torch(tmp_path / "a", made[0]), save_sharded(tmp_path / "b", made[1], 5)]
    paths.append(SAVE[last](tmp_path / "c", made[2]))
    out = tmp_path / f"out{paths[-1].suffix}"
    merge(paths, out, [0.2, 0.3, 0.5])
    check(load(out), made, [0.2, 0.3, 0.5])
    if out.is_dir():
        assert sorted(os.listdir(out)) == sorted(os.listdir(paths[-1]))


@pytest.mark.parametrize("layout", SAVE)
def test_equal_checkpoints_merge_into_the_same_bits(tmp_path: Path, layout: str) -> None:
    (state,) = states(1, torch.bfloat16)
    state["a.bias"][0] = -0.0
    paths = [SAVE[layout](tmp_path / f"in{k}", state) for k in range(3)]
    merge(paths, out := tmp_path / f"out{paths[-1].suffix}", "1-sqrt")
    found = load(out)
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("layout", ["safetensors", "torch"])
def test_tensors_larger_than_a_part_and_smaller_ones_are_whole(tmp_path: Path, monkeypatch, layout: str) -> None:
    monkeypatch.setattr(merger, "_PART", 16)
    made = [{"w": torch.randn(11, 13), "v": torch.randn(5)} for _ in range(4)]
    paths = [SAVE[layout](tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    seen: list[tuple[int, int]] = []
    merge(paths, out := tmp_path / f"out{paths[-1].suffix}", threads=3, progress=lambda *call: seen.append(call))
    check(load(out), made, [0.25] * 4)
    total = 4 * 4 * (11 * 13 + 5)
    assert seen[-1] == (total, total)
    assert all(done <= total for done, total in seen)


def test_sums_are_float32_or_float64(tmp_path: Path) -> None:
    made = [{"w": torch.full((1,), value)} for value in (2.0**26, 1.0, -(2.0**26))]
    paths = [save_safetensors(tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    found = {}
    for precision in ("float32", "float64"):
        merge(paths, tmp_path / f"{precision}.safetensors", [0.375, 0.25, 0.375], precision=precision)
        found[precision] = load_file(tmp_path / f"{precision}.safetensors")["w"].item()
    assert found == {"float32": 0, "float64": 0.25}  # 2²⁶ + 1 is none of the numbers of float32


def test_a_mean_in_float32_of_many_16_bit_checkpoints_is_rounded_once(tmp_path: Path) -> None:
    made = [{"w": torch.full((1,), 1 + k / 128, dtype=torch.bfloat16)} for k in range(64)]
    paths = [save_safetensors(tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    merge(paths, tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["w"] == torch.tensor(1 + 31.5 / 128, dtype=torch.bfloat16)


def test_a_tied_weight_that_some_leave_out_is_merged(tmp_path: Path) -> None:
    made = []
    for number in range(3):
        embedding = torch.randn(4, 3)
        made.append({"embed": embedding, "head": embedding.clone()})
        left = {"embed": embedding} if number == 1 else made[-1]
        save_safetensors(tmp_path / f"in{number}", left)
    with pytest.warns(tb.BelayWarning, match="'head' is tied to 'embed' in some checkpoints"):
        merge([tmp_path / f"in{k}.safetensors" for k in range(3)], tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    check(found, made, [1 / 3] * 3)
    assert torch.equal(found["embed"], found["head"])


def test_tied_weights_of_torch_files_stay_tied(tmp_path: Path) -> None:
    for number in range(2):
        shared = torch.randn(300, 300)
        torch.save({"a": shared, "b": shared}, tmp_path / f"{number}.pt")
    merge([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert (tmp_path / "out.pt").stat().st_size < 1.1 * 300 * 300 * 4


def test_weights_that_are_tied_in_the_last_checkpoint_only_are_taken_apart(tmp_path: Path) -> None:
    made = [{"a": torch.zeros(3), "b": torch.ones(3)}, dict.fromkeys("ab", torch.full((3,), 2.0))]
    paths = [save_torch(tmp_path / str(k), state) for k, state in enumerate(made)]
    with pytest.warns(tb.BelayWarning, match="a and b are tied in .*; in the merge they are not tied"):
        merge(paths, tmp_path / "out.pt")
    check(torch.load(tmp_path / "out.pt"), made, [0.5, 0.5])


def test_frozen_weights_are_read_and_written_as_they_are(tmp_path: Path) -> None:
    frozen = torch.randn(1000)
    for number in range(3):
        save_safetensors(tmp_path / f"in{number}", {"frozen": frozen, "w": torch.full((2,), float(number))})
    merge([tmp_path / f"in{k}.safetensors" for k in range(3)], tmp_path / "out.safetensors", "ema:0.3")
    found = load_file(tmp_path / "out.safetensors")
    assert same_bits(found["frozen"], frozen)
    assert found["w"].tolist() == pytest.approx([0.3 * 0.7 + 2 * 0.7] * 2)


# What is carried along ------------------------------------------------------------------------------------------------


def test_files_beside_the_weights_come_from_the_last_checkpoint(tmp_path: Path) -> None:
    paths = [save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    for number, path in enumerate(paths):
        (path / "tokenizer.json").write_text(f"tokens {number}")
        (path / "optimizer.pt").write_bytes(b"moments")
        (path / ".hidden").write_text("")
    (paths[0] / "only-first.txt").write_text("")
    with pytest.warns(tb.BelayWarning, match=r"not carried along from .*in1: optimizer\.pt"):
        merge(paths, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokens 1"
    assert {*os.listdir(tmp_path / "out")} == {*os.listdir(paths[1])} - {"optimizer.pt", ".hidden"}


def test_the_metadata_say_what_was_merged_and_keep_what_they_said(tmp_path: Path) -> None:
    paths = [save_safetensors(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    merge(paths, tmp_path / "out.safetensors", [0.25, 0.75])
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    about = {"checkpoints": ["in0.safetensors", "in1.safetensors"], "weights": [0.25, 0.75], "version": tb.__version__}
    assert json.loads(metadata["torchbelay_merge"]) == about


def test_entries_beside_the_weights_come_from_the_last_checkpoint(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"model": {"w": torch.full((2,), float(number))}, "step": number}, tmp_path / f"{number}.pt")
    with pytest.warns(tb.BelayWarning, match=r"entries beside the weights are those of .*1\.pt: step"):
        merge([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert (found["model"]["w"].tolist(), found["step"]) == ([0.5, 0.5], 1)


# Notes ----------------------------------------------------------------------------------------------------------------


def notes(paths: Sequence[Path], weights: object = "uniform") -> list[str]:
    with Merge(paths, weights) as prepared:
        return prepared.notes


def test_what_is_special_is_said_before_the_work(tmp_path: Path) -> None:
    paths = [save_safetensors(tmp_path / f"in-{k}", state) for k, state in zip((1, 9, 10), states(3), strict=True)]
    assert notes(paths) == []
    assert notes(paths[:1]) == [f"{paths[0]} is the only checkpoint: the merge is a copy"]
    assert notes([paths[0], paths[0]]) == ["a checkpoint is given twice; its weights add up"]
    assert notes(paths[:2], [1, 0]) == [f"{paths[1]}: the weight is 0"]
    assert notes(paths[:2], [2, -1]) == ["some weights are negative: the merge is not between the checkpoints"]
    shuffled = [paths[0], paths[2], paths[1]]
    assert notes(shuffled, "linear") == []
    (note,) = notes(shuffled, "cosine")
    order = "in-1.safetensors, in-10.safetensors, in-9.safetensors"
    assert note == f"the checkpoints are not in the order of their numbers: {order}"


def test_a_checkpoint_of_weight_0_is_not_read(tmp_path: Path) -> None:
    made = states(3)
    made[1]["a.weight"][0, 0] = torch.nan
    made[2]["a.bias"][0] = torch.nan
    paths = [save_safetensors(tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    with pytest.warns(tb.BelayWarning, match="the weight is 0"):
        merged = merge(paths, tmp_path / "out.safetensors", [1, 0, 0])
    found = load_file(tmp_path / "out.safetensors")
    assert all(same_bits(found[name], made[0][name]) for name in found)
    assert merged.bytes_read == sum(t.numel() * t.element_size() for t in made[0].values())


def test_a_single_checkpoint_is_copied(tmp_path: Path) -> None:
    (state,) = states(1)
    path = save_sharded(tmp_path / "in", state)
    with pytest.warns(tb.BelayWarning, match="is the only checkpoint"):
        merge([path], tmp_path / "out")
    found = load(tmp_path / "out")
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())


# Errors change nothing ------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_is_found_while_streaming_and_nothing_is_written(tmp_path: Path, layout: str, bad: float) -> None:
    made = states(3)
    made[1]["a.weight"][2, 3] = bad
    paths = [SAVE[layout](tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    before = everything(tmp_path)
    with pytest.raises(
        ValueError, match=r"in1.*: 'a.weight' holds NaN or infinity \(values: 1, the first is number 17\)"
    ):
        merge(paths, tmp_path / f"out{paths[-1].suffix}")
    assert everything(tmp_path) == before
    assert {item.name for item in tmp_path.iterdir()} == {path.name for path in paths}


def wrong(folder: Path, case: str) -> tuple[dict[str, object], str]:
    """Return the arguments of a call that is refused, and the message."""
    paths = [save_sharded(folder / f"in{k}", state) for k, state in enumerate(states(2))]
    good: dict[str, object] = {"paths": paths, "out": folder / "out"}
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    (folder / "run").mkdir()
    shutil.copytree(paths[0], folder / "run", dirs_exist_ok=True)
    (folder / "run" / "checkpoint-3").mkdir()
    (folder / "run" / "notes.txt").write_text("mine")
    (folder / "run" / "optimizer.pt").write_text("of a run that is to go on")
    (folder / "file.safetensors").write_text("mine")
    file = save_safetensors(folder / "one", states(1)[0])
    torch_file = folder / "one.bin"
    torch.save(states(1)[0], torch_file)
    cases = {
        "none": ({"paths": []}, "paths=[] is not a list of checkpoints"),
        "text": ({"paths": str(paths[0])}, "is not a list of checkpoints"),
        "missing": ({"paths": [folder / "gone"]}, "gone does not exist; give a file or folder of weights"),
        "weights": ({"weights": "0.5,0.6"}, "weights='0.5,0.6' add up to 1.1 instead of 1"),
        "precision": ({"precision": "float16"}, "precision='float16' is unknown; choose one of"),
        "threads": ({"threads": 0}, "threads=0 is too small"),
        "exists": ({"out": folder / "full"}, "exists; give another name, or overwrite=True (--overwrite)"),
        "input": ({"out": paths[0], "overwrite": True}, "is or holds the checkpoint"),
        "around": ({"out": folder, "overwrite": True}, "is or holds the checkpoint"),
        "not weights": (
            {"out": folder / "full", "overwrite": True},
            "holds files and no weights, and is not overwritten",
        ),
        "strangers": (
            {"out": folder / "run", "overwrite": True},
            "also holds 'checkpoint-3', 'notes.txt', 'optimizer.pt', which would be lost; move",
        ),
        "file": (
            {"out": folder / "file.safetensors", "overwrite": True},
            "is a file, and the last checkpoint is a folder",
        ),
        "parent": ({"out": folder / "no" / "out"}, "there is no folder"),
        "folder": (
            {"paths": [file], "out": folder / "full", "overwrite": True},
            "is a folder; give the name of a file",
        ),
        "file parent": (
            {"paths": [file], "out": folder / "no" / "x"},
            f"out={str(folder / 'no' / 'x')!r}: there is no",
        ),
        "torch's name": ({"paths": [file], "out": folder / "x.pt"}, "x.pt' would be a safetensors file, as"),
        "other name": ({"paths": [torch_file], "out": folder / "x.safetensors"}, "would be a file of torch.save, as"),
    }
    changes, message = cases[case]
    return good | changes, message


CASES = (
    *("none", "text", "missing", "weights", "precision", "threads", "exists", "input", "around", "not weights"),
    *("strangers", "file", "parent", "folder", "file parent", "torch's name", "other name"),
)


@pytest.mark.filterwarnings("ignore:.*is the only checkpoint:torchbelay.BelayWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    arguments, message = wrong(tmp_path, case)
    before = everything(tmp_path)
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        merge(**arguments)
    assert everything(tmp_path) == before


def test_too_little_room_is_said_before_the_work(tmp_path: Path, monkeypatch) -> None:
    needed = 1_000_000
    for layout in ("safetensors", "torch", "dcp"):
        paths = [SAVE[layout](tmp_path / f"{layout}{k}", {"w": torch.ones(250_000)}) for k in range(2)]
        out = tmp_path / f"out-{layout}{paths[0].suffix}"
        free = needed - 1
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, free))  # noqa: B023
        with pytest.raises(
            OSError, match=rf"out=.* needs {needed // 10**6}\.0 MB, and the disk has .*B left; make room"
        ):
            merge(paths, out)
        assert not out.exists()
        free = needed
        merge(paths, out)


def test_overwriting_replaces_a_checkpoint(tmp_path: Path) -> None:
    paths = [save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    merge(paths, tmp_path / "out")
    merge(paths, tmp_path / "out", [0.1, 0.9], overwrite=True)
    check(load(tmp_path / "out"), [load(path) for path in paths], [0.1, 0.9])
    file = save_safetensors(tmp_path / "x", states(1)[0])
    other = save_safetensors(tmp_path / "y", states(2)[1])
    merge([file, other], tmp_path / "z.safetensors")
    merge([file, other], tmp_path / "z.safetensors", [0.25, 0.75], overwrite=True)
    check(load(tmp_path / "z.safetensors"), [load(file), load(other)], [0.25, 0.75])


@pytest.mark.parametrize("new", ["sharded", "bin", "dcp"])
@pytest.mark.parametrize("old", ["sharded", "bin", "dcp"])
def test_overwriting_leaves_nothing_of_a_checkpoint_of_another_layout(tmp_path: Path, old: str, new: str) -> None:
    made = states(2)
    SAVE[old](tmp_path / "out", made[0])
    paths = [SAVE[new](tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    for path in paths:
        (path / "config.json").write_text("{}")
    merge(paths, tmp_path / "out", overwrite=True)
    assert everything(tmp_path / "out").keys() == everything(paths[1]).keys()
    check(load(tmp_path / "out"), made, [0.5, 0.5])


def test_shards_whose_index_is_damaged_are_not_lost(tmp_path: Path) -> None:
    paths = [save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    SAVE["bin"](tmp_path / "out", states(1)[0])
    (tmp_path / "out" / "pytorch_model.bin.index.json").write_text("{")
    before = everything(tmp_path)
    with pytest.raises(FileExistsError, match=r"also holds 'pytorch_model-00001-of-00002.bin', .* would be lost"):
        merge(paths, tmp_path / "out", overwrite=True)
    assert everything(tmp_path) == before


def test_a_file_beside_a_model_of_a_pipeline_is_not_lost(tmp_path: Path) -> None:
    made = states(3)
    paths = [tmp_path / name for name in ("one", "two", "out")]
    for path, state in zip(paths, made, strict=True):
        path.mkdir()
        save_sharded(path / "unet", state)
        (path / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DModel"]}')
    merge(paths[:2], paths[2], overwrite=True)
    check(load(paths[2] / "unet"), made[:2], [0.5, 0.5])
    (paths[2] / "unet" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"also holds 'unet/notes.txt', which would be lost"):
        merge(paths[:2], paths[2], overwrite=True)
    assert (paths[2] / "unet" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("layout", "there", "overwrite", "said"),
    [
        ("sharded", True, True, "also holds 'notes.txt', which would be lost"),
        ("sharded", False, True, "holds files and no weights"),
        ("sharded", False, False, "exists; give another name"),
        ("safetensors", False, False, "exists; give another name"),
    ],
)
def test_what_is_put_there_while_a_merge_runs_is_not_lost(
    tmp_path: Path, layout: str, there: bool, overwrite: bool, said: str
) -> None:
    paths = [SAVE[layout](tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    out = tmp_path / f"out{paths[-1].suffix}"
    if there:
        merge(paths, out)
    before, mine = everything(tmp_path), out if out.suffix else out / "notes.txt"

    def put(done: int, total: int) -> None:
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")

    with pytest.raises(FileExistsError, match=said):
        merge(paths, out, "cosine", overwrite=overwrite, progress=put)
    assert everything(tmp_path) == before | {str(mine.relative_to(tmp_path)): b"mine"}


def test_an_empty_folder_may_be_there_already(tmp_path: Path) -> None:
    made = states(2)
    paths = (save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(made))
    (tmp_path / "out").mkdir()
    merge(paths, tmp_path / "out")
    check(load(tmp_path / "out"), made, [0.5, 0.5])


def test_an_interrupt_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch) -> None:
    paths = [save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    merge(paths, tmp_path / "out")
    before = everything(tmp_path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(paths, tmp_path / "out", "cosine", overwrite=True, progress=interrupt)
    assert everything(tmp_path) == before
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]


# Hostile surroundings -------------------------------------------------------------------------------------------------


def test_defaults_and_modes_of_torch_do_not_matter(tmp_path: Path) -> None:
    made = states(2)
    for layout in SAVE:
        paths = [SAVE[layout](tmp_path / f"{layout}{k}", state) for k, state in enumerate(made)]
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        try:
            with torch.inference_mode():
                merge(paths, out := tmp_path / f"out-{layout}{paths[0].suffix}")
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        check(load(out), made, [0.5, 0.5])


def test_the_number_of_torch_threads_is_what_it_was(tmp_path: Path) -> None:
    paths = [save_safetensors(tmp_path / f"in{k}", state) for k, state in enumerate(states(2))]
    torch.set_num_threads(2)
    try:
        merge(paths, tmp_path / "out.safetensors")
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (torch.get_num_threads(), seen) == (2, [2])
    finally:
        torch.set_num_threads(1)


def test_two_merges_at_a_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    made = states(4)
    paths = [save_sharded(tmp_path / f"in{k}", state) for k, state in enumerate(made)]
    merges = [
        threading.Thread(target=merge, args=(paths[:2], tmp_path / "one")),
        threading.Thread(target=merge, args=(paths[2:], tmp_path / "two")),
    ]
    for thread in merges:
        thread.start()
    for thread in merges:
        thread.join()
    check(load(tmp_path / "one"), made[:2], [0.5, 0.5])
    check(load(tmp_path / "two"), made[2:], [0.5, 0.5])


def test_a_model_of_empty_and_single_tensors_is_merged(tmp_path: Path) -> None:
    for number in range(2):
        save_file({"none": torch.empty(0), "scalar": torch.tensor(float(number))}, tmp_path / f"{number}.safetensors")
    merge([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert (found["none"].numel(), found["scalar"].item()) == (0, 0.5)


def test_complex_weights_keep_their_dtype(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.complex128):
        made = [{"w": torch.randn(9, dtype=dtype)} for _ in range(2)]
        paths = [save_torch(tmp_path / f"{k}-{dtype.itemsize}", state) for k, state in enumerate(made)]
        merge(paths, out := tmp_path / f"out-{dtype.itemsize}.pt")
        torch.testing.assert_close(torch.load(out)["w"], (made[0]["w"] + made[1]["w"]) / 2)


MEMORY = """
import resource, sys
from torchbelay.snapshots import merge

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

merge(["small0.safetensors", "small1.safetensors"], "small.safetensors")  # everything is imported and warm
before = peak()
merge(["0.safetensors", "1.safetensors", "2.safetensors"], "out.safetensors", threads=4)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows does not tell the peak")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    for number in range(3):
        save_file({"w": torch.full((30_000_000,), number + 1.0)}, tmp_path / f"{number}.safetensors")  # 120 MB
        save_file({"w": torch.full((2_000_000,), number + 1.0)}, tmp_path / f"small{number}.safetensors")
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40e6
    assert load_file(tmp_path / "out.safetensors")["w"].eq(2).all()

"""Folders of several models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchbelay.snapshots import merge, open_checkpoint
from torchbelay.snapshots.layouts.pipeline import parts


def pipeline(folder: Path, value: float) -> Path:
    """Write a folder like a pipeline of diffusers: two models, a tokenizer and a scheduler."""
    index = {"_class_name": "P", "unet": ["diffusers", "U"], "text": ["transformers", "T"], "tokenizer": ["t", "T"]}
    index |= {"scheduler": ["d", "S"], "absent": [None, None]}
    for part in ("unet", "text", "tokenizer", "scheduler", "logs"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps({"of": part}))
    (folder / "model_index.json").write_text(json.dumps(index))
    save_file({"w": torch.full((3,), value)}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    save_file({"w": torch.full((2,), -value)}, folder / "text" / "model.safetensors")
    (folder / "tokenizer" / "merges.txt").write_text("a b")
    return folder


def test_all_models_are_merged_and_everything_that_the_index_names_is_carried_along(tmp_path: Path) -> None:
    folders = [pipeline(tmp_path / str(value), float(value)) for value in (1, 4)]
    with open_checkpoint(folders[0]) as checkpoint:
        assert checkpoint.names == ("unet/w", "text/w")
        assert checkpoint.read("text/w").tolist() == [-1, -1]
    merge(folders, tmp_path / "out", [0.25, 0.75])
    assert load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")["w"].tolist() == [3.25] * 3
    assert load_file(tmp_path / "out" / "text" / "model.safetensors")["w"].tolist() == [-3.25] * 2
    carried = {str(file.relative_to(folders[1])) for file in folders[1].rglob("*") if file.is_file()} - {
        "logs/config.json"
    }
    assert {
        str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()
    } == carried


def test_models_in_torch_files_and_a_model_at_the_top_are_merged_too(tmp_path: Path) -> None:
    """Like a folder of sentence-transformers."""
    for value in (1.0, 3.0):
        folder = tmp_path / str(int(value))
        (folder / "2_Dense").mkdir(parents=True)
        (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]))
        shared = torch.full((2,), value)
        torch.save({"a": shared, "b": shared}, folder / "2_Dense" / "pytorch_model.bin")
        save_file({"w": torch.full((3,), value)}, folder / "model.safetensors")
    with open_checkpoint(tmp_path / "1") as checkpoint:
        assert checkpoint.tied == (("2_Dense/a", "2_Dense/b"),)
    merge([tmp_path / "1", tmp_path / "3"], tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [2.0] * 3
    dense = torch.load(tmp_path / "out" / "2_Dense" / "pytorch_model.bin")
    assert dense["a"].tolist() == [2.0] * 2
    assert dense["a"].data_ptr() == dense["b"].data_ptr()


@pytest.mark.parametrize("name", ["../elsewhere", "", "/", None, 3])
def test_an_index_leads_nowhere_else(tmp_path: Path, name: object) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "modules.json").write_text(json.dumps([{"path": name}]))
    assert parts(tmp_path / "a") == []

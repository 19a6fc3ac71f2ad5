"""Folders of torch.distributed.checkpoint."""

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchbelay.snapshots import open_checkpoint
from torchbelay.snapshots.layouts.dcp import nest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_weights_are_found_and_everything_else_is_kept(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 200), torch.nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "text": "é",
        "list": [1, {"a": 2}],
    }
    dcp.save(whole, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "b").mkdir()
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert {*checkpoint.names} == {*model.state_dict()}
        assert {*checkpoint.beside} == {"optimizer", "step", "text", "list"}
        assert torch.equal(checkpoint.read("1.weight"), model[1].weight)
        part = torch.empty(10)
        checkpoint.read_into("1.weight", 5, part)
        assert torch.equal(part, model[1].weight.flatten()[5:15])
        with checkpoint.output(tmp_path / "b", {}) as output:
            for name in checkpoint.names:
                output.write(name, checkpoint.read(name) * 2)
    dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    made = torch.load(tmp_path / "b.pt")
    assert all(torch.equal(made["model"][name], 2 * value) for name, value in model.state_dict().items())
    assert (made["step"], made["text"], made["list"]) == (7, "é", [1, {"a": 2}])
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")  # dict keys that are numbers come back as texts, here as there
    ours, theirs = torch.load(tmp_path / "a.pt")["optimizer"], made["optimizer"]
    assert theirs["param_groups"] == ours["param_groups"] == optimizer.state_dict()["param_groups"]
    assert theirs["state"].keys() == ours["state"].keys()
    assert all(torch.equal(theirs["state"][k]["exp_avg"], v["exp_avg"]) for k, v in ours["state"].items())


def test_a_folder_that_is_written_loads_into_a_model(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "step": 1}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "b").mkdir()
    with open_checkpoint(tmp_path / "a") as checkpoint, checkpoint.output(tmp_path / "b", {}) as output:
        assert (checkpoint.names, checkpoint.beside) == (("w",), ["step"])
        output.write("w", torch.full((3,), 4.0))
    state: dict[str, Any] = {"w": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert (state["w"].tolist(), state["step"]) == ([4.0] * 3, 1)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.randn(30, 7),
        "turned": torch.randn(4, 6).t(),
        "half": torch.randn(11).to(torch.bfloat16),
        "view": torch.randn(9)[2:5],
        "one": torch.randn(()),
        "none": torch.empty(0, 3),
        "complex": torch.randn(5, dtype=torch.complex64),
    }


def test_tensors_in_one_piece_are_read_and_written_in_parts_at_their_places(tmp_path: Path) -> None:
    state = tensors()
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "b").mkdir()
    with open_checkpoint(tmp_path / "a") as checkpoint, checkpoint.output(tmp_path / "b", {}) as output:
        assert {"rows", "half", "one", "complex"} <= checkpoint.places.keys()
        assert all(torch.equal(checkpoint.read(name), value) for name, value in state.items())
        for name, value in state.items():
            for start in range(0, value.numel(), 4):
                part = torch.empty(min(4, value.numel() - start), dtype=value.dtype)
                checkpoint.read_into(name, start, part)
                output.write(name, part * 2, start)
    made = {name: torch.zeros_like(value).contiguous() for name, value in state.items()}
    dcp.load(made, checkpoint_id=tmp_path / "b", no_dist=True)
    assert all(torch.equal(made[name], 2 * value) for name, value in state.items())
    with open_checkpoint(tmp_path / "b") as written:
        assert all(place is not None for place in written.places.values())
        for place in written.places.values():
            begin, size = place.part
            data = place.path.read_bytes()[begin : begin + size]
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert archive.testzip() is None


def test_a_folder_that_is_not_written_whole_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "v": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "b").mkdir()
    with open_checkpoint(tmp_path / "a") as checkpoint:
        output = checkpoint.output(tmp_path / "b", {})
        output.write("w", torch.ones(3))
        output.write("v", torch.ones(1), 1)
        with pytest.raises(ValueError, match="not written whole: v"):
            output.finish()
        output.close()


@pytest.mark.parametrize("damage", ["data cut", "data gone", "metadata cut", "metadata empty"])
def test_a_folder_that_a_killed_process_left_is_refused_with_the_cure(tmp_path: Path, damage: str) -> None:
    dcp.save({"w": torch.ones(500), "b": torch.ones(5)}, checkpoint_id=tmp_path / "run")
    (data,) = (tmp_path / "run").glob("*.distcp")
    about = tmp_path / "run" / ".metadata"
    if damage == "data gone":
        data.unlink()
    else:
        file = data if damage == "data cut" else about
        file.write_bytes(file.read_bytes()[: 0 if damage == "metadata empty" else 60])
    said = {
        "data cut": f"{data.name} has 60 bytes instead of",
        "data gone": f"{data.name}, which .metadata names, does not exist",
    }
    expected = said.get(damage, r"\.metadata cannot be read") + ".*copy the folder again"
    with pytest.raises(ValueError, match=expected):
        open_checkpoint(tmp_path / "run")


def test_reading_warns_of_nothing(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}, "step": 1}, checkpoint_id=tmp_path / "a", no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_checkpoint(tmp_path / "a") as checkpoint:
            checkpoint.read("w")


def test_paths_become_dicts_and_lists() -> None:
    flat = {"x": 1, "y": 2, "z": 3, "t": 4}
    paths = {"x": ("a", 1, "b"), "y": ("a", 0, "b"), "z": ("c", "0"), "t": ("d", 5)}
    assert nest(flat, paths) == {"a": [{"b": 2}, {"b": 1}], "c": {"0": 3}, "d": {5: 4}}

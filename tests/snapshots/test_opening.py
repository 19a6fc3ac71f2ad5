"""What a path leads to: which files of a folder are its weights, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import SAVE, same_bits, save_sharded, states
from torchbelay.snapshots import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("layout", SAVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layout_gives_names_shapes_dtypes_and_tensors(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    (state,) = states(1, dtype)
    with open_checkpoint(SAVE[layout](tmp_path / "a", state)) as checkpoint:
        assert {*checkpoint.names} == {*state}
        assert checkpoint.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        for name, tensor in state.items():
            assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tensor.shape, tensor.dtype)
            assert same_bits(checkpoint.read(name), tensor)


def file_of(folder: Path, *names: str) -> None:
    for name in names:
        tensors = {"w": torch.full((1,), float(len(name)))}
        save_file(tensors, folder / name) if name.endswith("safetensors") else torch.save(tensors, folder / name)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "model.fp16.safetensors"], "model.safetensors"),
        (["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin"], "diffusion_pytorch_model.bin"),
        (["adapter_model.safetensors", "optimizer.pt", "training_args.bin"], "adapter_model.safetensors"),
        (["pytorch_model.bin", "optimizer.pt", "scheduler.pt"], "pytorch_model.bin"),
        (["ema.safetensors", "other.pt"], "ema.safetensors"),
        (["last.ckpt", "optimizer.bin"], "last.ckpt"),
    ],
)
def test_the_weights_of_a_folder_are_those_that_from_pretrained_takes(tmp_path: Path, names, chosen: str) -> None:
    file_of(tmp_path, *names)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("w").item() == len(chosen)


def test_companions_are_files_that_are_not_weights(tmp_path: Path) -> None:
    file_of(tmp_path, "model.safetensors", "optimizer.pt", "pytorch_model.bin")
    for name in ("config.json", "tokenizer.model", "README.md", ".gitattributes", "modeling_own.py", "model.onnx"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "runs").mkdir()
    with open_checkpoint(tmp_path) as checkpoint:
        assert [str(file) for file in checkpoint.companions] == [
            "README.md",
            "config.json",
            "modeling_own.py",
            "tokenizer.model",
        ]


def test_a_file_is_known_by_its_content_if_not_by_its_name(tmp_path: Path) -> None:
    file_of(tmp_path, "a.safetensors", "a.pt")
    (tmp_path / "a.safetensors").rename(tmp_path / "blob1")
    (tmp_path / "a.pt").rename(tmp_path / "blob2")
    for name, value in (("blob1", 13), ("blob2", 4)):
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert checkpoint.read("w").item() == value


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of the Hugging Face Hub is made of them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    file_of(tmp_path / "blobs", "x.safetensors")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/x.safetensors")
    with open_checkpoint(tmp_path / "snapshot") as checkpoint:
        assert checkpoint.names == ("w",)


def test_a_path_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give a file or folder of weights"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no weights but nothing; give a folder of save_pretrained"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no weights but config\.json; give"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is not a file of safetensors or torch\.save"):
        open_checkpoint(tmp_path / "config.json")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(
        ValueError, match=r"empty\.pt is not a file of safetensors or torch\.save, or only the beginning"
    ):
        open_checkpoint(tmp_path / "empty.pt")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is an index; give its folder"):
        open_checkpoint(tmp_path / "model.safetensors.index.json")


def test_a_folder_with_several_files_of_weights_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(ValueError, match=r"several files of weights \(a\.safetensors, b\.safetensors\); give one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not an index of shards"),
        ("{}", "is not an index of shards"),
        ("{", "is not an index of shards"),
        (
            '{"weight_map": {"a": "gone.safetensors"}}',
            r"gone\.safetensors, which model\.safetensors\.index\.json names",
        ),
        ('{"weight_map": {"a": "../b.safetensors"}}', r"names the shard '\.\./b\.safetensors', which is not in its"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_checkpoint(tmp_path)


def test_an_index_and_shards_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = save_sharded(tmp_path / "a", states(1)[0], 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["scale"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names 'ghost', which none of its shards holds; save the checkpoint again"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path, "one.safetensors", "two.safetensors")
    places = {"w": "one.safetensors", "v": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="'w' is in two of its files; remove the stale one"):
        open_checkpoint(tmp_path)

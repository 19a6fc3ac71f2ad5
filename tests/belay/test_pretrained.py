"""The average as a folder that `from_pretrained` loads; a small model of one's own, then the real libraries."""

import importlib.util
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import EMA, attached, mlp, same, snapshot, train, values


class Saving(nn.Sequential):
    """A model that writes itself as the libraries do: a config, and its own state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def save_pretrained(self, folder: Path, **how: Any) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(how))
        save_file(self.state_dict(), folder / "model.safetensors")


def trained(method: Any = EMA, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any, tb.Belay]:
    model, optimizer, belay = attached(method, model=Saving() if model is None else model, **options)
    train(model, optimizer, 3)
    return model, optimizer, belay


def in_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.cpu() for name, t in sorted(state.items())}


@pytest.mark.parametrize("inside", [None, "average", "short"], ids=str)
@pytest.mark.parametrize("name", ["average", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_folder_holds_the_average_and_nothing_has_changed(
    tmp_path: Path, name: str, inside: str | None, dtype: torch.dtype
) -> None:
    model, _, belay = trained(model=Saving().to(dtype), spectators={"short": tb.Spring.ema(decay=0.5)})
    before, expected = snapshot(model, belay), in_order(belay.average_state_dict(name))
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    if inside is None:
        belay.save_pretrained(tmp_path / "folder", name)
    else:
        with belay.averaged(inside):
            belay.save_pretrained(str(tmp_path / "folder"), name)
    assert same(in_order(load_file(tmp_path / "folder" / "model.safetensors")), expected)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "folder", "model.safetensors"]
    assert same(snapshot(model, belay), before)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors


@pytest.mark.parametrize("inside", [None, {}, {"readout": tb.readouts.blend(0.5)}], ids=str)
def test_a_readout_is_saved_too(tmp_path: Path, inside: dict[str, Any] | None) -> None:
    _, _, belay = trained()
    expected = in_order(belay.average_state_dict(readout=tb.readouts.blend(0.5)))
    assert not same(expected, in_order(belay.average_state_dict()))
    with nullcontext() if inside is None else belay.averaged(**inside):
        belay.save_pretrained(tmp_path / "folder", readout=tb.readouts.blend(0.5))
    assert same(in_order(load_file(tmp_path / "folder" / "model.safetensors")), expected)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "a compiled part": lambda model: model,
}


@pytest.mark.parametrize("how", WRAPPERS)
def test_wrappers_are_looked_through_also_around_parts(tmp_path: Path, how: str) -> None:
    inner = Saving()
    if how == "a compiled part":
        inner[0] = torch.compile(inner[0], backend="eager")
    model = WRAPPERS[how](inner)
    kinds = [type(module) for module in model.modules()]
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    belay.save_pretrained(tmp_path / "folder")
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert same(in_order(found), in_order(belay.average_state_dict()))
    Saving(seed=1).load_state_dict(found, strict=True)
    assert [type(module) for module in model.modules()] == kinds


def test_arguments_are_passed_on_and_other_files_stay(tmp_path: Path) -> None:
    _, _, belay = trained(buffers="average")
    (tmp_path / "README.md").write_text("my card")
    belay.save_pretrained(tmp_path, max_shard_size="2GB", variant=None)
    assert json.loads((tmp_path / "config.json").read_text()) == {"max_shard_size": "2GB", "variant": None}
    assert (tmp_path / "README.md").read_text() == "my card"


def test_before_start_after_detach_under_inference_mode_and_in_a_closure(tmp_path: Path) -> None:
    model, optimizer, belay = trained(start=4)
    belay.save_pretrained(tmp_path / "early")
    assert same(in_order(load_file(tmp_path / "early" / "model.safetensors")), in_order(values(model)))
    train(model, optimizer, 2)
    average = in_order(belay.average_state_dict())

    def closure() -> Tensor:
        belay.save_pretrained(tmp_path / "closure")
        return next(model.parameters()).sum()

    optimizer.step(closure)
    assert same(in_order(load_file(tmp_path / "closure" / "model.safetensors")), average)
    belay.detach()
    with torch.inference_mode():
        belay.save_pretrained(tmp_path / "late")
    assert same(in_order(load_file(tmp_path / "late" / "model.safetensors")), in_order(belay.average_state_dict()))
    train(model, optimizer, 1)  # no tensor of inference_mode is left behind


@pytest.mark.parametrize("exists", [True, False])
def test_a_save_that_fails_leaves_model_and_folder_as_they_were(tmp_path: Path, exists: bool) -> None:
    class Failing(Saving):
        def save_pretrained(self, folder: Path, **how: Any) -> None:
            super().save_pretrained(folder)
            raise KeyboardInterrupt

    model, _, belay = trained(model=Failing())
    before = snapshot(model, belay)
    if exists:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "config.json").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        belay.save_pretrained(tmp_path / "folder")
    assert same(snapshot(model, belay), before)
    there = [tmp_path / "folder", tmp_path / "folder" / "config.json"] if exists else []
    assert sorted(tmp_path.rglob("*")) == there
    assert not exists or (tmp_path / "folder" / "config.json").read_text() == "old"


def test_a_model_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    class Silent(Saving):
        def save_pretrained(self, folder: Path, **how: Any) -> None:
            pass

    _, _, belay = trained(model=Silent())
    with pytest.raises(OSError, match=r"Silent\.save_pretrained\(\) wrote nothing"):
        belay.save_pretrained(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_refused_with_the_cure(tmp_path: Path) -> None:
    _, _, plain = attached(EMA, model=mlp())
    with pytest.raises(TypeError, match=r"model=Sequential has no save_pretrained\(\).*save_average\(path\)"):
        plain.save_pretrained(tmp_path / "folder")
    model, _, belay = trained()
    with pytest.raises(ValueError, match="name='long' is no average"):
        belay.save_pretrained(tmp_path / "folder", "long")
    for name in ("push_to_hub", "state_dict", "is_main_process"):
        with pytest.raises(TypeError, match=f"{name}=1: .*leave it out"):
            belay.save_pretrained(tmp_path / "folder", **{name: 1})
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file; give the name of a folder"):
        belay.save_pretrained(tmp_path / "file")
    model.config = type("Config", (), {"distributed_config": object()})()
    with pytest.raises(ValueError, match=r"spread over ranks by Transformers itself.*inside averaged\(\)"):
        belay.save_pretrained(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# The libraries ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """The libraries warn about their own dependencies when they are imported and used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def language_model(seed: int = 0, *, tied: bool = True) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1, tie_word_embeddings=tied))


def learn_words(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        words = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(words, labels=words).loss.backward()
        optimizer.step()


def chance() -> list[Any]:
    """All states of random numbers."""
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


@pytest.mark.thorough
@needs("transformers")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_transformers_model(tmp_path: Path, tied: bool) -> None:
    model = language_model(tied=tied).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, EMA)
    learn_words(model, optimizer)
    before, random_numbers = snapshot(model, belay), chance()
    belay.save_pretrained(tmp_path)
    assert chance() == random_numbers
    assert same(snapshot(model, belay), before)
    assert {"config.json", "model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    loaded = type(model).from_pretrained(tmp_path)
    assert same(dict(loaded.state_dict()), dict(belay.average_state_dict()))
    words = torch.arange(5)[None]
    with belay.averaged(), torch.no_grad():
        assert torch.equal(loaded(words).logits, model(words).logits)
    for size, parts in (("1KB", True), ("1GB", False)):
        learn_words(model, optimizer, 1)
        belay.save_pretrained(tmp_path, max_shard_size=size)
        assert (tmp_path / "model.safetensors.index.json").exists() is parts
        assert (tmp_path / "model.safetensors").exists() is not parts
        again = type(model).from_pretrained(tmp_path)
        assert same(dict(again.state_dict()), dict(belay.average_state_dict()))


@pytest.mark.thorough
@needs("peft")
@pytest.mark.usefixtures("quiet")
def test_the_adapters_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(language_model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).eval()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    belay = tb.Belay(model, optimizer, EMA)
    learn_words(model, optimizer)
    (tmp_path / "README.md").write_text("---\ntags: []\n---\nwhat I wrote myself\n")
    before, random_numbers = snapshot(model, belay), chance()
    belay.save_pretrained(tmp_path)
    assert chance() == random_numbers
    assert same(snapshot(model, belay), before)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert "what I wrote myself" in (tmp_path / "README.md").read_text()
    loaded = PeftModel.from_pretrained(language_model(), tmp_path).eval()
    words = torch.arange(5)[None]
    with belay.averaged(), torch.no_grad():
        assert torch.equal(loaded(words).logits, model(words).logits)
        assert not torch.equal(loaded(words).logits, language_model().eval()(words).logits)


@pytest.mark.thorough
@needs("diffusers")
@pytest.mark.usefixtures("quiet")
def test_a_diffusers_model(tmp_path: Path) -> None:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (4,)}
    model: Any = UNet2DModel(
        sample_size=4,
        in_channels=1,
        out_channels=1,
        norm_num_groups=2,
        layers_per_block=1,
        add_attention=False,
        **blocks,
    ).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, EMA)
    x, t = torch.randn(2, 1, 4, 4), torch.tensor([1, 2])
    for _ in range(2):
        optimizer.zero_grad()
        model(x, t).sample.square().mean().backward()
        optimizer.step()
    before, random_numbers = snapshot(model, belay), chance()
    belay.save_pretrained(tmp_path)
    assert chance() == random_numbers
    assert same(snapshot(model, belay), before)
    loaded = UNet2DModel.from_pretrained(tmp_path)
    assert same(dict(loaded.state_dict()), dict(belay.average_state_dict()))
    with belay.averaged(), torch.no_grad():
        assert torch.equal(loaded(x, t).sample, model(x, t).sample)

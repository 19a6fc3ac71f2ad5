"""Merges of real models: what Transformers, diffusers and PEFT saved is merged, and they load it again."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.checkpoints import same_bits
from torchbelay.snapshots import merge, merge_weights

pytest.importorskip("transformers")
import transformers

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = torch.arange(12).view(2, 6)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=99, intermediate_size=48, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """A model whose head is tied to its embedding; Transformers leaves the head out of the file."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4))


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=99, intermediate_size=48, **SIZES)
    return transformers.BertForSequenceClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def save(make: Callable[[], Any], folder: Path, dtype: torch.dtype, shards: Sequence[str]) -> list[Any]:
    """Save a model per entry of `shards`, each with other weights, and return the models."""
    models = []
    for number, size in enumerate(shards):
        torch.manual_seed(number)
        model = make().to(dtype).eval()
        model.save_pretrained(folder / str(number), max_shard_size=size)
        models.append(model)
    return models


def check(
    merged: Any, models: Sequence[Any], weights: Sequence[float], computed: Callable[[Any], torch.Tensor]
) -> None:
    """Compare a merged model with the mean of the models in float64, by its state and by what it computes."""
    state = merged.state_dict()
    expected = {}
    for name, like in models[-1].state_dict().items():
        assert state[name].dtype == like.dtype
        expected[name] = like
        if like.is_floating_point():
            exact = sum(w * m.state_dict()[name].double() for w, m in zip(weights, models, strict=True))
            torch.testing.assert_close(
                state[name].double(), exact, rtol=0.51 * torch.finfo(like.dtype).eps, atol=1e-6, msg=name
            )
            expected[name] = exact.to(like.dtype)
        else:
            assert torch.equal(state[name], like)
    assert state.keys() == expected.keys()
    merged.eval()
    with torch.no_grad():
        found = computed(merged)
        models[-1].load_state_dict(expected)
        torch.testing.assert_close(
            found, computed(models[-1]), rtol=0.05, atol=0.02 if found.dtype != torch.float32 else 1e-5
        )


# Transformers --------------------------------------------------------------------------------------------------------

LANGUAGE = {"llama": llama, "gpt2": gpt2, "bert": bert}


@pytest.mark.parametrize(
    "shards", [("1GB",) * 3, ("20KB",) * 3, ("1GB", "40KB", "15KB"), ("15KB", "15KB", "1GB")], ids="-".join
)
@pytest.mark.parametrize("make", LANGUAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_language_model_loads_with_from_pretrained(
    tmp_path: Path, make: str, dtype: torch.dtype, shards: tuple[str, ...]
) -> None:
    models = save(LANGUAGE[make], tmp_path, dtype, shards)
    merge([tmp_path / str(number) for number in range(3)], tmp_path / "out", "cosine")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "2"))
    merged, info = type(models[0]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert merged.dtype == dtype
    check(merged, models, merge_weights("cosine", 3), lambda model: model(WORDS).logits)


def test_tied_weights_are_tied_after_loading(tmp_path: Path) -> None:
    save(gpt2, tmp_path, torch.float32, ["1GB"] * 2)
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    merged = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert merged.lm_head.weight is merged.transformer.wte.weight


def test_equal_models_merge_into_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    for number, size in enumerate(("1GB", "15KB", "30KB")):
        model.save_pretrained(tmp_path / str(number), max_shard_size=size)
    merge([tmp_path / str(number) for number in range(3)], tmp_path / "out")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(same_bits(value, model.state_dict()[name]) for name, value in merged.state_dict().items())


def test_batch_norm_is_said_and_update_bn_repairs_it(tmp_path: Path) -> None:
    models = save(resnet, tmp_path, torch.float32, ["1GB"] * 2)
    with pytest.warns(tb.BelayWarning, match=r"statistics of BatchNorm .*update_bn\(loader, model\)"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    merged = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    check(merged, models, [0.5, 0.5], lambda model: model(torch.ones(1, 3, 32, 32)).logits)
    before = merged.state_dict()["resnet.embedder.embedder.normalization.running_mean"].clone()
    torch.optim.swa_utils.update_bn([torch.randn(4, 3, 32, 32)], merged)
    assert not torch.equal(merged.state_dict()["resnet.embedder.embedder.normalization.running_mean"], before)


def test_models_of_other_sizes_are_refused(tmp_path: Path) -> None:
    save(llama, tmp_path, torch.float32, ["1GB"])
    config = transformers.LlamaConfig(vocab_size=99, intermediate_size=40, num_key_value_heads=2, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "1")
    with pytest.raises(ValueError, match=r"shapes differ: 'model.layers.0.mlp.down_proj.weight' is \[32, 48\] in"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    save(gpt2, tmp_path, torch.float32, ["1GB"])
    with pytest.raises(ValueError, match="the checkpoints are not of one model"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")


# PEFT ----------------------------------------------------------------------------------------------------------------


def test_adapters_load_with_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    states = []
    for number in range(3):
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(number)
        for name, p in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(p)
        model.save_pretrained(tmp_path / str(number))
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    with pytest.warns(tb.BelayWarning, match="the factors A and B are averaged, not their product"):
        merge([tmp_path / str(number) for number in range(3)], tmp_path / "out", "ema:0.8")
    torch.manual_seed(0)
    merged = peft.PeftModel.from_pretrained(llama(), tmp_path / "out").state_dict()
    weights = merge_weights("ema:0.8", 3)
    for name, value in merged.items():
        expected = sum(w * state[name] for w, state in zip(weights, states, strict=True))
        torch.testing.assert_close(value, expected, msg=name)


# diffusers -----------------------------------------------------------------------------------------------------------


def unet(diffusers: Any) -> Any:
    shape = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 8, "in_channels": 1, "out_channels": 1}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(layers_per_block=1, **shape, **blocks)


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_a_model_of_diffusers_loads_with_from_pretrained(tmp_path: Path, size: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    models = save(lambda: unet(diffusers), tmp_path, torch.float32, [size] * 3)
    assert (len(list((tmp_path / "0").glob("*.safetensors"))) == 1) == (size == "1GB")
    merge([tmp_path / str(number) for number in range(3)], tmp_path / "out", "1-sqrt")
    merged = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    noise = torch.randn(1, 1, 8, 8)
    check(merged, models, merge_weights("1-sqrt", 3), lambda model: model(noise, 3).sample)


def test_a_pipeline_of_diffusers_loads_with_from_pretrained(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    models = []
    for number in range(2):
        torch.manual_seed(number)
        models.append(unet(diffusers))
        scheduler = diffusers.DDPMScheduler(num_train_timesteps=7)
        diffusers.DDPMPipeline(models[-1], scheduler).save_pretrained(tmp_path / str(number))
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", [0.3, 0.7])
    merged = diffusers.DDPMPipeline.from_pretrained(tmp_path / "out")
    assert merged.scheduler.config.num_train_timesteps == 7
    noise = torch.randn(1, 1, 8, 8)
    check(merged.unet, models, [0.3, 0.7], lambda model: model(noise, 3).sample)

"""The U-Net: as large as the paper's, built as it says, and fit for compilers and half precision."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, silu

from torchbelay.lab.part import LabError
from torchbelay.lab.score.models.objective import Shape
from torchbelay.lab.score.models.unet import Attention, Block, Embedding, UNet


def stirred(module: nn.Module, seed: int = 0) -> nn.Module:
    """With weights and biases that are nowhere 0 or 1, in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return module.eval()


def small(shape: Shape = (3, 32, 32), labels: int = 9, dropout: float = 0.13) -> UNet:
    attention = (shape[1] // 2,)
    return UNet(shape, 16, (1, 2, 2), blocks=1, attention=attention, dropout=dropout, augment_labels=labels)


def inputs(shape: Shape = (3, 32, 32), n: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, *shape, generator=generator),
        torch.randn(n, generator=generator),
        torch.randn(n, 9, generator=generator),
    )


def normalised(x: Tensor, groups: int, norm: nn.GroupNorm) -> Tensor:
    """Group normalisation, by hand."""
    parts = x.view(len(x), groups, -1)
    variance = parts.var(-1, keepdim=True, unbiased=False)
    parts = (parts - parts.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt()
    return parts.view_as(x) * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)


# Its size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "expected"), [(9, 55_733_891), (0, 55_733_891 - 9 * 128)])
def test_it_has_as_many_parameters_as_the_papers(labels: int, expected: int) -> None:
    with torch.device("meta"):
        network = UNet((3, 32, 32), augment_labels=labels)
    assert sum(weight.numel() for weight in network.parameters()) == expected
    assert len(list(network.buffers())) == 1
    assert network.state_dict().keys() == dict(network.named_parameters()).keys()


def test_attention_is_where_the_paper_has_it() -> None:
    with torch.device("meta"):
        network = UNet((3, 32, 32))
    places = [name for name, module in network.named_modules() if isinstance(module, Attention)]
    down = [f"down.{block}.attention" for block in (5, 6, 7, 8)]  # after four blocks at 32 × 32 and a step down
    assert places == [*down, "up.0.enter.0.attention", "up.1.joins.4.attention"]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 32, 16)])
def test_an_image_for_an_image(shape: Shape) -> None:
    x, c_noise, labels = inputs(shape)
    assert small(shape)(x, c_noise, labels).shape == x.shape


@pytest.mark.parametrize("multipliers", [(1,), (1, 3), (2, 1, 4)])
def test_each_resolution_may_have_its_own_width(multipliers: tuple[int, ...]) -> None:
    network = stirred(UNet((1, 28, 28), 16, multipliers, blocks=2, attention=(28,)))
    x, c_noise, _ = inputs((1, 28, 28))
    network(x, c_noise).square().sum().backward()
    silent = {name for name, weight in network.named_parameters() if weight.grad is None or not weight.grad.any()}
    assert silent == {"embed.labels.weight"}  # everything else has its say


# Its parts, by hand ---------------------------------------------------------------------------------------------------


def test_attention_is_softmax_over_all_pixels() -> None:
    attention = stirred(Attention(32))
    assert isinstance(attention, Attention)
    x = torch.randn(2, 32, 3, 5, generator=torch.Generator().manual_seed(1))
    weight = attention.looks.weight.view(3, 32, 32)
    flat = normalised(x, 8, attention.norm).flatten(2)
    query, key, value = (
        torch.einsum("oc,ncp->nop", weight[i], flat) + attention.looks.bias.view(3, 32)[i, :, None] for i in range(3)
    )
    looks = torch.softmax(torch.einsum("ncp,ncq->npq", query, key) / math.sqrt(32), dim=-1)
    found = torch.einsum("npq,ncq->ncp", looks, value)
    found = torch.einsum("oc,ncp->nop", attention.finds.weight, found) + attention.finds.bias[:, None]
    torch.testing.assert_close(attention(x), (x + found.view_as(x)) / math.sqrt(2))


def test_a_block_is_two_convolutions_told_the_noise_level() -> None:
    block = stirred(Block(16, 32, 12, dropout=0.5))
    assert isinstance(block, Block)
    generator = torch.Generator().manual_seed(1)
    x, told = torch.randn(2, 16, 6, 6, generator=generator), torch.randn(2, 12, generator=generator)
    y = normalised(x, 4, block.norm0)
    y = conv2d(y * y.sigmoid(), block.conv0.weight, block.conv0.bias, padding=1)
    y = y + (told @ block.shift.weight.T + block.shift.bias)[:, :, None, None]
    y = normalised(y, 8, block.norm1)
    y = conv2d(y * y.sigmoid(), block.conv1.weight, block.conv1.bias, padding=1)
    shortcut = block.shortcut
    assert isinstance(shortcut, nn.Conv2d)
    straight = torch.einsum("oc,nchw->nohw", shortcut.weight[:, :, 0, 0], x) + shortcut.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(block(x, told), (y + straight) / math.sqrt(2))


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_fresh_block_at_another_resolution_only_averages_or_repeats(way: str) -> None:
    x = torch.randn(2, 16, 6, 4, generator=torch.Generator().manual_seed(1))
    if way == "down":
        resample: nn.Module = nn.AvgPool2d(2)
        expected = (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4
    else:
        resample = nn.Upsample(scale_factor=2, mode="nearest")
        expected = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    block = Block(16, 16, 12, dropout=0.0, resample=resample)
    shortcut = block.shortcut
    assert isinstance(shortcut, nn.Conv2d)  # projected although the width is the same, as in the paper
    torch.testing.assert_close(block(x, torch.randn(2, 12)), conv2d(expected, shortcut.weight) / math.sqrt(2))


def test_the_noise_level_is_embedded_in_waves_from_one_radian_to_a_ten_thousandth() -> None:
    embedding = Embedding(8, 32, labels=0)
    with torch.no_grad():  # let the first layer pass the waves on
        embedding.inner.weight.copy_(torch.eye(32, 8) * 10)
        embedding.outer.weight.copy_(torch.eye(32))
    c_noise = torch.tensor([0.7, -1.3])
    phase = c_noise[:, None] * torch.tensor([1.0, 10 ** (-4 / 3), 10 ** (-8 / 3), 1e-4])
    waves = silu(10 * torch.cat([phase.sin(), phase.cos()], dim=1))
    torch.testing.assert_close(embedding(c_noise, None)[:, :8], silu(waves))


# What it says ---------------------------------------------------------------------------------------------------------


def test_a_fresh_network_is_silent_and_can_learn() -> None:
    network = small()
    x, c_noise, labels = inputs()
    said = network(x, c_noise, labels)
    assert not said.any()
    (said - 1).square().sum().backward()
    gradient = network.last.weight.grad
    assert gradient is not None
    assert gradient.any()


def test_no_labels_are_labels_of_0_and_others_are_heard() -> None:
    network = stirred(small())
    x, c_noise, labels = inputs()
    none = network(x, c_noise)
    torch.testing.assert_close(none, network(x, c_noise, torch.zeros_like(labels)), rtol=0, atol=0)
    assert not torch.allclose(none, network(x, c_noise, labels), atol=1e-3)
    assert not torch.allclose(none, network(x, c_noise + 1), atol=1e-3)


def test_an_image_does_not_know_of_the_others() -> None:
    network = stirred(small())
    x, c_noise, labels = inputs()
    together = network(x, c_noise, labels)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], network(x[i : i + 1], c_noise[i : i + 1], labels[i : i + 1]))


def test_dropout_is_for_training() -> None:
    network = stirred(small(dropout=0.5))
    x, c_noise, _ = inputs()
    torch.testing.assert_close(network(x, c_noise), network(x, c_noise), rtol=0, atol=0)
    network.train()
    assert not torch.allclose(network(x, c_noise), network(x, c_noise), atol=1e-3)


# On its way to a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_channels_may_come_last_and_the_work_be_done_in_bfloat16(shape: Shape) -> None:
    x, c_noise, labels = inputs(shape)
    network = stirred(small(shape))
    exact = network(x, c_noise, labels)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(network(x, c_noise, labels), exact)
    with torch.autocast("cpu", torch.bfloat16):
        said = network(x, c_noise, labels)
    assert said.dtype == torch.bfloat16
    assert 0 < (said - exact).square().mean().sqrt() < 0.03 * exact.std()
    said.float().square().mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_it_compiles_into_one_graph() -> None:
    network = stirred(small())
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    arguments = inputs()
    torch.testing.assert_close(compiled(*arguments), network(*arguments))


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 30, 28), {}, r"shape=\(1, 30, 28\): 3 resolutions need a height and a width that 4 divides"),
        ((1, 28, 28), {}, r"attention=\(16,\): no resolution has a height of 16; use any of \[28, 14, 7\]"),
        ((3, 32, 32), {"channels": 36}, r"channels: a layer would have 144 of them in 32 groups; use a multiple of 32"),
        ((3, 32, 32), {"multipliers": ()}, r"multipliers=\(\): give one for each resolution"),
    ],
)
def test_what_cannot_be_built_is_refused(shape: Shape, options: dict[str, object], message: str) -> None:
    with pytest.raises(LabError, match=message), torch.device("meta"):
        UNet(shape, **options)  # type: ignore[arg-type]


def test_labels_for_a_network_that_knows_none_are_refused() -> None:
    x, c_noise, labels = inputs()
    with pytest.raises(LabError, match="augment: labels for a network with augment_labels=0"):
        small(labels=0)(x, c_noise, labels)

"""The DDPM++ U-Net of Karras et al. (2022) for CIFAR-10: 55.73 million parameters in the paper's size.

    conv ─ blocks ─────────────────────────────────────────── joins ─ norm ─ SiLU ─ conv
             └ down ─ blocks ──────────────────────── up ─ joins          32 × 32
                        └ down ─ blocks ─ middle ─ joins                  16 × 16, with attention
                                                                           8 ×  8

Every layer on the way down, the first convolution and the downsampling blocks included, passes its output to a block on
the way up, which concatenates it with its own input. All blocks get the noise level and the augmentation through one
embedding. The network follows the paper's appendix F and Song et al. (2021). The initial weights are theirs too: Xavier
uniform, smaller in attention, and zero at the end of each branch, so that a new network returns zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from torchbelay.lab.part import LabError

from .objective import Shape

EMBEDDING = 4  # width of the embedding, in `channels`
ATTENTION_GAIN = math.sqrt(0.2)  # of the initial weights of queries, keys and values
HALF = math.sqrt(0.5)  # keeps the variance of a sum of two terms

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)


@dataclass(frozen=True)
class UNetShape:
    """The size of a network; the defaults are the paper's for CIFAR-10.

    >>> UNetShape(channels=32, blocks=1, attention=(14,)).channels
    32
    """

    channels: int = 128
    multipliers: tuple[int, ...] = (
        2,
        2,
        2,
    )  # of `channels`, per resolution; each has half the side of the previous one
    blocks: int = 4  # per resolution on the way down; one more on the way up
    attention: tuple[int, ...] = (16,)  # the heights, in pixels, of the levels with attention
    dropout: float = 0.13


class UNet(nn.Module):
    """The network F(x; c_noise, labels), which maps images to images.

    `augment_labels` is the number of augmentation labels per image; with 0 the network takes none.

    >>> network = UNet((1, 28, 28), channels=32, multipliers=(1, 2, 2), blocks=1, attention=(14,))
    >>> network(torch.randn(2, 1, 28, 28), torch.zeros(2)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: Shape,
        channels: int = 128,
        multipliers: Sequence[int] = (2, 2, 2),
        blocks: int = 4,
        attention: Sequence[int] = (16,),
        dropout: float = 0.13,
        augment_labels: int = 9,
    ) -> None:
        super().__init__()
        colours = shape[0]
        heights = _heights(shape, multipliers, attention)
        widths = [channels * multiplier for multiplier in multipliers]
        embedding = channels * EMBEDDING

        def block(inputs: int, outputs: int, *, resample: nn.Module | None = None, attends: bool = False) -> Block:
            return Block(inputs, outputs, embedding, dropout, resample=resample, attends=attends)

        self.embed = Embedding(channels, embedding, augment_labels)
        self.first = _initial(nn.Conv2d(colours, channels, 3, padding=1))

        down: list[Block] = []
        left = [channels]  # the widths of the outputs for the way up
        for level, (height, width) in enumerate(zip(heights, widths, strict=True)):
            if level > 0:
                down.append(block(left[-1], left[-1], resample=nn.AvgPool2d(2)))
                left.append(left[-1])
            for _ in range(blocks):
                down.append(block(left[-1], width, attends=height in attention))
                left.append(width)
        self.down = nn.ModuleList(down)

        up: list[Level] = []
        below = widths[-1]
        for height, width in zip(reversed(heights), reversed(widths), strict=True):
            if up:
                enter = [block(below, below, resample=nn.Upsample(scale_factor=2, mode="nearest"))]
            else:
                enter = [block(below, below, attends=True), block(below, below)]
            joins = []
            for last in (*[False] * blocks, True):
                joins.append(block(below + left.pop(), width, attends=last and height in attention))
                below = width
            up.append(Level(enter, joins))
        self.up = nn.ModuleList(up)

        self.norm = _norm(below)
        self.last = _initial(nn.Conv2d(below, colours, 3, padding=1), gain=0)

    def forward(self, x: Tensor, c_noise: Tensor, augment: Tensor | None = None) -> Tensor:
        """Return F for images (n, channels, height, width), c_noise (n,) and labels (n, augment_labels); None is 0."""
        embedded = self.embed(c_noise, augment)
        x = self.first(x)
        left = [x]
        for block in self.down:
            x = block(x, embedded)
            left.append(x)
        for level in self.up:
            x = level(x, left, embedded)
        return self.last(silu(self.norm(x)))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """The noise level and the augmentation as one vector, an input of every block."""

    frequencies: Tensor

    def __init__(self, channels: int, width: int, labels: int) -> None:
        super().__init__()
        share = torch.arange(channels // 2) / (channels // 2 - 1)
        self.register_buffer("frequencies", 10_000**-share, persistent=False)
        # Without a bias, so that zero labels equal no labels.
        self.labels = _initial(nn.Linear(labels, channels, bias=False)) if labels else None
        self.inner = _initial(nn.Linear(channels, width))
        self.outer = _initial(nn.Linear(width, width))

    def forward(self, c_noise: Tensor, labels: Tensor | None) -> Tensor:
        """Return the embedding (n, width) of c_noise (n,) and labels (n, labels)."""
        phase = c_noise[:, None] * self.frequencies
        embedded = torch.cat([phase.sin(), phase.cos()], dim=1)
        if labels is not None:
            if self.labels is None:
                raise LabError("augment: labels for a network with augment_labels=0; give it 9, or pass None")
            embedded = embedded + self.labels(labels)
        return silu(self.outer(silu(self.inner(embedded))))


class Block(nn.Module):
    """Two convolutions beside a shortcut, with optional resampling before and attention after."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedding: int,
        dropout: float,
        *,
        resample: nn.Module | None = None,
        attends: bool = False,
    ) -> None:
        super().__init__()
        self.resample = resample or nn.Identity()
        self.norm0 = _norm(inputs)
        self.conv0 = _initial(nn.Conv2d(inputs, outputs, 3, padding=1))
        self.shift = _initial(nn.Linear(embedding, outputs))
        self.norm1 = _norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = _initial(nn.Conv2d(outputs, outputs, 3, padding=1), gain=0)
        straight = inputs == outputs and resample is None
        self.shortcut = nn.Identity() if straight else _initial(nn.Conv2d(inputs, outputs, 1))
        self.attention = Attention(outputs) if attends else nn.Identity()

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Return (n, outputs, …) for x (n, inputs, …) and its embedding (n, embedding)."""
        y = self.conv0(self.resample(silu(self.norm0(x))))
        y = y + self.shift(embedded)[:, :, None, None]
        y = self.conv1(self.dropout(silu(self.norm1(y))))
        y = (y + self.shortcut(self.resample(x))) * HALF
        return self.attention(y)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention over all pixels with one head, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        # The names of these layers are part of checkpoints.
        self.looks = _initial(nn.Linear(channels, 3 * channels), gain=ATTENTION_GAIN)
        self.finds = _initial(nn.Linear(channels, channels), gain=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus its attention, both (n, channels, height, width)."""
        pixels = self.norm(x).flatten(2).transpose(1, 2)  # (n, pixels, channels): no copy if channels come last
        query, key, value = self.looks(pixels)[:, None].chunk(3, dim=-1)
        found: Tensor = self.finds(scaled_dot_product_attention(query, key, value)[:, 0])
        return (x + found.transpose(1, 2).reshape(x.shape)) * HALF


class Level(nn.Module):
    """A resolution on the way up: the blocks that enter it, and those that join outputs of the way down."""

    def __init__(self, enter: Sequence[Block], joins: Sequence[Block]) -> None:
        super().__init__()
        self.enter = nn.ModuleList(enter)
        self.joins = nn.ModuleList(joins)

    def forward(self, x: Tensor, left: list[Tensor], embedded: Tensor) -> Tensor:
        """Return the level's output; each join takes the last entry of `left`."""
        for block in self.enter:
            x = block(x, embedded)
        for block in self.joins:
            x = block(torch.cat([x, left.pop()], dim=1), embedded)
        return x


def _initial(layer: Layer, gain: float = 1.0) -> Layer:
    """Initialise a layer: Xavier-uniform weights, zero bias."""
    nn.init.xavier_uniform_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _norm(channels: int) -> nn.GroupNorm:
    """Return a group norm with up to 32 groups of at least 4 channels each."""
    groups = min(32, channels // 4)
    if groups == 0 or channels % groups:
        raise LabError(f"channels: a layer would have {channels} of them in {groups} groups; use a multiple of 32")
    return nn.GroupNorm(groups, channels, eps=1e-6)


def _heights(shape: Shape, multipliers: Sequence[int], attention: Sequence[int]) -> list[int]:
    """Return the height of each resolution; refuse shapes and attention that do not fit."""
    _, height, width = shape
    if not multipliers:
        raise LabError("multipliers=(): give one for each resolution")
    parts = 2 ** (len(multipliers) - 1)
    if height % parts or width % parts:
        cure = f"{len(multipliers)} resolutions need a height and a width that {parts} divides; give fewer multipliers"
        raise LabError(f"shape={tuple(shape)}: {cure}")
    heights = [height >> level for level in range(len(multipliers))]
    if strange := set(attention) - set(heights):
        raise LabError(
            f"attention={tuple(attention)}: no resolution has a height of {min(strange)}; use any of {heights}"
        )
    return heights

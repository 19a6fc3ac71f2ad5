"""Small models of the usual kinds, each with its batches and its loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

WORDS, WIDTH, LENGTH = 11, 8, 5


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both with residuals."""

    def __init__(self, width: int = WIDTH, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        many, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(many, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = (
            functional.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(many, length, width)
        )
        x = x + functional.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next word; the embedding and the last layer are one weight."""

    def __init__(self, *, layers: int = 1, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sentences(step: int, many: int = 4) -> Tensor:
    """Counting with a stride: something that can be learnt."""
    start, stride = (torch.randint(1, WORDS, (many, 1), generator=draw(100 * step + i)) for i in (0, 1))
    return (start + stride * torch.arange(LENGTH + 1)) % WORDS


def next_word(model: nn.Module, words: Tensor) -> Tensor:
    out = model(words[:, :-1])
    return functional.cross_entropy(out.flatten(0, 1).float(), words[:, 1:].flatten())


class LowRank(nn.Module):
    """LoRA by parametrization: W + B·A, B from zero."""

    def __init__(self, weight: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / rank)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).to(weight.dtype)


def add_adapter(layer: nn.Module, rank: int = 2) -> None:
    """A low-rank adapter on a layer's weight."""
    parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))


def adapted() -> nn.Module:
    """A frozen transformer; only the adapters in its attention train."""
    model = Transformer()
    model.requires_grad_(False)
    for block in model.blocks:
        add_adapter(block.qkv)
        add_adapter(block.out)
    return model


class Spectral(nn.Module):
    """Filters in the frequency domain: complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 5, dtype=torch.cfloat) / 3)
        self.out = nn.Linear(15, 2)
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)  # whole numbers

    def forward(self, x: Tensor) -> Tensor:
        out = torch.fft.irfft(torch.fft.rfft(x) * self.filter[:, : x.shape[-1] // 2 + 1], n=5)
        return self.out(out.flatten(1).to(self.out.weight.dtype))


class Mixed(nn.Module):
    """A bfloat16 body between float32 ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(3, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(self.first(x).bfloat16())).float())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


def convolutional() -> nn.Module:
    """Convolutions with weight and spectral norms, BatchNorm and GroupNorm."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(3, 4, 3)),
        nn.BatchNorm1d(4),
        nn.SiLU(),
        parametrizations.spectral_norm(nn.Conv1d(4, 4, 3)),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


@dataclass(frozen=True)
class Animal:
    """A model, its batch at a step, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]

    def model(self, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = self.make()
        return model if dtype is None else model.to(dtype)


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(shape, generator=draw(1000 + step))


def towards_the_sum(model: nn.Module, x: Tensor) -> Tensor:
    """A regression, in the dtype of the model's first parameter."""
    first = next(p for p in model.parameters() if p.is_floating_point())
    target = torch.stack([x.flatten(1).sum(1).sin(), x.flatten(1).mean(1)], 1)
    return (model(x.to(first.dtype)).float() - target).square().mean()


ZOO = {
    "mlp": Animal(
        lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2)),
        numbers(8, 3),
        towards_the_sum,
    ),
    "transformer": Animal(Transformer, sentences, next_word),
    "adapters": Animal(adapted, sentences, next_word),
    "convolutional": Animal(convolutional, numbers(6, 3, 5), towards_the_sum),
    "recurrent": Animal(Recurrent, numbers(4, 5, 3), towards_the_sum),
    "complex": Animal(Spectral, numbers(4, 3, 5), towards_the_sum),
    "mixed": Animal(Mixed, numbers(8, 3), towards_the_sum),
}

"""A small decoder-only transformer over bytes: learned positions, pre-norm, GELU, tied input and output."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The size of a network."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


class Block(nn.Module):
    """Attention to what came before, then a network of two layers; each adds to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width, bias=False)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attended = nn.Linear(shape.width, shape.width, bias=False)
        self.before_layers = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block."""
        batch, length, width = x.shape
        qkv = self.queries_keys_values(self.before_attention(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(functional.gelu(self.up(self.before_layers(x))))
        return x + added


class ByteGPT(nn.Module):
    """Predicts the next byte.

    >>> network = ByteGPT(Shape(layers=1, width=8, heads=2, context=4))
    >>> network(torch.zeros(2, 4, dtype=torch.long)).shape
    torch.Size([2, 4, 256])
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # what adds to the stream starts smaller, as there are two of them per block
                adds = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * shape.layers) ** (0.5 * adds))

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each byte."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.last(x), self.bytes.weight)


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean loss in nats per byte, in float32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def decayed(network: nn.Module) -> list[dict[str, object]]:
    """Return two groups for an optimizer: matrices, whose weights decay, and the rest."""
    matrices = [p for p in network.parameters() if p.dim() >= 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in network.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def seeded(shape: Shape, seed: int) -> ByteGPT:
    """Return a network whose first weights depend on the seed alone, whatever else draws random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ByteGPT(shape)

"""A small model that two optimizers train: the first its matrices, the second its vectors, at every other step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.small import batch, mlp


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [torch.optim.SGD(matrices, lr=0.05, momentum=0.5), torch.optim.AdamW(vectors, lr=1e-2)]


def evaluate(model: nn.Module, step: int) -> None:
    """Compute the gradients of a step."""
    some = next(model.parameters())
    x = batch(step, some.dtype).to(some.device)
    model.zero_grad()
    (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()


def alternate(model: nn.Module, optimizers: Sequence[Optimizer], steps: Iterable[int]) -> None:
    """Train: the first optimizer steps always, the others at odd steps only."""
    for step in steps:
        evaluate(model, step)
        for i, optimizer in enumerate(optimizers):
            if i == 0 or step % 2:
                optimizer.step()


def several(
    method: Any, *, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, list[Optimizer], tb.Belay]:
    model = mlp() if model is None else model
    optimizers = two_optimizers(model)
    return model, optimizers, tb.Belay(model, optimizers, method, **options)

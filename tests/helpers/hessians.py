"""Whole Hessians of small models, by torch.autograd.functional, to compare measured curvatures with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


def hessian(model: nn.Module, loss: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
    """Return the Hessian of `loss(model)` over the weights that are trained, in the order of their names."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in weights.values()]

    def at(flat: Tensor) -> Tensor:
        parts = zip(weights.items(), flat.split(sizes), strict=True)
        values = {name: part.view(p.shape) for (name, p), part in parts}
        return loss(lambda *inputs: functional_call(model, values, inputs))

    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(at, torch.cat([p.detach().reshape(-1) for p in weights.values()]))


def eigenvalues(matrix: Tensor) -> list[float]:
    """Return the eigenvalues, the largest first."""
    return torch.linalg.eigvalsh(matrix.double()).flip(0).tolist()


class Quadratic(nn.Module):
    """½ Σ h·w², in one weight: its Hessian has the curvatures h on its diagonal."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.h = curvatures
        self.w = nn.Parameter(torch.ones_like(curvatures))

    def forward(self) -> Tensor:
        return (self.h * self.w.square()).sum() / 2

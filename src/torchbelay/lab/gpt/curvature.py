"""How curved the loss is in the units of Adam's steps: the largest eigenvalue of D^(-1/2)·H·D^(-1/2), D = √v + eps.

Adam takes a step of rate η on this matrix as gradient descent does on the Hessian, so η times this number is the x of
the theorems on stability.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchbelay.lab.records import rounded

from .network import loss_of


def preconditioned_sharpness(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    following: Tensor,
    beta2: float,
    iterations: int = 20,
) -> float | None:
    """Return the largest eigenvalue, by power iteration in float32; None if it is not finite."""
    parameters = list(network.parameters())
    scales = [_scale(optimizer, p, beta2) for p in parameters]
    device_generator = torch.Generator(text.device).manual_seed(0)
    direction = [torch.randn(p.shape, generator=device_generator, device=p.device) for p in parameters]
    value = math.nan
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
        gradients = torch.autograd.grad(loss_of(network(text), following), parameters, create_graph=True)
        for _ in range(iterations):
            norm = torch.stack([d.norm() for d in direction]).norm()
            direction = [d / norm for d in direction]
            along = sum((g * (d * s)).sum() for g, d, s in zip(gradients, direction, scales, strict=True))
            assert isinstance(along, Tensor)
            turned = torch.autograd.grad(along, parameters, retain_graph=True)
            product = [h * s for h, s in zip(turned, scales, strict=True)]
            value = float(sum((a * b).sum() for a, b in zip(product, direction, strict=True)))
            direction = product
    return rounded(value)


def _scale(optimizer: torch.optim.Optimizer, p: Tensor, beta2: float) -> Tensor:
    """Return D^(-1/2) of a parameter, from Adam's second moment with its bias corrected."""
    state = optimizer.state[p]
    moment = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
    scale: Tensor = (moment.sqrt() + 1e-8).rsqrt()
    return scale

"""Gradients of a loss that can be differentiated again, and products of its Hessian and a vector.

A product H·v is the derivative of the gradient along v, so that the Hessian H is never made.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from .lanczos import MeasurementError, Product, Vector


def gradients_of(loss: Callable[[], Tensor], weights: Vector) -> tuple[Vector, Vector, tuple[str, ...]]:
    """Return the weights that enter the loss, their gradients as functions of the weights, and foreign operations."""
    value = loss()
    if not isinstance(value, Tensor):
        raise TypeError(f"loss() returned a {type(value).__name__}; return the loss itself, a tensor of one number")
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"loss() returned {value.dtype} of shape {tuple(value.shape)}; return one number, as loss.mean()"
        )
    if not value.requires_grad:
        raise ValueError(
            "loss() returned a number that does not depend on trained weights; compute it from the model, without "
            "torch.no_grad(), detach() or item()"
        )
    if not math.isfinite(value.item()):
        raise MeasurementError(
            f"loss() returned {value.item()}; the curvature needs a finite loss: begin at other weights"
        )
    foreign = _foreign(value)
    weights = [p for p in weights if p.requires_grad]  # the loss may have frozen some
    with _explained():
        found = torch.autograd.grad(value, weights, create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(weights, found, strict=True) if g is not None]
    if not pairs:
        raise ValueError("no trained weight of the model enters the loss; compute loss() from this model")
    if any(g.layout != torch.strided for _, g in pairs):
        raise ValueError(
            "the loss has sparse gradients, which have no second derivative; use nn.Embedding(sparse=False)"
        )
    if not any(g.requires_grad for _, g in pairs):
        raise ValueError("loss() is linear in the weights: it has no curvature; give the loss that is minimised")
    return [p for p, _ in pairs], [g for _, g in pairs], foreign


def _foreign(value: Tensor) -> tuple[str, ...]:
    """Return the names of operations that are not torch's own; raise if one is known to have no second derivative.

    torch itself would not say so: it passes by operations behind which it sees no weights, and takes them for constant.
    """
    names, seen, waiting = set[str](), set[object](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        kind = getattr(node, "_forward_cls", None)
        if kind is CheckpointFunction:
            raise ValueError(
                "the loss uses checkpoint(..., use_reentrant=True), which hides weights from second derivatives; give "
                "use_reentrant=False"
            )
        if kind is None:
            continue
        code = getattr(kind.backward, "__code__", None)  # its name stays what it is, whatever the wrapper is called
        if code is not None and code.co_qualname.startswith(once_differentiable.__name__):
            raise ValueError(
                f"the loss uses {kind.__name__}, which has no second derivative (once_differentiable); measure with "
                "plain operations of torch in its place"
            )
        if not kind.__module__.startswith("torch."):
            names.add(kind.__name__)
    return tuple(sorted(names))


def hessian_product(weights: Vector, gradients: Vector) -> Product:
    """Return the function that multiplies a vector by the Hessian."""
    curved = [i for i, g in enumerate(gradients) if g.requires_grad]
    outputs = [gradients[i] for i in curved]

    def product(vector: Vector) -> Vector:
        # 16-bit numbers may be too small or too large to be precise: the largest becomes 1
        largest = float(torch.stack([x.abs().max().to(vector[0].device) for x in vector]).max())
        along = [(vector[i] / largest).to(gradients[i].dtype) for i in curved]
        with _explained():
            found = torch.autograd.grad(outputs, weights, along, retain_graph=True, materialize_grads=True)
        return [largest * x.to(precision(x)) for x in found]

    return product


def scale_of(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor:
    """Return D^(-1/2) of a weight, from Adam's second moment without its bias."""
    group = next((group for group in optimizer.param_groups if any(p is each for each in group["params"])), None)
    if group is None:
        raise ValueError(f"optimizer does not have the weight {name!r}; give the one that trains it")
    state = optimizer.state.get(p, {})
    steps = float(state.get("step", 0))  # 0 too if GradScaler has skipped all steps of a fused Adam
    if "exp_avg_sq" not in state or "betas" not in group or not steps:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has no second moment of the weight {name!r}; give an Adam or AdamW "
            "that has stepped, or none to measure the curvatures that SGD meets"
        )
    known = 1 - float(group["betas"][1]) ** steps
    moment = state.get("max_exp_avg_sq", state["exp_avg_sq"]).to(p.device, precision(p)) / known
    scale: Tensor = (moment.sqrt() + float(group["eps"])).rsqrt()
    return scale


def preconditioned(product: Product, scales: Vector) -> Product:
    """Return the product by the Hessian in the units of Adam's steps."""

    def scaled(vector: Vector) -> Vector:
        return [s * x for s, x in zip(scales, vector, strict=True)]

    return lambda vector: scaled(product(scaled(vector)))


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do if an operation has no second derivative."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # NotImplementedError is one
        if "backward through the graph a second time" in str(error):
            raise ValueError(
                "loss() calls backward() on what it returns, which frees what second derivatives need; return the loss "
                "and leave backward() out"
            ) from error
        raise RuntimeError(
            f"the loss cannot be differentiated twice: {error}; use plain operations of torch in the place of this one"
        ) from error


def precision(t: Tensor) -> torch.dtype:
    """Return the dtype to compute with."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32

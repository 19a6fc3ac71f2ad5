"""What a model does not notice of a measurement, and the operations of torch that have second derivatives."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchbelay.belay.swapped_buffers import Buffers


@contextmanager
def untouched(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """Restore the trained weights, and all else that a model has, afterwards, whatever the loss has done to it.

    Hooks on these weights do not act meanwhile: they change gradients, and the curvature is that of the loss.
    """
    buffers = Buffers(model)
    modes = [(module, module.training) for module in model.modules()]
    parameters: list[Tensor] = [*model.parameters()]
    marks = [(p, p.grad, p.requires_grad) for p in parameters]
    values = [(p, p.detach().clone(), p._version) for p in weights]  # nn.Embedding(max_norm=...) writes to its own
    hooks = [(p, own) for p in weights if (own := p._backward_hooks)]
    devices = sorted({p.get_device() for p in weights if p.is_cuda})
    with torch.random.fork_rng(devices):
        for p in parameters:
            p.grad = None  # a loss that calls backward() by itself adds to nothing
        for p, _ in hooks:
            p._backward_hooks = None
        try:
            yield
        finally:
            for p, gradient, trained in marks:
                p.grad = gradient
                if p.requires_grad != trained:
                    p.requires_grad = trained
            for p, own in hooks:
                p._backward_hooks = own
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for p, value, version in values:
                    if p._version != version and not torch.equal(p, value):
                        p.copy_(value)
                buffers.restore(set())


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Let torch choose operations that have second derivatives."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # ends no_grad too
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield

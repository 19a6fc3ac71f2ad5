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
    """Restore gradients, modes, buffers and random generators afterwards, whatever the loss has done to them."""
    buffers = Buffers(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in weights]
    devices = sorted({p.get_device() for p in weights if p.is_cuda})
    with torch.random.fork_rng(devices):
        for p in weights:
            p.grad = None  # a loss that calls backward() by itself adds to nothing
        try:
            yield
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
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

"""`measure_curvatures`: the spectrum of a model's loss at its present weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchbelay.belay.optimizers import momentum_of, unwrapped
from torchbelay.belay.shard import is_flattened, is_sharded, loaded
from torchbelay.physics import arguments
from torchbelay.physics.spectrum import Spectrum

from .derivatives import gradients_of, hessian_product, precision, preconditioned, scale_of
from .isolation import twice_differentiable, untouched
from .lanczos import Vector, lanczos

_ROUNDING = 2  # a curvature below this many units of rounding of the largest one is 0


def measure_curvatures(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    products: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Spectrum:
    """Measure how curved the loss of a model is at its present weights, for `recommend(steps, curvatures=...)`.

    Without `optimizer` these are the curvatures that SGD meets, the eigenvalues of the Hessian. Adam divides its steps
    by the size of the gradients and meets others, for which it is to be given.

    Args:
        model: the model. Its weights that are trained (`requires_grad`) and enter the loss are looked at. Weights,
            gradients, buffers, modes and torch's random generators are left as they were. Hooks on weights do not act.
        loss: a function without arguments that returns the loss on a fixed batch. It is called once, so that dropout
            has one mask. Take a large batch: the curvature of a small one is larger.
        optimizer: an Adam or AdamW that has stepped: its steps are those of SGD on D^(-1/2)·H·D^(-1/2), D = √v + eps,
            with the second moment v. The curvatures are those of this matrix, in units of 1/(its learning rate).
            `recommend` takes its β1 from here too.
        products: the number of Hessian-vector products. Each takes 2 to 3 times as long as a gradient, and keeps a
            vector as large as the weights. A dozen find the largest curvature; small ones, which matter if there is
            little noise, take more.
        seed: of the random direction that the search begins with.
        progress: called as `progress(done, products)` after each product.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double()
    >>> found = measure_curvatures(model, lambda: model(batch).square().sum() / 2)
    >>> [round(h, 6) for h in found.curvatures], found.counts
    ([4.0, 1.0], (1.0, 1.0))
    """
    asked = arguments.whole("products", products, low=2)
    generator = torch.Generator().manual_seed(arguments.whole("seed", seed, low=0))
    if not callable(loss):
        raise TypeError(
            f"loss={loss!r} is not a function; give one without arguments, as lambda: criterion(model(x), y)"
        )
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r} is not a function; give one of two arguments, as print")
    adam = _stepping(optimizer)
    weights = _trained(model)
    with untouched(model, weights), twice_differentiable(model):
        weights, gradients, foreign = gradients_of(loss, weights)
        size = sum(p.numel() for p in weights)
        start = [torch.randn(p.shape, generator=generator, dtype=precision(p)).to(p.device) for p in weights]
        product = hessian_product(weights, gradients)
        if adam is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            product = preconditioned(product, [scale_of(adam, p, names[id(p)]) for p in weights])
        ritz, shares = lanczos(product, start, min(asked, size), progress or (lambda done, total: None))
    found = replace(_spectrum(ritz, shares, size, _rounding(weights)), foreign=foreign)
    if adam is None:
        return found
    momentum = momentum_of(adam.param_groups[0])
    return replace(found, optimizer=type(adam).__name__, beta1=momentum.beta if momentum else 0.0)


def _stepping(optimizer: object) -> torch.optim.Optimizer | None:
    """Return the optimizer without the wrappers that are known; None if there is none."""
    inner = unwrapped(optimizer)
    if inner is None or isinstance(inner, torch.optim.Optimizer):
        return inner
    raise TypeError(
        f"optimizer={type(inner).__name__} is not a torch.optim.Optimizer; give the Adam that trains the model, or none"
    )


def _trained(model: nn.Module) -> Vector:
    """Return the weights that are trained, if their second derivatives can be had."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that is trained")
    parallel = loaded("torch.nn.parallel.distributed", "DistributedDataParallel")
    if any(isinstance(module, parallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in DistributedDataParallel, or a part of it is, whose forward and backward are those of "
            "all ranks; measure model.module, with a loss of model.module"
        )
    if is_flattened(model):
        raise ValueError("model is flattened by FSDP1; measure a copy of the model that is whole on one process")
    found: Vector = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.is_meta or nn.parameter.is_lazy(p):
            raise ValueError(f"the weight {name!r} has no values yet; initialise the model, or call it once")
        if is_sharded(p):
            raise ValueError(
                f"the weight {name!r} is sharded; measure a copy of the model that is whole on one process"
            )
        if p.is_inference():
            raise ValueError(
                f"the weight {name!r} was made under torch.inference_mode(), so that it has no derivatives; make the "
                "model outside"
            )
        if p.is_complex():
            raise ValueError(f"the weight {name!r} is {p.dtype}; curvatures are measured for real weights only")
        if p.numel():
            found.append(p)
    if not found:
        raise ValueError(f"model={type(model).__name__} has no weight that requires gradients; nothing is trained")
    return found


def _rounding(weights: Vector) -> float:
    return max(torch.finfo(p.dtype).eps for p in weights)


def _spectrum(ritz: Sequence[float], shares: Sequence[float], size: int, rounding: float) -> Spectrum:
    """Return the positive Ritz values and how many directions they stand for: one or more each."""
    scale = max(map(abs, ritz))
    counts = [1.0] * size if len(ritz) == size else [max(1.0, size * share) for share in shares]
    pairs = sorted(zip(ritz, counts, strict=True), reverse=True)
    found = [(h, n) for h, n in pairs if h > _ROUNDING * rounding * scale]
    if not found:
        raise ValueError(
            f"the loss curves upwards nowhere: {len(ritz)} products found curvatures from {min(ritz):.3g} to "
            f"{max(ritz):.3g}; measure after some training"
        )
    return Spectrum(tuple(h for h, _ in found), tuple(n for _, n in found), min(ritz), len(ritz))

"""How curved the loss of a model is: its spectrum, by Hessian-vector products and Lanczos' method.

A product H·v is the derivative of the gradient along v, so that the Hessian H is never made. k products from a random
start give k Ritz values. The largest of them approaches the largest curvature from below. All of them, with the squared
shares that the start has in their vectors, are a Gauss quadrature of the spectrum: n times a share is about the number
of directions, out of n, that a Ritz value stands for.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .belay.shard import is_sharded, loaded
from .belay.swapped_buffers import Buffers
from .physics import arguments
from .physics.spectrum import Spectrum

ASYMMETRY = 0.05  # of the largest curvature: a product that is further from symmetric is not that of a Hessian
_ROUNDING = 2  # a curvature below this many units of rounding of the largest one is 0

Vector = list[Tensor]  # one tensor per weight
Product = Callable[[Vector], Vector]


def measure_curvatures(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    products: int = 12,
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Spectrum:
    """Measure how curved the loss of a model is at its present weights, for `recommend(steps, curvatures=...)`.

    Without `optimizer` these are the curvatures that SGD meets, the eigenvalues of the Hessian. Adam divides its steps
    by the size of the gradients and meets others, for which it is to be given.

    Args:
        model: the model. Its weights that are trained (`requires_grad`) and enter the loss are looked at. Weights,
            gradients, buffers, modes and torch's random generators are left as they were.
        loss: a function without arguments that returns the loss on a fixed batch. It is called once, so that dropout
            has one mask. Take a large batch: the curvature of a small one is larger.
        optimizer: an Adam or AdamW that has stepped: its steps are those of SGD on D^(-1/2)·H·D^(-1/2), D = √v + eps,
            with the second moment v. The curvatures are those of this matrix, in units of 1/(its learning rate).
        products: the number of Hessian-vector products. Each takes about as long as two gradients, and keeps a vector
            as large as the weights.
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
    weights = _trained(model)
    with _untouched(model, weights), _twice_differentiable(model):
        weights, gradients = _gradients(loss, weights)
        size = sum(p.numel() for p in weights)
        start = [torch.randn(p.shape, generator=generator, dtype=_precision(p)).to(p.device) for p in weights]
        product = _product(weights, gradients)
        if optimizer is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            product = _preconditioned(product, [_scale(optimizer, p, names[id(p)]) for p in weights])
        ritz, shares = _lanczos(product, start, min(asked, size), progress or (lambda done, total: None))
    found = _spectrum(ritz, shares, size, _rounding(weights))
    return found if optimizer is None else replace(found, optimizer=type(optimizer).__name__)


def _trained(model: nn.Module) -> Vector:
    """Return the weights that are trained, if their second derivatives can be had."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that is trained")
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
        if p.is_complex():
            raise ValueError(f"the weight {name!r} is {p.dtype}; curvatures are measured for real weights only")
        if p.numel():
            found.append(p)
    if not found:
        raise ValueError(f"model={type(model).__name__} has no weight that requires gradients; nothing is trained")
    return found


# What the model does not notice --------------------------------------------------------------------------------------


@contextmanager
def _untouched(model: nn.Module, weights: Vector) -> Iterator[None]:
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
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Let torch choose operations that have second derivatives."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if isinstance(model, loaded("torch.nn.parallel.distributed", "DistributedDataParallel")):
            stack.enter_context(model.no_sync())  # else its next step would wait for gradients of this one
        yield


# Derivatives ---------------------------------------------------------------------------------------------------------


def _gradients(loss: Callable[[], Tensor], weights: Vector) -> tuple[Vector, Vector]:
    """Return the weights that enter the loss, and their gradients as functions of the weights."""
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
        raise ValueError(f"loss() returned {value.item()}; the curvature needs a finite loss: begin at other weights")
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
    return [p for p, _ in pairs], [g for _, g in pairs]


def _product(weights: Vector, gradients: Vector) -> Product:
    """Return the function that multiplies a vector by the Hessian."""
    curved = [i for i, g in enumerate(gradients) if g.requires_grad]
    outputs = [gradients[i] for i in curved]

    def product(vector: Vector) -> Vector:
        largest = max(float(x.abs().max()) for x in vector if x.numel())  # 16-bit numbers are precise near 1 only
        along = [(vector[i] / largest).to(gradients[i].dtype) for i in curved]
        with _explained():
            found = torch.autograd.grad(outputs, weights, along, retain_graph=True, materialize_grads=True)
        return [largest * x.to(_precision(x)) for x in found]

    return product


def _scale(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor:
    """Return D^(-1/2) of a weight, from Adam's second moment without its bias."""
    group = next((group for group in optimizer.param_groups if any(p is each for each in group["params"])), None)
    if group is None:
        raise ValueError(f"optimizer does not have the weight {name!r}; give the one that trains it")
    state = optimizer.state.get(p, {})
    if "exp_avg_sq" not in state or "betas" not in group:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has no second moment of the weight {name!r}; give an Adam or AdamW "
            "that has stepped, or none to measure the curvatures that SGD meets"
        )
    known = 1 - float(group["betas"][1]) ** float(state["step"])
    moment = state.get("max_exp_avg_sq", state["exp_avg_sq"]).to(p.device, _precision(p)) / known
    scale: Tensor = (moment.sqrt() + float(group["eps"])).rsqrt()
    return scale


def _preconditioned(product: Product, scales: Vector) -> Product:
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
        raise RuntimeError(
            f"the loss cannot be differentiated twice: {error}; use plain operations of torch for it, no kernels of "
            "other libraries, and checkpoint(..., use_reentrant=False)"
        ) from error


# Lanczos' method -----------------------------------------------------------------------------------------------------


def _lanczos(
    product: Product, vector: Vector, count: int, progress: Callable[[int, int], object]
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the Ritz values of at most `count` products, and the start's squared share in the vector of each.

    Every vector is made orthogonal to all before it, twice: in float32 those of the three-term recurrence are not. What
    it had in common with them, apart from the two neighbours, shows whether the product is symmetric.
    """
    basis: list[Vector] = []
    diagonal, beside, uneven = list[float](), list[float](), 0.0
    rest = _norm(vector)
    for done in range(1, count + 1):
        vector = [x / rest for x in vector]
        basis.append(vector)
        vector = product(vector)
        norm = _norm(vector)
        if not math.isfinite(norm):
            raise ValueError("the second derivatives of the loss are not finite; begin at other weights, or in float32")
        common = _orthogonalise(vector, basis)
        _orthogonalise(vector, basis)
        expected = [0.0] * (done - 2) + beside[-1:]
        uneven = max([uneven, *(abs(x - y) for x, y in zip(common, expected, strict=False))])
        diagonal.append(common[-1])
        progress(done, count)
        rest = _norm(vector)
        if done == count or rest <= torch.finfo(vector[0].dtype).eps * norm:
            break
        beside.append(rest)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, x in enumerate(beside):
        matrix[i, i + 1] = matrix[i + 1, i] = x
    values, vectors = torch.linalg.eigh(matrix)
    if uneven > ASYMMETRY * float(values.abs().max()):
        raise ValueError(
            "the second derivatives of the loss are not symmetric, so that some are wrong: torch cannot differentiate "
            "the backward of an operation, as of another library's kernel; measure with plain operations of torch"
        )
    return values.tolist(), vectors[0].square().tolist()


def _orthogonalise(vector: Vector, basis: list[Vector]) -> list[float]:
    """Subtract from a vector, in place, what it has in common with each of the basis; return how much that was."""
    found = []
    for other in basis:
        common = _dot(vector, other)
        for x, y in zip(vector, other, strict=True):
            x.sub_(y, alpha=common)
        found.append(common)
    return found


def _dot(a: Vector, b: Vector) -> float:
    """Return the inner product, summed in float64 if the device has it; the weights may be on several devices."""
    home = a[0].device
    wide = torch.float32 if home.type == "mps" else torch.float64  # mps has no float64
    sums = [torch.sum(x * y, dtype=wide).to(home) for x, y in zip(a, b, strict=True)]
    return float(torch.stack(sums).sum())


def _norm(vector: Vector) -> float:
    return math.sqrt(_dot(vector, vector))


def _precision(t: Tensor) -> torch.dtype:
    """Return the dtype to compute with."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


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

"""What Belay refuses, or warns about, before anything is attached."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from torchbelay.ops.backend import has_triton, is_interpreted
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.method import Method, Remembers
from torchbelay.physics.spring import Spring
from torchbelay.physics.warnings import warn

from .average import Wanted
from .cohort import inertias
from .shard import is_flattened


def check_model(model: object) -> None:
    """Refuse what is not a module, and weights that FSDP1 has flattened: their average could not be evaluated."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that is trained")
    if is_flattened(model):
        raise ValueError(
            f"model={type(model).__name__} has been flattened by FullyShardedDataParallel (FSDP1), and an average of "
            "flat pieces can be neither evaluated nor saved; use torch.distributed.fsdp.fully_shard (FSDP2), or pass "
            "the FSDP1 module as a whole, with ShardingStrategy.NO_SHARD and use_orig_params=True"
        )


def check_optimizer(optimizer: object) -> None:
    """Refuse an optimizer without torch's step hooks."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer; pass the one inside it, or None and "
            "call before_step() and after_step() around the update"
        )
    if optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} has no step hooks, as some wrappers; pass the optimizer inside it"
        )


def check_method(method: object, lr: float, *, pulls: bool, hosted: bool, average: str, every: int) -> None:
    """Refuse what is not a method, an unstable one, a pull that is not allowed, and an `every` that does not fit."""
    if isinstance(method, type) or not isinstance(method, Method):
        raise TypeError(
            f"the method for {average!r}, {method!r}, has no coupling(step, lr); give a Spring, for example"
        )
    if isinstance(method, Spring) and not (method.is_stable or method.allow_unstable):
        raise ValueError(
            f"{method} is unstable: it would blow the weights up; if you want that, say allow_unstable=True"
        )
    coupling = _first_coupling(method, lr)
    if not isinstance(coupling, Coupling):
        raise TypeError(f"{method!r}.coupling(1, {lr}) returned {coupling!r}, not a Coupling")
    if hosted and pulls_weights(method, lr):
        raise ValueError(
            f"device='cpu' keeps {average!r} in host memory, but {method!r} pulls the weights: every step would have "
            "to wait for that memory. Leave device out; averages that only watch can be in a second Belay on the same "
            "optimizer, with device='cpu'"
        )
    if not pulls and pulls_weights(method, lr):
        raise ValueError(
            f"the spectator {average!r} would pull the weights ({method!r}); spectators only watch: use Spring.ema, or "
            "make it the method"
        )
    if every > 1:
        _check_thinning(method, coupling, every)


def _check_thinning(method: Method, coupling: Coupling, every: int) -> None:
    """Refuse `every` > 1 for a method that needs each single step."""
    reasons = {
        "it adds a force of its own at every step": not coupling.relaxes or coupling.a < 0,
        "its velocities move at every step": any(inertias(method)),
        "it must see the learning rate of every step": isinstance(method, Remembers),
        "it has a rhythm of its own": getattr(method, "rhythm", False),
    }
    for why, holds in reasons.items():
        if holds:
            raise ValueError(f"every={every} does not go with {method!r}: {why}; use every=1")


def pulls_weights(method: Method, lr: float) -> bool:
    """Whether the weights will feel the average; a method that pulls only later says so by `pulls`."""
    swings = inertias(method)[0] is not None
    return swings or bool(getattr(method, "pulls", False)) or _first_coupling(method, lr).pulls


def _first_coupling(method: Method, lr: float) -> Coupling:
    return (method.fresh() if isinstance(method, Remembers) else method).coupling(1, lr)


def check_kernels(found: Iterable[Wanted], *, impl: str, rounding: str) -> None:
    """Refuse options that need kernels, for parameters that kernels cannot take."""
    if is_interpreted():
        return
    for name, p, _, _ in found:
        if impl == "triton" and not p.is_cuda:
            raise ValueError(
                f"impl='triton' runs on a GPU, and parameter {name!r} is on {p.device}; move the model there first, or "
                "use impl='auto'"
            )
        kernels = p.is_cuda and has_triton() and impl in ("auto", "triton")
        if rounding == "stochastic" and p.dtype == torch.bfloat16 and not kernels:
            raise ValueError(
                f"rounding='stochastic' is done by Triton kernels on a GPU, and parameter {name!r} is on {p.device} "
                f"with impl={impl!r}; use rounding='nearest'"
            )


def warn_of_feedback(found: Iterable[Wanted], optimizer: Optimizer | None, *, rounding: str = "nearest") -> None:
    """Warn about a pull on 16-bit weights, and about a pull under LBFGS."""
    pulling: dict[int, bool] = {}  # a method has many parameters
    pulled = []
    for name, p, method, _ in found:
        if id(method) not in pulling:
            pulling[id(method)] = pulls_weights(method, 1e-12)  # any rate will do that makes no pull too strong
        if pulling[id(method)]:
            pulled.append((name, p))
    lossy = {torch.float16} if rounding == "stochastic" else {torch.bfloat16, torch.float16}
    narrow = [(name, p) for name, p in pulled if p.dtype in lossy]
    if narrow:
        name, p = narrow[0]
        warn(
            f"{len(narrow)} parameters that the average pulls are 16 bits wide ({name!r} is {p.dtype}): a pull smaller "
            f"than {torch.finfo(p.dtype).eps:.1g} of a weight rounds away. Keep the model in float32 under autocast, "
            "or let the optimizer hold float32 master weights"
        )
    if pulled and isinstance(optimizer, torch.optim.LBFGS):
        warn(
            "LBFGS builds its curvature from the steps it took itself; a pull on the weights between them makes those "
            "pairs wrong. Use an average that only watches (Spring.ema), or another optimizer"
        )

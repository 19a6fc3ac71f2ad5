"""What Belay refuses, or warns about, before anything is attached."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import torch
from torch import nn
from torch.optim import Optimizer

from torchbelay.ops.backend import has_triton, is_interpreted
from torchbelay.physics.coupling import Coupling, closed
from torchbelay.physics.inner_momentum import is_below_floor, stable_range, theta_floor
from torchbelay.physics.method import Method, Remembers, settled, uncalled
from torchbelay.physics.spring import Spring
from torchbelay.physics.warnings import warn

from .average import Wanted, average_dtype
from .cohort import inertias, varies
from .models import as_model, each_of
from .optimizers import Momentum, momentum_of, unwrapped
from .overlap import overlapping
from .shard import is_flattened

LATE = 10_000  # a step at which a warm-up is over
EARLY = 10  # steps in which a method's couplings are looked at


def check_model(model: object) -> nn.Module:
    """Return one module for what was given; refuse what is none, and weights that FSDP1 has flattened.

    The average of flattened weights could not be evaluated.
    """
    module = as_model(model)
    flat = [each for each in each_of(module) if is_flattened(each)]
    if flat:
        raise ValueError(
            f"model={type(flat[0]).__name__} has been flattened by FullyShardedDataParallel (FSDP1), and an average of "
            "flat pieces can be neither evaluated nor saved; use torch.distributed.fsdp.fully_shard (FSDP2), or pass "
            "the FSDP1 module as a whole, with ShardingStrategy.NO_SHARD and use_orig_params=True"
        )
    return module


def why_nothing(average: str, held: list[str], optimizer: Optimizer | None, model: nn.Module) -> str:
    """Return why an average has no parameter, if these are the names of those that the optimizer holds."""
    return f"nothing to average for {average!r}: {_why(held, optimizer, model)}"


def _why(held: list[str], optimizer: Optimizer | None, model: nn.Module) -> str:
    if next(model.parameters(), None) is None:
        return f"the model, {type(model).__name__}, has no parameters; pass the module that is trained"
    if held:
        first = ", ".join(map(repr, held[:4]))
        return f"no floating-point parameter has a method; the first names of parameters are {first}"
    if optimizer is None:
        return "no parameter of the model requires gradients; turn them on, or use Belay.from_parameters(...)"
    return "the optimizer holds none of the parameters; give it those, or give None and step by hand"


def check_optimizers(optimizer: object) -> Sequence[Optimizer | None]:
    """Return all optimizers, without the wrappers that are known; refuse those without torch's step hooks."""
    if optimizer is None:
        return [None]
    if isinstance(optimizer, Mapping):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is neither an optimizer nor a sequence of optimizers; give "
            "list(optimizers.values())"
        )
    _refuse_mistaken("optimizer", optimizer)
    if isinstance(unwrapped(optimizer), Optimizer) or not isinstance(optimizer, Iterable) or isinstance(optimizer, str):
        return [_checked_optimizer("optimizer", optimizer)]
    found = [_checked_optimizer(f"optimizer[{i}]", each) for i, each in enumerate(optimizer)]
    if not found:
        raise ValueError("optimizer is an empty sequence; give None to step by hand")
    for i, each in enumerate(found):
        if any(each is other for other in found[:i]):
            raise ValueError(f"optimizer[{i}], {type(each).__name__}, is in the sequence twice; give each once")
    return found


def _refuse_mistaken(what: str, optimizer: object) -> None:
    """Refuse a class that was not called, and a module in the place of an optimizer."""
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(
            f"{what}={name} was not called; give the optimizer that it makes, as {name}(model.parameters(), ...)"
        )
    if isinstance(optimizer, nn.Module):
        raise TypeError(
            f"{what}={type(optimizer).__name__} is a module, and the optimizer belongs there: "
            "Belay(model, optimizer, method); give None to step by hand"
        )


def _checked_optimizer(what: str, optimizer: object) -> Optimizer:
    _refuse_mistaken(what, optimizer)
    inner = unwrapped(optimizer)
    inside = "" if inner is optimizer else f" inside {type(optimizer).__name__}"
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"{what}={type(inner).__name__}{inside} is not a torch.optim.Optimizer; pass the one inside it, or None "
            "and call before_step() and after_step() around the update"
        )
    if not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{what}={type(inner).__name__}{inside} has no step hooks, as some wrappers; pass the optimizer inside it"
        )
    return inner


def check_method(
    method: object, lr: float, *, pulls: bool, home: torch.device | None, average: str, every: int
) -> None:
    """Refuse what is not a method, an unstable one, a pull that is not allowed, and an `every` that does not fit."""
    if (maker := uncalled(method)) is not None:
        raise TypeError(f"the method for {average!r}, {maker}, was not called; give what it makes, as {maker}(...)")
    if not isinstance(method, Method):
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
    if home is not None and pulls_weights(method, lr):
        raise ValueError(
            f"device={str(home)!r} keeps {average!r} apart from the weights, but {method!r} pulls the weights: every "
            "step would have to wait for what is kept there. Leave device out; averages that only watch can be in a "
            f"second Belay on the same optimizer, with device={str(home)!r}"
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
    own = f", or {type(method).__name__}(..., every={every})" if hasattr(method, "every") else ""
    reasons = {
        "it adds a force of its own at every step": not coupling.relaxes or coupling.a < 0,
        "its velocities move at every step": any(inertias(method)),
        "it must see the learning rate of every step": isinstance(method, Remembers),
        "it has a rhythm of its own": getattr(method, "rhythm", False),
    }
    for why, holds in reasons.items():
        if holds:
            raise ValueError(f"every={every} does not go with {method!r}: {why}; use every=1{own}")


def pulls_weights(method: Method, lr: float) -> bool:
    """Whether the weights will feel the average; a method that pulls only later says so by `pulls`."""
    swings = inertias(method)[0] is not None
    return swings or bool(getattr(method, "pulls", False)) or _first_coupling(method, lr).pulls


def only_follows(method: Method) -> bool:
    """Whether an average needs no more than the weights after a step: it does not pull, lag behind or swing."""
    coupling = _first_coupling(method, 1e-12)
    return not pulls_weights(method, 1e-12) and not coupling.needs_copy and inertias(method) == (None, None)


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


def pulled_by(found: Iterable[Wanted]) -> dict[int, str]:
    """Return the names of the parameters that their average pulls, by their ids."""
    found = list(found)
    pulling: dict[int, bool] = {}  # a method has many parameters
    for _, _, method, _ in found:
        if id(method) not in pulling:
            pulling[id(method)] = pulls_weights(method, 1e-12)  # any rate will do that makes no pull too strong
    return {id(p): name for name, p, method, _ in found if pulling[id(method)]}


def refuse_pulled_twice(found: Iterable[Wanted]) -> None:
    """Refuse two parameters in one memory that both are pulled: the weights would be pulled twice in a step."""
    found = list(found)
    names = pulled_by(found)
    pair = overlapping(each.parameter for each in found if id(each.parameter) in names)
    if pair is not None:
        one, other = (names[id(p)] for p in pair)
        raise ValueError(
            f"parameters {one!r} and {other!r} share memory, as after b.data = a.data, and an average would pull these "
            "weights twice in a step. Tie the Parameter itself, as head.weight = embedding.weight, before you make the "
            "optimizer, or give one of the two memory of its own, by p.data = p.data.clone(). An average that only "
            "watches (Spring.ema) needs neither"
        )


def warn_of_rounding(found: Iterable[Wanted], *, rounding: str) -> None:
    """Warn about a pull on 16-bit weights."""
    found = list(found)
    names = pulled_by(found)
    pulled = [(name, p) for name, p, _, _ in found if id(p) in names]
    lossy = {torch.float16} if rounding == "stochastic" else {torch.bfloat16, torch.float16}
    narrow = [(name, p) for name, p in pulled if p.dtype in lossy]
    if narrow:
        name, p = narrow[0]
        warn(
            f"{len(narrow)} parameters that the average pulls are 16 bits wide ({name!r} is {p.dtype}): a pull smaller "
            f"than {torch.finfo(p.dtype).eps:.1g} of a weight rounds away. Keep the model in float32 under autocast, "
            "or let the optimizer hold float32 master weights"
        )


def warn_of_narrow(found: Iterable[Wanted], *, dtype: torch.dtype | None, bits: int | None, every: int) -> None:
    """Warn about averages of 16 bits, not of 24, whose steps are too small for them.

    A step moves the average w2 by b·(w1 − w2). Numbers beside w2 are eps·|w2| apart, or half of that, and what is
    nearer than the half of this distance rounds to w2 itself. With b < eps/2 the step is lost unless weight and average
    are further apart than the average is large: 2^-8 for bfloat16, 2^-11 for float16.
    """
    rates: dict[int, float | None] = {}
    for name, p, method, _ in found if bits is None else ():
        kept = average_dtype(p.dtype, dtype)
        if kept.itemsize != (4 if kept.is_complex else 2):
            continue
        if id(method) not in rates:
            rates[id(method)] = _late_rate(method, every)
        rate, least = rates[id(method)], torch.finfo(kept).eps / 2
        if rate is not None and 0 < rate < least:
            steps = "a step" if varies(method) == "never" else f"step {LATE:,}"
            warn(
                f"the average of {name!r} has {kept}, and {steps} of {method!r} moves it by {rate:.1g} of its distance "
                f"to the weights: less than {least:.1g} rounds away, so that it will hardly move. Leave "
                f"dtype={dtype} out, or give bits=24 instead"
            )
            return


def _late_rate(method: Method, every: int) -> float | None:
    """Return the b of a late step; None if some steps are special, or if that cannot be asked for."""
    if varies(method) not in ("never", "step") or getattr(method, "rhythm", False) or inertias(method)[1] is not None:
        return None
    try:
        b = copy(method).coupling(LATE, 1e-12).b
    except Exception:  # a method of the user's may have numbers for fewer steps
        return None
    return closed(b, every) if 0 < b < 1 else b


def warn_of_feedback(found: Iterable[Wanted], optimizer: Optimizer | None) -> None:
    """Warn about a pull under LBFGS, and about a repelling spring around much momentum."""
    found = list(found)
    if isinstance(optimizer, torch.optim.LBFGS) and pulled_by(found):
        warn(
            "LBFGS builds its curvature from the steps it took itself; a pull on the weights between them makes those "
            "pairs wrong. Use an average that only watches (Spring.ema), or another optimizer"
        )
    if optimizer is not None:
        _warn_of_momentum(found, optimizer)


def _warn_of_momentum(found: Iterable[Wanted], optimizer: Optimizer) -> None:
    """Warn about a repelling spring around an optimizer with so much momentum of its own that training fails."""
    pairs = {(id(method), group): (method, group) for _, _, method, group in found}
    warned: set[int] = set()
    for method, group in pairs.values():
        momentum = momentum_of(optimizer.param_groups[group])
        syncs = getattr(method, "gathering", None) == "mean"  # between them nothing pulls
        if momentum is None or id(method) in warned or syncs:
            continue
        for step, coupling in _telling_couplings(method):
            if coupling.a < 0 < coupling.rate and is_below_floor(coupling, momentum.beta, nesterov=momentum.nesterov):
                _say_momentum_is_there_twice(method, step, coupling, momentum, type(optimizer).__name__)
                warned.add(id(method))
                break


def _telling_couplings(method: Method) -> list[tuple[int, Coupling]]:
    """Return the numbers of a method's first steps, and of some until its schedules end, each with its coupling.

    The coupling is that of the method's own θ. A method that may not be asked for more is asked for step 1 alone.
    """
    steps = [1]
    if varies(method) in ("step", "lr"):
        last = getattr(method, "horizon", 0)
        steps = [*range(1, EARLY + 1), *(step for quarter in range(1, 5) if (step := last * quarter // 4) > EARLY)]
    asked = method.fresh() if isinstance(method, Remembers) else copy(method)
    return [(step, settled(asked, step, 1e-12)) for step in steps]


def _say_momentum_is_there_twice(
    method: Method, step: int, coupling: Coupling, momentum: Momentum, optimizer: str
) -> None:
    floor = theta_floor(momentum.beta, min(1.0, coupling.rate), "after" if coupling.q else "before")
    alone = stable_range(Coupling(0.0, 1.0, 1.0, 1.0), momentum.beta, nesterov=momentum.nesterov)
    left = stable_range(coupling, momentum.beta, nesterov=momentum.nesterov) * coupling.effective_lr_scale / alone
    below = "" if momentum.nesterov else f", below the floor {floor:.3g}"
    change = "shrinks to" if left < 1 else "ends at"
    warn(
        f"{method!r} around {optimizer} with {momentum.setting} is momentum twice: at step {step} its "
        f"θ = {coupling.theta:.3g}{below}, and the range of stable learning rates {change} {left:.2g} times "
        f"{optimizer}'s own. Give {optimizer} {momentum.cure}, or the method a θ nearer to 0 (θ < 0 is Generalized "
        "Primal Averaging, and schedule-free its case c = 1/t)"
    )

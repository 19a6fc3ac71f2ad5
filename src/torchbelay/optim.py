"""AdamW, Adam and SGD whose update and coupling are one pass over memory.

They are torch's own, with the same arguments, state and `state_dict()`: a checkpoint of one loads into the other. With
a `Belay` attached, on a GPU, weights, gradients, state and averages are read and written once, in one launch. Unusual
settings (amsgrad, maximize, foreach; sparse, sharded, float64 or complex tensors; several devices) take torch's own
step and the ordinary coupling.

`fused` is True if no other way is asked for and torch has a fused step for the weights, on the CPU too. The kernel
leaves `p.grad` as it is; torch's own fused step unscales it in place under GradScaler. torch's fused steps take tensors
as flat memory and do not look at their layout. If a gradient or a state is not laid out like its weights, these
optimizers take torch's ordinary step instead.
"""

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .belay.shard import is_sharded, local
from .belay.signals import signals_held
from .ops.step import Hyper

if TYPE_CHECKING:
    from .belay.plan import Work

__all__ = ["SGD", "Adam", "AdamW"]

FUSED_DEVICES = ("cpu", "cuda")
_ORDINARY = {Tensor, torch.nn.Parameter}


class _OnePassOptimizer(torch.optim.Optimizer):
    """Takes the averages of an attached `Belay` along in its own pass, if it can."""

    KEYS: ClassVar[tuple[str | None, ...]]  # in the state: the first moment, the second, the step count; None: has none

    _works: "tuple[Work, ...]" = ()  # handed over for the coming step, by each attached Belay
    _step_outside_graphs: Any = None  # `_step_with`, kept out of compiled graphs
    _pass: Any = None
    _known: Any = None  # the state that the pass was made for
    _refused: Any = None  # what no pass could be made for

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves unscaling and skipping to the step: True if every group is fused now."""
        return all(group.get("fused") for group in self.param_groups)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore what torch's constructor sets: a checkpoint may change the groups later."""

    def take_over(self, work: "Work") -> bool:
        """Take over the work of the coming step; False if this optimizer, as it is set, cannot take it along."""
        if self._rule() is None:
            return False
        if _OnePassOptimizer._step_outside_graphs is None:  # made late: it loads torch's compiler, which takes a second
            outside = torch.compiler.disable(_OnePassOptimizer._step_with)  # type: ignore[no-untyped-call]
            _OnePassOptimizer._step_outside_graphs = outside
        self._works = (*(other for other in self._works if not other.closed), work)
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, evaluates the loss again."""
        works = [work for work in self._works if not work.closed]
        self._works = ()
        return self._step_outside_graphs(works, closure) if works else self._torch_step(closure)

    def _step_with(self, works: "list[Work]", closure: Callable[[], Any] | None) -> Any:
        """Take one step, and the averages along if one pass can do it."""
        loss = _evaluated(closure)
        works = [work for work in works if not work.closed]  # the closure may have detached a Belay
        if len(works) != 1 or not self._carry(works[0]):
            for work in works:
                work.prepare()
            self._torch_step(None)
        return loss

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        """Take torch's own step, and its fused one only if all tensors are laid out as that assumes."""
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # torch's wrapper would call the hooks again
            step = step.__wrapped__
        loss = _evaluated(closure)
        if self._is_all_contiguous() or all(map(self._can_be_fused, self.param_groups)):
            step(self, None)
        else:
            self._step_unfused(step)
        return loss

    def _is_all_contiguous(self) -> bool:
        """Whether weights, gradients and states are ordinary contiguous tensors, as they usually are; asked fast."""
        weights = list(chain.from_iterable(map(itemgetter("params"), self.param_groups)))
        states = chain.from_iterable(map(dict.values, self.state.values()))
        tensors = [t for t in chain(weights, map(attrgetter("grad"), weights), states) if t is not None]
        if not _ORDINARY.issuperset(map(type, tensors)):
            return False
        try:
            return all(map(Tensor.is_contiguous, tensors))
        except RuntimeError:  # sparse
            return False

    def _can_be_fused(self, group: dict[str, Any]) -> bool:
        """Whether a group is not fused, or every gradient and state is laid out like its weights."""
        if not group.get("fused"):
            return True
        for p in group["params"]:
            if p.grad is not None and p.grad.layout == torch.strided:
                state = self.state[p].values() if p in self.state else ()
                others = [p.grad, *(t for t in state if isinstance(t, Tensor) and t.dim())]
                if not _are_alike(local(p), [local(t) for t in others]):
                    return False
        return True

    @torch.no_grad()
    def _step_unfused(self, step: Callable[..., Any]) -> None:
        """Take torch's ordinary step, once; unscale and skip as its fused step would."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        if scale is not None:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.grad /= scale.to(p.grad.device)
        fused = [group["fused"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["fused"] = False
            if found_inf is not None:
                self.grad_scale = self.found_inf = None
            step(self, None)
        finally:
            for group, kept in zip(self.param_groups, fused, strict=True):
                group["fused"] = kept
            if found_inf is not None:
                self.grad_scale, self.found_inf = scale, found_inf
            self._arrange_state()

    @torch.no_grad()
    def _arrange_state(self) -> None:
        """Lay the state of fused groups out like the weights, and move step counts to where a fused step has them."""
        for p in (p for group in self.param_groups if group.get("fused") for p in group["params"] if p in self.state):
            state = self.state[p]
            for key, value in state.items():
                if isinstance(value, Tensor) and not is_sharded(p) and value.shape == p.shape and value.dim():
                    laid_out = torch.empty_like(p, dtype=value.dtype)
                    if value.stride() != laid_out.stride():
                        state[key] = laid_out.copy_(value)
            if state.get("step") is not None:
                state["step"] = torch.as_tensor(state["step"]).to(p.device, torch.float32)

    @torch.no_grad()
    def _carry(self, work: "Work") -> bool:
        """Step and move the averages in one pass; False, with nothing done, if that is not possible."""
        rule = self._rule()  # asked again: hooks and the closure have run since `take_over`
        if rule is None or not work.moves:
            return False
        hyper = [self._hyper(group) for group in self.param_groups]
        gradients = self._find_pass(rule, work) if None not in hyper else None
        if gradients is None:
            return False
        scale = getattr(self, "grad_scale", None)
        run = self._pass.prepare(
            work.moves, gradients, hyper, keep=work.keep, scale=scale, count=work.count, capturing=work.capturing
        )
        with signals_held():
            work.begun = True
            run()
            work.begun, work.carried = False, True
        return True

    def _find_pass(self, rule: str, work: "Work") -> list[int] | None:
        """Find or make the pass for this work, and return the addresses of the gradients; None if there is no pass."""
        from .ops.triton.fused import are_usual  # Triton is installed: only its backend hands work over
        from .ops.triton.table import KnownStates, State

        known, groups = self._pass, [move.group for move in work.moves]
        current = self._known is not None and self._known.are_current(self.state.values())
        if known is not None and current and known.fits(rule, work.parameters, work.moves):
            gradients: list[int] | None = known.gradients()
            if gradients is not None:
                return gradients
        if known is None and current and self._refused == (rule, groups):
            return None  # as at the last step
        if not are_usual(work.parameters):
            return None
        self._init_states()
        states = [
            State(i, *(self.state[p].get(key) if key and p in self.state else None for key in self.KEYS))
            for i, group in enumerate(self.param_groups)
            for p in group["params"]
        ]
        self._pass = known = work.fuse(rule, work.parameters, states, work.moves)
        self._known = KnownStates(self.state.values(), [key for key in self.KEYS if key])
        self._refused = (rule, groups) if known is None else None
        return None if known is None else known.gradients()

    def _rule(self) -> str | None:
        """Return the name of the kernel's update, if the kernel has it and all groups agree; else None."""
        rules = {self._rule_of(group) for group in self.param_groups}
        return rules.pop() if len(rules) == 1 else None

    # What the optimizers differ in

    def _rule_of(self, group: dict[str, Any]) -> str | None:
        """Return the name of the kernel's update for a group; None if the kernel does not have it."""
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> Hyper | None:
        """Return the numbers of a group as the kernel takes them; None if it cannot."""
        raise NotImplementedError

    def _init_states(self) -> None:
        """Make the state of parameters that have a gradient for the first time."""


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _are_alike(p: Tensor, others: list[Tensor]) -> bool:
    """Whether tensors of one shape lie in memory as flat arrays of one order."""
    if p.is_contiguous():
        return all(map(Tensor.is_contiguous, others))
    dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return dense and all(t.stride() == p.stride() for t in others)


def _rate(group: dict[str, Any]) -> float | Tensor | None:
    """Return the learning rate as the kernel takes it: a number, or a float32 tensor on the weights' device."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return float(lr)
    if lr.device.type == "cpu" and not any(p.device.type == "cpu" for p in group["params"]):
        return float(lr)
    alike = lr.dtype == torch.float32 and all(p.device == lr.device for p in group["params"][:1])
    return lr if alike else None


class Adam(_OnePassOptimizer, torch.optim.Adam):
    """torch.optim.Adam, in one pass with an attached `Belay` on a GPU.

    >>> import torchbelay as tb
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = Adam(model.parameters(), lr=1e-3)
    >>> belay = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.99))
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()
    >>> belay.step
    1
    """

    KEYS = ("exp_avg", "exp_avg_sq", "step")

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)
        self._fuse_by_default()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizer does."""
        super().add_param_group(param_group)
        self._fuse_by_default()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fuse_by_default()

    def _fuse_by_default(self) -> None:
        """Set `fused` if the user left it open."""
        for group in self.param_groups:
            silent = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
            if silent and all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in group["params"]):
                group["fused"] = True
        self._arrange_state()

    def _rule_of(self, group: dict[str, Any]) -> str | None:
        if group["amsgrad"] or group["maximize"] or group["differentiable"] or group["foreach"] is not None:
            return None
        if not group["fused"]:
            return None
        return "adamw" if group["decoupled_weight_decay"] else "adam"

    def _hyper(self, group: dict[str, Any]) -> Hyper | None:
        lr, (beta1, beta2) = _rate(group), group["betas"]
        if lr is None or isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
            return None
        return lr, beta1, beta2, group["eps"], group["weight_decay"]

    def _init_states(self) -> None:
        for group in self.param_groups:
            self._init_group(group, [], [], [], [], [], [])  # type: ignore[no-untyped-call]


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, in one pass with an attached `Belay` on a GPU.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    >>> torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.state_dict())
    """

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, *args: Any, **kwargs: Any) -> None:
        torch.optim.AdamW.__init__(self, params, lr, *args, **kwargs)
        self._fuse_by_default()


class SGD(_OnePassOptimizer, torch.optim.SGD):
    """torch.optim.SGD, in one pass with an attached `Belay` on a GPU.

    >>> model = torch.nn.Linear(3, 1)
    >>> SGD(model.parameters(), lr=0.1, momentum=0.9).defaults["momentum"]
    0.9
    """

    KEYS = ("momentum_buffer", None, None)

    def _rule_of(self, group: dict[str, Any]) -> str | None:
        if group["maximize"] or group["differentiable"] or group["foreach"] is not None or group["fused"] is False:
            return None
        if isinstance(group["weight_decay"], Tensor):
            return None
        return ("nesterov" if group["nesterov"] else "momentum") if group["momentum"] else "sgd"

    def _hyper(self, group: dict[str, Any]) -> Hyper | None:
        lr = _rate(group)
        return None if lr is None else (lr, group["momentum"], group["dampening"], 0.0, group["weight_decay"])

"""AdamW, Adam and SGD whose update and coupling are one pass over memory.

They are torch's own, with the same arguments, state and `state_dict()`: a checkpoint of one loads into the other. With
a `Belay` attached, on a GPU, weights, gradients, state and averages are read and written once, in one launch. Unusual
settings (amsgrad, maximize, foreach; sparse, sharded, float64 or complex tensors; several devices) take torch's own
step and the ordinary coupling.

`fused` is True if no other way is asked for and torch has a fused step for the weights, on the CPU too. The kernel
leaves `p.grad` as it is; torch's own fused step unscales it in place under GradScaler.

Every step checks the state of 32 parameters, in turn: a tensor that is put into a parameter's state by hand is noticed
after at most n/32 steps, if the optimizer has n parameters. `load_state_dict` is noticed at once.
"""

from collections.abc import Callable, Collection
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .ops.step import Hyper

if TYPE_CHECKING:
    from .belay.plan import Work

__all__ = ["SGD", "Adam", "AdamW"]

FUSED_DEVICES = ("cpu", "cuda")


class _OnePassOptimizer(torch.optim.Optimizer):
    """Takes the averages of an attached `Belay` along in its own pass, if it can."""

    KEYS: ClassVar[tuple[str | None, ...]]  # in the state: the first moment, the second, the step count; None: has none

    _works: "tuple[Work, ...]" = ()  # handed over for the coming step, by each attached Belay
    _step_outside_graphs: Any = None  # `_step_with`, kept out of compiled graphs
    _pass: Any = None
    _states: Collection[Any] = ()
    _refused: Any = None  # what no pass could be made for

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        works = [work for work in works if not work.closed]  # the closure may have detached or reset a Belay
        if len(works) != 1 or not self._carry(works[0]):
            for work in works:
                work.lead()
            self._torch_step(None)
        return loss

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # torch's wrapper would call the hooks again
            step = step.__wrapped__
        return step(self, closure)

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
        self._pass.run(
            work.moves, gradients, hyper, keep=work.keep, scale=scale, count=work.count, capturing=work.capturing
        )
        work.carried = True
        return True

    def _find_pass(self, rule: str, work: "Work") -> list[int] | None:
        """Find or make the pass for this work, and return the addresses of the gradients; None if there is no pass."""
        known = self._pass
        if known is None and self._refused is not None and self._refused == (rule, [m.group for m in work.moves]):
            return None  # as at the last step
        if (
            known is not None
            and _identical(self.state.values(), self._states)
            and known.fits(rule, work.parameters, work.moves)
        ):
            gradients: list[int] | None = known.gradients()
            if gradients is not None:
                return gradients
        from .ops.triton.fused import are_usual  # Triton is installed: only its backend hands work over
        from .ops.triton.table import State

        if not are_usual(work.parameters):
            return None
        self._init_states()
        groups = enumerate(self.param_groups)
        states = [State(self.state.get(p, {}), self.KEYS, i) for i, group in groups for p in group["params"]]
        self._pass = known = work.fuse(rule, work.parameters, states, work.moves)
        self._states = list(self.state.values())
        self._refused = (rule, [move.group for move in work.moves]) if known is None else None
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


def _identical(xs: Collection[Any], ys: Collection[Any]) -> bool:
    return len(xs) == len(ys) and all(map(is_, xs, ys))


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
        """Set `fused` if the user left it open, and move the step counts to where a fused step has them."""
        for group in self.param_groups:
            silent = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
            if silent and all(p.is_floating_point() and p.device.type in FUSED_DEVICES for p in group["params"]):
                group["fused"] = True
                for p in group["params"]:
                    step = self.state[p].get("step") if p in self.state else None
                    if step is not None:
                        self.state[p]["step"] = torch.as_tensor(step).to(p.device, torch.float32)
        if all(group.get("fused") for group in self.param_groups):
            self._step_supports_amp_scaling = True

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

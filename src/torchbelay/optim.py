"""AdamW, Adam and SGD whose update and coupling are one pass over memory.

They are torch's own, with the same arguments, state and `state_dict()`: a checkpoint of one loads into the other. With
a `Belay` attached, on a GPU, weights, gradients, state and averages are read and written once, in one launch. Whatever
is unusual (amsgrad, maximize, foreach; sparse, sharded, float64 or complex tensors; several devices) takes torch's own
step and the ordinary coupling.

`fused` is True where nothing else is asked for and torch has such a step for the weights, on the CPU too. The kernel
leaves `p.grad` as it is; torch's own fused step unscales it in place under GradScaler.

Tensors that are put into a parameter's state by hand are noticed at once in models of up to 32 parameters, and within
a step for every 32 in larger ones; `load_state_dict` is noticed at once.
"""

from collections.abc import Callable, Collection, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .belay.stepper import Stepper

__all__ = ["SGD", "Adam", "AdamW"]

Hyper = tuple[float | Tensor, float, float, float, float]  # lr, betas (momentum and dampening), eps, weight decay

FUSED_DEVICES = ("cpu", "cuda")


class _Fusing(torch.optim.Optimizer):
    """Takes the averages of an attached `Belay` along in its own pass, if it can."""

    KEYS: ClassVar[tuple[str | None, ...]]  # what the state has of two moments and a step count

    _expected: Sequence["Stepper"] = ()
    _pass: Any = None
    _states: Sequence[Any] = ()
    _refused: Any = None  # what no pass could be made for

    def expect_averages(self, stepper: "Stepper") -> bool:
        """Told before a step that averages want to come along."""
        if not hasattr(stepper.around, "fused") or self._rule() is None:
            return False
        self._expected = [*(other for other in self._expected if other is not stepper and other.under_way), stepper]
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure`, if given, evaluates the loss again."""
        expected, self._expected = [each for each in self._expected if each.under_way], ()
        return self._step_with(expected, closure) if expected else self._torch_step(closure)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_with(self, expected: Sequence["Stepper"], closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if len(expected) > 1 or not self._carry(expected[0]):
            for stepper in expected:
                stepper.lead()
            self._torch_step(None)
        return loss

    def _torch_step(self, closure: Callable[[], Any] | None) -> Any:
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # the hooks are being called already, around ours
            step = step.__wrapped__
        return step(self, closure)

    @torch.no_grad()
    def _carry(self, stepper: "Stepper") -> bool:
        """Step and move the averages in one pass; False, with nothing done, if that cannot be."""
        work, rule = stepper.work, self._rule()
        if rule is None or work.skipped or not work.moves:
            return False
        hyper = [self._hyper(group) for group in self.param_groups]
        gradients = self._gradients(rule, stepper) if None not in hyper else None
        if gradients is None:
            return False
        self._pass.run(
            work.moves, gradients, hyper, keep=work.keep, scale=getattr(self, "grad_scale", None), count=stepper.clock
        )
        stepper.carried_along()
        return True

    def _gradients(self, rule: str, stepper: "Stepper") -> list[int] | None:
        """Where the gradients are, once the pass is known to fit them."""
        moves, known = stepper.work.moves, self._pass
        lists = [move.lists for move in moves]
        if self._refused == (rule, lists) and known is None:
            return None  # as at the last step
        if (
            known is not None
            and known.rule == rule
            and known.parameters is stepper.parameters
            and _identical(self.state.values(), self._states)
            and known.is_current(moves)
        ):
            gradients: list[int] | None = known.gradients()
            if gradients is not None:
                return gradients
        from .ops.triton.fused import is_usual  # Triton is there: its averages are expected
        from .ops.triton.table import State

        if not all(map(is_usual, stepper.parameters)):
            return None
        self._init_states()
        groups = enumerate(self.param_groups)
        states = [State(self.state.get(p, {}), self.KEYS, i) for i, group in groups for p in group["params"]]
        self._pass = known = stepper.around.fused(rule, stepper.parameters, states, moves)  # type: ignore[attr-defined]
        self._states = list(self.state.values())
        self._refused = (rule, lists) if known is None else None
        return None if known is None else known.gradients()

    def _rule(self) -> str | None:
        """Which update this is, if the kernel has it and every group agrees."""
        rules = {self._rule_of(group) for group in self.param_groups}
        return rules.pop() if len(rules) == 1 else None

    # What the optimizers differ in

    def _rule_of(self, group: dict[str, Any]) -> str | None:
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> Hyper | None:
        raise NotImplementedError

    def _init_states(self) -> None:
        """Make the state of parameters that have a gradient for the first time."""


def _identical(xs: Collection[Any], ys: Collection[Any]) -> bool:
    return len(xs) == len(ys) and all(map(is_, xs, ys))


def _rate(group: dict[str, Any]) -> float | Tensor | None:
    """The learning rate as the kernel takes it: a number, or a float32 tensor on the weights' device."""
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return float(lr)
    if lr.device.type == "cpu" and not any(p.device.type == "cpu" for p in group["params"]):
        return float(lr)
    alike = lr.dtype == torch.float32 and all(p.device == lr.device for p in group["params"][:1])
    return lr if alike else None


class Adam(_Fusing, torch.optim.Adam):
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
        """As torch's."""
        super().add_param_group(param_group)
        self._fuse_by_default()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fuse_by_default()

    def _fuse_by_default(self) -> None:
        """Say `fused` where nobody said anything, and let the step counts be where such a step has them."""
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


class SGD(_Fusing, torch.optim.SGD):
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

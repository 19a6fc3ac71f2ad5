"""The public class `Belay`, which couples a model to its average around every step of any torch optimizer."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics import arguments
from torchbelay.physics.method import Method

from . import checkpoint, optimizer_state, stats
from .access import Access
from .agreement import agreement
from .average import MAIN
from .change import change
from .models import as_loose
from .options import OptionArguments, Options
from .parts import Parts
from .rules import Rule, as_rule
from .signals import signals_held
from .slices import Slices
from .team import common_facts, group_of_either, refuse_spectators
from .threads import Exports
from .validate import check_model, check_optimizers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Belay(Access):
    """Attach BELAY, EMA or any other averaging method to an optimizer; nothing else to call in the loop.

    Args:
        model: the module whose weights are averaged, wrapped (DDP, torch.compile, …) or not. Or several modules, as the
            stages of a pipeline, whose tensors keep the names that each module has for them.
        optimizer: any torch.optim.Optimizer over the model's parameters, or the wrapper that accelerate, Fabric or
            Lightning put around one. Belay averages the parameters that it holds. Or several optimizers, as Muon beside
            AdamW, or one per parameter that steps in the backward: each parameter follows the steps of its own, and
            buffers follow the first. None: call `before_step()` and `after_step()` around the update yourself, or
            `update()` after it; parameters that require gradients are averaged.
        method: a method of `torchbelay.methods`, a Spring, or any object with `coupling(step, lr)`. Or a function
            (name, parameter) -> method, which returns None for a parameter that is not to be averaged. With
            buffers="average" it is asked for floating-point buffers too, by their names.
        spectators: further averages by name. They watch the weights and do not pull them.
        replace: detach a Belay that pulls these parameters already, or is saved with this optimizer; without it, a
            second one is refused.
        save_with_optimizer: let the averages be in what `optimizer.state_dict()` returns, and load them with it. Who
            saves the optimizer (any trainer, torch.distributed.checkpoint) saves them. No other call is needed.
        shard: a process group (or a DeviceMesh of one dimension) of replicas, as of DistributedDataParallel, that share
            the averages: each of N ranks keeps 1/N of them. Averages that only watch send nothing in a step; a pull
            gathers the weights. Every rank must call what needs all of an average: docs/scale.md has the list.
        **options: `dtype`, `bits`, `buffers`, `every`, `start`, `impl`, `rounding`, `on_nonfinite`, `device`,
            `keep_initial`, `workers`; see `torchbelay.options.Options`.

    The averages of a sharded model (DTensor: FSDP2, HSDP, tensor parallel) are sharded like its parameters, and a step
    needs no communication. With sharded models, `stats()` and full exports are collectives: call them on every rank.

    >>> from torchbelay import Spring
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> belay = Belay(model, optimizer, Spring(k=1.0, m1=2000.0, m2=500.0))
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> with belay.averaged():
    ...     loss = model(torch.ones(4, 3)).square().mean()
    >>> belay.step
    10
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer] | None,
        method: Method | Rule,
        *,
        spectators: Mapping[str, Method | Rule] | None = None,
        replace: bool = False,
        save_with_optimizer: bool = False,
        shard: "ProcessGroup | DeviceMesh | None" = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        group = group_of_either(shard, options.get("workers"))
        with agreement(group) as facts:
            rules = _rules(method, spectators)
            self._model, optimizers = check_model(model), check_optimizers(optimizer)
            self._options = Options.given(options)
            slices = None if shard is None else Slices(group)
            self._parts = Parts(self._model, optimizers, rules, self._options, slices)
            self._exports = Exports(self._parts.member)
            self._reset_observers: tuple[Callable[[], None], ...] = ()  # called when every average has begun again
            self._optimizer = self._parts.first.optimizer
            self._averages, self._stepper = self._parts.first.averages, self._parts.first.stepper
            main = self._parts.check(replace=replace)  # refuses what cannot be averaged, before anything is attached
            if slices is not None:
                facts |= self._parts.shared_facts(save_with_optimizer=save_with_optimizer)
            refuse_spectators(self._parts.team, rules)
            facts |= common_facts(self._parts.team, self._model, main, self._options.common())
            if save_with_optimizer:
                optimizer_state.check(self._parts, replace=replace)
        try:
            self._parts.attach(replace=replace)
            (optimizer_state.attach if save_with_optimizer else optimizer_state.watch)(self._parts)
        except BaseException:  # also a warning that is an error: nobody could detach this one later
            self._parts.member.detach()
            raise

    @classmethod
    def from_parameters(
        cls,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        optimizer: Optimizer | Iterable[Optimizer] | None,
        method: Method | Rule,
        *,
        spectators: Mapping[str, Method | Rule] | None = None,
        replace: bool = False,
        save_with_optimizer: bool = False,
        shard: "ProcessGroup | DeviceMesh | None" = None,
        **options: Unpack[OptionArguments],
    ) -> Self:
        """Average tensors without a module: those that were given, and nothing else that the optimizer holds.

        `params` are tensors, whose names are their positions, or pairs of a name and a tensor. `averaged()` gives their
        list. Without an optimizer all of them are averaged, with one those that it holds.

        >>> from torchbelay import Spring
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> belay = Belay.from_parameters([("weight", weight)], optimizer, Spring.ema(decay=0.5))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> belay.average_state_dict()["weight"]
        tensor([0.5000, 0.5000])
        """
        loose = as_loose(params)
        how = {"replace": replace, "save_with_optimizer": save_with_optimizer}
        return cls(loose, optimizer, method, spectators=spectators, shard=shard, **how, **options)

    # The step ----------------------------------------------------------------------------------------------------

    def before_step(self, lr: float | None = None) -> None:
        """Call this right before you update the weights by hand; give `lr` if the method depends on it."""
        self._refuse_if_attached("before_step")
        self._averages.parameters.given_lr = None if lr is None else arguments.number("lr", lr, low=0, open_low=False)
        self._stepper.before()

    def after_step(self) -> None:
        """Call this right after you updated the weights by hand."""
        self._refuse_if_attached("after_step")
        self._parts.refuse_inside("after_step")
        if not self._stepper.under_way:
            raise RuntimeError("after_step() without before_step(): call that right before the weights are updated")
        self._stepper.look()
        with signals_held():
            self._stepper.after()

    def update(self, *, rate: float | None = None) -> None:
        """Let the averages follow the weights as they are now: call this alone, after you updated them by hand.

        For averages that only follow the weights after a step (a = 0, follow="after"), as `Spring.ema` and
        `methods.swa`; with others, call `before_step()` and `after_step()`. It counts as a step.

        `rate`, from 0 to 1, is the share of the new weights in the average at this update alone, whatever the method
        and `every` say: 1 copies the weights. Averaged buffers take the same share. Spectators follow their own
        methods.

        >>> from torchbelay import Spring
        >>> critic = nn.Linear(1, 1, bias=False)
        >>> target = Belay(critic, None, Spring.ema(decay=0.75))
        >>> nn.init.zeros_(critic.weight).requires_grad
        True
        >>> target.update(rate=1.0)
        >>> nn.init.ones_(critic.weight).requires_grad
        True
        >>> target.update()
        >>> target.average_state_dict()["weight"].item()
        0.25
        """
        self._refuse_if_attached("update")
        self._parts.refuse_inside("update")
        if self._stepper.under_way and not self._stepper.torn:
            raise RuntimeError("update() between before_step() and after_step(): call after_step() first")
        share = None
        if rate is not None:
            share = arguments.number("rate", rate, low=0, high=1, open_low=False, open_high=False)
        self._averages.parameters.given_lr = None
        self._stepper.update(share)

    # Changes -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self) -> None:
        """Begin every average again at the weights as they are. Call this after you loaded weights into the model."""
        self._parts.refuse_now("reset")
        self._parts.wait()
        self._parts.restart()
        for observe in self._reset_observers:
            observe()

    def change(self, method: Method | Rule, name: str = MAIN) -> None:
        """Let an average go on with another method, as a decay that is larger from now on.

        Its values and ages stay, so warm-ups do not begin again. Velocities that are new begin at 0, a method that
        remembers learning rates begins without memory, and a parameter that was not averaged at the weights as they
        are. A CUDA graph that was captured before replays the old method: capture it again. `snapshots.synthesize` does
        not use snapshots of the average from then on, whose history no method tells.

        >>> from torchbelay import Spring
        >>> belay = Belay(nn.Linear(3, 1), None, Spring.ema(decay=0.75))
        >>> belay.change(Spring.ema(decay=0.875))
        >>> belay.decay
        0.875
        """
        self._parts.refuse_now("change")
        rule = as_rule(method)
        self._average(name)
        change(self._parts, name, rule)

    # Numbers and checkpoints -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of optimizer steps since construction; skipped steps do not count.

        With several optimizers, the steps of the one that took the most.
        """
        return self._parts.step

    @torch.no_grad()
    def stats(self, prefix: str = "") -> dict[str, float | int]:
        """Return numbers to log: step, tension ‖w2 − w1‖, its ratio to ‖w1‖, effective learning rate.

        "effective_lr" is that of the optimizer's first group, "effective_lr/1", … are those of the others, then those
        of the next optimizer's groups. If methods differ within a group, the group's first parameter counts. `prefix`
        is put before every name. With a sharded model every rank must call.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"prefix={prefix!r} is not a text; give one as 'belay/', or leave it out")
        self._average(MAIN)
        return {prefix + name: number for name, number in stats.stats(self._parts).items()}

    @property
    def regime(self) -> str | dict[str, str]:
        """The kind of motion: a spring's regime, for another method its name; by parameter's name if they differ."""
        return stats.regimes(self._parts)

    @property
    def decay(self) -> float | dict[str, float]:
        """The share 1 − b of itself that the average kept at its last coupling; by parameter's name if they differ.

        Before the first coupling it is that of the first. The warm-ups and schedules of a method show here.
        """
        return stats.decays(self._parts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs, as plain tensors and numbers.

        Tensors are the live ones, as in torch's own state dicts, except inside `averaged()` and before the averages
        begin. While somebody holds them, `averaged()` makes a copy of the weights: drop the state before you evaluate.
        Save it with torch.save, or give the Belay itself (it is `Stateful`) to torch.distributed.checkpoint.

        A method is saved as its class and the fields that differ from their defaults. A field that no text can tell,
        such as a lambda, is saved as the method's couplings at some steps; loading compares these, and warns.

        Sharded tensors stay sharded, unless `full`: then they are gathered in the first rank's host memory, one tensor
        at a time, and what is returned there fits any number of ranks. Every rank must call; the other ranks get {}.
        With `shard`, a state that is not full has slices, which torch.save refuses.
        """
        self._parts.wait()
        with self._parts.member.lock:
            swap = self._parts.member.settled_swap()
            self._parts.warn_before_use()
            if swap is None:
                self._parts.follow_model()
            saved = self._parts.saved()
            state = {
                "format": checkpoint.FORMAT,
                "ahead": 0,
                "options": self._options.saved(),
                "made_with": checkpoint.made_with(saved["averages"], self._options),
                **saved,
            }
            if full:
                whole = checkpoint.taken(state, self._parts.taking(full=True))
                return whole if self._parts.is_first_rank() else {}
            return state if self._parts.slices is None else checkpoint.taken(state, self._parts.slices.sealed)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a `state_dict()`; a state that does not fit is refused and changes nothing.

        A state of one process fits a sharded model too. Shards that another rank saved are refused. Use
        torch.distributed.checkpoint to change the number of ranks. With `shard` every rank must call, and all refuse if
        one does.

        With strict=False, another decay, method, dtype, option or set of spectators or parameters is taken, with a
        warning that says what changed. Values and ages go on. A spectator that is new begins at the checkpoint's
        average, and a parameter that is new at the weights: load those into the model first. Velocities that are new
        begin at 0, and a method that changed without memory of past learning rates. Other shapes are refused.
        """
        self._parts.refuse_now("load_state_dict")
        self._parts.wait()
        self._parts.load(state, strict=strict)

    def detach(self) -> None:
        """Remove the hooks: the optimizer is as it was, and the average can still be used."""
        self._parts.refuse_inside("detach")
        self._parts.member.detach()

    def _refuse_if_attached(self, what: str) -> None:
        if self._optimizer is not None:
            raise RuntimeError(f"{what}() is for Belay(model, None, ...): here the optimizer's own hooks do it")
        if not self._stepper.attached:
            raise RuntimeError(f"{what}() after detach(): this Belay no longer follows the model; make a new one")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Belay is attached to its optimizer and cannot be copied or pickled; save its state_dict() and load that "
            "into a Belay of the other model and optimizer"
        )

    def __repr__(self) -> str:
        return f"Belay({'; '.join(stats.about(self._parts))})"


def _rules(method: Method | Rule, spectators: Mapping[str, Method | Rule] | None) -> dict[str, Rule]:
    """Return the rule of each average, by name: first the one that may pull."""
    if spectators is not None and not isinstance(spectators, Mapping):
        raise TypeError(f"spectators={spectators!r} is not a dict; give each a name, as {{'short': ...}}")
    rules = {MAIN: as_rule(method)}
    for name, watching in (spectators or {}).items():
        if not isinstance(name, str) or not name or name == MAIN:
            raise ValueError(f"spectators has the name {name!r}; give each a name of its own, other than {MAIN!r}")
        rules[name] = as_rule(watching)
    return rules

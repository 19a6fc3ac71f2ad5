"""The public class `Belay`, which couples a model to its average around every step of any torch optimizer."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics import arguments
from torchbelay.physics.method import Method
from torchbelay.physics.readouts import Readout

from . import checkpoint, company, export, files, modules, shard
from .average import MAIN, Rule, WholeAverage, as_rule
from .live_module import make
from .models import as_given, as_loose
from .options import OptionArguments, Options
from .parts import Parts
from .signals import signals_held
from .stats import stats
from .swap import Swap, overwrite
from .teacher import check_teacher
from .validate import check_model, check_optimizers


class Belay:
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
        replace: detach a Belay that pulls these parameters already; without it, a second pull is refused.
        **options: `dtype`, `buffers`, `every`, `start`, `impl`, `rounding`, `on_nonfinite`, `device`,
            `keep_initial`; see `torchbelay.options.Options`.

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
        **options: Unpack[OptionArguments],
    ) -> None:
        rules = _rules(method, spectators)
        self._model, optimizers, self._options = check_model(model), check_optimizers(optimizer), Options(**options)
        self._parts = Parts(self._model, optimizers, rules, self._options)
        self._optimizer = self._parts.first.optimizer
        self._averages, self._stepper = self._parts.first.averages, self._parts.first.stepper
        self._parts.check(replace=replace)  # refuses what cannot be averaged, before anything is attached
        self._parts.attach(replace=replace)

    @classmethod
    def from_parameters(
        cls,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        optimizer: Optimizer | Iterable[Optimizer] | None,
        method: Method | Rule,
        *,
        spectators: Mapping[str, Method | Rule] | None = None,
        replace: bool = False,
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
        return cls(loose, optimizer, method, spectators=spectators, replace=replace, **options)

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

    # The average -------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, name: str = MAIN, *, readout: Readout | None = None) -> Iterator[Any]:
        """Let the model hold the average inside the block, and its own weights again after it, also after an exception.

        The block gets the model; a list if Belay was given several models, or tensors without a model. Evaluate inside,
        do not train: an optimizer step inside raises. Buffers that are changed inside (by `update_bn`) stay with the
        average. FSDP2 modules free their gathered weights on entering and on leaving, and autocast its copies. Signals
        that have a Python handler wait while weights and average trade places. While somebody holds `module()` or
        `tensors()` of the average, they do not trade: the weights are set aside.

        With a `readout` of `torchbelay.readouts` the model holds that mixture of weights and average, and a copy of the
        weights is kept meanwhile. Buffers are the average's, and those that are changed inside are dropped on leaving.
        """
        average, member = self._average(name), self._parts.member
        if member.swap is not None:
            if member.swap.average.name != name or member.swap.readout != readout:
                inside = _block(member.swap.average.name, member.swap.readout)
                raise RuntimeError(f"{_block(name, readout)} inside {inside}: leave that block first")
            yield as_given(self._model)
            return
        company.refuse_among(member, self._parts.parameters(), f"averaged({name!r})")
        self._parts.follow_model()
        buffers = self._averages.began and self._options.buffers != "ignore"
        reading, held = self._parts.reading(average, readout), self._parts.live.holds(average)
        swap = Swap(self._model, average, self._stepper.backend, buffers=buffers, held=held, reading=reading)
        # Twice, for an exception may come at any line, also of leaving; what is done is not done again.
        try:
            try:
                with signals_held():
                    member.enter(swap)
                yield as_given(self._model)
            finally:
                with signals_held():
                    member.leave()
        finally:
            member.leave()

    @torch.inference_mode(False)
    @torch.no_grad()
    def module(self, name: str = MAIN, *, into: nn.Module | Iterable[nn.Module] | None = None) -> Any:
        """Return a module of the model's class that is the average: its parameters share the average's memory.

        It follows every step, `reset()`, `load_state_dict()` and late parameters, for as long as you hold it. It is in
        eval mode, has no gradients, and pickles and copies as any other module. Parameters that are not averaged share
        the model's memory. If the average has another dtype than the weights, the module has copies in theirs, which
        every step renews. Its buffers are its own: with buffers="copy" and "average" every step renews them, with
        "ignore" they are copied once. Until the average begins (`start`), the module has the model's weights.

        Args:
            name: of the average.
            into: a module of your own, built like the model, that becomes the average instead. A sharded model (FSDP2,
                tensor parallel) needs one, sharded by the same calls.

        If Belay was given several models, this is a list of modules, and so is `into`.

        >>> from torchbelay import Spring
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> belay = Belay(model, optimizer, Spring.ema(decay=0.99))
        >>> teacher, x = belay.module(), torch.ones(4, 3)
        >>> (model(x) - teacher(x)).square().mean().backward()
        >>> optimizer.step()
        >>> torch.equal(teacher.weight, belay.average_state_dict()["weight"])
        True
        """
        self._average(name)
        origin = self._parts.origin(name, self)
        if into is None:
            module = make(origin)
        else:
            self._parts.refuse_now("module")
            module = check_teacher(into, origin)
        self._parts.live.add_module(origin, module)
        return as_given(module)

    def tensors(self, name: str = MAIN) -> Mapping[str, Tensor]:
        """Return the average as a live mapping of names to tensors, which are looked up at each access, not copied.

        The tensors share the average's memory and have its dtype: do not write to them. They go with
        `torch.func.functional_call(model, dict(belay.tensors()), x)`.

        >>> from torchbelay import Spring
        >>> belay = Belay(nn.Linear(3, 1), None, Spring.ema(decay=0.99))
        >>> {name: tuple(tensor.shape) for name, tensor in belay.tensors().items()}
        {'weight': (1, 3), 'bias': (1,)}
        """
        self._average(name)
        return self._parts.tensors(name)

    def _average(self, name: str) -> WholeAverage:
        if name not in self._parts.averages:
            known = ", ".join(map(repr, self._parts.averages))
            raise ValueError(f"name={name!r} is no average; choose one of {known}")
        self._parts.wait()
        self._parts.member.settled_swap()
        self._parts.warn_before_use()
        return self._parts.averages[name]

    @torch.inference_mode(False)
    @torch.no_grad()
    def average_state_dict(
        self, name: str = MAIN, *, full: bool = False, readout: Readout | None = None
    ) -> dict[str, Any]:
        """Return copies of the average and of the rest of the model, laid out like the plain model's `state_dict()`.

        With a `readout` it is that mixture of weights and average. The result loads into an unwrapped model with
        `load_state_dict(strict=True)`. Tensors have the parameters' dtypes; `state_dict()` has averages in their own.

        Sharded tensors stay sharded, unless `full`: then they are gathered in the first rank's host memory, one tensor
        at a time. Every rank must call; the other ranks get {}.
        """
        average = self._average(name)
        if self._parts.member.swap is None:
            self._parts.follow_model()
        take = shard.gathered if full else modules.copied
        reading = self._parts.reading(average, readout)
        state = export.with_average(self._model, average, self._parts.member, take, reading)
        return state if not full or shard.is_first_rank() else {}

    def save_average(self, path: str | os.PathLike[str], name: str = MAIN, *, readout: Readout | None = None) -> None:
        """Write the average as a safetensors file, whole or not at all: a crash leaves the old file as it was.

        The file holds `average_state_dict(name, full=True, readout=readout)`; its metadata name method, readout, step
        and the version of torchbelay. With a sharded or replicated model every rank must call; the first rank writes.
        """
        export.require()
        average = self._average(name)
        spread = any(map(shard.is_sharded, modules.named_parameters(self._model).values()))
        if shard.is_first_rank() and not spread:  # else the other ranks would wait for this one; refused when writing
            files.destination(path)
        state = self.average_state_dict(name, full=True, readout=readout)
        if shard.is_first_rank():
            export.write(path, state, export.about(average, readout, step=self.step, start=self._options.start))

    def copy_to_model(self, name: str = MAIN) -> None:
        """Overwrite the model's weights with the average, for good."""
        self._parts.refuse_now("copy_to_model")
        average = self._average(name)
        self._parts.follow_model()
        overwrite(self._model, average)
        self._parts.remember_weights()

    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self) -> None:
        """Begin every average again at the weights as they are. Call this after you loaded weights into the model."""
        self._parts.refuse_now("reset")
        self._parts.wait()
        self._parts.restart()

    # Numbers and checkpoints -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of optimizer steps since construction; skipped steps do not count.

        With several optimizers, the steps of the one that took the most.
        """
        return self._parts.step

    @torch.no_grad()
    def stats(self) -> dict[str, float | int | str]:
        """Return numbers to log: step, tension ‖w2 − w1‖, its ratio to ‖w1‖, effective learning rate, regime.

        "effective_lr" is that of the optimizer's first group, "effective_lr/1", … are those of the others, then those
        of the next optimizer's groups. If methods
        differ within a group, the group's first parameter counts. With a sharded model every rank must call.
        """
        self._average(MAIN)
        return stats(self._parts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs, as plain tensors and numbers.

        Tensors are the live ones, as in torch's own state dicts, except inside `averaged()` and before the averages
        begin. Save it with torch.save, or give the Belay itself (it is `Stateful`) to torch.distributed.checkpoint.

        A method is saved as its class and the fields that differ from their defaults. One that cannot be told in that
        way, such as a lambda, is refused: make it a dataclass.
        """
        self._parts.wait()
        swap = self._parts.member.settled_swap()
        self._parts.warn_before_use()
        if swap is None:
            self._parts.follow_model()
        saved = self._parts.saved()
        return {
            "format": checkpoint.FORMAT,
            "ahead": 0,
            "options": self._options.saved(),
            "made_with": checkpoint.made_with(saved["averages"], self._options),
            **saved,
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; a state that does not fit is refused and changes nothing.

        A state of one process fits a sharded model too. Shards that another rank saved are refused. Use
        torch.distributed.checkpoint to change the number of ranks.
        """
        self._parts.refuse_now("load_state_dict")
        self._parts.wait()
        self._parts.load(state)

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
        return f"Belay({'; '.join(self._parts.about())})"


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


def _block(name: str, readout: Readout | None) -> str:
    return f"averaged({name!r})" if readout is None else f"averaged({name!r}, readout={readout!r})"

"""The public class `Belay`, which couples a model to its average around every step of any torch optimizer."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay._version import __version__
from torchbelay.ops import arithmetic
from torchbelay.physics import arguments
from torchbelay.physics.method import Method

from . import checkpoint, export, modules, shard
from .average import MAIN, Average, Entry, Rule, as_rule, describe, local_parts
from .averages import Averages
from .clock import Clock
from .hooks import StepHooks
from .options import OptionArguments, Options
from .stepper import Stepper
from .swap import Swap, uninterrupted
from .validate import check_kernels, check_model, check_optimizer, warn_of_feedback


class Belay:
    """Attach BELAY, EMA or any other averaging method to an optimizer; nothing else to call in the loop.

    Args:
        model: the module whose weights are averaged, wrapped (DDP, torch.compile, …) or not.
        optimizer: any torch.optim.Optimizer over the model's parameters. Belay averages the parameters that it holds.
            None: call `before_step()` and `after_step()` around the update yourself; parameters that require gradients
            are averaged.
        method: a method of `torchbelay.methods`, a Spring, or any object with `coupling(step, lr)`. Or a function
            (name, parameter) -> method, which returns None for a parameter that is not to be averaged.
        spectators: further averages by name. They watch the weights and do not pull them.
        **options: `dtype`, `buffers`, `every`, `start`, `impl`, `rounding`, `on_nonfinite`, `device`; see
            `torchbelay.options.Options`.

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
        model: nn.Module,
        optimizer: Optimizer | None,
        method: Method | Rule,
        *,
        spectators: Mapping[str, Method | Rule] | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        if spectators is not None and not isinstance(spectators, Mapping):
            raise TypeError(f"spectators={spectators!r} is not a dict; give each a name, as {{'short': ...}}")
        check_model(model)
        check_optimizer(optimizer)
        self._options = Options(**options)
        hosted = self._options.hosted
        every = self._options.every
        averages = {MAIN: Average(MAIN, as_rule(method), pulls=True, hosted=hosted, every=every)}
        for name, watching in (spectators or {}).items():
            if not isinstance(name, str) or not name or name == MAIN:
                raise ValueError(f"spectators has the name {name!r}; give each a name of its own, other than {MAIN!r}")
            averages[name] = Average(name, as_rule(watching), pulls=False, hosted=hosted, every=every)
        self._model, self._optimizer, self._clock = model, optimizer, Clock()
        self._averages = Averages(model, optimizer, averages, self._options, self._clock)
        self._stepper = Stepper(model, optimizer, self._averages, self._options, self._clock)
        found = self._averages.wanted()  # refuses what cannot be averaged, before anything is attached
        for name in averages:
            if not found[name]:
                raise ValueError(f"nothing to average for {name!r}: no floating-point parameter has a method")
        everything = [f for each in found.values() for f in each]
        check_kernels(everything, impl=self._options.impl, rounding=self._options.rounding)
        warn_of_feedback(found[MAIN], optimizer, rounding=self._options.rounding)
        if self._options.start == 0:
            self._averages.begin()
        self._hooks = None if optimizer is None else StepHooks(optimizer, self._stepper.before, self._stepper.after)
        self._attached = True

    # The step ----------------------------------------------------------------------------------------------------

    def before_step(self, lr: float | None = None) -> None:
        """Call this right before you update the weights by hand; give `lr` if the method depends on it."""
        self._refuse_if_attached("before_step")
        self._averages.parameters.given_lr = None if lr is None else arguments.number("lr", lr, low=0, open_low=False)
        self._stepper.before()

    def after_step(self) -> None:
        """Call this right after you updated the weights by hand."""
        self._refuse_if_attached("after_step")
        self._refuse_inside("after_step")
        if not self._stepper.under_way:
            raise RuntimeError("after_step() without before_step(): call that right before the weights are updated")
        self._stepper.after()

    # The average -------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, name: str = MAIN) -> Iterator[nn.Module]:
        """Let the model hold the average inside the block, and its own weights again after it, also after an exception.

        Evaluate inside, do not train: an optimizer step inside raises. Buffers that are changed inside (by `update_bn`)
        stay with the average. FSDP2 modules free their gathered weights on entering and on leaving.
        """
        average = self._average(name)
        if self._stepper.swap is not None:
            if self._stepper.swap.average.name != name:
                raise RuntimeError(
                    f"averaged({name!r}) inside averaged({self._stepper.swap.average.name!r}): leave that block first"
                )
            yield self._model
            return
        self._averages.refresh_names()
        buffers = self._averages.began and self._options.buffers != "ignore"
        try:
            with uninterrupted():
                self._stepper.swap = Swap(self._model, average, self._stepper.backend, buffers=buffers)
            yield self._model
        finally:
            with uninterrupted():
                if self._stepper.swap is not None:
                    self._stepper.swap.undo()
                    self._stepper.swap = None

    def _average(self, name: str) -> Average:
        if name not in self._averages.each:
            raise ValueError(f"name={name!r} is no average; choose one of {', '.join(map(repr, self._averages.each))}")
        self._stepper.backend.wait()
        return self._averages.each[name]

    @torch.no_grad()
    def average_state_dict(self, name: str = MAIN, *, full: bool = False) -> dict[str, Any]:
        """Return copies of the average and of the rest of the model, laid out like the plain model's `state_dict()`.

        The result loads into an unwrapped model with `load_state_dict(strict=True)`. Tensors have the parameters'
        dtypes; `state_dict()` has the averages in their own.

        Sharded tensors stay sharded, unless `full`: then they are gathered in the first rank's host memory, one tensor
        at a time. Every rank must call; the other ranks get {}.
        """
        average = self._average(name)
        state = self._export(average, shard.gathered if full else modules.copied)
        return state if not full or shard.is_first_rank() else {}

    def _export(self, average: Average, take: Callable[[Tensor], Any]) -> dict[str, Any]:
        if self._stepper.swap is None:
            self._averages.refresh_names()
        elif self._stepper.swap.average is average:
            return modules.state_dict_with(self._model, {}, take)
        buffers = modules.named_buffers(self._model)
        own = {} if self._stepper.swap is None else self._stepper.swap.own_buffers()
        own.update(average.buffers)
        replaced = {id(e.w1): e.w2.to(e.w1.dtype) for e in average.entries.values()}
        replaced |= {id(buffers[key]): value for key, value in own.items() if key in buffers}
        return modules.state_dict_with(self._model, replaced, take)

    def save_average(self, path: str | os.PathLike[str], name: str = MAIN) -> None:
        """Write the average as a safetensors file, whole or not at all: a crash leaves the old file as it was.

        The file holds `average_state_dict(name, full=True)`; its metadata name the method, the step and the version of
        torchbelay. With a sharded or replicated model every rank must call; the first rank writes.
        """
        export.require()
        average = self._average(name)
        state = self.average_state_dict(name, full=True)
        if not shard.is_first_rank():
            return
        methods = dict.fromkeys(describe(e.method) for e in average.entries.values())
        about = {
            "average": name,
            "method": "; ".join(methods) if self._averages.began else f"none before step {self._options.start}",
            "step": str(self.step),
            "torchbelay": __version__,
        }
        export.write(path, state, about)

    @torch.no_grad()
    def copy_to_model(self, name: str = MAIN) -> None:
        """Overwrite the model's weights with the average, for good."""
        self._refuse_inside("copy_to_model")
        average = self._average(name)
        self._averages.refresh_names()
        entries = average.entries.values()
        for same in (True, False):
            arithmetic.copy_(*local_parts(e for e in entries if (e.w1.dtype == e.w2.dtype) is same))
        for key, buffer in modules.named_buffers(self._model).items():
            if key in average.buffers:
                buffer.copy_(average.buffers[key])

    @torch.no_grad()
    def reset(self) -> None:
        """Begin every average again at the weights as they are. Call this after you loaded weights into the model."""
        self._refuse_inside("reset")
        self._stepper.backend.wait()
        self._averages.refresh_names()
        self._averages.restart()
        self._stepper.forget_the_step()

    # Numbers and checkpoints -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of optimizer steps since construction; skipped steps do not count."""
        return self._clock.count

    @torch.no_grad()
    def stats(self) -> dict[str, float | int | str]:
        """Return numbers to log: step, tension ‖w2 − w1‖, its ratio to ‖w1‖, effective learning rate, regime.

        "effective_lr" is that of the optimizer's first group, "effective_lr/1", … are those of the others. If methods
        differ within a group, the group's first parameter counts. With a sharded model every rank must call.
        """
        average, swap = self._average(MAIN), self._stepper.swap
        entries = list(average.entries.values())
        tension, size = self._norms(entries, swap)
        rates: dict[str, float] = {}
        firsts = {e.group: e for e in reversed(entries)}
        for group in sorted(firsts):
            rate = self._averages.effective_lr(firsts[group])
            if rate is not None:
                rates[f"effective_lr/{group}" if group else "effective_lr"] = rate
        return {
            "step": self.step,
            "tension": tension,
            "tension_ratio": tension / size if size else 0.0,
            **rates,
            "regime": ", ".join(sorted({cohort.regime for cohort in average.cohorts})),
        }

    def _norms(self, entries: list[Entry], swap: Swap | None) -> list[float]:
        """Return ‖w2 − w1‖ and ‖w1‖ over all ranks."""
        alike: dict[object, list[Entry]] = {}
        for e in entries:
            alike.setdefault(shard.spread_like(e.w1), []).append(e)
        squares = torch.zeros(2, dtype=torch.float64)
        for some in alike.values():
            w1 = [shard.local(e.w1) if swap is None else swap.weights(e) for e in some]
            w2 = [shard.local(e.w2 if swap is None else swap.value(e, MAIN)) for e in some]
            here = torch.stack([arithmetic.distance(w1, w2), arithmetic.norm(w1)]).square()
            squares += shard.summed(here, some[0].w1).cpu()
        return squares.sqrt().tolist()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs, as plain tensors and numbers.

        Tensors are the live ones, as in torch's own state dicts, except inside `averaged()` and before the averages
        begin. Save it with torch.save, or give the Belay itself (it is `Stateful`) to torch.distributed.checkpoint.
        """
        self._stepper.backend.wait()
        if self._stepper.swap is None:
            self._averages.refresh_names()
        averages = self._averages.saved(self._stepper.swap, self._stepper.memories)
        return {
            "format": checkpoint.FORMAT,
            "step": self.step,
            "ahead": self._stepper.ahead,
            "began": int(self._averages.began),
            "options": self._options.saved(),
            "made_with": checkpoint.made_with(averages, self._options),
            "averages": averages,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; a state that does not fit is refused and changes nothing.

        A state of one process fits a sharded model too. Use torch.distributed.checkpoint to change the number of ranks.
        """
        self._refuse_inside("load_state_dict")
        self._stepper.backend.wait()
        self._averages.load(state)
        self._stepper.resume(ahead=bool(state["ahead"]))

    def detach(self) -> None:
        """Remove the hooks: the optimizer is as it was, and the average can still be used."""
        self._refuse_inside("detach")
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks, self._attached = None, False
        self._stepper.backend.wait()
        self._stepper.forget_the_step()

    def _refuse_inside(self, what: str) -> None:
        if self._stepper.swap is not None:
            raise RuntimeError(f"{what}() inside averaged({self._stepper.swap.average.name!r}): leave the block first")

    def _refuse_if_attached(self, what: str) -> None:
        if self._optimizer is not None:
            raise RuntimeError(f"{what}() is for Belay(model, None, ...): here the optimizer's own hooks do it")
        if not self._attached:
            raise RuntimeError(f"{what}() after detach(): this Belay no longer follows the model; make a new one")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Belay is attached to its optimizer and cannot be copied or pickled; save its state_dict() and load that "
            "into a Belay of the other model and optimizer"
        )

    def __repr__(self) -> str:
        entries = self._averages.each[MAIN].entries.values()
        methods = list(dict.fromkeys(repr(e.method) for e in entries))
        about = [
            ", ".join(methods[:3]) + (", …" if len(methods) > 3 else ""),
            f"{len(entries)} tensors, {sum(e.w1.numel() for e in entries):,} weights",
            f"average {'/'.join(sorted({str(e.w2.dtype).removeprefix('torch.') for e in entries}))}",
        ]
        if not self._averages.began:
            about = [f"begins after step {self._options.start}"]
        if len(self._averages.each) > 1:
            about.append(f"spectators {', '.join(list(self._averages.each)[1:])}")
        return f"Belay({'; '.join(about)}; impl={self._stepper.path()!r}; step {self.step})"

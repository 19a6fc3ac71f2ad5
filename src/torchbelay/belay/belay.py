"""The public class `Belay`, which couples a model to its average around every step of any torch optimizer."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from torchbelay.physics import arguments
from torchbelay.physics.method import Method
from torchbelay.physics.readouts import Readout
from torchbelay.physics.warnings import warn

from . import checkpoint, company, export, files, modules, shard
from .average import MAIN, Average, Rule, as_rule
from .averages import Averages
from .clock import Clock
from .options import OptionArguments, Options
from .readout import Reading
from .signals import signals_held
from .stats import stats
from .stepper import Stepper
from .swap import Swap, overwrite
from .unseen import Unseen
from .validate import check_kernels, check_model, check_optimizer, pulled_by, warn_of_feedback


class Belay:
    """Attach BELAY, EMA or any other averaging method to an optimizer; nothing else to call in the loop.

    Args:
        model: the module whose weights are averaged, wrapped (DDP, torch.compile, …) or not.
        optimizer: any torch.optim.Optimizer over the model's parameters, or the wrapper that accelerate, Fabric or
            Lightning put around one. Belay averages the parameters that it holds. None: call `before_step()` and
            `after_step()` around the update yourself; parameters that require gradients are averaged.
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
        model: nn.Module,
        optimizer: Optimizer | None,
        method: Method | Rule,
        *,
        spectators: Mapping[str, Method | Rule] | None = None,
        replace: bool = False,
        **options: Unpack[OptionArguments],
    ) -> None:
        if spectators is not None and not isinstance(spectators, Mapping):
            raise TypeError(f"spectators={spectators!r} is not a dict; give each a name, as {{'short': ...}}")
        check_model(model)
        optimizer = check_optimizer(optimizer)
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
        company.refuse_among(self._stepper, model.parameters(), "Belay(...)")
        if not replace:
            company.refuse_second_pull(self._stepper, pulled_by(found[MAIN]))
        self._averages.check_buffers()
        everything = [f for each in found.values() for f in each]
        check_kernels(everything, impl=self._options.impl, rounding=self._options.rounding)
        warn_of_feedback(found[MAIN], optimizer, rounding=self._options.rounding)
        if self._options.start == 0:
            self._averages.begin()
        self._stepper.attach(replace=replace)
        self._unseen = Unseen(self._averages.parameters)

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
        self._stepper.look()
        with signals_held():
            self._stepper.after()

    # The average -------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, name: str = MAIN, *, readout: Readout | None = None) -> Iterator[nn.Module]:
        """Let the model hold the average inside the block, and its own weights again after it, also after an exception.

        Evaluate inside, do not train: an optimizer step inside raises. Buffers that are changed inside (by `update_bn`)
        stay with the average. FSDP2 modules free their gathered weights on entering and on leaving, and autocast its
        copies. Signals that have a Python handler wait while weights and average trade places.

        With a `readout` of `torchbelay.readouts` the model holds that mixture of weights and average, and a copy of the
        weights is kept meanwhile. Buffers are the average's, and those that are changed inside are dropped on leaving.
        """
        average, swap = self._average(name), self._stepper.swap
        if swap is not None:
            if swap.average is not average or swap.readout != readout:
                raise RuntimeError(
                    f"{_block(name, readout)} inside {_block(swap.average.name, swap.readout)}: leave that block first"
                )
            yield self._model
            return
        company.refuse_among(self._stepper, self._averages.parameters.all, f"averaged({name!r})")
        self._averages.follow_model()
        buffers = self._averages.began and self._options.buffers != "ignore"
        reading = self._reading(average, readout)
        swap = Swap(self._model, average, self._stepper.backend, buffers=buffers, reading=reading)
        # Twice, for an exception may come at any line, also of leaving; what is done is not done again.
        try:
            try:
                with signals_held():
                    self._stepper.swap = swap
                    swap.enter()
                yield self._model
            finally:
                with signals_held():
                    self._stepper.leave()
        finally:
            self._stepper.leave()

    def _average(self, name: str) -> Average:
        if name not in self._averages.each:
            raise ValueError(f"name={name!r} is no average; choose one of {', '.join(map(repr, self._averages.each))}")
        self._stepper.backend.wait()
        self._stepper.settled_swap()
        self._warn_before_use()
        return self._averages.each[name]

    def _reading(self, average: Average, readout: Readout | None) -> Reading | None:
        return None if readout is None else Reading(self._averages, average, readout, self.step)

    def _remember_weights(self) -> None:
        if not self._stepper.stepped:
            self._unseen.remember(self._averages.parameters)

    def _warn_before_use(self) -> None:
        """Warn before an average is used or saved that never moved although the weights did, or moved in part."""
        if self._stepper.torn:
            warn(
                "the last step was stopped while weights and averages moved: some of these averages have moved and "
                "some have not; load a checkpoint by load_state_dict(), or begin again by reset()"
            )
        seen = self._stepper.stepped or self._stepper.is_inside  # in the first step they may have moved already
        if self._stepper.attached and not seen and not company.own_tensors():
            self._unseen.look(self._averages.parameters, self._optimizer)

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
        if self._stepper.swap is None:
            self._averages.follow_model()
        take = shard.gathered if full else modules.copied
        state = export.with_average(self._model, average, self._stepper, take, self._reading(average, readout))
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
            about = export.about(average, readout, self.step)
            if not self._averages.began:
                about["method"] = f"none before step {self._options.start}"
            export.write(path, state, about)

    def copy_to_model(self, name: str = MAIN) -> None:
        """Overwrite the model's weights with the average, for good."""
        self._refuse_now("copy_to_model")
        average = self._average(name)
        self._averages.follow_model()
        overwrite(self._model, average)
        self._remember_weights()

    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self) -> None:
        """Begin every average again at the weights as they are. Call this after you loaded weights into the model."""
        self._refuse_now("reset")
        self._stepper.backend.wait()
        self._averages.follow_model()
        self._averages.restart()
        self._stepper.forget_the_step()
        self._remember_weights()

    # Numbers and checkpoints -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of optimizer steps since construction; skipped steps do not count."""
        self._stepper.settle()
        return self._clock.count

    @torch.no_grad()
    def stats(self) -> dict[str, float | int | str]:
        """Return numbers to log: step, tension ‖w2 − w1‖, its ratio to ‖w1‖, effective learning rate, regime.

        "effective_lr" is that of the optimizer's first group, "effective_lr/1", … are those of the others. If methods
        differ within a group, the group's first parameter counts. With a sharded model every rank must call.
        """
        self._average(MAIN)
        return stats(self._averages, self._stepper.swap, self.step)

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs, as plain tensors and numbers.

        Tensors are the live ones, as in torch's own state dicts, except inside `averaged()` and before the averages
        begin. Save it with torch.save, or give the Belay itself (it is `Stateful`) to torch.distributed.checkpoint.

        A method is saved as its class and the fields that differ from their defaults. One that cannot be told in that
        way, such as a lambda, is refused: make it a dataclass.
        """
        self._stepper.backend.wait()
        swap = self._stepper.settled_swap()
        self._warn_before_use()
        if swap is None:
            self._averages.follow_model()
        averages = self._averages.saved(swap, self._stepper.memories)
        initial = self._averages.initial.saved(self._averages.entries(), averages)
        return {
            "format": checkpoint.FORMAT,
            "step": self.step,
            "ahead": 0,
            "began": int(self._averages.began),
            "options": self._options.saved(),
            "made_with": checkpoint.made_with(averages, self._options),
            "averages": averages,
            **initial,
        }

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; a state that does not fit is refused and changes nothing.

        A state of one process fits a sharded model too. Shards that another rank saved are refused. Use
        torch.distributed.checkpoint to change the number of ranks.
        """
        self._refuse_now("load_state_dict")
        self._stepper.backend.wait()
        self._averages.load(state)
        self._stepper.forget_the_step()
        self._unseen.forget()

    def detach(self) -> None:
        """Remove the hooks: the optimizer is as it was, and the average can still be used."""
        self._refuse_inside("detach")
        self._stepper.detach()

    def _refuse_inside(self, what: str) -> None:
        """Refuse what would go wrong while an average is in the model."""
        if (swap := self._stepper.settled_swap()) is not None:
            raise RuntimeError(f"{what}() inside averaged({swap.average.name!r}): leave the block first")

    def _refuse_now(self, what: str) -> None:
        """Refuse what rewrites weights or averages, inside `averaged()` or in the middle of a step."""
        self._refuse_inside(what)
        company.refuse_among(self._stepper, self._model.parameters(), f"{what}()")
        if self._stepper.is_inside:
            raise RuntimeError(
                f"{what}() inside optimizer.step(), by its closure or a hook: the step would go on with what it took "
                "from before; call it between two steps"
            )

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
        if self._optimizer is None:
            about.append("steps by hand")
        return f"Belay({'; '.join(about)}; impl={self._stepper.path()!r}; step {self.step})"


def _block(name: str, readout: Readout | None) -> str:
    return f"averaged({name!r})" if readout is None else f"averaged({name!r}, readout={readout!r})"

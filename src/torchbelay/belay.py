"""Belay: couples a model to its average around every step of any torch optimizer."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _checkpoint, _model
from ._average import Average, Cohort, Found, Rule, as_rule, buffer_weight
from ._clock import Clock
from ._hooks import StepHooks
from ._roster import Roster
from ._swap import Swap
from ._validate import check_optimizer, warn_of_feedback
from ._warnings import BelayWarning
from .ops import foreach
from .ops.around import Motion, choose
from .options import OptionArguments, Options
from .physics.method import Method
from .physics.spring import Spring

MAIN = "average"  # the one average that may pull; spectators have names of their own


@dataclass
class _Work:
    """A step under way: what is to be done to which tensors once the optimizer has stepped."""

    moves: list[tuple[Cohort, Motion, list[Tensor] | None]] = field(default_factory=list)
    buffers: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    keep: Tensor | None = None  # 0 on the device if mixed-precision training skips the step, else 1
    skipped: bool = False  # the same, known on the host
    retried: bool = False  # a step before this one raised


class Belay:
    """Attach BELAY, EMA or any other averaging method to an optimizer; nothing else to call in the loop.

    Args:
        model: the module whose weights are averaged, wrapped (DDP, torch.compile, …) or not.
        optimizer: any torch.optim.Optimizer over the model's parameters. What it holds is averaged. None: call
            `before_step()` and `after_step()` around the update yourself; what requires gradients is averaged.
        method: a Spring, a method of `torchbelay.methods`, anything with `coupling(step, lr)`, or a function
            (name, parameter) -> method, or None for a parameter that is not to be averaged.
        spectators: further averages by name, which watch and do not pull.
        **options: `dtype`, `buffers`, `every`, `start`, `impl`; see `Options`.

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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={type(model).__name__} is not a torch.nn.Module; pass the module that is trained")
        check_optimizer(optimizer)
        self._model, self._optimizer = model, optimizer
        self._options = Options(**options)
        self._around = choose(self._options.impl)
        self._averages = {MAIN: Average(MAIN, as_rule(method), pulls=True)}
        for name, watching in (spectators or {}).items():
            if not isinstance(name, str) or not name or name == MAIN:
                raise ValueError(f"spectators has the name {name!r}; give each a name of its own, other than {MAIN!r}")
            self._averages[name] = Average(name, as_rule(watching), pulls=False)
        self._clock = Clock()
        self._began = False
        self._work: _Work | None = None
        self._ahead: Tensor | None = None  # 1 where the averages have moved for a step that has not come to an end
        self._swap: Swap | None = None
        self._lr: float | None = None  # of a step taken by hand
        self._roster = Roster(model, optimizer)
        found = self._wanted()  # refuses what cannot be averaged, before anything is attached
        for name in self._averages:
            if not found[name]:
                raise ValueError(f"nothing to average for {name!r}: no floating-point parameter has a method")
        warn_of_feedback(found[MAIN], optimizer)
        if self._options.start == 0:
            self._begin()
        self._hooks = None if optimizer is None else StepHooks(optimizer, self._before, self._after)
        self._attached = True

    # The step ----------------------------------------------------------------------------------------------------

    def before_step(self, lr: float | None = None) -> None:
        """By hand, right before the weights are updated; `lr` for methods whose coupling depends on it."""
        self._refuse_if_attached("before_step")
        self._lr = lr
        self._before()

    def after_step(self) -> None:
        """By hand, right after the weights were updated."""
        self._refuse_if_attached("after_step")
        if self._work is None:
            raise RuntimeError("after_step() without before_step(): call that right before the weights are updated")
        self._after()

    @torch.no_grad()
    def _before(self) -> None:
        if self._swap is not None:
            raise RuntimeError(
                f"an optimizer step inside averaged({self._swap.average.name!r}) would train the average and lose the "
                "weights; leave the block first"
            )
        self._follow_the_optimizer()
        # set by GradScaler, for optimizers that skip a step by themselves
        found_inf = getattr(self._optimizer, "found_inf", None)
        work = _Work(retried=self._ahead is not None)
        if found_inf is not None:
            if self._is_constant():
                work.keep = (found_inf.reshape(()) == 0).to(torch.float32)
            elif bool(found_inf):
                self._work = _Work(skipped=True)
                return
        if self._began:
            step = None if self._is_constant() else self.step + 1
            for average in self._averages.values():
                self._plan(average, step, work)
        self._work = work
        self._move_ahead(work)

    def _move_ahead(self, work: _Work) -> None:
        """Do what is done before the optimizer steps, except what a step that then raised has done already."""
        keep, done = work.keep, self._ahead
        if done is not None:
            keep = 1 - done if keep is None else keep * (1 - done)
        for cohort, motion, _ in work.moves:
            self._around.before(cohort.w1, cohort.w2, motion, keep)
        if work.keep is None:
            self._ahead = torch.ones(())
        else:
            self._ahead = work.keep if done is None else torch.maximum(work.keep, done.to(work.keep))

    def _plan(self, average: Average, step: int | None, work: _Work) -> None:
        """Decide what the coming step does to an average's tensors, and keep the weights where that needs them."""
        moves: list[tuple[Cohort, Motion, list[Tensor] | None]] = []
        for cohort in average.cohorts:
            motion = cohort.motion(cohort.born + 1 if step is None else step, self._lr_of(cohort), self._options.every)
            if motion is None:
                continue
            if motion.coupling.pulls and not average.pulls:
                raise ValueError(f"the spectator {average.name!r} may only watch, but {cohort.method!r} pulls now")
            kept = [w.detach().clone() for w in cohort.w1] if self._around.needs_copy(motion) else None
            moves.append((cohort, motion, kept))
        work.moves += moves
        if moves and self._options.buffers == "average":
            # buffers have no gradient and no group: they go with the first of the average's parameters
            weight, now = buffer_weight(moves[0][1].coupling), self._buffers()
            work.buffers += [(own, now[name], weight) for name, own in average.buffers.items() if name in now]

    @torch.no_grad()
    def _after(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        if work.skipped:
            return
        if work.retried and work.keep is not None and self._ahead is not None:
            self._ahead = self._ahead * (1 - work.keep)  # still ahead if this one, too, came to nothing
        else:
            self._ahead = None
        for cohort, motion, kept in work.moves:
            self._around.after(cohort.w1, cohort.w2, kept, motion, work.keep)
        for own, buffer, weight in work.buffers:
            if own.is_floating_point() or own.is_complex():
                foreach.lerp_([own], [buffer], weight, work.keep)
            else:
                foreach.overwrite_(own, buffer, work.keep)
        if self._options.buffers == "copy":
            self._forget_buffers(work.keep)
        self._clock.tick(work.keep)
        if not self._began and self.step >= self._options.start:
            self._begin()

    def _forget_buffers(self, keep: Tensor | None) -> None:
        """A step has passed: what `update_bn` had found for an average is out of date, unless the step was skipped."""
        for average in self._averages.values():
            if keep is None:
                average.buffers = {}
            elif average.buffers:
                now = self._buffers()
                for name, own in average.buffers.items():
                    foreach.overwrite_(own, now.get(name, own), keep)

    def _is_constant(self) -> bool:
        """Whether every step is like every other, so that nobody need know its number."""
        cohorts = [cohort for average in self._averages.values() for cohort in average.cohorts]
        return self._began and self._options.every == 1 and all(cohort.varies == "never" for cohort in cohorts)

    def _lr_of(self, cohort: Cohort) -> float:
        if cohort.varies == "never":
            return 0.0
        lr = self._lr if self._optimizer is None else self._roster.lr(cohort.group)
        if lr is None:
            if cohort.varies == "lr":
                raise ValueError(
                    f"{cohort.method!r} needs the learning rate: give it as before_step(lr=...), or give the "
                    "optimizer's groups an 'lr'"
                )
            return 0.0
        return float(lr)

    # What is averaged --------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, list[Found]]:
        return self._roster.wanted(self._averages.values(), every=self._options.every)

    @torch.no_grad()
    def _begin(self) -> None:
        """Let every average start as a copy of the weights."""
        step = self.step
        for name, found in self._wanted().items():
            self._averages[name].adopt(found, born=step, dtype=self._options.dtype)
        self._began = True
        self._copy_buffers()

    def _copy_buffers(self) -> None:
        for average in self._averages.values() if self._options.buffers == "average" else ():
            average.buffers = {name: b.detach().clone() for name, b in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return _model.named_buffers(self._model)

    def _follow_the_optimizer(self) -> None:
        """Adopt parameters that were added to the optimizer, and go where the model went."""
        if not self._roster.is_current():
            self._adopt_changes(self._roster.renewed())
        for average in self._averages.values():
            if any(cohort.w1[0].device != cohort.w2[0].device for cohort in average.cohorts):
                average.regroup()

    def _adopt_changes(self, roster: Roster) -> None:
        wanted = roster.wanted(self._averages.values(), every=self._options.every)
        self._roster = roster
        if not self._began:
            return
        step, groups = self.step, roster.groups()
        for name, average in self._averages.items():
            for entry in average.entries.values():
                entry.group = groups.get(id(entry.w1))
            followed = {id(entry.w1) for entry in average.entries.values()}
            new = [found for found in wanted[name] if id(found[1]) not in followed]
            average.adopt(new, born=step, dtype=self._options.dtype)
            if new:
                warnings.warn(
                    f"{len(new)} parameter(s) were added to the optimizer, {new[0][0]!r} first: adopted by "
                    f"{name!r} at their present values",
                    BelayWarning,
                    stacklevel=2,
                )

    # The average -------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self, name: str = MAIN) -> Iterator[nn.Module]:
        """The model holds the average inside the block, and its own weights again after it, come what may.

        Look, do not touch: an optimizer step inside raises. Buffers changed inside (by `update_bn`) stay the average's.
        """
        average = self._average(name)
        if self._swap is not None:
            if self._swap.average.name != name:
                raise RuntimeError(
                    f"averaged({name!r}) inside averaged({self._swap.average.name!r}): leave that block first"
                )
            yield self._model
            return
        self._swap = Swap(self._model, average, buffers=self._began and self._options.buffers != "ignore")
        try:
            yield self._model
        finally:
            self._swap.undo()
            self._swap = None

    def _average(self, name: str) -> Average:
        if name not in self._averages:
            raise ValueError(f"name={name!r} is no average; choose one of {', '.join(map(repr, self._averages))}")
        return self._averages[name]

    def average_state_dict(self, name: str = MAIN) -> dict[str, Any]:
        """Copies of the average and of the rest of the model, as the plain model's own `state_dict()` lays them out.

        Loads into an unwrapped model with `load_state_dict(strict=True)`. In the parameters' dtypes;
        `state_dict()` has the averages in their own.
        """
        average = self._average(name)
        if self._swap is not None and self._swap.average is average:
            return _model.state_dict_with(self._model, {})
        parameters, buffers = _model.named_parameters(self._model), self._buffers()
        own = {} if self._swap is None else self._swap.own_buffers()
        own.update(average.buffers)
        replaced = {id(parameters.get(e.name, e.w1)): e.w2.to(e.w1.dtype) for e in average.entries.values()}
        replaced |= {id(buffers[key]): value for key, value in own.items() if key in buffers}
        return _model.state_dict_with(self._model, replaced)

    @torch.no_grad()
    def copy_to_model(self, name: str = MAIN) -> None:
        """Make the average the model's weights, for good."""
        self._refuse_inside("copy_to_model")
        average = self._average(name)
        for same in (True, False):
            foreach.copy_(*average.pairs(same_dtype=same))
        for key, buffer in self._buffers().items():
            if key in average.buffers:
                buffer.copy_(average.buffers[key])

    @torch.no_grad()
    def reset(self) -> None:
        """Begin every average again at the weights as they are, after others were loaded into the model."""
        self._refuse_inside("reset")
        step, self._work, self._ahead = self.step, None, None
        for average in self._averages.values():
            average.restart(step)
        if self._began:
            self._copy_buffers()

    # What a person or a checkpoint wants to know ---------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps taken since construction; skipped ones do not count."""
        return self._clock.count

    @torch.no_grad()
    def stats(self) -> dict[str, float | int | str]:
        """Numbers to log: step, tension ‖w2 − w1‖, its ratio to ‖w1‖, effective learning rate, regime.

        With several groups of the optimizer "effective_lr" is the first one's, and "effective_lr/1", … are the others'.
        """
        average, swap = self._averages[MAIN], self._swap
        entries = list(average.entries.values())
        w1 = [e.w1 if swap is None else swap.weights(e) for e in entries]
        w2 = [e.w2 if swap is None else swap.value(e, MAIN) for e in entries]
        tension, size = torch.stack([foreach.distance(w1, w2), foreach.norm(w1)]).tolist()
        out: dict[str, float | int | str] = {
            "step": self.step,
            "tension": tension,
            "tension_ratio": tension / size if size else 0.0,
        }
        regimes = set()
        for cohort in average.cohorts:
            regimes.add(cohort.method.regime if isinstance(cohort.method, Spring) else type(cohort.method).__name__)
            lr = self._lr if self._optimizer is None else self._roster.lr(cohort.group)
            scale = cohort.effective_lr_scale(self.step, self._lr_of(cohort), self._options.every)
            out.setdefault(f"effective_lr/{cohort.group}" if cohort.group else "effective_lr", scale * float(lr or 1.0))
        out["regime"] = ", ".join(sorted(regimes))
        return out

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs, as plain tensors and numbers.

        Tensors are the live ones, as in torch's own state dicts, except inside `averaged()`.
        """
        step = self.step
        averages = {}
        for name, average in self._averages.items():
            tensors = {kind: dict(average.tensors(slot)) for kind, slot in _checkpoint.SLOTS.items()}
            buffers = dict(average.buffers)
            if self._swap is not None and self._swap.average is average:  # what lies in the model will not stay there
                tensors["weights"] = {e.name: self._swap.value(e, name).clone() for e in average.entries.values()}
                buffers = self._swap.buffers() if self._swap.changed_buffers() else buffers
            averages[name] = {**tensors, "buffers": buffers, **_checkpoint.numbers(average, step)}
        return {"format": _checkpoint.FORMAT, "step": step, "options": self._options.saved(), "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`; one that does not fit is refused and changes nothing."""
        self._refuse_inside("load_state_dict")
        wanted = self._wanted()
        expected = {name: Average(name, old.rule, pulls=old.pulls) for name, old in self._averages.items()}
        for name, average in expected.items():
            average.adopt(wanted[name], born=0, dtype=self._options.dtype, device="meta")
        _checkpoint.check(state, self._options, {name: e.entries for name, e in expected.items()}, self._buffers())
        self._clock, self._work, self._ahead = Clock(state["step"]), None, None
        for name, average in self._averages.items():
            saved = state["averages"][name]
            self._began = bool(saved["weights"])
            if average.entries.keys() != saved["weights"].keys():
                average.entries = {}
                average.adopt(wanted[name] if self._began else [], born=0, dtype=self._options.dtype)
            if self._began:
                _checkpoint.restore(average, saved, state["step"])

    def detach(self) -> None:
        """Take the hooks off: the optimizer is as it was, the average stays to be used."""
        self._refuse_inside("detach")
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks, self._work, self._attached = None, None, False

    def _refuse_inside(self, what: str) -> None:
        if self._swap is not None:
            raise RuntimeError(f"{what}() inside averaged({self._swap.average.name!r}): leave the block first")

    def _refuse_if_attached(self, what: str) -> None:
        if self._optimizer is not None:
            raise RuntimeError(f"{what}() is for Belay(model, None, ...): here the optimizer's own hooks do it")
        if not self._attached:
            raise RuntimeError(f"{what}() after detach(): this Belay no longer follows the model; make a new one")

    def __repr__(self) -> str:
        entries = self._averages[MAIN].entries.values()
        methods = list(dict.fromkeys(repr(e.method) for e in entries))
        about = [
            ", ".join(methods[:3]) + (", …" if len(methods) > 3 else ""),
            f"{len(entries)} tensors, {sum(e.w1.numel() for e in entries):,} weights",
            f"average {'/'.join(sorted({str(e.w2.dtype).removeprefix('torch.') for e in entries}))}",
        ]
        if not self._began:
            about = [f"begins after step {self._options.start}"]
        if len(self._averages) > 1:
            about.append(f"spectators {', '.join(list(self._averages)[1:])}")
        return f"Belay({'; '.join(about)}; impl={self._around.name!r}; step {self.step})"

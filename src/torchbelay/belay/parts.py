"""The parts of a Belay, one for each optimizer, and what they are as a whole.

Each part has a clock, averages and a stepper of its own, so that a parameter follows the steps of the optimizer that
trains it. Names of parameters are those of the model, so that the averages of all parts are one average of the model.
Buffers belong to the first part: they move with the steps of the first optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics.readouts import Readout
from torchbelay.physics.warnings import warn

from . import company, family, joint, modules, replicas, shard
from .agreement import agreement
from .average import MAIN, Wanted, WholeAverage
from .averages import Averages, Checked
from .checkpoint import warn_of_untold
from .departures import Departures
from .initial import Initial
from .joint_average import JointAverage
from .live import Live, LiveTensors
from .live_module import Origin
from .options import Options
from .part import Part
from .readout import Reading
from .rules import Rule
from .signals import signals_held
from .slices import Slices
from .team import all_or_none, loaded_facts
from .validate import (
    check_kernels,
    pulled_by,
    refuse_pulled_twice,
    warn_of_feedback,
    warn_of_narrow,
    warn_of_rounding,
    why_nothing,
)


class Parts:
    """All parts of a Belay as a whole."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer | None],
        rules: Mapping[str, Rule],
        options: Options,
        slices: Slices | None = None,
    ) -> None:
        self.slices, self.team = slices, options.team
        self.group = slices.group if slices is not None else None if self.team is None else self.team.group
        self.model, self._options, self.live = model, options, Live()
        self.member, self._initial = company.Member(self.live, ref(self)), Initial(kept=options.keep_initial)
        self._named_at: list[int] = []  # the steps that were seen when names were last followed
        self.saved_with_optimizer = self.weights_ride = False  # an optimizer's state has averages; has own weights too
        others = replace(options, buffers="ignore")
        self.each = [
            Part(model, optimizer, rules, others if i else options, self.member, self._initial, slices)
            for i, optimizer in enumerate(optimizers)
        ]
        self.first = self.each[0]
        self.averages: dict[str, WholeAverage] = dict(self.first.averages.each)
        if len(self.each) > 1:
            self.averages = {name: JointAverage([part.averages.each[name] for part in self.each]) for name in rules}
            all_of_them = [ref(part.averages) for part in self.each]  # a cycle would keep tensors until it is collected
            for part in self.each:
                part.averages.relatives = partial(_others, ref(part.averages), all_of_them)

    # Beginning ---------------------------------------------------------------------------------------------------

    def check(self, *, replace: bool) -> list[list[Wanted]]:
        """Refuse what cannot be averaged, warn of what will not go well; return what the main average is to follow.

        That is a list for each optimizer.
        """
        self._refuse_shared()
        names = modules.names_by_id(self.model)
        found = [part.averages.wanted(names) for part in self.each]
        for name in self.averages:
            if not any(each[name] for each in found):
                held = [names[id(p)] for p in self.parameters() if id(p) in names]
                raise ValueError(why_nothing(name, held, self.first.optimizer, self.model))
        company.refuse_among(self.member, self.model.parameters(), "Belay(...)")
        main = [wanted for each in found for wanted in each[MAIN]]
        refuse_pulled_twice(main)
        if not replace:
            company.refuse_second_pull(self.member, pulled_by(main))
        modules.refuse_clashes(self.model)
        self.first.averages.check_buffers()
        everything = [wanted for each in found for some in each.values() for wanted in some]
        check_kernels(everything, impl=self._options.impl, rounding=self._options.rounding)
        warn_of_rounding(main, rounding=self._options.rounding)
        warn_of_narrow(everything, dtype=self._options.dtype, bits=self._options.bits, every=self._options.every)
        for part, each in zip(self.each, found, strict=True):
            warn_of_feedback(each[MAIN], part.optimizer)
        return [each[MAIN] for each in found]

    def shared_facts(self, *, save_with_optimizer: bool) -> dict[str, object]:
        """Return what replicas that share the averages must not differ in; refuses what cannot be shared."""
        found = [part.averages.wanted() for part in self.each]
        replicas.check(found, save_with_optimizer=save_with_optimizer)
        return replicas.facts(found, self._options) | replicas.weights(found)

    def _refuse_shared(self) -> None:
        owners: dict[int, Part] = {}
        for part in self.each:
            for p in part.averages.parameters.all:
                if (owner := owners.setdefault(id(p), part)) is not part:
                    family.refuse_shared(self.model, id(p), owner.optimizer, part.optimizer)

    def attach(self, *, replace: bool) -> None:
        """Begin the averages, unless they begin later, and follow the optimizers."""
        names = modules.names_by_id(self.model)
        for part in self.each:
            part.begin(names)  # this may refuse; nothing is attached then
        departures = Departures(self.model, [part.averages for part in self.each])
        for part in self.each:
            part.stepper.look_at_names = departures.look
            part.stepper.attach()
        company.join(self.member, replace=replace)

    # What they are as a whole ------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The steps that took place, of the optimizer that took the most."""
        for part in self.each:
            part.stepper.settle()
        return max(part.clock.count for part in self.each)

    def origin(self, name: str, belay: object) -> Origin:
        """Return what a live module of an average is made from."""
        regroup = partial(_regroup, [ref(part.averages) for part in self.each])
        training = (belay, *(part.optimizer for part in self.each if part.optimizer is not None))
        return Origin(self.model, self._readable(name), self._options, regroup, tuple(map(ref, training)))

    def tensors(self, name: str) -> LiveTensors:
        """Return a mapping of an average."""
        return self.live.add_mapping(
            self._readable(name), partial(self._waiting, name), self._settle, self.follow_names
        )

    def _readable(self, name: str) -> WholeAverage:
        """Return an average at whose memory somebody is going to look."""
        average, swap = self.averages[name], self.member.swap
        if swap is None:
            self.follow_model()
        elif swap.average is average:
            with signals_held():
                self.member.set_aside()
        return average

    def _waiting(self, name: str) -> dict[str, Tensor]:
        """Return the weights whose average has not begun."""
        found = [part.averages.wanted()[name] for part in self.each if not part.averages.began]
        own = company.own_tensors() if found else {}
        return {each.name: own.get(id(each.parameter), each.parameter) for wanted in found for each in wanted}

    def _settle(self) -> None:
        """Wait until weights and averages are what the last step, or the last block, has made of them."""
        self.wait()
        self.member.settled_swap()

    def follow_names(self, *, always: bool = False) -> None:
        """Call averages by the names that their parameters have now; unless `always`, only once after a step.

        Nothing is refused here: if a parameter has left the model, names stay what they were.
        """
        steps = [part.stepper.steps_seen for part in self.each]
        if (steps == self._named_at and not always) or any(part.stepper.is_inside for part in self.each):
            return
        self._named_at, names = steps, modules.names_by_id(self.model)
        for part in self.each:
            if all(id(e.w1) in names for e in part.averages.entries()):
                part.averages.refresh_names(names)

    def parameters(self) -> list[Tensor]:
        """Return what the optimizers hold."""
        return [p for part in self.each for p in part.averages.parameters.all]

    def wait(self) -> None:
        """Return when every average is what the last step made of it."""
        for part in self.each:
            part.stepper.backend.wait()

    def follow_model(self, *, restarts: bool = False) -> None:
        """Follow what changed in the model between two steps: names of parameters, and averaged buffers."""
        names = modules.names_by_id(self.model)
        for part in self.each:
            part.averages.refresh_names(names, restarts=restarts)
            part.averages.fit_buffers()

    def warn_before_use(self) -> None:
        """Warn before an average is used or saved that never moved although the weights did, or moved in part."""
        self.warn_of_torn()
        for part in self.each:
            part.warn_of_unseen()

    def warn_of_torn(self) -> None:
        """Warn about a step that was stopped while averages moved, or that another thread is just taking."""
        torn = [part.stepper for part in self.each if part.stepper.torn]
        if any(stepper.is_stopped() for stepper in torn):
            warn(
                "the last step was stopped while weights and averages moved: some of these averages have moved and "
                "some have not; load a checkpoint by load_state_dict(), or begin again by reset()"
            )
        elif torn:
            warn(
                "another thread is taking a step, and some of these averages have moved and some have not yet: use "
                "them in the thread that trains, between two steps"
            )

    def remember_weights(self) -> None:
        """Take the weights as they are now for those that belong to the averages."""
        for part in self.each:
            part.remember_weights()

    def refuse_inside(self, what: str) -> None:
        """Refuse what would go wrong while an average is in the model."""
        if (swap := self.member.settled_swap()) is not None:
            raise RuntimeError(f"{what}() inside averaged({swap.average.name!r}): leave the block first")

    def refuse_now(self, what: str) -> None:
        """Refuse what rewrites weights or averages, inside `averaged()` or in the middle of a step."""
        self.refuse_inside(what)
        company.refuse_among(self.member, self.model.parameters(), f"{what}()")
        if any(part.stepper.is_inside for part in self.each):
            raise RuntimeError(
                f"{what}() inside optimizer.step(), by its closure or a hook: the step would go on with what it took "
                "from before; call it between two steps"
            )

    def reading(self, average: WholeAverage, readout: Readout | None) -> Reading | None:
        """Return what a readout makes of an average, before anything changes; None without a readout."""
        if readout is None:
            return None
        return Reading(average, [part.averages for part in self.each], readout, self._initial)

    def taking(self, *, full: bool) -> Callable[[Tensor], Any]:
        """Return what copies a tensor for an export; if `full`, all of it, in the first rank's host memory."""
        if self.slices is None:
            return shard.gathered if full else modules.copied
        return self.slices.collected if full else self.slices.copied

    def is_first_rank(self) -> bool:
        """Whether this process gets what is gathered: with `shard` the group's first rank, which need not be 0."""
        return shard.is_first_rank() if self.slices is None else self.slices.rank == 0

    def effective_lrs(self) -> list[tuple[int, float]]:
        """Return groups, counted over all optimizers, with what is left of their learning rates in the long run."""
        found: list[tuple[int, float]] = []
        before = 0
        for part in self.each:
            found += [(before + group, rate) for group, rate in part.effective_lrs().items()]
            before += part.averages.parameters.number_of_groups()
        return found

    # Changes -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin every average again at the weights as they are; refuses before any of them has changed."""
        self.follow_model(restarts=True)
        with all_or_none(self.team):
            refuse_pulled_twice(each for part in self.each for each in part.averages.followed_by_main())
            for part in self.each:
                part.averages.check_restart()
        for part in self.each:
            part.averages.restart()
            part.stepper.forget_the_step()
        self.live.follow(moved=True)
        self.remember_weights()

    def saved(self) -> dict[str, Any]:
        """Return what a state has of the averages, and the counts of their steps."""
        swap = self.member.swap
        averages = [part.averages.saved(swap, part.stepper.memories) for part in self.each]
        if len(self.each) > 1:
            return joint.joined(averages, [part.trained(each) for part, each in zip(self.each, averages, strict=True)])
        return {"step": self.first.clock.count, "began": int(self.first.averages.began), "averages": averages[0]}

    def checked(self, state: Mapping[str, Any], *, strict: bool = True) -> list[Checked]:
        """Return what each part goes on from; refuse a state that does not fit, or, unless `strict`, make it fit."""
        names = modules.names_by_id(self.model)
        wanted = [list(part.wanted_names(names)) for part in self.each]
        states = joint.split(state, wanted, [part.options for part in self.each])
        notes: list[str] | None = None if strict else []
        checked = [part.averages.checked(each, names, notes) for part, each in zip(self.each, states, strict=True)]
        if notes:
            warn(f"this state is of another Belay: {'; '.join(notes)}")
        warn_of_untold(average for each in checked for average in each.expected.values())
        return checked

    def load(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state; one that does not fit is refused, and changes nothing."""
        with agreement(self.group) as facts:
            checked = self.checked(state, strict=strict)
            for i, found in enumerate(checked):
                facts[f"the state of optimizer {i}"] = {key: found.state[key] for key in ("step", "began")}
            facts |= loaded_facts(self.team, [each.state for each in checked])
        for part, each in zip(self.each, checked, strict=True):
            part.load(each)
        self.live.follow(moved=True)


def _regroup(everyone: list[ref[Averages]]) -> None:
    for each in everyone:
        if (averages := each()) is not None:
            averages.regroup()


def _others(one: ref[Averages], everyone: list[ref[Averages]]) -> Iterator[Averages]:
    return (other for each in everyone if (other := each()) is not None and other is not one())

"""The part of a Belay that follows one optimizer: a clock, averages and a stepper of its own."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from . import company, joint
from .average import MAIN, Average
from .averages import Averages, Checked
from .clock import Clock
from .hooks import runs
from .initial import Initial
from .options import Options
from .parameters import Names
from .rules import Rule
from .slices import Slices
from .stepper import Stepper
from .team import forget_beginning
from .unseen import Unseen


class Part:
    """What follows one optimizer, or steps that are taken by hand."""

    unseen: Unseen  # from when it begins

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        rules: Mapping[str, Rule],
        options: Options,
        member: company.Member,
        initial: Initial,
        slices: Slices | None,
    ) -> None:
        self.optimizer, self.options, self.clock = optimizer, options, Clock()
        averages = {
            name: Average(name, rule, pulls=name == MAIN, initial=initial, slices=slices, **options.kept)
            for name, rule in rules.items()
        }
        self.averages = Averages(model, optimizer, averages, options, self.clock)
        self.stepper = Stepper(model, optimizer, self.averages, options, self.clock, member)

    def begin(self, names: Names) -> None:
        """Begin the averages, unless they begin later."""
        if self.options.start == 0:
            self.averages.begin(names)
        self.unseen = Unseen(self.averages)
        self.stepper.before_the_first = partial(self.unseen.look_before_the_first, self.averages)

    def remember_weights(self) -> None:
        """Take the weights as they are now for those that belong to the averages."""
        self.stepper.takeover.forget()
        if not self.stepper.steps_seen:
            self.unseen.remember(self.averages)

    def warn_of_unseen(self) -> None:
        """Warn if the weights have changed and no step was seen, or if another optimizer steps them now."""
        stepper = self.stepper
        if stepper.attached and not stepper.is_inside and not company.own_tensors():  # inside, they may have moved
            if not stepper.steps_seen:
                self.unseen.look(self.averages, self.optimizer, self._is_stepped)
            else:
                stepper.takeover.look()

    def _is_stepped(self) -> bool:
        """Whether a thread is taking a step of the optimizer, or one has been seen."""
        is_running = self.optimizer is not None and runs(self.optimizer, "wrapper")  # torch's, around `step`
        return is_running or self.stepper.steps_seen > 0  # in this order: the step may end now

    def effective_lrs(self) -> dict[int, float]:
        """Return what is left of each group's learning rate in the long run, for the group's first parameter."""
        groups = self.averages.held()
        entries = [e for e in self.averages.each[MAIN].entries.values() if id(e.w1) in groups]
        firsts = {groups[id(e.w1)]: e for e in reversed(entries)}
        rates = {group: self.averages.parameters.lr(group) for group in sorted(firsts)}
        at = self.clock.count, self.options.every, self.options.number_of_workers
        return {g: lr * firsts[g].effective_lr_scale(lr, *at) for g, lr in rates.items() if lr is not None}

    def trained(self, saved: Mapping[str, Mapping[str, Any]]) -> joint.Trained:
        """Return what a state says of the optimizer, whose averages it has as `saved`."""
        names = dict.fromkeys(name for average in saved.values() for name in average["weights"])
        return joint.Trained(self.clock.count, self.averages.began, list(names))

    def load(self, checked: Checked) -> None:
        """Go on from a state that fits."""
        forget_beginning(self.averages.team)
        self.averages.load(checked)
        self.stepper.forget_the_step()
        self.unseen.forget()

    def wanted_names(self, names: Names | None) -> dict[str, None]:
        """Return the names of the parameters that averages are to follow, out of those of all parameters."""
        return {each.name: None for wanted in self.averages.wanted(names).values() for each in wanted}

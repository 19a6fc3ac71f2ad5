"""Steps of all kinds: ordinary ones, skipped, refused, not finite, and interrupted."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from helpers.events.made import Member
from helpers.events.step import Step
from helpers.events.subject import Subject, far, interrupting, unlike
from helpers.interrupting import ROOMS, STEP, Interruption
from helpers.problems import same

STOPPED = r"stopped while weights and averages moved.*load_state_dict.*reset"


class Stepping(Subject):
    """Events that are steps."""

    def step(self) -> None:
        step = Step(self)
        with self.refusals() as refused:
            step.take()
        if not refused:
            self.settle(step)

    def settle(self, step: Step) -> None:
        """Compare everything after a step that took place."""
        stepped = step.stepped()
        step.check_optimizer()
        for member in self.members:
            member.account = step.then[id(member)]
            expected = step.lead_to(member, member.account, stepped)
            if member is self.puller():
                found = step.check_weights(member, expected)
                assert not found, found
                step.check_bits(member)
            member.torn = "no"

    @contextmanager
    def refusals(self) -> Iterator[list[bool]]:
        """A Belay whose last step was stopped in the middle must refuse, and one that may have been stopped may."""
        refused: list[bool] = []
        torn = [member for member in self.members if member.torn != "no"]
        before = self.bits()
        try:
            yield refused
        except RuntimeError as error:
            if not torn or "was stopped while" not in str(error):
                raise
            if not re.search(STOPPED, str(error)):
                pytest.fail(f"the message does not say what to do: {error}")
            refused.append(True)
            changed = [name for name in unlike(self.bits(), before) if "buffer" not in name and "model" not in name]
            assert not changed, f"a refused step has changed {changed}"
            self.note("  refused")
            for left in ("grad_scale", "found_inf"):  # GradScaler leaves them when a step raises
                vars(self.optimizer or self).pop(left, None)
            for member in torn:
                self.cure(member)
        else:
            assert not any(member.torn == "yes" for member in torn), "a step was built upon one that was stopped"

    def cure(self, member: Member) -> None:
        """Do what the message says."""
        member.torn, load = "no", self.dice.random() < 0.5
        if load:
            try:
                member.belay.load_state_dict(member.good)
            except ValueError:  # the model has other tensors by now
                load = False
            else:
                member.account = copy.deepcopy(member.good_account)
        if not load:
            member.belay.reset()
            member.account.follow(self.parameters(), self.buffers())
            member.account.restart(self.buffers())
        self.note(f"  cured by {'load_state_dict()' if load else 'reset()'}")

    def skipped_step(self) -> None:
        """A step that GradScaler skips."""
        if self.optimizer is None or self.recipe.frail or any(member.torn != "no" for member in self.members):
            return
        step = Step(self)
        step.closure = False
        some = [key for key, g in step.gradients.items() if g is not None and g.numel()]
        if not some:
            return
        bad = step.gradients[self.dice.choice(some)]
        bad.reshape(-1)[0:1].fill_(torch.inf) if bad.is_contiguous() else bad.fill_(torch.inf)
        step.scaler = GradScaler("cpu", init_scale=4.0)
        step.scaler.scale(torch.zeros((), dtype=torch.float32))
        step.take()
        for p in self.model.parameters():
            assert same(p.detach(), step.before_bits[id(p)])
        for member in self.members:
            supports = getattr(self.optimizer, "_step_supports_amp_scaling", False)
            if supports:  # the step was called, and has adopted what came late
                member.account = step.then[id(member)]

    def bad_step(self) -> None:
        """A step that leaves weights which are not finite; the user puts the weights back."""
        accounts = [member.account for member in self.members]
        guarded = all(each.on_nonfinite != "ignore" and each.began and each.every == 1 for each in accounts)
        if not guarded or any(member.torn != "no" for member in self.members):
            return
        step = Step(self, plain=True)
        followed = [set(m.account.averages["average"].weights) for m in self.members]
        some = [key for key, g in step.gradients.items() if g is not None and all(key in each for each in followed)]
        if not some:
            return
        step.gradients[self.dice.choice(some)].fill_(torch.nan)
        kept = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        raises = any(m.account.on_nonfinite == "raise" for m in self.members)
        self.note(f"  {raises=}")
        if raises:
            with pytest.raises(FloatingPointError, match="not finite"):
                step.take()
        else:
            step.take()
        for p in self.model.parameters():
            p.data.copy_(step.before_bits[id(p)])
        if kept is not None:
            self.optimizer.load_state_dict(kept)
        for member in self.members:
            member.account = step.then[id(member)]

    def interrupted_step(self) -> None:
        """An exception, or a signal whose handler raises, at any line of the step."""
        if any(member.torn == "yes" for member in self.members):
            self.step()
            return
        step = Step(self, plain=True)
        before = {id(member): self.averages_of(member) for member in self.members}
        counts = {id(member): member.belay.step for member in self.members}
        good = {id(member): copy.deepcopy(member.belay.state_dict()) for member in self.members}
        accounts = {id(member): self.held(member.account) for member in self.members}
        for account in accounts.values():
            account.saved(self.persistent())
        interrupted = True
        with self.refusals() as refused:
            try:
                with interrupting(self.dice, (ROOMS, 500), (STEP, 80), (ROOMS[1:], 80)) as place:
                    step.take()
                interrupted = False
            except Interruption:
                pass
        self.note(f"  at {place}, line {place.lines}")
        if refused:
            return
        if not interrupted:
            self.settle(step)
            return
        for member in self.members:
            if member.torn == "no":
                member.good, member.good_account = good[id(member)], accounts[id(member)]
            self.judge(member, step, before[id(member)], counts[id(member)])

    def judge(self, member: Member, step: Step, before: Mapping[str, Any], count: int) -> None:
        """Find out what an interrupted step has done to a Belay: nothing, all of it, or a part, which it must know."""
        then = step.then[id(member)]
        for account in (member.account, then):
            account.follow(self.parameters(), self.buffers())
        now = self.averages_of(member)
        both = [key for key in before if key in now and ("/weights/" in key or "/velocities" in key)]
        moved = [key for key in both if then.began and not same(now[key], before[key])]  # else they are the weights
        puts = [step.before_bits, *([] if self.stepped is None else [self.stepped])]
        weights = {id(p): p.detach() for p in self.model.parameters()}
        unpulled = any(all(same(w, put[key]) for key, w in weights.items()) for put in puts)
        if self.stepped is None and not step.carried:  # our own optimizers may be interrupted after their update
            unpulled |= not any(far("", w, step.formula[key], step.before[key]) for key, w in weights.items())
        alone = member is not self.puller() or unpulled
        member.torn = "maybe"
        if not moved and member.belay.step == count and alone:
            for account in (member.account, then):
                if self.is_followed(member, account) and not self.differences(member, account):
                    member.account = account
                    self.note("  not taken")
                    return
        for begins in (True, False):
            account = copy.deepcopy(then)
            began, start = account.began, account.start
            if not begins:
                account.start = 10**9
            expected = step.lead_to(member, account, step.stepped())
            account.start = start
            fits = member is not self.puller() or not step.check_weights(member, expected)
            if (begins or not began) and fits and not self.differences(member, account):
                member.account = account
                self.note(f"  taken, {begins=}")
                return
        member.torn, member.account = "yes", then
        self.note(f"  torn: {self.differences(member, then)}")

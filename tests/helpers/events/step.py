"""One step: how it is taken, what its optimizer alone does, and what it must lead to."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from helpers.events.account import FIRST, Account, exactly, updated
from helpers.events.made import Member, turned
from helpers.events.subject import Subject, far, sizes
from helpers.problems import same


class Step:
    """A step that is about to be taken: what it begins with, and what it must lead to."""

    def __init__(self, subject: Subject, *, plain: bool = False) -> None:
        dice = subject.dice
        self.subject = subject
        for i in range(len(subject.groups())):
            if dice.random() < 0.3:
                subject.set_lr(i, dice.choice([0.02, 0.05, 0.1]))
        self.closure = dice.random() < 0.25
        if not self.closure:
            subject.write_buffers()
        self.lr = {id(p): float(group["lr"]) for group in subject.groups() for p in group["params"]}
        self.lr[FIRST] = float(subject.groups()[0]["lr"])
        self.gradients = {id(p): self._gradient(p) for p in subject.trained().values()}
        self.scaler = None
        some = any(g is not None for g in self.gradients.values())
        if not plain and some and subject.optimizer is not None and dice.random() < 0.2:
            self.scaler = GradScaler("cpu", init_scale=4.0)
            self.scaler.scale(torch.zeros((), dtype=torch.float32))
        self.before = subject.weights()
        self.before_bits = {id(p): p.detach().clone() for p in subject.model.parameters()}
        self.formula, self._states = self._optimizers_own()
        self.then: dict[int, Account] = {}  # of each member, as it is when the step has been prepared
        for member in subject.members:
            account = self.then[id(member)] = copy.deepcopy(member.account)
            account.adopt(subject.trained(), subject.buffers())
        subject.note(f"  lr {[g['lr'] for g in subject.groups()]}, closure={self.closure}, scaled={bool(self.scaler)}")

    def _gradient(self, p: Tensor) -> Tensor | None:
        dice = self.subject.dice
        drawn = torch.randn(p.shape, dtype=torch.float64).to(p.dtype)
        if not p.requires_grad or (dice.random() < 0.1 and not self.subject.recipe.frail):
            return None
        if self.subject.recipe.flat:
            return torch.zeros_like(p).copy_(drawn).detach()
        return turned(drawn, really=dice.random() < 0.2)

    def _optimizers_own(self) -> tuple[dict[int, Tensor], dict[int, dict[str, Any]]]:
        """Return the weights and the state that the optimizer's formula gives."""
        weights, states = dict(self.before), {}
        for group in self.subject.groups():
            for p in group["params"]:
                g = self.gradients.get(id(p))
                if g is not None:
                    optimizer = self.subject.optimizer
                    known = {} if optimizer is None else optimizer.state.get(p, {})
                    state = {
                        key: exactly(t) if isinstance(t, Tensor) else t for key, t in known.items() if t is not None
                    }
                    weights[id(p)], states[id(p)] = updated(
                        self.subject.recipe.rule, self.before[id(p)], exactly(g), group, state
                    )
        return weights, states

    def take(self) -> None:
        """Let it happen."""
        subject, optimizer = self.subject, self.subject.optimizer
        subject.stepped = None
        if optimizer is None:
            self._take_by_hand()
            return
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()

        def evaluate() -> None:
            for p in subject.trained().values():
                g = self.gradients[id(p)]
                p.grad = None if g is None else g.clone() * scale

        def closure() -> None:
            subject.write_buffers()
            if subject.dice.random() < 0.3:
                subject.replace_memory()
            evaluate()

        optimizer.zero_grad()
        if self.scaler is not None:
            evaluate()
            self.scaler.step(optimizer)
        elif self.closure:
            optimizer.step(closure)
        else:
            evaluate()
            optimizer.step()

    @torch.no_grad()
    def _take_by_hand(self) -> None:
        subject = self.subject
        lr = subject.groups()[0]["lr"]
        for member in subject.members:
            member.belay.before_step(lr=lr)
        for p in subject.trained().values():
            g = self.gradients[id(p)]
            if g is not None and "replacing" in subject.recipe_name:
                p.data = p.data - lr * g
            elif g is not None:
                p -= lr * g
        subject.look()
        for member in sorted(subject.members, key=lambda one: not one.pulls):
            member.belay.after_step()

    # What it must have led to

    @property
    def carried(self) -> bool:
        """Whether the optimizer has taken an average along, so that nobody saw its own step alone."""
        return any("in one pass" in repr(member.belay) for member in self.subject.members)

    def stepped(self) -> dict[int, Tensor]:
        """Return the weights after the optimizer's own step; what was seen must be what the formula says."""
        subject = self.subject
        if self.carried or subject.stepped is None:
            return self.formula
        for name, p in subject.parameters().items():
            found = far(f"the optimizer's own {name}", subject.stepped[id(p)], self.formula[id(p)], self.before[id(p)])
            assert not found, found
        return {key: exactly(t) for key, t in subject.stepped.items()}

    def lead_to(self, member: Member, account: Account, stepped: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Let an account take the step, and return where it expects the weights."""
        subject = self.subject
        after = subject.weights()
        target = stepped if member is subject.puller() else after  # others see the weights after the pull
        expected = account.step(self.before, target, after, self.lr, subject.buffers())
        for each in (each for average in account.averages.values() for each in average.weights.values()):
            each.rough = each.of.dtype if member.options["impl"] == "triton" else each.rough
        account.begin_when_due(subject.trained(), subject.buffers())
        return expected

    def check_weights(self, member: Member, expected: Mapping[int, Tensor]) -> list[str]:
        found, subject = [], self.subject
        for name, p in subject.parameters().items():
            each = member.account.averages["average"].weights.get(id(p))
            also = None if each is None else member.kept
            others = [self.before[id(p)], *([] if each is None else sizes(each))]
            found += far(f"weights {name}", p.detach(), expected[id(p)], *others, also=also)
        return found

    def check_bits(self, member: Member) -> None:
        """Weights that no average pulls are the optimizer's to the last bit."""
        seen, followed = self.subject.stepped, member.account.averages["average"].weights
        for name, p in self.subject.parameters().items() if seen is not None and not self.carried else ():
            each = followed.get(id(p))
            if each is None or each.law is None or not each.law.pulls:
                assert same(p.detach(), seen[id(p)]), f"{name} is not pulled, and has changed"

    def check_optimizer(self) -> None:
        optimizer = self.subject.optimizer
        if optimizer is None:
            return
        for p in self.subject.trained().values():
            for key, value in self._states.get(id(p), {}).items():
                terms = [self.before[id(p)], exactly(self.gradients[id(p)])]
                found = far(f"the optimizer's {key}", optimizer.state[p][key], value, *terms)
                assert not found, found

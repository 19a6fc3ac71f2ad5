"""What random events happen to: a model, its optimizer and its Belays, compared with their accounts."""

import copy
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from helpers import seams
from helpers.events.account import Account, Follower, exactly
from helpers.events.made import FUSED_BY_US, PARTS, RECIPES, Member, Net, any_member, turned
from helpers.interrupting import Place, raising_at, signalling_at
from helpers.problems import same

ROUGH = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
KINDS = {"weights": "w2", "velocities1": "v1", "velocities2": "v2"}


class Subject:
    """A model, its optimizer and its Belays, with what the accounts must know of them."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, trace: list[str], *, kernels: bool) -> None:
        self.dice, self.trace, self.late = random.Random(seed), trace, list[str]()  # late: layers that came later
        dice = self.dice
        torch.manual_seed(seed)
        if dice.random() < 0.25:
            seams.set_waiting(patch, True)
        self.waits = seams.stepper.reading_waits(torch.zeros((), dtype=torch.float32))
        impl = "triton" if kernels and dice.random() < 0.03 else dice.choice(["auto", "foreach", "reference"])
        self.recipe_name = dice.choice(FUSED_BY_US if impl == "triton" and dice.random() < 0.7 else list(RECIPES))
        self.recipe = RECIPES[self.recipe_name]
        parts = [part for part in PARTS if dice.random() < (0.2 if impl == "triton" else 0.5)]
        self.model: Any = Net(parts)
        if dice.random() < 0.15 and not self.recipe.frail:
            self.model.bfloat16()
        self.length = 6 if impl == "triton" else dice.randint(12, 25)
        held = [p for p in self.model.parameters() if p.requires_grad or dice.random() < 0.5]
        cut = dice.randrange(len(held)) if self.recipe.make is not None else 0
        self.optimizer: Optimizer | None = None
        self._hand = {"lr": 0.05, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        self.make_optimizer([some for some in (held[:cut], held[cut:]) if some])
        self.impl = impl
        self.members: list[Member] = []
        watches = dice.random() < 0.2
        self.join(any_member(dice, self.recipe_name, watches=watches, impl=impl))
        self.note(f"{self.recipe_name}, {', '.join(parts)}, {self.square.dtype}, waits={self.waits}, {cut=}")

    def note(self, what: str) -> None:
        self.trace.append(what)

    def make_optimizer(self, groups: list[list[Tensor]]) -> None:
        self.stepped: dict[int, Tensor] | None = None
        if self.recipe.make is not None:
            self.optimizer = self.recipe.make([{"params": params} for params in groups])
            self.optimizer.register_step_post_hook(self.look)  # before Belay's: sees what the optimizer alone has done

    def join(self, member: Member, *, replace: bool = False) -> None:
        member.belay = member.attach(self.model, self.optimizer, replace=replace)
        member.account.begin_when_due(self.trained(), self.buffers())
        self.members.append(member)
        self.note(f"Belay({member.picks}, {member.options})")

    # What the model and the optimizer have now

    @property
    def square(self) -> Tensor:
        return self.model.square.weight

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def persistent(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.buffers().items() if name in self.model.state_dict()}

    def groups(self) -> list[dict[str, Any]]:
        if self.optimizer is not None:
            return self.optimizer.param_groups
        return [self._hand | {"params": [p for p in self.model.parameters() if p.requires_grad]}]

    def set_lr(self, group: int, lr: float) -> None:
        (self._hand if self.optimizer is None else self.optimizer.param_groups[group])["lr"] = lr

    def trained(self) -> dict[str, Tensor]:
        held = {id(p) for group in self.groups() for p in group["params"]}
        return {name: p for name, p in self.parameters().items() if id(p) in held}

    def weights(self) -> dict[int, Tensor]:
        return {id(p): exactly(p) for p in self.model.parameters()}

    def look(self, *_: object) -> None:
        self.stepped = {id(p): p.detach().clone() for p in self.model.parameters()}

    # What forwards do

    def write_buffers(self) -> None:
        """Let buffers change, as a forward lets them."""
        for b in self.buffers().values():
            if self.dice.random() < 0.5 and not b.is_inference() and 0 not in b.stride():
                b.add_(1) if not b.is_floating_point() else b.mul_(0.9).add_(0.1 * self.dice.random())

    def replace_memory(self) -> None:
        """Put the weights, or the buffers, into other memory, as a forward may."""
        for p in self.model.parameters():
            if self.dice.random() < 0.5:
                p.data = turned(p.data.clone(), really=self.dice.random() < 0.3 and not self.recipe.flat)
        for module in self.model.modules():
            for name, b in module._buffers.items():
                if b is not None and self.dice.random() < 0.5:
                    module._buffers[name] = b.clone()

    def puller(self) -> Member:
        return next((member for member in self.members if member.pulls), self.members[0])

    # Comparing

    def bits(self) -> dict[str, Any]:
        """Copies of everything that an event which changes nothing must leave as it is."""
        tensors = {f"model/{name}": t for name, t in (*self.parameters().items(), *self.buffers().items())}
        found: dict[str, Any] = {name: t.detach().clone() for name, t in tensors.items()}
        for i, member in enumerate(self.members):
            found[f"{i}/step"] = member.belay.step
            found |= {f"{i}/{name}": value for name, value in self.averages_of(member).items()}
        return found

    def averages_of(self, member: Member) -> dict[str, Any]:
        """Copies of all tensors and ages of a Belay's averages, by name; a Belay that is asked follows its model."""
        member.account.follow(self.parameters(), self.buffers())
        found: dict[str, Any] = {}
        for average, saved in member.belay.state_dict()["averages"].items():
            for kind in ("weights", "velocities1", "velocities2", "buffers"):
                found |= {f"{average}/{kind}/{name}": t.clone() for name, t in saved[kind].items()}
            found |= {f"{average}/{kind}": copy.deepcopy(saved[kind]) for kind in ("ages", "memories")}
            own = saved["own_buffers"]
            found[f"{average}/own_buffers"] = sorted(copy.deepcopy(own), key=str) if isinstance(own, list) else own
        return found

    def of_weights(self, member: Member, names: list[str]) -> list[str]:
        """Return those of these names that are no buffers', nor of weights that the next step will begin to average."""
        known = {key for average in member.account.averages.values() for key in average.weights}
        late = {name for name, p in self.parameters().items() if id(p) not in known}
        return [name for name in names if "/buffers/" not in name and name.rpartition("/")[2] not in late]

    def check(self) -> None:
        """Compare everything with the accounts."""
        for member in self.members:
            member.account.follow(self.parameters(), self.buffers())
            if member.torn != "yes":
                found = self.differences(member, member.account)
                assert not found, found

    def differences(self, member: Member, account: Account) -> list[str]:
        """Return in what a Belay differs from an account."""
        state = member.belay.state_dict()
        if (state["step"], bool(state["began"])) != (account.count, account.began):
            return [f"step {state['step']}, began {state['began']}, not {account.count}, {account.began}"]
        names = {id(p): name for name, p in self.parameters().items()}
        found = []
        held = self.held(account)
        for average in account.averages if account.began else ():
            saved = state["averages"][average]
            own = {names[key]: each for key, each in held.averages[average].weights.items()}
            if set(own) != set(saved["weights"]):
                return [f"{average} has {set(saved['weights'])}, not {set(own)}"]
            for name, each in own.items():
                if saved["ages"][name] != each.age:
                    found.append(f"{average}: {name} is {saved['ages'][name]} steps old, not {each.age}")
                for kind, slot in KINDS.items():
                    value = getattr(each, slot)
                    if (value is None) != (name not in saved[kind]):
                        found.append(f"{average}: {kind} of {name}")
                    elif value is not None:
                        found += far(
                            f"{average}/{kind}/{name}", saved[kind][name], value, *sizes(each), also=each.rough
                        )
            found += self._different_buffers(account, average, saved)
        return found

    def held(self, account: Account) -> Account:
        """What a state has: the averages of what the optimizer holds now, as its next step would find them."""
        held = copy.deepcopy(account)
        held.adopt(self.trained(), self.buffers())
        return held

    def is_followed(self, member: Member, account: Account) -> bool:
        """Whether a Belay has the averages of an account; a state has those that the next step will find."""
        names = {id(p): name for name, p in self.parameters().items()}
        return not account.began or all(
            {names[key] for key in average.weights} == set(member.belay.tensors(name))
            for name, average in account.averages.items()
        )

    def _different_buffers(self, account: Account, average: str, saved: Mapping[str, Any]) -> list[str]:
        expected, found = account.averages[average], []
        if account.buffers == "average":
            if set(saved["buffers"]) != set(expected.buffers):
                return [f"{average} has buffers {set(saved['buffers'])}, not {set(expected.buffers)}"]
            for name, each in expected.buffers.items():
                found += far(f"{average}/buffer/{name}", saved["buffers"][name], each.w2, also=torch.float32)
            ages = {name: age for name, _, age, _ in saved["own_buffers"]}
            known = {name: each.age for name, each in expected.buffers.items() if each.law is not None}
            found += [f"{average}: ages of buffers {ages}, not {known}"] if ages != known else []
        elif account.buffers == "copy":
            if saved["own_buffers"] and not expected.own:
                expected.own, expected.renewed = expected.renewed, {}
            for name, value in expected.own.items():
                if name in saved["buffers"] and saved["buffers"][name].shape == value.shape:
                    found += far(f"{average}/own buffer/{name}", saved["buffers"][name], value, also=torch.float32)
            if bool(saved["own_buffers"]) != bool(expected.own):
                found.append(f"{average}: own buffers {saved['own_buffers']}, not {set(expected.own)}")
        return found

    def check_export(self, member: Member, average: str) -> dict[str, Any]:
        """Compare an export with the account, and return it."""
        exported = member.belay.average_state_dict(average)
        member.account.follow(self.parameters(), self.buffers())
        if member.torn == "yes":
            return exported
        followed, kept = member.account.averages[average].weights, member.kept
        buffers = member.account.own_buffers(average, self.buffers())
        for name, p in self.parameters().items():
            if id(p) in followed:
                found = far(f"export of {name}", exported[name], followed[id(p)].w2, *sizes(followed[id(p)]), also=kept)
                assert not found, found
            else:
                assert same(exported[name], p.detach()), f"export of {name}, which is not averaged"
        for name, value in buffers.items():
            found = far(f"export of {name}", exported[name], value, also=kept) if name in exported else []
            assert not found, found
        return exported


@torch.no_grad()
def far(what: str, found: Tensor, expected: Tensor, *others: Tensor, also: torch.dtype | None = None) -> list[str]:
    """Say so if numbers are further from the expected ones than rounding explains."""
    if not found.is_floating_point():
        return [] if torch.equal(found, expected) else [f"{what}: {found} is not {expected}"]
    if found.shape != expected.shape:
        return [f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"]
    size = max([float(t.abs().max()) for t in (expected, *others) if t.numel()], default=0.0)
    rough = max(ROUGH[dtype] for dtype in (found.dtype, also or found.dtype))
    off = float((found.detach().double() - expected).abs().max()) if expected.numel() else 0.0
    return [] if off <= rough * (size + 0.01) else [f"{what}: off by {off:.3g} of {size:.3g}"]


def sizes(each: Follower) -> list[Tensor]:
    """What the rounding of a step is relative to."""
    return [t for t in (each.w2, each.of, each.v1, each.v2) if t is not None]


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names under which two copies differ, if only by a bit, or that only one of them has."""
    return [
        name for name in {**one, **other} if name not in one or name not in other or not same(one[name], other[name])
    ]


def interrupting(dice: random.Random, *places: tuple[Sequence[Path], int]) -> AbstractContextManager[Place]:
    """Interrupt the block at a random line, by an exception or a signal. A place is files, and how many lines run."""
    inside, lines = dice.choice(places)
    line = dice.randrange(lines)
    return raising_at(line, inside) if dice.random() < 0.5 else signalling_at(line, signal.SIGUSR1, inside)


@contextmanager
def as_is(subject: Subject) -> Iterator[None]:
    """Nothing may change, to the last bit."""
    before = subject.bits()
    yield
    found = unlike(subject.bits(), before)
    assert not found, f"changed: {found}"

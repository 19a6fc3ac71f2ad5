"""What users do to models, optimizers and checkpoints between two steps."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.events.account import LAWS
from helpers.events.made import Member, any_member, spread, turned
from helpers.events.subject import Subject, as_is, unlike

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16)


class Changing(Subject):
    """Events that change the model, the optimizer, or the process."""

    # The model's tensors

    def lay_out(self) -> None:
        if self.recipe.flat:
            return
        form = self.dice.choice([torch.channels_last, torch.contiguous_format])
        target = self.dice.choice([self.model, *self.model.children()])
        with as_is(self):
            target.to(memory_format=form)

    def replace_data(self) -> None:
        with as_is(self):
            for p in self.model.parameters():
                if self.dice.random() < 0.5:
                    kinds = [Tensor.clone] if self.recipe.flat else [Tensor.clone, turned, spread]
                    p.data = self.dice.choice(kinds)(p.data)

    def share_memory(self) -> None:
        with as_is(self):
            self.model.share_memory()

    def cast(self) -> None:
        """Cast the model, or a layer, maybe there and back."""
        target = self.dice.choice([self.model, self.model, *self.model.children()])
        there = self.dice.choice(FLOATS[: 3 if self.recipe.frail else 4])
        back = self.dice.choice([None, torch.float32])
        before = [self.averages_of(member) for member in self.members]
        target.to(there)
        if back is not None:
            target.to(back)
        self.note(f"  {there}, {back}")
        if self.optimizer is not None and self.recipe.remembers:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # torch wants its state in the weights' dtype
        for member, old in zip(self.members, before, strict=True):
            if member.account.began:
                found = self.of_weights(member, unlike(self.averages_of(member), old))
                assert not found, f"a cast of the model has changed {found}"

    def change_buffer(self) -> None:
        kind = self.dice.choice(["replace", "resize", "register", "delete", "expand", "infer", "widen", "move"])
        name, b = "late_buffer", torch.randn(2, 2, dtype=torch.float32)
        if kind == "register":
            self.model.register_buffer(name, b, persistent=self.dice.random() < 0.7)
        elif "table" not in self.model._buffers:
            return
        elif kind == "delete":
            if name in self.model._buffers:
                delattr(self.model, name)
        else:
            self.model.table = self._other(self.model.table, kind)
        self.note(f"  {kind}")

    def _other(self, table: Tensor, kind: str) -> Tensor:
        if kind == "replace":
            return torch.randn(table.shape, dtype=table.dtype)
        if kind == "resize":
            return torch.randn(self.dice.choice([(2, 3), (3, 3), (1,)]), dtype=table.dtype)
        if kind == "expand":
            return torch.randn(1, dtype=table.dtype).expand(2, 3)
        if kind == "infer":
            with torch.inference_mode():
                return torch.randn(table.shape, dtype=table.dtype)
        return table.to(self.dice.choice(FLOATS)) if kind == "widen" else table.clone()

    # What is trained

    def add_layer(self) -> None:
        name = f"late{len(self.trace)}"
        layer = nn.Linear(2, self.dice.choice([2, 3]), dtype=self.dice.choice([torch.float32, self.square.dtype]))
        self.model.add_module(name, layer)
        self.late.append(name)
        if self.optimizer is not None:
            self.optimizer.add_param_group({"params": list(layer.parameters())})

    def take_out(self) -> None:
        """Take a late layer out of the optimizer, and maybe of the model."""
        if not self.late:
            return
        name = self.dice.choice(self.late)
        gone = {id(p) for p in getattr(self.model, name).parameters()}
        everywhere = self.optimizer is None or self.dice.random() < 0.5
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        if self.optimizer is not None:
            self.optimizer.param_groups[:] = [g for g in self.optimizer.param_groups if g["params"]]
            for p in [p for p in self.optimizer.state if id(p) in gone]:
                del self.optimizer.state[p]
        if everywhere:
            delattr(self.model, name)
        self.late.remove(name)
        self.note(f"  {name}, {everywhere=}")

    def reload_optimizer(self) -> None:
        if self.optimizer is not None:
            with as_is(self):
                self.optimizer.load_state_dict(through_a_file(self.optimizer.state_dict()))

    # Belays

    def watch(self) -> None:
        """One more Belay, which may not pull; or one fewer."""
        if len(self.members) == 1:
            self.join(
                any_member(self.dice, self.recipe_name, watches=True, impl=self.dice.choice(["auto", "reference"]))
            )
        else:
            self.members.pop().belay.detach()

    def replace(self) -> None:
        """Another Belay takes the place of all others."""
        new = any_member(self.dice, self.recipe_name, watches=False, impl=self.impl)
        for member in self.members:
            if not self._pulled(member) & self._pulled(new) or self.dice.random() < 0.5:
                member.belay.detach()
        self.members = []
        self.join(new, replace=True)

    def _pulled(self, member: Member) -> set[str]:
        laws = {name: member.picks["average"](name) for name in self.trained()}
        return {name for name, law in laws.items() if law is not None and law.pulls}

    def second_pull(self) -> None:
        pulled = [each for each in self.members[0].account.averages["average"].weights.values() if each.law.pulls]
        if self.optimizer is None or not pulled:
            return
        with as_is(self), pytest.raises(ValueError, match="replace=True"):
            tb.Belay(self.model, self.optimizer, LAWS["belay"].method)

    # Checkpoints

    def resume(self) -> None:
        """Save everything to a file and load it into new objects."""
        if any(member.torn == "yes" for member in self.members):
            return
        self.check()
        before, accounts = self.bits(), [self.held(member.account) for member in self.members]
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        parts |= {str(i): member.belay for i, member in enumerate(self.members)}
        saved = through_a_file({name: part.state_dict() for name, part in parts.items() if part is not None})
        names = {id(p): name for name, p in self.parameters().items()}
        groups = [[names[id(p)] for p in group["params"]] for group in self.groups()]
        old = (self.model, self.optimizer, [member.belay for member in self.members])
        self.model = fresh_copy(self.model)
        new = self.parameters()
        self.make_optimizer([[new[name] for name in group] for group in groups])
        for member in self.members:
            member.belay = member.attach(self.model, self.optimizer)
        fits = all(self._fits(member, saved[str(i)]) for i, member in enumerate(self.members))
        order = [self.model, *([] if self.optimizer is None else [self.optimizer]), *(m.belay for m in self.members)]
        keys = ["model", *([] if self.optimizer is None else ["optimizer"]), *map(str, range(len(self.members)))]
        pairs = list(zip(order, keys, strict=True))
        self.dice.shuffle(pairs)
        try:
            with torch.inference_mode(self.dice.random() < 0.2 and self.optimizer is None):
                for part, key in pairs:
                    part.load_state_dict(saved[key])
        except ValueError as error:
            if fits:
                raise
            self.note(f"  refused: {error}")
            (self.model, self.optimizer), belays = old[:2], old[2]
            for member, belay in zip(self.members, belays, strict=True):
                member.belay = belay
            assert not unlike(self.bits(), before)
            return
        assert fits, "a state was loaded that does not fit"
        for member, account in zip(self.members, accounts, strict=True):
            member.account = account
            member.account.saved(self.persistent())
            for average in [*member.account.averages.values(), *member.good_account.averages.values()]:
                moved = {names[key]: each for key, each in average.weights.items() if key in names}
                for name, each in moved.items():
                    each.of = new[name]
                average.weights = {id(new[name]): each for name, each in moved.items()}
        found = unlike(self.bits(), before)
        assert not found, f"loaded otherwise: {found}"

    def _fits(self, member: Member, saved: dict[str, Any]) -> bool:
        """Whether a new Belay has the names and dtypes of a state."""
        if not saved["began"]:
            return True
        for average, state in member.belay.state_dict()["averages"].items():
            here = {name: t.dtype for name, t in state["weights"].items()}
            there = {name: t.dtype for name, t in saved["averages"][average]["weights"].items()}
            if here != there:
                return False
            # Averaged buffers that a model converted inside averaged() has widened do not become narrower again.
            for name, own in state["buffers"].items() if member.options["buffers"] == "average" else ():
                found = saved["averages"][average]["buffers"][name].dtype
                if torch.promote_types(found, own.dtype) != own.dtype:
                    return False
        return True

    def remember(self) -> None:
        """Keep the states of the Belays as they are."""
        self.check()
        for member in self.members:
            if member.torn == "no":
                member.good = copy.deepcopy(member.belay.state_dict())
                member.good_account = self.held(member.account)
                member.good_account.saved(self.persistent())

    def go_back(self) -> None:
        """Load a state from before."""
        for member in (each for each in self.members if each.good is not None):
            before, trained = self.bits(), self.trained()
            kept = {n: set(saved["weights"]) for n, saved in member.good["averages"].items()}
            now = {n: {each for each in trained if pick(each) is not None} for n, pick in member.picks.items()}
            try:
                with torch.inference_mode(self.dice.random() < 0.2):
                    member.belay.load_state_dict(copy.deepcopy(member.good))
            except ValueError as error:
                if kept == now and "buffer" not in str(error) and "dtype" not in str(error):
                    raise
                assert not unlike(self.bits(), before), unlike(self.bits(), before)
            else:
                assert kept == now, "a state was loaded that does not fit"
                member.account, member.torn = copy.deepcopy(member.good_account), "no"

    def lose(self) -> None:
        """A parameter is replaced in the model, and the optimizer still trains the old one."""
        kept = self.model.square.weight
        if self.optimizer is None:
            return
        with as_is(self):
            self.model.square.weight = nn.Parameter(kept.detach().clone())
            for member in self.members:
                if any(id(kept) in each.weights for each in member.account.averages.values()):
                    with pytest.raises(RuntimeError, match="make the optimizer and Belay anew"):
                        member.belay.average_state_dict()
            self.model.square.weight = kept

    def set_default(self) -> None:
        dtype = self.dice.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16])
        self.note(f"  {dtype}")
        with as_is(self):
            torch.set_default_dtype(dtype)


def through_a_file(state: Any) -> Any:
    """Return a state as torch.save and torch.load make it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fresh_copy(model: nn.Module) -> nn.Module:
    """A model of the same form with other weights, laid out as a new one is."""
    new = copy.deepcopy(model)
    for p in new.parameters():
        p.data = torch.randn(p.shape, dtype=torch.float32).to(p.dtype)
    for module in new.modules():
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else b.clone()
    return new

"""Averages that somebody holds, as modules and as mappings, through everything else that happens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.events.subject import Subject, unlike


class Holding(NamedTuple):
    """What somebody holds of an average."""

    belay: tb.Belay
    name: str
    module: nn.Module
    tensors: Any
    owns_buffers: bool  # they were copied once


class Held(Subject):
    """Events of modules and mappings; every step compares them with an export, bit for bit."""

    holdings: tuple[Holding, ...] = ()

    def hold(self) -> None:
        """Begin to hold an average, inside a block of it or not."""
        member, name = self.any_average()  # type: ignore[attr-defined]
        if member.torn != "no" or len(self.holdings) > 2:
            return
        inside = self.dice.random() < 0.3
        with torch.inference_mode(self.dice.random() < 0.2):
            if inside:
                with member.belay.averaged(name):
                    module, tensors = member.belay.module(name), member.belay.tensors(name)
            else:
                module, tensors = member.belay.module(name), member.belay.tensors(name)
        self.note(f"  {inside=}")
        new = Holding(member.belay, name, module, tensors, member.options["buffers"] == "ignore")
        self.holdings = (*self.holdings, new)
        self.compare(new)

    def drop(self) -> None:
        """Hold something no longer; or only a part of it."""
        if self.holdings:
            gone = self.dice.choice(self.holdings)
            self.holdings = tuple(each for each in self.holdings if each is not gone)

    def check_holdings(self) -> None:
        """Compare everything that is held of the Belays that still follow."""
        belays = [member.belay for member in self.members if member.torn == "no"]
        known = [member.belay for member in self.members]
        self.holdings = tuple(each for each in self.holdings if any(each.belay is belay for belay in known))
        for each in self.holdings:
            if any(each.belay is belay for belay in belays):
                self.compare(each)

    def compare(self, held: Holding) -> None:
        exported, found = held.belay.average_state_dict(held.name), dict(held.module.state_dict())
        if held.owns_buffers:
            for some in (exported, found):
                for name in {**self.buffers(), **dict(held.module.named_buffers())}:
                    some.pop(name, None)
        assert not unlike(exported, found), f"the module is not {held.name}: {unlike(exported, found)}"
        state, mapped = held.belay.state_dict(), dict[str, Tensor](held.tensors)
        weights = state["averages"][held.name]["weights"]
        if not state["began"]:  # until then it has the weights
            weights = {name: p.detach() for name, p in self.parameters().items() if name in weights}
        else:  # a state has what the next step will find, and the mapping what the last one has left
            account = next(each.account for each in self.members if each.belay is held.belay)
            followed = account.averages[held.name].weights
            assert set(mapped) == {name for name, p in self.parameters().items() if id(p) in followed}
            mapped = {name: t for name, t in mapped.items() if name in weights}
            weights = {name: t for name, t in weights.items() if name in mapped}
        assert not unlike(mapped, weights), f"the tensors are not {held.name}: {unlike(mapped, weights)}"

    def swap_held(self) -> None:
        """What is held stays what it is while any average is in the model, its own too."""
        member, name = self.any_average()  # type: ignore[attr-defined]
        if any(each.torn != "no" for each in self.members):
            return
        with member.belay.averaged(name):  # modules follow what has been done to the model since the last step
            pass
        with self.unchanged_holdings(), member.belay.averaged(name), self.unchanged_holdings():
            pass

    def unchanged_holdings(self) -> Any:
        return _Unchanged(self)


class _Unchanged:
    """Nothing that is held may change inside the block, nor by entering or leaving it."""

    def __init__(self, subject: Held) -> None:
        self._subject = subject

    def _look(self) -> list[dict[str, Tensor]]:
        parts = [(each.module.named_parameters(), each.tensors.items()) for each in self._subject.holdings]
        named = [[(f"{i} {name}", t) for i, part in enumerate(some) for name, t in part] for some in parts]
        return [{name: t.detach().clone() for name, t in some} for some in named]

    def __enter__(self) -> None:
        self._before = self._look()

    def __exit__(self, *_: object) -> None:
        for before, now in zip(self._before, self._look(), strict=True):
            kept = {name: t for name, t in now.items() if name in before}  # it may get late layers on entering
            assert not unlike(before, kept), f"what is held has changed: {unlike(before, kept)}"

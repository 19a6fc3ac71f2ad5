"""Averages in the model, for a while and for good, whatever happens inside and wherever an interruption comes."""

import copy
from contextlib import suppress

import pytest
import torch

import torchbelay as tb
from helpers.events.account import exactly
from helpers.events.made import Member, turned
from helpers.events.subject import Subject, as_is, interrupting, unlike
from helpers.interrupting import ROOMS, SOURCE, Interruption
from helpers.problems import same

SWAP = [SOURCE / "belay" / f"{name}.py" for name in ("belay", "swap", "signals")]


class Swapping(Subject):
    """Events that are swaps."""

    def any_average(self) -> tuple[Member, str]:
        self.check()
        member = self.dice.choice(self.members)
        name = self.dice.choice(list(member.picks))
        self.note(f"  {name} of {self.members.index(member)}")
        return member, name

    def swap(self) -> None:
        """Evaluate the average; nothing may change."""
        member, name = self.any_average()
        with as_is(self):
            exported = self.check_export(member, name)
            kind = self.dice.choice(
                [
                    "plain",
                    "nested",
                    "others",
                    "failing",
                    "inference",
                    "autocast",
                    "stepping",
                    "looking",
                    "memory",
                    "form",
                    "read",
                ]
            )
            self.note(f"  {kind}")
            getattr(self, f"_swap_{kind}")(member, name, exported)

    def _holds(self, exported: dict[str, torch.Tensor]) -> None:
        now = self.model.state_dict()
        assert not unlike(now, exported), f"inside: {unlike(now, exported)}"

    def _swap_plain(self, member: Member, name: str, exported) -> None:
        with member.belay.averaged(name):
            self._holds(exported)

    def _swap_nested(self, member: Member, name: str, exported) -> None:
        with member.belay.averaged(name):
            with member.belay.averaged(name):
                self._holds(exported)
            self._holds(exported)

    def _swap_others(self, member: Member, name: str, exported) -> None:
        """Another average cannot be put on top, of this Belay or of another one."""
        with member.belay.averaged(name):
            for other in self.members:
                for each in other.picks:
                    if (other, each) != (member, name):
                        followed = other is member or self._share(member, name)
                        if followed:
                            with (
                                pytest.raises(RuntimeError, match="leave that block first"),
                                other.belay.averaged(each),
                            ):
                                pass
            self._holds(exported)

    def _share(self, member: Member, name: str) -> bool:
        return bool(member.account.averages[name].weights)

    def _swap_failing(self, member: Member, name: str, exported) -> None:
        with pytest.raises(KeyError, match="on purpose"), member.belay.averaged(name):
            raise KeyError("on purpose")

    def _swap_read(self, member: Member, name: str, exported) -> None:
        """A blend is between weights and average, and its export is what the model holds."""
        share = self.dice.random()
        readout = tb.readouts.blend(share)
        own = copy.deepcopy(self.model.state_dict())
        read = member.belay.average_state_dict(name, readout=readout)
        followed = {key for key, _ in self.model.named_parameters(remove_duplicate=False)}
        for key, t in read.items():
            end, start = exported[key].double(), own[key].double()
            wanted = share * end + (1 - share) * start if key in followed else end
            rounding = 4 * torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
            torch.testing.assert_close(t.double(), wanted, rtol=rounding, atol=rounding, equal_nan=True)
        with member.belay.averaged(name, readout=readout):
            self._holds(read)
            assert not unlike(member.belay.average_state_dict(name), exported)

    def _swap_inference(self, member: Member, name: str, exported) -> None:
        x = torch.ones(2, 3, dtype=torch.float32)
        if self.dice.random() < 0.5:
            with torch.inference_mode(), member.belay.averaged(name):
                self.model(x)
                self._holds(exported)
        else:
            with member.belay.averaged(name), torch.inference_mode():
                self.model(x)
                self._holds(exported)

    def _swap_autocast(self, member: Member, name: str, exported) -> None:
        x = torch.ones(2, 3, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            raw = self.model(x)
            with member.belay.averaged(name):
                inside = self.model(x)
            again = self.model(x)
        assert same(raw.detach(), again.detach())
        with member.belay.averaged(name), torch.autocast("cpu", torch.bfloat16):
            assert same(self.model(x).detach(), inside.detach())

    def _swap_stepping(self, member: Member, name: str, exported) -> None:
        with member.belay.averaged(name):
            if self.optimizer is not None and self._share(member, name):
                with pytest.raises(RuntimeError, match="inside averaged"):
                    self.optimizer.step()
            elif self.optimizer is None:
                with pytest.raises(RuntimeError, match="inside averaged"):
                    member.belay.before_step(lr=0.1)
            for refused in (member.belay.reset, member.belay.copy_to_model):
                with pytest.raises(RuntimeError, match="inside averaged"):
                    refused()
            self._holds(exported)

    def _swap_looking(self, member: Member, name: str, exported) -> None:
        """States, statistics and exports are inside what they are outside."""
        others = [(m, each) for m in self.members for each in m.picks]
        outside = [m.belay.average_state_dict(each) for m, each in others]
        tension = member.belay.stats()["tension"]
        with member.belay.averaged(name):
            for (m, each), expected in zip(others, outside, strict=True):
                found = unlike(m.belay.average_state_dict(each), expected)
                assert not found, f"the export of {each} of {self.members.index(m)} inside: {found}"
            assert member.belay.stats()["tension"] == pytest.approx(tension, rel=1e-6, abs=1e-9)

    def _swap_memory(self, member: Member, name: str, exported) -> None:
        """Weights get other memory inside, with other values."""
        with member.belay.averaged(name):
            p = self.dice.choice(list(self.parameters().values()))
            followed = id(p) in member.account.averages[name].weights
            p.data = turned(p.data + 1.0, really=not self.recipe.flat) if followed else p.data.clone()

    def _swap_form(self, member: Member, name: str, exported) -> None:
        """The model is laid out anew inside."""
        with member.belay.averaged(name):
            if not self.recipe.flat:
                self.model.to(memory_format=self.dice.choice([torch.channels_last, torch.contiguous_format]))
            self._holds(exported)

    def write_inside(self) -> None:
        """Buffers that are written inside belong to the average from then on."""
        member, name = self.any_average()
        account = member.account
        kept = account.began and account.buffers != "ignore"
        own = {each: b.detach().clone() for each, b in self.buffers().items()}
        with member.belay.averaged(name):
            account.fit(self.buffers())
            written = {
                each: b
                for each, b in self.buffers().items()
                if self.dice.random() < 0.5 and not b.is_inference() and 0 not in b.stride()
            }
            for b in written.values():
                b.add_(1)
            values = {each: exactly(b) for each, b in written.items()}
        if kept:
            account.written_inside(name, values)
            assert not unlike({each: b.detach() for each, b in self.buffers().items()}, own)

    def interrupted_swap(self) -> None:
        """An exception, or a signal whose handler raises, at any line of entering or leaving."""
        member, name = self.any_average()
        with as_is(self):
            tensors = [(each, id(t), t.data_ptr()) for each, t in self.parameters().items()]
            places = (ROOMS, 1000), (SWAP, 120), (ROOMS[1:], 60)
            with suppress(Interruption), interrupting(self.dice, *places) as place, member.belay.averaged(name):
                pass
            self.note(f"  at {place}, line {place.lines}")
            assert tensors == [(each, id(t), t.data_ptr()) for each, t in self.parameters().items()]

    def copy_to_model(self, member: Member | None = None) -> None:
        member, name = self.any_average() if member is None else (member, "average")
        exported = self.check_export(member, name)
        member.belay.copy_to_model(name)
        assert not unlike(self.model.state_dict(), exported)

    def reset(self, member: Member | None = None) -> None:
        member = member or self.dice.choice(self.members)
        with torch.inference_mode(self.dice.random() < 0.2):
            member.belay.reset()
        member.account.follow(self.parameters(), self.buffers())
        member.account.restart(self.buffers())
        member.torn = "no"

    def interrupted_call(self) -> None:
        """What only looks changes nothing, and what is called again after an interruption does all of its work."""
        member, _ = self.any_average()
        call = self.dice.choice(
            ["average_state_dict", "state_dict", "stats", "load_state_dict", "copy_to_model", "reset"]
        )
        self.note(f"  {call}")
        if member.torn == "yes" and call == "load_state_dict":
            return
        arguments = [copy.deepcopy(member.belay.state_dict())] if call == "load_state_dict" else []
        before = self.bits()
        with suppress(Interruption), interrupting(self.dice, (ROOMS, 400), (ROOMS, 100)) as place:
            getattr(member.belay, call)(*arguments)
        self.note(f"  at {place}, line {place.lines}")
        if call == "reset":
            self.reset(member)
        elif call == "copy_to_model":
            self.copy_to_model(member)
        else:
            if call == "load_state_dict":
                with suppress(ValueError):  # it may lack what has come since the last step
                    member.belay.load_state_dict(*arguments)
                    member.account = self.held(member.account)
                    member.account.saved(self.persistent())
            assert not unlike(self.bits(), before), unlike(self.bits(), before)

    def convert_inside(self) -> None:
        """Weights of a model that is converted inside come back in the new form."""
        if self.recipe.remembers:
            return
        member, name = self.any_average()
        before, own = {key: t.detach().clone() for key, t in self.parameters().items()}, self.averages_of(member)
        dtype = self.dice.choice([torch.float32, torch.float64, torch.bfloat16])
        self.note(f"  {dtype}")
        with member.belay.averaged(name):
            self.model.to(dtype)
        for key, p in self.parameters().items():
            assert same(p.detach(), before[key].to(dtype)), f"{key} came back otherwise"
        if member.account.began:
            found = self.of_weights(member, unlike(self.averages_of(member), own))
            assert not found, f"a cast inside has changed {found}"

    def export(self) -> None:
        with as_is(self):
            self.check_export(*self.any_average())

"""A small transformer trains for a long time while all kinds of things go wrong, and every step is checked.

1,000 steps, or the number in TORCHBELAY_SOAK_STEPS, which `make soak` sets. Before each step something random may
happen: the scaler finds an infinite gradient, everything is rebuilt from a checkpoint, the average is swapped in (and
the block left by an exception), a step inside the block is tried, a hook raises, a damaged state is loaded, an adapter
is added or taken away. An independent program follows w1, w2 and the velocities of every parameter in float64 through
all of it.
"""

import copy
import gc
import os
import random
import warnings
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import torchbelay as tb
from helpers.small import same
from helpers.zoo import Transformer, next_word, sentences
from torchbelay.ops import reference

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("TORCHBELAY_SOAK_STEPS", "1000"))
SPRING = {"k": 1.0, "m1": 10.0, "m2": 20.0, "c1": 18.0, "c2": 36.0}
BELAY = tb.Spring(**SPRING)
# One that follows the weights after a step, and one that follows those before it. If all are constant, the host never
# asks the device whether a step was skipped; if one is not constant, the host must ask.
LAGGED = tb.Spring(k=0.2, m1=inf, m2=1.0)
SPECTATORS = {
    "constant": {"short": tb.methods.ema(0.95), "lagged": LAGGED},
    "counting": {"short": tb.methods.ema(0.95, warmup="ratio"), "lagged": LAGGED},
}
MOST = 3  # adapters at a time


class Adapter(nn.Module):
    """A small residual layer that comes and goes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.down(x)))


class Model(Transformer):
    def __init__(self, adapters: list[str]) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: Adapter() for name in adapters})

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        for block in [*self.blocks, *self.adapters.values()]:
            x = block(x)
        return self.head(x)


class Follower:
    """The expected values: an independent account of (w1, w2, v1, v2) and of the spectator, in float64."""

    def __init__(self, *, warms_up: bool) -> None:
        self.warms_up = warms_up
        self.held: dict[str, dict[str, Tensor]] = {}
        self.age: dict[str, int] = {}

    def adopt(self, name: str, p: Tensor) -> None:
        w = p.detach().double().clone()
        still = torch.zeros_like(w)
        self.held[name] = {"w2": w, "v1": still, "v2": still, "short": w, "lagged": w}
        self.age[name] = 0

    def step(self, name: str, w1: Tensor, stepped: Tensor) -> Tensor:
        """Return where w1 is expected after the optimizer has moved it to `stepped`."""
        held = self.held[name]
        w1, u = w1.double(), stepped.double() - w1.double()
        new, held["w2"], held["v1"], held["v2"] = reference.algorithm1_with_velocities(
            w1, held["w2"], held["v1"], held["v2"], u, **SPRING
        )
        self.age[name] += 1
        decay = min(0.95, (1 + self.age[name]) / (10 + self.age[name])) if self.warms_up else 0.95
        held["short"] = decay * held["short"] + (1 - decay) * new
        held["lagged"] = 0.9 * held["lagged"] + 0.1 * w1
        return new


class Soak:
    """The training, what goes wrong in it, and the account of the expected values."""

    def __init__(self, folder: Path, kind: str, seed: int = 0) -> None:
        self.dice, self.folder, self.happened = random.Random(seed), folder, Counter[str]()
        self.spectators = SPECTATORS[kind]
        self.adapters: list[str] = []
        self.made, self.taken, self.skipped = 0, 0, 0
        self.build()
        self.follower = Follower(warms_up=kind == "counting")
        for name, p in self.named().items():
            self.follower.adopt(name, p)

    def build(self, groups: list[list[str]] | None = None) -> None:
        """Model, optimizer, scaler and Belay, as at the start of a process."""
        torch.manual_seed(1)
        self.model = Model(self.adapters)
        named = self.named()
        parameters = [{"params": [named[name] for name in group]} for group in groups or [list(named)]]
        self.optimizer: Optimizer = torch.optim.AdamW(parameters, lr=3e-3, fused=True)
        self.stepped: dict[str, Tensor] = {}
        self.optimizer.register_step_post_hook(self.look)  # before Belay's: sees what the optimizer alone has done
        self.belay = tb.Belay(self.model, self.optimizer, BELAY, spectators=self.spectators)
        self.scaler = GradScaler("cpu", growth_interval=50)

    def look(self, *_: object) -> None:
        self.stepped = {name: p.detach().clone() for name, p in self.named().items()}

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def everything(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "belay": self.belay, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    # What goes wrong

    def step(self, number: int, *, spoilt: bool = False, failing: bool = False) -> None:
        before = {name: p.detach().clone() for name, p in self.named().items()}
        self.optimizer.zero_grad()
        self.scaler.scale(next_word(self.model, sentences(number))).backward()
        if spoilt:
            next(self.model.parameters()).grad.view(-1)[0] = inf
        if failing:
            handle = self.optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyError):
                self.scaler.step(self.optimizer)
            handle.remove()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # GradScaler leaves them when a step raises
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scaler.scale(next_word(self.model, sentences(number))).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < 256:  # the skipped steps would bring it to 0, and the weights to nan
            self.scaler.update(2.0**16)
        if spoilt:
            self.skipped += 1
            assert same(self.named(), before)
            return
        self.taken += 1
        self.agree({name: self.follower.step(name, before[name], self.stepped[name]) for name in self.follower.held})

    def agree(self, w1: dict[str, Tensor]) -> None:
        """Weights are those of the account but for one step's rounding; averages but for that of all steps so far."""
        assert self.belay.step == self.taken
        averages = self.belay.state_dict()["averages"]
        assert list(averages["average"]["ages"].values()) == [self.follower.age[n] for n in averages["average"]["ages"]]
        assert set(averages["average"]["weights"]) == set(w1)
        close("w1", self.named(), w1, 1e-6)
        for slot, saved in (
            ("w2", averages["average"]["weights"]),
            ("v1", averages["average"]["velocities1"]),
            ("v2", averages["average"]["velocities2"]),
            ("short", averages["short"]["weights"]),
            ("lagged", averages["lagged"]["weights"]),
        ):
            # errors of a step fade with the average's memory: 1e-7 of numbers around 1, some tens of steps of it
            close(slot, saved, {name: held[slot] for name, held in self.follower.held.items()}, 1e-5)

    def skipped_step(self, number: int) -> None:
        self.step(number, spoilt=True)

    def failed_step(self, number: int) -> None:
        self.step(number, failing=True)

    def resume(self, number: int) -> None:
        """Save to a file and load into new objects."""
        path = self.folder / "checkpoint.pt"
        names = {id(p): name for name, p in self.named().items()}
        groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        torch.save(self.everything() | {"dice": torch.get_rng_state()}, path)
        before = copy.deepcopy(self.everything())
        self.build(groups)
        saved = torch.load(path, weights_only=True)
        for part in ("model", "optimizer", "belay", "scaler"):
            getattr(self, part).load_state_dict(saved[part])
        torch.set_rng_state(saved["dice"])
        assert same(self.everything(), before)

    def swap(self, number: int) -> None:
        before = copy.deepcopy(self.everything())
        name = self.dice.choice(["average", "short", "lagged"])
        exported = self.belay.average_state_dict(name)
        with self.belay.averaged(name), torch.inference_mode(self.dice.random() < 0.5):
            assert same(dict(self.model.state_dict()), dict(exported))
            assert next_word(self.model.eval(), sentences(number)).isfinite()
        self.model.train()
        assert same(self.everything(), before)

    def swap_left_by_an_exception(self, number: int) -> None:
        before = copy.deepcopy(self.everything())
        with pytest.raises(KeyError), self.belay.averaged():
            fail()
        assert same(self.everything(), before)

    def step_inside(self, number: int) -> None:
        before = copy.deepcopy(self.everything())
        with pytest.raises(RuntimeError, match="inside averaged"), self.belay.averaged():
            self.optimizer.step()
        assert same(self.everything(), before)

    def damaged_state(self, number: int) -> None:
        before = copy.deepcopy(self.everything())
        state = copy.deepcopy(self.belay.state_dict())
        del state["averages"]["short"]["weights"][self.dice.choice(sorted(self.follower.held))]
        with pytest.raises(ValueError, match="missing"):
            self.belay.load_state_dict(state)
        assert same(self.everything(), before)

    def late_parameters(self, number: int) -> None:
        """Add an adapter; if there are too many, remove the first."""
        name = f"a{self.made}"
        self.made += 1
        if len(self.adapters) == MOST:
            self.forget(self.adapters[0])
        self.model.adapters[name] = Adapter()
        self.adapters.append(name)
        for key, p in self.named().items():
            if name in key:
                self.follower.adopt(key, p)
        self.optimizer.add_param_group({"params": list(self.model.adapters[name].parameters())})
        with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added"):
            self.step(number)

    def forget(self, name: str) -> None:
        gone = list(self.model.adapters[name].parameters())
        group = next(g for g in self.optimizer.param_groups if any(p is gone[0] for p in g["params"]))
        group["params"] = [p for p in group["params"] if not any(p is each for each in gone)]
        if not group["params"]:
            self.optimizer.param_groups.remove(group)
        for p in gone:
            self.optimizer.state.pop(p, None)
        del self.model.adapters[name]
        self.adapters.remove(name)
        for key in [key for key in self.follower.held if f".{name}." in key]:
            del self.follower.held[key], self.follower.age[key]

    def reset(self, number: int) -> None:
        self.belay.reset()
        for name, p in self.named().items():
            self.follower.adopt(name, p)

    FAULTS = {  # noqa: RUF012  # how often each happens, in a thousand steps
        "skipped_step": 60,
        "failed_step": 30,
        "resume": 15,
        "swap": 25,
        "swap_left_by_an_exception": 15,
        "step_inside": 15,
        "damaged_state": 15,
        "late_parameters": 15,
        "reset": 10,
    }

    def run(self, steps: int) -> None:
        for number in range(steps):
            at = self.dice.uniform(0, 1000)
            for name, often in self.FAULTS.items():
                at -= often
                if at < 0:
                    getattr(self, name)(number)
                    self.happened[name] += 1
                    break
            self.step(number)


@torch.no_grad()
def close(what: str, ours: dict[str, Any], theirs: dict[str, Tensor], allowed: float) -> None:
    """Compare all tensors at once, which is fast; only if they differ, find the one that does."""
    mine, expected = (torch.cat([each[name].reshape(-1).double() for name in theirs]) for each in (ours, theirs))
    if not bool(((mine - expected).abs() <= allowed + 1e-5 * expected.abs()).all()):
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name].double(), value, rtol=1e-5, atol=allowed, msg=lambda m, at=name: f"{what} of {at}: {m}"
            )
        pytest.fail(f"{what} is off")


def fail(*_: object) -> None:
    raise KeyError("on purpose")


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", SPECTATORS)
def test_a_long_training_in_which_everything_goes_wrong_is_right_at_every_step(kind: str, tmp_path: Path) -> None:
    soak, steps = Soak(tmp_path, kind), STEPS // 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"2 parameter\(s\) were taken from", category=tb.BelayWarning)
        soak.run(steps)
    assert set(soak.happened) == set(Soak.FAULTS)  # each has happened
    assert soak.skipped == soak.happened["skipped_step"]
    assert soak.belay.step == soak.taken > steps


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_long_training_does_not_grow(tmp_path: Path) -> None:
    """Steps, skipped ones, swaps, exports and resumes: as many tensors as at the start, and no more bytes."""
    soak = Soak(tmp_path, "constant")

    def some(steps: int) -> None:
        for number in range(steps):
            soak.step(number, spoilt=number % 9 == 4)
            if number % 10 == 0:
                soak.swap(number)
                soak.swap_left_by_an_exception(number)
                soak.damaged_state(number)
            if number % 50 == 0:
                soak.resume(number)

    more = max(200, STEPS // 5)
    some(more)  # until the allocator has what it needs: some MB in the first thousands of steps, and then no more
    tensors, objects, memory = tensors_alive(), len(gc.get_objects()), resident()
    some(more)
    assert tensors_alive() == tensors
    assert len(gc.get_objects()) - objects < more / 10  # a leak of one object per step would be ten times that
    # the allocator may take a few pages more; a leak of one copy of the weights per step would be 3 kB × steps
    assert resident() - memory < 4e6

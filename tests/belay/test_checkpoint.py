"""Saving and loading a Belay: nothing lost, nothing cast, nothing half-loaded."""

import copy
import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchbelay as tb
from helpers.small import (
    BELAY,
    EMA,
    SWINGING,
    WHERE,
    Still,
    attached,
    mlp,
    same,
    snapshot,
    train,
    values,
    with_batchnorm,
)

METHODS = {
    "belay": BELAY,
    "ema": EMA,
    "swinging": SWINGING,
    "swa": tb.methods.swa(),
    "lookahead": tb.methods.lookahead(k=4),
    "ema, scheduled": tb.methods.ema(tb.schedules.cosine(0.5, 1.0, 8), min_decay=0.6),
    "centred, scheduled": tb.methods.centred(tb.schedules.linear(0.5, -0.3, 8), tb.schedules.linear(0.3, 0.1, 5)),
    "ema_nesterov, scheduled": tb.methods.ema_nesterov(tb.schedules.linear(0.0, 0.5, 8), 0.9),
    "hard sync": tb.methods.hard_sync(4),
    "schedule-free": tb.methods.schedule_free(0.9),
    "heavy ball": tb.methods.heavy_ball(0.9),
    "by parameter": lambda name, p: tb.methods.heavy_ball(0.9) if "weight" in name else tb.methods.swa(),
}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + 0.3 * step)
        train(model, optimizer, 1, first=step)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_resuming_is_bit_exact(method: Any, at: int) -> None:
    options = {"spectators": {"short": tb.methods.ema(0.99, warmup="ratio")}, "buffers": "average"}
    model, optimizer, belay = attached(method, model=with_batchnorm(), **options)
    scheduled(model, optimizer, range(at))
    saved = through_a_file({"model": model.state_dict(), "opt": optimizer.state_dict(), "belay": belay.state_dict()})
    scheduled(model, optimizer, range(at, 10))

    resumed, resumed_optimizer, resumed_belay = attached(method, model=with_batchnorm(seed=5), **options)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["opt"])
    resumed_belay.load_state_dict(saved["belay"])
    scheduled(resumed, resumed_optimizer, range(at, 10))

    assert same(snapshot(resumed, resumed_belay), snapshot(model, belay))


@pytest.mark.parametrize("saved_at", [1, 2, 5])
@pytest.mark.parametrize("loaded_at", [0, 4])
def test_resuming_across_the_start_of_the_average(saved_at: int, loaded_at: int) -> None:
    model, optimizer, belay = attached(EMA, start=2, every=2)
    train(model, optimizer, saved_at)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), belay.state_dict()])
    train(model, optimizer, 6, first=saved_at)
    other, other_optimizer, other_belay = attached(EMA, start=2, every=2)
    train(other, other_optimizer, loaded_at)
    for target, state in zip((other, other_optimizer, other_belay), saved, strict=True):
        target.load_state_dict(state)
    train(other, other_optimizer, 6, first=saved_at)
    assert same(snapshot(other, other_belay), snapshot(model, belay))


def test_parameters_adopted_at_different_times_resume_with_their_own_ages() -> None:
    def grown() -> nn.Sequential:
        return nn.Sequential(*mlp(), nn.Linear(1, 1))

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": model[:3].parameters()}, {"params": model[3].parameters()}]

    model = grown()
    optimizer = torch.optim.SGD(groups(model)[:1], lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.heavy_ball(0.9))
    train(model, optimizer, 3)
    optimizer.add_param_group(groups(model)[1])
    with pytest.warns(tb.BelayWarning):
        train(model, optimizer, 2, first=3)
    saved = through_a_file({"model": model.state_dict(), "belay": belay.state_dict()})
    train(model, optimizer, 4, first=5)

    resumed = grown()
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = torch.optim.SGD(groups(resumed), lr=0.1)
    resumed_belay = tb.Belay(resumed, resumed_optimizer, tb.methods.heavy_ball(0.9))
    resumed_belay.load_state_dict(saved["belay"])
    train(resumed, resumed_optimizer, 4, first=5)
    assert same(values(resumed), values(model))
    assert resumed_belay.state_dict()["averages"]["average"]["ages"]["3.weight"] == 6


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_state_that_is_saved_between_a_change_of_the_optimizer_and_its_next_step_fits(
    before: int, after: int, swapped: bool
) -> None:
    def made(groups: int) -> tuple[nn.Sequential, torch.optim.Optimizer, tb.Belay]:
        model = nn.Sequential(*mlp(), nn.Linear(1, 1))
        parts = [{"params": model[:3].parameters()}, {"params": model[3].parameters(), "lr": 0.3}]
        optimizer = torch.optim.SGD(parts[:groups], lr=0.1)
        return model, optimizer, tb.Belay(model, optimizer, tb.methods.heavy_ball(0.9), keep_initial=True)

    model, optimizer, belay = made(before)
    train(model, optimizer, 3)
    if after > before:
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.3})
    else:
        del optimizer.param_groups[1]
    weights = values(model)
    with belay.averaged() if swapped else nullcontext():
        saved = through_a_file(belay.state_dict())
    resumed, resumed_optimizer, resumed_belay = made(after)
    resumed.load_state_dict(weights)
    resumed_belay.load_state_dict(saved)
    with pytest.warns(tb.BelayWarning, match="were added" if after > before else "were taken from"):
        train(model, optimizer, 3, first=3)
    train(resumed, resumed_optimizer, 3, first=3)
    assert same(values(resumed), values(model))
    assert same(resumed_belay.state_dict(), belay.state_dict())


def test_the_state_is_plain_tensors_and_numbers() -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert type(value) in (torch.Tensor, int, float, str)

    model, optimizer, belay = attached(tb.methods.schedule_free(0.9), spectators={"short": EMA})
    train(model, optimizer, 2)
    check(belay.state_dict())


def damaged(**changes: Any) -> Any:
    """Return a function that replaces the value at a path a/b/c of a state, or deletes it (…)."""

    def damage(state: dict[str, Any]) -> dict[str, Any]:
        for path, value in changes.items():
            *heads, last = path.split("__")
            at = state
            for head in heads:
                at = at[head]
            if value is ...:
                del at[last]
            else:
                at[last] = value
        return state

    return damage


BAD_STATES = {
    "not a state": (lambda state: {"weights": 1}, "not the state of a Belay"),
    "a list": (lambda state: [], "not the state of a Belay"),
    "other format": (damaged(format=99), "not the state of a Belay"),
    "no averages": (damaged(averages=...), "damaged"),
    "an average missing": (
        damaged(averages__short=...),
        "this Belay has the spectator 'short', and the checkpoint has not",
    ),
    "an average too many": (
        damaged(averages__other={}),
        "the checkpoint has the spectator 'other', and this Belay has not",
    ),
    "half an average": (damaged(averages__short__weights={}), "damaged"),
    "a weight missing": (damaged(averages__average__weights={"0.weight": torch.ones(5, 3)}), "missing: '0.bias', '2.b"),
    "an age missing": (damaged(averages__average__ages={}), "ages .* missing"),
    "no methods": (damaged(averages__average__methods=...), "damaged"),
    "a negative step": (damaged(step=-1), "step"),
    "a step that is a string": (damaged(step="7"), "step"),
    "no flag of the buffers": (damaged(averages__average__own_buffers=...), "damaged"),
    "unknown velocities": (damaged(averages__average__velocities1={"0.weight": torch.ones(5, 3)}), "unexpected"),
    "other every": (damaged(options__every=5), "every differs: 5 in the checkpoint, 1 here; build Belay with every=5"),
    "other buffers": (damaged(options__buffers="average"), "buffers differs"),
    "no options": (damaged(options=...), "damaged"),
    "a buffer unknown": (damaged(averages__average__buffers={"9.running": torch.ones(1)}), "unexpected: '9.running'"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: Any, message: str) -> None:
    model, optimizer, belay = attached(EMA, spectators={"short": EMA})
    train(model, optimizer, 3)
    state = copy.deepcopy(belay.state_dict())
    train(model, optimizer, 1, first=3)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=message):
        belay.load_state_dict(damage(state))
    assert same(snapshot(model, belay), before)


OTHERS = {
    "other shapes": (
        lambda: attached(EMA, model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))),
        "shape of",
    ),
    "other names": (lambda: attached(EMA, model=nn.Sequential(mlp())), "missing: .* unexpected: "),
    "other decay": (
        lambda: attached(tb.Spring.ema(decay=0.5)),
        r"'0.weight' .* differs: .*decay=0\.9\) in .*decay=0\.5\) here",
    ),
    "other method": (lambda: attached(tb.methods.swa()), "method of .* differs"),
    "other dtype": (lambda: attached(EMA, dtype=torch.bfloat16), "dtype of .* differs: .*float32"),
    "float64 model": (lambda: attached(EMA, model=mlp(torch.float64)), "dtype of .* differs"),
    "other start": (lambda: attached(EMA, start=3), "start differs"),
    "fewer parameters": (lambda: attached(lambda name, p: EMA if "weight" in name else None), "unexpected: '0.bias'"),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_belay_is_refused_and_changes_nothing(make: Any, message: str) -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    other_model, _, other = make()
    before = snapshot(other_model, other)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(belay.state_dict())
    assert same(snapshot(other_model, other), before)


@pytest.mark.parametrize("memory", ["nonsense", [3], [1, 2, "x"], None], ids=str)
def test_a_damaged_memory_is_refused(memory: Any) -> None:
    model, optimizer, belay = attached(tb.methods.heavy_ball(0.9))
    train(model, optimizer, 2)
    state = copy.deepcopy(belay.state_dict())
    state["averages"]["average"]["memories"]["0.weight"] = memory
    with pytest.raises(ValueError, match=r"memory of '0.weight' .* damaged"):
        belay.load_state_dict(state)


def test_a_method_without_a_repr_of_its_own_resumes_by_its_name() -> None:
    class Mine:
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            return tb.Coupling(0.0, 0.1, 1.0, 0.1)

    _, _, belay = attached(Mine())
    _, _, other = attached(Mine())
    other.load_state_dict(belay.state_dict())
    assert "0x" not in str(belay.state_dict()["averages"]["average"]["methods"])


def test_loading_goes_on_from_a_copy() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    state = copy.deepcopy(belay.state_dict())
    kept = copy.deepcopy(state)
    belay.load_state_dict(state)
    train(model, optimizer, 2)
    assert same(state, kept)


def test_a_state_fits_a_belay_whose_optimizer_has_just_grown() -> None:
    model = mlp()
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    other = mlp(seed=1)
    grown = torch.optim.SGD(other[0].parameters(), lr=0.1)
    late = tb.Belay(other, grown, EMA)
    grown.add_param_group({"params": other[2].parameters()})
    late.load_state_dict(belay.state_dict())
    assert same(late.average_state_dict(), belay.average_state_dict())


def test_a_belay_whose_model_was_converted_loads_its_own_state() -> None:
    model, _, belay = attached(EMA)
    model.double()
    state = copy.deepcopy(belay.state_dict())
    belay.load_state_dict(state)
    assert same(belay.state_dict(), state)


def test_a_lagged_average_of_an_old_state_that_has_moved_already_is_refused() -> None:
    model, optimizer, belay = attached(tb.Spring(k=0.2, m1=float("inf"), m2=1.0))
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"saved by version 0\.1\.0 after a step that raised.*\['ahead'\] = 0"):
        belay.load_state_dict(copy.deepcopy(belay.state_dict()) | {"format": 1, "ahead": 1})
    assert same(snapshot(model, belay), before)


def test_a_step_that_raised_leaves_no_trace_in_the_checkpoint() -> None:
    lagged = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)

    def fail(*_: object) -> None:
        raise KeyError("no luck")

    model, optimizer, belay = attached(lagged)
    train(model, optimizer, 2)
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), belay.state_dict()])
    train(model, optimizer, 2, first=2)
    other, other_optimizer, other_belay = attached(lagged)
    for target, state in zip((other, other_optimizer, other_belay), saved, strict=True):
        target.load_state_dict(state)
    train(other, other_optimizer, 2, first=2)
    assert same(snapshot(other, other_belay), snapshot(model, belay))
    never_failed, plain_optimizer, plain_belay = attached(lagged)
    train(never_failed, plain_optimizer, 4)
    assert same(belay.average_state_dict(), plain_belay.average_state_dict())


def test_loading_finds_parameters_in_the_groups_where_they_are_now() -> None:
    """Two groups change places; each keeps its learning rate, on which the method depends."""

    def made(order: int) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups[::order])
        return model, optimizer, tb.Belay(model, optimizer, tb.methods.easgd(rho=2.0))

    model, optimizer, belay = made(1)
    train(model, optimizer, 2)
    saved = copy.deepcopy([model.state_dict(), belay.state_dict()])
    optimizer.param_groups.reverse()
    belay.load_state_dict(saved[1])
    train(model, optimizer, 2, first=2)
    other, other_optimizer, other_belay = made(-1)
    other.load_state_dict(saved[0])
    other_belay.load_state_dict(saved[1])
    train(other, other_optimizer, 2, first=2)
    assert same(values(model), values(other))
    assert same(belay.average_state_dict(), other_belay.average_state_dict())


def test_a_learning_rate_given_by_hand_and_refused_does_not_stay() -> None:
    """EASGD by ρ is unstable at that rate. The state is checked without one, as at construction."""
    model = mlp()
    belay = tb.Belay(model, None, tb.methods.easgd(rho=0.1))
    state = belay.state_dict()
    with pytest.raises(ValueError, match=r"rho=0\.1 at lr=20\.0"):
        belay.before_step(lr=20.0)
    belay.load_state_dict(state)
    belay.before_step(lr=0.1)
    belay.after_step()
    assert belay.step == 1


# What a method is -----------------------------------------------------------------------------------------------------

# Without other processes torch warns that it writes and reads alone.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")


@dataclass(frozen=True)
class Constant:
    """A schedule of a user's own."""

    rate: float

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class Scheduled:
    """A method of a user's own."""

    schedule: Callable[[int], float]

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, self.schedule(step), 1.0, self.schedule(step))


class Attributed:
    """A method without a repr."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, self.rate, 1.0, self.rate)


def by_file(source: tb.Belay, target: tb.Belay, folder: Path) -> None:
    target.load_state_dict(through_a_file(source.state_dict()))


def by_directory(source: tb.Belay, target: tb.Belay, folder: Path) -> None:
    dcp.save({"belay": source}, checkpoint_id=folder)
    dcp.load({"belay": target}, checkpoint_id=folder)


WAYS = pytest.mark.parametrize("through", [by_file, by_directory])
EQUAL = {
    "a half-life": (tb.methods.ema(half_life=50), tb.methods.ema(half_life=50.0)),
    "a momentum": (tb.methods.heavy_ball(0), tb.methods.heavy_ball(0.0)),
    "a schedule": (Scheduled(Constant(1)), Scheduled(Constant(1.0))),
    "an attribute": (Attributed(1), Attributed(1.0)),
}
UNEQUAL = {
    "a half-life": (tb.methods.ema(half_life=50), tb.methods.ema(half_life=50.5)),
    "a schedule": (Scheduled(Constant(0.5)), Scheduled(Constant(0.25))),
    "an attribute": (Attributed(0.5), Attributed(0.25)),
    "Spring.ema and ema": (tb.Spring.ema(decay=0.9), tb.methods.ema(0.9)),
}


@ALONE
@WAYS
@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL)
def test_numbers_of_a_method_are_compared_as_numbers(one: Any, other: Any, through: Any, tmp_path: Path) -> None:
    model, optimizer, belay = attached(one)
    train(model, optimizer, 2)
    _, _, resumed = attached(other)
    through(belay, resumed, tmp_path)
    assert resumed.step == 2
    assert same(resumed.state_dict(), belay.state_dict())


@ALONE
@WAYS
@pytest.mark.parametrize(("one", "other"), UNEQUAL.values(), ids=UNEQUAL)
def test_another_method_is_refused_and_nothing_changes(one: Any, other: Any, through: Any, tmp_path: Path) -> None:
    model, optimizer, belay = attached(one)
    train(model, optimizer, 2)
    other_model, _, resumed = attached(other)
    before = snapshot(other_model, resumed)
    with pytest.raises(BaseException, match=r"differs: .* in the checkpoint|Missing key"):  # CheckpointException
        through(belay, resumed, tmp_path)
    assert same(snapshot(other_model, resumed), before)


def falling(step: int) -> float:
    return 1 / (step + 1)


@ALONE
@WAYS
@pytest.mark.parametrize("main", [True, False])
def test_a_method_with_a_function_is_saved_and_loaded_with_a_warning(main: bool, through: Any, tmp_path: Path) -> None:
    def made(function: Callable[[int], float]) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
        own = tb.methods.centred(0.0, function)
        return attached(own if main else EMA, spectators={"other": EMA if main else own})

    model, optimizer, belay = made(falling)
    train(model, optimizer, 3)
    _, _, resumed = made(lambda step: 1 / (1 + step))
    name = "average" if main else "other"
    with pytest.warns(tb.BelayWarning, match=rf"hold all of the method of '{name}' \(centred\.rate=<function") as seen:
        through(belay, resumed, tmp_path)
    assert len([each for each in seen if issubclass(each.category, tb.BelayWarning)]) == 1
    assert same(resumed.state_dict(), belay.state_dict())
    other_model, _, other = made(lambda step: 1 / (2 + step))
    before = snapshot(other_model, other)
    with pytest.raises(BaseException, match=r"differs: centred\(at_1=.* in the checkpoint|Missing key"):
        through(belay, other, tmp_path / "again")
    assert same(snapshot(other_model, other), before)


def test_another_function_is_taken_by_strict_false() -> None:
    model, optimizer, belay = attached(tb.methods.ema(lambda step: 0.5))
    train(model, optimizer, 3)
    _, _, other = attached(tb.methods.ema(lambda step: 0.6))
    with pytest.warns(tb.BelayWarning) as seen:
        other.load_state_dict(belay.state_dict(), strict=False)
    changed, unchecked = (str(each.message) for each in seen)
    assert re.search(r"was ema\(at_1=\(0.0, 0.5, .* is ema\(at_1=\(0.0, 0.4, ", changed)
    assert "cannot hold all of the method of 'average'" in unchecked
    assert other.step == 3


@pytest.mark.filterwarnings("error::torchbelay.BelayWarning")
def test_the_warning_of_a_function_comes_before_anything_changes() -> None:
    model, optimizer, belay = attached(tb.methods.ema(falling))
    train(model, optimizer, 3)
    other_model, _, other = attached(tb.methods.ema(falling))
    before = snapshot(other_model, other)
    with pytest.raises(tb.BelayWarning, match="hold all of the method"):
        other.load_state_dict(belay.state_dict())
    assert same(snapshot(other_model, other), before)


def test_a_method_without_varies_is_loaded_with_a_warning_that_no_coupling_was_compared() -> None:
    model, optimizer, belay = attached(Scheduled(lambda step: 0.1))
    train(model, optimizer, 2)
    _, _, resumed = attached(Scheduled(lambda step: 0.1))
    with pytest.warns(tb.BelayWarning, match=r"Scheduled\.schedule=<function .*it has no coupling\. "):
        resumed.load_state_dict(through_a_file(belay.state_dict()))
    assert resumed.step == 2


def test_functions_of_averaged_buffers_and_of_several_optimizers_are_warned_of_once() -> None:
    def made() -> tuple[nn.Module, list[torch.optim.Optimizer], tb.Belay]:
        model, method = with_batchnorm(), tb.methods.ema(falling)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        rule = lambda name, _: method if "running_mean" in name else EMA  # noqa: E731
        return model, optimizers, tb.Belay(model, optimizers, rule, buffers="average", spectators={"own": method})

    _, _, belay = made()
    _, _, resumed = made()
    with pytest.warns(tb.BelayWarning) as seen:
        resumed.load_state_dict(through_a_file(belay.state_dict()))
    assert [str(each.message).split(" (")[0] for each in seen] == [
        f"a checkpoint cannot hold all of the method of {name!r}" for name in ("average", "own")
    ]


def test_a_function_of_what_changes_outside_is_saved_with_a_warning() -> None:
    outside = {"decay": 0.5}
    model, optimizer, belay = attached(tb.methods.ema(lambda step: outside["decay"]))
    train(model, optimizer, 2)
    outside["decay"] = 0.75
    with pytest.warns(tb.BelayWarning, match=r"from ema\(at_1=\(0.0, 0.5, .*a function in a method must depend on"):
        state = through_a_file(belay.state_dict())
    _, _, resumed = attached(tb.methods.ema(lambda step: 0.75))
    with pytest.warns(tb.BelayWarning, match="hold all of the method"):
        resumed.load_state_dict(state)
    assert resumed.step == 2


def test_an_average_of_such_a_method_can_still_be_exported(tmp_path: Path) -> None:
    _, _, belay = attached(Scheduled(lambda step: 0.1))
    belay.save_average(tmp_path / "average.safetensors")


@ALONE
@WAYS
def test_a_field_added_by_a_later_version_leaves_checkpoints_readable(through: Any, tmp_path: Path) -> None:
    later = make_dataclass("ema", [("extra", float, field(default=0.0))], bases=(tb.methods.ema,), frozen=True)
    later.__module__ = tb.methods.ema.__module__
    model, optimizer, belay = attached(tb.methods.ema(0.9))
    train(model, optimizer, 2)
    _, _, resumed = attached(later(0.9))
    through(belay, resumed, tmp_path / "new")
    assert resumed.step == 2
    _, _, back = attached(tb.methods.ema(0.9))
    through(resumed, back, tmp_path / "old")
    assert back.step == 2


@pytest.mark.parametrize("lr", [1e9, 1e200])
def test_a_sum_of_weights_beyond_2_to_the_63_resumes(lr: float) -> None:
    method = tb.methods.schedule_free(0.9, r=6.0)
    model = mlp()
    optimizer = Still(model.parameters(), lr=lr)
    belay, (_, _, resumed) = tb.Belay(model, optimizer, method), attached(method)
    for _ in range(5):
        optimizer.step()
    assert max(belay.state_dict()["averages"]["average"]["memories"]["0.weight"]) > 2**63
    by_file(belay, resumed, Path())
    assert same(resumed.state_dict(), belay.state_dict())


@pytest.mark.parametrize("bad", [float("nan"), -1.0, True, "1"], ids=str)
def test_a_memory_that_is_no_number_is_refused(bad: Any) -> None:
    model, optimizer, belay = attached(tb.methods.heavy_ball(0.9))
    train(model, optimizer, 2)
    state = copy.deepcopy(belay.state_dict())
    state["averages"]["average"]["memories"]["0.weight"][1] = bad
    with pytest.raises(ValueError, match=r"memory of '0.weight' .* damaged"):
        belay.load_state_dict(state)


@ALONE
def test_a_directory_that_was_made_a_file_loads(tmp_path: Path) -> None:
    """Torch's conversion leaves empty dicts out."""
    model, optimizer, belay = attached(EMA, spectators={"short": tb.methods.swa()})
    train(model, optimizer, 2)
    dcp.save({"belay": belay}, checkpoint_id=tmp_path / "directory")
    dcp_to_torch_save(tmp_path / "directory", tmp_path / "file.pt")
    _, _, resumed = attached(EMA, spectators={"short": tb.methods.swa()})
    resumed.load_state_dict(torch.load(tmp_path / "file.pt", weights_only=True)["belay"])
    assert same(resumed.state_dict(), belay.state_dict())


# Inference mode -------------------------------------------------------------------------------------------------------

INFERENCE: dict[str, Callable[[nn.Module, torch.optim.Optimizer, tb.Belay, Any], object]] = {
    "load": lambda model, optimizer, belay, state: belay.load_state_dict(state),
    "load what was saved in it": lambda model, optimizer, belay, state: belay.load_state_dict(copy.deepcopy(state)),
    "reset": lambda model, optimizer, belay, state: belay.reset(),
    "copy to the model": lambda model, optimizer, belay, state: belay.copy_to_model(),
    "save inside averaged": lambda model, optimizer, belay, state: saved_inside(belay),
    "export": lambda model, optimizer, belay, state: model.load_state_dict(belay.average_state_dict()),
}


def saved_inside(belay: tb.Belay) -> None:
    with belay.averaged():
        state = belay.state_dict()
    belay.load_state_dict(state)


@pytest.mark.parametrize("what", INFERENCE)
@pytest.mark.parametrize("buffers", ["average", "copy"])
@pytest.mark.parametrize("method", ["swinging", "heavy ball", "ema"])
def test_nothing_of_inference_mode_stays(what: str, buffers: str, method: str) -> None:
    """A tensor made there can be written to nowhere else: the next step would raise."""
    options = {"buffers": buffers, "start": 1}
    runs = [attached(METHODS[method], model=with_batchnorm(), **options) for _ in range(2)]
    for i, (model, optimizer, belay) in enumerate(runs):
        train(model, optimizer, 3)
        if buffers == "copy":
            with belay.averaged():
                model[1].running_mean.fill_(0.25)
        state = copy.deepcopy(belay.state_dict())
        with torch.inference_mode(i == 1):
            INFERENCE[what](model, optimizer, belay, state)
        train(model, optimizer, 2, first=3)
    (model, _, belay), (other, _, other_belay) = runs
    assert same(snapshot(other, other_belay), snapshot(model, belay))
    found = other_belay.state_dict()["averages"]["average"]
    assert not any(t.is_inference() for kind in ("weights", "velocities1", "buffers") for t in found[kind].values())


@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_steps_in_inference_mode_are_like_any_others(impl: str) -> None:
    """As of a search that needs no gradients: the count of steps on the device is written to later, too."""
    found = []
    for inside in (False, True):
        model = with_batchnorm().to(WHERE)
        belay = tb.Belay(model, None, tb.methods.power_ema(sigma_rel=0.1), impl=impl)
        for step in range(3):
            with torch.inference_mode(inside and step < 2):
                belay.before_step()
                for p in model.parameters():
                    p.data.add_(1.0)
                belay.after_step()
        belay.load_state_dict(belay.state_dict())
        found.append((belay.step, belay.average_state_dict()))
    assert same(*found)


@pytest.mark.parametrize("loads", [False, True])
def test_a_belay_made_or_begun_in_inference_mode_is_like_any_other(loads: bool) -> None:
    model, optimizer, belay = attached(SWINGING, model=with_batchnorm(), buffers="average")
    other = with_batchnorm()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with torch.inference_mode():
        made = tb.Belay(other, other_optimizer, SWINGING, buffers="average", start=int(loads))
        if loads:
            begun = copy.deepcopy(belay.state_dict())
            begun["options"]["start"] = 1
            made.load_state_dict(begun)
    for each, steps in ((model, optimizer), (other, other_optimizer)):
        train(each, steps, 3)
    assert same(made.average_state_dict(), belay.average_state_dict())


def test_a_method_that_changed_since_it_was_given_is_saved_with_a_warning() -> None:
    class Restless:
        def __init__(self) -> None:
            self.last, self._count = 0, 0

        def coupling(self, step: int, lr: float) -> tb.Coupling:
            self._count += 1  # nobody's business but its own
            self.last = step if step > 3 else 0
            return tb.Coupling(0.0, 0.1, 1.0, 0.1)

    model, optimizer, belay = attached(Restless())
    train(model, optimizer, 3)
    belay.state_dict()
    train(model, optimizer, 1, first=3)
    with pytest.warns(tb.BelayWarning, match=r"Restless has changed since .*last=0.*last=4.*underscore"):
        state = belay.state_dict()
    _, _, resumed = attached(Restless())
    with pytest.raises(ValueError, match=r"the method .* differs: .*last=4"):
        resumed.load_state_dict(state)
    with pytest.warns(tb.BelayWarning, match=r"was .*last=4.* and is .*last=0"):
        resumed.load_state_dict(state, strict=False)
    assert resumed.step == 4

"""The averages in the optimizer's own state: whoever saves the optimizer resumes them, bit for bit."""

import copy
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torchbelay as tb
from helpers import small
from helpers.small import BELAY, EMA, SWINGING, WHERE, same, train, values
from torchbelay import optim

# Without other processes torch warns that it writes and reads alone.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.02),
    "our AdamW": lambda ps: optim.AdamW(ps, lr=0.02),
    "our SGD": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
}
SWINGING_ALONE = tb.Spring(k=1.0, m1=float("inf"), m2=20.0, c2=10.0)
METHODS: dict[str, Any] = {
    "ema": EMA,
    "belay": BELAY,
    "swinging": SWINGING,
    "warm": tb.methods.ema(0.99, warmup="ratio"),
    "schedule-free": tb.methods.schedule_free(0.9),
    "by parameter": lambda name, p: tb.methods.heavy_ball(0.9) if "weight" in name else tb.methods.swa(),
}


def mlp(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Sequential:
    return small.mlp(dtype, seed=seed).to(WHERE)


def with_batchnorm(*, seed: int = 0) -> nn.Sequential:
    return small.with_batchnorm(seed=seed).to(WHERE)


class Run:
    """A training whose average is saved with its optimizer."""

    def __init__(
        self,
        method: Any = EMA,
        kind: str = "AdamW",
        *,
        model: nn.Module | None = None,
        seed: int = 0,
        saves: bool = True,
        **options: Any,
    ) -> None:
        self.model = with_batchnorm(seed=seed) if model is None else model
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.belay = tb.Belay(self.model, self.optimizer, method, save_with_optimizer=saves, **options)

    def train(self, steps: range) -> "Run":
        for step in steps:
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + 0.3 * step)
            train(self.model, self.optimizer, 1, first=step)
        return self

    def saved(self) -> dict[str, Any]:
        """What a trainer saves that knows nothing of Belay."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def resume(self, saved: dict[str, Any], *, optimizer_first: bool = False) -> "Run":
        for part in ("optimizer", "model") if optimizer_first else ("model", "optimizer"):
            getattr(self, part).load_state_dict(saved[part])
        return self

    def everything(self) -> dict[str, Any]:
        return copy.deepcopy(self.saved() | {"belay": self.belay.state_dict()})


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_who_saves_the_optimizer_resumes_the_averages_bit_for_bit(method: Any, at: int) -> None:
    options = {"spectators": {"short/1": tb.methods.ema(0.99, warmup="ratio")}, "buffers": "average"}
    run = Run(method, **options).train(range(at))
    saved = through_a_file(run.saved())
    again = Run(method, seed=5, **options).resume(saved, optimizer_first=at == 1)
    assert same(again.everything(), run.everything())
    run.train(range(at, 9))
    again.train(range(at, 9))
    assert same(again.everything(), run.everything())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_with_every_optimizer_and_the_averages_keep_their_own_dtype(kind: str, dtype: torch.dtype) -> None:
    run = Run(EMA, kind, model=mlp(dtype)).train(range(4))
    again = Run(EMA, kind, model=mlp(dtype, seed=5)).resume(through_a_file(run.saved()))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = again.belay.state_dict()["averages"]["average"]["weights"]
    assert {t.dtype for t in weights.values()} == {wide}  # torch would have cast them to the dtype of the parameters
    assert same(again.train(range(4, 7)).everything(), run.train(range(4, 7)).everything())


@pytest.mark.parametrize("start", [2, 6])
@pytest.mark.parametrize("at", [1, 4])
def test_before_and_after_the_averages_have_begun(start: int, at: int) -> None:
    run = Run(EMA, start=start, every=2).train(range(at))
    again = Run(EMA, start=start, every=2, seed=5).train(range(3)).resume(copy.deepcopy(run.saved()))
    assert same(again.train(range(at, 9)).everything(), run.train(range(at, 9)).everything())


def test_the_state_has_this_layout_and_the_live_state_keeps_its_own() -> None:
    run = Run(EMA, spectators={"a/b": EMA}, buffers="average").train(range(2))
    state = run.optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert [key for key in state["state"][5] if "torchbelay" in key] == [
        "torchbelay/average/weights/3.bias",
        "torchbelay/a%2Fb/weights/3.bias",
    ]
    assert "torchbelay/average/buffers/1.running_mean" in state["state"][0]
    assert isinstance(state["param_groups"][0]["torchbelay"], str)
    kept = run.belay.state_dict()["averages"]["average"]["weights"]["3.bias"]
    assert state["state"][5]["torchbelay/average/weights/3.bias"].data_ptr() == kept.data_ptr()  # live, as torch's own
    for entries in run.optimizer.state.values():
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}
    assert not [key for group in run.optimizer.param_groups for key in group if "torchbelay" in key]
    assert "saved with its optimizer" in repr(run.belay)
    plain = torch.optim.AdamW(mlp().parameters())
    assert set(run.optimizer.param_groups[0]) == {*plain.param_groups[0]}


def test_after_loading_the_live_state_is_that_of_torch() -> None:
    run = Run(EMA).train(range(2))
    again = Run(EMA, seed=5).resume(through_a_file(run.saved()))
    for entries in again.optimizer.state.values():
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}
    assert not [key for group in again.optimizer.param_groups for key in group if "torchbelay" in key]


def test_a_copy_of_the_state_is_a_copy_of_the_averages() -> None:
    run = Run(BELAY).train(range(3))
    saved = copy.deepcopy(run.saved())
    kept = copy.deepcopy(saved)
    run.train(range(3, 5))
    assert same(saved, kept)
    assert same(Run(BELAY, seed=5).resume(saved).train(range(3, 5)).everything(), run.everything())
    for index, entries in kept["optimizer"]["state"].items():  # torch itself goes on with the tensors that it is given
        ours = {key for key in entries if "torchbelay" in key}
        assert ours
        assert all(same(saved["optimizer"]["state"][index][key], entries[key]) for key in ours)


def test_tied_frozen_complex_and_empty_weights() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.tied = nn.Linear(3, 3, bias=False)
            self.tied.weight = self.first.weight
            self.z = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.unused = nn.Parameter(torch.randn(2))
            self.frozen = nn.Parameter(torch.randn(2))

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
        torch.manual_seed(seed)
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, tb.Belay(model, optimizer, EMA, save_with_optimizer=True)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (model.first(torch.ones(1, 3)).square().sum() + model.z.abs().sum() + model.empty.sum()).backward()
        optimizer.step()

    model, optimizer, belay = made(0)
    model.frozen.grad = torch.ones(2)
    optimizer.step()  # it has a state, and is frozen later
    model.frozen.requires_grad_(False)
    step(model, optimizer)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    names = [key for key in saved[1]["state"][0] if "torchbelay" in key]
    assert {name.rpartition("/")[2] for name in names} == {"z", "unused", "frozen"}
    other, other_optimizer, other_belay = made(1)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert same(other_belay.state_dict(), belay.state_dict())
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(other_belay.state_dict(), belay.state_dict())


def in_groups(seed: int, groups: int) -> tuple[nn.Sequential, torch.optim.Optimizer, tb.Belay]:
    """A model of two layers, of which the optimizer has as many as there are groups."""
    model = mlp(seed=seed)
    parts = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}]
    optimizer = torch.optim.SGD(parts[:groups], lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, tb.methods.heavy_ball(0.9), save_with_optimizer=True)


def test_parameters_that_came_later_resume_with_their_own_ages() -> None:
    model, optimizer, belay = in_groups(0, 1)
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 2, first=3)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    other, other_optimizer, other_belay = in_groups(5, 2)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    assert same(other_belay.state_dict(), belay.state_dict())
    train(model, optimizer, 2, first=5)
    train(other, other_optimizer, 2, first=5)
    assert same(values(other), values(model))
    assert same(other_belay.state_dict(), belay.state_dict())


def test_an_optimizer_that_is_saved_right_after_it_got_parameters_resumes() -> None:
    model, optimizer, belay = in_groups(0, 1)
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    other, other_optimizer, other_belay = in_groups(5, 2)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 2, first=3)
    train(other, other_optimizer, 2, first=3)
    assert same(values(other), values(model))
    assert same(other_belay.state_dict(), belay.state_dict())


def test_a_scheduler_and_a_scaler_go_along() -> None:
    def made(seed: int) -> tuple[Run, Any, Any]:
        run = Run(tb.methods.schedule_free(0.9), "our AdamW", model=mlp(seed=seed))
        return run, torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 8), torch.amp.GradScaler(WHERE)

    def steps(run: Run, scheduler: Any, scaler: Any, which: range) -> None:
        for step in which:
            run.optimizer.zero_grad()
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(WHERE)
            loss = run.model(x).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.step()

    one, other = made(0), made(5)
    steps(*one, range(4))
    assert one[0].belay.step == 3
    saved = through_a_file([one[0].model.state_dict(), *(each.state_dict() for each in (one[0].optimizer, *one[1:]))])
    targets = (other[0].model, other[0].optimizer, *other[1:])
    for target, state in zip(targets, saved, strict=True):
        target.load_state_dict(state)
    steps(*one, range(4, 7))
    steps(*other, range(4, 7))
    assert same(other[0].everything(), one[0].everything())


def test_inside_the_block_in_a_closure_and_under_inference_mode_it_is_the_same_state() -> None:
    run = Run(BELAY, spectators={"short": EMA}, model=mlp(torch.float64)).train(range(3))
    outside = copy.deepcopy(run.optimizer.state_dict())
    for name in ("average", "short"):
        with run.belay.averaged(name), torch.inference_mode():
            inside = run.optimizer.state_dict()
        assert same(inside, outside)
    seen: list[Any] = []

    def closure() -> Tensor:
        seen.append(copy.deepcopy(run.optimizer.state_dict()))
        return next(run.model.parameters()).sum()

    run.optimizer.step(closure)
    assert same(seen[0], outside)
    again = Run(BELAY, spectators={"short": EMA}, model=mlp(torch.float64, seed=3))
    with torch.inference_mode():
        again.optimizer.load_state_dict(outside)
    again.train(range(2))  # no tensor of inference_mode is left behind


def test_with_several_optimizers_each_carries_what_it_trains() -> None:
    def made(seed: int) -> tuple[nn.Sequential, list[torch.optim.Optimizer], tb.Belay]:
        model = with_batchnorm(seed=seed)
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], lr=0.01),
        ]
        how = {"spectators": {"swa": tb.methods.swa()}, "buffers": "average", "save_with_optimizer": True}
        return model, optimizers, tb.Belay(model, optimizers, EMA, **how)

    def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], which: range) -> None:
        for step in which:
            model.zero_grad()
            train(model, optimizers[0], 1, first=step)
            if step % 2:
                optimizers[1].step()

    model, optimizers, belay = made(0)
    steps(model, optimizers, range(5))
    saved = through_a_file([model.state_dict(), *(each.state_dict() for each in optimizers)])
    other, others, other_belay = made(5)
    for target, state in zip((other, *others[::-1]), (saved[0], *saved[:0:-1]), strict=True):  # in any order
        target.load_state_dict(state)
    assert same(other_belay.state_dict(), belay.state_dict())
    steps(model, optimizers, range(5, 9))
    steps(other, others, range(5, 9))
    assert same(other_belay.state_dict(), belay.state_dict())
    assert same(values(other), values(model))


def test_initial_weights_go_along_and_what_somebody_holds_follows() -> None:
    run, again = (Run(EMA, seed=seed, keep_initial=True, start=2) for seed in (0, 5))
    run.train(range(4))
    held, tensors = again.belay.module(), again.belay.tensors()
    again.resume(through_a_file(run.saved()))
    read = {"readout": tb.readouts.bema()}
    assert same(dict(again.belay.average_state_dict(**read)), dict(run.belay.average_state_dict(**read)))
    for each in (run, again):
        each.train(range(4, 6))
    for name, t in run.belay.average_state_dict().items():
        assert torch.equal(held.state_dict()[name], t)
    assert all(torch.equal(tensors[name], t) for name, t in run.belay.tensors().items())


def test_tensors_without_a_module() -> None:
    def made(value: float) -> tuple[Tensor, torch.optim.Optimizer, tb.Belay]:
        weight = torch.full((3,), value, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        return weight, optimizer, tb.Belay.from_parameters([weight], optimizer, EMA, save_with_optimizer=True)

    weight, optimizer, belay = made(1.0)
    weight.sum().backward()
    optimizer.step()
    _, other_optimizer, other = made(2.0)
    other_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert same(other.state_dict(), belay.state_dict())


class Counting(torch.optim.SGD):
    """An optimizer with a state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_a_state_that_belongs_to_no_parameter_stays_as_it_is() -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
        model = mlp(seed=seed)
        optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, tb.Belay(model, optimizer, EMA, save_with_optimizer=True)

    model, optimizer, belay = made(0)
    train(model, optimizer, 3)
    saved = through_a_file(optimizer.state_dict())
    _, other, other_belay = made(5)
    other.load_state_dict(saved)
    assert other.state["calls"] == 3
    assert same(other_belay.state_dict(), belay.state_dict())


def test_a_parameter_that_the_optimizer_has_lost_does_no_harm() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, save_with_optimizer=True)
    train(model, optimizer, 2)
    del optimizer.param_groups[0]
    for p in model[0].parameters():
        del optimizer.state[p]
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.warns(tb.BelayWarning, match="averages them no more"):
        train(model, optimizer, 1, first=2)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["2.weight", "2.bias"]
    assert not any("0.weight" in key for entries in saved["state"].values() for key in entries)  # as after that step


# torch.distributed.checkpoint ----------------------------------------------------------------------------------------

OPTIONS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on the host": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
HOW: dict[str, dict[str, Any]] = {
    "several averages": {"method": SWINGING, "spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}},
    "a memory and buffers": {"method": tb.methods.schedule_free(0.9), "buffers": "average"},
    "not begun": {"method": EMA, "start": 9},
    "initial weights": {"method": EMA, "keep_initial": True, "spectators": {"short": SWINGING_ALONE}},
}


@ALONE
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "our AdamW"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way", ["direct", "by directory"])
def test_it_goes_through_distributed_checkpoints(
    tmp_path: Path, kind: str, options: StateDictOptions, way: str, how: str
) -> None:
    run, again = (Run(**HOW[how], kind=kind, seed=seed) for seed in (0, 5))
    run.train(range(4))
    again.model.load_state_dict(run.model.state_dict())
    if way == "direct":
        state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
    else:
        dcp.save(
            {"optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=options)}, checkpoint_id=tmp_path
        )
        state = get_optimizer_state_dict(again.model, again.optimizer, options=options)
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again.model, again.optimizer, state, options=options)
    assert same(again.belay.state_dict(), run.belay.state_dict())
    assert same(again.train(range(4, 7)).everything(), run.train(range(4, 7)).everything())


@ALONE
def test_the_optimizer_itself_may_be_given_to_a_distributed_checkpoint(tmp_path: Path) -> None:
    run, again = Run(SWINGING, "SGD"), Run(SWINGING, "SGD", seed=5)
    run.train(range(3))
    dcp.save({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=tmp_path)
    dcp.load({"model": again.model, "optimizer": again.optimizer}, checkpoint_id=tmp_path)
    assert same(again.train(range(3, 6)).everything(), run.train(range(3, 6)).everything())


@ALONE
@pytest.mark.parametrize("options", list(OPTIONS.values())[:2], ids=list(OPTIONS)[:2])
def test_several_optimizers_go_through_distributed_checkpoints(tmp_path: Path, options: StateDictOptions) -> None:
    def made(seed: int) -> tuple[nn.Sequential, list[torch.optim.Optimizer], tb.Belay]:
        model = mlp(seed=seed)
        optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
        return model, optimizers, tb.Belay(model, optimizers, EMA, save_with_optimizer=True)

    model, optimizers, belay = made(0)
    for step in range(4):
        train(model, optimizers[0], 1, first=step)
        optimizers[1].step()
    dcp.save({"o": get_optimizer_state_dict(model, optimizers, options=options)}, checkpoint_id=tmp_path)
    other, others, other_belay = made(5)
    other.load_state_dict(model.state_dict())
    state = get_optimizer_state_dict(other, others, options=options)
    dcp.load({"o": state}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, others, state, options=options)
    assert same(other_belay.state_dict(), belay.state_dict())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another decay": ({"method": tb.Spring.ema(decay=0.5)}, "decay=0.5"),
    "another dtype": ({"method": EMA, "dtype": torch.float64}, "float64"),
    "another start": ({"method": EMA, "start": 7}, "start"),
    "a spectator more": ({"method": EMA, "spectators": {"short": EMA}}, "short"),
}


@ALONE
@pytest.mark.parametrize(("other", "word"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("options", list(OPTIONS.values())[:2], ids=list(OPTIONS)[:2])
def test_a_directory_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, options: StateDictOptions, other: dict[str, Any], word: str
) -> None:
    run, again = Run(EMA).train(range(3)), Run(**other, seed=5).train(range(2))
    dcp.save({"o": get_optimizer_state_dict(run.model, run.optimizer, options=options)}, checkpoint_id=tmp_path)
    before = again.everything()
    state = get_optimizer_state_dict(again.model, again.optimizer, options=options)
    with pytest.raises(BaseException, match=word):  # torch's CheckpointException is no Exception
        dcp.load({"o": state}, checkpoint_id=tmp_path)
    assert same(again.everything(), before)


@ALONE
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_state_of_another_belay_is_refused_however_it_comes(options: StateDictOptions) -> None:
    run, again = Run(EMA).train(range(3)), Run(BELAY, seed=5).train(range(2))
    state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
    before = again.everything()
    # torch itself does not take unknown names into a full state
    error, words = (KeyError, "decay=0.9") if options.full_state_dict else (ValueError, "do not fit, and nothing was")
    with pytest.raises(error, match=words):
        set_optimizer_state_dict(again.model, again.optimizer, state, options=options)
    assert same(again.everything(), before)


# What does not fit ---------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    **WRONG,
    "another method": ({"method": tb.methods.swa()}, "the method of '0.weight' in average 'average' differs"),
    "other buffers": ({"method": EMA, "buffers": "average"}, "buffers differs"),
    "fewer parameters": ({"method": lambda name, p: EMA if "weight" in name else None}, "unexpected: '0.bias'"),
}


@pytest.mark.parametrize(("options", "word"), OTHERS.values(), ids=OTHERS)
def test_a_state_that_does_not_fit_changes_neither_the_averages_nor_the_optimizer(
    options: dict[str, Any], word: str
) -> None:
    run, again = Run(EMA).train(range(3)), Run(**options, seed=5).train(range(2))
    before = again.everything()
    with pytest.raises(ValueError, match=rf"averages in this optimizer's state do not fit.*{word}.*belay.change\(\)"):
        again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(again.everything(), before)


def test_the_cure_of_that_error_works() -> None:
    run = Run(EMA).train(range(3))
    again = Run(EMA, seed=5).resume(through_a_file(run.saved()))
    again.belay.change(tb.Spring.ema(decay=0.99))
    later = through_a_file(again.train(range(3, 5)).saved())
    last = Run(tb.Spring.ema(decay=0.99), seed=6).resume(later)
    assert same(last.everything(), again.everything())


def test_a_state_that_torch_refuses_changes_no_average() -> None:
    run, again = Run(EMA).train(range(3)), Run(EMA, seed=5).train(range(2))
    before = again.everything()
    state = copy.deepcopy(run.optimizer.state_dict())
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        again.optimizer.load_state_dict(state)
    assert same(again.everything(), before)
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(again.belay.state_dict(), run.belay.state_dict())


def damaged(how: str, state: dict[str, Any]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    group, key = state["param_groups"][0], "torchbelay/average/weights/0.weight"
    if how == "no text":
        group["torchbelay"] = "{"
    elif how == "a number":
        group["torchbelay"] = 3
    elif how == "an empty dict":
        group["torchbelay"] = "{}"
    elif how == "a tensor less":
        del state["state"][0][key]
    elif how == "another shape":
        state["state"][0][key] = torch.ones(2)
    elif how == "no tensor":
        state["state"][0][key] = 3
    elif how == "a strange key":
        state["state"][0]["torchbelay/odd"] = torch.ones(2)
    elif how == "an unknown kind":
        state["state"][0]["torchbelay/average/odd/0.weight"] = torch.ones(2)
    return state


@pytest.mark.parametrize(
    "how",
    ["no text", "a number", "an empty dict", "a tensor less", "another shape", "no tensor", "a strange key",
     "an unknown kind"],
)  # fmt: skip
def test_a_damaged_state_is_refused_and_changes_nothing(how: str) -> None:
    run, again = Run(EMA).train(range(3)), Run(EMA, seed=5).train(range(2))
    before = again.everything()
    with pytest.raises(ValueError, match=r"damaged|differ"):
        again.optimizer.load_state_dict(damaged(how, run.optimizer.state_dict()))
    assert same(again.everything(), before)


def test_inside_the_block_or_a_step_loading_is_refused_and_changes_nothing() -> None:
    run, again = Run(EMA).train(range(3)), Run(EMA, seed=5).train(range(2))
    state, before = run.optimizer.state_dict(), again.everything()
    with again.belay.averaged(), pytest.raises(RuntimeError, match=r"optimizer.load_state_dict\(\) inside averaged"):
        again.optimizer.load_state_dict(state)
    assert same(again.everything(), before)

    def closure() -> Tensor:
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside optimizer.step"):
            again.optimizer.load_state_dict(state)
        return next(again.model.parameters()).sum()

    again.optimizer.step(closure)


# States without averages, and optimizers without a Belay -------------------------------------------------------------


def test_a_state_without_averages_warns_and_the_rest_is_loaded() -> None:
    run, again = Run(EMA, saves=False).train(range(3)), Run(EMA, seed=5).train(range(2))
    average = again.belay.state_dict()
    average = copy.deepcopy(average)
    with pytest.warns(tb.BelayWarning, match=r"has no averages.*belay.load_state_dict\(\).*belay.reset\(\)"):
        again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(again.belay.state_dict(), average)
    assert same(again.optimizer.state_dict()["state"][0]["exp_avg"], run.optimizer.state_dict()["state"][0]["exp_avg"])


@ALONE
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_so_does_one_that_comes_by_way_of_a_distributed_checkpoint(options: StateDictOptions) -> None:
    run, again = Run(EMA, saves=False).train(range(3)), Run(EMA, seed=5).train(range(2))
    average = copy.deepcopy(again.belay.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
    with pytest.warns(tb.BelayWarning, match="has no averages"):
        set_optimizer_state_dict(again.model, again.optimizer, state, options=options)
    assert same(again.belay.state_dict(), average)


def test_a_belay_that_was_made_without_it_says_that_averages_were_not_loaded() -> None:
    run, again = Run(EMA).train(range(3)), Run(EMA, seed=5, saves=False).train(range(2))
    average = copy.deepcopy(again.belay.state_dict())
    with pytest.warns(tb.BelayWarning, match="carries averages, which are not loaded: make Belay with save_with_optim"):
        again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert same(again.belay.state_dict(), average)
    again.train(range(2, 4))
    again.belay.detach()
    again.optimizer.load_state_dict(run.optimizer.state_dict())  # without a word


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 3])
def test_a_plain_optimizer_takes_such_a_state_and_steps_as_with_its_own(kind: str, at: int) -> None:
    run, without = Run(EMA, kind, model=mlp()), mlp()
    run.train(range(at))
    plain = OPTIMIZERS[kind](without.parameters())
    without.load_state_dict(run.model.state_dict())
    plain.load_state_dict(through_a_file(run.optimizer.state_dict()))
    train(without, plain, 3, first=at)
    train(run.model, run.optimizer, 3, first=at)
    is_one_pass = (
        kind.startswith("our") and torch.cuda.is_available()
    )  # whose arithmetic is not torch's to the last bit
    torch.testing.assert_close(values(without), values(run.model), **({} if is_one_pass else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("kind", ["SGD", "momentum", "our SGD"])
def test_so_does_sgd_with_a_state_from_before_the_first_step(kind: str) -> None:
    run, without = Run(EMA, kind, model=mlp()), mlp()
    plain = OPTIMIZERS[kind](without.parameters())
    plain.load_state_dict(through_a_file(run.optimizer.state_dict()))
    train(without, plain, 2)
    train(run.model, run.optimizer, 2)
    is_one_pass = kind.startswith("our") and torch.cuda.is_available()
    torch.testing.assert_close(values(without), values(run.model), **({} if is_one_pass else {"rtol": 0, "atol": 0}))


def test_averages_that_a_run_without_belay_carried_along_are_told_to_be_old() -> None:
    run = Run(EMA, model=mlp()).train(range(3))
    without = mlp()
    plain = torch.optim.AdamW(without.parameters(), lr=0.02)
    without.load_state_dict(run.model.state_dict())
    plain.load_state_dict(through_a_file(run.optimizer.state_dict()))
    train(without, plain, 2, first=3)
    again = Run(EMA, model=mlp(seed=5))
    again.model.load_state_dict(without.state_dict())
    with pytest.warns(tb.BelayWarning, match=r"took 2 steps after these averages were saved.*belay.reset\(\)"):
        again.optimizer.load_state_dict(through_a_file(plain.state_dict()))
    assert again.belay.step == 3


def test_averages_that_a_plain_optimizer_has_cast_are_refused() -> None:
    run = Run(EMA, model=mlp(torch.bfloat16)).train(range(3))
    plain = torch.optim.AdamW(mlp(torch.bfloat16).parameters(), lr=0.02)
    plain.load_state_dict(through_a_file(run.optimizer.state_dict()))
    again = Run(EMA, model=mlp(torch.bfloat16, seed=5))
    with pytest.raises(ValueError, match=r"dtype of '0.weight' .* differs: torch.bfloat16 in the checkpoint"):
        again.optimizer.load_state_dict(plain.state_dict())


# Construction ---------------------------------------------------------------------------------------------------------


def hooks(optimizer: torch.optim.Optimizer) -> int:
    kinds = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post", "step_pre", "step_post")
    return sum(len(getattr(optimizer, f"_optimizer_{kind}_hooks")) for kind in kinds)


def test_after_detach_the_optimizer_is_as_it_was() -> None:
    for saves in (True, False):
        run = Run(EMA, saves=saves).train(range(2))
        run.belay.detach()
        assert hooks(run.optimizer) == 0
        assert not [key for key in vars(run.optimizer) if "torchbelay" in key]
        assert "torchbelay" not in str(run.optimizer.state_dict())
        assert "saved with" not in repr(run.belay)
        run.belay.detach()


def test_a_second_one_on_the_same_optimizer_is_refused_or_takes_its_place() -> None:
    run = Run(EMA).train(range(2))
    before = hooks(run.optimizer)
    with pytest.raises(ValueError, match=r"another Belay is saved with this AdamW already.*spectators.*replace=True"):
        tb.Belay(run.model, run.optimizer, tb.methods.swa(), save_with_optimizer=True)
    assert hooks(run.optimizer) == before
    watcher = tb.Belay(run.model, run.optimizer, tb.methods.swa())  # without it, any number
    other = tb.Belay(run.model, run.optimizer, tb.methods.swa(), save_with_optimizer=True, replace=True)
    run.train(range(2, 4))
    assert (run.belay.step, other.step, watcher.step) == (2, 2, 2)
    assert "swa" in run.optimizer.state_dict()["param_groups"][0]["torchbelay"]
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # without a word of the watcher
    run.belay.detach()
    assert "swa" in run.optimizer.state_dict()["param_groups"][0]["torchbelay"]


def test_what_cannot_be_saved_is_refused_and_nothing_is_attached() -> None:
    class Secret(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"state": {}, "param_groups": [{"params": [0]}]}

    model = mlp()
    with pytest.raises(ValueError, match=r"save_with_optimizer=True needs an optimizer, and optimizer is None"):
        tb.Belay(model, None, EMA, save_with_optimizer=True)
    secret = Secret(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Secret has a state_dict\(\) of its own, in which the averages are missing"):
        tb.Belay(model, secret, EMA, save_with_optimizer=True)
    assert hooks(secret) == 0


def falling(step: int) -> float:
    return 1 / (step + 1)


def test_methods_with_functions_are_saved_with_the_optimizer_and_loaded_with_a_warning() -> None:
    """Of the average, of a spectator and of an averaged buffer."""

    def made(function: Callable[[int], float], seed: int) -> Run:
        watching = tb.methods.ema(function)
        rule = lambda name, _: watching if "running" in name else tb.methods.centred(0.0, function)  # noqa: E731
        return Run(rule, seed=seed, buffers="average", spectators={"short": watching})

    run = made(falling, 0).train(range(3))
    saved = through_a_file(run.saved())
    again = made(lambda step: 1 / (1 + step), 5)
    with pytest.warns(tb.BelayWarning) as seen:
        again.resume(saved)
    assert [re.findall(r"the method of '(\w+)' \((\S+)=<function", str(each.message)) for each in seen] == [
        [("average", "centred.rate")], [("average", "ema.decay")], [("short", "ema.decay")]
    ]  # fmt: skip
    assert same(again.everything(), run.everything())
    other = made(lambda step: 1 / (2 + step), 5)
    before = other.everything()
    with pytest.raises(ValueError, match=r"nothing was loaded: the method of .* differs: centred\(at_1=.*"):
        other.optimizer.load_state_dict(saved["optimizer"])
    assert same(other.everything(), before)


def test_a_live_average_may_change_to_a_method_with_a_function() -> None:
    run = Run(EMA).train(range(2))
    run.belay.change(tb.methods.ema(falling))
    saved = through_a_file(run.train(range(2, 4)).saved())
    again = Run(tb.methods.ema(falling), seed=5)
    with pytest.warns(tb.BelayWarning, match=r"ema\.decay=<function falling"):
        again.resume(saved)
    assert same(again.everything(), run.everything())


def test_asking_for_the_state_of_weights_that_were_just_loaded_warns_of_nothing() -> None:
    run = Run(EMA)
    run.model.load_state_dict(with_batchnorm(seed=9).state_dict())
    run.optimizer.state_dict()
    with pytest.warns(tb.BelayWarning, match="no step was seen"):
        run.belay.state_dict()


def test_an_accelerated_optimizer_saves_them_too(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = small.mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    belay = tb.Belay(model, optimizer, EMA, save_with_optimizer=True)
    train(model, optimizer, 3)
    accelerator.save_state(tmp_path)
    saved = copy.deepcopy(belay.state_dict())
    train(model, optimizer, 2, first=3)
    accelerator.load_state(tmp_path)
    assert same(belay.state_dict(), saved)

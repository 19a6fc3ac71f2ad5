"""`keep_initial=True`: the weights at which averages began, in memory and in checkpoints."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torchbelay as tb
from helpers.interrupting import EVERY, SOURCE, Interruption, raising_at
from helpers.small import BELAY, EMA, attached, mlp, same, snapshot, train, values, with_batchnorm

# Without other processes torch warns that it reads alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")

Made = tuple[nn.Module, torch.optim.Optimizer, tb.Belay]
SHORT = tb.Spring.ema(decay=0.5)
FIRST = tb.readouts.Shares(1.0, 0.0, 0.0)


class Beginning:
    """A readout that is w0 itself."""

    def shares(self, name: str, method: tb.Method, step: int, lr: float) -> tb.readouts.Shares:
        return FIRST


def initial(belay: tb.Belay, name: str = "average") -> dict[str, Tensor]:
    """w0, and the rest of the model."""
    return dict(belay.average_state_dict(name, readout=Beginning()))


def in_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """w0 in a checkpoint."""
    return {name: w0 for saved in state["averages"].values() for name, w0 in saved["initial"].items()}


def kept(method: Any = BELAY, **how: Any) -> Made:
    return attached(method, **{"keep_initial": True, **how})


# Beginnings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_weights_at_construction_whatever_steps_follow(dtype: torch.dtype) -> None:
    model, optimizer, belay = kept(model=mlp(dtype), spectators={"short": SHORT})
    own = values(model)
    for _ in range(3):
        train(model, optimizer, 2)
        assert same(initial(belay), own)
        assert same(initial(belay, "short"), own)
    with belay.averaged():
        assert same(initial(belay), own)


def test_it_is_the_weights_after_step_start() -> None:
    model, optimizer, belay = kept(start=2)
    train(model, optimizer, 2)
    own = values(model)
    train(model, optimizer, 3, first=2)
    assert same(initial(belay), own)


def test_reset_begins_again_at_the_present_weights() -> None:
    model, optimizer, belay = kept(spectators={"short": SHORT})
    train(model, optimizer, 3)
    belay.reset()
    own = values(model)
    train(model, optimizer, 2)
    assert same(initial(belay), own)
    assert same(initial(belay, "short"), own)
    alpha = 12**-0.2  # two steps since
    read, average = belay.average_state_dict(readout=tb.readouts.bema()), belay.average_state_dict()
    for key, w1 in values(model).items():
        torch.testing.assert_close(read[key], average[key] + alpha * (w1 - own[key]))


def test_copy_to_model_leaves_it() -> None:
    model, optimizer, belay = kept()
    own = values(model)
    train(model, optimizer, 2)
    belay.copy_to_model()
    assert same(initial(belay), own)


def test_reset_at_a_weight_of_another_shape_begins_there() -> None:
    model, optimizer, belay = kept()
    train(model, optimizer, 1)
    model[2].bias.data = torch.arange(7.0)
    belay.reset()
    assert torch.equal(initial(belay)["2.bias"], torch.arange(7.0))


def test_a_parameter_that_joins_later_begins_at_its_own_value_and_its_own_time() -> None:
    model, optimizer, belay = kept(model=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    first = values(model)
    train(model, optimizer, 3)
    torch.manual_seed(9)
    model.append(nn.Linear(1, 1))
    late = {f"2.{name}": t.detach().clone() for name, t in model[2].named_parameters()}
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 2, first=3)
    assert same(initial(belay), first | late)
    read, average = belay.average_state_dict(readout=tb.readouts.bema()), belay.average_state_dict()
    for key, w1 in values(model).items():
        alpha = (12 if key.startswith("2.") else 15) ** -0.2
        torch.testing.assert_close(read[key], average[key] + alpha * (w1 - (first | late)[key]))


def test_a_parameter_that_leaves_and_returns_begins_anew() -> None:
    model, optimizer, belay = kept()
    train(model, optimizer, 2)
    group = optimizer.param_groups[0]
    group["params"], last = group["params"][:2], group["params"][2:]
    with pytest.warns(tb.BelayWarning, match="were taken from"):
        train(model, optimizer, 1, first=2)
    assert list(in_state(belay.state_dict())) == ["0.weight", "0.bias"]
    now = values(model)
    group["params"] = group["params"] + last
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 1, first=3)
    assert torch.equal(initial(belay)["2.weight"], now["2.weight"])
    assert not torch.equal(initial(belay)["0.weight"], now["0.weight"])


def test_parameters_that_a_spectator_alone_averages_have_theirs() -> None:
    model, optimizer, belay = kept(lambda name, p: EMA if "weight" in name else None, spectators={"short": SHORT})
    own = values(model)
    train(model, optimizer, 2)
    assert same(initial(belay, "short"), own)
    assert list(in_state(belay.state_dict())) == ["0.weight", "2.weight", "0.bias", "2.bias"]


def test_a_beginning_that_is_stopped_at_any_line_begins_after_a_later_step() -> None:
    files = [SOURCE / "belay" / name for name in ("initial.py", "averages.py")]

    def begin(made: Made, *, line: int | None) -> int:
        train(*made[:2], 1)
        with raising_at(line, files) as place:
            train(*made[:2], 1, first=1)
        return place.lines

    lines = begin(kept(start=2), line=None)
    for line in range(0, lines, EVERY):
        model, optimizer, belay = made = kept(start=2)
        with pytest.raises(Interruption):
            begin(made, line=line)
        began = {}
        for step in range(2, 5):
            if belay.state_dict()["began"] and not began:
                began = values(model)
            train(model, optimizer, 1, first=step)
        assert same(initial(belay), began), line


def test_it_has_the_dtype_of_the_averages_and_is_stored_once_for_all_of_them() -> None:
    model, _, belay = kept(EMA, model=mlp(torch.bfloat16), spectators={"short": SHORT})
    found = in_state(belay.state_dict())
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert same({key: t.bfloat16() for key, t in found.items()}, values(model))
    assert len({t.data_ptr() for t in found.values()}) == 4
    _, _, narrow = kept(EMA, model=mlp(torch.bfloat16), dtype=torch.bfloat16)
    assert {t.dtype for t in in_state(narrow.state_dict()).values()} == {torch.bfloat16}


def test_a_belay_without_it_keeps_and_saves_nothing() -> None:
    _, _, belay = attached(BELAY)
    state = belay.state_dict()
    assert "initial" not in state["averages"]["average"]
    assert "keep_initial" not in state["options"]
    assert not any("keep_initial" in fact for fact in state["made_with"])


@pytest.mark.parametrize("value", [1, "yes", None], ids=repr)
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"keep_initial={value!r} is neither True nor False"):
        attached(BELAY, keep_initial=value)


def test_made_in_inference_mode_it_is_an_ordinary_tensor() -> None:
    with torch.inference_mode():
        _, _, belay = kept()
        belay.reset()
    assert not any(t.is_inference() for t in in_state(belay.state_dict()).values())


# Several optimizers --------------------------------------------------------------------------------------------------


def shared_out(seed: int = 0) -> tuple[nn.Module, list[torch.optim.Optimizer], tb.Belay]:
    model = mlp(seed=seed)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    return model, optimizers, tb.Belay(model, optimizers, BELAY, spectators={"short": SHORT}, keep_initial=True)


def step_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def test_a_parameter_that_goes_to_another_optimizer_keeps_its_own() -> None:
    model, optimizers, belay = shared_out()
    own = values(model)
    step_all(model, optimizers, 2)
    groups = [optimizer.param_groups[0] for optimizer in optimizers]
    groups[1]["params"] = [*groups[1]["params"], groups[0]["params"].pop()]
    step_all(model, optimizers, 2)
    assert same(initial(belay), own)
    assert same(initial(belay, "short"), own)


@pytest.mark.parametrize("to", ["several", "one"])
def test_a_state_of_several_optimizers_goes_on_with_several_or_one(to: str) -> None:
    model, optimizers, belay = shared_out()
    own = values(model)
    step_all(model, optimizers, 2)
    state = copy.deepcopy(belay.state_dict())
    assert list(in_state(state)) == list(own)
    other, more, again = shared_out(seed=5)
    if to == "one":
        again.detach()
        more = [torch.optim.SGD(other.parameters(), lr=0.1)]
        again = tb.Belay(other, more[0], BELAY, spectators={"short": SHORT}, keep_initial=True)
    again.load_state_dict(state)
    other.load_state_dict(model.state_dict())
    assert same(initial(again), own)
    for each in ((model, optimizers), (other, more)):
        step_all(*each, 2)
    read = [dict(b.average_state_dict("short", readout=tb.readouts.bema())) for b in (belay, again)]
    assert same(*read)
    del state["averages"]["average"]["initial"]["2.bias"]
    before = snapshot(other, again)
    with pytest.raises(ValueError, match=r"the initial weights .* missing: '2.bias'"):
        again.load_state_dict(state)
    assert same(snapshot(other, again), before)


# Checkpoints ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a spectator": {"spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}},
    "begun later": {"start": 2, "method": EMA},
    "not begun": {"start": 9},
    "bfloat16": {"model": lambda seed: mlp(torch.bfloat16, seed=seed), "method": EMA},
    "in host memory": {"method": EMA, "device": "cpu"},
    "averaged buffers": {"model": lambda seed: with_batchnorm(seed=seed), "buffers": "average"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, seed: int = 0, **more: Any) -> Made:
    how = {"method": BELAY, "model": lambda seed: mlp(seed=seed), **KINDS[kind], **more}
    return kept(**how | {"model": how["model"](seed)})


def through_a_file(source: tb.Belay, target: tb.Belay, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))


def through_a_directory(source: tb.Belay, target: tb.Belay, folder: Path) -> None:
    dcp.save({"belay": source}, checkpoint_id=folder / "directory")
    dcp.load({"belay": target}, checkpoint_id=folder / "directory")


def through_a_directory_made_a_file(source: tb.Belay, target: tb.Belay, folder: Path) -> None:
    dcp.save({"belay": source}, checkpoint_id=folder / "directory")
    dcp_to_torch_save(folder / "directory", folder / "file.pt")
    target.load_state_dict(torch.load(folder / "file.pt", weights_only=True)["belay"])


Way = Callable[[tb.Belay, tb.Belay, Path], None]
WAYS: list[Way] = [through_a_file, through_a_directory, through_a_directory_made_a_file]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@every_kind
@every_way
@pytest.mark.parametrize("ahead", [0, 4], ids=["into a new Belay", "into one that has trained"])
def test_training_resumes_bit_for_bit_with_its_readouts(kind: str, way: Way, ahead: int, tmp_path: Path) -> None:
    model, optimizer, belay = made(kind)
    train(model, optimizer, 3)
    other, its_optimizer, again = made(kind, seed=5)
    train(other, its_optimizer, ahead)
    way(belay, again, tmp_path)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for steps in (0, 7):
        train(model, optimizer, steps, first=3)
        train(other, its_optimizer, steps, first=3)
        assert same(again.state_dict(), belay.state_dict())
        for readout in (tb.readouts.bema(), Beginning()):
            read = [dict(each.average_state_dict(readout=readout)) for each in (belay, again)]
            assert same(*read)
    if kind == "not begun":
        assert belay.state_dict()["began"] == 1  # the training went on until they began


def test_a_state_is_not_changed_by_what_happens_after_it_was_loaded() -> None:
    model, optimizer, belay = kept()
    train(model, optimizer, 2)
    state = copy.deepcopy(belay.state_dict())
    belay.load_state_dict(state)
    before = copy.deepcopy(in_state(state))
    belay.reset()
    assert same(in_state(state), before)


@every_way
@pytest.mark.parametrize("saved", [True, False], ids=["saved with it", "saved without it"])
def test_a_state_that_differs_in_it_is_refused_and_changes_nothing(saved: bool, way: Way, tmp_path: Path) -> None:
    _, _, source = attached(BELAY, keep_initial=saved)
    model, optimizer, target = attached(BELAY, keep_initial=not saved, model=mlp(seed=5))
    train(model, optimizer, 2)
    before = snapshot(model, target)
    message = (
        rf"keep_initial differs: {saved} in the checkpoint, {not saved} here; build Belay with keep_initial={saved}"
    )
    if way is through_a_directory:
        message = "Missing key.*(keep_initial|every=1)"
    with pytest.raises(BaseException, match=message):  # torch's CheckpointException is no Exception
        way(source, target, tmp_path)
    assert same(snapshot(model, target), before)


DAMAGE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "none": (lambda state, saved: saved.pop("initial"), "the initial weights of .* missing: '0.bias', '0.weight'"),
    "a list": (
        lambda state, saved: saved.update(initial=[]),
        "initial weights of average 'average' in this state of a Belay is damaged: list is",
    ),
    "one missing": (lambda state, saved: saved["initial"].pop("0.bias"), "the initial weights of .* missing: '0.bias'"),
    "one more": (
        lambda state, saved: saved["initial"].update(x=torch.ones(1)),
        "the initial weights .* unexpected: 'x'",
    ),
    "another shape": (
        lambda state, saved: saved["initial"].update({"0.bias": torch.ones(7)}),
        r"the shape of '0.bias' in the initial weights of average 'average' differs: \(7,\) in the checkpoint, \(5,\)",
    ),
    "another dtype": (
        lambda state, saved: saved["initial"].update({"0.bias": torch.ones(5, dtype=torch.float64)}),
        "the dtype of '0.bias' in the initial weights of average 'average' differs",
    ),
    "no tensor": (
        lambda state, saved: saved["initial"].update({"0.bias": 3.0}),
        "'0.bias' in the initial weights of average 'average' is damaged",
    ),
    "a flag": (
        lambda state, saved: state["options"].update(keep_initial=1),
        "keep_initial differs: 1 in the checkpoint",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Callable[[Any, Any], Any], message: str) -> None:
    model, optimizer, belay = kept()
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    state = copy.deepcopy(before["belay"])
    damage(state, state["averages"]["average"])
    with pytest.raises(ValueError, match=message):
        belay.load_state_dict(state)
    assert same(snapshot(model, belay), before)

"""`bits=24`: averages in 3 bytes per weight, through everything that a training does to them."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn

import torchbelay as tb
from helpers import seams
from helpers.small import BELAY, EMA, SWINGING, attached, batch, mlp, same, snapshot, train, values, with_batchnorm
from torchbelay.ops import planes
from torchbelay.ops.place import Place
from torchbelay.testing import check

LOOKAHEAD = tb.methods.lookahead(k=2)
METHODS = {
    "ema": EMA,
    "belay": BELAY,
    "velocities": SWINGING,
    "lookahead": LOOKAHEAD,
    "warming up": tb.methods.ema(0.9, warmup="ratio"),
}
every_method = pytest.mark.parametrize("how", METHODS)
STEP = 2.0**-15  # the largest distance of two neighbours of 24 bits, relative to them


def planes_of(belay: tb.Belay, name: str = "average") -> dict[str, tuple[Tensor, Tensor]]:
    saved = belay.state_dict()["averages"][name]
    return {key: (high, saved["weights_low"][key]) for key, high in saved["weights"].items()}


def average(belay: tb.Belay, name: str = "average") -> dict[str, Tensor]:
    """What the planes hold, in float32."""
    return {key: planes.joined(*pair) for key, pair in planes_of(belay, name).items()}


def rounded(t: Tensor) -> Tensor:
    return planes.joined(*planes.split(t.detach().float()))


# What it is -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_average_takes_three_bytes_per_weight(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=mlp(dtype), spectators={"short": EMA}, bits=24)
    train(model, optimizer, 2)
    weights = sum(p.numel() for p in model.parameters())
    for name in ("average", "short"):
        found = [t for pair in planes_of(belay, name).values() for t in pair]
        assert {t.dtype for t in found} == {torch.bfloat16, torch.uint8}
        assert sum(t.numel() * t.element_size() for t in found) == 3.0 * weights
        assert sum(t.untyped_storage().nbytes() for t in found) == 3 * weights
    assert "average 24 bits" in repr(belay)


def test_it_begins_at_the_weights_rounded_to_the_nearest() -> None:
    model, _, belay = attached(EMA, bits=24)
    for name, p in model.named_parameters():
        assert average(belay)[name].equal(rounded(p))
        assert ((average(belay)[name] - p).abs() <= STEP / 2 * p.abs()).all()


def test_a_step_is_that_of_a_float32_average_rounded_by_the_bytes_of_name_index_and_step() -> None:
    model, optimizer, belay = attached(EMA, bits=24, impl="reference")
    train(model, optimizer, 3)
    before = average(belay)
    train(model, optimizer, 1, first=3)
    for name, p in model.named_parameters():
        exact = before[name] + (1 - 0.9) * (p.detach() - before[name])
        random = planes.random_bytes([Place.of(name, p.shape)], torch.tensor(4)).view(p.shape)
        found = average(belay)[name]
        near = planes.joined(*planes.split(exact, random))
        assert (found != near).sum() <= 1  # but for a last bit of float32, beside the border of two roundings
        assert ((found - exact).abs() <= STEP * exact.abs() + 1e-12).all()


@every_method
@pytest.mark.parametrize("impl", ["foreach", "reference"])
def test_it_stays_beside_a_float32_average(how: str, impl: str) -> None:
    runs = [attached(METHODS[how], impl=impl, **bits) for bits in ({"bits": 24}, {})]
    for model, optimizer, _ in runs:
        train(model, optimizer, 30)
    found, exact = (belay.average_state_dict() for _, _, belay in runs)
    for name in exact:
        scale = exact[name].abs().max()
        torch.testing.assert_close(found[name], exact[name], rtol=0, atol=100 * STEP * float(scale))
    assert not same(found, exact)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 32, 23, 24.0, "24", True])
def test_other_numbers_of_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits=.* cannot hold an average; use bits=24"):
        attached(EMA, bits=bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_and_dtype_are_refused_together(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"bits=24 and dtype=torch.* both say how"):
        attached(EMA, bits=24, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_weights_that_lose_too_much_are_refused_by_name_unless_they_are_left_out(dtype: torch.dtype) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2, dtype=dtype))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    with pytest.raises(ValueError, match=r"bits=24 is for float32, .* parameter 'b' is torch"):
        tb.Belay(model, optimizer, EMA, bits=24)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if name == "a" else None, bits=24)
    assert list(average(belay)) == ["a"]


def test_a_late_parameter_that_loses_too_much_is_refused_before_the_step() -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    model.late = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [model.late]})
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"parameter 'late' is torch\.float64"):
        optimizer.step()
    assert same(before, snapshot(model, belay))


@pytest.mark.parametrize("what", ["module", "tensors"])
def test_module_and_tensors_are_refused_with_the_cure(what: str) -> None:
    _, _, belay = attached(EMA, spectators={"short": EMA}, bits=24)
    for name in ("average", "short"):
        with pytest.raises(ValueError, match=rf"{what}\(\) shares the average's memory, .* averaged\(\)"):
            getattr(belay, what)(name)


# Swap and exports -----------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*16 bits wide")
def test_the_swap_gives_every_bit_of_both_back(how: str, dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(METHODS[how], model=mlp(dtype), bits=24)
    train(model, optimizer, 3)
    before, exact = snapshot(model, belay), average(belay)
    with belay.averaged():
        for name, p in model.named_parameters():
            assert p.detach().equal(exact[name].to(dtype))
        assert same(average(belay), exact)  # a checkpoint from inside
        assert same(belay.average_state_dict(), values(model))
    assert same(before, snapshot(model, belay))
    with pytest.raises(KeyError), belay.averaged():
        raise KeyError
    assert same(before, snapshot(model, belay))
    with belay.averaged():
        for p in model.parameters():
            p.data.zero_()
    assert same(before, snapshot(model, belay))


def test_weights_that_share_memory_and_tied_weights_are_swapped_too() -> None:
    flat = torch.arange(6.0) / 7
    model = nn.ParameterDict({"a": nn.Parameter(flat[:4]), "b": nn.Parameter(flat[2:])})
    model.tied = model["a"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, bits=24)
    with belay.averaged():
        assert model["b"].detach().equal(rounded(torch.arange(2.0, 6.0) / 7))
    assert flat.equal(torch.arange(6.0) / 7)


def test_a_swap_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 2)
    exact = average(belay)
    seams.limit_scratch(monkeypatch, 7)
    with belay.averaged():
        assert all(p.detach().equal(exact[name]) for name, p in model.named_parameters())
    belay.copy_to_model()
    assert all(p.detach().equal(exact[name]) for name, p in model.named_parameters())


def test_exports_are_float32_values_in_the_models_dtypes(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer, belay = attached(EMA, model=mlp(dtype), bits=24)
        train(model, optimizer, 3)
        exact = average(belay)
        state = belay.average_state_dict()
        assert all(state[name].equal(exact[name].to(dtype)) for name in exact)
        mlp(dtype).load_state_dict(state, strict=True)
        for asked in (None, torch.float32):
            belay.save_average(tmp_path / "average.safetensors", dtype=asked)
            found = load_file(tmp_path / "average.safetensors")
            assert all(found[name].equal(exact[name].to(asked or dtype)) for name in exact)


def test_readouts_mix_the_exact_values() -> None:
    readout = tb.readouts.bema()
    runs = [attached(EMA, keep_initial=True, **bits) for bits in ({"bits": 24}, {})]
    for model, optimizer, _ in runs:
        train(model, optimizer, 5)
    found, exact = (belay.average_state_dict(readout=readout) for _, _, belay in runs)
    for name in exact:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-3, atol=1e-4)
    model, _, belay = runs[0]
    before = snapshot(model, belay)
    with belay.averaged(readout=readout):
        assert same(values(model), found)
    assert same(before, snapshot(model, belay))


def test_numbers_to_log_are_those_of_the_values() -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 5)
    apart = [average(belay)[name].double() - p.detach().double() for name, p in model.named_parameters()]
    expected = sum(float(t.square().sum()) for t in apart) ** 0.5
    assert belay.stats()["tension"] == pytest.approx(expected, rel=1e-6)
    with belay.averaged():
        assert belay.stats()["tension"] == pytest.approx(expected, rel=1e-6)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def resumed(state: dict[str, Any], model: nn.Module, optimizer: Any, method: Any, **options: Any) -> Any:
    other, again, belay = attached(method, model=copy.deepcopy(model), **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    belay.load_state_dict(copy.deepcopy(state))
    return other, again, belay


@every_method
def test_a_resumed_run_ends_with_the_same_bits(how: str) -> None:
    options: dict[str, Any] = {"bits": 24, "spectators": {"short": tb.Spring.ema(decay=0.5)}, "keep_initial": True}
    model, optimizer, belay = attached(METHODS[how], **options)
    train(model, optimizer, 4)
    other, again, loaded = resumed(belay.state_dict(), model, optimizer, METHODS[how], **options)
    for each in ((model, optimizer), (other, again)):
        train(*each, 5, first=4)
    assert same(snapshot(model, belay), snapshot(other, loaded))


def test_replicas_that_begin_alike_stay_alike_and_another_name_draws_other_bytes() -> None:
    runs = []
    for names in (("a", "b"), ("a", "b"), ("c", "d")):
        model = nn.ParameterDict({name: nn.Parameter(torch.linspace(-1, 1, 200)) for name in names})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        belay = tb.Belay(model, optimizer, EMA, bits=24)
        for _ in range(5):
            sum(p.sin().sum() for p in model.values()).backward()
            optimizer.step()
        runs.append(list(average(belay).values()))
    assert same(runs[0], runs[1])
    assert not runs[0][0].equal(runs[0][1])  # equal weights under two names
    assert not runs[0][0].equal(runs[2][0])


@pytest.mark.parametrize("to", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_a_state_goes_on_in_another_storage_and_back_if_that_is_asked_for(to: dict[str, Any]) -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 4)
    state, exact = belay.state_dict(), average(belay)
    with pytest.raises(ValueError, match=r"bits differs: 24 in the checkpoint, None here.*strict=False"):
        resumed(state, model, optimizer, EMA, **to)
    other, _, loaded = attached(EMA, model=copy.deepcopy(model), **to)
    with pytest.warns(tb.BelayWarning, match=r"bits was 24 and is None .*kept in 24 bits and is kept in torch"):
        loaded.load_state_dict(copy.deepcopy(state), strict=False)
    dtype = to.get("dtype", torch.float32)
    found = loaded.state_dict()["averages"]["average"]
    assert "weights_low" not in found
    assert all(found["weights"][name].equal(value.to(dtype)) for name, value in exact.items())
    with pytest.raises(ValueError, match=r"bits differs: None in the checkpoint, 24 here"):
        belay.load_state_dict(loaded.state_dict())
    with pytest.warns(tb.BelayWarning, match=r"kept in torch.* and is kept in 24 bits from now on"):
        belay.load_state_dict(loaded.state_dict(), strict=False)
    for name, value in average(belay).items():
        assert value.equal(exact[name] if dtype != torch.bfloat16 else exact[name].bfloat16().float())
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 1)


def test_a_new_spectator_begins_at_the_planes_of_a_loaded_average() -> None:
    model, optimizer, belay = attached(SWINGING, bits=24)
    train(model, optimizer, 4)
    _, _, other = attached(BELAY, model=copy.deepcopy(model), bits=24, spectators={"new": EMA}, keep_initial=True)
    with pytest.warns(tb.BelayWarning, match="'new' is new and begins at the checkpoint's"):
        other.load_state_dict(copy.deepcopy(belay.state_dict()), strict=False)
    assert same(average(other, "new"), average(belay))
    assert same(planes_of(other), planes_of(belay))


def damaged(change: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], nn.Module, tb.Belay]:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 2)
    state = copy.deepcopy(belay.state_dict())
    change(state["averages"]["average"])
    return state, model, belay


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.pop("weights_low"),
        lambda saved: saved["weights_low"].pop("0.weight"),
        lambda saved: saved["weights_low"].update({"0.weight": torch.zeros(5, 3)}),
        lambda saved: saved["weights_low"].update({"0.weight": torch.zeros(3, 5, dtype=torch.uint8)}),
        lambda saved: saved["weights_low"].update({"0.weight": "x"}),
        lambda saved: saved["weights"].update({"0.weight": torch.zeros(5, 3)}),
    ],
)
def test_a_state_whose_planes_do_not_fit_is_refused_and_changes_nothing(change: Any, strict: bool) -> None:
    state, model, belay = damaged(change)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"weights_low|damaged|dtype of"):
        belay.load_state_dict(state, strict=strict)
    assert same(before, snapshot(model, belay))


def test_a_state_without_bits_has_no_name_of_it() -> None:
    _, _, belay = attached(EMA)
    state = belay.state_dict()
    assert "bits" not in state["options"]
    assert "weights_low" not in state["averages"]["average"]
    assert not any("bits" in fact for fact in state["made_with"])


def test_an_optimizers_state_carries_the_planes() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, EMA, bits=24, save_with_optimizer=True)
    train(model, optimizer, 4)
    other = copy.deepcopy(model)
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    loaded = tb.Belay(other, again, EMA, bits=24, save_with_optimizer=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(snapshot(model, belay), snapshot(other, loaded))
    for each in ((model, optimizer), (other, again)):
        train(*each, 3, first=4)
    assert same(snapshot(model, belay), snapshot(other, loaded))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_distributed_checkpoint_keeps_every_bit_and_refuses_another_storage(tmp_path: Path) -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 4)
    dcp.save({"belay": belay}, checkpoint_id=tmp_path)
    _, _, other = attached(EMA, model=copy.deepcopy(model), bits=24)
    dcp.load({"belay": other}, checkpoint_id=tmp_path)
    assert same(planes_of(other), planes_of(belay))
    for options in ({}, {"dtype": torch.bfloat16}):
        _, _, plain = attached(EMA, model=copy.deepcopy(model), **options)
        before = copy.deepcopy(plain.state_dict())
        with pytest.raises(BaseException, match="Missing key"):  # torch's is no Exception
            dcp.load({"belay": plain}, checkpoint_id=tmp_path)
        assert same(before, plain.state_dict())


# What users do meanwhile ----------------------------------------------------------------------------------------------


def test_moving_and_casting_the_model_leaves_the_average_what_it_is() -> None:
    model, optimizer, belay = attached(EMA, model=mlp(), bits=24)
    train(model, optimizer, 2)
    exact = average(belay)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        optimizer.state.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert same(average(belay), exact)
        train(model, optimizer, 1)
        for name, p in model.named_parameters():
            expected = exact[name] + (1 - 0.9) * (p.detach().float() - exact[name])
            torch.testing.assert_close(average(belay)[name], expected, rtol=STEP * 1.01, atol=1e-7)
        exact = average(belay)


def test_another_memory_layout_changes_no_bit() -> None:
    runs = []
    for at in (None, 0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA, bits=24)
        for step in range(4):
            if step == at:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            for i, p in enumerate(model.parameters()):  # not by convolutions, which round otherwise in that layout
                p.grad = torch.sin(p.detach() + i)
            optimizer.step()
        runs.append((average(belay), belay.average_state_dict()))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_late_frozen_empty_and_strided_parameters() -> None:
    model = nn.ParameterDict(
        {
            "plain": nn.Parameter(torch.randn(4, 3)),
            "turned": nn.Parameter(torch.randn(4, 3).t()),
            "sliced": nn.Parameter(torch.randn(8)[::2]),
            "empty": nn.Parameter(torch.randn(0, 3)),
            "number": nn.Parameter(torch.tensor(0.3)),
            "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        }
    )
    optimizer = torch.optim.SGD([p for p in model.values() if p.requires_grad], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, bits=24)

    def step() -> None:
        optimizer.zero_grad()
        sum(p.sin().sum() for p in model.values() if p.requires_grad).backward()
        optimizer.step()

    step()
    model["late"] = nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [model["late"]]})
    with pytest.warns(tb.BelayWarning, match="'late' first: adopted"):
        step()
    step()
    assert set(average(belay)) == set(model) - {"frozen"}
    before = values(model)
    with belay.averaged():
        for name in set(model) - {"frozen"}:
            assert model[name].detach().equal(average(belay)[name])
        assert model["frozen"].equal(before["frozen"])
    assert same(values(model), before)


def test_a_renamed_parameter_draws_by_its_new_name_as_after_a_resume() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.old = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, EMA, bits=24)

    def step(layer: nn.Module, by: Any) -> None:
        for p in layer.parameters():
            p.grad = p.detach().sin()
        by.step()

    step(model.old, optimizer)
    model.new = model.old
    del model.old
    state = belay.state_dict()
    other = copy.deepcopy(model)
    again = torch.optim.SGD(other.parameters(), lr=0.01)
    loaded = tb.Belay(other, again, EMA, bits=24)
    loaded.load_state_dict(copy.deepcopy(state))
    for _ in range(3):
        step(model.new, optimizer)
        step(other.new, again)
    assert same(planes_of(belay), planes_of(loaded))


def test_weights_that_are_not_finite_reach_the_average_and_skip_keeps_them_out() -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    train(model, optimizer, 1)
    with torch.no_grad():
        model[0].bias[:3] = torch.tensor([inf, -inf, nan])
        model[0].bias[3] = torch.finfo(torch.float32).max
    optimizer.zero_grad()
    optimizer.step()
    bias = average(belay)["0.bias"]
    assert bias[:2].tolist() == [inf, -inf]
    assert bias[2].isnan()
    assert bias[3:].isfinite().all()
    belay.reset()
    assert average(belay)["0.bias"][3] == torch.tensor(0x7F7FFF00, dtype=torch.int32).view(torch.float32)
    model, optimizer, belay = attached(EMA, bits=24, on_nonfinite="skip")
    train(model, optimizer, 1)
    exact = planes_of(belay)
    exact = copy.deepcopy(exact)
    with torch.no_grad():
        model[0].bias[0] = nan
    optimizer.zero_grad()
    optimizer.step()
    assert same(planes_of(belay), exact)


def test_steps_under_inference_mode_by_hand_and_a_reset() -> None:
    model = mlp()
    belay = tb.Belay(model, None, EMA, bits=24)
    with torch.inference_mode():
        state = belay.state_dict()
        with belay.averaged():
            pass
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    belay.update()
    assert not same(average(belay), {name: rounded(p) for name, p in model.named_parameters()})
    belay.update(rate=1.0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(average(belay)[name], p.detach(), rtol=STEP, atol=0)
    belay.reset()
    assert same(average(belay), {name: rounded(p) for name, p in model.named_parameters()})
    belay.load_state_dict(state)
    assert belay.step == 0


def test_every_start_buffers_and_a_change_of_method() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), bits=24, every=2, start=2, buffers="average")
    train(model, optimizer, 5)
    averaged = belay.state_dict()["averages"]["average"]
    assert averaged["buffers"]["1.running_mean"].dtype == torch.float32
    exact = average(belay)
    belay.change(tb.Spring.ema(decay=0.5))
    assert same(average(belay), exact)
    train(model, optimizer, 2, first=5)
    assert belay.step == 7


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("scratch", [None, 7])
def test_averages_in_host_memory_have_the_same_bits(
    impl: str, scratch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scratch is not None:
        seams.limit_scratch(monkeypatch, scratch)
    watching = tb.Spring(k=1.0, m1=inf, m2=20.0, c2=10.0)
    for method in (EMA, watching, tb.Spring(k=0.2, m1=inf, m2=1.0)):
        runs = [attached(method, impl=impl, bits=24, **device) for device in ({"device": "cpu"}, {})]
        for model, optimizer, _ in runs:
            train(model, optimizer, 4)
        found, expected = (average(belay) for _, _, belay in runs)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=STEP, atol=1e-7)
            assert (found[name] != expected[name]).float().mean() < 0.1
        assert "host memory" in repr(runs[0][2])


def test_recorded_snapshots_hold_the_values_in_float32(tmp_path: Path) -> None:
    model, optimizer, belay = attached(EMA, bits=24)
    with tb.snapshots.Recorder(belay, tmp_path, every=2):
        train(model, optimizer, 4)
    exact = average(belay)
    found = tb.snapshots.open_checkpoint(next(iter(sorted(tmp_path.glob("*4*.safetensors")))))
    assert all(found.read(name).equal(value) for name, value in exact.items())


def test_the_contract_suite_holds_for_it() -> None:
    for method in (BELAY, EMA, SWINGING):
        report = check(
            mlp, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), batch=batch, method=method, bits=24
        )
        assert not report.skipped


# Several optimizers ---------------------------------------------------------------------------------------------------


def two_optimizers(method: Any = EMA, model: nn.Module | None = None, **options: Any) -> tb.Belay:
    """A model of two layers with an optimizer each, after one step."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    first, *others = model.children()
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1)]
    optimizers.append(torch.optim.SGD([p for each in others for p in each.parameters()], lr=0.1))
    belay = tb.Belay(model, optimizers, method, **options)
    model(torch.randn(5, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return belay


def largest_difference(one: tb.Belay, other: tb.Belay) -> float:
    x, y = one.average_state_dict(), other.average_state_dict()
    return max((x[name] - y[name]).abs().max().item() for name in x)


@pytest.mark.parametrize(("before", "after"), [(None, 24), (24, None), (24, 24)])
def test_states_of_several_optimizers_change_their_bits(before: int | None, after: int | None) -> None:
    saved, here = two_optimizers(bits=before), two_optimizers(bits=after)
    told = (
        nullcontext() if before == after else pytest.warns(tb.BelayWarning, match=f"bits was {before} and is {after}")
    )
    with told:
        here.load_state_dict(copy.deepcopy(saved.state_dict()), strict=False)
    assert largest_difference(saved, here) <= (1e-5 if after and not before else 0)


def test_a_plane_that_is_missing_is_found_in_the_share_of_every_optimizer() -> None:
    state = copy.deepcopy(two_optimizers(bits=24).state_dict())
    del state["averages"]["average"]["weights_low"]["1.bias"]
    with pytest.raises(ValueError, match="damaged"):
        two_optimizers().load_state_dict(state, strict=False)


def test_the_first_of_several_optimizers_may_have_no_average() -> None:
    rest = two_optimizers(lambda name, p: EMA if name.startswith("1.") else None, bits=24)
    state = copy.deepcopy(rest.state_dict())
    assert state["averages"]["average"]["weights_low"].keys() == {"1.weight", "1.bias"}
    here = two_optimizers(lambda name, p: EMA if name.startswith("1.") else None, bits=24)
    here.load_state_dict(state)
    assert largest_difference(rest, here) == 0


@pytest.mark.parametrize("strict", [True, False])
def test_averaged_buffers_load_if_the_first_optimizer_has_no_average(strict: bool) -> None:
    def make() -> tb.Belay:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return two_optimizers(lambda name, p: None if name.startswith("0.") else EMA, model, buffers="average")

    saved, here = make(), make()
    here.load_state_dict(copy.deepcopy(saved.state_dict()), strict=strict)
    assert largest_difference(saved, here) == 0


@pytest.mark.parametrize("impl", ["foreach", "reference"])
def test_weights_and_average_are_equal_after_a_sync_with_a_velocity(impl: Any) -> None:
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.diloco(every=2, lr=0.5, momentum=0.5), bits=24, impl=impl)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    for name, value in belay.average_state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("part", ["options", "step"])
@pytest.mark.parametrize("value", [torch.ones(2), "3", None])
def test_damage_of_several_optimizers_is_refused_as_such(part: str, value: Any) -> None:
    state = copy.deepcopy(two_optimizers(bits=24).state_dict()) | {part: value}
    with pytest.raises(ValueError, match="damaged"):
        two_optimizers(bits=24).load_state_dict(state, strict=False)

"""Averages of 24 bits in one pass with an optimizer, under GradScaler, with several optimizers, and on a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

import torchbelay as tb
from helpers.problems import same
from helpers.small import BELAY, EMA, SWINGING, WHERE, mlp, train
from helpers.small import same as equal
from torchbelay import optim
from torchbelay.ops import planes

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU captures graphs")
INNER: dict[str, dict[str, Any]] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 0.1, "momentum": 0.9}}


def run(
    ours: bool, method: Any = EMA, *, inner: str = "AdamW", dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """A model, its optimizer and Belay; ours steps and averages in one pass, torch's is followed by foreach."""
    model = mlp(dtype).to(WHERE)
    optimizer = getattr(optim if ours else torch.optim, inner)(model.parameters(), **INNER[inner])
    options = {"impl": "triton" if ours else "foreach", "bits": 24, **options}
    return model, optimizer, tb.Belay(model, optimizer, method, **options)


def average(belay: tb.Belay, name: str = "average") -> dict[str, Tensor]:
    saved = belay.state_dict()["averages"][name]
    return {key: planes.joined(high, saved["weights_low"][key]) for key, high in saved["weights"].items()}


def nearly(x: dict[str, Tensor], y: dict[str, Tensor]) -> None:
    """Equal but for roundings of float32, which may let a number beside a border be rounded the other way."""
    for name in y:
        torch.testing.assert_close(x[name], y[name], rtol=2**-13, atol=2e-6)
    differing = sum(int((x[name] != y[name]).sum()) for name in y)
    assert differing <= 0.2 * sum(t.numel() for t in y.values())


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("method", [EMA, BELAY, SWINGING], ids=["ema", "belay", "velocities"])
def test_one_pass_draws_the_bytes_that_foreach_draws(inner: str, method: Any) -> None:
    """With other bytes nearly every number would be rounded otherwise."""
    spectators = (
        {} if method is SWINGING else {"short": tb.Spring.ema(decay=0.5)}
    )  # velocities take a pass of their own
    runs = [run(ours, method, inner=inner, spectators=spectators) for ours in (True, False)]
    for model, optimizer, _ in runs:
        train(model, optimizer, 4)
    assert "in one pass with the optimizer" in repr(runs[0][2])
    for name in ("average", *spectators):
        nearly(*(average(belay, name) for _, _, belay in runs))


def test_one_pass_of_bfloat16_weights_keeps_24_bits() -> None:
    runs = [run(ours, dtype=torch.bfloat16, inner="SGD") for ours in (True, False)]
    for model, optimizer, _ in runs:
        train(model, optimizer, 3)
    assert "in one pass with the optimizer" in repr(runs[0][2])
    for name, value in average(runs[0][2]).items():
        torch.testing.assert_close(value, average(runs[1][2])[name], rtol=2**-8, atol=2**-8)
        assert value.dtype == torch.float32
        assert not value.equal(value.bfloat16().float()) or value.numel() < 2


def test_a_run_in_one_pass_resumes_to_the_same_bits_with_either_code() -> None:
    model, optimizer, belay = run(True)
    train(model, optimizer, 3)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), belay.state_dict()))
    again = run(True)
    for each, state in zip(again, states, strict=True):
        each.load_state_dict(copy.deepcopy(state))
    train(model, optimizer, 3, first=3)
    train(*again[:2], 3, first=3)
    assert all(map(same, average(again[2]).values(), average(belay).values()))
    other = run(False)
    for each, state in zip(other, states, strict=True):
        each.load_state_dict(copy.deepcopy(state))
    train(*other[:2], 1, first=3)
    third = run(True)
    for each, state in zip(third, states, strict=True):
        each.load_state_dict(copy.deepcopy(state))
    train(*third[:2], 1, first=3)
    nearly(average(third[2]), average(other[2]))


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_that_a_scaler_skips_is_not_counted_and_draws_no_bytes(ours: bool) -> None:
    model, optimizer, belay = run(ours)
    plain, other, expected = run(ours)
    scaler = GradScaler(WHERE, init_scale=4.0)
    for step in range(5):
        x = torch.full((4, 3), 0.1 * (step + 1), device=WHERE)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if step == 2:
            model[0].weight.grad.fill_(float("inf"))
        else:
            other.zero_grad()
            plain(x).square().mean().backward()
            other.step()
        scaler.step(optimizer)
        scaler.update()
    assert belay.step == expected.step == 4
    nearly(average(belay), average(expected))


def test_several_optimizers_in_one_belay() -> None:
    model = mlp().to(WHERE)
    parts = [optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    belay = tb.Belay(model, parts, EMA, bits=24)
    for step in range(4):
        model(torch.full((4, 3), 0.1 * step, device=WHERE)).square().mean().backward()
        for optimizer in parts[: 1 + step % 2]:
            optimizer.step()
    state = copy.deepcopy(belay.state_dict())
    assert set(state["averages"]["average"]["weights_low"]) == {n for n, _ in model.named_parameters()}
    other = copy.deepcopy(model)
    again = [torch.optim.SGD(other[i].parameters(), lr=0.1) for i in (0, 2)]
    loaded = tb.Belay(other, again, EMA, bits=24)
    loaded.load_state_dict(state)
    assert all(map(same, average(loaded).values(), average(belay).values()))


def test_a_parameter_without_an_average_and_one_without_a_gradient_go_along() -> None:
    model = mlp().to(WHERE)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if "weight" in name else None, impl="triton", bits=24)
    train(model, optimizer, 2)
    before = average(belay)
    model[0].weight.grad, model[2].weight.grad = None, torch.ones_like(model[2].weight)
    optimizer.step()
    for name in before:
        p = dict(model.named_parameters())[name].detach()
        expected = before[name] + 0.1 * (p - before[name])
        torch.testing.assert_close(average(belay)[name], expected, rtol=2**-15, atol=1e-7)


def test_moving_a_model_between_code_paths_keeps_the_bytes_of_its_steps() -> None:
    """From one pass to foreach and back, by resuming: what counts steps on the device agrees."""
    model, optimizer, belay = run(True)
    train(model, optimizer, 2)
    p = model[0].weight
    p.data = p.data.mT.contiguous().mT  # another layout: the average follows it
    train(model, optimizer, 2, first=2)
    plain = run(True)
    train(*plain[:2], 4)
    nearly(average(belay), average(plain[2]))
    assert belay.step == 4


@gpu
@pytest.mark.parametrize("impl", ["triton", "foreach"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_a_captured_graph_draws_new_bytes_at_every_replay(ours: bool, impl: str) -> None:
    runs = []
    for captured in (True, False):
        model = nn.Linear(64, 64).cuda()
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, 0.1)
        kind = optim.AdamW if ours else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
        belay = tb.Belay(model, optimizer, EMA, bits=24, impl=impl)
        x = torch.linspace(-1, 1, 64 * 8, device="cuda").view(8, 64)

        def step(model: Any = model, optimizer: Any = optimizer, x: Tensor = x) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(5):
                graph.replay()
        else:
            for _ in range(5):
                step()
        assert belay.step == 8
        runs.append(average(belay))
    nearly(*runs)


@gpu
def test_averages_in_host_memory_are_those_of_the_gpu() -> None:
    runs = []
    for device in ({"device": "cpu"}, {}):
        model = mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        belay = tb.Belay(model, optimizer, EMA, bits=24, **device)
        train(model, optimizer, 5)
        runs.append({name: t.cpu() for name, t in average(belay).items()})
    nearly(*runs)


@gpu
def test_a_model_that_goes_to_the_gpu_and_back_is_averaged_as_one_that_stays() -> None:
    runs = []
    for there in ("cuda", "cpu"):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA, bits=24)
        train(model, optimizer, 2)
        model.to(there)
        train(model, optimizer, 2, first=2)
        model.cpu()
        assert belay.step == 4
        train(model, optimizer, 1, first=4)
        assert {t.device.type for t in average(belay).values()} == {"cpu"}
        runs.append(average(belay))
    nearly(*runs)


def test_the_swap_gives_every_bit_back_with_kernels_too() -> None:
    model, optimizer, belay = run(True)
    train(model, optimizer, 2)
    exact, before = average(belay), copy.deepcopy((model.state_dict(), belay.state_dict()))
    with belay.averaged():
        assert all(p.detach().equal(exact[name]) for name, p in model.named_parameters())
        with pytest.raises(RuntimeError, match=r"inside averaged\('average'\)"):
            optimizer.step()
    assert equal((model.state_dict(), belay.state_dict()), before)
    train(model, optimizer, 1, first=2)
    assert "in one pass with the optimizer" in repr(belay)

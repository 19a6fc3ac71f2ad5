"""Synthesis of real models: their names, dtypes, buffers, frozen and tied weights, and parameters that come and go."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from helpers.small import mlp, same, train, with_batchnorm
from torchbelay.physics.method import Method
from torchbelay.snapshots import Recorder, synthesize, window
from torchbelay.snapshots.opening import open_checkpoint


@pytest.mark.thorough
def test_on_a_small_trained_network_the_error_is_within_a_factor_of_5(tmp_path: Path) -> None:
    targets = {"long": tb.methods.ema(half_life=150.0), "short": tb.methods.ema(half_life=30.0)}
    targets |= {"power": tb.methods.power_ema(sigma_rel=0.15), "swa": tb.methods.swa()}
    model = mlp(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spectators = {**tb.snapshots.defaults(), **targets}
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=spectators)
    with Recorder(belay, tmp_path, every=40, averages=["power_05", "power_10"]):
        train(model, optimizer, 800)
    ratios = {}
    for name, target in targets.items():
        found = synthesize(tmp_path, target, max_error=0.05)
        made, wanted = found.state_dict(), belay.average_state_dict(name)
        flat = [torch.cat([t.flatten() for t in state.values()]) for state in (made, wanted, model.state_dict())]
        assert list(made) == list(wanted)
        flat[0] = torch.cat([made[key].flatten() for key in wanted])
        ratios[name] = relative_error(*flat) / found.predicted_error
    assert all(0.2 < ratio < 5 for ratio in ratios.values()), ratios


def record(model: nn.Module, folder: Path, steps: int = 60, every: int = 5, **options: Any) -> tb.Belay:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults(), **options)
    with Recorder(belay, folder, every=every):
        train(model, optimizer, steps)
    return belay


def test_the_state_dict_loads_strictly_into_the_plain_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.last.weight = self.first.weight
            self.frozen = nn.Linear(3, 1).requires_grad_(False)
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.empty = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.norm(self.last(self.first(x).tanh())))

    torch.manual_seed(0)
    model = Tied()
    record(torch.nn.DataParallel(model), tmp_path / "snapshots")
    found = synthesize(tmp_path / "snapshots", window(20))
    state = found.state_dict()
    model.cpu()  # a parallel one has moved to the GPU
    assert list(state) == list(model.state_dict())
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh.frozen.weight, model.frozen.weight)
    assert int(fresh.count) == 7
    assert torch.equal(state["norm.running_mean"], model.state_dict()["norm.running_mean"])  # of the last step
    assert torch.equal(state["first.weight"], state["last.weight"])
    assert not torch.equal(state["first.weight"], model.first.weight)
    found.save(tmp_path / "average.safetensors")
    with open_checkpoint(tmp_path / "average.safetensors") as file:
        assert {name: file.dtype(name) for name in file.names} == {name: t.dtype for name, t in state.items()}
        assert same({name: file.read(name) for name in state}, state)
        assert file.metadata["average"] == "window(20)"
        assert file.metadata["step"] == "60"


def test_averages_of_16_bit_weights_are_stored_in_float32_and_returned_in_16_bits(tmp_path: Path) -> None:
    model = mlp(torch.bfloat16)
    belay = record(model, tmp_path)
    found = synthesize(tmp_path, tb.methods.ema(0.9))
    with found.folder.snapshots[-1].open() as file:
        assert file.dtype("0.weight") == torch.float32
    state = found.state_dict()
    assert state["0.weight"].dtype == torch.bfloat16
    assert same(state["0.weight"], belay.average_state_dict()["0.weight"])


def test_complex_weights_are_combined_too(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(50, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.8), spectators=tb.snapshots.defaults())
    points = []
    with Recorder(belay, tmp_path, every=2):
        for step in range(60):
            generator = torch.Generator().manual_seed(step)
            model.weight.grad = torch.randn(50, dtype=torch.complex64, generator=generator)
            optimizer.step()
            points.append(model.weight.detach().clone())
    found = synthesize(tmp_path, window(10), max_error=0.1)
    actual = relative_error(found.state_dict()["weight"], torch.stack(points[-10:]).mean(0), points[-1])
    assert actual < 2 * found.predicted_error + 1e-5  # what float32 rounds


def test_channels_last_weights_have_the_values_of_their_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.LazyLinear(1))
    model(torch.zeros(1, 2, 4, 4))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.5))
    with Recorder(belay, tmp_path, every=3):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 4, 4)).square().mean().backward()
            optimizer.step()
    state = synthesize(tmp_path, tb.methods.ema(0.5)).state_dict()
    torch.testing.assert_close(state["0.weight"], belay.average_state_dict()["0.weight"])


def test_a_method_per_parameter_has_a_solution_each(tmp_path: Path) -> None:
    model = mlp(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def rule(name: str, parameter: nn.Parameter) -> Method | None:
        if "bias" in name:
            return None
        return tb.methods.ema(0.9) if name.startswith("0") else tb.methods.power_ema(sigma_rel=0.1)

    along = {"target": tb.methods.ema(half_life=8.0)}
    belay = tb.Belay(model, optimizer, rule, spectators={"second": tb.methods.ema(0.7), **along})
    with Recorder(belay, tmp_path, every=2, averages=["average", "second"], weights=True):
        train(model, optimizer, 100)
    found = synthesize(tmp_path, tb.methods.ema(half_life=8.0), max_error=0.2)
    assert sorted(len(each.names) for each in found.solutions) == [1, 1, 2]
    assert len({each.predicted_error for each in found.solutions}) == 3
    wanted, made = belay.average_state_dict("target"), found.state_dict()
    for name in wanted:
        (solution,) = [each for each in found.solutions if name in each.names]
        actual = relative_error(made[name], wanted[name], model.state_dict()[name])
        assert actual < 10 * solution.predicted_error, name


def test_a_parameter_that_joins_later_is_rebuilt_from_the_snapshots_that_have_it(tmp_path: Path) -> None:
    model = mlp(torch.float64)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.05)
    spectators = {**tb.snapshots.defaults(), "target": tb.methods.ema(half_life=10.0)}
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=spectators)
    with Recorder(belay, tmp_path, every=5, averages=["average", "power_05", "power_10"]):
        train(model, optimizer, 50)
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        with pytest.warns(tb.BelayWarning, match="added"):
            train(model, optimizer, 50, first=50)
    made = synthesize(tmp_path, tb.methods.ema(half_life=10.0), max_error=0.2).state_dict()
    assert set(made) == set(model.state_dict())
    before = synthesize(tmp_path, window(10), at=45, max_error=0.2).state_dict()
    assert torch.equal(before["2.weight"], mlp(torch.float64)[2].weight)  # it was not trained then
    wanted = belay.average_state_dict("target")
    for name in ("0.weight", "2.weight"):
        assert relative_error(made[name], wanted[name], model.state_dict()[name]) < 0.05


@pytest.mark.filterwarnings("ignore:.*were added to")
@pytest.mark.parametrize("target", [tb.methods.swa(), tb.methods.power_ema(sigma_rel=0.08)])
@pytest.mark.parametrize("recorded_from", [0, 40, 60], ids=["the beginning", "before it joins", "after it joined"])
def test_the_average_of_a_parameter_that_joins_later_begins_when_it_joins(
    tmp_path: Path, target: Method, recorded_from: int
) -> None:
    model = nn.Module()
    model.first, model.second = (nn.Parameter(torch.zeros(3000, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([model.first], lr=1.0)
    spectators = {**tb.snapshots.defaults(), "target": target}
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=spectators)
    generator, points = torch.Generator().manual_seed(0), []

    def train(steps: range) -> None:
        for step in steps:
            if step == 40:
                optimizer.add_param_group({"params": [model.second]})
            for p in model.parameters():
                p.grad = torch.randn(3000, dtype=torch.float64, generator=generator)
            optimizer.step()
            points.append(model.second.detach().clone())

    train(range(recorded_from))
    with Recorder(belay, tmp_path, every=5, averages=["average", "power_05", "power_10"]):
        train(range(recorded_from, 100))
    found, mean = (synthesize(tmp_path, each, max_error=0.9) for each in (target, window(70)))
    assert len(found.solutions) == 2
    wanted, made = belay.average_state_dict("target"), found.state_dict()
    for solution in found.solutions:
        (name,) = solution.names
        actual = relative_error(made[name], wanted[name], model.state_dict()[name])
        assert actual == pytest.approx(solution.predicted_error, rel=0.2), name
    actual = relative_error(mean.state_dict()["second"], torch.stack(points[-70:]).mean(0), model.second.detach())
    assert actual < 2 * mean.predicted_error


@pytest.mark.filterwarnings("ignore:.*were added to", "ignore:.*taken from")
@pytest.mark.parametrize("target", [tb.methods.swa(), tb.methods.ema(half_life=10.0)])
def test_the_average_of_a_parameter_that_left_and_joins_again_begins_then(tmp_path: Path, target: Method) -> None:
    model = nn.Module()
    model.first, model.second = (nn.Parameter(torch.zeros(3000, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0)
    spectators = {**tb.snapshots.defaults(), "target": target}
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=spectators)
    generator = torch.Generator().manual_seed(0)

    def train(steps: int) -> None:
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn(3000, dtype=torch.float64, generator=generator)
            optimizer.step()

    with Recorder(belay, tmp_path, every=5, averages=["average", "power_05", "power_10"], weights=True):
        train(30)
        group = optimizer.param_groups.pop()
        train(12)
        model.second.data.add_(100.0)
        optimizer.add_param_group({"params": group["params"]})
        train(60)
    found, wanted = synthesize(tmp_path, target), belay.average_state_dict("target")
    made = found.state_dict()
    for solution in found.solutions:
        (name,) = solution.names
        assert name == "first" or min(each.step for each in solution.snapshots) == 45
        actual = relative_error(made[name], wanted[name], model.state_dict()[name])
        assert actual == pytest.approx(solution.predicted_error, rel=0.2), name


def test_a_parameter_that_left_the_optimizer_is_what_it_was_then(tmp_path: Path) -> None:
    model = mlp(torch.float64)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 20)
        del optimizer.param_groups[1]
        with pytest.warns(tb.BelayWarning, match="taken from"):
            train(model, optimizer, 20, first=20)
    made = synthesize(tmp_path, window(10), max_error=0.1).state_dict()
    assert torch.equal(made["2.weight"], model[2].weight)
    assert not torch.equal(
        synthesize(tmp_path, window(10), at=15, max_error=0.1).state_dict()["2.weight"], model[2].weight
    )


def test_averages_that_begin_late_or_begin_again_are_known_from_their_beginning(tmp_path: Path) -> None:
    run = Walk(size=2000, along={"target": tb.methods.ema(half_life=20.0)}, start=30)
    recorder = run.record(tmp_path, every=10)
    run.steps(100)
    found = synthesize_after(recorder, tb.methods.ema(half_life=10.0))
    assert found.folder.steps == [0, *range(30, 101, 10)]
    run.belay.reset()  # the averages, and the target that is trained along, begin again at step 100
    run.steps(60)
    recorder.close()
    assert {
        story.born for each in synthesize(tmp_path, window(20)).folder.snapshots for story in each.told.stories
    } == {
        30,
        100,
    }
    expected = torch.stack(run.points)[-20:].mean(0)
    found = synthesize(tmp_path, window(20))
    actual = relative_error(found.state_dict()["weight"], expected, run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def synthesize_after(recorder: Recorder, target: Method) -> Any:
    recorder.wait()
    return synthesize(recorder.folder, target, max_error=0.5)


def test_averages_that_couple_every_few_steps_are_known(tmp_path: Path) -> None:
    run = Walk(size=2000, every=4)
    with run.record(tmp_path, every=20):
        run.steps(200)
    expected = torch.stack(run.points)[-40:].mean(0)
    found = synthesize(tmp_path, window(40), max_error=0.2)
    actual = relative_error(found.state_dict()["weight"], expected, run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_batchnorm_has_the_statistics_of_the_last_step(tmp_path: Path) -> None:
    model = with_batchnorm()
    record(model, tmp_path, buffers="copy")
    state = synthesize(tmp_path, window(10)).state_dict()
    assert torch.equal(state["1.running_mean"], model[1].running_mean)
    assert int(state["1.num_batches_tracked"]) == 60


def test_only_a_few_tensors_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is summed piece by piece, and freed when the next one is asked for."""
    from torchbelay.snapshots import assembly
    from torchbelay.snapshots.layouts.safetensors import SafetensorsCheckpoint

    monkeypatch.setattr(assembly, "_PIECE", 100)
    read, largest = SafetensorsCheckpoint.read_into, []

    def counted(self: Any, name: str, start: int, out: torch.Tensor) -> None:
        largest.append(out.numel())
        read(self, name, start, out)

    monkeypatch.setattr(SafetensorsCheckpoint, "read_into", counted)
    run = Walk(size=450)
    with run.record(tmp_path, every=10):
        run.steps(50)
    found = synthesize(tmp_path, window(20), max_error=0.5)
    assert largest == []  # the error is known, and no weight has been read
    whole = dict(found.tensors())["weight"]
    assert set(largest) == {100, 50}
    monkeypatch.setattr(assembly, "_PIECE", 1000)
    assert torch.equal(dict(found.tensors())["weight"], whole)

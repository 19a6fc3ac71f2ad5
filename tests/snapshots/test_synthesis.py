"""Synthesis: averages that were not trained along, rebuilt from snapshots, and the errors that were predicted."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from helpers.small import batch, mlp, same, train, with_batchnorm
from torchbelay.physics.method import Method
from torchbelay.snapshots import Recorder, decay, synthesize, window
from torchbelay.snapshots.least_squares import combine_powers
from torchbelay.snapshots.opening import open_checkpoint
from torchbelay.snapshots.synthesis import synthesize_all

TARGETS: dict[str, Method] = {
    **{f"ema {n}": tb.methods.ema(half_life=float(n)) for n in (10, 20, 40, 80, 120, 200, 350)},
    **{f"power {s}": tb.methods.power_ema(sigma_rel=s) for s in (0.03, 0.07, 0.15, 0.25)},
    "swa": tb.methods.swa(),
    "lagged": tb.methods.ema(half_life=60.0, follow="before"),
    "warm": tb.methods.ema(0.995, warmup="inverse-power"),
}
CUT = {"window 100": window(100), "window 333": window(333), "cosine": decay(200, "cosine")}
CUT |= {"root": decay(300, "1-sqrt"), "linear": decay(77), "cosine, long": decay(800, "cosine")}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Walk, Path]:
    folder = tmp_path_factory.mktemp("walk")
    run = Walk(size=6000, along=TARGETS)
    with run.record(folder, every=50, averages=["power_05", "power_10"]):
        run.steps(1000)
    return run, folder


def truth(run: Walk, name: str) -> torch.Tensor:
    """Return the target, trained along or computed from all points of the run."""
    if name in TARGETS:
        return run.average(name)
    points = torch.stack(run.points)
    n = CUT[name].steps
    if isinstance(CUT[name], window):
        return points[-n:].mean(0)
    x = [k / n for k in range(n)]
    left = {
        "linear": [1 - each for each in x],
        "cosine": [(1 + math.cos(math.pi * each)) / 2 for each in x],
        "1-sqrt": [1 - math.sqrt(each) for each in x],
    }[CUT[name].shape]
    return points[-n - 1] + torch.tensor(left, dtype=torch.float64) @ points[-n - 1 :].diff(dim=0)


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["updates", "profile"])
def test_on_white_updates_the_error_is_the_predicted_one(walk: tuple[Walk, Path], norm: Any) -> None:
    run, folder = walk
    targets = TARGETS | CUT
    assert len(targets) == 20
    found = synthesize_all(folder, list(targets.values()), norm=norm, max_error=None)
    ratios = {}
    for name, each in zip(targets, found, strict=True):
        assert 1e-6 < each.predicted_error < 0.3
        actual = relative_error(each.state_dict()["weight"], truth(run, name), run.weight)
        ratios[name] = actual / each.predicted_error
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


def test_the_norm_of_updates_has_the_least_predicted_error(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    for target in (window(333), tb.methods.power_ema(sigma_rel=0.15), tb.methods.ema(half_life=80.0)):
        updates, profile = (synthesize(folder, target, norm=norm) for norm in ("updates", "profile"))
        assert updates.predicted_error < profile.predicted_error < 20 * updates.predicted_error


def test_the_norm_of_profiles_has_the_published_weights_for_power_functions(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    found = synthesize(folder, "power_ema(sigma_rel=0.08)", norm="profile", at=900)
    gamma = {f"power_{100 * s:02.0f}": tb.methods.power_ema(sigma_rel=s).exponent for s in (0.05, 0.10)}
    weights = {key: weight for key, weight in found.weights.items() if key[1] > 0}
    times = [(float(step), gamma[name]) for name, step in weights]
    expected = combine_powers(times, (900.0, tb.methods.power_ema(sigma_rel=0.08).exponent)).weights
    assert list(weights.values()) == pytest.approx(expected.tolist(), abs=1e-12)
    assert found.weights[None, 0] == 0
    assert len(weights) == 2 * 18


def test_a_step_before_the_last_uses_the_snapshots_up_to_it(walk: tuple[Walk, Path]) -> None:
    run, folder = walk
    found = synthesize(folder, window(200), at=600)
    assert max(step for _, step in found.weights) == 600
    expected = torch.stack(run.points)[401:601].mean(0)
    actual = relative_error(found.state_dict()["weight"], expected, run.points[600])
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_weights_sum_to_one_and_the_average_that_was_recorded_is_found_exactly(walk: tuple[Walk, Path]) -> None:
    run, folder = walk
    found = synthesize(folder, tb.methods.power_ema(sigma_rel=0.05), at=1000)
    assert sum(found.weights.values()) == pytest.approx(1.0, abs=1e-12)
    assert found.weights["power_05", 1000] == pytest.approx(1.0, abs=1e-9)
    assert found.predicted_error < 1e-12
    torch.testing.assert_close(found.state_dict()["weight"], run.average("power_05"), rtol=1e-10, atol=1e-10)


def test_profiles_of_target_and_synthesis_differ_by_the_predicted_error(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    found = synthesize(folder, window(333))
    target, made = found.profiles()
    assert len(target) == len(made) == 1000
    assert float((made - target).norm() / (target - 1).norm()) == pytest.approx(found.predicted_error, rel=1e-6)


# A run that is pulled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        tb.Spring(k=1.0, m1=20.0, m2=40.0),
        tb.Spring(k=1.0, m1=20.0, m2=40.0, c1=5.0, c2=10.0),
        tb.methods.lookahead(k=5, alpha=0.5),
        tb.methods.centred(theta=-0.5, rate=0.05),
        tb.methods.switch_ema(0.9, every=10),
    ],
    ids=lambda m: type(m).__name__,
)
def test_averages_of_a_run_that_is_pulled_are_rebuilt(tmp_path: Path, method: Method) -> None:
    """The average that pulls serves as a basis, too: with it alone, an unrelated one is found within the prediction."""
    run = Walk(method, size=2000, along={"long": tb.methods.ema(half_life=50.0)}, spectators={})
    with run.record(tmp_path, every=10):
        run.steps(300)
    found = synthesize(tmp_path, tb.methods.ema(half_life=50.0), max_error=0.9)
    actual = relative_error(found.state_dict()["weight"], run.average("long"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.06)
    own = synthesize(tmp_path, method, at=290)
    assert own.predicted_error < 1e-9
    assert own.weights["average", 290] == pytest.approx(1.0)


def test_belays_own_average_is_found_at_a_step_without_a_snapshot(tmp_path: Path) -> None:
    spring = tb.Spring(k=1.0, m1=50.0, m2=20.0)
    run = Walk(spring, size=2000)
    recorder = run.record(tmp_path, every=20)
    run.steps(200)
    expected = run.average("average")
    run.steps(7)
    between, points = run.average("average"), run.weight
    run.steps(13)
    recorder.close()
    found = synthesize(tmp_path, spring, at=200)
    torch.testing.assert_close(found.state_dict()["weight"], expected, rtol=1e-9, atol=1e-9)
    late = synthesize(tmp_path, spring, at=207, max_error=0.9)  # the last updates are in no snapshot
    actual = relative_error(late.state_dict()["weight"], between, points)
    assert late.predicted_error > 0.03
    assert actual == pytest.approx(late.predicted_error, rel=0.2)


def test_a_method_that_pulls_and_was_not_part_of_the_run_gets_the_same_updates(tmp_path: Path) -> None:
    """On white noise gradients do not depend on weights: the run with BELAY is the one that is asked for."""
    spring = tb.Spring(k=1.0, m1=60.0, m2=30.0)
    run, other = Walk(size=1000), Walk(spring, size=1000)
    with run.record(tmp_path, every=10):
        run.steps(200)
    other.steps(200)
    with pytest.warns(tb.BelayWarning, match="pulls the weights and was not part of this run"):
        found = synthesize(tmp_path, spring, max_error=0.1)
    actual = relative_error(found.state_dict()["weight"], other.average("average"), other.weight)
    assert found.predicted_error < 0.01
    assert actual == pytest.approx(found.predicted_error, rel=0.1)


def test_a_method_that_depends_on_the_learning_rate_is_known_by_its_history(tmp_path: Path) -> None:
    run = Walk(tb.methods.schedule_free(0.8), size=1500, along={"swa": tb.methods.swa()}, spectators={})
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda k: min(1.0, (k + 1) / 20))
    with run.record(tmp_path, every=10):
        for _ in range(120):
            run.steps(1)
            schedule.step()
    found = synthesize(tmp_path, tb.methods.schedule_free(0.8), at=110)
    assert found.weights["average", 110] == pytest.approx(1.0)
    mean = synthesize(tmp_path, tb.methods.swa(), max_error=0.5)
    actual = relative_error(mean.state_dict()["weight"], run.average("swa"), run.weight)
    assert actual < 3 * mean.predicted_error < 0.6
    with pytest.raises(ValueError, match="depend on the learning rate"):
        synthesize(tmp_path, tb.methods.heavy_ball(0.9))


class Mine:
    """A method of one's own, of which a checkpoint could only tell the name."""

    varies = "step"

    def __init__(self) -> None:
        self.rate = lambda step: 0.2 if step % 3 else 0.05

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, self.rate(step), 1.0, self.rate(step))


class Unsaid(Mine):
    """It does not say when it varies, and is asked at every step."""

    varies = "unsaid"


@pytest.mark.parametrize("kind", [Mine, Unsaid])
def test_a_method_of_ones_own_is_known_by_its_history(tmp_path: Path, kind: type[Mine]) -> None:
    run = Walk(size=1000, spectators={"mine": kind()}, along={"short": tb.methods.ema(0.9)})
    with run.record(tmp_path, every=4, averages=["mine"], weights=True):
        run.steps(80)
    found = synthesize(tmp_path, tb.methods.ema(0.9), max_error=0.5)
    actual = relative_error(found.state_dict()["weight"], run.average("short"), run.weight)
    assert actual == pytest.approx(found.predicted_error, rel=0.1)
    assert {story.method for each in found.folder.snapshots for story in each.told.stories} == {kind.__name__}


# Networks ------------------------------------------------------------------------------------------------------------


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
        assert list(made) == sorted(wanted)
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
    assert set(state) == set(model.state_dict())
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
    assert sorted(len(part.names) for part in found.parts) == [1, 1, 2]
    assert len({part.predicted_error for part in found.parts}) == 3
    wanted, made = belay.average_state_dict("target"), found.state_dict()
    for name in wanted:
        (part,) = [each for each in found.parts if name in each.names]
        actual = relative_error(made[name], wanted[name], model.state_dict()[name])
        assert actual < 10 * part.predicted_error, name


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
    from torchbelay.snapshots import synthesis
    from torchbelay.snapshots.layouts.safetensors import SafetensorsCheckpoint

    monkeypatch.setattr(synthesis, "_CHUNK", 100)
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
    monkeypatch.setattr(synthesis, "_CHUNK", 1000)
    monkeypatch.setattr(synthesis, "_MOST_OPEN", 3)
    assert torch.equal(dict(found.tensors())["weight"], whole)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_target_that_is_predicted_badly_is_refused_with_the_number_and_the_cure(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    with pytest.raises(
        ValueError, match=r"error of ema\(half_life=2.0\) at step 1000 is 1\.\d of .*max_error=0.01: record more"
    ):
        synthesize(folder, tb.methods.ema(half_life=2.0))
    with pytest.raises(ValueError, match=r"choose at=1000, which has snapshots"):
        synthesize(folder, window(100), at=980)
    assert synthesize(folder, tb.methods.ema(half_life=2.0), max_error=2.0).predicted_error > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at": 1001}, "at=1001: the snapshots in .* are of the steps 0 to 1000"),
        ({"at": 0}, "at=0"),
        ({"at": 2.5}, "at=2.5"),
        ({"norm": "l1"}, "norm='l1'"),
        ({"max_error": -1.0}, "max_error=-1.0"),
        ({"max_error": math.nan}, "max_error=nan"),
    ],
)
def test_bad_arguments_are_refused_by_name(walk: tuple[Walk, Path], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        synthesize(walk[1], window(10), **arguments)


def test_a_folder_without_snapshots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no snapshots"):
        synthesize(tmp_path, window(10))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        synthesize(tmp_path / "nothing", window(10))


def test_saving_that_fails_leaves_the_old_file(walk: tuple[Walk, Path], tmp_path: Path, monkeypatch: Any) -> None:
    found = synthesize(walk[1], window(100))
    path = tmp_path / "average.safetensors"
    path.write_text("old")

    def broken() -> Any:
        yield "weight", torch.zeros(6000, dtype=torch.float64)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(found), "tensors", lambda self: broken())
    with pytest.raises(KeyboardInterrupt):
        found.save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_warns_or_depends_on_the_default_dtype(walk: tuple[Walk, Path]) -> None:
    _, folder = walk
    expected = synthesize(folder, window(333))
    torch.set_default_dtype(torch.float16)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = synthesize(folder, window(333))
        assert found.weights == expected.weights
        assert found.state_dict()["weight"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert "window(333) at step 1,000 from 41 snapshots: predicted error" in str(found)


def test_batches_are_those_of_the_helpers() -> None:
    """The training of the tests is the same at every run, so that its numbers are."""
    assert same(batch(3), batch(3))

"""The recorder: what it writes and when, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import torchbelay as tb
from helpers.recorded_runs import Walk, relative_error
from helpers.small import batch, mlp, same, train, with_batchnorm
from torchbelay.snapshots import Recorder, synthesize, window
from torchbelay.snapshots.folder import Folder
from torchbelay.snapshots.opening import open_checkpoint


def attach(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = mlp() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (
        model,
        optimizer,
        tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults(), **options),
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as file:
        return {name: file.read(name) for name in file.names}


# What is written -----------------------------------------------------------------------------------------------------


def test_snapshots_are_the_averages_of_their_steps(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected: dict[tuple[str | None, int], Any] = {(None, 0): start}
    with Recorder(belay, tmp_path, every=4, weights=True):
        for step in range(1, 11):
            train(model, optimizer, 1, first=step)
            if step in (4, 8, 10):
                expected |= {
                    (name, step): belay.average_state_dict(name) for name in ("average", "power_05", "power_10")
                }
                expected[None, step] = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = Folder(tmp_path)
    assert {(each.average, each.step) for each in found.snapshots} == set(expected)
    for each in found.snapshots:
        tensors = read(each.path)
        assert same({name: tensors[name] for name in start}, dict(expected[each.average, each.step]))


def test_only_the_averages_that_were_asked_for_are_recorded(tmp_path: Path) -> None:
    model, optimizer, belay = attach()
    with Recorder(belay, tmp_path, every=3, averages=["power_10"]):
        train(model, optimizer, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000000000.weights.safetensors",
        "000000003.average.power_10.safetensors",
        "000000006.average.power_10.safetensors",
    ]
    metadata = open_checkpoint(tmp_path / "000000003.average.power_10.safetensors").metadata
    assert (metadata["average"], metadata["step"]) == ("power_10", "3")
    assert metadata["method"] == "power_ema(gamma=None, sigma_rel=0.1)"


def test_the_libraries_of_others_read_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer, belay = attach(with_batchnorm())
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 5)
    state = load_file(tmp_path / "000000005.average.average.safetensors")
    with_batchnorm(seed=1).load_state_dict(state, strict=True)
    assert same(state["0.weight"], belay.average_state_dict()["0.weight"])


def test_log_spacing_takes_fewer_snapshots_later(tmp_path: Path) -> None:
    run = Walk(size=3)
    with run.record(tmp_path, every=2, spacing="log") as made:
        run.steps(150)
    gaps = [b - a for a, b in zip(made.recorded[1:-1], made.recorded[2:-1], strict=False)]
    assert gaps[0] == 2
    assert gaps[-1] == 6
    assert gaps == sorted(gaps)
    assert made.recorded == Folder(tmp_path).steps


def test_keep_removes_old_steps_and_never_the_first(tmp_path: Path) -> None:
    run = Walk(size=3)
    with run.record(tmp_path, every=5, keep=3):
        run.steps(40)
    assert Folder(tmp_path).steps == [0, 30, 35, 40]


def test_what_the_disk_will_hold_is_told_before_the_run(tmp_path: Path) -> None:
    model, optimizer, belay = attach(with_batchnorm())
    model[0].bias.requires_grad_(False)
    made = Recorder(belay, tmp_path, every=10)
    promised = made.disk_use(45)
    assert promised == made.bytes_per_snapshot * 5 + made.bytes_per_snapshot // 3
    assert "average, power_05, power_10 every 10 steps; 0.0 MB per snapshot, 0.00 GB for 10,000 steps" in repr(made)
    train(model, optimizer, 45)
    made.close()
    tensors = sum(open_checkpoint(path).nbytes for path in tmp_path.iterdir())
    assert tensors == promised
    assert Recorder(belay, tmp_path, every=10, keep=2).disk_use(45) < promised
    assert Recorder(belay, tmp_path, every=10, spacing="log").disk_use(10**6) < made.disk_use(10**6) / 100


def test_what_is_not_trained_is_written_once(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 10)
    (rest,) = tmp_path.glob("*.rest.*")
    assert rest.name.startswith("000000000.rest.0-")
    assert open_checkpoint(rest).metadata["average"] == "none: what is not trained"
    assert sorted(read(rest)) == ["0.bias", "0.weight"]
    assert sorted(read(tmp_path / "000000010.average.average.safetensors")) == ["2.bias", "2.weight"]
    mlp().load_state_dict(synthesize(tmp_path, tb.methods.ema(0.9)).state_dict(), strict=True)


def test_names_that_no_file_can_have_are_quoted(tmp_path: Path) -> None:
    run = Walk(size=3, spectators={"a/b: ü\n..": tb.methods.swa()})
    with run.record(tmp_path, every=5):
        run.steps(5)
    assert {each.average for each in Folder(tmp_path).snapshots} == {None, "average", "a/b: ü\n.."}


# When ----------------------------------------------------------------------------------------------------------------


def test_record_takes_a_snapshot_now_and_close_takes_the_last(tmp_path: Path) -> None:
    run = Walk(size=3)
    made = run.record(tmp_path, every=10)
    run.steps(3)
    made.record()
    run.steps(4)
    made.close()
    made.close()
    run.steps(20)  # nobody looks any more
    assert Folder(tmp_path).steps == [0, 3, 7]
    assert made.recorded == [0, 3, 7]
    with pytest.raises(RuntimeError, match=r"record\(\) after close\(\)"):
        made.record()


def test_steps_by_hand_are_recorded_too(tmp_path: Path) -> None:
    model = mlp()
    belay = tb.Belay(model, None, tb.methods.ema(0.9))
    with Recorder(belay, tmp_path, every=2):
        for _ in range(5):
            belay.before_step()
            with torch.no_grad():
                model[0].weight += 1
            belay.after_step()
    assert Folder(tmp_path).steps == [0, 2, 4, 5]


def test_an_average_that_was_given_rates_is_not_used(tmp_path: Path) -> None:
    model = mlp(torch.float64)
    belay = tb.Belay(model, None, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    made = Recorder(belay, tmp_path, every=5)

    def update(rate: float | None = None) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        belay.update(rate=rate)

    for _ in range(7):
        update()
    with pytest.warns(tb.BelayWarning, match=r"update\(rate=...\) moves 'average' in a way"):
        update(rate=0.5)
    for _ in range(12):
        update()
    made.close()
    again = Recorder(belay, tmp_path, every=5)  # a resume does not forget it
    for _ in range(5):
        update()
    again.close()
    found = synthesize(tmp_path, window(10), max_error=1.0)
    assert {step for name, step in found.weights if name == "average"} == {5}
    assert {step for name, step in found.weights if name == "power_05"} == {5, 10, 15, 20, 25}


@pytest.mark.parametrize("how", ["change", "strict=False"])
def test_an_average_whose_method_was_changed_is_not_used(tmp_path: Path, how: str) -> None:
    model = mlp(torch.float64)

    def attach(method: tb.Method) -> tb.Belay:
        return tb.Belay(model, None, method, spectators=tb.snapshots.defaults())

    def updates(belay: tb.Belay, count: int) -> None:
        for _ in range(count):
            with torch.no_grad():
                for p in model.parameters():
                    p += torch.randn_like(p)
            belay.update()

    belay = attach(tb.methods.ema(0.9))
    made = Recorder(belay, tmp_path, every=5)
    updates(belay, 7)
    if how == "change":
        belay.change(tb.methods.ema(0.99))
    else:
        made.close()
        state = belay.state_dict()
        belay = attach(tb.methods.ema(0.99))
        with pytest.warns(tb.BelayWarning, match="from now on"):
            belay.load_state_dict(state, strict=False)
        made = Recorder(belay, tmp_path, every=5)
    updates(belay, 8)
    made.close()
    resumed = attach(tb.methods.ema(0.99))
    resumed.load_state_dict(belay.state_dict())
    with Recorder(resumed, tmp_path, every=5):  # a resume does not forget it
        updates(resumed, 10)
    found = synthesize(tmp_path, window(10), max_error=1.0)
    assert {step for name, step in found.weights if name == "average"} <= {0, 5, 7}
    assert {step for name, step in found.weights if name == "power_05"} >= {10, 15, 20, 25}


def test_nothing_is_recorded_before_the_averages_begin(tmp_path: Path) -> None:
    run = Walk(size=3, start=12)
    with run.record(tmp_path, every=5):
        run.steps(20)
    assert Folder(tmp_path).steps == [0, 15, 20]


def test_steps_that_mixed_precision_skips_do_not_count(tmp_path: Path, skipping: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    scaler = GradScaler("cpu", init_scale=4.0)
    expected = {}
    with Recorder(belay, tmp_path, every=3):
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().mean()).backward()
            if step % 4 == 1:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            expected[belay.step] = belay.average_state_dict()["0.weight"]
    found = Folder(tmp_path)
    assert found.steps == [0, 3, 6, 9]
    for each in found.snapshots[1:]:
        assert same(read(each.path)["0.weight"], expected[each.step])


def test_the_count_of_steps_is_read_only_when_a_snapshot_may_be_due(tmp_path: Path, monkeypatch: Any) -> None:
    """Reading may wait for a device: not at every step."""
    from torchbelay.belay.clock import Clock

    run = Walk(tb.methods.ema(0.9), size=3, spectators={})  # its coupling is constant, so that Belay reads no count
    made = run.record(tmp_path, every=10)
    reads = []
    count = Clock.count.fget
    monkeypatch.setattr(Clock, "count", property(lambda self: reads.append(None) or count(self)))
    run.steps(9)
    assert reads == []
    run.steps(1)
    assert reads
    made.close()


def test_several_optimizers_that_step_in_turn_are_recorded_after_the_last(tmp_path: Path) -> None:
    model = mlp(torch.float64)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.05) for i in (0, 2)]
    spectators = {**tb.snapshots.defaults(), "target": tb.methods.ema(half_life=6.0)}
    belay = tb.Belay(model, optimizers, tb.methods.ema(0.9), spectators=spectators)
    with Recorder(belay, tmp_path, every=4, averages=["average", "power_05", "power_10"]) as made:
        for step in range(40):
            model.zero_grad()
            (model(batch(step, torch.float64)) - 1).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert made.recorded == [0, *range(4, 41, 4)]
    found = synthesize(tmp_path, tb.methods.ema(half_life=6.0), max_error=0.2)
    assert not any(each.counts for each in found.folder.snapshots)
    assert len(found.solutions) == 1
    wanted, state = belay.average_state_dict("target"), found.state_dict()
    for name in wanted:
        assert relative_error(state[name], wanted[name], model.state_dict()[name]) < 0.1


def test_an_optimizer_that_steps_less_often_has_its_own_profile(tmp_path: Path) -> None:
    model = nn.Module()
    model.often, model.seldom = (nn.Parameter(torch.zeros(3000, dtype=torch.float64)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
    spectators = {**tb.snapshots.defaults(), "target": tb.methods.ema(half_life=10.0)}
    belay = tb.Belay(model, optimizers, tb.methods.ema(0.9), spectators=spectators)
    generator = torch.Generator().manual_seed(0)
    with Recorder(belay, tmp_path, every=6, averages=["average", "power_05", "power_10"]):
        for step in range(1, 121):
            for i, optimizer in ((1, optimizers[1]), (0, optimizers[0])):
                (p,) = optimizer.param_groups[0]["params"]
                p.grad = torch.randn(3000, dtype=torch.float64, generator=generator)
                if i == 0 or step % 3 == 0:
                    optimizer.step()
    found = synthesize(tmp_path, tb.methods.ema(half_life=10.0), max_error=0.5)
    assert found.folder.snapshots[-1].counts == {"seldom": 40}
    assert len(found.solutions) == 2
    wanted, state = belay.average_state_dict("target"), found.state_dict()
    for solution in found.solutions:
        (name,) = solution.names
        actual = relative_error(state[name], wanted[name], model.state_dict()[name])
        assert actual == pytest.approx(solution.predicted_error, rel=0.08)
    with pytest.raises(ValueError, match=r"at=119 has no snapshot, .* optimizer of 'seldom'"):
        synthesize(tmp_path, tb.methods.ema(half_life=10.0), at=119)


# Refusals and trouble ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, "every=2.5"),
        ({"spacing": "odd"}, "spacing='odd'"),
        ({"keep": 0}, "keep=0"),
        ({"averages": ["none"]}, "averages has 'none', which is no average; choose from average, power_05, power_10"),
        ({"averages": []}, "averages is empty"),
        ({"averages": "average"}, "averages='average' is a text; give a list of names"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_made(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    run = Walk(size=3)
    with pytest.raises((ValueError, TypeError), match=message):
        Recorder(run.belay, tmp_path / "new", **{"every": 5} | options)
    assert not (tmp_path / "new").exists()
    assert run.belay._stepper.observers == ()


def test_what_is_no_belay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is not a Belay"):
        Recorder(mlp(), tmp_path, every=5)  # type: ignore[arg-type]


def test_a_folder_of_another_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    run = Walk(size=3)
    with run.record(tmp_path, every=5):
        run.steps(5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"holds snapshots up to step 5, and this Belay is at step 0: to resume"):
        Walk(size=3).record(tmp_path, every=5)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(NotADirectoryError, match="is a file; give a folder"):
        run.record(tmp_path / "000000005.average.average.safetensors", every=5)


def test_inside_averaged_nothing_is_recorded(tmp_path: Path) -> None:
    run = Walk(size=3)
    made = run.record(tmp_path, every=5)
    run.steps(3)
    with run.belay.averaged(), pytest.raises(RuntimeError, match=r"record\(\) inside averaged\(\)"):
        made.record()
    made.close()
    assert Folder(tmp_path).steps == [0, 3]


def test_after_an_exception_only_what_was_due_is_there(tmp_path: Path) -> None:
    run = Walk(size=3)

    def stopped() -> None:
        with run.record(tmp_path, every=5):
            run.steps(7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert Folder(tmp_path).steps == [0, 5]
    assert run.belay._stepper.observers == ()


def test_two_recorders_of_one_belay_do_not_disturb_each_other(tmp_path: Path) -> None:
    run = Walk(size=3)
    with run.record(tmp_path / "one", every=4), run.record(tmp_path / "two", every=3, averages=["power_10"]):
        run.steps(8)
    assert Folder(tmp_path / "one").steps == [0, 4, 8]
    assert Folder(tmp_path / "two").steps == [0, 3, 6, 8]


def test_a_second_run_is_not_recorded_to_the_folder_of_one_that_goes_on(tmp_path: Path) -> None:
    generator, critic = Walk(size=3), Walk(size=3, seed=1)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    made = generator.record(tmp_path / "run", every=5)
    made.wait()
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=r"is where a Recorder of another Belay writes, .* or close\(\) the other"):
        critic.record(tmp_path / "link", every=5)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    made.close()
    critic.record(tmp_path / "run", every=5).close()  # as for a run that begins again before its first snapshot


def test_snapshots_go_where_the_folder_was_when_the_program_goes_to_another(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Walk(size=3)
    with run.record(Path("run"), every=4):
        run.steps(2)
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.steps(5)
    assert Folder(tmp_path / "run").steps == [0, 4, 7]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_last_step_that_cannot_be_recorded_is_told(tmp_path: Path) -> None:
    run = Walk(size=3)
    made = run.record(tmp_path, every=4)
    run.steps(5)
    with run.belay.averaged(), pytest.warns(tb.BelayWarning, match="step 5, the last one, is not recorded"):
        made.close()
    assert Folder(tmp_path).steps == [0, 4]


def test_under_inference_mode_and_other_defaults_snapshots_are_the_same(tmp_path: Path) -> None:
    run = Walk(size=30)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode(), run.record(tmp_path, every=3) as made:
            pass
        run.steps(3)
        with torch.inference_mode():
            made = run.record(tmp_path, every=3)
            made.record()
        made.close()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(read(tmp_path / "000000003.average.average.safetensors")["weight"], run.average("average"))


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".000000005.average.x.safetensors.12345678.tmp").write_text("half")
    (tmp_path / ".folder.tmp").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    run = Walk(size=3)
    with run.record(tmp_path, every=5):
        run.steps(5)
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_damaged_snapshot_is_left_out_with_a_warning(tmp_path: Path) -> None:
    run = Walk(size=30)
    with run.record(tmp_path, every=5):
        run.steps(20)
    broken = tmp_path / "000000010.average.power_05.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    (tmp_path / "000000015.average.foreign.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with pytest.warns(tb.BelayWarning, match="a snapshot cannot be used") as told:
        found = synthesize(tmp_path, window(10), max_error=2.0)
    assert len(told) == 2
    assert ("power_05", 10) not in found.weights
    assert ("power_05", 5) in found.weights


def test_a_step_costs_nothing_without_a_recorder() -> None:
    run = Walk(size=3)
    assert run.belay._stepper.observers == ()

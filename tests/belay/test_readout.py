"""Averages that are read out: in the model, in exports and in files, wherever weights and averages are at present."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, attached, batch, mlp, same, snapshot, train, values, with_batchnorm

blend, centre, bema = tb.readouts.blend, tb.readouts.centre, tb.readouts.bema
SHORT = tb.Spring.ema(decay=0.5)
READOUTS: dict[str, Any] = {
    "blend": blend(0.65),
    "blend by name": blend({"0.*": 0.25, "*": 0.75}),
    "centre": centre(),
    "bema": bema(bias_power=0.5, lag=2.0),
}
every_readout = pytest.mark.parametrize("readout", READOUTS.values(), ids=READOUTS)
STEPS = 4


class Run:
    """A training of which the three states are known: before it, after it, and its average."""

    def __init__(
        self, method: Any = BELAY, *, name: str = "average", model: nn.Module | None = None, **how: Any
    ) -> None:
        self.model, self.optimizer, self.belay = attached(method, model=model, **{"keep_initial": True, **how})
        self.name, self.w0 = name, values(self.model)
        train(self.model, self.optimizer, STEPS)
        self.w1 = values(self.model)
        saved = self.belay.state_dict()["averages"][name]["weights"]
        self.w2 = {key: t.clone() for key, t in saved.items()}
        self.buffers = {key: t for key, t in self.belay.average_state_dict(name).items() if key not in saved}

    def expected(self, readout: Any, method: Any = BELAY) -> dict[str, Tensor]:
        """The readout in float64, rounded to the weights' dtype."""
        found = {}
        for key, own in self.w1.items():
            if key not in self.w2:
                found[key] = self.buffers[key]
                continue
            wide = torch.complex128 if own.is_complex() else torch.float64
            r0, r1, r2 = readout.shares(key, method, STEPS, 0.01)
            mixed = r0 * self.w0[key].to(wide) + r1 * own.to(wide) + r2 * self.w2[key].to(wide)
            found[key] = mixed.to(own.dtype)
        return found

    def whole(self) -> bool:
        """Whether weights and averages are where they belong, bit for bit."""
        saved = self.belay.state_dict()["averages"][self.name]["weights"]
        return same(values(self.model), self.w1) and same(saved, self.w2)


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for key, t in found.items():
        assert t.dtype == wanted[key].dtype
        eps = torch.finfo(t.dtype).eps if t.is_floating_point() or t.is_complex() else 0
        torch.testing.assert_close(t, wanted[key], rtol=2 * eps, atol=2 * eps, msg=lambda m, key=key: f"{key}: {m}")


# In the model, and exported ------------------------------------------------------------------------------------------


@every_readout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:.*16 bits wide:torchbelay.BelayWarning")
def test_the_model_holds_the_readout_inside_and_its_weights_after(readout: Any, dtype: torch.dtype) -> None:
    run = Run(model=mlp(dtype))
    wanted = run.expected(readout)
    exported = run.belay.average_state_dict(readout=readout)
    close(exported, wanted)
    with run.belay.averaged(readout=readout) as inside:
        assert inside is run.model
        assert same(values(run.model), dict(exported))
        assert same(dict(run.belay.average_state_dict(readout=readout)), dict(exported))
    assert run.whole()
    train(run.model, run.optimizer, 1, first=STEPS)


def test_the_readouts_differ_from_one_another_and_from_weights_and_average() -> None:
    run = Run()
    found = [run.w1, run.w2, *(dict(run.belay.average_state_dict(readout=each)) for each in READOUTS.values())]
    firsts = {float(each["0.weight"].sum()) for each in found}
    assert len(firsts) == len(found)


@every_readout
@pytest.mark.parametrize("name", ["average", "short"])
def test_a_spectator_is_read_out_by_its_own_method(readout: Any, name: str) -> None:
    run = Run(spectators={"short": SHORT}, name=name)
    wanted = run.expected(readout, BELAY if name == "average" else SHORT)
    close(run.belay.average_state_dict(name, readout=readout), wanted)
    with run.belay.averaged(name, readout=readout):
        close(values(run.model), wanted)
    assert run.whole()


def test_the_centre_of_a_spectator_is_the_weights() -> None:
    run = Run(spectators={"short": SHORT}, name="short")
    assert same(dict(run.belay.average_state_dict("short", readout=centre())), run.w1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:.*16 bits wide:torchbelay.BelayWarning")
def test_the_ends_of_a_blend_are_the_average_and_the_weights_bit_for_bit(dtype: torch.dtype) -> None:
    run = Run(model=mlp(dtype))
    average = dict(run.belay.average_state_dict())
    assert same(dict(run.belay.average_state_dict(readout=blend(1.0))), average)
    assert same(dict(run.belay.average_state_dict(readout=blend(0.0))), run.w1)
    for share, wanted in ((1.0, average), (0.0, run.w1)):
        with run.belay.averaged(readout=blend(share)):
            assert same(values(run.model), wanted)
    assert run.whole()


@given(share=st.floats(0, 1), power=st.floats(0, 3), theta=st.floats(-0.9, 3), steps=st.integers(0, 3))
@settings(max_examples=25)
def test_any_readout_is_the_linear_mixture_in_float64(share: float, power: float, theta: float, steps: int) -> None:
    method = tb.methods.centred(theta=theta, rate=0.3)
    model, optimizer, belay = attached(method, model=mlp(torch.float64), keep_initial=True)
    w0 = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tb.BelayWarning)
        train(model, optimizer, steps)
    w1, w2 = values(model), belay.average_state_dict()
    alpha = (10 + max(steps, 1)) ** -power
    for readout, mixed in (
        (blend(share), lambda k: share * w2[k] + (1 - share) * w1[k]),
        (centre(), lambda k: (w1[k] + theta * w2[k]) / (1 + theta)),
        (bema(bias_power=power), lambda k: w2[k] + alpha * (w1[k] - w0[k])),
    ):
        found = belay.average_state_dict(readout=readout)
        for key, t in found.items():
            torch.testing.assert_close(t, mixed(key), rtol=1e-13, atol=1e-13)


def test_a_weight_that_never_moves_is_read_out_bit_for_bit() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, keep_initial=True)
    train(model, optimizer, 3)
    for readout in READOUTS.values():
        assert torch.equal(belay.average_state_dict(readout=readout)["0.weight"], model[0].weight)


def test_a_readout_of_ones_own_is_taken() -> None:
    class Extrapolated:
        def shares(self, name: str, method: tb.Method, step: int, lr: float) -> tuple[float, float, float]:
            seen.append((name, method, step, lr))
            return 0.0, -0.5, 1.5

    seen: list[Any] = []
    run = Run(keep_initial=False)
    with run.belay.averaged(readout=Extrapolated()):
        close(values(run.model), {key: 1.5 * run.w2[key] - 0.5 * run.w1[key] for key in run.w1})
    assert seen == [(key, BELAY, STEPS, 0.01) for key in run.w1]


def test_each_group_has_its_own_learning_rate_and_each_parameter_its_own_method() -> None:
    model = mlp(torch.float64)
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    rules = {"0.weight": tb.methods.heavy_ball(0.5), "0.bias": EMA, "2.weight": tb.methods.heavy_ball(0.5)}
    belay = tb.Belay(model, optimizer, lambda name, p: rules.get(name, BELAY))
    train(model, optimizer, 3)
    w1, w2 = values(model), belay.average_state_dict()
    optimizer.param_groups[0]["lr"] = 0.05  # halves θ of the coming step
    thetas = {"0.weight": -0.25, "0.bias": 0.0, "2.weight": -0.5, "2.bias": 2.0}
    wanted = {key: (w1[key] + theta * w2[key]) / (1 + theta) for key, theta in thetas.items()}
    close(belay.average_state_dict(readout=centre()), wanted)


# What is in the model ------------------------------------------------------------------------------------------------


def complex_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ParameterDict({"c": torch.randn(3, 2, dtype=torch.complex64), "r": torch.randn(4)})


def train_all(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        optimizer.step()


@every_readout
def test_complex_tied_empty_and_transposed_weights(readout: Any) -> None:
    model = complex_model()
    model["turned"], model["empty"] = torch.randn(4, 2).t(), torch.zeros(0, 3)
    model["tied"] = model["r"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY, keep_initial=True)
    w0 = values(model)
    train_all(model, optimizer, STEPS)
    w1, w2 = values(model), belay.average_state_dict()
    exported = belay.average_state_dict(readout=readout)
    for key in w1:
        r0, r1, r2 = readout.shares(key, BELAY, STEPS, 0.1)
        if key == "tied":  # under its first name
            r0, r1, r2 = readout.shares("r", BELAY, STEPS, 0.1)
        torch.testing.assert_close(exported[key], r0 * w0[key] + r1 * w1[key] + r2 * w2[key])
    assert exported["tied"] is exported["r"]
    assert exported["c"].dtype == torch.complex64
    with belay.averaged(readout=readout):
        assert same(values(model), dict(exported))
    assert same(values(model), w1)


def test_frozen_weights_are_part_of_the_readout_as_they_are() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, keep_initial=True)
    train(model, optimizer, 2)
    exported = belay.average_state_dict(readout=bema())
    assert torch.equal(exported["0.weight"], model[0].weight)
    assert not torch.equal(exported["2.weight"], model[2].weight)
    mlp(seed=3).load_state_dict(exported, strict=True)


@every_readout
def test_before_the_averages_begin_the_readout_is_the_model(readout: Any) -> None:
    model, optimizer, belay = attached(BELAY, start=3, keep_initial=True)
    train(model, optimizer, 2)
    own = values(model)
    assert same(dict(belay.average_state_dict(readout=readout)), own)
    with belay.averaged(readout=readout):
        assert same(values(model), own)
    train(model, optimizer, 3, first=2)
    assert not same(dict(belay.average_state_dict(readout=readout)), values(model))


def test_a_wrapped_model_in_inference_mode_is_read_out() -> None:
    run = Run(model=torch.compile(mlp(), backend="eager"), spectators={"short": SHORT})
    plain = {key.removeprefix("_orig_mod."): t for key, t in run.w1.items()}
    with torch.inference_mode():
        exported = run.belay.average_state_dict(readout=blend(0.5))
        with run.belay.averaged(readout=blend(0.5)):
            inside = values(run.model)
    assert list(exported) == list(plain)
    assert same([*inside.values()], [*exported.values()])
    assert not any(t.is_inference() for t in exported.values())
    train(run.model, run.optimizer, 1, first=STEPS)


@every_readout
def test_averages_in_host_memory_are_read_out(readout: Any) -> None:
    run = Run(EMA, device="cpu")
    close(run.belay.average_state_dict(readout=readout), run.expected(readout, EMA))
    with run.belay.averaged(readout=readout):
        close(values(run.model), run.expected(readout, EMA))
    assert run.whole()


@every_readout
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_every_backend_reads_out_alike(readout: Any, impl: str) -> None:
    pytest.importorskip("triton" if impl == "triton" else "torch")
    run = Run(model=nn.Linear(3, 1), impl=impl)
    close(run.belay.average_state_dict(readout=readout), run.expected(readout))
    with run.belay.averaged(readout=readout):
        close(values(run.model), run.expected(readout))
    assert run.whole()


def test_a_model_that_was_cast_or_laid_out_anew_is_read_out_in_its_new_form() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY, keep_initial=True)
    w0 = values(model)
    train_all(model, optimizer, 2)
    model.to(torch.float64, memory_format=torch.channels_last)
    train_all(model, optimizer, 2)
    w1, w2 = values(model), belay.state_dict()["averages"]["average"]["weights"]
    alpha = 14**-0.2
    exported = belay.average_state_dict(readout=bema())
    for key, t in exported.items():
        assert t.dtype == torch.float64
        wanted = w2[key].double() + alpha * (w1[key] - w0[key].double())
        torch.testing.assert_close(t, wanted, rtol=1e-12, atol=1e-12)
    assert exported["weight"].is_contiguous(memory_format=torch.channels_last)
    with belay.averaged(readout=bema()):
        assert same(values(model), dict(exported))
    assert same(values(model), w1)


# Several optimizers, several models, tensors without a model ----------------------------------------------------------


def two_optimizers(**how: Any) -> tuple[nn.Module, list[torch.optim.Optimizer], tb.Belay]:
    model = mlp(torch.float64)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    return model, optimizers, tb.Belay(model, optimizers, BELAY, **{"keep_initial": True, **how})


def step_both(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, *, second: int = 1) -> None:
    """Take steps; the second optimizer takes one at every `second`-th of them."""
    for step in range(1, steps + 1):
        model.zero_grad()
        model(batch(step, torch.float64)).square().mean().backward()
        optimizers[0].step()
        if step % second == 0:
            optimizers[1].step()


def test_with_several_optimizers_each_parameter_has_the_age_that_its_own_counts() -> None:
    model, optimizers, belay = two_optimizers()
    w0 = values(model)
    step_both(model, optimizers, 6, second=3)
    w1, w2 = values(model), belay.average_state_dict()
    read = belay.average_state_dict(readout=bema())
    for key, t in read.items():
        alpha = (10 + (6 if key.startswith("0.") else 2)) ** -0.2
        torch.testing.assert_close(t, w2[key] + alpha * (w1[key] - w0[key]), rtol=0, atol=1e-14)
    with belay.averaged(readout=bema()):
        assert same(values(model), dict(read))
    assert same(values(model), w1)


def test_averages_of_which_one_optimizers_have_begun_are_read_out_as_far_as_they_have() -> None:
    model, optimizers, belay = two_optimizers(start=2)
    step_both(model, optimizers, 4, second=4)
    read, own = belay.average_state_dict(readout=blend(0.5)), values(model)
    assert torch.equal(read["2.weight"], own["2.weight"])
    assert not torch.equal(read["0.weight"], own["0.weight"])
    with pytest.raises(ValueError, match=r"no pattern for the parameter '2.weight'"):
        belay.average_state_dict(readout=blend({"0.*": 1.0}))


def test_several_models_and_tensors_without_a_model_are_read_out() -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 1))]
    tensors = [p for stage in stages for p in stage.parameters()]
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    joined = tb.Belay(stages, optimizer, EMA, keep_initial=True)
    loose = tb.Belay.from_parameters(tensors, optimizer, EMA, keep_initial=True)
    for _ in range(3):
        stages[1](stages[0](torch.ones(2, 3))).square().sum().backward()
        optimizer.step()
    reads = [belay.average_state_dict(readout=bema()) for belay in (joined, loose)]
    assert [*reads[0]] == ["weight", "bias", "0.weight", "0.bias"]
    assert [*reads[1]] == ["0", "1", "2", "3"]
    assert same([*reads[0].values()], [*reads[1].values()])
    with loose.averaged(readout=bema()) as inside:
        assert same([p.detach() for p in inside], [*reads[1].values()])


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_a_block_inside_a_block_of_the_same_readout_is_the_same_block() -> None:
    run = Run()
    with run.belay.averaged(readout=blend(0.5)):
        outer = values(run.model)
        with run.belay.averaged(readout=blend(0.5)):
            assert same(values(run.model), outer)
        assert same(values(run.model), outer)
    assert run.whole()


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(None, blend(0.5)), (blend(0.5), None), (blend(0.5), blend(0.6)), (blend(0.5), centre())],
    ids=repr,
)
def test_another_readout_inside_a_block_is_refused_and_changes_nothing(outer: Any, inner: Any) -> None:
    run = Run()
    with run.belay.averaged(readout=outer):
        held = values(run.model)
        with (
            pytest.raises(
                RuntimeError, match=r"averaged\('average'.*\) inside averaged\('average'.*: leave that block"
            ),
            run.belay.averaged(readout=inner),
        ):
            pytest.fail("the block must not be entered")
        assert same(values(run.model), held)
    assert run.whole()


def test_a_step_inside_is_refused_and_a_readout_that_raises_leaves_everything() -> None:
    run = Run()
    with run.belay.averaged(readout=blend(0.5)), pytest.raises(RuntimeError, match="inside averaged"):
        train(run.model, run.optimizer, 1)
    run.optimizer.zero_grad()
    assert run.whole()

    class Failing:
        def shares(self, *_: Any) -> Any:
            raise OSError("not now")

    for use in (lambda: run.belay.averaged(readout=Failing()).__enter__(), lambda: exported(run, Failing())):
        with pytest.raises(OSError, match="not now"):
            use()
    assert run.whole()
    train(run.model, run.optimizer, 1, first=STEPS)


def exported(run: Run, readout: Any) -> dict[str, Tensor]:
    return dict(run.belay.average_state_dict(run.name, readout=readout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:.*16 bits wide:torchbelay.BelayWarning")
def test_inside_any_block_every_export_and_the_state_are_what_they_are_outside(dtype: torch.dtype) -> None:
    run = Run(model=with_batchnorm().to(dtype), spectators={"short": SHORT})
    readouts = [None, *READOUTS.values()]
    outside = {
        (name, i): dict(run.belay.average_state_dict(name, readout=each))
        for name in ("average", "short")
        for i, each in enumerate(readouts)
    }
    state = snapshot(run.model, run.belay)["belay"]
    tension = run.belay.stats()["tension"]
    for name in ("average", "short"):
        for each in readouts:
            with run.belay.averaged(name, readout=each):
                for (other, i), wanted in outside.items():
                    assert same(dict(run.belay.average_state_dict(other, readout=readouts[i])), wanted)
                assert same(run.belay.state_dict(), state)
                assert run.belay.stats()["tension"] == pytest.approx(tension, rel=1e-12)
    assert run.whole()


def test_another_belay_that_has_its_average_in_the_model_does_not_change_the_readout() -> None:
    run = Run(EMA)
    other = tb.Belay(run.model, run.optimizer, SHORT)
    train(run.model, run.optimizer, 2, first=STEPS)
    outside = exported(run, bema())
    with other.averaged(readout=blend(0.5)):
        assert same(exported(run, bema()), outside)
        with (
            pytest.raises(RuntimeError, match=r"inside averaged.* of another Belay"),
            run.belay.averaged(readout=bema()),
        ):
            pytest.fail("the block must not be entered")
    with other.averaged():
        assert same(exported(run, bema()), outside)


def test_a_model_that_is_converted_inside_keeps_its_weights() -> None:
    run = Run()
    with run.belay.averaged(readout=blend(0.5)):
        run.model.double()
    assert same(values(run.model), {key: t.double() for key, t in run.w1.items()})


def test_weights_that_share_memory_come_back() -> None:
    torch.manual_seed(0)
    memory = torch.randn(6)
    model = nn.ParameterList([nn.Parameter(memory[:4]), nn.Parameter(memory[2:])])
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    before = snapshot(model, belay)
    with belay.averaged(readout=blend(0.5)):
        pass
    assert same(snapshot(model, belay), before)


def test_a_weight_of_another_shape_is_refused_before_anything_changes() -> None:
    run = Run()
    run.model[2].bias.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"'2.bias' has the shape"):
        run.belay.average_state_dict(readout=blend(0.5))
    with pytest.raises(RuntimeError, match=r"'2.bias' has the shape"), run.belay.averaged(readout=blend(0.5)):
        pytest.fail("the block must not be entered")
    assert torch.equal(run.model[0].weight, run.w1["0.weight"])


# Buffers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "average", "ignore"])
@every_readout
def test_buffers_are_those_of_the_average(readout: Any, mode: Any) -> None:
    run = Run(model=with_batchnorm(), buffers=mode)
    average = run.belay.average_state_dict()
    read = run.belay.average_state_dict(readout=readout)
    names = [key for key in average if key.startswith("1.") and key not in run.w2]
    assert same([read[key] for key in names], [average[key] for key in names])
    with run.belay.averaged(readout=readout):
        held = values(run.model)
        assert same([held[key] for key in names], [average[key] for key in names])
    assert run.whole()


@pytest.mark.parametrize("mode", ["copy", "average"])
def test_buffers_that_are_changed_under_a_readout_are_in_an_export_inside_and_dropped_on_leaving(mode: Any) -> None:
    """As update_bn finds them, they are the statistics of that mixture, and not those of the average."""
    run = Run(model=with_batchnorm(), buffers=mode)
    before, state = dict(run.belay.average_state_dict()), snapshot(run.model, run.belay)["belay"]
    with run.belay.averaged(readout=blend(0.5)):
        run.model(batch(7))
        inside = values(run.model)
        assert same(exported(run, blend(0.5)), inside)
        assert same(dict(run.belay.average_state_dict()), before)
        assert same(run.belay.state_dict(), state)
    assert not torch.equal(inside["1.running_mean"], before["1.running_mean"])
    assert run.whole()
    assert same(dict(run.belay.average_state_dict()), before)
    assert same(snapshot(run.model, run.belay)["belay"], state)


def test_statistics_that_update_bn_found_for_the_average_go_with_its_readouts() -> None:
    run = Run(model=with_batchnorm())
    with run.belay.averaged():
        run.model[1].running_mean.fill_(0.25)
        inside = exported(run, blend(0.5))
    assert same(exported(run, blend(0.5)), inside)
    assert torch.equal(inside["1.running_mean"], torch.full((5,), 0.25))


# Files ----------------------------------------------------------------------------------------------------------------


def about(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("readout", "label"),
    [
        (blend(0.65), "blend(share=0.65)"),
        (blend({"0.*": 0, "*": 1}), "blend(share={'0.*': 0.0, '*': 1.0})"),
        (blend(lambda name: 0.5), "blend"),
        (centre(), "centre()"),
        (bema(), "bema()"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_file_has_the_readout_and_names_it(tmp_path: Path, readout: Any, label: str) -> None:
    run = Run()
    run.belay.save_average(tmp_path / "a", readout=readout)
    assert same(load_file(tmp_path / "a"), dict(sorted(exported(run, readout).items())))
    wanted = {"format": "pt", "average": "average", "method": repr(BELAY), "step": str(STEPS), "readout": label}
    assert about(tmp_path / "a") == wanted | {"torchbelay": tb.__version__}
    with run.belay.averaged():
        run.belay.save_average(tmp_path / "inside", readout=readout)
    assert same(load_file(tmp_path / "inside"), load_file(tmp_path / "a"))
    assert about(tmp_path / "inside") == about(tmp_path / "a")


def test_a_file_without_a_readout_does_not_speak_of_one(tmp_path: Path) -> None:
    Run().belay.save_average(tmp_path / "a")
    assert "readout" not in about(tmp_path / "a")


def test_a_full_export_is_the_readout_on_the_host() -> None:
    run = Run()
    assert same(dict(run.belay.average_state_dict(full=True, readout=bema())), exported(run, bema()))


# Refusals -------------------------------------------------------------------------------------------------------------

Use = Callable[[tb.Belay, Any, Path], Any]
USES: dict[str, Use] = {
    "swap": lambda belay, readout, path: belay.averaged(readout=readout).__enter__(),
    "export": lambda belay, readout, path: belay.average_state_dict(readout=readout),
    "save": lambda belay, readout, path: belay.save_average(path / "file", readout=readout),
}
REFUSED: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "no w0": ({}, bema(), ValueError, r"readout=bema\(.*\) needs the weights at which .*Belay with keep_initial=True"),
    "no w0 yet": ({"start": 9}, bema(), ValueError, r"make the Belay with keep_initial=True"),
    "uncalled": ({}, blend, TypeError, r"readout=blend was not called"),
    "a number": ({}, 0.65, TypeError, r"readout=0.65 has no shares\(name, method, step, lr\)"),
    "no pattern": ({}, blend({"0.*": 1.0}), ValueError, r"no pattern for the parameter '2.weight'"),
    "no pattern yet": ({"start": 9}, blend({"0.*": 1.0}), ValueError, r"no pattern for the parameter '2.weight'"),
    "no θ": ({"method": tb.methods.lookahead()}, centre(), ValueError, r"lookahead\(.*pulls at some steps only"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("how", "readout", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_out_is_refused_and_changes_nothing(
    tmp_path: Path, use: Use, how: dict[str, Any], readout: Any, error: type[Exception], message: str
) -> None:
    model, optimizer, belay = attached(**{"method": SWINGING, **how})
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    with pytest.raises(error, match=message):
        use(belay, readout, tmp_path)
    assert same(snapshot(model, belay), before)
    assert not list(tmp_path.iterdir())
    with belay.averaged():  # no block is left open
        pass
    train(model, optimizer, 1, first=2)

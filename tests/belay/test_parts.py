"""One average of a model that several optimizers train: each parameter follows the steps of its own."""

import gc
import weakref
from math import inf, nan
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import torchbelay as tb
from helpers.interrupting import Interruption, every_line, raising_at
from helpers.methods_under_test import METHODS
from helpers.problems import different, everything, same
from helpers.several_optimizers import alternate, evaluate, several, two_optimizers
from helpers.small import BELAY, EMA, SWINGING, attached, mlp, snapshot, train, values, with_batchnorm
from helpers.small import same as deeply_same
from torchbelay import optim
from torchbelay.ops import arithmetic

WATCHING = tb.Spring(k=0.1, m1=inf, m2=1.0, follow="after")


def weights_of(belay: tb.Belay, name: str = "average") -> dict[str, torch.Tensor]:
    return {key: w.clone() for key, w in belay.state_dict()["averages"][name]["weights"].items()}


# Numbers


@pytest.mark.parametrize("how", METHODS)
def test_each_parameter_moves_as_if_its_optimizer_had_a_belay_of_its_own(how: str) -> None:
    model, optimizers, belay = several(METHODS[how](), spectators={"short": EMA})
    other = mlp()
    others = two_optimizers(other)
    apart = [tb.Belay(other, each, METHODS[how](), spectators={"short": EMA}) for each in others]
    alternate(model, optimizers, range(9))
    alternate(other, others, range(9))
    assert (belay.step, [each.step for each in apart]) == (9, [9, 4])
    assert deeply_same(values(model), values(other))
    for name in ("average", "short"):
        expected = weights_of(apart[0], name) | weights_of(apart[1], name)
        assert deeply_same(weights_of(belay, name), expected)
    ages = belay.state_dict()["averages"]["average"]["ages"]
    assert ages == {"0.weight": 9, "2.weight": 9, "0.bias": 4, "2.bias": 4}


def test_muon_beside_adamw_is_one_average_with_the_numbers_of_the_formula() -> None:
    model = mlp(torch.float64)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    belay = tb.Belay(model, [muon, adamw], tb.methods.ema(0.9, warmup="ratio"))
    expected, counts = values(model), dict.fromkeys(values(model), 0)
    for step in range(12):
        evaluate(model, step)
        muon.step()
        stepped = ["0.weight", "2.weight"]
        if step % 3 == 0:
            adamw.step()
            stepped += ["0.bias", "2.bias"]
        for name in stepped:
            counts[name] += 1
            t = counts[name]
            decay = min(0.9, (1 + t) / (10 + t))
            expected[name] = decay * expected[name] + (1 - decay) * model.get_parameter(name).detach()
    assert belay.step == 12
    found = belay.average_state_dict()
    assert counts["0.bias"] == 4
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-13, atol=1e-15), name


def test_a_sequence_of_one_optimizer_is_that_optimizer() -> None:
    model, other = mlp(), mlp()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    belay, plain = tb.Belay(model, optimizers[:1], BELAY), tb.Belay(other, optimizers[1], BELAY)
    train(model, optimizers[0], 3)
    train(other, optimizers[1], 3)
    assert different(everything(belay=belay), everything(belay=plain)) == []
    assert "optimizers" not in belay.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_precision_is_averaged_as_by_one_optimizer(dtype: torch.dtype) -> None:
    model, optimizers, belay = several(EMA, model=mlp(dtype))
    other = mlp(dtype)
    single = torch.optim.SGD(other.parameters(), lr=0.0)
    alone = tb.Belay(other, single, EMA)
    for step in range(4):
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.add_(step)
                q.add_(step)
        for each in (*optimizers, single):
            each.step()  # no gradients: only the averages move
    assert deeply_same(weights_of(belay), {name: weights_of(alone)[name] for name in weights_of(belay)})


def test_frozen_and_complex_weights_are_exported_with_the_rest() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.second = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
            self.empty = nn.Parameter(torch.ones(0, 2))

    model = Odd()
    optimizers = [torch.optim.SGD([model.first], lr=1.0), torch.optim.SGD([model.second, model.empty], lr=1.0)]
    belay = tb.Belay(model, optimizers, tb.Spring.ema(decay=0.5))
    model.first.grad, model.second.grad = torch.ones_like(model.first), torch.ones(3)
    for each in optimizers:
        each.step()
    found = belay.average_state_dict()
    Odd().load_state_dict(found, strict=True)
    assert found["first"].tolist() == [0.5 + 0j] * 2
    assert found["second"].tolist() == [0.5] * 3
    assert found["frozen"].tolist() == [7.0, 7.0]
    assert found["empty"].shape == (0, 2)


def test_a_tied_weight_that_one_of_them_trains_is_averaged_once() -> None:
    model = mlp()
    model.append(nn.Linear(5, 1))
    model[3].weight = model[2].weight
    optimizers = [torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1)]
    optimizers.append(torch.optim.SGD([model[0].bias, model[2].bias, model[3].bias], lr=0.1))
    belay = tb.Belay(model, optimizers, EMA)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    optimizers[0].step()
    found = belay.average_state_dict()
    assert found["2.weight"] is found["3.weight"]
    assert not torch.equal(found["2.weight"], model[2].weight)


@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_optimizers_in_one_pass_give_the_same_numbers_as_torchs_own(impl: str) -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    runs = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model = mlp().to(where if impl == "triton" else "cpu")
        halves = [kind(layer.parameters(), lr=1e-2) for layer in (model[0], model[2])]
        belay = tb.Belay(model, halves, BELAY, impl=impl)
        alternate(model, halves, range(5))
        runs.append((belay, model))
    assert [belay.step for belay, _ in runs] == [5, 5]
    for name, tensor in runs[0][0].average_state_dict().items():
        assert torch.allclose(tensor, runs[1][0].average_state_dict()[name], rtol=1e-5, atol=1e-6)
    assert runs[0][0].state_dict()["optimizers"] == runs[1][0].state_dict()["optimizers"]


# Swaps and exports


def test_inside_averaged_the_model_is_the_whole_average_and_no_optimizer_may_step() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(5))
    own, average = values(model), belay.average_state_dict()
    with belay.averaged() as inside:
        assert inside is model
        assert deeply_same(values(model), dict(average))
        for optimizer in optimizers:
            with pytest.raises(RuntimeError, match="an optimizer step inside averaged"):
                optimizer.step()
        assert deeply_same(values(model), dict(average))
    assert deeply_same(values(model), own)
    alternate(model, optimizers, range(5, 7))
    assert belay.step == 7


@pytest.mark.filterwarnings(
    r"ignore:averaged\(\) without a `with`:torchbelay.BelayWarning"
)  # the line may be before it
def test_an_exception_at_any_line_of_a_swap_leaves_the_parameters_of_all_optimizers_whole() -> None:
    model, optimizers, belay = several(EMA, model=with_batchnorm(), spectators={"short": WATCHING})
    alternate(model, optimizers, range(3))

    def swap() -> None:
        with belay.averaged("short"):
            pass

    before, entered = snapshot(model, belay), []
    for line in every_line(swap):
        with raising_at(line) as place, pytest.raises(Interruption), belay.averaged("short"):
            entered.append(line)
        assert deeply_same(snapshot(model, belay), before), place
        with belay.averaged("short"):
            assert not deeply_same(values(model), before["model"]), place
    assert 0 < len(entered) < line


def test_a_state_saved_inside_averaged_is_that_of_outside() -> None:
    model, optimizers, belay = several(EMA, model=with_batchnorm(), spectators={"short": WATCHING}, start=2)
    alternate(model, optimizers, range(3))  # the second one's have not begun
    for steps in (range(0), range(3, 6)):
        alternate(model, optimizers, steps)
        outside = snapshot(model, belay)["belay"]
        for name in ("average", "short"):
            with belay.averaged(name):
                assert deeply_same(belay.state_dict(), outside)
                with belay.averaged(name), pytest.raises(RuntimeError, match="leave"):
                    belay.reset()


def test_a_saved_average_is_whole(tmp_path: Any) -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(4))
    belay.save_average(tmp_path / "average.safetensors")
    found = load_file(tmp_path / "average.safetensors")
    mlp(seed=1).load_state_dict(found, strict=True)
    assert deeply_same({key: found[key] for key in values(model)}, dict(belay.average_state_dict()))


def test_copy_to_model_and_reset_are_for_all_optimizers() -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(4))
    average = belay.average_state_dict()
    belay.copy_to_model()
    assert deeply_same(values(model), dict(average))
    alternate(model, optimizers, range(4, 6))
    belay.reset()
    assert deeply_same(dict(belay.average_state_dict()), values(model))
    assert set(belay.state_dict()["averages"]["average"]["ages"].values()) == {0}
    assert belay.step == 6


def test_numbers_to_log_are_those_of_all() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(5))
    found = belay.stats()
    average = belay.average_state_dict()
    tension = sum(float((average[n] - w).double().square().sum()) for n, w in values(model).items()) ** 0.5
    assert found["step"] == 5
    assert found["tension"] == pytest.approx(tension, rel=1e-5)
    scale = BELAY.effective_lr_scale
    assert (found["effective_lr"], found["effective_lr/1"]) == (0.05 * scale, 0.01 * scale)
    assert "4 tensors, 26 weights" in repr(belay)
    assert "2 optimizers" in repr(belay)


def test_the_second_optimizers_groups_are_numbered_after_those_of_the_first() -> None:
    model = mlp()
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.2}], lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.3)
    found = tb.Belay(model, [first, second], EMA).stats()
    assert [found[key] for key in ("effective_lr", "effective_lr/1", "effective_lr/2")] == [0.1, 0.2, 0.3]


# Buffers


def test_averaged_buffers_move_with_the_first_optimizers_steps() -> None:
    model, optimizers, belay = several(EMA, model=with_batchnorm(), buffers="average")
    expected = model[1].running_mean.clone()
    for step in range(6):
        evaluate(model, step)
        optimizers[1].step()
        if step % 2:
            optimizers[0].step()
            expected = 0.9 * expected + 0.1 * model[1].running_mean
    found = belay.average_state_dict()["1.running_mean"]
    assert torch.allclose(found, expected, rtol=1e-5)
    assert not torch.allclose(found, model[1].running_mean, rtol=1e-2)


def test_statistics_found_inside_averaged_are_kept_until_the_first_optimizers_next_step() -> None:
    model, optimizers, belay = several(EMA, model=with_batchnorm())
    alternate(model, optimizers, range(3))
    with belay.averaged():
        model[1].running_mean.fill_(5.0)
    evaluate(model, 3)
    optimizers[1].step()
    assert belay.average_state_dict()["1.running_mean"].tolist() == [5.0] * 5
    optimizers[0].step()
    assert torch.equal(belay.average_state_dict()["1.running_mean"], model[1].running_mean)


# Beginning late, skipped and bad steps


def test_each_average_begins_after_its_own_optimizers_steps() -> None:
    model, optimizers, belay = several(EMA, start=3)
    assert "begins after step 3" in repr(belay)
    alternate(model, optimizers, range(4))  # 4 and 2 steps
    found, own = belay.average_state_dict(), values(model)
    assert not torch.equal(found["0.weight"], own["0.weight"])
    assert torch.equal(found["0.bias"], own["0.bias"])
    with belay.averaged():
        assert torch.equal(model[0].bias, own["0.bias"])
        assert torch.equal(model[0].weight, found["0.weight"])
    assert deeply_same(values(model), own)
    alternate(model, optimizers, range(4, 8))
    assert not torch.equal(belay.average_state_dict()["0.bias"], model[0].bias)


def test_weights_that_are_not_finite_are_ignored_by_the_averages_of_their_optimizer_alone() -> None:
    model, optimizers, belay = several(EMA, on_nonfinite="skip")
    alternate(model, optimizers, range(2))
    before = weights_of(belay)
    evaluate(model, 2)
    model[0].bias.grad[0] = nan
    for optimizer in optimizers:
        optimizer.step()
    now = weights_of(belay)
    assert [name for name in now if not same(now[name], before[name])] == ["0.weight", "2.weight"]
    assert [row[0] for row in belay.state_dict()["optimizers"]] == [3, 1]


def test_an_error_about_weights_that_are_not_finite_is_raised_by_the_optimizer_that_made_them() -> None:
    model, optimizers, belay = several(EMA, on_nonfinite="raise")
    evaluate(model, 0)
    model[0].bias.grad[0] = nan
    optimizers[0].step()
    with pytest.raises(FloatingPointError, match=r"parameter '0\.bias' is not finite after the optimizer's step 1"):
        optimizers[1].step()
    assert belay.step == 1


def test_reset_refuses_weights_that_are_not_finite_before_any_average_has_changed() -> None:
    model, optimizers, belay = several(EMA, on_nonfinite="skip")
    alternate(model, optimizers, range(3))
    before = weights_of(belay)
    with torch.no_grad():
        model[2].bias.fill_(nan)  # of the second optimizer
    with pytest.raises(ValueError, match=r"'2\.bias' is not finite"):
        belay.reset()
    assert deeply_same(weights_of(belay), before)


@pytest.mark.usefixtures("skipping")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["ema", "swa", "belay"])
def test_a_scaler_skips_the_step_of_one_optimizer_and_not_of_the_other(how: str, fused: bool) -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused) for layer in (model[0], model[2])]
    belay = tb.Belay(model, optimizers, METHODS[how]())
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        model.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
        if step == 2:
            model[2].weight.grad[0, 0] = inf
            before = weights_of(belay)
        for optimizer in optimizers:
            scaler.step(optimizer)
        if step == 2:
            now = weights_of(belay)
            assert [name for name in now if not same(now[name], before[name])] == ["0.weight", "0.bias"]
        scaler.update()
    assert [row[0] for row in belay.state_dict()["optimizers"]] == [4, 3]


# Refused


def test_what_cannot_be_a_sequence_of_optimizers_is_refused_and_attaches_nothing() -> None:
    model = mlp()
    one, two = two_optimizers(model)
    for given, error, message in (
        ([], ValueError, "optimizer is an empty sequence; give None"),
        ([one, one], ValueError, r"optimizer\[1\], SGD, is in the sequence twice"),
        ({"first": one, "second": two}, TypeError, r"optimizer=dict is neither .* give list\(optimizers\.values\(\)\)"),
        ([one, None], TypeError, r"optimizer\[1\]=NoneType is not a torch\.optim\.Optimizer"),
        ([one, "adam"], TypeError, r"optimizer\[1\]=str is not a torch\.optim\.Optimizer"),
        (
            [one, torch.optim.SGD(mlp().parameters(), lr=0.1)],
            ValueError,
            "of the optimizer's group 0.* not in the model",
        ),
        (
            [one, two, torch.optim.SGD([model[2].weight], lr=0.1)],
            ValueError,
            r"parameter '2\.weight' is in two optimizers, SGD and SGD, .* take it out of the other one",
        ),
    ):
        with pytest.raises(error, match=message):
            tb.Belay(model, given, EMA)  # type: ignore[arg-type]
    assert not one._optimizer_step_pre_hooks
    assert not two._optimizer_step_pre_hooks


def test_a_construction_that_one_of_them_refuses_attaches_to_none() -> None:
    model = mlp()
    optimizers = two_optimizers(model)
    with torch.no_grad():
        model[2].bias.fill_(nan)  # of the second
    with pytest.raises(ValueError, match=r"'2\.bias' is not finite"):
        tb.Belay(model, optimizers, EMA, on_nonfinite="skip")
    assert not any(each._optimizer_step_pre_hooks for each in optimizers)
    with torch.no_grad():
        model[2].bias.zero_()
    tb.Belay(model, optimizers, BELAY, on_nonfinite="skip")  # nothing is left of the first that could pull too


def test_a_generator_of_optimizers_is_used_once() -> None:
    model = mlp()
    optimizers = two_optimizers(model)
    belay = tb.Belay(model, (each for each in optimizers), EMA)
    alternate(model, optimizers, range(2))
    assert belay.step == 2


def test_an_optimizer_without_averaged_parameters_does_no_harm() -> None:
    model = mlp()
    optimizers = two_optimizers(model)
    belay = tb.Belay(model, optimizers, lambda name, p: EMA if p.ndim == 2 else None)
    alternate(model, optimizers, range(4))
    assert list(weights_of(belay)) == ["0.weight", "2.weight"]
    belay.load_state_dict(belay.state_dict())
    with belay.averaged():
        pass
    assert belay.state_dict()["optimizers"] == [[4, 1, ["0.weight", "2.weight"]], [2, 1, []]]
    with pytest.raises(ValueError, match="nothing to average for 'average'"):
        tb.Belay(model, optimizers, lambda name, p: None)


def test_steps_by_hand_are_for_belays_without_an_optimizer() -> None:
    _, _, belay = several(EMA)
    with pytest.raises(RuntimeError, match=r"before_step\(\) is for Belay\(model, None"):
        belay.before_step()


def test_nothing_is_changed_in_the_middle_of_a_step_of_any_of_them() -> None:
    model, optimizers, belay = several(EMA)
    errors = []

    def closure() -> torch.Tensor:
        evaluate(model, 0)
        for call in (belay.reset, belay.copy_to_model, lambda: belay.load_state_dict(belay.state_dict())):
            with pytest.raises(RuntimeError, match=r"inside optimizer\.step\(\)") as caught:
                call()
            errors.append(caught)
        return torch.zeros(())

    optimizers[1].step(closure)
    assert len(errors) == 3


# Life


def test_detach_takes_the_hooks_off_all_of_them() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(2))
    belay.detach()
    before = weights_of(belay)
    alternate(model, optimizers, range(2, 4))
    assert all(not each._optimizer_step_pre_hooks and not each._optimizer_step_post_hooks for each in optimizers)
    assert deeply_same(weights_of(belay), before)


def test_a_belay_that_is_dropped_with_its_optimizers_is_freed_at_once() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(2))
    average = weakref.ref(belay.state_dict()["averages"]["average"]["weights"]["0.weight"])
    gc.collect()
    gc.disable()
    try:
        belay.detach()
        del belay
        assert average() is None
    finally:
        gc.enable()


def test_weights_that_change_without_a_step_of_their_optimizer_are_noticed() -> None:
    model, optimizers, belay = several(EMA)
    evaluate(model, 0)
    optimizers[0].step()
    torch.optim.AdamW([model[0].bias, model[2].bias], lr=1.0).step()  # another one than Belay was given
    with pytest.warns(tb.BelayWarning, match=r"no step was seen.*AdamW\.step\(\)"):
        belay.average_state_dict()


def test_steps_that_only_make_an_optimizers_state_count_for_none() -> None:
    model, optimizers, belay = several(BELAY)
    before = everything(model=model, belay=belay)
    get_optimizer_state_dict(model, optimizers)
    assert different(everything(model=model, belay=belay), before) == []
    alternate(model, optimizers, range(3))
    assert [row[0] for row in belay.state_dict()["optimizers"]] == [3, 1]


def test_a_parameter_that_joins_one_of_them_is_adopted_with_a_warning() -> None:
    model, optimizers, belay = several(EMA)
    alternate(model, optimizers, range(4))
    model.append(nn.Linear(1, 1))
    optimizers[1].add_param_group({"params": list(model[3].parameters())})
    with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added to the optimizer, '3\.weight' first"):
        alternate(model, optimizers, range(4, 6))
    ages = belay.state_dict()["averages"]["average"]["ages"]
    assert (ages["0.weight"], ages["0.bias"], ages["3.weight"]) == (6, 3, 1)


def test_a_step_that_was_stopped_in_the_middle_concerns_its_own_optimizer_alone(monkeypatch: Any) -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(2))
    evaluate(model, 2)
    real = arithmetic.lerp_

    def failing(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(arithmetic, "lerp_", real)
        raise MemoryError

    monkeypatch.setattr(arithmetic, "lerp_", failing)
    with pytest.raises(MemoryError):
        optimizers[1].step()
    optimizers[0].step()  # whole
    with pytest.raises(RuntimeError, match="the last step was stopped"):
        optimizers[1].step()
    with pytest.warns(tb.BelayWarning, match="the last step was stopped"):
        belay.average_state_dict()
    belay.reset()
    optimizers[1].step()


@torch.inference_mode()
def test_a_belay_made_under_inference_mode_takes_steps_outside() -> None:
    with torch.inference_mode(False):
        model = mlp()
    _, optimizers, belay = several(EMA, model=model)
    with torch.inference_mode(False):
        alternate(model, optimizers, range(2))
        assert belay.step == 2


def test_a_model_laid_out_or_cast_between_two_steps_is_followed() -> None:
    model = mlp()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    belay = tb.Belay(model, optimizers, SWINGING)
    alternate(model, optimizers, range(2))
    model.double()
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    alternate(model, optimizers, range(2, 4))
    assert belay.step == 4
    own = values(model)
    with belay.averaged():
        assert model[0].weight.dtype == torch.float64
        assert not torch.equal(model[2].weight, own["2.weight"])
    assert deeply_same(values(model), own)


# Several Belays


def test_a_second_pull_by_one_shared_optimizer_is_refused_and_can_be_replaced() -> None:
    model, optimizers, belay = several(BELAY)
    for again in (optimizers, optimizers[:1], optimizers[1]):
        with pytest.raises(ValueError, match="another Belay pulls parameter"):
            tb.Belay(model, again, BELAY)
    watching = tb.Belay(model, optimizers[1], EMA)
    second = tb.Belay(model, optimizers[1], BELAY, replace=True)
    alternate(model, optimizers, range(2))
    assert (belay.step, second.step, watching.step) == (0, 1, 1)  # the first one was detached, from both


def test_a_later_belay_on_another_optimizer_takes_the_place_for_its_parameters_alone() -> None:
    model, optimizers, belay = several(BELAY)
    alternate(model, optimizers, range(2))
    later = torch.optim.SGD([model[0].bias, model[2].bias], lr=0.1)
    tb.Belay(model, later, BELAY)
    evaluate(model, 2)
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="pulls these parameters now"):
        optimizers[1].step()
    later.step()
    assert belay.step == 3


def test_a_step_of_any_of_them_inside_averaged_of_another_belay_is_refused() -> None:
    model, optimizers, _ = several(BELAY)
    other = tb.Belay(model, optimizers[1], EMA)
    alternate(model, optimizers, range(2))
    with other.averaged():
        with pytest.raises(RuntimeError, match="inside averaged"):
            optimizers[1].step()
        optimizers[0].step()  # the other one has nothing in the place of these weights


def test_the_export_of_one_belay_inside_averaged_of_another_has_the_weights() -> None:
    model, optimizers, belay = several(EMA)
    _, _, _ = attached(EMA)  # some other model's
    watching = tb.Belay(model, optimizers[0], tb.Spring.ema(decay=0.5))
    alternate(model, optimizers, range(4))
    expected = belay.average_state_dict()
    with watching.averaged():
        assert deeply_same(dict(belay.average_state_dict()), dict(expected))

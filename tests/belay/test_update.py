"""Averages that only follow, updated by hand with one call after the weights have changed."""

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbelay as tb
from helpers.methods_under_test import METHODS
from helpers.small import BELAY, EMA, WHERE, mlp, same, snapshot, values, with_batchnorm
from torchbelay.physics.coupling import Coupling, watch


def follows(how: str) -> bool:
    """Whether no step needs more than the weights after it: a = 0, p = 1, q = b, and the method does not say so."""
    if getattr(METHODS[how](), "pulls", False):
        return False
    couplings = [METHODS[how]().coupling(step, 0.1) for step in range(1, 30)]
    return all((c.a, c.p) == (0, 1) and abs(c.q - c.b) < 1e-12 for c in couplings)


FOLLOWING = [how for how in METHODS if follows(how)]
LEADING = [how for how in METHODS if not follows(how)]


def shift(model: nn.Module, by: float) -> None:
    """Change the weights, as some optimizer that torch does not know would."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(by * (i + 1)).mul_(1.01)


# Numbers


@pytest.mark.parametrize("how", FOLLOWING)
@pytest.mark.parametrize(
    ("impl", "options"),
    [("foreach", {}), ("foreach", {"every": 2}), ("foreach", {"start": 2}), ("reference", {}), ("triton", {})],
    ids=str,
)
def test_one_call_after_is_two_calls_around(how: str, impl: str, options: dict[str, Any]) -> None:
    if "every" in options and getattr(METHODS[how](), "rhythm", False):
        options = {}
    runs = []
    for alone in (True, False):
        model = mlp().to(WHERE if impl == "triton" else "cpu")
        belay = tb.Belay(model, None, METHODS[how](), impl=impl, spectators={"short": EMA}, **options)
        for step in range(7):
            if not alone:
                belay.before_step()
            shift(model, 0.1 * step)
            if alone:
                belay.update()
            else:
                belay.after_step()
        runs.append(snapshot(model, belay))
    assert runs[0]["step"] == 7
    if impl != "reference":  # which computes the update, and rounds it
        assert same(*runs)
    one, two = (run["belay"]["averages"]["average"] for run in runs)
    assert one["ages"] == two["ages"]
    assert all(torch.allclose(w, two["weights"][name], rtol=1e-5, atol=1e-6) for name, w in one["weights"].items())


def test_an_ema_is_torchs_own_bit_for_bit() -> None:
    model = mlp()
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torchs.update_parameters(model)  # its first update copies
    belay = tb.Belay(model, None, tb.Spring.ema(decay=0.9))
    for step in range(5):
        shift(model, 0.1 * step)
        torchs.update_parameters(model)
        belay.update()
    assert same(dict(belay.average_state_dict()), dict(torchs.module.state_dict()))


@pytest.mark.parametrize("impl", ["foreach", "reference", "triton"])
@pytest.mark.parametrize("how", FOLLOWING)
def test_a_rate_takes_the_methods_place_for_one_update(how: str, impl: str) -> None:
    model = mlp(torch.float64).to(WHERE if impl == "triton" else "cpu")
    impl = "foreach" if impl == "triton" and WHERE == "cuda" else impl  # no kernels for float64 there
    belay = tb.Belay(model, None, METHODS[how](), impl=impl, spectators={"short": EMA})
    plain = tb.Belay(model, None, METHODS[how](), impl=impl)
    expected, short = values(model), values(model)
    for step, rate in enumerate([None, 0.25, None, 1.0, 0.0, 0.3, None], start=1):
        shift(model, 0.1 * step)
        belay.update() if rate is None else belay.update(rate=rate)
        plain.update()
        share = METHODS[how]().coupling(step, 0.0).b if rate is None else rate
        for name, w in values(model).items():
            expected[name] += share * (w - expected[name])
            short[name] += 0.1 * (w - short[name])
        if rate == 1.0 and impl != "reference":
            assert same(dict(belay.average_state_dict()), values(model))  # a copy, to the last bit
    assert belay.step == plain.step == 7  # it counts, so that warm-ups go on
    for name, tensor in belay.average_state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-12, atol=1e-14)
    for name, tensor in belay.average_state_dict("short").items():
        assert torch.allclose(tensor, short[name], rtol=1e-12, atol=1e-14)


def test_polyak_targets_and_hard_syncs_have_the_numbers_of_the_formula() -> None:
    critic = mlp(torch.float64)
    target = tb.Belay(critic, None, tb.Spring.ema(decay=0.995))
    expected = values(critic)
    for step in range(1, 21):
        shift(critic, 0.1)
        hard = step % 10 == 0
        target.update(rate=1.0 if hard else 0.005)
        tau = 1.0 if hard else 0.005
        expected = {name: (1 - tau) * expected[name] + tau * w for name, w in values(critic).items()}
    for name, tensor in target.average_state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-12)


def test_a_rate_applies_at_a_step_at_which_every_would_rest() -> None:
    model = mlp()
    belay = tb.Belay(model, None, EMA, every=10)
    shift(model, 1.0)
    belay.update(rate=1.0)
    assert same(dict(belay.average_state_dict()), values(model))


def test_averaged_buffers_take_the_rate_too_and_those_of_spectators_do_not() -> None:
    model = with_batchnorm()
    belay = tb.Belay(model, None, EMA, spectators={"short": tb.Spring.ema(decay=0.5)}, buffers="average")
    model[1].running_mean.fill_(8.0)
    belay.update(rate=0.25)
    assert belay.average_state_dict()["1.running_mean"].tolist() == [2.0] * 5
    assert belay.average_state_dict("short")["1.running_mean"].tolist() == [4.0] * 5


def test_before_the_averages_begin_an_update_only_counts() -> None:
    model = mlp()
    belay = tb.Belay(model, None, EMA, start=2)
    for _ in range(2):
        shift(model, 1.0)
        belay.update(rate=0.5)
    assert same(dict(belay.average_state_dict()), values(model))
    began = values(model)
    shift(model, 1.0)
    belay.update()
    assert torch.allclose(belay.average_state_dict()["0.bias"], 0.9 * began["0.bias"] + 0.1 * model[0].bias, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_tensors_of_every_dtype_are_copied_and_followed(dtype: torch.dtype) -> None:
    weight = torch.ones(3, dtype=dtype)
    belay = tb.Belay.from_parameters([("w", weight), ("empty", torch.ones(0, dtype=dtype))], None, EMA)
    weight.mul_(3)
    belay.update(rate=0.5)
    assert belay.average_state_dict()["w"].tolist() == [2.0] * 3
    weight.mul_(3)
    belay.update(rate=1)
    assert same(belay.average_state_dict()["w"], weight)


def test_several_models_and_a_model_that_was_cast_are_followed() -> None:
    model = mlp()
    belay = tb.Belay([model[0], nn.ModuleDict({"last": model[2]})], None, EMA)
    belay.update()
    model.double()
    shift(model, 1.0)
    belay.update(rate=1.0)
    found = belay.average_state_dict()
    assert found["weight"].dtype == torch.float64
    assert torch.allclose(found["last.weight"], model[2].weight, rtol=1e-7)


def test_averages_in_host_memory_are_updated() -> None:
    model = mlp()
    belay = tb.Belay(model, None, EMA, device="cpu")
    shift(model, 1.0)
    belay.update(rate=1.0)
    assert same(dict(belay.average_state_dict()), values(model))


def test_an_update_resumes_bit_for_bit() -> None:
    def made(seed: int) -> tuple[nn.Module, tb.Belay]:
        model = mlp(seed=seed)
        return model, tb.Belay(model, None, METHODS["power_ema"]())

    model, belay = made(0)
    other, again = made(1)
    for step in range(3):
        shift(model, step)
        belay.update(rate=0.1 if step else None)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(belay.state_dict())
    for m, b in ((model, belay), (other, again)):
        shift(m, 2.0)
        b.update()
    assert same(snapshot(other, again), snapshot(model, belay))


# Refused


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("how", LEADING)
def test_an_average_that_does_more_than_follow_is_refused_and_nothing_has_changed(
    how: str, start: int, rate: float | None
) -> None:
    model = mlp()
    belay = tb.Belay(model, None, METHODS[how](), start=start)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"(?s)before_step\(.*after_step\(\)"):
        belay.update(rate=rate)
    assert same(snapshot(model, belay), before)
    belay.before_step(lr=0.1)  # the cure
    belay.after_step()
    assert belay.step == 1


def test_a_spectator_that_lags_behind_is_named() -> None:
    lagged = tb.Spring(k=0.2, m1=inf, m2=1.0)
    belay = tb.Belay(mlp(), None, EMA, spectators={"lagged": lagged})
    with pytest.raises(ValueError, match=r"only follow the weights after a step.*'lagged' by Spring"):
        belay.update()


def test_a_swinging_average_is_refused() -> None:
    belay = tb.Belay(mlp(), None, tb.Spring(k=1.0, m1=inf, m2=20.0, c2=10.0))
    with pytest.raises(ValueError, match="only follow"):
        belay.update()


class Changing:
    """A method that follows for two steps and pulls from the third on, and does not say so."""

    def coupling(self, step: int, lr: float) -> Coupling:
        return watch(0.1) if step < 3 else Coupling(0.1, 0.1, 0.9, 0.1)


def test_a_method_that_pulls_later_is_refused_then_before_anything_moves() -> None:
    model = mlp()
    belay = tb.Belay(model, None, Changing())
    belay.update()
    belay.update()
    before = [p.clone() for p in model.parameters()], belay.average_state_dict()
    with pytest.raises(ValueError, match=r"update\(\) is for averages that only follow"):
        belay.update()
    assert same(([p.clone() for p in model.parameters()], belay.average_state_dict()), before)
    assert belay.step == 2
    belay.update(rate=0.5)  # the method is not asked


class NeedsRate:
    """A method that follows at the learning rate."""

    varies = "lr"

    def coupling(self, step: int, lr: float) -> Coupling:
        return watch(lr)


def test_a_method_that_needs_the_learning_rate_is_told_where_to_give_it() -> None:
    model = mlp()
    belay = tb.Belay(model, None, NeedsRate())
    belay.before_step(lr=0.5)
    belay.after_step()
    with pytest.raises(ValueError, match=r"needs the learning rate: give it as before_step\(lr="):
        belay.update()  # the one from before is not used again
    belay.update(rate=0.5)
    assert belay.step == 2


def test_an_update_goes_with_neither_an_optimizer_nor_a_swap_nor_a_step_under_way() -> None:
    model = mlp()
    attached = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    with pytest.raises(RuntimeError, match=r"update\(\) is for Belay\(model, None"):
        attached.update()
    belay = tb.Belay(model, None, EMA)
    with belay.averaged(), pytest.raises(RuntimeError, match=r"update\(\) inside averaged\('average'\)"):
        belay.update()
    with attached.averaged(), pytest.raises(RuntimeError, match=r"inside averaged.*of another Belay"):
        belay.update()
    belay.before_step()
    with pytest.raises(RuntimeError, match=r"update\(\) between before_step\(\) and after_step\(\)"):
        belay.update()
    belay.after_step()
    belay.update()
    assert belay.step == 2
    belay.detach()
    with pytest.raises(RuntimeError, match=r"update\(\) after detach\(\)"):
        belay.update()


@pytest.mark.parametrize("rate", [-0.1, 1.1, nan, inf, "much", True])
def test_a_rate_that_is_no_share_is_refused(rate: Any) -> None:
    belay = tb.Belay(mlp(), None, EMA)
    said = "not a number" if isinstance(rate, str | bool) else "out of range; it needs rate ≥ 0 and rate ≤ 1"
    with pytest.raises((ValueError, TypeError), match=f"rate={rate!r} is {said}"):
        belay.update(rate=rate)
    assert belay.step == 0


def test_weights_that_are_not_finite_are_not_followed() -> None:
    model = mlp()
    skipping = tb.Belay(model, None, EMA, on_nonfinite="skip")
    raising = tb.Belay(model, None, EMA, on_nonfinite="raise")
    before = skipping.average_state_dict()
    with torch.no_grad():
        model[0].bias[0] = nan
    skipping.update(rate=1.0)
    with pytest.raises(FloatingPointError, match=r"'0\.bias' is not finite"):
        raising.update()
    assert same(dict(skipping.average_state_dict()), dict(before))
    assert (skipping.step, raising.step) == (0, 0)
    with torch.no_grad():
        model[0].bias[0] = 1.0
    raising.update()
    skipping.update()
    assert (skipping.step, raising.step) == (1, 1)


def test_a_belay_that_pulls_is_told_so_even_if_it_was_given_a_rate() -> None:
    belay = tb.Belay(mlp(), None, BELAY)
    with pytest.raises(ValueError, match="'average' by Spring"):
        belay.update(rate=1.0)

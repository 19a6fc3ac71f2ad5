"""A change of mind: another decay, method or set of spectators, from a checkpoint or on a live Belay."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, WHERE, attached, mlp, same, snapshot, train, values, with_batchnorm

SLOW = tb.Spring.ema(decay=0.99)
WARM = tb.methods.ema(0.99, warmup="ratio")


def saved(method: Any = EMA, steps: int = 4, **options: Any) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A model after some steps, copies of its weights, and the state of its Belay."""
    model, optimizer, belay = attached(method, **options)
    train(model, optimizer, steps)
    return model, values(model), copy.deepcopy(belay.state_dict())


def resumed(
    method: Any, weights: dict[str, Any], state: dict[str, Any], says: str | None, **options: Any
) -> tuple[nn.Module, Any, tb.Belay]:
    """A new run that goes on from a state with strict=False; `says` is in its warning, None if there is none."""
    model, optimizer, belay = attached(method, **options)
    model.load_state_dict(weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        belay.load_state_dict(state, strict=False)
    texts = [str(each.message) for each in caught]
    assert (texts == []) if says is None else (len(texts) == 1 and says in texts[0]), texts
    return model, optimizer, belay


def kept(state: dict[str, Any], name: str = "average") -> dict[str, Any]:
    return state["averages"][name]


# A state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [EMA, BELAY, SWINGING, tb.methods.schedule_free(0.9)], ids=str)
def test_a_state_that_fits_is_loaded_as_with_strict_and_without_a_word(method: Any) -> None:
    options = {"spectators": {"swa": tb.methods.swa()}, "buffers": "average"}
    _, weights, state = saved(method, model=with_batchnorm(), **options)
    _, _, belay = resumed(method, weights, state, None, model=with_batchnorm(seed=1), **options)
    assert same(belay.state_dict(), state)


def test_another_decay_goes_on_from_the_values_and_moves_by_its_own_from_then_on() -> None:
    _, weights, state = saved(EMA)
    model, optimizer, belay = resumed(
        SLOW, weights, state, "the method of 'average' was Spring.ema(decay=0.9) and is Spring.ema(decay=0.99) from now"
    )
    assert same(kept(belay.state_dict())["weights"], kept(state)["weights"])
    assert belay.step == 4
    train(model, optimizer, 1, first=4)
    expected = {
        name: torch.lerp(old, model.state_dict()[name], 1 - 0.99) for name, old in kept(state)["weights"].items()
    }
    assert same(kept(belay.state_dict())["weights"], expected)


def test_ages_go_on_so_that_a_warm_up_does_not_begin_again() -> None:
    _, weights, state = saved(tb.methods.ema(0.9, warmup="ratio"), steps=30)
    _, _, belay = resumed(WARM, weights, state, "values and ages go on")
    assert set(kept(belay.state_dict())["ages"].values()) == {30}
    assert belay.decay == 1 - WARM.coupling(30, 0.0).b
    assert belay.decay > 0.7


def test_a_method_that_remembers_begins_without_memory_if_it_has_changed_and_keeps_it_if_not() -> None:
    _, weights, state = saved(tb.methods.schedule_free(0.9))
    assert all(kept(state)["memories"].values())
    _, _, same_one = resumed(tb.methods.schedule_free(0.9), weights, state, None)
    assert kept(same_one.state_dict())["memories"] == kept(state)["memories"]
    _, _, other = resumed(tb.methods.schedule_free(0.8), weights, state, "schedule_free(beta=0.8")
    assert set(map(tuple, kept(other.state_dict())["memories"].values())) == {()}
    model, optimizer, from_ema = resumed(tb.methods.heavy_ball(0.5), *saved(EMA)[1:], "heavy_ball")
    train(model, optimizer, 1, first=4)
    assert from_ema.step == 5


def test_velocities_begin_at_zero_or_go_on() -> None:
    _, weights, state = saved(EMA)
    _, _, belay = resumed(SWINGING, weights, state, "the velocities1 of 'average' begin at 0")
    for kind in ("velocities1", "velocities2"):
        assert all(not v.any() for v in kept(belay.state_dict())[kind].values())
    _, weights, state = saved(SWINGING)
    softer = tb.Spring(k=0.5, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
    _, _, other = resumed(softer, weights, state, "is Spring(k=0.5")
    assert same(kept(other.state_dict())["velocities1"], kept(state)["velocities1"])
    assert any(v.any() for v in kept(state)["velocities1"].values())
    _, _, without = resumed(EMA, weights, state, "is Spring.ema(decay=0.9)")
    assert kept(without.state_dict())["velocities1"] == {}


def test_a_spectator_that_is_new_begins_at_the_checkpoints_average_whatever_the_models_weights_are() -> None:
    _, _, state = saved(EMA)
    _, _, belay = resumed(
        EMA, mlp(seed=9).state_dict(), state, "'long' is new and begins at the checkpoint's 'average', at age 0",
        spectators={"long": WARM},
    )  # fmt: skip
    found = belay.state_dict()
    assert same(kept(found, "long")["weights"], kept(state)["weights"])
    assert set(kept(found, "long")["ages"].values()) == {0}
    assert same(kept(found), kept(state))


def test_spectators_may_go_and_change_and_trade_places_with_the_average() -> None:
    _, weights, state = saved(EMA, spectators={"short": tb.Spring.ema(decay=0.5), "swa": tb.methods.swa()})
    _, _, belay = resumed(
        SLOW, weights, state, "the spectator(s) 'swa' of the checkpoint are dropped", spectators={"short": EMA}
    )
    found = belay.state_dict()
    assert list(found["averages"]) == ["average", "short"]
    assert same(kept(found, "short")["weights"], kept(state, "short")["weights"])


def test_parameters_that_are_new_begin_at_the_weights_and_others_are_dropped() -> None:
    def weights_alone(name: str, p: Tensor) -> Any:
        return EMA if "weight" in name else None

    _, weights, state = saved(weights_alone)
    _, _, belay = resumed(
        EMA, weights, state, "begins at the weights as they are, at age 0, for the parameter(s) '0.bias', '2.bias'"
    )
    found = kept(belay.state_dict())
    assert torch.equal(found["weights"]["0.bias"], weights["0.bias"])
    assert torch.equal(found["weights"]["0.weight"], kept(state)["weights"]["0.weight"])
    assert found["ages"] == {"0.weight": 4, "0.bias": 0, "2.weight": 4, "2.bias": 0}
    _, weights, state = saved(EMA)
    _, _, fewer = resumed(weights_alone, weights, state, "averages the parameter(s) '0.bias', '2.bias' no more")
    assert list(kept(fewer.state_dict())["weights"]) == ["0.weight", "2.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_is_cast(dtype: torch.dtype) -> None:
    _, weights, state = saved(SWINGING)
    _, _, belay = resumed(
        SWINGING, weights, state, f"was kept in torch.float32 and is kept in {dtype} from now on", dtype=dtype
    )
    for kind in ("weights", "velocities1", "velocities2"):
        expected = {name: t.to(dtype) for name, t in kept(state)[kind].items()}
        assert same(kept(belay.state_dict())[kind], expected)


def test_complex_weights_and_an_empty_one() -> None:
    def model() -> nn.Module:
        return nn.ParameterDict({"z": torch.ones(3, dtype=torch.complex64), "none": torch.zeros(0, 2)})

    first, second = model(), model()
    belay = tb.Belay(first, torch.optim.SGD(first.parameters(), lr=0.1), EMA)
    other = tb.Belay(second, torch.optim.SGD(second.parameters(), lr=0.1), SWINGING, dtype=torch.float64)
    with pytest.warns(tb.BelayWarning, match="begin at 0"):
        other.load_state_dict(belay.state_dict(), strict=False)
    assert kept(other.state_dict())["weights"]["z"].dtype == torch.complex128


def test_options_of_the_step_may_change() -> None:
    _, weights, state = saved(EMA, every=2)
    model, optimizer, belay = resumed(EMA, weights, state, "every was 2 and is 1 from now on")
    train(model, optimizer, 1, first=4)
    expected = {
        name: torch.lerp(old, model.state_dict()[name], 1 - 0.9) for name, old in kept(state)["weights"].items()
    }
    assert same(kept(belay.state_dict())["weights"], expected)


def test_an_average_that_has_begun_goes_on_whatever_start_is() -> None:
    _, weights, state = saved(EMA)
    _, _, belay = resumed(EMA, weights, state, "the averages have begun and go on", start=100)
    assert same(kept(belay.state_dict())["weights"], kept(state)["weights"])


def test_an_average_that_had_not_begun_begins_at_the_weights_after_the_next_step() -> None:
    _, weights, state = saved(EMA, start=100)
    model, optimizer, belay = resumed(SLOW, weights, state, "the averages have not begun yet")
    train(model, optimizer, 1, first=4)
    assert same(belay.average_state_dict(), values(model))
    assert belay.state_dict()["began"] == 1


def test_initial_weights_go_along_or_are_taken_to_be_those_of_the_average() -> None:
    _, weights, state = saved(EMA, keep_initial=True)
    w0 = kept(state)["initial"]
    _, _, belay = resumed(
        tb.methods.swa(), weights, state, "is swa(", keep_initial=True, dtype=torch.float64, spectators={"new": EMA}
    )
    assert same(kept(belay.state_dict())["initial"], {name: t.double() for name, t in w0.items()})
    _, _, without = resumed(EMA, weights, state, "keep_initial was True and is False from now on")
    assert "initial" not in kept(without.state_dict())
    _, weights, state = saved(EMA)
    _, _, added = resumed(
        EMA, weights, state, "the initial weights of '0.bias', '0.weight', '2.bias', '2.weight' are taken to be those",
        keep_initial=True,
    )  # fmt: skip
    assert same(kept(added.state_dict())["initial"], kept(state)["weights"])


# Buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["copy", "average", "ignore"])
@pytest.mark.parametrize("now", ["copy", "average", "ignore"])
def test_buffers_that_are_kept_in_another_way_begin_as_the_model_has_them(before: Any, now: Any) -> None:
    _, weights, state = saved(EMA, model=with_batchnorm(), buffers=before)
    says = None if before == now else f"buffers was {before!r} and is {now!r} from now on"
    _, _, belay = resumed(EMA, weights, state, says, model=with_batchnorm(seed=1), buffers=now)
    if before == now:
        assert same(belay.state_dict(), state)
    else:
        name = "1.running_mean"
        assert torch.equal(belay.average_state_dict()[name], weights[name])


def test_averaged_buffers_go_on_with_another_method_at_their_ages() -> None:
    _, weights, state = saved(EMA, model=with_batchnorm(), buffers="average")
    _, _, belay = resumed(
        WARM, weights, state, "the method of 'average' was", model=with_batchnorm(seed=1), buffers="average",
        spectators={"new": EMA},
    )  # fmt: skip
    found = belay.state_dict()
    assert same(kept(found)["buffers"], kept(state)["buffers"])
    assert [row[2] for row in kept(found)["own_buffers"]] == [4, 4]
    assert same(kept(found, "new")["buffers"], kept(state)["buffers"])
    assert [row[2] for row in kept(found, "new")["own_buffers"]] == [0, 0]


def test_statistics_that_update_bn_left_go_along() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    train(model, optimizer, 2)
    with belay.averaged():
        model[1].running_mean.fill_(0.25)
    state = copy.deepcopy(belay.state_dict())
    _, _, other = resumed(SLOW, values(model), state, "is Spring.ema(decay=0.99)", model=with_batchnorm(seed=1))
    assert torch.equal(other.average_state_dict()["1.running_mean"], torch.full((5,), 0.25))


def test_a_buffer_that_is_new_or_has_another_shape_begins_as_the_model_has_it() -> None:
    _, weights, state = saved(EMA, model=with_batchnorm(), buffers="average")
    del kept(state)["buffers"]["1.running_var"]
    kept(state)["buffers"]["1.running_mean"] = torch.zeros(2)
    kept(state)["own_buffers"] = [row for row in kept(state)["own_buffers"] if row[0] != "1.running_var"]
    _, _, belay = resumed(
        EMA, weights, state, "the buffer(s) '1.running_mean', '1.running_var' of 'average' begin as the model has them",
        model=with_batchnorm(seed=1), buffers="average",
    )  # fmt: skip
    assert torch.equal(belay.average_state_dict()["1.running_mean"], weights["1.running_mean"])


# What is refused -----------------------------------------------------------------------------------------------------


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def without(*path: str) -> Callable[[dict[str, Any]], Any]:
    def damage(state: dict[str, Any]) -> Any:
        at = state
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        return state

    return damage


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a state": (lambda state: {"weights": 1}, "not the state of a Belay"),
    "a list": (lambda state: [], "not the state of a Belay"),
    "no averages": (without("averages"), "damaged"),
    "no main average": (without("averages", "average"), "damaged"),
    "no weights": (without("averages", "average", "weights"), "damaged"),
    "no step": (without("step"), "damaged"),
    "no options": (without("options"), "damaged"),
    "an age too high": (lambda state: state["averages"]["average"]["ages"].update({"0.bias": 99}) or state, "damaged"),
    "weights that are none": (
        lambda state: state["averages"]["average"]["weights"].update({"0.bias": 3}) or state,
        "damaged",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    _, _, state = saved(EMA)
    model, optimizer, belay = attached(SLOW, spectators={"new": EMA})
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=message):
        belay.load_state_dict(damage(state), strict=False)
    assert same(snapshot(model, belay), before)


def test_other_shapes_are_refused_and_change_nothing() -> None:
    _, _, state = saved(EMA)
    model, _, belay = attached(SLOW, model=wider())
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"shape of '0.weight' in average 'average' differs: \(5, 3\)"):
        belay.load_state_dict(state, strict=False)
    assert same(snapshot(model, belay), before)


def test_a_warning_that_is_an_error_comes_before_anything_changes() -> None:
    _, _, state = saved(EMA)
    model, optimizer, belay = attached(SLOW)
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(tb.BelayWarning, match="from now on"):
            belay.load_state_dict(state, strict=False)
    assert same(snapshot(model, belay), before)


def test_the_default_stays_strict_and_names_this_way_out() -> None:
    _, _, state = saved(EMA)
    _, _, belay = attached(SLOW)
    with pytest.raises(ValueError, match=r"method of '0.weight' .* differs.*strict=False"):
        belay.load_state_dict(state)
    message = r"^this Belay has the spectator 'new', and the checkpoint has not; .*strict=False"
    with pytest.raises(ValueError, match=message):
        attached(EMA, spectators={"new": EMA})[2].load_state_dict(state)
    _, _, state = saved(EMA, spectators={"old": EMA})
    message = r"^the checkpoint has the spectator 'old', and this Belay has not; .*strict=False"
    with pytest.raises(ValueError, match=message):
        attached(EMA)[2].load_state_dict(state)


def test_it_is_refused_inside_the_block_and_works_under_inference_mode() -> None:
    _, _, state = saved(EMA)
    model, optimizer, belay = attached(SLOW)
    with belay.averaged(), pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside averaged"):
        belay.load_state_dict(state, strict=False)
    with torch.inference_mode(), pytest.warns(tb.BelayWarning):
        belay.load_state_dict(state, strict=False)
    train(model, optimizer, 2)
    assert belay.step == 6


# A live one ----------------------------------------------------------------------------------------------------------

METHODS = {
    "ema": SLOW,
    "belay": BELAY,
    "swinging": SWINGING,
    "swa": tb.methods.swa(),
    "warm": WARM,
    "schedule-free": tb.methods.schedule_free(0.9),
    "by parameter": lambda name, p: EMA if "weight" in name else tb.methods.heavy_ball(0.9),
}


@pytest.mark.parametrize("new", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("old", METHODS.values(), ids=METHODS)
def test_a_live_change_is_the_change_by_way_of_a_checkpoint(old: Any, new: Any) -> None:
    options = {"spectators": {"short": EMA}, "buffers": "average"}
    model, optimizer, belay = attached(old, model=with_batchnorm(), **options)
    train(model, optimizer, 3)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), belay.state_dict()])
    tensors = [belay.state_dict()["averages"]["average"]["weights"]]
    belay.change(new)
    after = belay.state_dict()["averages"]["average"]["weights"]
    assert all(after[name].data_ptr() == t.data_ptr() for name, t in tensors[0].items())  # the same memory
    assert belay.step == 3
    other, other_optimizer, other_belay = attached(new, model=with_batchnorm(seed=1), **options)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other_belay.load_state_dict(saved[2], strict=False)
    if old is not new:  # then a memory would go on by way of the checkpoint
        assert same(belay.state_dict(), other_belay.state_dict())
        train(model, optimizer, 4, first=3)
        train(other, other_optimizer, 4, first=3)
        assert same(snapshot(model, belay), snapshot(other, other_belay))


def test_a_spectator_is_changed_by_its_name_and_the_others_stay() -> None:
    model, optimizer, belay = attached(BELAY, spectators={"short": tb.Spring.ema(decay=0.5)})
    train(model, optimizer, 3)
    before = copy.deepcopy(belay.state_dict())
    belay.change(SLOW, "short")
    found = belay.state_dict()
    assert same(kept(found), kept(before))
    assert set(kept(found, "short")["methods"].values()) == {"Spring.ema(decay=0.99)"}
    train(model, optimizer, 1, first=3)
    expected = torch.lerp(kept(before, "short")["weights"]["0.bias"], model[0].bias.detach(), 1 - 0.99)
    assert torch.equal(belay.average_state_dict("short")["0.bias"], expected)


def test_before_the_averages_begin_they_will_begin_with_the_new_method() -> None:
    model, optimizer, belay = attached(EMA, start=2)
    train(model, optimizer, 1)
    belay.change(tb.methods.swa())
    train(model, optimizer, 3, first=1)
    assert belay.decay == 0.5
    assert belay.regime == "swa"


def test_parameters_come_and_go_by_the_new_rule() -> None:
    model, optimizer, belay = attached(lambda name, p: EMA if "weight" in name else None)
    train(model, optimizer, 2)
    belay.change(lambda name, p: EMA if name.startswith("0.") else None)
    assert kept(belay.state_dict())["ages"] == {"0.weight": 2, "0.bias": 0}
    assert torch.equal(kept(belay.state_dict())["weights"]["0.bias"], model[0].bias)
    train(model, optimizer, 1, first=2)
    assert belay.step == 3


def test_initial_weights_stay_while_an_average_has_the_parameter() -> None:
    model, optimizer, belay = attached(EMA, keep_initial=True, spectators={"short": EMA})
    w0 = copy.deepcopy(kept(belay.state_dict())["initial"])
    train(model, optimizer, 2)

    def weights_alone(name: str, p: Tensor) -> Any:
        return SLOW if "weight" in name else None

    belay.change(weights_alone)
    found = belay.state_dict()
    assert same(kept(found)["initial"] | kept(found, "short")["initial"], {name: w0[name] for name in (
        "0.weight", "2.weight", "0.bias", "2.bias")})  # fmt: skip
    belay.change(weights_alone, "short")
    belay.change(EMA)  # no average had the biases for a moment: theirs begin again at the weights
    assert same(kept(belay.state_dict())["initial"]["0.bias"], model[0].bias.detach())
    assert same(kept(belay.state_dict())["initial"]["0.weight"], w0["0.weight"])


def test_what_somebody_holds_follows_a_change() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    train(model, optimizer, 2)
    held, tensors = belay.module(), belay.tensors()
    memory = held[0].weight.data_ptr()
    belay.change(lambda name, p: tb.methods.swa() if name != "3.bias" else None)
    assert held[0].weight.data_ptr() == memory
    assert "3.bias" not in tensors
    train(model, optimizer, 2, first=2)
    assert same(values(held), dict(belay.average_state_dict()))
    state = copy.deepcopy(belay.state_dict())
    train(model, optimizer, 1, first=4)
    belay.change(EMA)
    with pytest.warns(tb.BelayWarning, match="from now on"):
        belay.load_state_dict(state, strict=False)
    assert same(values(held), dict(belay.average_state_dict()))


def test_late_parameters_keep_their_own_ages_and_memories_apart() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 1, first=3)
    belay.change(tb.methods.heavy_ball(0.5))
    train(model, optimizer, 2, first=4)
    memories = kept(belay.state_dict())["memories"]
    assert memories["0.weight"][0] == 6
    assert memories["2.weight"][0] == 3


CANNOT: dict[str, tuple[Callable[[tb.Belay], object], type[Exception], str]] = {
    "no method": (lambda belay: belay.change(3), TypeError, "neither an averaging method"),
    "uncalled": (lambda belay: belay.change(tb.Spring.ema), TypeError, "was not called"),
    "unknown": (lambda belay: belay.change(EMA, "long"), ValueError, "name='long' is no average"),
    "a spectator that pulls": (lambda belay: belay.change(BELAY, "short"), ValueError, "spectators only watch"),
    "nothing": (lambda belay: belay.change(lambda name, p: None), ValueError, "nothing to average for 'average'"),
    "a bad one": (lambda belay: belay.change(lambda name, p: 3), TypeError, "has no coupling"),
    "unstable": (
        lambda belay: belay.change(tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=0.01, c2=0.02)),
        ValueError,
        "unstable",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CANNOT.values(), ids=CANNOT)
@pytest.mark.filterwarnings("ignore::torchbelay.UnstableSpringWarning")
def test_what_cannot_be_is_refused_and_changes_nothing(
    call: Callable[[tb.Belay], object], error: type[Exception], message: str
) -> None:
    model, optimizer, belay = attached(EMA, spectators={"short": EMA})
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    with pytest.raises(error, match=message):
        call(belay)
    assert same(snapshot(model, belay), before)
    plain, plain_optimizer, plain_belay = attached(EMA, spectators={"short": EMA})
    train(plain, plain_optimizer, 4)
    train(model, optimizer, 2, first=2)
    assert same(snapshot(model, belay), snapshot(plain, plain_belay))


def test_it_is_refused_inside_the_block_inside_a_step_and_with_a_second_pull() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 1)
    with belay.averaged(), pytest.raises(RuntimeError, match=r"change\(\) inside averaged"):
        belay.change(SLOW)

    def closure() -> Tensor:
        with pytest.raises(RuntimeError, match=r"change\(\) inside optimizer.step"):
            belay.change(SLOW)
        return next(model.parameters()).sum()

    optimizer.step(closure)
    tb.Belay(model, optimizer, BELAY)
    with pytest.raises(ValueError, match=r"another Belay pulls parameter '0\.weight' already"):
        belay.change(BELAY)
    belay.change(SLOW)


def test_a_pull_that_comes_by_a_change_is_warned_of_as_at_construction() -> None:
    _, _, belay = attached(EMA, model=mlp(torch.bfloat16))
    with pytest.warns(tb.BelayWarning, match="16 bits wide"):
        belay.change(BELAY)


def test_an_optimizer_that_takes_averages_along_follows_the_change() -> None:
    def made(kind: Any, impl: str) -> tuple[nn.Module, Any, tb.Belay]:
        model = mlp().to(WHERE)
        optimizer = kind(model.parameters(), lr=1e-2)
        return model, optimizer, tb.Belay(model, optimizer, EMA, impl=impl)

    runs = [made(tb.optim.AdamW, "triton"), made(torch.optim.AdamW, "reference")]
    for model, optimizer, belay in runs:
        train(model, optimizer, 2)
        belay.change(BELAY)
        train(model, optimizer, 2, first=2)
        belay.change(tb.methods.swa())
        train(model, optimizer, 2, first=4)
    assert "in one pass" in repr(runs[0][2])
    for name, t in runs[1][2].average_state_dict().items():
        torch.testing.assert_close(runs[0][2].average_state_dict()[name], t, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"every": 2}, {"on_nonfinite": "raise"}], ids=str)
def test_a_change_under_every_option_is_that_of_a_checkpoint(options: dict[str, Any]) -> None:
    model, optimizer, belay = attached(EMA, **options)
    train(model, optimizer, 3)
    state = copy.deepcopy(belay.state_dict())
    belay.change(SLOW)
    other, other_optimizer, other_belay = attached(SLOW, **options)
    train(other, other_optimizer, 3)
    with pytest.warns(tb.BelayWarning, match="from now on"):
        other_belay.load_state_dict(state, strict=False)
    assert same(belay.state_dict(), other_belay.state_dict())
    train(model, optimizer, 3, first=3)
    train(other, other_optimizer, 3, first=3)
    assert same(snapshot(model, belay), snapshot(other, other_belay))


def test_it_works_after_detach_under_inference_mode_and_with_triton() -> None:
    model, optimizer, belay = attached(EMA, impl="triton")
    train(model, optimizer, 2)
    with torch.inference_mode():
        belay.change(SWINGING)
    train(model, optimizer, 2, first=2)
    plain, plain_optimizer, plain_belay = attached(EMA)
    train(plain, plain_optimizer, 2)
    plain_belay.change(SWINGING)
    train(plain, plain_optimizer, 2, first=2)
    for name, t in plain_belay.average_state_dict().items():
        torch.testing.assert_close(belay.average_state_dict()[name].cpu(), t, rtol=1e-5, atol=1e-6)
    belay.detach()
    belay.change(SLOW)
    assert belay.decay == pytest.approx(0.99)

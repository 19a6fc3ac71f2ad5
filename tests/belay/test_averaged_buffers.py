"""Buffers with `buffers="average"`: their own rule, dtype, device and age, and whatever a model does to its buffers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import EMA, Still, same, snapshot, with_batchnorm


class Model(nn.Module):
    """A weight, a buffer with statistics, and a count."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
        self.register_buffer("mean", torch.zeros(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(0))


def made(method: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, Still, tb.Belay]:
    model = Model() if model is None else model
    optimizer = Still(model.parameters(), lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, method, buffers="average", **options)


def kept(belay: tb.Belay, name: str = "mean", average: str = "average") -> Tensor:
    """The average of a buffer as Belay keeps it, in its own dtype."""
    return belay.state_dict()["averages"][average]["buffers"][name]


# dtype --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_statistics_at_decay_9999_move(dtype: torch.dtype) -> None:
    model, optimizer, belay = made(tb.methods.ema(0.9999), Model(dtype))
    model.mean.fill_(1.0)
    for _ in range(2000):
        optimizer.step()
    assert kept(belay).dtype == torch.float32
    torch.testing.assert_close(kept(belay), torch.full((3,), 1 - 0.9999**2000), rtol=1e-3, atol=0)
    assert belay.average_state_dict()["mean"].dtype == dtype
    assert torch.equal(belay.average_state_dict()["mean"], kept(belay).to(dtype))


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.complex64, None, torch.complex64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.int32, torch.float64, torch.int32),
        (torch.bool, None, torch.bool),
    ],
    ids=str,
)
def test_the_dtype_is_that_of_an_average(own: torch.dtype, asked: torch.dtype | None, expected: torch.dtype) -> None:
    model = Model()
    model.mean = torch.zeros(3, dtype=own)
    model, optimizer, belay = made(tb.methods.ema(0.5), model, dtype=asked)
    model.mean.fill_(1)
    optimizer.step()
    assert kept(belay).dtype == expected
    assert bool((kept(belay) == (0.5 if own.is_floating_point or own.is_complex else 1)).all())
    with belay.averaged():
        assert model.mean.dtype == own
        assert torch.equal(model.mean, kept(belay).to(own))
    belay.copy_to_model()
    assert torch.equal(model.mean, kept(belay).to(own))


def test_statistics_that_update_bn_wrote_in_16_bits_go_on_in_32() -> None:
    model, optimizer, belay = made(tb.methods.ema(0.9999), Model(torch.bfloat16))
    with belay.averaged():
        model.mean.fill_(1.0)
    assert kept(belay).dtype == torch.float32
    for _ in range(100):
        optimizer.step()
    torch.testing.assert_close(kept(belay), torch.full((3,), 0.9999**100), rtol=1e-5, atol=0)


def test_a_model_that_is_converted_costs_no_digits() -> None:
    model, optimizer, belay = made(tb.methods.ema(0.9), Model(torch.float64))
    model.mean.fill_(1 / 3)
    optimizer.step()
    before = kept(belay).clone()
    model.half()
    assert kept(belay).dtype == torch.float64
    assert torch.equal(kept(belay), before)


# Rules ----------------------------------------------------------------------------------------------------------------


def test_each_buffer_moves_by_the_rule_of_its_own_name() -> None:
    model = Model()
    model.register_buffer("slow", torch.zeros(1))
    model.register_buffer("none", torch.zeros(1))
    rates = {"weight": tb.Spring(k=1.0, m1=10.0, m2=20.0), "mean": tb.methods.ema(0.5), "slow": tb.methods.ema(0.75)}
    asked: list[str] = []

    def rule(name: str, tensor: Tensor) -> Any:
        asked.append(name)
        return rates.get(name)

    model, optimizer, belay = made(rule, model, spectators={"first": tb.methods.ema(0.25)})
    for buffer in (model.mean, model.slow, model.none, model.count):
        buffer.fill_(1)
    for _ in range(2):
        optimizer.step()
    found = {name: kept(belay, name).max().item() for name in ("mean", "slow", "none", "count")}
    assert found == {"mean": 0.75, "slow": 1 - 0.75**2, "none": 1.0, "count": 1}
    assert kept(belay, average="first").max().item() == 1 - 0.25**2
    assert "count" not in asked  # integers are counted, not averaged


def test_the_pull_of_a_method_never_touches_a_buffer() -> None:
    model, optimizer, belay = made(tb.methods.lookahead(k=2, alpha=0.5))
    model.mean.fill_(1.0)
    for _ in range(4):
        optimizer.step()
    assert bool((model.mean == 1).all())
    assert bool((kept(belay) == 0.75).all())  # at every second step by half


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("bad", [KeyError("mean"), "no method", type(EMA)], ids=str)
def test_a_rule_that_fails_for_a_buffer_fails_before_anything_is_attached(start: int, bad: Any) -> None:
    def rule(name: str, tensor: Tensor) -> Any:
        if name == "mean" and isinstance(bad, Exception):
            raise bad
        return bad if name == "mean" else EMA

    model = Model()
    optimizer = Still(model.parameters())
    with pytest.raises((KeyError, TypeError)):
        tb.Belay(model, optimizer, rule, buffers="average", start=start)
    assert not optimizer._optimizer_step_pre_hooks


def account(step: Callable[[int], float], values: list[float]) -> float:
    """The average of numbers by a rate for each age, in float64."""
    found = 0.0
    for age, value in enumerate(values, 1):
        found += step(age) * (value - found)
    return found


class Odd:
    """A method that does not say when it varies."""

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, 1 / step, 1.0, 1 / step)


VARYING: dict[str, tuple[Any, Callable[[int], float]]] = {
    "swa": (tb.methods.swa(), lambda age: 1 / age),
    "warm-up": (tb.methods.ema(0.999, warmup="ratio"), lambda age: max(0.001, 9 / (10 + age))),
    "power": (tb.methods.power_ema(gamma=1.0), lambda age: 1 - (1 - 1 / age) ** 2),
    "schedule-free": (tb.methods.schedule_free(0.9), lambda age: 1 / age),
    "of no known rhythm": (Odd(), lambda age: 1 / age),
}


@pytest.mark.parametrize(("method", "rate"), VARYING.values(), ids=VARYING)
@pytest.mark.parametrize("constant_weights", [False, True])
def test_rates_that_vary_go_by_the_age_of_the_buffer(
    method: Any, rate: Callable[[int], float], constant_weights: bool
) -> None:
    """A second buffer comes three steps later. The weights' own method may be constant."""
    model, optimizer, belay = made(lambda name, t: EMA if constant_weights and name == "weight" else method)
    for value in range(1, 7):
        model.mean.fill_(value)
        if value == 4:
            model.register_buffer("late", torch.zeros(1))
        if value >= 4:
            model.late.fill_(value)
        optimizer.step()
    assert kept(belay)[0].item() == pytest.approx(account(rate, [1, 2, 3, 4, 5, 6]), rel=1e-6)
    start = account(rate, [4, 5, 6]) if rate(1) == 1 else 4 + account(rate, [0, 1, 2])
    assert kept(belay, "late").item() == pytest.approx(start, rel=1e-6)


@pytest.mark.parametrize(("method", "rate"), VARYING.values(), ids=VARYING)
def test_ages_and_memories_of_buffers_are_resumed(method: Any, rate: Callable[[int], float]) -> None:
    runs = [made(lambda name, t: EMA if name == "weight" else method) for _ in range(2)]

    def go(run: int, values: range) -> None:
        model, optimizer, _ = runs[run]
        for value in values:
            optimizer.param_groups[0]["lr"] = 0.1 / value
            model.mean.fill_(value)
            optimizer.step()

    go(0, range(1, 4))
    runs[1][0].load_state_dict(runs[0][0].state_dict())
    runs[1][2].load_state_dict(copy.deepcopy(runs[0][2].state_dict()))
    for run in (0, 1):
        go(run, range(4, 7))
    assert same(runs[1][2].state_dict(), runs[0][2].state_dict())
    assert kept(runs[0][2])[0].item() != 6.0


def test_another_rule_for_a_buffer_is_refused_and_changes_nothing() -> None:
    _, _, belay = made(lambda name, t: EMA if name == "weight" else tb.methods.swa())
    model, _, other = made(lambda name, t: EMA if name == "weight" else tb.methods.ema(0.5))
    before = snapshot(model, other)
    with pytest.raises(ValueError, match=r"the method of buffer 'mean' in average 'average' differs: swa\(every=1\)"):
        other.load_state_dict(belay.state_dict())
    _, _, none = made(lambda name, t: EMA if name == "weight" else None)
    with pytest.raises(ValueError, match=r"averaged buffers of average 'average' .* missing: 'mean'"):
        other.load_state_dict(none.state_dict())
    assert same(snapshot(model, other), before)


ROWS: dict[str, Any] = {
    "no list": "mean",
    "no rows": [1, 2],
    "a short row": [["mean", "swa(every=1)", 0]],
    "a name too many": [["mean", "swa(every=1)", 0, []], ["more", "swa(every=1)", 0, []]],
    "an age too great": [["mean", "swa(every=1)", 9, []]],
    "a memory where none belongs": [["mean", "swa(every=1)", 0, [1.0]]],
    "a tensor": [["mean", torch.ones(2), 0, []]],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_damaged_rows_of_buffers_are_refused(rows: Any) -> None:
    _, _, belay = made(tb.methods.swa())
    state = copy.deepcopy(belay.state_dict())
    assert state["averages"]["average"]["own_buffers"] == [["mean", "swa(every=1)", 0, []]]
    state["averages"]["average"]["own_buffers"] = rows
    with pytest.raises(ValueError, match="buffer"):
        belay.load_state_dict(state)


# What a model does to its buffers -------------------------------------------------------------------------------------


def reshaped(model: Any) -> None:
    model.mean = torch.full((5,), 2.0)


def vanished(model: Any) -> None:
    model.mean = None


def appeared(model: Any) -> None:
    model.register_buffer("more", torch.full((2,), 2.0))


def expanded(model: Any) -> None:
    model.mean = torch.full((1,), 2.0).expand(3)


def of_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.mean = torch.full((3,), 2.0)


def counted(model: Any) -> None:
    model.mean = torch.full((3,), 2)


def made_complex(model: Any) -> None:
    model.mean = torch.full((3,), 2.0 + 0j)


def made_sparse(model: Any) -> None:
    model.mean = torch.full((3,), 2.0).to_sparse()


def transposed(model: Any) -> None:
    model.mean = torch.full((3, 4), 2.0).t()


CHANGES = [reshaped, vanished, appeared, expanded, of_inference_mode, counted, made_complex, made_sparse, transposed]
STARTS_AGAIN = {reshaped, counted, made_complex, made_sparse, transposed}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("moment", ["between two steps", "in a closure"])
def test_a_step_follows_what_the_model_did_to_a_buffer(change: Callable[[Any], None], moment: str) -> None:
    """It never raises once the weights have moved; an average that does not fit begins at the present value."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.5), buffers="average")
    model.mean.fill_(1.0)

    def closure() -> Tensor:
        if moment == "in a closure" and not called:
            change(model)
        called.append(True)
        optimizer.zero_grad()
        loss = model.weight.sum()
        loss.backward()
        return loss

    called = [True]
    optimizer.step(closure)
    if moment == "between two steps":
        change(model)
    else:
        called.clear()
    for _ in range(2):
        optimizer.step(closure)
    assert belay.step == 3
    exported = belay.average_state_dict()
    assert exported.keys() == model.state_dict().keys()
    torch.testing.assert_close(model.weight.detach(), torch.full((2,), 0.7))
    if change in STARTS_AGAIN:
        assert torch.equal(exported["mean"].to_dense(), model.mean.to_dense())
    elif change in (expanded, of_inference_mode):
        assert torch.equal(exported["mean"], torch.full((3,), 2 - 1.5 / 4))
    if change is not vanished:
        again = copy.deepcopy(belay.state_dict()) if change is not made_sparse else belay.state_dict()
        belay.load_state_dict(again)
        optimizer.step(closure)
    if change is not made_sparse:
        belay.copy_to_model()
        assert torch.equal(model.weight, belay.average_state_dict()["weight"])


@pytest.mark.parametrize("change", [expanded, of_inference_mode], ids=lambda change: change.__name__)
def test_the_average_is_copied_to_a_buffer_that_cannot_be_written_to(change: Callable[[Any], None]) -> None:
    model, optimizer, belay = made(tb.methods.ema(0.5))
    change(model)
    model.other = nn.Module()
    model.other.register_buffer("tied", model.mean)
    optimizer.step()
    belay.copy_to_model()
    assert torch.equal(model.mean, torch.full((3,), 1.0))
    assert model.other.tied is model.mean
    model.mean.add_(1.0)  # it is an ordinary tensor now


def test_a_buffer_of_another_shape_is_exported_as_it_is() -> None:
    model, _, belay = made(tb.methods.ema(0.5))
    reshaped(model)
    assert torch.equal(belay.average_state_dict()["mean"], model.mean)
    belay.load_state_dict(belay.state_dict())
    assert torch.equal(kept(belay), model.mean)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_only_every_nth_step_moves_them_as_far_as_n_steps(every: int) -> None:
    model, optimizer, belay = made(tb.methods.ema(0.5), every=every)
    model.mean.fill_(1.0)
    for _ in range(6):
        optimizer.step()
    torch.testing.assert_close(kept(belay), torch.full((3,), 1 - 0.5**6))


def test_reset_begins_them_again() -> None:
    model, optimizer, belay = made(tb.methods.swa())
    for value in (1.0, 3.0):
        model.mean.fill_(value)
        optimizer.step()
    assert kept(belay)[0] == 2.0
    belay.reset()
    assert kept(belay)[0] == 3.0
    for value in (5.0, 7.0):
        model.mean.fill_(value)
        optimizer.step()
    assert kept(belay)[0] == 6.0  # the mean of two, not of four


def test_a_step_taken_again_asks_a_method_that_remembers_once() -> None:
    """The first try raises; the memory of the buffer's own copy of the method goes back."""
    runs = [made(tb.methods.schedule_free(0.9), model=with_batchnorm()) for _ in range(2)]

    def fail(*_: object) -> None:
        raise KeyError("no luck")

    for i, (model, optimizer, _) in enumerate(runs):
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1.0 / (1 + step)
            model[1].running_mean.fill_(float(step))
            if i == 1 and step == 2:
                handle = optimizer.register_step_pre_hook(fail)
                with pytest.raises(KeyError):
                    optimizer.step()
                handle.remove()
            optimizer.step()
    assert same(runs[1][2].state_dict(), runs[0][2].state_dict())

"""Stochastic rounding of bfloat16 weights: right in the mean, where nearest loses a small pull altogether."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

import torchbelay as tb
from helpers.problems import same
from helpers.small import Still
from torchbelay import optim

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
bf16 = torch.bfloat16
PULL = tb.Spring(k=1.0, m1=2000.0, m2=500.0)  # a pull of 1/4000, an eighth of bfloat16's spacing or less
N = 4000


def apart(rounding: str, values: Tensor | None = None) -> tuple[nn.ParameterList, tb.Belay, torch.optim.Optimizer]:
    """Weights of 1 (or others) whose average is at 2."""
    start = torch.ones(N) if values is None else values
    weights = nn.ParameterList([nn.Parameter(start.to(WHERE, bf16))])
    optimizer = Still(weights)
    belay = tb.Belay(weights, optimizer, PULL, impl="triton", rounding=rounding)
    belay.state_dict()["averages"]["average"]["weights"]["0"].fill_(2.0)
    return weights, belay, optimizer


def test_the_mean_of_many_weights_is_pulled_as_much_as_it_should_be() -> None:
    weights, _, optimizer = apart("stochastic")
    optimizer.step()
    moved = weights[0].detach().double() - 1
    spacing, pull = 2.0**-7, 1 / 4000
    assert set(moved.unique().tolist()) == {0.0, spacing}  # one of the two neighbours, never another
    # a coin for each weight: the mean is off by more than five deviations once in two million
    deviation = spacing * (pull / spacing * (1 - pull / spacing) / N) ** 0.5
    assert abs(float(moved.mean()) - pull) < 5 * deviation
    assert pull > 10 * deviation  # so that a pull of nothing would be noticed


@pytest.mark.filterwarnings("ignore:.*16 bits wide")
def test_nearest_loses_the_pull() -> None:
    weights, _, optimizer = apart("nearest")
    optimizer.step()
    assert (weights[0] == 1).all()


def test_negative_weights_are_rounded_without_bias_too() -> None:
    weights, belay, optimizer = apart("stochastic", -torch.ones(N))
    belay.state_dict()["averages"]["average"]["weights"]["0"].fill_(-2.0)
    optimizer.step()
    assert float(weights[0].detach().double().mean()) == pytest.approx(-1 - 1 / 4000, abs=5 * 2.2e-5)


def test_every_step_throws_other_coins_and_the_same_step_the_same() -> None:
    (w, _, optimizer), (other, _, again) = (apart("stochastic") for _ in range(2))
    rows = []
    for each in (optimizer, again):
        each.step()
    rows.append(w[0].detach().clone())
    assert same(w[0].detach(), other[0].detach())
    with torch.no_grad():
        w[0].fill_(1.0)
    optimizer.step()
    assert not same(w[0].detach(), rows[0])


def test_tensors_throw_coins_of_their_own() -> None:
    weights = nn.ParameterList([nn.Parameter(torch.ones(N, device=WHERE, dtype=bf16)) for _ in range(2)])
    optimizer = Still(weights)
    belay = tb.Belay(weights, optimizer, PULL, impl="triton", rounding="stochastic")
    for average in belay.state_dict()["averages"]["average"]["weights"].values():
        average.fill_(2.0)
    optimizer.step()
    assert not same(weights[0].detach(), weights[1].detach())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_what_is_not_finite_stays_as_it_is() -> None:
    strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    weights = nn.ParameterList([nn.Parameter(strange.to(WHERE, bf16))])
    optimizer = optim.SGD(weights, lr=1.0)
    tb.Belay(weights, optimizer, tb.Spring.ema(decay=0.9), impl="triton", rounding="stochastic")
    weights[0].grad = torch.zeros_like(weights[0])
    optimizer.step()
    assert str(weights[0].tolist()) == str(strange.tolist())


def test_a_resumed_run_throws_the_coins_that_the_whole_run_threw() -> None:
    def run(steps: int, state: dict | None = None) -> tuple[Tensor, dict]:
        weights, belay, optimizer = apart("stochastic")
        if state:
            belay.load_state_dict(state["belay"])
            weights.load_state_dict(state["weights"])
        for _ in range(steps):
            optimizer.step()
        saved = {"belay": belay.state_dict(), "weights": weights.state_dict()}
        return weights[0].detach().clone(), copy.deepcopy(saved)

    whole, _ = run(4)
    _, half = run(2)
    assert same(run(2, half)[0], whole)


def test_it_is_refused_where_no_kernel_would_do_it(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    weights = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=bf16))])
    with pytest.raises(ValueError, match=r"rounding='stochastic' is done by Triton kernels .* '0' is on cpu"):
        tb.Belay(weights, Still(weights), PULL, rounding="stochastic")
    with pytest.raises(ValueError, match="rounding"):
        tb.Belay(weights, Still(weights), PULL, rounding="up")


def test_it_is_refused_for_weights_that_no_kernel_takes() -> None:
    gaps = nn.Parameter(torch.ones(6, 4, device=WHERE, dtype=bf16)[:, ::2])
    weights = nn.ParameterList([gaps])
    optimizer = Still(weights)
    tb.Belay(weights, optimizer, PULL, impl="triton", rounding="stochastic")
    with pytest.raises(ValueError, match=r"rounding='stochastic' needs weights that kernels can take"):
        optimizer.step()


def test_only_rounding_to_nearest_is_warned_of() -> None:
    with pytest.warns(tb.BelayWarning, match="16 bits wide"):
        apart("nearest")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apart("stochastic")
    assert [str(each.message) for each in said] == []

"""Several Belays on one optimizer, and several optimizers on one model."""

from math import inf

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.problems import MLP, copies, different, everything, f32, same
from helpers.small import BELAY, EMA, attached, train

WATCHING = {"ema": EMA, "ema, lagged": tb.Spring(k=0.2, m1=inf, m2=1.0), "swa": tb.methods.swa()}


@pytest.mark.parametrize("how", WATCHING)
def test_a_second_belay_on_an_optimizer_is_like_a_spectator(how: str) -> None:
    model, optimizer, first = attached(BELAY)
    second = tb.Belay(model, optimizer, WATCHING[how])
    other, other_optimizer, both = attached(BELAY, spectators={"second": WATCHING[how]})
    train(model, optimizer, 6)
    train(other, other_optimizer, 6)
    assert second.step == first.step == 6
    assert different(everything(model=model), everything(model=other)) == []
    for belay, name in ((first, "average"), (second, "second")):
        ours, theirs = belay.average_state_dict(), both.average_state_dict(name)
        assert ours.keys() == theirs.keys()
        assert all(same(ours[key], theirs[key]) for key in ours)


def test_of_two_belays_one_may_leave() -> None:
    model, optimizer, first = attached(BELAY)
    other, other_optimizer, alone = attached(BELAY)
    second = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    second.detach()
    left = everything(belay=second)
    train(model, optimizer, 3, first=3)
    train(other, other_optimizer, 6)
    assert different(everything(belay=second), left) == []
    ours = everything(model=model, optimizer=optimizer, belay=first)
    assert different(ours, everything(model=other, optimizer=other_optimizer, belay=alone)) == []


class Pair(nn.Module):
    """A generator and its judge in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = MLP.model(f32, seed=1), MLP.model(f32, seed=2)


def compete(pair: Pair, optimizers: tuple[Optimizer, Optimizer], steps: range) -> None:
    """The judge learns at every step, the generator at every other one; the losses go through both."""
    for step in steps:
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            if sign == 1 or step % 2:
                pair.zero_grad()
                (sign * (MLP.loss(pair.judge, step) * MLP.loss(pair.generator, step))).backward()
                optimizer.step()


def rivals(pair: Pair) -> tuple[Optimizer, Optimizer]:
    return torch.optim.AdamW(pair.judge.parameters(), lr=0.02), torch.optim.SGD(pair.generator.parameters(), lr=0.1)


def test_two_optimizers_on_one_model_each_have_an_average_of_their_own() -> None:
    both, apart = Pair(), Pair()
    judging, generating = rivals(both)
    belays = [tb.Belay(both, judging, BELAY), tb.Belay(both, generating, EMA)]
    compete(both, (judging, generating), range(7))
    optimizers = rivals(apart)
    separate = [tb.Belay(apart.judge, optimizers[0], BELAY), tb.Belay(apart.generator, optimizers[1], EMA)]
    compete(apart, optimizers, range(7))
    assert [belay.step for belay in belays] == [7, 3]
    assert different(everything(model=both), everything(model=apart)) == []
    for belay, alone, own in zip(belays, separate, ("judge.", "generator."), strict=True):
        exported = belay.average_state_dict()
        assert exported.keys() == both.state_dict().keys()
        for name, value in exported.items():
            averaged = name.startswith(own)
            expected = alone.average_state_dict()[name.removeprefix(own)] if averaged else both.state_dict()[name]
            assert same(value, expected)
            assert averaged != same(value, both.state_dict()[name])


def test_a_step_of_one_is_not_refused_inside_the_average_of_the_other() -> None:
    pair = Pair()
    judging, generating = rivals(pair)
    belays = [tb.Belay(pair, judging, BELAY), tb.Belay(pair, generating, EMA)]
    compete(pair, (judging, generating), range(4))
    weights = copies(pair.generator.parameters())
    with belays[1].averaged():
        compete(pair, (judging, judging), range(4, 5))
        with pytest.raises(RuntimeError, match="inside averaged"):
            generating.step()
    assert [belay.step for belay in belays] == [5, 2]
    assert all(map(same, copies(pair.generator.parameters()), weights))

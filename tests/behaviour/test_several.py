"""Several Belays on one optimizer, and several optimizers on one model."""

from math import inf
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchbelay as tb
from helpers.problems import MLP, advance, copies, different, everything, f32, same
from helpers.small import BELAY, EMA, WHERE, attached, train
from helpers.small import same as deeply_same
from torchbelay import optim
from torchbelay.belay import company, takeover

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


# Who may pull, and who sees what


def test_a_second_pull_on_a_parameter_is_refused_and_nothing_is_attached() -> None:
    model, optimizer, first = attached(BELAY)
    with pytest.raises(ValueError, match=r"another Belay pulls parameter '0.weight' already.*detach\(\).*replace=True"):
        tb.Belay(model, optimizer, BELAY)
    other, other_optimizer, alone = attached(BELAY)
    train(model, optimizer, 4)
    train(other, other_optimizer, 4)
    ours = everything(model=model, optimizer=optimizer, belay=first)
    assert different(ours, everything(model=other, optimizer=other_optimizer, belay=alone)) == []


def test_a_cell_that_is_run_twice_replaces_the_first_pull() -> None:
    model, optimizer, first = attached(BELAY)
    train(model, optimizer, 2)
    second = tb.Belay(model, optimizer, BELAY, replace=True)
    kept = everything(belay=first)
    other, other_optimizer, alone = attached(BELAY)
    train(other, other_optimizer, 2)
    alone.detach()
    after = tb.Belay(other, other_optimizer, BELAY)
    train(model, optimizer, 3, first=2)
    train(other, other_optimizer, 3, first=2)
    assert different(everything(model=model, belay=second), everything(model=other, belay=after)) == []
    assert different(everything(belay=first), kept) == []
    assert (first.step, second.step) == (2, 3)


def test_a_belay_that_nobody_holds_still_pulls_and_counts_as_pulling() -> None:
    model = MLP.model(f32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, BELAY)
    with pytest.raises(ValueError, match="another Belay pulls"):
        tb.Belay(model, optimizer, BELAY)


def test_a_belay_that_has_not_begun_does_not_stand_in_the_way_of_others() -> None:
    """Its model was changed, so that it cannot begin any more."""
    model, _, first = attached(BELAY, start=10)
    model[0] = nn.Linear(3, 5)
    other, optimizer, second = attached(BELAY)
    train(other, optimizer, 2)
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    third = tb.Belay(model, again, BELAY)
    train(model, again, 2)
    assert [belay.step for belay in (first, second, third)] == [0, 2, 2]


def test_a_new_optimizer_and_belay_for_the_same_model_take_the_place_of_the_old_ones() -> None:
    """As if a cell that makes both is run twice: the old optimizer never steps again, or is refused."""
    model = MLP.model(f32)
    made = []
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append((optimizer, tb.Belay(model, optimizer, BELAY)))
        advance(model, optimizer, MLP, range(2))
    assert [belay.step for _, belay in made] == [2, 2, 2]
    before = everything(model=model)
    for old, _ in made[:2]:
        with pytest.raises(RuntimeError, match=r"pulls these parameters now.*detach\(\) one of the two"):
            old.step()
    assert different(everything(model=model), before) == []
    for _, belay in made[1:]:
        belay.detach()
    made[0][0].step()
    assert made[0][1].step == 3


def pulled_by_two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer], list[tb.Belay]]:
    """Return a model with two optimizers, and a Belay of each: the second has taken the place of the first."""
    model = MLP.model(f32)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    belays = [tb.Belay(model, optimizer, BELAY) for optimizer in optimizers]
    return model, optimizers, belays


def test_a_belay_whose_successor_was_detached_pulls_again_and_counts_as_pulling() -> None:
    model, optimizers, belays = pulled_by_two_optimizers()
    belays[1].detach()
    with pytest.raises(ValueError, match="another Belay pulls"):
        tb.Belay(model, optimizers[0], BELAY)
    third = tb.Belay(model, optimizers[1], BELAY)
    with pytest.raises(RuntimeError, match="pulls these parameters now"):
        optimizers[0].step()
    third.detach()
    optimizers[0].step()
    assert [belay.step for belay in (*belays, third)] == [1, 0, 0]


def test_replacing_detaches_all_that_pull_also_those_that_were_replaced_before() -> None:
    model, optimizers, belays = pulled_by_two_optimizers()
    third = tb.Belay(model, optimizers[0], BELAY, replace=True)
    for optimizer in optimizers:
        advance(model, optimizer, MLP, range(2))
    assert [belay.step for belay in (*belays, third)] == [0, 0, 2]


def test_what_joins_the_optimizer_of_a_successor_is_adopted() -> None:
    model, optimizers, belays = pulled_by_two_optimizers()
    late = nn.Parameter(torch.ones(2))
    model.register_parameter("late", late)
    optimizers[1].add_param_group({"params": [late]})
    with pytest.warns(tb.BelayWarning, match="were added"):
        optimizers[1].step()
    assert belays[1].step == 1


def test_a_parameter_that_joins_later_is_not_pulled_twice() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    belays = [tb.Belay(model, optimizer, BELAY) for optimizer in optimizers]
    optimizers[0].add_param_group({"params": model[1].parameters()})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    weights = copies(model.parameters())
    with pytest.raises(ValueError, match=r"another Belay pulls parameter '1\.weight'"):
        optimizers[0].step()
    assert all(map(same, copies(model.parameters()), weights))
    belays[1].detach()
    with pytest.warns(tb.BelayWarning, match="were added"):
        optimizers[0].step()


class Late:
    """Pulls from its third step on, and does not say so by an attribute `pulls`."""

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        a = 0.1 if step > 2 else 0.0
        return tb.Coupling(a=a, b=0.2, p=1 - a, q=0.2)


@pytest.mark.parametrize("late_first", [False, True])
def test_a_method_that_begins_to_pull_later_is_not_a_second_one(late_first: bool) -> None:
    model, optimizer, first = attached(Late() if late_first else BELAY)
    second = tb.Belay(model, optimizer, BELAY if late_first else Late())
    train(model, optimizer, 2)
    before = everything(model=model, first=first, second=second)
    with pytest.raises(ValueError, match=r"another Belay pulls parameter '0.weight' already"):
        optimizer.step()
    assert different(everything(model=model, first=first, second=second), before) == []
    second.detach()
    train(model, optimizer, 3, first=2)
    assert first.step == 5


def test_watchers_see_the_weights_after_a_pull_that_begins_later() -> None:
    found = []
    for watcher_first in (False, True):
        methods = (EMA, Late()) if watcher_first else (Late(), EMA)
        model, optimizer, first = attached(methods[0])
        belays = [first, tb.Belay(model, optimizer, methods[1])]
        train(model, optimizer, 5)
        found.append(everything(model=model, watcher=belays[not watcher_first]))
    assert different(*found) == []


PATHS = {
    "torch": (torch.optim.AdamW, "auto"),
    "kernels": (torch.optim.AdamW, "triton"),
    "ours": (optim.AdamW, "triton"),
}


@pytest.mark.parametrize(("path", "how"), [*[("torch", how) for how in WATCHING], ("kernels", "ema"), ("ours", "ema")])
@pytest.mark.parametrize("watcher_first", [True, False])
@pytest.mark.parametrize("guarded", [False, True])
def test_watchers_see_the_weights_after_the_pull(path: str, how: str, watcher_first: bool, guarded: bool) -> None:
    """Whoever was attached first, and whether the optimizer takes averages along in its own pass or not."""
    kind, impl = PATHS[path]
    if impl == "triton":
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")
    model = MLP.model(f32).to(WHERE)
    optimizer = kind(model.parameters(), lr=0.02)
    watching = {"impl": "auto" if guarded else impl, "on_nonfinite": "skip" if guarded else "ignore"}
    orders = {
        True: lambda: reversed((tb.Belay(model, optimizer, WATCHING[how], **watching), pulling())),
        False: lambda: (pulling(), tb.Belay(model, optimizer, WATCHING[how], **watching)),
    }

    def pulling() -> tb.Belay:
        return tb.Belay(model, optimizer, BELAY, impl=impl)

    first, second = orders[watcher_first]()
    other = MLP.model(f32).to(WHERE)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.02, foreach=False)
    both = tb.Belay(other, other_optimizer, BELAY, spectators={"second": WATCHING[how]}, impl="reference")
    advance(model, optimizer, MLP, range(3))
    advance(other, other_optimizer, MLP, range(3))
    for belay, name in ((first, "average"), (second, "second")):
        theirs = both.average_state_dict(name)
        for key, value in belay.average_state_dict().items():
            torch.testing.assert_close(value, theirs[key], rtol=2e-6, atol=2e-6)


class Refusing(tb.methods.ema):
    """An average that refuses its third step."""

    varies = "step"
    law = None

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        if step == 3:
            raise ArithmeticError("not the third")
        return super().coupling(step, lr)


@pytest.mark.parametrize("refusing_first", [True, False])
def test_a_step_that_one_refuses_has_moved_no_other(refusing_first: bool) -> None:
    model = MLP.model(f32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    methods = [Refusing(0.9), BELAY]
    belays = [tb.Belay(model, optimizer, m) for m in (methods if refusing_first else methods[::-1])]
    advance(model, optimizer, MLP, range(2))
    before = everything(model=model, optimizer=optimizer, first=belays[0], second=belays[1])
    with pytest.raises(ArithmeticError, match="not the third"):
        advance(model, optimizer, MLP, range(2, 3))
    assert different(everything(model=model, optimizer=optimizer, first=belays[0], second=belays[1]), before) == []


@pytest.mark.parametrize("raising_first", [True, False])
def test_bad_weights_that_one_raises_for_have_moved_no_other(raising_first: bool) -> None:
    model = MLP.model(f32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = [{"on_nonfinite": "raise"}, {}]
    methods = [EMA, tb.methods.swa()]
    order = (0, 1) if raising_first else (1, 0)
    belays = [tb.Belay(model, optimizer, methods[i], **options[i]) for i in order]
    advance(model, optimizer, MLP, range(2))
    before = everything(first=belays[0], second=belays[1])
    for p in model.parameters():
        p.grad = torch.full_like(p, inf)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert different(everything(first=belays[0], second=belays[1]), before) == []


# Averages in the model, one at a time


def test_overlapping_swaps_are_refused_and_lose_nothing() -> None:
    model, optimizer, first = attached(BELAY)
    second = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    before = everything(model=model, first=first, second=second)
    with first.averaged():
        inside = everything(model=model)
        for what in (
            second.averaged().__enter__,
            second.reset,
            second.copy_to_model,
            lambda: second.load_state_dict(second.state_dict()),
            lambda: tb.Belay(model, None, EMA),
        ):
            with pytest.raises(RuntimeError, match=r"inside averaged\('average'\) of another Belay"):
                what()
        assert different(everything(model=model), inside) == []
    assert different(everything(model=model, first=first, second=second), before) == []
    with second.averaged():
        pass
    assert different(everything(model=model, first=first, second=second), before) == []


def test_averages_of_different_parameters_may_be_in_the_model_together() -> None:
    pair = Pair()
    pair.register_buffer("seen", torch.ones(2))
    optimizers = rivals(pair)
    belays = [tb.Belay(pair, optimizer, EMA) for optimizer in optimizers]
    watching = tb.Belay(pair, optimizers[0], EMA)
    compete(pair, optimizers, range(4))
    for i, belay in enumerate(belays):
        with belay.averaged():
            pair.seen.fill_(i + 2.0)  # each average has its own, as after `update_bn`
    before = everything(model=pair, judging=belays[0], generating=belays[1], watching=watching)
    averages, watched = [belay.average_state_dict() for belay in belays], watching.average_state_dict()
    with belays[0].averaged(), belays[1].averaged():
        for name, value in pair.state_dict().items():
            assert same(value, averages[name.startswith("generator.") or name == "seen"][name])
        for name, value in averages[0].items():
            assert same(belays[0].average_state_dict()[name], value) or name == "seen"
        assert deeply_same(watching.average_state_dict(), watched)
        inside = everything(generating=belays[1], watching=watching)
    assert different(everything(model=pair, judging=belays[0], generating=belays[1], watching=watching), before) == []
    assert different(inside, everything(generating=belays[1], watching=watching)) == []


def test_a_step_inside_the_swap_of_a_belay_that_follows_no_more_is_refused() -> None:
    model, optimizer, first = attached(EMA)
    train(model, optimizer, 3)
    first.detach()
    second = tb.Belay(model, optimizer, EMA)
    weights = copies(model.parameters())
    with first.averaged(), pytest.raises(RuntimeError, match="inside averaged"):
        optimizer.step()
    assert second.step == 0
    assert all(map(same, copies(model.parameters()), weights))


def test_numbers_and_exports_inside_the_swap_of_another_are_those_outside() -> None:
    pair = Pair()
    judging, generating = rivals(pair)
    belays = [
        tb.Belay(pair, judging, BELAY),
        tb.Belay(pair, generating, EMA),
        tb.Belay(pair, generating, WATCHING["swa"]),
    ]
    compete(pair, (judging, generating), range(4))
    outside = [(b.stats(), b.average_state_dict(), b.state_dict()) for b in belays]
    with belays[1].averaged():
        inside = [(b.stats(), b.average_state_dict(), b.state_dict()) for b in (belays[0], belays[2])]
    for mine, theirs in zip(inside, (outside[0], outside[2]), strict=True):
        assert deeply_same([mine[0], dict(mine[1]), mine[2]], [theirs[0], dict(theirs[1]), theirs[2]])


# Threads ------------------------------------------------------------------------------------------------------------


def test_a_belay_may_be_made_while_another_thread_looks_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, first = attached(BELAY)
    member, pulled, made = first._parts.member, first._parts.member.pulled, []

    def pulled_meanwhile() -> dict[int, str]:
        monkeypatch.setattr(member, "pulled", pulled)
        made.append(attached(BELAY))  # as another thread may do between any two members
        return pulled()

    monkeypatch.setattr(member, "pulled", pulled_meanwhile)
    _, _, second = attached(BELAY)
    members = company.members()
    assert all(belay._parts.member in members for belay in (first, second, made[0][2]))


def test_a_block_may_be_left_while_another_thread_looks_at_its_weights() -> None:
    (_, _, first), (_, _, second) = attached(EMA), attached(EMA)
    with first.averaged():
        found = company._held_by_others(second._parts.member)
        swap, _ = next(found)
    assert all(each is swap for each, _ in found)


def test_an_optimizer_may_take_its_first_step_while_that_of_another_thread_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, belay = attached(EMA)

    def gone_meanwhile() -> object:
        takeover._known[1] = ref(optimizer), [], []
        return optimizer

    monkeypatch.setitem(takeover._known, 0, (gone_meanwhile, [], []))
    train(model, optimizer, 2)
    del takeover._known[1]
    assert belay.step == 2

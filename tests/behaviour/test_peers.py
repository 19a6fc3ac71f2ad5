"""What other averaging libraries do in the places where training goes wrong, each next to what `Belay` does there.

The libraries are torch.optim.swa_utils.AveragedModel, ema-pytorch and torch-ema, in the versions of constraints.txt,
used as their manuals say. A test that fails here after an upgrade says that a peer has changed, and what we say of it
must change too.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

import torchbelay as tb
from helpers.peers import EmaPytorch, Peer, Torch, TorchEma, every_peer, same, train, two_layers
from torchbelay import methods

# 16-bit models -------------------------------------------------------------------------------------------------------

DECAY, STEPS = 0.9999, 2000
EXPECTED = 2 - DECAY**STEPS  # of weights that went from 1 to 2 at the first step: 1.1813


def sixteen_bits() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def from_one_to_two(model: nn.Linear, optimizer: torch.optim.Optimizer, after: Callable[[], Any]) -> None:
    for t in range(STEPS):
        model.weight.grad = torch.full_like(model.weight, -1.0 if t == 0 else 0.0)
        optimizer.step()
        after()


@every_peer
def test_a_bfloat16_average_stands_still_and_ours_moves(peer: type[Peer]) -> None:
    model, optimizer = sixteen_bits()
    theirs, mine = peer(model, DECAY), tb.Belay(model, optimizer, tb.Spring.ema(decay=DECAY))
    from_one_to_two(model, optimizer, theirs.update)
    assert (model.weight == 2).all()
    assert (theirs.average()["weight"] == 1).all()  # not a bit in 2,000 steps
    own = mine.state_dict()["averages"]["average"]["weights"]["weight"]
    assert own.dtype == torch.float32
    # float32 rounds 2,000 times, by at most 1.2e-7/2 each
    torch.testing.assert_close(own, torch.full((1, 2), EXPECTED), rtol=0, atol=1.2e-4)


def test_ema_pytorch_moves_with_a_float32_model_of_ones_own() -> None:
    model, optimizer = sixteen_bits()
    theirs = EmaPytorch(model, DECAY, ema_model=copy.deepcopy(model).float(), coerce_dtype=True)
    from_one_to_two(model, optimizer, theirs.update)
    torch.testing.assert_close(theirs.average()["weight"], torch.full((1, 2), EXPECTED), rtol=0, atol=1.2e-4)


def test_torchs_average_moves_in_float32_with_avg_fn_and_raises_with_multi_avg_fn() -> None:
    model, optimizer = sixteen_bits()
    single = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY)).float()
    several = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)).float()
    for average in (single, several):
        average.update_parameters(model)
    with pytest.raises(RuntimeError, match=r"expected dtype float|same dtype"):
        several.update_parameters(model)
    from_one_to_two(model, optimizer, lambda: single.update_parameters(model))
    # 1e-4·w is rounded to bfloat16 on the way: three digits
    torch.testing.assert_close(single.module.weight.detach(), torch.full((1, 2), EXPECTED), rtol=0, atol=1e-3)


def test_torch_ema_moves_in_float32_and_a_resume_rounds_it_to_bfloat16_and_ours_does_not() -> None:
    model, optimizer = sixteen_bits()
    theirs, mine = TorchEma(model, DECAY), tb.Belay(model, optimizer, tb.Spring.ema(decay=DECAY))
    theirs.ema.to(dtype=torch.float32)
    from_one_to_two(model, optimizer, theirs.update)
    kept = theirs.average()["weight"].clone()
    torch.testing.assert_close(kept, torch.full((1, 2), EXPECTED), rtol=0, atol=1.2e-4)
    resumed = TorchEma(model, DECAY)
    resumed.ema.load_state_dict(theirs.ema.state_dict())
    assert resumed.average()["weight"].dtype == torch.bfloat16
    assert (resumed.average()["weight"].float() - kept).abs().max() > 1e-3

    state = copy.deepcopy(mine.state_dict())
    other, its = sixteen_bits()
    again = tb.Belay(other, its, tb.Spring.ema(decay=DECAY))
    again.load_state_dict(state)
    assert same(*(b.state_dict()["averages"]["average"]["weights"] for b in (again, mine)))


# Tied weights --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


@every_peer
def test_a_tied_weight_is_averaged_once_everywhere(peer: type[Peer]) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    theirs, mine = peer(model, 0.5), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.5))
    before = model.embed.weight.detach().clone()
    train(model, optimizer, 1, theirs.update)
    once = torch.lerp(before, model.embed.weight.detach(), 0.5)  # twice would be three quarters of the way
    torch.testing.assert_close(theirs.average()["embed.weight"], once)
    exported = mine.average_state_dict()
    assert torch.equal(exported["embed.weight"], once)
    assert torch.equal(exported["head.weight"], once)


# Parameters added while training -------------------------------------------------------------------------------------


def add_adapter(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> nn.Parameter:
    """What LoRA does: a new matrix inside the first layer, trained from now on."""
    adapter = nn.Parameter(torch.full((3, 3), 100.0))
    model[0].register_parameter("adapter", adapter)
    optimizer.add_param_group({"params": [adapter]})
    return adapter


@every_peer
def test_a_parameter_added_later_is_not_averaged_and_ours_adopts_it(peer: type[Peer]) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs, mine = peer(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    adapter = add_adapter(model, optimizer)
    expected = adapter.detach().clone()

    def after() -> None:
        theirs.update()
        expected.lerp_(adapter.detach(), 1 - 0.9)

    with pytest.warns(tb.BelayWarning, match=r"added to the optimizer, '0.adapter' first: adopted"):
        train(model, optimizer, 5, after)
    assert "0.adapter" not in theirs.average()
    assert torch.equal(mine.average_state_dict()["0.adapter"], expected)


def test_torchs_average_then_pairs_the_wrong_tensors_and_ours_goes_by_name() -> None:
    """It pairs by position, so that here the second layer's average is drawn to the first layer's adapter, at 100."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs, mine = Torch(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    add_adapter(model, optimizer)
    with pytest.warns(tb.BelayWarning, match="added"):
        train(model, optimizer, 20, theirs.update)
    assert (theirs.average()["1.weight"] - model[1].weight).abs().min() > 50
    assert (mine.average_state_dict()["1.weight"] - model[1].weight).abs().max() < 1


@pytest.mark.parametrize("peer", [EmaPytorch, TorchEma], ids=lambda p: p.name)
def test_the_others_still_average_the_old_parameters_rightly(peer: type[Peer]) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs, mine = peer(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    add_adapter(model, optimizer)
    with pytest.warns(tb.BelayWarning, match="added"):
        train(model, optimizer, 20, theirs.update)
    torch.testing.assert_close(theirs.average()["1.weight"], mine.average_state_dict()["1.weight"])


def test_torch_ema_refuses_an_update_that_names_all_parameters() -> None:
    model = two_layers()
    theirs = TorchEma(model, 0.9)
    add_adapter(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Number of parameters"):
        theirs.ema.update(model.parameters())


# Steps that mixed precision skips ------------------------------------------------------------------------------------


def steps_with_overflows(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Six steps under a GradScaler, three of which overflow: whether each moved the weights."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0, float("nan"), float("inf"), 1.0):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not same(before, model.state_dict())
        assert moved == (factor == 1.0)
        yield moved


either_adamw = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@either_adamw
@every_peer
def test_a_skipped_step_moves_an_average_that_the_loop_updates_and_not_ours(peer: type[Peer], fused: bool) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    theirs, mine = peer(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    before: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for moved in steps_with_overflows(model, optimizer):
        theirs.update()
        now = copy.deepcopy(theirs.average()), mine.average_state_dict()
        if not moved:
            assert not same(before[0], now[0])
            assert same(before[1], now[1])
        before = now
    assert mine.step == 3


@either_adamw
def test_ema_pytorchs_hook_leaves_skipped_steps_out_unless_the_optimizer_is_fused(fused: bool) -> None:
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    theirs, mine = EmaPytorch(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    theirs.ema.add_to_optimizer_post_step_hook(optimizer)
    assert sum(steps_with_overflows(model, optimizer)) == 3
    assert theirs.updates() == (6 if fused else 3)
    assert mine.step == 3


def test_averages_that_nobody_calls_stand_still_and_ours_and_ema_pytorchs_hook_do_not() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = Torch(model, 0.9), TorchEma(model, 0.9), EmaPytorch(model, 0.9)
    hooked, mine = EmaPytorch(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    hooked.ema.add_to_optimizer_post_step_hook(optimizer)
    begin = copy.deepcopy(model.state_dict())
    train(model, optimizer, 5)
    assert all(same(theirs.average(), begin) for theirs in called)
    torch.testing.assert_close(dict(hooked.average()), mine.average_state_dict())
    assert not same(mine.average_state_dict(), begin)


# Going on from a checkpoint ------------------------------------------------------------------------------------------


def counting(peer: type[Peer], model: nn.Module) -> Peer:
    """The peer with a decay that depends on its count, if it has such a decay."""
    more = {EmaPytorch: {"min_value": 0.0}, TorchEma: {"use_num_updates": True}, Torch: {}}
    return peer(model, 0.99, **more[peer])


@every_peer
def test_everybody_goes_on_from_a_checkpoint_to_the_last_bit(peer: type[Peer]) -> None:
    def trained(steps: int, *, states: list[Any] | None = None, seed: int = 6) -> tuple[Peer, list[Any], tb.Belay]:
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        theirs, mine = counting(peer, model), tb.Belay(model, optimizer, methods.ema(0.99, warmup="ratio"))
        for part, state in zip((model, optimizer, mine, theirs.ema), states or (), strict=False):
            part.load_state_dict(state)
        train(model, optimizer, steps, theirs.update, seed=seed)
        return theirs, [part.state_dict() for part in (model, optimizer, mine, theirs.ema)], mine

    first = trained(7)
    saved = copy.deepcopy(first[1])
    theirs, _, mine = trained(9, states=saved, seed=7)
    assert mine.step == 16

    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    whole, ours = counting(peer, model), tb.Belay(model, optimizer, methods.ema(0.99, warmup="ratio"))
    for steps, seed in ((7, 6), (9, 7)):
        train(model, optimizer, steps, whole.update, seed=seed)
    assert same(theirs.average(), whole.average())
    assert same(mine.average_state_dict(), ours.average_state_dict())


@pytest.mark.parametrize("peer", [Torch, EmaPytorch], ids=lambda p: p.name)
def test_a_checkpoint_of_another_decay_is_taken_without_a_word_and_ours_is_refused(peer: type[Peer]) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old, new = peer(model, 0.5), peer(model, 0.999)
    mine = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.5))
    train(model, optimizer, 3, old.update)
    new.ema.load_state_dict(old.ema.state_dict())
    assert same(new.average(), old.average())
    mine.detach()
    with pytest.raises(ValueError, match=r"the method of '0\.weight'"):
        tb.Belay(model, optimizer, tb.Spring.ema(decay=0.999)).load_state_dict(mine.state_dict())


def test_torch_ema_takes_the_decay_from_the_checkpoint() -> None:
    model = two_layers()
    new = TorchEma(model, 0.999)
    new.ema.load_state_dict(TorchEma(model, 0.5).ema.state_dict())
    assert new.ema.decay == 0.5


# Looking at the average ----------------------------------------------------------------------------------------------


def test_torch_ema_and_ours_give_the_weights_back_after_an_exception() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs, mine = TorchEma(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    train(model, optimizer, 3, theirs.update)
    own = copy.deepcopy(model.state_dict())

    def evaluate() -> None:
        assert not same(model.state_dict(), own)
        raise ZeroDivisionError

    for swapped in (theirs.ema.average_parameters, mine.averaged):
        with pytest.raises(ZeroDivisionError), swapped():
            evaluate()
        assert same(model.state_dict(), own)


def test_a_step_inside_torch_emas_swap_is_lost_and_inside_ours_refused() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = TorchEma(model, 0.9)
    train(model, optimizer, 3, theirs.update)
    own = copy.deepcopy(model.state_dict())
    with theirs.ema.average_parameters():
        train(model, optimizer, 1)
    assert same(model.state_dict(), own)  # as if it had not been taken

    mine = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    with mine.averaged(), pytest.raises(RuntimeError, match="an optimizer step inside averaged"):
        train(model, optimizer, 1)
    assert same(model.state_dict(), own)


def tensors_in(x: Any) -> int:
    """Elements of all floating-point tensors in a state dict."""
    if isinstance(x, Tensor):
        return x.numel() if x.is_floating_point() else 0
    inside = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return sum(map(tensors_in, inside))


@pytest.mark.parametrize("peer", [Torch, EmaPytorch], ids=lambda p: p.name)
def test_a_second_model_holds_frozen_weights_twice_and_ours_averages_what_is_trained(peer: type[Peer]) -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    theirs, mine = peer(model, 0.9), tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9))
    assert tensors_in(dict(theirs.average())) == 18
    assert tensors_in(mine.state_dict()) == 9
    assert mine.average_state_dict().keys() == model.state_dict().keys()  # the export is whole all the same


# Other methods than EMA ----------------------------------------------------------------------------------------------


def test_torchs_average_has_no_say_in_training() -> None:
    paths = []
    for averaged in (False, True):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 5, Torch(model, 0.9).update if averaged else lambda: None)
        paths.append(model.state_dict())
    assert same(*paths)

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, tb.Spring(k=1.0, m1=10.0, m2=20.0))
    train(model, optimizer, 5)
    assert not same(model.state_dict(), paths[0])


def test_ema_pytorch_can_be_a_lookahead_as_ours_is() -> None:
    """By feeding its average back at every sixth step, where it has just moved halfway."""
    model, other = two_layers(), two_layers()
    optimizer, its = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    theirs = EmaPytorch(model, 0.5, update_every=6, update_model_with_ema_every=6)
    mine = tb.Belay(other, its, methods.lookahead(k=6, alpha=0.5))
    train(model, optimizer, 20, theirs.update)
    train(other, its, 20)
    for a, b in ((model.state_dict(), other.state_dict()), (theirs.average(), mine.average_state_dict())):
        assert same(dict(a), dict(b))


def test_torchs_uniform_average_of_float64_weights_takes_float32_shares_and_ours_does_not() -> None:
    model = two_layers().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    several = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())  # what it does of itself on a GPU
    single = AveragedModel(model, avg_fn=get_swa_avg_fn())
    mine = tb.Belay(model, optimizer, methods.swa())
    visited: list[Tensor] = []

    def after() -> None:
        visited.append(model[0].weight.detach().clone())
        for average in (several, single):
            average.update_parameters(model)

    train(model, optimizer, 50, after)
    mean = torch.stack(visited).mean(0)
    assert (several.module[0].weight - mean).abs().max() > 1e-10
    for precise in (single.module[0].weight.detach(), mine.average_state_dict()["0.weight"]):
        torch.testing.assert_close(precise, mean, rtol=0, atol=1e-14)  # fifty roundings of 1e-16

"""Buffers in whose memory a parameter lies: the parameter decides what is there, in blocks, exports and modules."""

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import EMA

every_choice = pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])


def step(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def equal(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {key: t.clone() for key, t in model.state_dict().items()}


@every_choice
@pytest.mark.parametrize("same", [False, True])
def test_a_buffer_of_a_weight_that_is_not_averaged_is_as_that_weight_everywhere(buffers: str, same: bool) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2)), "codes": nn.Parameter(torch.zeros(2))})
    codes = model["codes"].requires_grad_(False)
    model.register_buffer("mirror", codes if same else codes.data)
    optimizer = torch.optim.SGD([model["w"]], lr=1.0)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    module = belay.module()
    for _ in range(3):
        codes.data.add_(1.0)  # without an optimizer, as codebooks are
        step(optimizer)
    exported = belay.average_state_dict()
    with belay.averaged():
        inside = copied(model)
        assert equal(belay.average_state_dict(), inside)
    assert equal(exported, inside)
    if same or buffers != "ignore":  # a module's buffers are copied once then
        assert equal(copied(module), inside)
    assert torch.equal(exported["mirror"], torch.full((2,), 3.0))
    model.load_state_dict(exported)
    assert torch.equal(codes, torch.full((2,), 3.0))


@every_choice
def test_a_probe_in_the_same_memory_that_is_trained_inside_a_block_keeps_what_it_learned(buffers: str) -> None:
    flat = torch.zeros(6)
    model = nn.ParameterDict({"w": nn.Parameter(flat[:3]), "probe": nn.Parameter(flat[3:])})
    model.register_buffer("flat", flat, persistent=False)
    optimizer, other = torch.optim.SGD([model["w"]], lr=1.0), torch.optim.SGD([model["probe"]], lr=1.0)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    step(optimizer)
    with belay.averaged():
        step(other)
    assert torch.equal(model["probe"], torch.full((3,), -1.0))
    assert torch.equal(model["w"], torch.full((3,), -1.0))


@every_choice
def test_crossed_blocks_of_two_belays_leave_the_weights_of_one_memory_as_they_were(buffers: str) -> None:
    flat = torch.zeros(4)
    model = nn.ParameterDict({"x": nn.Parameter(flat[:2]), "y": nn.Parameter(flat[2:])})
    model.register_buffer("flat", flat, persistent=False)
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.values()]
    one, other = (tb.Belay(model, each, EMA, buffers=buffers) for each in optimizers)
    for optimizer in optimizers:
        step(optimizer)
    averages = other.average_state_dict()
    first, second = one.averaged(), other.averaged()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(model["y"], averages["y"])
    second.__exit__(None, None, None)
    assert torch.equal(flat, torch.full((4,), -1.0))


@every_choice
def test_statistics_of_a_block_in_the_same_memory_are_the_averages(buffers: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    flat = torch.tensor([1.0, 1.0, 0.0, 1.0])
    model[0].weight.data = flat[:2].view(1, 2)
    model[1].running_mean, model[1].running_var = flat[2:3], flat[3:]
    model.register_buffer("flat", flat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    module = belay.module()
    step(optimizer)
    with belay.averaged():
        model(torch.randn(64, 2) + 5)
        inside = copied(model)
    assert inside["flat"][2] == inside["1.running_mean"]
    exported = belay.average_state_dict()
    if buffers != "ignore":  # then statistics are the model's own and stay as the block left them
        assert equal(exported, inside)
        assert equal(copied(module), inside)
    with belay.averaged():
        assert equal(copied(model), exported)
    if buffers != "ignore":
        assert torch.equal(flat[2:], torch.tensor([0.0, 1.0]))


@every_choice
def test_a_model_that_is_cast_inside_a_block_gets_its_own_values_back(buffers: str) -> None:
    flat = torch.zeros(4)
    model = nn.ParameterDict({"w": nn.Parameter(flat[:2])})
    model.register_buffer("flat", flat)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    step(optimizer)
    with belay.averaged():
        model.double()  # the memory is shared no longer
    assert torch.equal(model["w"], torch.full((2,), -1.0, dtype=torch.float64))
    if buffers != "ignore":
        assert torch.equal(model.get_buffer("flat"), torch.tensor([-1.0, -1.0, 0.0, 0.0], dtype=torch.float64))


@every_choice
@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_views_of_a_weight_go_through_blocks(buffers: str, kind: str) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))})
    conj = model["w"].detach().conj()
    model.register_buffer("view", conj if kind == "conjugate" else conj.imag)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    for _ in range(2):
        step(optimizer)
        before, exported = copied(model), belay.average_state_dict()
        with belay.averaged():
            assert equal(copied(model), exported)
        assert equal(copied(model), before)
    belay.copy_to_model()
    assert equal(copied(model), exported)


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_weight_that_is_a_lazy_view_is_refused_with_a_cure_that_works(kind: str) -> None:
    conj = torch.tensor([1 + 2j, 3 - 1j]).conj()
    model = nn.ParameterDict({"w": nn.Parameter(conj if kind == "conjugate" else conj.imag)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    model["w"].grad = torch.ones(2, dtype=model["w"].dtype)
    optimizer.step()
    expected, weights = belay.average_state_dict()["w"].clone(), model["w"].detach().clone()
    for use in (lambda: belay.averaged().__enter__(), belay.copy_to_model):
        with pytest.raises(RuntimeError, match=r"'w' is a conjugate or negative view.*resolve_neg\(\)"):
            use()
    assert torch.equal(model["w"].detach(), weights)
    model["w"].data = model["w"].data.resolve_conj().resolve_neg()
    with belay.averaged():
        torch.testing.assert_close(model["w"].detach(), expected)
    assert torch.equal(model["w"].detach(), weights)

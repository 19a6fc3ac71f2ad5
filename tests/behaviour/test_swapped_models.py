"""`averaged()`, `copy_to_model()` and exports of models with odd buffers, and of models that change inside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import EMA, WHERE, attached, batch, mlp, same, snapshot, train, values, with_batchnorm


class Rope(nn.Module):
    """A buffer that a longer input replaces, as the rotary embeddings of language models do, beside its length."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.persistent, self.length = persistent, 0
        self.lengthen(4)

    def lengthen(self, length: int) -> None:
        self.register_buffer("phases", torch.arange(1.0 + length), persistent=self.persistent)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.lengthen(len(x))
        return self.last(torch.tanh(self.first(x))) * (1 + self.phases[: len(x), None])


def trained(model: nn.Module, **options: Any) -> tuple[nn.Module, Any, tb.Belay]:
    model, optimizer, belay = attached(EMA, model=model, **options)
    train(model, optimizer, 3)
    return model, optimizer, belay


def swaps(model: nn.Module, optimizer: Any, belay: tb.Belay) -> None:
    """Swap, export and go on; everything is as it was."""
    before, average = snapshot(model, belay), belay.average_state_dict()
    with belay.averaged():
        assert same(values(model), average)
        assert same(belay.average_state_dict(), average)
    assert same(snapshot(model, belay), before)
    with pytest.raises(KeyError, match="inside"), belay.averaged():
        raise KeyError("inside")
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)
    average = belay.average_state_dict()
    belay.copy_to_model()
    assert same(values(model), average)


def has_inference_buffer() -> nn.Module:
    model = with_batchnorm()
    with torch.inference_mode():
        model[0].register_buffer("cache", torch.arange(4.0))
    return model


def with_buffer(buffer: Tensor | None) -> nn.Module:
    model = with_batchnorm()
    model[0].register_buffer("cache", buffer)
    return model


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "made under inference_mode": has_inference_buffer,
    "expanded": lambda: with_buffer(torch.ones(1).expand(4)),
    "none": lambda: with_buffer(None),
    "empty": lambda: with_buffer(torch.zeros(0, 3)),
    "not a number": lambda: with_buffer(torch.full((2,), torch.nan)),
    "boolean": lambda: with_buffer(torch.tensor([True, False])),
    "complex": lambda: with_buffer(torch.ones(2, dtype=torch.complex64)),
    "transposed": lambda: with_buffer(torch.arange(6.0).reshape(2, 3).t()),
}


@pytest.mark.parametrize("mode", ["copy", "average", "ignore"])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_a_model_with_any_buffer_is_swapped_and_copied_to(make: Callable[[], nn.Module], mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=make(), buffers=mode)
    if mode != "average":  # a step refuses to average some of these
        train(model, optimizer, 3)
        swaps(model, optimizer, belay)
        return
    before = snapshot(model, belay)
    with belay.averaged():
        pass
    assert same(snapshot(model, belay), before)


@pytest.mark.parametrize("kind", ["sparse", "quantised"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
def test_a_sparse_or_quantised_buffer_comes_back_too(kind: str) -> None:
    buffer = (
        torch.eye(3).to_sparse() if kind == "sparse" else torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    )
    model, _, belay = trained(with_buffer(buffer))
    whole, weights = buffer.dequantize() if kind != "sparse" else buffer.to_dense(), model[0].weight.detach().clone()
    with belay.averaged():
        pass
    assert model[0].cache is buffer
    with belay.averaged():
        if kind == "sparse":
            model[0].cache.zero_()
        else:
            model[0].cache.copy_(torch.zeros(3))
    now = model[0].cache
    assert torch.equal(now.to_dense() if kind == "sparse" else now.dequantize(), whole)
    assert torch.equal(model[0].weight, weights)


def test_a_buffer_that_nobody_wrote_to_is_not_written() -> None:
    model, _, belay = trained(with_batchnorm())
    versions = [b._version for b in model.buffers()]
    with belay.averaged():
        model.eval()(batch(0))
    assert [b._version for b in model.buffers()] == versions


def test_a_buffer_written_behind_autograds_back_comes_back() -> None:
    model, _, belay = trained(with_batchnorm())
    own = values(model)
    with belay.averaged():
        model[1].running_mean.data.fill_(9.0)
    assert same(values(model), own)
    assert torch.equal(belay.average_state_dict()["1.running_mean"], torch.full((5,), 9.0))


@pytest.mark.parametrize("how", ["resized", "deleted", "registered", "emptied", "filled", "typed"])
def test_a_buffer_that_changes_its_form_inside_does_no_harm(how: str) -> None:
    model = with_batchnorm()
    model[0].register_buffer("cache", torch.arange(3.0))
    model[0].register_buffer("nothing", None)
    model, optimizer, belay = trained(model)
    own = values(model)
    with belay.averaged():
        if how == "resized":
            model[0].cache.resize_(9)
        elif how == "deleted":
            del model[0].cache
        elif how == "registered":
            model[0].register_buffer("late", torch.ones(2))
        elif how == "emptied":
            model[0].cache = None
        elif how == "filled":
            model[0].nothing = torch.ones(2)
        else:
            model[0].cache = torch.ones(3, dtype=torch.float64)
        belay.state_dict()
        belay.average_state_dict()
    expected = dict(own)
    if how == "deleted":  # modules that were changed stay changed; only values come back
        del expected["0.cache"]
    now = values(model)
    assert same({key: now[key] for key in expected}, expected)
    assert list(now.keys() - expected.keys()) == (["0.late"] if how == "registered" else [])
    train(model, optimizer, 1, first=3)
    with belay.averaged():
        model(batch(1))


@pytest.mark.parametrize("mode", ["copy", "average"])
def test_a_buffer_that_changed_its_shape_stays_as_the_model_has_it(mode: str) -> None:
    model, _, belay = attached(EMA, model=Rope(persistent=True), buffers=mode)
    model(torch.ones(6, 3))
    own, phases = values(model), model.phases
    with belay.averaged():
        assert torch.equal(model.phases, own["phases"])
    assert model.phases is phases
    assert same(values(model), own)
    assert torch.equal(belay.average_state_dict()["phases"], own["phases"])
    belay.copy_to_model()
    assert torch.equal(model.phases, own["phases"])


def test_a_buffer_that_a_block_resized_leaves_a_state_that_loads() -> None:
    model, _, belay = trained(Rope(persistent=True))
    with belay.averaged():
        model(torch.ones(40, 3))
    belay.load_state_dict(belay.state_dict())
    assert belay.average_state_dict()["phases"].shape == model.phases.shape


def test_what_a_module_keeps_for_itself_and_replaces_inside_stays_replaced() -> None:
    """The module remembers, beside the buffer, what the buffer is good for: both or neither must come back."""
    model, optimizer, belay = trained(Rope())
    plain = Rope()
    long = torch.ones(20, 3)
    for _ in range(2):
        with torch.inference_mode(), belay.averaged():
            inside = model(long)
        plain.load_state_dict(belay.average_state_dict())
        assert torch.equal(inside, plain(long))
        train(model, optimizer, 1, first=3)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(long), plain(long))


# Compiled to TorchScript ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("mode", ["copy", "average", "ignore"])
@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_a_scripted_or_traced_model_is_swapped_exported_and_copied_to(how: str, mode: str) -> None:
    made, plain = with_batchnorm(), with_batchnorm()
    compiled = torch.jit.script(made) if how == "scripted" else torch.jit.trace(made, batch(0))
    model, optimizer, belay = trained(compiled, buffers=mode)
    swaps(model, optimizer, belay)
    train(model, optimizer, 1, first=4)
    own, average = values(model), belay.average_state_dict()
    plain.load_state_dict(average)
    with belay.averaged():
        assert torch.equal(model(batch(1)), plain(batch(1)))  # which writes statistics
    assert same(values(model), own) is (mode != "ignore")
    kept = belay.average_state_dict()
    assert same(kept, {name: plain.state_dict()[name] for name in kept})


# Models that change inside the block ---------------------------------------------------------------------------------


def test_a_model_that_is_converted_inside_keeps_its_weights_and_its_average() -> None:
    model, _, belay = trained(with_batchnorm())
    own, before = values(model), snapshot(model, belay)["belay"]
    with belay.averaged():
        model.bfloat16()
        model.eval()(batch(0).bfloat16())
    converted = {name: w.bfloat16() if w.is_floating_point() else w for name, w in own.items()}
    assert same(values(model), converted)
    assert same(belay.state_dict()["averages"]["average"]["weights"], before["averages"]["average"]["weights"])
    with belay.averaged():
        assert torch.equal(model[0].weight, before["averages"]["average"]["weights"]["0.weight"].bfloat16())


@pytest.mark.parametrize(("outside", "inside"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_model_that_is_converted_inside_keeps_its_averaged_buffers(outside, inside) -> None:
    model, _, belay = trained(with_batchnorm().to(outside), buffers="average")
    before = snapshot(model, belay)["belay"]["averages"]["average"]["buffers"]
    with belay.averaged():
        model.to(inside)
    assert same(belay.state_dict()["averages"]["average"]["buffers"], before)


def test_a_model_that_is_laid_out_anew_inside_keeps_its_weights_and_its_average() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    model(torch.ones(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    own, average = values(model), belay.average_state_dict()
    with belay.averaged():
        model.to(memory_format=torch.channels_last)
        assert same(values(model), average)
    assert same(values(model), own)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert same(belay.average_state_dict(), average)


@pytest.mark.parametrize("impl", ["foreach", "triton"])
@pytest.mark.parametrize("shape", [(5, 3), (7, 3)])
def test_data_that_is_replaced_inside_gives_way_to_the_weights(shape: tuple[int, int], impl: str) -> None:
    model, optimizer, belay = attached(EMA, impl=impl)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged():
        model[0].weight.data = torch.zeros(shape, device=model[0].weight.device)
        assert belay.stats()["tension"] > 0
        belay.state_dict()
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)


def test_a_layer_that_is_replaced_inside_is_left_alone() -> None:
    model, _, belay = trained(mlp())
    own, old = values(model), model[2]
    with belay.averaged():
        model[2] = nn.Linear(5, 1)
        new = model[2].weight.detach().clone()
    assert torch.equal(model[0].weight, own["0.weight"])
    assert torch.equal(model[2].weight, new)
    assert torch.equal(old.weight, own["2.weight"])


@pytest.mark.parametrize("impl", ["foreach", "triton"])
def test_weights_that_share_memory_come_back_and_so_does_the_average(impl: str) -> None:
    """Two parameters of one memory, and one that overlaps another; their averages differ."""
    where = WHERE if impl == "triton" else "cpu"
    model = nn.ParameterList([nn.Parameter(torch.randn(6, device=where)) for _ in range(4)])
    model[1].data = model[0].data
    model[3].data = torch.randn(9, device=where)
    model[2].data = model[3].data[2:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: tb.methods.ema(0.5 + 0.1 * int(name)), impl=impl)
    sum(p.square().sum() for p in model).backward()
    optimizer.step()
    before = snapshot(model, belay)
    with belay.averaged():
        assert not same(values(model), before["model"])
    assert same(snapshot(model, belay), before)


def test_an_average_of_another_shape_is_refused_before_anything_changes() -> None:
    model, _, belay = trained(mlp())
    model[0].weight.data = torch.zeros(2, 5, 3)  # to which the average could be broadcast
    before = snapshot(model, belay)
    for use in (belay.averaged().__enter__, belay.copy_to_model):
        with pytest.raises(RuntimeError, match=r"'0.weight' has the shape \(2, 5, 3\) now.*\(5, 3\).*reset\(\)"):
            use()
        assert same(snapshot(model, belay), before)


def test_the_export_of_an_average_inside_anothers_block_has_the_weights_that_it_does_not_average() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_layer = lambda name, p: EMA if name.startswith("0") else None  # noqa: E731
    belay = tb.Belay(model, optimizer, EMA, spectators={"first": first_layer})
    train(model, optimizer, 3)
    outside = belay.average_state_dict("first")
    with belay.averaged():
        assert same(belay.average_state_dict("first"), outside)


def test_a_buffer_that_a_block_emptied_does_not_take_the_place_of_what_the_model_never_had() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5))
    model, _, belay = attached(EMA, model=model, spectators={"other": EMA})
    with belay.averaged():
        model[1].running_mean = None
        assert belay.average_state_dict("other").keys() == model.state_dict().keys()

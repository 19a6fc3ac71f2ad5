"""Parameter names: wrappers add nothing to them, and a user's name that looks like a wrapper's is kept."""

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import torchbelay as tb
from helpers.problems import different, everything
from helpers.small import EMA, batch, mlp, same, train, values


class Own(nn.Module):
    """A model whose own attributes have the names that torch's wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Linear(3, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._checkpoint_wrapped_module(self._orig_mod(self.module(x)))


NAMES = [f"{m}.{p}" for m in ("module", "_orig_mod", "_checkpoint_wrapped_module") for p in ("weight", "bias")]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(model)


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def fsdp1(model: nn.Module) -> nn.Module:
    """FSDP1 with one rank. It shards nothing and warns of that; what counts here is that it renames everything."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPERS = {
    "fsdp1": fsdp1,
    "compile": compiled,
    "checkpoint": checkpointed,
    "ddp": ddp,
    "compiled ddp": lambda m: compiled(ddp(m)),
    "ddp of compiled": lambda m: ddp(compiled(m)),
    "data parallel": nn.DataParallel,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_at_the_root_is_looked_through(wrap) -> None:
    plain = Own()
    if wrap is nn.DataParallel and torch.cuda.is_available():
        pytest.skip("with a GPU, DataParallel wants the whole model on it")
    wrapped = wrap(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    belay = tb.Belay(wrapped, optimizer, EMA)
    train(wrapped, optimizer, 3)
    exported = belay.average_state_dict()
    assert list(exported) == NAMES
    Own().load_state_dict(exported, strict=True)
    with belay.averaged():
        assert same(values(plain), exported)
    assert not same(values(plain), exported)


@pytest.mark.parametrize("wrap", [compiled, checkpointed, lambda m: compiled(checkpointed(m))])
def test_a_wrapper_inside_is_looked_through(wrap) -> None:
    plain = Own()
    model = Own()
    model.module = wrap(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    exported = belay.average_state_dict()
    assert sorted(exported) == sorted(NAMES)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == NAMES
    plain.load_state_dict(exported, strict=True)
    with belay.averaged():
        assert torch.equal(model(batch(0)), plain(batch(0)))


@pytest.mark.parametrize("there", [compiled, lambda m: m], ids=["to wrapped", "to plain"])
def test_a_checkpoint_moves_between_wrapped_and_plain(there) -> None:
    """The run that goes on from the checkpoint is the run that was never interrupted, bit for bit."""

    def run(wrap, steps: range, state=None):
        plain = Own()
        model = wrap(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        belay = tb.Belay(model, optimizer, EMA)
        for part, each in (state or {}).items():
            {"model": plain, "optimizer": optimizer, "belay": belay}[part].load_state_dict(each)
        train(model, optimizer, len(steps), first=steps.start)
        return {"model": plain, "optimizer": optimizer, "belay": belay}

    here = compiled if there is not compiled else lambda m: m
    half = {part: copy.deepcopy(each.state_dict()) for part, each in run(here, range(3)).items()}
    assert sorted(half["belay"]["averages"]["average"]["weights"]) == sorted(NAMES)
    whole = everything(**run(here, range(5)))
    assert different(everything(**run(there, range(3, 5), half)), whole) == []


def test_a_compiled_model_really_computes_with_the_average() -> None:
    model = mlp()
    wrapped = compiled(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.3)
    belay = tb.Belay(wrapped, optimizer, EMA)
    train(wrapped, optimizer, 4)
    plain = mlp()
    plain.load_state_dict(belay.average_state_dict())
    outside = wrapped(batch(0))
    with belay.averaged():
        assert torch.equal(wrapped(batch(0)), plain(batch(0)))
    assert torch.equal(wrapped(batch(0)), outside)


def test_extra_state_and_hooks_of_the_model_take_part_in_the_export() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 7}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"version": 7}

    model = Extra(3, 1)
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(added=torch.ones(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    exported = belay.average_state_dict()
    assert exported["_extra_state"] == {"version": 7}
    assert torch.equal(exported["added"], torch.ones(1))
    assert not torch.equal(exported["weight"], model.weight)


def test_parametrized_weights_are_averaged_in_their_own_parameters() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 3)
    exported = belay.average_state_dict()
    assert list(exported) == list(model.state_dict())
    with belay.averaged():
        expected = nn.functional.linear(batch(0), model.weight, model.bias)
        assert torch.equal(model(batch(0)), expected)
        assert same(values(model), exported)


def test_a_module_used_twice_is_exported_under_both_names_and_averaged_once() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"first": shared, "second": shared})
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    assert list(belay.state_dict()["averages"]["average"]["weights"]) == ["first.weight", "first.bias"]
    assert list(belay.average_state_dict()) == list(model.state_dict())


class Unused(nn.Module):
    """A layer that trains, and one that was never called."""

    def __init__(self, lazy: nn.Module) -> None:
        super().__init__()
        self.used, self.lazy = nn.Linear(3, 1), lazy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Wrapped(torch.Tensor):
    """A tensor that has its elements in another one, as quantized weights of torchao; its own address is 0."""

    elements: torch.Tensor

    @staticmethod
    def __new__(cls, elements: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=elements.dtype)
        made.elements = elements
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda t: t.elements, (args, kwargs or {}))
        found = operation(*args, **kwargs)
        is_alike = operation in (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
        return Wrapped(found) if is_alike else found


def elements(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: getattr(t, "elements", t).clone() for name, t in state.items()}


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_whose_elements_lie_in_other_tensors_are_not_taken_for_one(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for i in (0, 1):
        model[i].weight = nn.Parameter(Wrapped(model[i].weight.detach()), requires_grad=not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, foreach=False)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    before = elements(model.state_dict())
    with belay.averaged():
        inside = elements(model.state_dict())
    assert same(elements(belay.average_state_dict()), inside)
    assert same(elements(belay.model_state_dict()), before)
    assert same(elements(model.state_dict()), before)
    assert not torch.equal(inside["2.weight"], before["2.weight"])
    assert torch.equal(inside["0.weight"], before["0.weight"]) is frozen


def test_a_module_cannot_share_weights_whose_elements_lie_in_other_tensors_and_says_what_to_use() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight = nn.Parameter(Wrapped(model[0].weight.detach()), requires_grad=False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    into = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for use in (belay.module, lambda: belay.module(into=into)):
        with pytest.raises(ValueError, match=r"'0\.weight' has none: Wrapped keeps .*; use averaged\(\), or"):
            use()
    assert all(q.requires_grad for q in into.parameters())
    train(model, optimizer, 1)
    assert belay.step == 3


LAZY = r"'lazy\.\w+' has no shape yet \(a lazy module\) and cannot be copied: call the model once on a batch before"


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d], ids=["weights", "buffers"])
def test_a_lazy_layer_that_was_never_called_is_named_in_an_export(
    lazy: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = Unused(lazy())
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    average = belay.tensors()["used.weight"].clone()
    for use in (
        belay.average_state_dict,
        belay.model_state_dict,
        lambda: belay.save_average(tmp_path / "a.safetensors"),
    ):
        with pytest.raises(ValueError, match=LAZY):
            use()
    assert list(tmp_path.iterdir()) == []
    model.lazy(torch.ones(2, 4))  # the cure
    exported = belay.average_state_dict()
    assert list(exported) == list(model.state_dict())
    assert torch.equal(exported["used.weight"], average)


def test_lazy_buffers_are_named_before_the_average_takes_the_place_of_the_weights() -> None:
    model = Unused(nn.LazyBatchNorm1d(affine=False))
    optimizer = torch.optim.SGD(model.used.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    weight = model.used.weight.detach().clone()
    with pytest.raises(ValueError, match=LAZY), belay.averaged():
        pytest.fail("the block must not be entered")
    with pytest.raises(ValueError, match=LAZY):
        tb.Belay(model, optimizer, EMA, buffers="average")
    assert torch.equal(model.used.weight, weight)
    train(model, optimizer, 1)
    assert belay.step == 3

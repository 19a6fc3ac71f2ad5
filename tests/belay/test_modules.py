"""Parameter names: wrappers add nothing to them, and a user's name that looks like a wrapper's is kept."""

import copy
import warnings

import pytest
import torch
from torch import nn

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

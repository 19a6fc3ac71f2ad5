"""The swap of weights and average when something goes wrong in the middle of it."""

import copy

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers import seams
from helpers.operations import Operations
from helpers.small import EMA, attached, mlp, same, snapshot, train, values


def test_memory_that_runs_out_while_swapping_leaves_everything_as_it_was(monkeypatch) -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    failures = []

    def exhaust(name: str, done: list[str]) -> None:
        if name == "clone" and done.count("_foreach_copy_") == 4 and not failures:  # two pieces have been traded
            failures.append(len(done))
            raise MemoryError("the third piece does not fit")

    seams.limit_scratch(monkeypatch, 5)
    with Operations(exhaust) as asked, pytest.raises(MemoryError), belay.averaged():
        pytest.fail("the block must not be entered")
    monkeypatch.undo()
    assert asked.names.count("_foreach_copy_") == 8  # two pieces went there and back
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)  # and no block is left open


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 3)


UNWRITABLE = {
    "expanded": (lambda: torch.ones(1, 3).expand(4, 3), r"the parameter 'b' is expanded: .*p\.data\.clone\(\)"),
    "inference_mode": (
        made_in_inference_mode,
        r"the parameter 'b' was made under torch\.inference_mode.*copy\.deepcopy",
    ),
}


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("how", UNWRITABLE)
def test_weights_that_cannot_be_written_to_are_refused_before_anything_moves(
    how: str, dtype: torch.dtype | None
) -> None:
    make, message = UNWRITABLE[how]
    plain, other = torch.ones(3), make()
    belay = tb.Belay.from_parameters([("a", plain), ("b", other)], None, tb.methods.ema(0.5), dtype=dtype)
    plain.zero_()
    belay.update()
    for call in (lambda: belay.averaged().__enter__(), belay.copy_to_model):
        with pytest.raises(RuntimeError, match=message):
            call()
        assert torch.equal(plain, torch.zeros(3))
        assert torch.equal(belay.average_state_dict()["a"], torch.full((3,), 0.5))
    belay.update()  # it goes on
    assert torch.equal(belay.average_state_dict()["a"], torch.full((3,), 0.25))


def test_a_graph_made_before_the_swap_is_not_silently_wrong_after_it() -> None:
    """Weights that were written between forward and backward: torch itself refuses."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    loss = model(torch.ones(2, 3)).square().mean()
    with belay.averaged():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_refers_to_the_models_tensors_has_the_weights_again_after_the_block(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=mlp(dtype))
    train(model, optimizer, 3)
    weights, average = values(model), belay.average_state_dict()
    with belay.averaged():
        lent, copied, exported = model.state_dict(), copy.deepcopy(model.state_dict()), belay.average_state_dict()
        assert same(dict(lent), dict(average))
    assert same(dict(lent), weights)
    assert not same(weights, dict(average))
    assert same(dict(copied), dict(average))
    assert same(dict(exported), dict(average))


def test_the_export_between_forward_and_backward_disturbs_nothing() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    loss = model(torch.ones(2, 3)).square().mean()
    exported = belay.average_state_dict()
    assert not any(tensor.requires_grad for tensor in exported.values())
    optimizer.zero_grad()
    loss.backward()
    assert model[0].weight.grad is not None


def test_the_export_carries_the_versions_by_which_modules_migrate_old_layouts() -> None:
    class Versioned(nn.Linear):
        _version = 2

    model = nn.Sequential(Versioned(3, 1))
    compiled = torch.compile(model, backend="eager")
    belay = tb.Belay(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), EMA)
    exported = belay.average_state_dict()
    assert exported._metadata == dict(model.state_dict()._metadata)
    assert exported._metadata["0"] == {"version": 2}

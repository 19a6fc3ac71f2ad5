"""Facts about tensors: found once, believed for as long as the tensors are alike, and never longer."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from torchbelay.ops import facts
from torchbelay.ops.facts import Fact


class Asked:
    """A fact that counts how often it is found out."""

    def __init__(self, holds: Callable[[Sequence[Tensor]], bool]) -> None:
        self.count, self._holds = 0, holds
        self.fact = Fact(self._find)

    def _find(self, tensors: Sequence[Tensor]) -> bool:
        self.count += 1
        return self._holds(tensors)


def sizes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def some() -> list[Tensor]:
    return [torch.ones(4, 3), torch.nn.Parameter(torch.ones(5)), torch.ones(2, 2, 2)]


@pytest.fixture(params=["guards", "no guards"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no guards":
        monkeypatch.setattr(facts, "TensorGuards", None)
    return request.param


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda t: t.to(torch.bfloat16),
    "size": lambda t: t[:2].clone(),
    "strides": lambda t: t.t().contiguous().t(),
    "device": lambda t: t.to("meta"),
    "number of dimensions": lambda t: t.reshape(-1),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_a_tensor_is_noticed(what: str, either: str) -> None:
    def told(tensors: Sequence[Tensor]) -> list[object]:
        return [(t.dtype, t.shape, t.stride(), t.device) for t in tensors]

    tensors = some()
    known = told(tensors)
    fact = Fact(lambda now: told(now) == known)
    assert fact(tensors)
    assert fact(tensors)
    tensors[0].data = CHANGES[what](tensors[0].data) if what != "device" else tensors[0].data
    if what == "device":
        tensors[0] = tensors[0].to("meta")
    assert not fact(tensors)
    assert not fact(tensors)
    tensors[0] = torch.ones(4, 3)
    assert fact(tensors)


def test_a_fact_is_found_out_once_for_tensors_that_are_alike() -> None:
    asked = Asked(lambda now: sizes(now) == sizes(some()))
    with torch.no_grad():
        assert all(asked.fact(some()) for _ in range(5))  # other tensors every time, as gradients are
    assert asked.count == 1


def test_a_no_is_never_believed_of_torch_alone() -> None:
    asked = Asked(lambda now: sizes(now) == sizes(some()))
    tensors = some()
    assert asked.fact(tensors)
    tensors[1].requires_grad_(False)  # torch's guards compare this, and it does not matter here
    assert asked.fact(tensors)
    assert asked.count == 2


def test_a_fact_that_does_not_hold_is_found_out_every_time(either: str) -> None:
    asked = Asked(lambda now: False)
    assert not asked.fact(some())
    assert not asked.fact(some())
    assert asked.count == 2


def test_more_or_fewer_tensors_are_other_tensors(either: str) -> None:
    fact = Fact(lambda now: sizes(now) == sizes(some()))
    assert fact(some())
    assert not fact(some()[:2])
    assert not fact([])
    assert not fact([*some(), torch.ones(1)])
    assert fact(some())


def test_one_tensor_twice_is_no_problem(either: str) -> None:
    t = torch.ones(3)
    fact = Fact(lambda now: sizes(now) == [(3,), (3,)])
    assert fact([t, t])
    assert fact([t, t])
    assert not fact([t, torch.ones(4)])


def test_no_tensor_is_kept_alive() -> None:
    tensors = some()
    fact = Fact(lambda now: True)
    assert fact(tensors)
    gone = [weakref.ref(t) for t in tensors]
    tensors.clear()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize("how", ["raising", "denying"])
def test_tensors_that_torch_cannot_compare_are_looked_at_one_by_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Guards:
        def __init__(self, *tensors: Tensor, **options: object) -> None:
            made.append(tensors)
            if how == "raising":
                raise RuntimeError("no strides")

        def check(self, *tensors: Tensor) -> bool:
            return False

    asked = Asked(lambda now: True)
    monkeypatch.setattr(facts, "TensorGuards", Guards)
    assert all(asked.fact(some()) for _ in range(3))
    assert asked.count == 3
    assert len(made) == 1  # it is tried once


def test_torch_has_the_guards_that_make_it_fast() -> None:
    """If this fails with a new version of torch, steps are right and slower: find what took the guards' place."""
    assert facts.TensorGuards is not None
    assert facts._guards(some()) is not None

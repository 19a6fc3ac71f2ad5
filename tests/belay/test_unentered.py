"""`averaged()` without a `with` changes nothing, and says so."""

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest
import torch

import torchbelay as tb
from helpers.small import EMA, attached, same, train, values
from torchbelay.belay.piecewise import PiecewiseBelay


@pytest.fixture
def trained() -> tuple[torch.nn.Module, tb.Belay]:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    return model, belay


def test_a_block_that_nobody_enters_is_told_at_the_users_line(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    model, belay = trained
    before = copy.deepcopy(values(model))
    with pytest.warns(tb.BelayWarning, match=r"averaged\(\) without a `with` does nothing: .*with belay\.aver") as told:
        belay.averaged()
    assert [each.filename for each in told] == [__file__]
    assert same(values(model), before)


def test_a_block_that_is_kept_is_told_when_it_is_dropped(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    _, belay = trained
    kept = [belay.averaged(readout=tb.readouts.blend(0.5))]
    with pytest.warns(tb.BelayWarning, match="without a `with`"):
        kept.clear()


def test_the_block_of_weights_in_pieces_is_told_too() -> None:
    with pytest.warns(tb.BelayWarning, match="without a `with`"):
        PiecewiseBelay.averaged(object())  # type: ignore[arg-type]  # nothing of it is used before it is entered


def test_wrong_arguments_are_refused_at_the_call(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    _, belay = trained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wrong in ({"foo": 1}, {"name": "average", "readouts": None}):
            with pytest.raises(TypeError, match="unexpected keyword"):
                belay.averaged(**wrong)  # type: ignore[arg-type]


def test_functions_whose_body_runs_later_are_refused(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    _, belay = trained

    async def waits() -> None:
        pass

    def yields() -> Iterator[int]:
        yield 1

    for function in (waits, yields):
        with pytest.raises(TypeError, match=rf"cannot decorate '{function.__name__}'.*write `with belay\.averaged"):
            belay.averaged()(function)


def test_a_decorated_function_that_nobody_calls_is_not_told(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    _, belay = trained
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        belay.averaged()(lambda: 1)
        gc.collect()
    assert told == []


def test_blocks_that_are_entered_are_not_told(trained: tuple[torch.nn.Module, tb.Belay]) -> None:
    model, belay = trained
    own, average = copy.deepcopy(values(model)), dict(belay.average_state_dict())

    @belay.averaged()
    def evaluate() -> bool:
        return same(values(model), average)

    def fail() -> None:
        with belay.averaged():
            raise KeyError("inside")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with belay.averaged() as given:
            assert given is model
        later = belay.averaged() if average else nullcontext()
        with later, ExitStack() as stack:
            stack.enter_context(belay.averaged())
            assert same(values(model), average)
        with pytest.raises(KeyError, match="inside"):
            fail()
        with pytest.raises(ValueError, match="is no average"), belay.averaged("nobody"):
            pass
        assert [evaluate(), evaluate()] == [True, True]
        del later, evaluate
        gc.collect()
    assert same(values(model), own)

"""Blocks of `averaged()` that are nested, overlap, or belong to several threads; and states that are held meanwhile."""

import asyncio
import io
import threading
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import EMA, mlp, same, train, values


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, **options)
    train(model, optimizer, 3)
    return model, optimizer, belay


# Blocks that overlap --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_the_average_stays_until_the_last_of_two_blocks_is_left(first: int) -> None:
    model, _, belay = trained()
    weights, average = values(model), belay.average_state_dict()
    blocks = [ExitStack(), ExitStack()]
    for block in blocks:
        block.enter_context(belay.averaged())
    blocks[first].close()
    assert same(values(model), dict(average))
    blocks[1 - first].close()
    assert same(values(model), weights)
    assert same(dict(belay.average_state_dict()), dict(average))


def test_a_block_that_is_left_by_an_exception_leaves_the_other_its_average() -> None:
    model, _, belay = trained()
    weights, average = values(model), dict(belay.average_state_dict())
    with belay.averaged():
        with pytest.raises(ZeroDivisionError), belay.averaged():
            raise ZeroDivisionError
        assert same(values(model), average)
    assert same(values(model), weights)


def test_requests_that_are_served_at_once() -> None:
    model, _, belay = trained()
    weights, average = values(model), dict(belay.average_state_dict())
    seen = []

    async def request(seconds: float) -> None:
        with belay.averaged():
            await asyncio.sleep(seconds)
            seen.append(same(values(model), average))

    async def serve() -> None:
        await asyncio.gather(request(0.01), request(0.03), request(0.0))

    asyncio.run(serve())
    assert seen == [True] * 3
    assert same(values(model), weights)


def test_another_average_is_refused_while_one_of_the_blocks_is_open() -> None:
    _, _, belay = trained(spectators={"short": tb.methods.ema(0.5)})
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(belay.averaged())
    inner.enter_context(belay.averaged())
    outer.close()
    with pytest.raises(RuntimeError, match=r"'short'\) inside averaged\('average'\)"), belay.averaged("short"):
        pass
    inner.close()
    with belay.averaged("short"):
        pass


def test_a_step_is_refused_until_the_last_block_is_left() -> None:
    model, optimizer, belay = trained()
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(belay.averaged())
    inner.enter_context(belay.averaged())
    outer.close()
    with pytest.raises(RuntimeError, match="inside averaged"):
        optimizer.step()
    inner.close()
    train(model, optimizer, 1)
    assert belay.step == 4


def test_threads_that_evaluate_at_the_same_time() -> None:
    model, _, belay = trained()
    weights, average = values(model), dict(belay.average_state_dict())
    wrong: list[object] = []

    def serve() -> None:
        for _ in range(100):
            try:
                with belay.averaged():
                    if not same(values(model), average):
                        wrong.append("other numbers")
            except BaseException as error:  # a thread tells nobody
                wrong.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert same(values(model), weights)
    assert same(dict(belay.average_state_dict()), average)


# States that are held -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_state_that_was_made_before_a_block_has_the_average_inside_it_too(with_optimizer: bool) -> None:
    model, optimizer, belay = trained(save_with_optimizer=with_optimizer)
    weights, average = values(model), dict(belay.average_state_dict())
    state = optimizer.state_dict() if with_optimizer else belay.state_dict()
    file = io.BytesIO()
    with belay.averaged():
        assert same(values(model), average)
        torch.save(state, file)
    assert same(values(model), weights)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, again, resumed = trained(save_with_optimizer=with_optimizer)
    (again if with_optimizer else resumed).load_state_dict(saved)
    other.load_state_dict(weights)
    assert same(dict(resumed.average_state_dict()), average)


def test_a_state_has_the_live_tensors() -> None:
    model, optimizer, belay = trained()
    state = belay.state_dict()["averages"]["average"]["weights"]
    train(model, optimizer, 1)
    now = belay.state_dict()["averages"]["average"]["weights"]
    assert all(state[name].data_ptr() == now[name].data_ptr() for name in now)


# Exports in other threads ---------------------------------------------------------------------------------------------


def in_a_thread(call: Any) -> list[str]:
    """Call in another thread; return the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    return [str(each.message) for each in found]


def test_an_export_beside_the_thread_that_trains_warns_once() -> None:
    _, _, belay = trained()
    belay.average_state_dict()
    assert in_a_thread(belay.model_state_dict) == []  # which puts nothing into the model
    (message,) = in_a_thread(belay.average_state_dict)
    assert message.startswith("average_state_dict() or save_average() in another thread than the one that")
    assert in_a_thread(belay.average_state_dict) == []


def test_an_export_after_the_thread_that_trained_has_ended_does_not() -> None:
    made: list[tb.Belay] = []
    assert in_a_thread(lambda: made.append(trained()[2])) == []
    belay, end = made.pop(), threading.Event()
    another = threading.Thread(target=end.wait)  # which may have the number of the one that ended
    another.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = belay.average_state_dict()
    end.set()
    another.join()
    assert state

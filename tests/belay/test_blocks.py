"""Blocks of `averaged()` that are nested, overlap, or belong to several threads; and states that are held meanwhile."""

import asyncio
import io
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import EMA, mlp, same, train, values, with_batchnorm


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


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def step_elsewhere_during_an_export(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Let another thread take a step whenever the model's state is made; return the handle."""
    return model.register_state_dict_pre_hook(lambda *_: in_a_thread(optimizer.step))


@pytest.mark.parametrize("export", ["average_state_dict", "model_state_dict"])
def test_an_export_while_another_thread_trains_warns_once(export: str) -> None:
    model, optimizer, belay = trained()
    step_elsewhere_during_an_export(model, optimizer)
    with pytest.warns(tb.BelayWarning, match=rf"{export}\(\).* while another thread trains: the model holds"):
        getattr(belay, export)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(belay, export)()


@pytest.mark.filterwarnings("error")
def test_an_export_after_another_thread_has_trained_does_not() -> None:
    """A thread of a pool goes on to live when what it did is done."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            _, _, belay = pool.submit(trained).result()
            belay.average_state_dict()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("use", [tb.Belay.stats, tb.Belay.average_state_dict, tb.Belay.state_dict])
def test_a_step_of_another_thread_is_not_taken_for_one_that_was_stopped(
    use: Callable[[tb.Belay], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, belay = trained()
    clock = belay._parts.first.clock
    tick = clock.tick

    def meanwhile(*args: Any, **options: Any) -> None:
        in_a_thread(lambda: use(belay))
        tick(*args, **options)

    monkeypatch.setattr(clock, "tick", meanwhile)
    with pytest.warns(tb.BelayWarning, match="another thread is taking a step, and some of these averages") as told:
        train(model, optimizer, 1)
    assert len(told) == 1
    monkeypatch.undo()
    use(belay)
    assert belay.step == 4


@pytest.mark.parametrize("use", [tb.Belay.stats, tb.Belay.average_state_dict, tb.Belay.state_dict])
def test_a_step_that_was_stopped_in_another_thread_is_told_of(
    use: Callable[[tb.Belay], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, belay = trained()
    monkeypatch.setattr(belay._parts.first.clock, "tick", lambda *_, **__: 1 / 0)
    with ThreadPoolExecutor(1) as pool:  # whose thread goes on to live
        with pytest.raises(ZeroDivisionError):
            pool.submit(train, model, optimizer, 1).result()
        with pytest.warns(tb.BelayWarning, match="the last step was stopped while weights and averages moved"):
            use(belay)


@pytest.mark.filterwarnings("error")
def test_an_export_inside_a_closure_is_in_the_thread_that_trains() -> None:
    model, optimizer, belay = trained()

    def closure() -> float:
        belay.average_state_dict()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert belay.step == 4


READS: dict[str, Callable[[tb.Belay], dict[str, torch.Tensor]]] = {
    "average_state_dict": lambda belay: dict(belay.average_state_dict()),
    "state_dict": lambda belay: dict(belay.state_dict()["averages"]["average"]["weights"]),
    "tensors": lambda belay: dict(belay.tensors()),
    "module": lambda belay: dict(belay.module().state_dict()),
}


@pytest.mark.parametrize("read", READS)
def test_what_one_thread_reads_is_the_average_whatever_blocks_another_one_enters(read: str) -> None:
    model, _, belay = trained()
    weights, average = values(model), dict(belay.average_state_dict())
    wrong: list[object] = []

    def evaluate() -> None:
        for _ in range(60):
            with belay.averaged():
                if not same(values(model), average):
                    wrong.append("block")

    def save() -> None:
        for _ in range(60):
            try:
                if not same({k: v.clone() for k, v in READS[read](belay).items()}, average):
                    wrong.append(read)
            except BaseException as error:  # a thread tells nobody
                wrong.append(error)

    threads = [threading.Thread(target=call) for call in (evaluate, save)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert same(values(model), weights)


def test_what_one_belay_exports_is_right_whatever_blocks_another_one_of_the_model_enters() -> None:
    model, _, belay = trained()
    other = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    weights, inside, done = values(model), threading.Event(), threading.Event()

    def evaluate() -> None:
        while not done.is_set():
            with belay.averaged():
                inside.set()

    thread = threading.Thread(target=evaluate)
    thread.start()
    inside.wait()
    try:
        exported = [dict(other.model_state_dict()) for _ in range(60)]
    finally:
        done.set()
        thread.join()
    assert all(same(each, weights) for each in exported)


def test_outside_for_a_moment_a_block_keeps_what_was_written_to_its_buffers() -> None:
    for readout in (None, tb.readouts.blend(0.5)):
        model = with_batchnorm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA)
        train(model, optimizer, 3)
        own = values(model)
        with belay.averaged(readout=readout):
            mean = next(b for name, b in model.named_buffers() if name.endswith("running_mean"))
            mean.fill_(7.0)
            held = values(model)
            with belay._outside():
                assert same(values(model), own)
            assert same(values(model), held)
        assert same(values(model), own)

"""`averaged()`, `copy_to_model()` and exports, interrupted by an exception at each of their lines, or by signals."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers import seams
from helpers.interrupting import Interruption, every_line, raising_at
from helpers.live import assert_is, shared
from helpers.operations import Operations, Scarcity
from helpers.small import BELAY, EMA, attached, batch, mlp, same, snapshot, train, values, with_batchnorm

# An exception between `averaged()` and the entering of its block leaves a block that nobody enters.
pytestmark = pytest.mark.filterwarnings(r"ignore:averaged\(\) without a `with`:torchbelay.BelayWarning")

Made = tuple[nn.Module, Any, tb.Belay]


def odd_buffers() -> nn.Module:
    """Buffers that cannot be written to, that modules share, and that are None."""
    model = with_batchnorm()
    with torch.inference_mode():
        model[1].register_buffer("made_in_inference", torch.arange(3.0))
    model[0].register_buffer("expanded", torch.ones(1).expand(4))
    model[0].register_buffer("shared", torch.zeros(2))
    model[3].register_buffer("shared", model[0].shared)
    model[3].register_buffer("nothing", None)
    return model


def held(made: Made) -> Made:
    """The same, with a module and a mapping of its average that somebody holds."""
    made[2].holding = made[2].module(), made[2].tensors()
    return made


MODELS: dict[str, Callable[[], Made]] = {
    "in place": lambda: attached(EMA),
    "rounded": lambda: attached(EMA, model=mlp(torch.bfloat16)),
    "kernels": lambda: attached(EMA, model=nn.Linear(3, 1, bias=False), impl="triton"),  # slow in the interpreter
    "host": lambda: attached(EMA, device="cpu"),
    "a spectator of BatchNorm": lambda: attached(EMA, model=with_batchnorm(), spectators={"short": EMA}),
    "averaged buffers": lambda: attached(EMA, model=with_batchnorm(), buffers="average"),
    "odd buffers": lambda: attached(EMA, model=odd_buffers()),
    "held": lambda: held(attached(EMA, model=nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))),
    "held and rounded": lambda: held(attached(EMA, model=mlp(torch.bfloat16))),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
READ: dict[str, tuple[Callable[[], Made], Any]] = {
    "blend": (lambda: attached(EMA), tb.readouts.blend(0.5)),
    "bema, rounded": (lambda: attached(EMA, model=mlp(torch.bfloat16), keep_initial=True), tb.readouts.bema()),
    "centre, averaged buffers": (
        lambda: attached(BELAY, model=with_batchnorm(), buffers="average"),
        tb.readouts.centre(),
    ),
    "odd buffers": (lambda: attached(EMA, model=odd_buffers()), tb.readouts.blend(0.5)),
}
every_readout = pytest.mark.parametrize(("make", "readout"), READ.values(), ids=READ)


def identities(model: nn.Module) -> list[Any]:
    """Which tensors the model has, and where."""
    return [(name, id(t), t.data_ptr()) for name, t in (*model.named_parameters(), *model.named_buffers())]


@every_model
def test_an_exception_at_any_line_of_entering_or_leaving_leaves_weights_and_average_whole(make) -> None:
    model, optimizer, belay = make()
    name = "short" if "short" in belay.state_dict()["averages"] else "average"
    train(model, optimizer, 2)

    def swap() -> None:
        with belay.averaged(name):
            pass

    entered, tensors = [], identities(model)
    handler = signal.getsignal(signal.SIGINT)
    before = snapshot(model, belay)
    for line in every_line(swap):
        with raising_at(line) as place, pytest.raises(Interruption), belay.averaged(name):
            entered.append(line)
        assert same(snapshot(model, belay), before), place
        assert identities(model) == tensors, place
        assert signal.getsignal(signal.SIGINT) is handler, place
        with belay.averaged(name):  # no block is left open
            assert not same(values(model), before["model"]), place
        if line % 20 == 0:
            train(model, optimizer, 1, first=line)
            before = snapshot(model, belay)
    assert 0 < len(entered) < line  # entering and leaving were interrupted


@every_readout
def test_an_exception_at_any_line_of_reading_out_leaves_weights_and_average_whole(make, readout) -> None:
    model, optimizer, belay = make()
    train(model, optimizer, 2)

    def swap() -> None:
        with belay.averaged(readout=readout):
            pass

    entered, tensors = [], identities(model)
    before, inside = snapshot(model, belay), belay.average_state_dict(readout=readout)
    for line in every_line(swap):
        with raising_at(line) as place, pytest.raises(Interruption), belay.averaged(readout=readout):
            entered.append(values(model))
        assert same(snapshot(model, belay), before), place
        assert identities(model) == tensors, place
        with belay.averaged(readout=readout):  # no block is left open
            assert same(values(model), dict(inside)), place
    assert 0 < len(entered) < line
    assert all(same(each, dict(inside)) for each in entered)  # a block is entered with all of it or not at all


@every_readout
def test_an_exception_at_any_line_of_exporting_a_readout_leaves_every_tensor_in_its_place(make, readout) -> None:
    model, optimizer, belay = make()
    train(model, optimizer, 2)
    before, tensors = snapshot(model, belay), identities(model)
    for line in every_line(lambda: belay.average_state_dict(readout=readout)):
        with raising_at(line) as place, pytest.raises(Interruption):
            belay.average_state_dict(readout=readout)
        assert identities(model) == tensors, place
        assert same(snapshot(model, belay), before), place


def test_an_exception_between_the_blocks_and_what_python_does_for_them_is_one_of_them() -> None:
    """Python's own code around a `with` block may be interrupted by a handler too, when nothing is held back."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)

    def swap() -> None:
        with belay.averaged():
            pass

    before, handler = snapshot(model, belay), signal.getsignal(signal.SIGINT)
    own = [Path(contextlib.__file__)]
    places = set()
    for line in every_line(swap, own):
        try:
            with raising_at(line, own) as place:
                swap()
        except Interruption as problem:
            places.add(str(problem))
        assert same(snapshot(model, belay), before), place
        assert signal.getsignal(signal.SIGINT) is handler, place
    assert len(places) > 5


def part_of(name: str, parameter: torch.Tensor) -> Any:
    return EMA if name.startswith("0") else None


@pytest.mark.parametrize("other", [False, True], ids=["its own average", "that of another Belay"])
def test_an_exception_at_any_line_of_entering_or_leaving_leaves_a_module_what_it_was(other: bool) -> None:
    """Its average, the weights that it shares with the model, and its buffers, while it is held and another enters."""
    model, optimizer, belay = attached(part_of, model=nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    second = tb.Belay(model, optimizer, EMA)
    train(model, optimizer, 2)
    made, tensors = belay.module(), belay.tensors()
    entered = second if other else belay

    def swap() -> None:
        with entered.averaged():
            assert_is(made, belay)

    before, weights = snapshot(model, belay), {name: t.clone() for name, t in tensors.items()}
    for line in every_line(swap):
        try:
            with raising_at(line) as place:
                swap()
        except Interruption:
            pass
        assert same(snapshot(model, belay), before), place
        assert same({name: t.clone() for name, t in tensors.items()}, weights), place
        assert_is(made, belay)
        assert shared(made[1].weight, model[1].weight), place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", ["tensors", "module"])
def test_an_exception_at_any_line_of_beginning_to_hold_an_average_inside_leaves_all_whole(dtype, use: str) -> None:
    """Inside the block both weights and average are right, wherever they are, and so they are after it."""
    model, optimizer, belay = attached(EMA, model=with_batchnorm().to(dtype))
    train(model, optimizer, 2)
    before = snapshot(model, belay)
    average = belay.average_state_dict()

    def lines() -> None:
        with belay.averaged():
            getattr(belay, use)()

    finished = []
    for line in every_line(lines):
        with belay.averaged():
            try:
                with raising_at(line) as place:
                    getattr(belay, use)()
            except Interruption:
                pass
            else:
                finished.append(line)
            assert same(values(model), average), place
            assert same(belay.state_dict(), before["belay"]), place
            assert same({name: t.clone() for name, t in belay.tensors().items()}, weights_of(before)), place
            assert same(dict(belay.average_state_dict()), dict(average)), place
        assert same(snapshot(model, belay), before), place
        if finished:
            break
    assert finished  # all lines have had their turn


def weights_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state["belay"]["averages"]["average"]["weights"]
    return found


def test_an_exception_at_any_line_of_making_a_module_changes_nothing() -> None:
    model, optimizer, belay = attached(EMA, model=nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    train(model, optimizer, 2)
    before, tensors = snapshot(model, belay), identities(model)
    for line in every_line(belay.module):
        with raising_at(line) as place, pytest.raises(Interruption):
            belay.module()
        assert same(snapshot(model, belay), before), place
        assert identities(model) == tensors, place
    gc.collect()
    with at_copies(4, send=()) as asked, belay.averaged():  # weights and average trade: nobody holds the average
        pass
    assert asked.names.count("_foreach_copy_") == 4


@pytest.mark.parametrize("mode", ["copy", "average"])
def test_an_exception_at_any_line_of_leaving_gives_back_buffers_that_were_written_inside(mode: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers=mode)
    train(model, optimizer, 2)

    def swap() -> None:
        with belay.averaged():
            model(batch(7))

    for line in every_line(swap):
        own, average = values(model), belay.average_state_dict()
        with raising_at(line) as place, pytest.raises(Interruption):
            swap()
        assert same(values(model), own), place
        exported = belay.average_state_dict()
        weights = {key: value for key, value in exported.items() if key.startswith(("0", "3"))}
        assert same(weights, {key: average[key] for key in weights}), place
        train(model, optimizer, 1, first=line)  # which drops the buffers that the average may have now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exception_at_any_line_of_copying_leaves_the_weights_or_the_average(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm().to(dtype), buffers="average")
    train(model, optimizer, 2)
    own, average = values(model), belay.average_state_dict()
    seen = []
    for line in every_line(belay.copy_to_model):
        model.load_state_dict(own)
        with raising_at(line) as place, pytest.raises(Interruption):
            belay.copy_to_model()
        now = values(model)
        seen.append(same(now, average))
        assert seen[-1] or same(now, own), place
    assert seen == sorted(seen)  # first nothing has changed, then everything
    assert {*seen} == {False, True}


def test_an_exception_at_any_line_of_an_export_leaves_every_tensor_in_its_place() -> None:
    model, optimizer, belay = attached(EMA, model=odd_buffers(), buffers="average")
    train(model, optimizer, 2)
    before, tensors = snapshot(model, belay), identities(model)
    for line in every_line(belay.average_state_dict):
        with raising_at(line) as place, pytest.raises(Interruption):
            belay.average_state_dict()
        assert identities(model) == tensors, place
        assert same(snapshot(model, belay), before), place


def test_a_state_dict_hook_that_raises_leaves_every_tensor_in_its_place() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    tensors = identities(model)

    def refuse(*_: Any) -> None:
        raise OSError("not now")

    handle = model[2].register_state_dict_post_hook(refuse)
    with pytest.raises(OSError, match="not now"):
        belay.average_state_dict()
    handle.remove()
    assert identities(model) == tensors


# Memory --------------------------------------------------------------------------------------------------------------


def test_memory_that_runs_out_inside_does_not_keep_the_model_from_leaving() -> None:
    """The scratch buffer of the way back does not fit: it goes back in smaller pieces."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with ExitStack() as scarce, belay.averaged():
        memory = scarce.enter_context(Scarcity(1))
    assert memory.refused
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)


def test_a_readout_comes_back_without_any_memory() -> None:
    """The weights were set aside before: nothing has to be allocated for them to return."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with ExitStack() as scarce, belay.averaged(readout=tb.readouts.blend(0.5)):
        scarce.enter_context(Scarcity(0))
    assert same(snapshot(model, belay), before)


@pytest.mark.parametrize("at", ["clone", "_foreach_sub"], ids=["setting aside", "mixing the third piece"])
def test_memory_that_runs_out_while_reading_out_leaves_everything_as_it_was(monkeypatch, at: str) -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before = snapshot(model, belay)

    def exhaust(name: str, done: list[str]) -> None:
        if name == at and done.count(name) == 2:
            raise MemoryError("does not fit")

    seams.limit_scratch(monkeypatch, 5)
    with Operations(exhaust) as asked, pytest.raises(MemoryError), belay.averaged(readout=tb.readouts.blend(0.5)):
        pytest.fail("the block must not be entered")
    monkeypatch.undo()
    assert asked.names.count("_foreach_copy_") == (0 if at == "clone" else 2)  # pieces that were written
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)


@pytest.mark.parametrize("use", ["export", "save", "swap", "step", "copy"])
def test_a_block_that_could_not_be_left_is_left_when_it_can_be(use: str) -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before, average = snapshot(model, belay), belay.average_state_dict()
    with ExitStack() as scarce, pytest.raises(MemoryError), belay.averaged():
        scarce.enter_context(Scarcity(0))
    if use == "export":
        assert same(belay.average_state_dict(), average)
    elif use == "save":
        assert same(belay.state_dict(), before["belay"])
    elif use == "swap":
        with belay.averaged():
            assert same(values(model), average)
    elif use == "step":
        with pytest.raises(RuntimeError, match="compute the gradients again"):
            train(model, optimizer, 1, first=3)
    else:
        belay.copy_to_model()
        assert same(values(model), average)
        return
    assert same(snapshot(model, belay), before)


# Signals -------------------------------------------------------------------------------------------------------------

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handling(**handlers: Handler) -> Iterator[None]:
    """Handle signals, by name, in this way."""
    before = {name: signal.signal(getattr(signal, name), handler) for name, handler in handlers.items()}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(number)


def at_copies(*which: int, send: tuple[int, ...]) -> Operations:
    """Send signals at these copies of whole lists, of which a swap in one piece makes four."""

    def interrupt(name: str, done: list[str]) -> None:
        if name == "_foreach_copy_" and done.count(name) in which:
            for number in send:
                os.kill(os.getpid(), number)

    return Operations(interrupt)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGALRM", "SIGINT"])
def test_a_signal_whose_handler_stops_the_program_waits_until_the_swap_is_done(name: str, at: int) -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before, entered = snapshot(model, belay), []
    with handling(**{name: stop}):
        with at_copies(at, send=(getattr(signal, name),)) as asked, pytest.raises(SystemExit), belay.averaged():
            entered.append(True)
        assert signal.getsignal(getattr(signal, name)) is stop
    assert bool(entered) is (at > 1)
    assert asked.names.count("_foreach_copy_") == 4  # there and back
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)


def test_several_signals_are_delivered_each_and_in_order() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before, heard = snapshot(model, belay), []

    def listen(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if number == signal.SIGUSR1:
            raise KeyboardInterrupt

    sent = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)
    with handling(SIGUSR1=listen, SIGTERM=listen, SIGUSR2=listen):
        with at_copies(0, send=sent), pytest.raises(KeyboardInterrupt), belay.averaged():
            pytest.fail("the block must not be entered")
        assert heard == list(sent)
        heard.clear()
        gc.collect()  # the frame that was interrupted holds tensors, and what somebody holds does not trade
        with at_copies(2, send=sent[1:]), belay.averaged():
            pass
        assert heard == list(sent[1:])
    assert same(snapshot(model, belay), before)


def test_a_handler_may_itself_evaluate_the_average() -> None:
    """Held inside the handler of a signal that was held."""
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before, seen = snapshot(model, belay), []

    def evaluate(number: int, frame: FrameType | None) -> None:
        with belay.averaged():
            seen.append(values(model))

    with handling(SIGUSR1=evaluate):
        with at_copies(2, send=(signal.SIGUSR1,)), belay.averaged():
            inside = values(model)
        assert signal.getsignal(signal.SIGUSR1) is evaluate
    assert same(seen, [inside])
    assert same(snapshot(model, belay), before)


def test_ignored_signals_and_other_threads_stay_as_they_are() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with handling(SIGTERM=stop, SIGUSR1=signal.SIG_IGN):

        def swap() -> None:
            with belay.averaged():
                pass

        thread = threading.Thread(target=swap)
        thread.start()
        thread.join()
        swap()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is stop
    assert same(snapshot(model, belay), before)

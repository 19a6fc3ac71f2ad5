"""A warning if weights are trained on after the last step that was seen, and none in any other case."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.interrupting import Interruption, every_line, raising_at
from helpers.small import BELAY, EMA, mlp, train
from torchbelay.belay import writes

WARNED = r"the weights were written \d+ times since the last SGD\.step\(\) that was seen"


def trained(method: tb.methods.Method = EMA) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, method)
    train(model, optimizer, 3)
    return model, optimizer, belay


USES: dict[str, Callable[[tb.Belay], object]] = {
    "export": lambda belay: belay.average_state_dict(),
    "state": lambda belay: belay.state_dict(),
    "block": lambda belay: belay.averaged().__enter__(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_that_takes_over_is_noticed_once(use: str, kind: type[torch.optim.Optimizer]) -> None:
    model, _, belay = trained()
    train(model, kind(model.parameters(), lr=0.01), 600)
    with pytest.warns(tb.BelayWarning, match=WARNED):
        USES[use](belay)
    if use != "block":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            USES[use](belay)


def test_blocks_between_its_steps_do_not_hide_it() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.01)

    def go_on() -> None:
        for _ in range(30):
            train(model, other, 20)
            with belay.averaged():
                pass

    with pytest.warns(tb.BelayWarning, match=WARNED):
        go_on()


def blocks(model: nn.Module, belay: tb.Belay) -> None:
    for _ in range(300):
        with belay.averaged():
            pass


def nested_blocks(model: nn.Module, belay: tb.Belay) -> None:
    other = mlp()
    second = tb.Belay(other, torch.optim.SGD(other.parameters(), lr=0.1), EMA)
    for _ in range(300):
        with belay.averaged(), second.averaged():
            pass


def clips(model: nn.Module, belay: tb.Belay) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-1, 1)


def many_writes(model: nn.Module, belay: tb.Belay) -> None:
    with torch.no_grad():
        for p in model.parameters():
            for _ in range(600):
                p.mul_(1)


def reset(model: nn.Module, belay: tb.Belay) -> None:
    many_writes(model, belay)
    belay.reset()


LIVES: dict[str, Callable[[nn.Module, tb.Belay], object]] = {
    "nothing": lambda model, belay: None,
    "many blocks": blocks,
    "blocks inside those of another": nested_blocks,
    "clipped weights": clips,
    "writes before every step": many_writes,
    "reset": reset,
    "a cast and back": lambda model, belay: model.double().float(),
    "another layout": lambda model, belay: model.to(memory_format=torch.channels_last),
    "weights loaded": lambda model, belay: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.filterwarnings("error")
def test_ordinary_life_is_no_reason_to_warn(life: str, method: tb.methods.Method) -> None:
    model, optimizer, belay = trained(method)
    for _ in range(5):
        LIVES[life](model, belay)
        train(model, optimizer, 1)
        belay.average_state_dict()


@pytest.mark.filterwarnings("error")
def test_a_block_that_was_interrupted_at_any_line_leaves_the_counts_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "_FEW", 0)  # a single write that is counted would warn
    _, _, belay = trained()

    def swap() -> None:
        with belay.averaged():
            pass

    for line in every_line(swap):
        with raising_at(line), pytest.raises(Interruption):
            swap()
        belay.state_dict()


@pytest.mark.filterwarnings("error")
def test_who_steps_by_hand_may_do_so_now_and_then() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, None, EMA)
    train(model, optimizer, 1)
    belay.update()
    train(model, optimizer, 600)
    belay.average_state_dict()


@pytest.mark.filterwarnings("error")
def test_a_detached_belay_does_not_look() -> None:
    model, optimizer, belay = trained()
    belay.detach()
    train(model, optimizer, 600)
    belay.average_state_dict()


def test_weights_can_be_moved_by_swapping_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does so for DTensors, and refuses tensors that somebody refers to weakly."""
    model, optimizer, belay = trained()
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    model.double()
    train(model, optimizer, 1)
    assert next(iter(belay.average_state_dict().values())).dtype == torch.float64

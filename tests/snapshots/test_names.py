"""What snapshots know by its name: tensors in the memory of others, layers that move, parameters that come and go."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from torchbelay.snapshots import Recorder, synthesize

EMA = tb.methods.ema(0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p) if p.is_floating_point() else None
        optimizer.step()


def attach(model: nn.Module) -> tuple[torch.optim.Optimizer, tb.Belay]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, tb.Belay(model, optimizer, EMA)


class Row(nn.Module):
    """A weight, and a buffer that is a row of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("row", self.weight.detach()[1])


class Same(nn.Module):
    """A weight, and a buffer that is the same Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("alias", self.weight)


class Flat(nn.Module):
    """Two parameters that are views of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(8))
        self.a, self.b = nn.Parameter(self.flat[:3]), nn.Parameter(self.flat[3:8])


class Transposed(nn.Module):
    """A decoder whose weight is the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 3), nn.Linear(3, 2)
        self.decoder.weight.data = self.encoder.weight.data.t()


def without_decoder(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name != "decoder.weight"]


@pytest.mark.parametrize("make", [Row, Same, Flat, Transposed])
def test_what_lies_in_the_memory_of_weights_has_the_average_when_it_is_loaded(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, again = make(), make()
    optimizer = torch.optim.SGD(without_decoder(model), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    with Recorder(belay, tmp_path, every=5, weights=True):
        train(model, optimizer, 20)
    made = synthesize(tmp_path, EMA)
    assert made.predicted_error < 2e-4
    expected = belay.average_state_dict()
    found = made.state_dict()
    assert found.keys() == expected.keys()
    again.load_state_dict(found)
    for name, value in again.state_dict().items():
        assert torch.allclose(found[name], expected[name], atol=1e-5), name
        assert torch.allclose(value, expected[name], atol=1e-5), name


@pytest.mark.parametrize("case", ["two decays", "one not averaged", "two optimizers"])
def test_a_tensor_over_parameters_that_are_averaged_differently_is_left_out(case: str, tmp_path: Path) -> None:
    model = Flat()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (model.a, model.b)]
    rules = {
        "two decays": lambda name, _: tb.methods.ema(0.9 if name == "a" else 0.99),
        "one not averaged": lambda name, _: EMA if name == "a" else None,
        "two optimizers": EMA,
    }
    belay = tb.Belay(model, optimizers, rules[case])

    def record() -> None:
        with Recorder(belay, tmp_path, every=4):
            for _ in range(8):
                for optimizer in optimizers:
                    train(model, optimizer, 3 if case == "two optimizers" and optimizer is optimizers[1] else 1)

    with pytest.warns(UserWarning, match="snapshots leave out 'flat'"):
        record()
    found, expected = synthesize(tmp_path, EMA, max_error=None).state_dict(), belay.average_state_dict()
    assert found.keys() == {"a", "b"}
    assert torch.allclose(found["a"], expected["a"], atol=1e-5)
    if case == "two optimizers":
        assert torch.allclose(found["b"], expected["b"], atol=1e-5)


def test_a_tensor_over_parameters_of_two_optimizers_whose_averages_move_alike_is_kept(tmp_path: Path) -> None:
    model = Flat()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (model.a, model.b)]
    belay = tb.Belay(model, optimizers, lambda *_: tb.methods.ema(0.9))
    with Recorder(belay, tmp_path, every=4):
        for _ in range(8):
            for optimizer in optimizers:
                train(model, optimizer, 1)
    found, expected = synthesize(tmp_path, EMA).state_dict(), belay.average_state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], x, atol=1e-5) for name, x in expected.items())


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def check(folder: Path, belay: tb.Belay) -> None:
    """What is made is the average that was trained along, or is told to be far from it."""
    expected, made = belay.average_state_dict(), synthesize(folder, EMA, max_error=None)
    found = made.state_dict()
    assert found.keys() == expected.keys()
    assert made.predicted_error < 2e-4
    assert all(torch.allclose(found[name], x, atol=1e-5) for name, x in expected.items())


def exchange(model: nn.Sequential) -> None:
    model[0], model[-1] = model[-1], model[0]


@pytest.mark.parametrize("every", [5, 100])
def test_layers_may_trade_places(every: int, tmp_path: Path) -> None:
    model = layers(3)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=every, weights=True):
        train(model, optimizer, 17)
        exchange(model)
        train(model, optimizer, 5)
    check(tmp_path, belay)
    slow = synthesize(tmp_path, tb.methods.ema(0.999), max_error=None)
    assert slow.predicted_error > 0.01  # nothing from before the exchange is of use


def test_weights_are_told_from_others_if_no_average_follows_them(
    tmp_path: Path,
) -> None:
    model = layers(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    some = {"x": lambda name, _: tb.methods.ema(0.5) if name.startswith("0.") else None}
    belay = tb.Belay(model, optimizer, EMA, spectators=some)
    with Recorder(belay, tmp_path, every=5, averages=["x"], weights=True):
        train(model, optimizer, 12)
        model[1], model[2] = model[2], model[1]
        train(model, optimizer, 13)
    made = synthesize(tmp_path, EMA, max_error=None)
    assert made.predicted_error > 0.01


def test_names_that_were_free_for_a_while_are_known(tmp_path: Path) -> None:
    model = nn.Module()
    model.x, model.y = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 7)
        model.z = model.x
        del model.x
        train(model, optimizer, 5)
        model.x = model.y
        del model.y
        train(model, optimizer, 8)
    check(tmp_path, belay)
    made = synthesize(tmp_path, tb.methods.ema(0.99), max_error=None)
    assert made.predicted_error > 0.01


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("before", "between", "after"), [(7, 0, 5), (5, 2, 4), (5, 3, 9)])
def test_layers_that_trade_places_beside_a_resume(
    before: int, between: int, after: int, state: bool, tmp_path: Path
) -> None:
    """They do so after `before` steps and a resume, with the Recorder's state or without."""
    model = layers(2)
    optimizer, belay = attach(model)
    recorder = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, before)
    saved = {name: x.clone() for name, x in model.state_dict().items()}, belay.state_dict(), recorder.state_dict()
    recorder.close()
    again = layers(2)
    again.load_state_dict(saved[0])
    optimizer, belay = attach(again)
    belay.load_state_dict(saved[1])
    recorder = Recorder(belay, tmp_path, every=5)
    if state:
        recorder.load_state_dict(saved[2])
    train(again, optimizer, between)
    exchange(again)
    train(again, optimizer, after)
    recorder.close()
    check(tmp_path, belay)


def test_a_checkpoint_between_an_exchange_and_the_next_snapshot_knows_of_it(tmp_path: Path) -> None:
    model = layers(2)
    optimizer, belay = attach(model)
    recorder = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, 7)
    exchange(model)
    train(model, optimizer, 1)
    saved = {name: x.clone() for name, x in model.state_dict().items()}, belay.state_dict(), recorder.state_dict()
    recorder._background.wait()
    again = layers(2)
    again.load_state_dict(saved[0])
    optimizer, belay = attach(again)
    belay.load_state_dict(saved[1])
    with Recorder(belay, tmp_path, every=5) as recorder:
        recorder.load_state_dict(saved[2])
        train(again, optimizer, 12)
    check(tmp_path, belay)
    assert synthesize(tmp_path, tb.methods.ema(0.99), max_error=None).predicted_error > 0.01


def test_a_run_that_goes_back_to_before_an_exchange_forgets_it(tmp_path: Path) -> None:
    model = layers(2)
    optimizer, belay = attach(model)
    recorder = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, 15)
    saved = {name: x.clone() for name, x in model.state_dict().items()}, belay.state_dict(), recorder.state_dict()
    exchange(model)
    train(model, optimizer, 10)
    recorder.close()
    again = layers(2)
    again.load_state_dict(saved[0])
    optimizer, belay = attach(again)
    belay.load_state_dict(saved[1])
    with Recorder(belay, tmp_path, every=5) as recorder:
        recorder.load_state_dict(saved[2])
        train(again, optimizer, 10)
    check(tmp_path, belay)
    assert synthesize(tmp_path, tb.methods.ema(0.99)).predicted_error < 0.01  # with all snapshots from before it


def test_after_a_reset_names_that_were_exchanged_do_not_matter(tmp_path: Path) -> None:
    model = layers(2)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 7)
        model[0], model[1] = model[1], model[0]
        belay.reset()
        train(model, optimizer, 13)
    found = synthesize(tmp_path, EMA).state_dict()
    assert all(torch.allclose(found[name], x, atol=1e-5) for name, x in belay.average_state_dict().items())


@pytest.mark.filterwarnings("ignore:.* added to the optimizer")
def test_a_layer_may_be_put_between_others(tmp_path: Path) -> None:
    model = layers(3)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 17)
        new = nn.Linear(4, 4)
        model.insert(1, new)
        optimizer.add_param_group({"params": list(new.parameters())})
        train(model, optimizer, 63)
    check(tmp_path, belay)


def test_an_average_is_recorded_by_the_name_that_its_parameter_has_now(tmp_path: Path) -> None:
    model = layers(2)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 17)
        model[0] = nn.Sequential(model[0])
        train(model, optimizer, 8)
    made = synthesize(tmp_path, EMA)
    found, expected = made.state_dict(), belay.average_state_dict()
    assert made.predicted_error < 2e-4
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], x, atol=1e-5) for name, x in expected.items())


@pytest.mark.filterwarnings("ignore:.* added to the optimizer", "ignore:.* taken from the optimizer")
def test_a_parameter_that_left_before_its_first_snapshot_begins_when_it_comes_back(tmp_path: Path) -> None:
    model = layers(2)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.05)
    belay = tb.Belay(model, optimizer, EMA, spectators={"x": tb.methods.ema(0.93)})
    with Recorder(belay, tmp_path, every=5, averages=["average"]):
        train(model, optimizer, 3)
        group = optimizer.param_groups.pop()
        train(model, optimizer, 20)
        model[1].weight.data.copy_(torch.randn(4, 4) + 30)
        optimizer.add_param_group(group)
        train(model, optimizer, 62)
    found, expected = synthesize(tmp_path, EMA).state_dict(), belay.average_state_dict()
    assert torch.allclose(found["1.weight"], expected["1.weight"], atol=1e-4)


def test_whole_numbers_that_the_optimizer_holds_are_no_averages(tmp_path: Path) -> None:
    model = layers(1)
    model.register_parameter("k", nn.Parameter(torch.arange(3), requires_grad=False))
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 7)
        model.k.data.add_(1)
        train(model, optimizer, 13)
    made = synthesize(tmp_path, EMA)
    assert made.predicted_error < 1e-3
    assert made.state_dict()["k"].tolist() == [1, 2, 3]


def test_what_has_left_the_model_is_not_in_the_result(tmp_path: Path) -> None:
    model = layers(1)
    model.add_module("aux", nn.Linear(2, 2).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 7)
        del model.aux
        train(model, optimizer, 13)
    found: dict[str, Tensor] = dict(synthesize(tmp_path, EMA).state_dict())
    assert found.keys() == model.state_dict().keys()
    model.load_state_dict(found)

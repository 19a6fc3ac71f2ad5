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


def test_a_tensor_over_parameters_that_are_averaged_differently_is_refused(tmp_path: Path) -> None:
    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: tb.methods.ema(0.9 if name == "a" else 0.99))
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 10)
    with pytest.raises(ValueError, match="'flat': it lies in the memory of several parameters"):
        synthesize(tmp_path, EMA)


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def test_layers_that_trade_places_are_refused_and_told(tmp_path: Path) -> None:
    model = layers(3)
    optimizer, belay = attach(model)
    recorder = Recorder(belay, tmp_path, every=5)
    train(model, optimizer, 17)
    model[0], model[2] = model[2], model[0]
    with pytest.warns(UserWarning, match=r"the name '0\.bias' was that of another parameter"):
        train(model, optimizer, 5)
    recorder.close()
    with pytest.raises(ValueError, match=r"no snapshot from step 20 on tells the average of '0\.bias'"):
        synthesize(tmp_path, EMA)
    assert synthesize(tmp_path, EMA, at=15).predicted_error < 2e-4


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
def test_a_layer_that_is_put_between_others_moves_their_names(tmp_path: Path) -> None:
    model = layers(3)
    optimizer, belay = attach(model)
    with Recorder(belay, tmp_path, every=5):
        train(model, optimizer, 17)
        new = nn.Linear(4, 4)
        model.insert(1, new)
        optimizer.add_param_group({"params": list(new.parameters())})
        with pytest.warns(UserWarning, match=r"the name '2\.bias' was that of another parameter"):
            train(model, optimizer, 63)
    with pytest.raises(ValueError, match=r"tells the average of '2\.bias'"):
        synthesize(tmp_path, EMA)


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

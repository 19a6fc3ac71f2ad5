"""What `read()` returns is understood in every usual shape, and anything else is said."""

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torchbelay.testing.reading import UnreadableError, read_average
from torchbelay.testing.toy import Toy


def toy() -> Toy:
    model = Toy(3, torch.float64)
    model.register_buffer("seen", torch.arange(2))
    return model


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() + 1 for name, p in model.named_parameters()}


SHAPES: dict[str, Any] = {
    "a mapping": parameters,
    "a state dict": lambda model: {**parameters(model), "seen": model.seen},
    "a state dict of a wrapper": lambda model: {f"module.{name}": t for name, t in parameters(model).items()},
    "with other entries": lambda model: {**parameters(model), "decay": 0.9, "steps": torch.tensor(3)},
    "names without dots": lambda model: {name.replace(".", ""): t for name, t in parameters(model).items()},
    "names with underscores": lambda model: {name.replace(".", "_"): t for name, t in parameters(model).items()},
    "a list": lambda model: [*parameters(model).values()],
    "a generator": lambda model: iter(parameters(model).values()),
    "pairs": lambda model: parameters(model).items(),
    "a list inside": lambda model: {"decay": 0.9, "shadow_params": [*parameters(model).values()], "stored": None},
    "a mapping inside": lambda model: {"step": 3, "average": parameters(model)},
    "arrays": lambda model: {name: t.numpy() for name, t in parameters(model).items()},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_usual_shape_is_read(shape: str) -> None:
    model = toy()
    read = read_average(SHAPES[shape](model), model)
    for name, expected in parameters(model).items():
        assert torch.equal(read[name], expected)
    assert read.keys() <= {*parameters(model), "seen"}


@pytest.mark.parametrize("wrap", [copy.deepcopy, AveragedModel, nn.Sequential], ids=["itself", "torch's", "Sequential"])
def test_a_module_is_read_whatever_wraps_it(wrap: Any) -> None:
    model = toy()
    other = wrap(model)
    read = read_average(other, model)
    assert read.keys() == {"layer.weight", "layer.bias", "seen"}


def test_a_list_of_what_is_trained_is_read_by_the_order_of_that() -> None:
    model = toy()
    model.layer.weight.requires_grad_(False)
    assert read_average([torch.zeros(3)], model).keys() == {"layer.bias"}


def test_some_parameters_are_enough() -> None:
    model = toy()
    assert read_average({"layer.weight": torch.zeros(3, 1)}, model).keys() == {"layer.weight"}


WRONG: dict[str, tuple[Any, str]] = {
    "None": (None, "returned NoneType; it must return a state dict, a mapping name -> tensor, a module, or"),
    "a number": (3.0, "returned float"),
    "a text": ("average.pt", "returned str"),
    "one tensor": (torch.zeros(6), "returned Tensor"),
    "nothing": ([], r"returned 0 values \(nothing\) for a model of 2 parameters"),
    "too many": ([torch.zeros(3)] * 5, r"returned 5 values \('Tensor'\) for a model of 2 parameters"),
    "not tensors": ([1.0, 2.0], r"returned 2 values \('float'\)"),
    "other names": ({"a": torch.zeros(3), "b": 1}, r"the keys 'a', 'b', and no name of the model .* \('layer.weight'"),
    "an empty mapping": ({}, r"with the keys \(none\), and no name of the model"),
    "another shape": ({"layer.bias": torch.zeros(7)}, r"the shape \(7,\) for 'layer.bias' of shape \(3,\)"),
    "another order": ([torch.zeros(3), torch.zeros(3, 1)], r"the shape \(3,\) for 'layer.weight'"),
    "two averages": (
        {f"{who}.layer.{what}": torch.zeros(3, 1) for who in ("online", "ema") for what in ("weight", "bias")},
        "several tensors of one name, below 'ema.', 'online.'; return the average's alone",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_said(case: str) -> None:
    returned, message = WRONG[case]
    with pytest.raises(UnreadableError, match=message):
        read_average(returned, toy())


def test_names_may_be_anything_that_is_no_text() -> None:
    model = toy()
    assert read_average({**parameters(model), 3: torch.zeros(1), numpy.int64(4): None}, model).keys() == {
        "layer.weight",
        "layer.bias",
    }

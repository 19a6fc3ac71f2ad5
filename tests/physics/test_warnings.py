"""A warning names the line of the user's code, however deep in torch and in the library it is raised."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchbelay as tb

PULLS = tb.Spring(k=1.0, m1=10.0, m2=20.0)


def an_unstable_spring() -> None:
    tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=50.0)  # here


def a_changed_spring() -> None:
    dataclasses.replace(tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0), c1=50.0)  # here


def a_narrow_model() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), PULLS)  # here


def a_late_parameter() -> None:
    model = nn.ModuleList([nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, PULLS)
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.step()  # here


@pytest.mark.parametrize("cause", [an_unstable_spring, a_changed_spring, a_narrow_model, a_late_parameter])
def test_a_warning_names_the_line_of_the_user(cause: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    (warning,) = [each for each in caught if issubclass(each.category, tb.BelayWarning)]
    lines, first = inspect.getsourcelines(cause)
    assert (warning.filename, warning.lineno) == (
        __file__,
        first + [line.endswith("# here\n") for line in lines].index(True),
    )


def test_code_without_a_module_name_runs() -> None:
    """Python itself prints no warning in such code."""
    namespace = {"__name__": None, "Spring": tb.Spring}
    exec("spring = Spring(k=1.0, m1=10.0, m2=20.0, c1=50.0)", namespace)
    assert not namespace["spring"].is_stable

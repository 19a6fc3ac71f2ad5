"""The four functions: values by hand, gradients by autograd, and their minima and saddle."""

import pytest
import torch
from torch import Tensor

from torchbelay.lab.plane.functions import ABSOLUTE, BEALE, BOWL, FUNCTIONS, ROSENBROCK, Function, find_function

f64 = torch.float64
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
smooth = pytest.mark.parametrize("function", [ROSENBROCK, BEALE, BOWL], ids=lambda f: f.name)


def at(*points: tuple[float, float]) -> Tensor:
    return torch.tensor(points, dtype=f64)


def scattered(*shape: int, seed: int = 3) -> Tensor:
    """Return points in a square that is larger than every box of starts."""
    return torch.rand(*shape, 2, generator=torch.Generator().manual_seed(seed), dtype=f64) * 8 - 4


def hessian(function: Function, point: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(function, point)


@pytest.mark.parametrize(
    ("function", "point", "value"),
    [
        (ROSENBROCK, (1.0, 1.0), 1.0),
        (ROSENBROCK, (2.0, -1.0), 104.0),
        (ROSENBROCK, (0.0, 0.5), 6.25),
        (ROSENBROCK, (-0.2, 0.3), 8.45),
        (BEALE, (-3.0, 7.0), 14.203125),  # X = 0: what is left is the sum of the squared constants
        (BEALE, (0.0, -0.5), 2.953125),  # Y = 0
        (BEALE, (-1.0, -0.5), 0.703125),
        (BEALE, (-2.0, 1.5), 126.453125),
        (ABSOLUTE, (-2.0, 3.0), 3.2),
        (ABSOLUTE, (0.5, -0.25), 0.3),
        (BOWL, (1.0, 10.0), 0.4),
        (BOWL, (2.0, 0.0), 0.8),
        (BOWL, (0.0, -10.0), 0.2),
    ],
    ids=lambda x: x.name if isinstance(x, Function) else None,
)
def test_values_by_hand(function: Function, point: tuple[float, float], value: float) -> None:
    assert float(function(at(point))) == pytest.approx(value, rel=1e-14)  # a few roundings


@each
@pytest.mark.parametrize("shape", [(), (1,), (6,), (3, 5), (2, 3, 4)])
def test_gradients_are_those_of_autograd_for_points_of_any_shape(function: Function, shape: tuple[int, ...]) -> None:
    w = scattered(*shape).requires_grad_()
    function(w).sum().backward()
    written = torch.full((2, *w.shape), torch.nan, dtype=f64)
    with torch.no_grad():
        function.gradient_(w, out=written[1])  # a view, as in a race
        along = function.gradient(w[..., 0], w[..., 1])
    assert w.grad is not None
    torch.testing.assert_close(written[1], w.grad, rtol=1e-12, atol=1e-12)  # sums of terms of up to 1e5 cancel
    assert torch.equal(torch.stack(along, -1), written[1])
    assert bool(written[0].isnan().all())


@each
def test_the_value_of_many_points_is_that_of_each(function: Function) -> None:
    w = scattered(3, 5)
    one_by_one = torch.stack([function(point) for point in w.flatten(0, 1)]).unflatten(0, (3, 5))
    torch.testing.assert_close(function(w), one_by_one, rtol=1e-14, atol=0)


@each
def test_the_minimum_is_the_origin_and_its_value_0(function: Function) -> None:
    origin = at((0.0, 0.0))
    gradient = torch.full_like(origin, torch.nan)
    function.gradient_(origin, out=gradient)
    assert function(origin).tolist() == [0.0]
    assert gradient.abs().tolist() == [[0.0, 0.0]]


@each
@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0, 4.0])
def test_the_value_is_positive_all_around_the_minimum(function: Function, radius: float) -> None:
    angle = torch.linspace(0, 2 * torch.pi, 721, dtype=f64)
    assert float(function(radius * torch.stack((angle.cos(), angle.sin()), -1)).min()) > 0


@smooth
def test_the_stated_curvature_is_the_largest_at_the_minimum(function: Function) -> None:
    curvatures = torch.linalg.eigvalsh(hessian(function, torch.zeros(2, dtype=f64)))
    assert function.curvature == pytest.approx(float(curvatures.max()), rel=1e-13)


@pytest.mark.parametrize(
    ("function", "small", "large"),
    [
        (ROSENBROCK, pytest.approx(0, abs=1e-12), pytest.approx(202, rel=1e-14)),
        (BEALE, pytest.approx(0.3015, abs=5e-5), pytest.approx(48.98, abs=5e-3)),  # all digits that are known of them
        (BOWL, pytest.approx(0.004, rel=1e-13), pytest.approx(0.4, rel=1e-14)),
    ],
    ids=lambda x: x.name if isinstance(x, Function) else "",
)
def test_both_curvatures_at_the_minimum(function: Function, small: float, large: float) -> None:
    assert torch.linalg.eigvalsh(hessian(function, torch.zeros(2, dtype=f64))).tolist() == [small, large]


@each
def test_a_function_is_found_by_its_name(function: Function) -> None:
    assert find_function(function.name) is function


def test_the_absolute_function_states_no_curvature() -> None:
    assert ABSOLUTE.curvature is None


def test_rosenbrocks_valley_is_quartic() -> None:
    y = torch.tensor([0.1, 0.2, 0.4], dtype=f64)
    torch.testing.assert_close(ROSENBROCK.value(y**2, y), y**4, rtol=1e-13, atol=0)


def test_beale_has_a_saddle_where_the_paper_has_it() -> None:
    saddle = torch.tensor((-3.0, 0.5), dtype=f64)
    gradient = torch.full_like(saddle, torch.nan)
    BEALE.gradient_(saddle, out=gradient)
    low, high = torch.linalg.eigvalsh(hessian(BEALE, saddle)).tolist()
    assert gradient.abs().tolist() == [0.0, 0.0]
    assert low < -1
    assert high > 1

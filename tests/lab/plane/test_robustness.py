"""The limits of the learning rate that theory predicts, held against runs just below and just above them."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchbelay.lab.arms import (
    BELAY_SGD,
    CONTROLS,
    EMA_SGD,
    MATCHED_SGD,
    MOMENTUM_SGD,
    PAPER_ARMS,
    PAPER_SPRING,
    SGD,
    Arm,
    Lane,
    belay_arm,
)
from torchbelay.lab.plane import race
from torchbelay.lab.plane.functions import ABSOLUTE, BOWL, ROSENBROCK, Function
from torchbelay.lab.plane.robustness import AVERAGING, stability_limit, theta_limit
from torchbelay.physics.methods import centred

f64 = torch.float64
NEAR = 0.02  # how close to a limit the runs below and above it are
ADAM = [arm for arm in (*PAPER_ARMS, *CONTROLS) if arm.inner == "Adam"] + [belay_arm("Adam without momentum")]
LIMITED = (SGD, EMA_SGD, BELAY_SGD, MATCHED_SGD, MOMENTUM_SGD)


def growth(function: Function, lanes: list[Lane], steps: int) -> list[float]:
    """Return how much larger |w1| is in the last quarter of a run than in the first, from the steep axis."""
    field = race.Race([function], torch.tensor([[[1e-3, 0.0]]], dtype=f64), lanes)
    sizes = []
    for _ in range(steps):
        field.step()
        sizes.append(field.w[:, 0, 0, 0].abs())
    largest = torch.stack(sizes).nan_to_num(nan=torch.inf).unflatten(0, (4, -1)).amax(1)
    return (largest[-1] / largest[0]).tolist()


@pytest.mark.parametrize("function", [BOWL, ROSENBROCK], ids=lambda f: f.name)
def test_sgd_is_stable_below_the_predicted_limit_and_unstable_above(function: Function) -> None:
    bounds = {arm: stability_limit(arm, function) for arm in LIMITED}
    lanes = [Lane(arm, bound * factor) for arm, bound in bounds.items() for factor in (1 - NEAR, 1 + NEAR)]
    found = growth(function, lanes, 2000)
    for arm, below, above in zip(LIMITED, found[::2], found[1::2], strict=True):
        assert below < 0.1, arm.name
        assert above > 10, arm.name


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (SGD, 2 / 202),
        (EMA_SGD, 2 / 202),
        (BELAY_SGD, 2 * (0.95 + 0.975) / (0.95 * 1.975) / 202),
        (MATCHED_SGD, 2 / 202 / (0.95 / 3)),
        (MOMENTUM_SGD, 2 * 1.9 / 202),
    ],
    ids=lambda x: x.name if isinstance(x, Arm) else "",
)
def test_the_limits_on_rosenbrock_are_those_of_theory(arm: Arm, expected: float) -> None:
    assert stability_limit(arm, ROSENBROCK) == pytest.approx(expected, rel=1e-8)  # nine digits are recorded


@pytest.mark.parametrize("arm", ADAM, ids=lambda arm: arm.name)
def test_there_is_no_predicted_limit_for_adam(arm: Arm) -> None:
    assert stability_limit(arm, BOWL) is None


@pytest.mark.parametrize("arm", LIMITED, ids=lambda arm: arm.name)
def test_there_is_no_predicted_limit_without_a_curvature(arm: Arm) -> None:
    assert stability_limit(arm, ABSOLUTE) is None


def check_centred_limit(thetas: list[float], steps: int) -> None:
    lanes = []
    for theta in thetas:
        arm = Arm("centred", "SGD", centred(theta, AVERAGING, follow="before"))
        lanes += [Lane(arm, theta_limit(theta) / BOWL.curvature * factor) for factor in (0.95, 1.05)]
    found = growth(BOWL, lanes, steps)
    for theta, below, above in zip(thetas, found[::2], found[1::2], strict=True):
        assert below < 0.1, theta
        assert above > 10, theta


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(st.floats(AVERAGING - 1, 2.0), min_size=6, max_size=6))
@example([AVERAGING - 1, -0.9, -0.5, 0.0, 1.0, 2.0])
def test_the_centred_family_is_stable_below_its_predicted_limit_and_unstable_above(thetas: list[float]) -> None:
    check_centred_limit(thetas, 800)


def test_the_centred_limit_holds_too_where_a_complex_pair_leaves_the_circle() -> None:
    # It leaves slowly: 5% above the limit its size is 1 + 0.05·c/2, which 2400 steps raise to 90.
    check_centred_limit([-0.95, -0.94, -0.93], 3200)


@given(st.floats(-0.99, 5.0), st.floats(1e-3, 0.999))
@settings(deadline=None)
def test_the_closed_form_of_the_centred_limit_is_that_of_the_coupling(theta: float, c: float) -> None:
    coupling = centred(theta, c, follow="before").coupling(1, 1.0)
    assert theta_limit(theta, c) == pytest.approx(coupling.max_stable_lr(1.0), rel=1e-6)  # 1 + θ − c may cancel


@pytest.mark.parametrize("theta", [-0.75, -0.5, 0.0, 1.0, 2.0])
def test_the_centred_limit_is_about_2_over_1_plus_theta(theta: float) -> None:
    assert theta_limit(theta) == pytest.approx(2 / (1 + theta), rel=AVERAGING * abs(theta) / (1 + theta))


def test_belay_is_the_centred_method_of_its_theta_at_its_effective_rate() -> None:
    assert theta_limit(2.0) / PAPER_SPRING.effective_lr_scale / 202 == pytest.approx(
        stability_limit(BELAY_SGD, ROSENBROCK), rel=1e-8
    )

"""explain(): the paragraph has the right numbers and no false statement."""

import math
import warnings
from typing import Any

import pytest

from torchbelay.physics import methods, theta_floor
from torchbelay.physics.explain import explain_momentum
from torchbelay.physics.inner_momentum import is_below_floor
from torchbelay.physics.spring import Spring
from torchbelay.physics.warnings import UnstableSpringWarning

INF = math.inf
TWO_D = {"k": 1.0, "m1": 10.0, "m2": 20.0}


def explained(**setting: Any) -> str:
    """Return the paragraph about a spring, stable or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpringWarning)
        return Spring(**setting).explain()


# setting, words in the paragraph, words that are not in it
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"k": 0.002, "m1": INF, "m2": 1.0, "follow": "after"},
        [
            "ordinary average (EMA with decay 0.999)",
            "never pulls",
            "half of the distance in 693 steps",
            "99% in 4,603 steps",
        ],
        ["BELAY", "one step behind", "matched EMA"],
    ),
    (
        {"k": 1.0, "m1": INF, "m2": 10.0},
        ["one step behind (EMA with decay 0.95, ", "m1 = inf", "half of the distance in 13.5 steps", "ηh < 2"],
        ["ordinary", "BELAY"],
    ),
    (
        {"k": 1.0, "m1": INF, "m2": 10.0, "c2": 5.0},  # ρ² = 1 − 2δ + ω²/2 = 0.55
        ["velocity of its own (underdamped, decay 0.74162 in the long run)", "in 2.32 steps", "ηh < 2"],
        ["EMA with decay", "BELAY"],
    ),
    (
        TWO_D,
        [
            "BELAY, velocity-free",
            "κ1 = 0.05 of the distance",
            "κ2 = 0.025 of it (α = 0.95, β = 0.975)",
            "half of the distance in 8.89 steps and 99% in 59.1 steps",
            "moves at 0.3167 of the optimizer's learning rate",
            "stable below ηh = 2.052, which is 0.6498 in that effective rate, against 2",
            "matched EMA: decay 0.925, follow='before', at 0.3167 of the learning rate",
            "θ = m2/m1 = 2)",
            "multiply the optimizer's by 3.158",
        ],
        ["EMA with decay", "velocities"],
    ),
    (
        TWO_D | {"follow": "after"},
        ["moves at 0.3333 of", "decay 0.925, follow='after'", "multiply the optimizer's by 3."],
        ["follow='before'"],
    ),
    (
        TWO_D | {"c1": 5.0, "c2": 10.0},
        [
            "BELAY with velocities (underdamped)",
            "κ1 = 0.05",
            "in 2.51 steps",
            "moves at 1.267 of",
            "stable below ηh = 0.4709, which is 0.5965",
            "multiply the optimizer's by 0.7895",
        ],
        ["velocity-free", "α ="],
    ),
    (
        TWO_D | {"c1": 5.0, "c2": 10.0, "force": "printed"},
        ["BELAY with velocities (underdamped)", "moves at 0.5798 of"],
        ["1.267"],
    ),
    (
        {"k": 1.0, "m1": 10.0, "m2": INF},
        ["A tether: the average never moves and pulls the weights back by 0.05 of", "in 13.5 steps", "only so far"],
        ["BELAY", "matched EMA", "nan", "inf "],
    ),
    (
        {"k": 0.8, "m1": INF, "m2": 1.0},  # decay 0.6
        ["half of the distance in 1.36 steps and 99% in 9.02 steps"],
        ["less than one step"],
    ),
    (
        {"k": 1.0, "m1": 0.9, "m2": 0.9},
        ["less than one step", "No EMA matches it", "multiply the optimizer's by 4.5"],
        ["forgets half"],
    ),
    (
        TWO_D | {"c1": 0.5, "c2": 1.0},
        [
            "(unstable)",
            "never forgets",
            "No learning rate of SGD is stable",
            "Leave c1 and c2 out, or change the damping",
        ],
        ["In the long run", "matched EMA", "half of the distance"],
    ),
    (
        TWO_D | {"c1": 0.0, "c2": 0.0},
        ["(unstable)", "never forgets", "No learning rate of SGD is stable"],
        ["inf", "nan"],
    ),
    (
        {"k": 1.0, "m1": 10.0, "m2": INF, "c1": 0.1},
        ["A tether", "never forgets", "No learning rate of SGD is stable"],
        ["only so far"],
    ),
    (
        {"k": 1.0, "m1": INF, "m2": 10.0, "c2": 0.1},
        ["(unstable, decay 1.0198", "never forgets", "Leave c1 and c2 out"],
        ["For a longer memory"],
    ),
    (
        {"k": 1.0, "m1": INF, "m2": INF},
        ["Two infinite masses", "stays what it was", "Give one of them a finite mass"],
        ["forgets", "c1 and c2"],
    ),
]


@pytest.mark.parametrize(("setting", "said", "unsaid"), CASES, ids=[str(setting) for setting, _, _ in CASES])
def test_explain_says_the_right_numbers(setting: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    text = explained(**setting)
    assert [words for words in said if words not in text] == []
    assert [words for words in unsaid if words in text] == []


@pytest.mark.parametrize("setting", [setting for setting, _, _ in CASES], ids=str)
def test_explain_is_one_paragraph_of_sentences(setting: dict[str, Any]) -> None:
    text = explained(**setting)
    assert "\n" not in text
    assert "  " not in text
    assert text.endswith(".")


def test_the_learning_rate_that_it_advises_restores_the_old_pace() -> None:
    spring = Spring(**TWO_D)
    advised = float(spring.explain().rsplit("by ", 1)[1].rstrip("."))
    assert advised * spring.effective_lr_scale == pytest.approx(1, rel=5e-4)  # four digits are said


# The floor that the optimizer's momentum sets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "rate", "beta", "limit", "words"),
    [
        (-0.9, 0.05, 0.9, 0.2502, "and the stable range collapses. Give the optimizer β1 = 0, or the spring a θ"),
        (-0.9, 0.8, 0.5, 8.571, "That rate is above the stable range, so that the floor does not bind."),
        (-0.19, 0.5, 0.9, 43.51, "so that the floor does not bind."),
        (-0.9, 0.1, 0.543, 17.92, "and that ends the stable range. It is still no smaller than an EMA's."),
    ],
)
def test_what_a_theta_below_the_floor_costs(theta: float, rate: float, beta: float, limit: float, words: str) -> None:
    coupling = methods.centred(theta, rate).coupling(1, 0.1)
    said = explain_momentum(coupling, beta)
    assert theta < theta_floor(beta, rate)
    assert f"stable below ηh = {limit}, against {2 * (1 + beta) / (1 - beta):.4g} with an EMA" in said
    assert f"θ = {theta:.3g} is below it: two momenta feed each other" in said
    assert words in said


def test_a_range_collapses_in_words_only_if_it_is_smaller_than_that_of_an_ema() -> None:
    kinds = set()
    for beta in (0.3, 0.5, 0.9, 0.99):
        for rate in (0.01, 0.1, 0.4, 0.8, 0.95):
            for theta in (-0.99, -0.9, -0.7, -0.5, -0.3, -0.1):
                coupling = methods.centred(theta, rate).coupling(1, 0.1)
                said = explain_momentum(coupling, beta)
                smaller = coupling.max_stable_lr(1.0, momentum=beta) < 2 * (1 + beta) / (1 - beta)
                binds = is_below_floor(coupling, beta)
                assert ("collapses" in said) is (binds and smaller)
                assert ("does not bind" in said) is (theta < theta_floor(beta, rate) and not binds)
                kinds.add((binds, smaller))
    assert kinds == {(True, True), (True, False), (False, False)}

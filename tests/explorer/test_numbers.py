"""The explorer's numbers are Python's: golden values, texts, errors and snippets. Skipped in part without node.

After a change of `physics`, change docs/explorer/explorer.js alike and write the golden values anew:

    PYTHONPATH=src:tests python tests/helpers/explorer_golden.py
"""

import copy
import math
import random
import warnings
from typing import Any

import pytest
import torch

from helpers import explorer_golden as golden
from helpers.node import evaluate
from torchbelay import Spring, methods
from torchbelay.lab.arms import PAPER_ARMS, PAPER_EMA, PAPER_SPRING
from torchbelay.lab.plane.fig3 import START
from torchbelay.lab.plane.functions import FUNCTIONS
from torchbelay.lab.plane.quadratic import NOISE, QUADRATIC
from torchbelay.lab.report import style

ANEW = "write them anew with tests/helpers/explorer_golden.py, and change docs/explorer/explorer.js alike"


def differences(now: Any, kept: Any, where: str, tolerance: float) -> list[str]:
    """Return the places at which two nested values differ; numbers may differ by a share of their list's largest."""
    if isinstance(now, dict) and isinstance(kept, dict):
        if now.keys() != kept.keys():
            return [f"{where}: {sorted(now)} and {sorted(kept)}"]
        return [line for key in now for line in differences(now[key], kept[key], f"{where}.{key}", tolerance)]
    if isinstance(now, list) and isinstance(kept, list):
        if len(now) != len(kept):
            return [f"{where}: {len(now)} and {len(kept)} values"]
        if now and all(isinstance(x, float) for x in (*now, *kept)):
            size = max(map(abs, kept)) or 1.0
            return [f"{where}: {now} and {kept}"] * any(
                not abs(x - y) <= tolerance * size for x, y in zip(now, kept, strict=True)
            )
        pairs = enumerate(zip(now, kept, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{where}[{i}]", tolerance)]
    if isinstance(now, float) and isinstance(kept, float):
        return [] if math.isclose(now, kept, rel_tol=tolerance, abs_tol=1e-12) else [f"{where}: {now} and {kept}"]
    return [] if now == kept else [f"{where}: {now!r} and {kept!r}"]


# Golden values ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_golden_values_are_those_of_python_now() -> None:
    now, kept = copy.copy(golden.generate()), golden.read()
    paths, kept_paths = now.pop("races"), kept.pop("races")
    found = differences(now, kept, "golden", 1e-9)
    assert not found, f"{len(found)} golden values of the explorer are out of date, {ANEW}: {found[:5]}"
    # Paths of a strongly bent function multiply the last digit, which processors may round differently.
    found = differences(paths, kept_paths, "races", 1e-5)
    assert not found, f"{len(found)} golden paths of the explorer are out of date, {ANEW}: {found[:5]}"


def test_there_are_500_settings_of_all_modes_and_paths_of_200_steps() -> None:
    kept = golden.read()
    modes = [setting["state"]["mode"] for setting in kept["settings"]]
    assert len(modes) == 500
    assert all(modes.count(mode) >= 10 for mode in ("spring", "centred", "lookahead", "nesterov", "schedule-free"))
    velocities = [setting["hasVelocity"] for setting in kept["settings"]]
    assert 50 < sum(velocities) < 250
    assert 0 < sum(not setting["isStable"] for setting in kept["settings"]) < 250
    assert {race["fn"] for race in kept["races"]} == {function.name for function in (*FUNCTIONS, QUADRATIC)}
    assert all(race["at"][-1] == 200 for race in kept["races"])
    assert golden.PATH.stat().st_size < 1_000_000


@pytest.mark.thorough
def test_the_module_has_the_golden_values_under_node() -> None:
    report = evaluate("explorer.checkGolden(data)", golden.read())
    assert report["failures"] == []
    assert report["checked"] > 75_000
    exact = {"range", "maxStableLr", "halfLife", "decay", "gain of w1", "gain of w2", "impulse of w2"}
    assert exact <= report["worst"].keys()
    assert all(report["worst"][name] <= 1e-12 for name in exact)
    assert report["worst"]["path"] <= 1e-9


@pytest.mark.thorough
def test_the_check_finds_a_value_that_differs_in_the_eleventh_digit() -> None:
    kept = golden.read()
    wrong = {name: kept["settings"][i] for i, name in enumerate(("range", "halfLife", "effectiveLrScale", "radius"))}
    for name, setting in wrong.items():
        assert isinstance(setting[name], float)
        setting[name] *= 1 + 3e-11
    kept["settings"][5]["explanation"] += " "
    kept["races"][0]["lanes"][1]["w1"][7][0] += 1e-8
    failures = evaluate("explorer.checkGolden(data)", kept)["failures"]
    assert len(failures) == len(wrong) + 2, failures
    for name in (*wrong, "explanation", "path"):
        assert any(line.startswith(f"{name} of ") for line in failures), name


# What the page begins with ----------------------------------------------------------------------------------------


def test_presets_are_the_papers_settings_and_their_relatives() -> None:
    pairs = "explorer.PRESETS.map(({ id }) => [id, explorer.withPreset(explorer.DEFAULT, id)])"
    states = evaluate(f"Object.fromEntries({pairs})")
    found = {name: golden.method_of(_read(state)) for name, state in states.items()}
    assert found.pop("plane") == replace_unstable(PAPER_SPRING)
    assert found.pop("mnist") == replace_unstable(Spring(k=1.0, m1=2000.0, m2=500.0))
    assert found.pop("cifar10") == replace_unstable(Spring(k=1.0, m1=20000.0, m2=2000.0))
    assert found.pop("ema") == replace_unstable(PAPER_EMA)
    assert found.pop("lookahead") == methods.lookahead()
    assert found.pop("nesterov") == methods.nesterov(0.9)
    assert found.pop("schedule-free") == methods.schedule_free()
    gpa = found.pop("gpa").coupling(1, 0.1)
    right = methods.primal_averaging(mu_x=0.95, mu_y=0.5).coupling(1, 0.1)
    assert (gpa.a, gpa.b, gpa.p, gpa.q) == pytest.approx((right.a, right.b, right.p, right.q), rel=1e-14)
    spring = found.pop("critical-spring")
    assert spring.regime == "critical"
    assert spring.half_life == pytest.approx(Spring.critical(k=1.0, m1=2000.0, m2=500.0).half_life)
    average, x = found.pop("critical"), golden.DEFAULT["lr"] * golden.DEFAULT["curvature"]
    assert average.coupling(1, x).convergence_rate((1.0, 1.0), x) == pytest.approx(1 - x / 4, rel=1e-7)
    assert not found


def replace_unstable(spring: Spring) -> Spring:
    """Return the spring as the golden values make it: they allow unstable ones."""
    return Spring(k=spring.k, m1=spring.m1, m2=spring.m2, follow=spring.follow, allow_unstable=True)


def _read(state: dict[str, Any]) -> dict[str, Any]:
    return {key: math.inf if value == "inf" else value for key, value in state.items()}


def test_the_functions_are_those_of_the_laboratory() -> None:
    points = torch.rand(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = evaluate(
        "explorer.FUNCTIONS.map((f) => ({...f, values: data.map((w) => f.value(...w)),"
        "slopes: data.map((w) => f.gradient(...w))}))",
        points.tolist(),
    )
    assert [each["name"] for each in found] == [function.name for function in (*FUNCTIONS, QUADRATIC)]
    for each, function in zip(found, (*FUNCTIONS, QUADRATIC), strict=True):
        slopes = torch.empty_like(points)
        function.gradient_(points, out=slopes)
        assert each["curvature"] == function.curvature
        assert tuple(each["start"]) == START.get(function.name, (-1, 1))
        torch.testing.assert_close(
            torch.tensor(each["values"], dtype=torch.float64), function(points), rtol=1e-13, atol=0
        )
        torch.testing.assert_close(torch.tensor(each["slopes"], dtype=torch.float64), slopes, rtol=1e-13, atol=1e-15)
    assert [each["noise"] for each in found] == [0, 0, 0, 0, NOISE]


def test_the_lanes_are_the_six_of_the_report_in_its_colours() -> None:
    lanes = evaluate("explorer.raceLanes(explorer.DEFAULT)")
    assert [lane["name"] for lane in lanes] == [arm.name for arm in PAPER_ARMS]
    assert [lane["colour"] for lane in lanes] == [style.colour(arm.name) for arm in PAPER_ARMS]
    assert [lane["dashed"] for lane in lanes] == [style.dashes(arm.name) == "--" for arm in PAPER_ARMS]
    assert [lane["inner"] for lane in lanes] == [arm.inner for arm in PAPER_ARMS]


# Any setting ----------------------------------------------------------------------------------------------------------

_NOT_A_NUMBER = """data.flatMap((hash) => {
  const state = explorer.fromHash(hash), bad = [];
  if (explorer.problem(state) !== null) return ["refused"];
  const walk = (value, path) => {
    if (Number.isNaN(value)) bad.push(`${path} of ${hash}`);
    else if (value && typeof value === "object") for (const key in value) walk(value[key], `${path}.${key}`);
  };
  walk(explorer.analyze(state), "analyze");
  walk(explorer.impulseResponse(state, 20), "impulseResponse");
  walk(explorer.frequencyResponse(state, [1e-3, 1, 3.1]), "frequencyResponse");
  walk(explorer.noiseCurves(state, 5), "noiseCurves");
  explorer.toPython(state);
  const race = explorer.createRace({fn: state.fn, lanes: explorer.raceLanes(state), momentum: state.momentum});
  for (let i = 0; i < 20; i++) race.step();
  return bad;
})"""


@pytest.mark.thorough
def test_every_setting_that_an_address_can_have_is_shown_without_an_error_or_nan() -> None:
    rng = random.Random(7)

    def spread(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    addresses = []
    for _ in range(250):
        state: dict[str, Any] = {"mode": rng.choice(("spring", "centred", "lookahead", "nesterov", "schedule-free"))}
        state |= {
            "k": spread(1e-3, 10),
            "m1": rng.choice(("inf", spread(1, 1e9))),
            "m2": rng.choice(("inf", spread(1, 1e9))),
        }
        state |= {"damping": rng.choice((1, spread(1e-6, 1))), "follow": rng.choice(("before", "after"))}
        state |= {
            "theta": rng.choice((0, spread(1e-9, 1e6), spread(1e-9, 1) - 1)),
            "c": rng.choice((0.5, spread(1e-9, 1))),
        }
        state |= {"every": rng.randint(1, 100), "alpha": spread(1e-6, 1), "mu": rng.choice((0, 1 - spread(1e-9, 1)))}
        state |= {"step": rng.randint(2, 10**9), "lr": spread(1e-12, 1e6), "curvature": spread(1e-9, 1e9)}
        state |= {"momentum": rng.choice((0, 1 - spread(1e-6, 1))), "noise": rng.choice((0, spread(1e-6, 1e6)))}
        state |= {"fn": rng.choice(FUNCTIONS).name}
        addresses.append("#" + "&".join(f"{key}={value}" for key, value in state.items()))
    found = evaluate(_NOT_A_NUMBER, addresses)
    assert found.count("refused") < 80  # κ is 1 or more
    assert [line for line in found if line != "refused"] == []


# Texts ----------------------------------------------------------------------------------------


def test_numbers_are_written_as_python_writes_them() -> None:
    rng = random.Random(3)
    values = [
        0.0,
        1.0,
        0.5,
        0.03125,
        0.000244140625,
        2.5,
        1.25e-5,
        9.9995e5,
        999999.5,
        1e16,
        1e15,
        1e22,
        1e-5,
        123456.5,
    ]
    values += [rng.choice((1, -1)) * 10 ** rng.uniform(-12, 20) for _ in range(300)]
    values += [rng.randrange(1, 2**20) / 2 ** rng.randrange(0, 20) for _ in range(300)]  # many ties
    found = evaluate(
        "data.map((x) => [2, 3, 4, 6].map((n) => explorer.formatG(x, n)).concat(explorer.pythonFloat(x)))", values
    )
    assert found == [[*(format(x, f".{n}g") for n in (2, 3, 4, 6)), repr(x)] for x in values]


BAD = [
    {"k": 0.0},
    {"k": -1.5},
    {"m1": 0.5},
    {"m2": 0.01, "k": 3.0},
    {"m1": -2.0},
    {"follow": "after", "damping": 0.5},
    {"mode": "centred", "theta": -1.0},
    {"mode": "centred", "theta": -1 + 2**-50},
    {"mode": "centred", "c": 1.0},
    {"mode": "centred", "c": 0.0},
    {"mode": "lookahead", "every": 0},
    {"mode": "lookahead", "alpha": 1.5},
    {"mode": "nesterov", "mu": 1.0},
    {"mode": "schedule-free", "mu": -0.25},
]


def test_a_setting_that_python_refuses_has_the_words_of_its_error() -> None:
    found = evaluate("data.map((state) => explorer.problem({...explorer.DEFAULT, ...state}))", BAD)
    for state, words in zip(BAD, found, strict=True):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is compared)
            golden.method_of(state)
        assert words == str(refused.value)


def test_values_that_are_not_numbers_are_a_problem_and_no_error() -> None:
    bad = [
        {"lr": None},
        {"mode": "sprong"},
        {"k": "1"},
        {"momentum": 1.0},
        {"curvature": 0.0},
        {"noise": -1.0},
        {"m1": None},
    ]
    found = evaluate("data.map((state) => explorer.problem({...explorer.DEFAULT, ...state}))", bad)
    assert all(isinstance(words, str) for words in found), found


# Taking it home ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::torchbelay.BelayWarning")  # settings that the library warns of run all the same
def test_the_snippet_runs_as_it_is_and_has_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    states = [setting["state"] for setting in golden.read()["settings"]][:60]
    programs = evaluate("data.map((state) => explorer.toPython({...explorer.DEFAULT, ...state}))", states)
    for state, program in zip(map(_read, states), programs, strict=True):
        names: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(program, "snippet", "exec"), names)
        right = golden.method_of(state)
        step = golden.shown_step(state)
        assert names["method"].coupling(step, state["lr"]) == right.coupling(step, state["lr"]), program
        if isinstance(right, Spring):
            assert (names["method"].inertia1, names["method"].inertia2) == (right.inertia1, right.inertia2), program
        (group,) = names["optimizer"].param_groups
        assert (group["lr"], group["momentum"], group["dampening"]) == (
            state["lr"],
            state["momentum"],
            state["momentum"],
        )
        assert names["belay"].step == 10
        assert "tensor(" in capsys.readouterr().out


GARBAGE = [
    "",
    "#",
    "#k",
    "#k=",
    "#k=abc&m1=1e999x",
    "#k=-5",
    "#mode=%E0%A4%A",
    "#m1=NaN&lr=0",
    "#__proto__=1&constructor=2",
]
GARBAGE += [
    "#every=2.5&step=1&seed=-1",
    "#fn=nothing&x=1e99",
    "#k=%20&m2=-inf",
    "=&=&&&",
    "#momentum=1",
    "💥",
    "#k=2=3",
]


def test_an_address_of_garbage_is_the_setting_that_the_page_opens_with() -> None:
    found = evaluate("[...data, null, undefined, 5, {}].map((hash) => explorer.fromHash(hash))", GARBAGE)
    assert found == [evaluate("explorer.DEFAULT")] * (len(GARBAGE) + 4)


def test_an_address_keeps_what_is_right_beside_garbage() -> None:
    (state,) = evaluate("data.map(explorer.fromHash)", ["#k=2.5&m1=inf&nonsense=7&lr=oops&mode=nesterov&fn=bowl"])
    changed = {key: value for key, value in _read(state).items() if value != golden.DEFAULT[key]}
    assert changed == {"k": 2.5, "m1": math.inf, "mode": "nesterov", "fn": "bowl"}

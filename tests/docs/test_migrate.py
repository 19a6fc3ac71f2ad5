"""docs/migrate.md: the code before and after runs, and both averages are equal to what the page says."""

import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.averaging_code import library_file
from helpers.root import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
FIRST, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)
BY_NAME = {section.partition("\n")[0]: section for section in SECTIONS}
PACKAGES = {
    "torch": "torch",
    "timm": "timm",
    "ema-pytorch": "ema_pytorch",
    "torch-ema": "torch_ema",
    "diffusers": "diffusers",
    "Lightning": "lightning",
    "schedulefree": "schedulefree",
    "Composer": "composer",
    "mmengine": "mmengine",
    "ignite": "ignite",
}

State = dict[str, Tensor]


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


def shared() -> dict[str, Any]:
    """What the examples share: the page's first block."""
    names: dict[str, Any] = {"__name__": "docs"}
    (block,) = blocks(FIRST)
    exec(block, names)
    return names


# What the three packages compute that need not be installed, by their documents --------------------------------------


def visited() -> list[State]:
    """The weights before the first step and after each."""
    names = shared()
    model, optimizer = names["new"]()
    found = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for x in names["batches"]:
        names["train_step"](model, optimizer, x)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def followed(points: list[State], momentum: Callable[[int], float]) -> State:
    """The first point, drawn to each later one in turn by a momentum that depends on its number, from 1."""
    average = points[0]
    for number, point in enumerate(points[1:], 1):
        share = momentum(number)
        average = {name: (1 - share) * average[name] + share * point[name] for name in average}
    return average


FORMULAS: dict[str, list[Callable[[], State]]] = {
    # W_ema := s·W_ema + (1 − s)·W, from a copy of the first weights
    "Composer": [lambda: followed(visited(), lambda n: 1 - 0.99)],
    # the first update is a copy; momentum, or max(momentum, gamma/(gamma + steps))
    "mmengine": [
        lambda: followed(visited()[1:], lambda n: 0.01),
        lambda: followed(visited()[1:], lambda n: max(0.01, 20 / (20 + n))),
    ],
    # a copy of the first weights; the momentum goes from momentum_warmup to momentum in warmup_iters updates
    "ignite": [lambda: followed(visited(), lambda n: max(0.01, 0.2 + (0.01 - 0.2) * (n - 1) / 49))],
}


# The sections ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def timm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timm.utils` with the file of its averages alone; the package would import torchvision."""
    utils: Any = ModuleType("timm.utils")
    utils.ModelEmaV3 = library_file("timm", "utils/model_ema.py").ModelEmaV3
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.utils", utils)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", PACKAGES)
def test_before_and_after_are_equal(section: str, request: pytest.FixtureRequest) -> None:
    package, installed = PACKAGES[section], importlib.util.find_spec(PACKAGES[section]) is not None
    if not installed and section not in FORMULAS:
        pytest.skip(f"{package} is the library that this section is about")
    if section == "timm":
        request.getfixturevalue("timm_alone")
    (bound,) = map(
        float, re.findall(r"^The averages differ by less than (\d+e-\d+); we measured", BY_NAME[section], re.M)
    )
    names, pairs = shared(), 0
    for block in blocks(BY_NAME[section]):
        if re.search(r"^ *before = ", block, re.M):
            names["before"] = run_or_compute(block, names, installed, section, pairs)
        else:
            exec(block, names)
            apart = compare(names)
            assert apart < bound, f"{section}: {apart}"
            pairs += 1
    assert pairs == len(FORMULAS.get(section, [None] * pairs)) > 0


def run_or_compute(block: str, names: dict[str, Any], installed: bool, section: str, pair: int) -> State:
    """Return the average before: of the package, or of its formula."""
    if not installed:
        return FORMULAS[section][pair]()
    exec(block, names)
    return {name: value.detach().clone() for name, value in names["before"].items()}


def compare(names: dict[str, Any]) -> float:
    """Return the largest difference between both averages, which have the same names and are not just the weights."""
    before, after = names["before"], names["after"]
    assert list(before) == list(after)
    model = names["model"] if "module" not in names else None
    if model is not None:
        weights = dict(model.named_parameters())
        assert max(float((weights[name] - after[name]).abs().max().detach()) for name in after) > 1e-3
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def test_every_library_has_a_section_with_a_table_and_a_number() -> None:
    assert list(BY_NAME) == list(PACKAGES)
    for section in BY_NAME.values():
        assert re.search(r"^\| .* \| torchbelay \|$", section, re.M)
        assert "The averages differ by less than" in section


# Rows of the tables that no example shows -----------------------------------------------------------------------------


def trained(method: str, **options: Any) -> State:
    """Our average of the page's model."""
    names = shared()
    model, optimizer = names["new"]()
    belay = names["tb"].Belay(model, optimizer, eval(method, names), **options)
    for x in names["batches"]:
        names["train_step"](model, optimizer, x)
    return dict(belay.average_state_dict())


def assert_equal(ours: State, theirs: State, row: str) -> None:
    assert row in PAGE
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-13)


def test_an_interval_is_a_root_of_the_decay() -> None:
    """Updates after steps 1, 6, 11, … of mmengine's interval and Lightning's update_every_n_steps."""
    ours = trained("tb.methods.ema((1 - 0.01) ** (1 / 5))", every=5, start=1)
    assert_equal(ours, followed(visited()[1::5], lambda n: 0.01), "`every=M`, `tb.methods.ema((1 - m) ** (1 / M))`")


def test_an_event_of_ignite_every_few_iterations() -> None:
    ours = trained("tb.methods.ema((1 - 0.01) ** (1 / 5))", every=5)
    assert_equal(ours, followed(visited()[::5], lambda n: 0.01), "`event=Events.ITERATION_COMPLETED(every=M)`")


def test_composers_half_life_is_spread_over_its_interval() -> None:
    """From batch 20 on, every 10 batches, with smoothing 2^(−10/100)."""
    ours = trained("tb.methods.ema(half_life=100)", every=10, start=20)
    row = '| `update_interval="Mba"`, with `half_life` | `every=M`'
    assert_equal(ours, followed(visited()[20::10], lambda n: 1 - 2 ** (-10 / 100)), row)


def test_mmengines_stochastic_weight_average_is_the_mean() -> None:
    points = visited()[1:]
    mean = {name: torch.stack([point[name] for point in points]).mean(0) for name in points[0]}
    assert_equal(
        trained("tb.methods.swa()"), mean, '`ema_type="StochasticWeightAverage"` | `tb.methods.swa()`, `start=0`'
    )


def test_ema_pytorch_that_switches_the_model_to_its_average() -> None:
    package = pytest.importorskip("ema_pytorch", reason="ema-pytorch is the library that this row is about")
    names = shared()
    model, optimizer = names["new"]()
    theirs = package.EMA(
        model, beta=0.99, min_value=0.99, update_after_step=0, update_every=1, update_model_with_ema_every=20
    )
    for x in names["batches"]:
        names["train_step"](model, optimizer, x)
        theirs.update()
    ours = trained("tb.methods.switch_ema(0.99, every=20)", start=1)
    assert "`tb.methods.switch_ema(beta, every=N)`, `start=1`" in PAGE
    for name, value in theirs.ema_model.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def test_a_warm_up_of_schedulefree_is_a_linear_scheduler() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is the library that this row is about")
    names = shared()
    model, _ = names["new"]()
    theirs = schedulefree.SGDScheduleFree(model.parameters(), lr=0.05, momentum=0.9, warmup_steps=20)
    theirs.train()
    for x in names["batches"]:
        names["train_step"](model, theirs, x)
    theirs.eval()
    other, _ = names["new"]()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 20, total_iters=20 - 1)
    belay = names["tb"].Belay(other, optimizer, names["tb"].methods.schedule_free(0.9))
    for x in names["batches"]:
        names["train_step"](other, optimizer, x)
        scheduler.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    ours = belay.average_state_dict()
    assert "`LinearLR(optimizer, 1 / N, total_iters=N - 1)`" in PAGE
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-11)

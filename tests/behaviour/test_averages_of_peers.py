"""The settings of `methods.ema` that reproduce diffusers, timm, ema-pytorch and k-diffusion, against their own code.

The packages are used as their manuals say, from the first step on, and nothing is done to them beforehand. Weights are
float64 and go along random gradients; averages are compared after every step. The settings of each package are drawn,
24 of them, with those at the ends of their ranges among them.
"""

import ast
import copy
import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.peers import library, train
from helpers.side_by_side import TOLERANCE, assert_same, flat
from torchbelay import methods

STEPS = 40
drawn_settings = pytest.mark.parametrize("seed", range(24))


def folder(package: str) -> Path:
    """Where a package is installed, whether or not it can be imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is a peer that this test is about; `make setup` installs it")
    return Path(spec.submodule_search_locations[0])


def loaded_alone(path: Path) -> ModuleType:
    """One file of a package as a module; the package would import torchvision."""
    spec = importlib.util.spec_from_file_location(f"alone_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def definitions(path: Path, *names: str) -> dict[str, Any]:
    """Functions and classes of a file which itself imports torchvision: their very lines, and nothing but torch."""
    body = [
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body, type_ignores=[]), str(path), "exec"), namespace)
    return {name: namespace[name] for name in names}


# What is drawn -------------------------------------------------------------------------------------------------------


class Draw(Random):
    """Settings that these packages have in common."""

    def decay(self) -> float:
        return self.choice([0.0, 1.0, self.random(), 1 - 10 ** -self.uniform(1, 5), 1 - 10 ** -self.uniform(1, 5)])

    def least(self, decay: float) -> float:
        return self.choice([0.0, 0.0, self.uniform(0, decay), decay])

    def delay(self) -> int:
        return self.choice([0, 0, 1, self.randint(2, STEPS // 2)])

    def power(self) -> float:
        return self.choice([2 / 3, 3 / 4, 1.0, self.uniform(0.1, 2.0)])

    def inv_gamma(self) -> float:
        return self.choice([1.0, 1.0, math.exp(self.uniform(-2, 4))])


def small() -> nn.Module:
    """A model with two layers, a norm's buffers and a number that is not a float."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    generator = torch.Generator().manual_seed(9)
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    return model


def compare(
    method: tb.Method, update: Callable[[], object], average: Callable[[], Tensor], model: nn.Module, **options: Any
) -> None:
    """Train, call `update` after every step, and compare both averages of the parameters then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    belay = tb.Belay(model, optimizer, method, **options)
    names = [name for name, _ in model.named_parameters()]
    compared = []

    def after() -> None:
        update()
        mine = belay.average_state_dict()
        assert_same((flat(mine[name] for name in names),), (average(),))
        compared.append(belay.step)

    train(model, optimizer, STEPS, after)
    assert compared == list(range(1, STEPS + 1))


# diffusers -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@drawn_settings
@pytest.mark.parametrize("warmup", ["ratio", "inverse-power"])
def test_ema_is_diffusers(warmup: Any, seed: int) -> None:
    library("diffusers")
    from diffusers.training_utils import EMAModel

    draw, model = Draw(seed), small()
    decay, delay = draw.decay(), draw.delay()
    both: dict[str, Any] = {"min_decay": draw.least(decay)}
    if warmup == "inverse-power":
        both |= {"inv_gamma": draw.inv_gamma(), "power": draw.power()}
    theirs = EMAModel(
        model.parameters(),
        decay=decay,
        update_after_step=delay,
        use_ema_warmup=warmup == "inverse-power",
        foreach=draw.random() < 0.5,
        **both,
    )
    method = methods.ema(decay, warmup=warmup, **both)
    compare(
        method,
        lambda: theirs.step(model.parameters()),
        lambda: flat(theirs.shadow_params),
        model,
        start=delay + 1,
    )


# timm ----------------------------------------------------------------------------------------------------------------


@drawn_settings
@pytest.mark.parametrize("use_warmup", [False, True])
def test_ema_is_timms(use_warmup: bool, seed: int) -> None:
    timm = loaded_alone(folder("timm") / "utils" / "model_ema.py")
    draw, model = Draw(seed), small()
    decay, delay, steps = draw.decay(), draw.delay(), iter(range(1, STEPS + 1))
    least, inv_gamma, power = draw.least(decay), draw.inv_gamma(), draw.power()
    theirs = timm.ModelEmaV3(
        model,
        decay=decay,
        min_decay=least,
        update_after_step=delay,
        use_warmup=use_warmup,
        warmup_gamma=inv_gamma,
        warmup_power=power,
        foreach=draw.random() < 0.5,
        exclude_buffers=draw.random() < 0.5,
    )
    warm = {"warmup": "inverse-power", "inv_gamma": inv_gamma, "power": power, "min_decay": least}
    method = methods.ema(decay, **warm if use_warmup else {})
    compare(
        method,
        lambda: theirs.update(model, step=next(steps)),
        lambda: flat(theirs.module.parameters()),
        model,
        start=delay + 1,
    )


@drawn_settings
def test_ema_from_the_start_is_timms_without_steps(seed: int) -> None:
    timm = loaded_alone(folder("timm") / "utils" / "model_ema.py")
    draw, model = Draw(seed), small()
    decay = draw.decay()
    theirs = timm.ModelEmaV3(model, decay=decay, foreach=draw.random() < 0.5)
    compare(methods.ema(decay), lambda: theirs.update(model), lambda: flat(theirs.module.parameters()), model)


# ema-pytorch ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wide_decays() -> Iterator[None]:
    """ema-pytorch computes its decays in torch's default dtype; float64 lets them be compared."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def drawn_for_ema_pytorch(draw: Draw) -> tuple[dict[str, Any], tb.Method]:
    """The package's arguments, and our method for them."""
    beta = draw.decay()
    theirs = {"inv_gamma": draw.inv_gamma(), "power": draw.power(), "min_value": draw.least(beta)}
    ours = {"inv_gamma": theirs["inv_gamma"], "power": theirs["power"], "min_decay": theirs["min_value"]}
    frozen = beta == 1
    method = methods.ema(1.0) if frozen else methods.ema(beta, warmup="inverse-power", **ours)
    return {"beta": beta, **theirs}, method


@pytest.mark.usefixtures("wide_decays")
@drawn_settings
def test_ema_is_ema_pytorchs(seed: int) -> None:
    ema_pytorch = library("ema_pytorch")
    draw, model = Draw(seed), small()
    arguments, method = drawn_for_ema_pytorch(draw)
    delay = draw.delay()
    theirs = ema_pytorch.EMA(
        model, update_after_step=delay, update_every=1, use_foreach=draw.random() < 0.5, **arguments
    )
    compare(method, theirs.update, lambda: flat(theirs.ema_model.parameters()), model, start=delay + 1)


@pytest.mark.usefixtures("wide_decays")
@drawn_settings
def test_ema_by_roots_is_ema_pytorchs_with_update_every(seed: int) -> None:
    """Its decay is that of one update, however many steps apart updates are; ours is that of a step."""
    ema_pytorch = library("ema_pytorch")
    draw, model = Draw(seed), small()
    every, delay = draw.randint(2, 6), draw.delay()
    beta = draw.uniform(0.1, 0.999)
    inv_gamma, power, least = draw.inv_gamma(), draw.power(), draw.least(beta)
    theirs = ema_pytorch.EMA(
        model, beta=beta, update_after_step=delay, update_every=every, inv_gamma=inv_gamma, power=power, min_value=least
    )
    start, offset = delay // every * every + 1, delay % every

    def decay(step: int) -> float:
        at = math.ceil(step / every) * every - offset  # the update that this step belongs to, in its own count
        return max(least, min(beta, 1 - (1 + at / inv_gamma) ** -power)) ** (1 / every)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    belay = tb.Belay(model, optimizer, methods.ema(decay), start=start, every=every)
    names = [name for name, _ in model.named_parameters()]
    compared = []

    def after() -> None:
        theirs.update()
        if belay.step >= start:  # until then theirs is a copy that grows old between updates
            mine = belay.average_state_dict()
            assert_same((flat(mine[name] for name in names),), (flat(theirs.ema_model.parameters()),))
            compared.append(belay.step)

    train(model, optimizer, STEPS, after)
    assert compared == list(range(start, STEPS + 1))


@pytest.mark.parametrize("seed", range(6))
def test_ema_pytorchs_own_decays_have_the_digits_of_float32(seed: int) -> None:
    """As it comes, a weight of its average is off by some 2⁻²⁴, and the average by that share of the distances."""
    ema_pytorch = library("ema_pytorch")
    model, draw = small(), Draw(seed)
    beta, power = draw.uniform(0.9, 0.9999), draw.uniform(0.5, 0.9)
    theirs = ema_pytorch.EMA(model, beta=beta, power=power, update_after_step=0, update_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    belay = tb.Belay(model, optimizer, methods.ema(beta, warmup="inverse-power", power=power), start=1)
    names = [name for name, _ in model.named_parameters()]
    apart, bound = 0.0, 0.0

    def after() -> None:
        nonlocal apart, bound
        theirs.update()
        mine, state = belay.average_state_dict(), model.state_dict()
        ours, weights = (flat(each[name] for name in names) for each in (mine, state))
        bound += 2**-22 * float((weights - ours).abs().amax())
        apart = max(apart, float((ours - flat(theirs.ema_model.parameters())).abs().amax()))
        assert apart <= bound

    train(model, optimizer, STEPS, after)
    assert apart > TOLERANCE


# k-diffusion ---------------------------------------------------------------------------------------------------------


def k_diffusion(model: nn.Module, **arguments: Any) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """Its average as its train.py keeps it: the value, the update, then a step of the warm-up."""
    found = definitions(folder("k_diffusion") / "utils.py", "ema_update", "EMAWarmup")
    average, warmup = copy.deepcopy(model), found["EMAWarmup"](**arguments)

    def update() -> None:
        found["ema_update"](model, average, warmup.get_value())
        warmup.step()

    return update, lambda: flat(average.parameters())


@drawn_settings
def test_ema_is_k_diffusions(seed: int) -> None:
    draw, model = Draw(seed), small()
    largest, delay = draw.decay(), draw.delay()
    both = {"inv_gamma": draw.inv_gamma(), "power": draw.power()}
    update, average = k_diffusion(model, max_value=largest, start_at=delay, **both)
    compare(methods.ema(largest, warmup="inverse-power", **both), update, average, model, start=delay + 1)


@drawn_settings
def test_ema_by_a_function_is_k_diffusions_with_a_least_value(seed: int) -> None:
    draw, model = Draw(seed), small()
    largest, delay, inv_gamma, power = draw.uniform(0.3, 1.0), draw.delay(), draw.inv_gamma(), draw.power()
    least = draw.uniform(0.01, largest)
    update, average = k_diffusion(
        model, max_value=largest, min_value=least, start_at=delay, inv_gamma=inv_gamma, power=power
    )

    def decay(step: int) -> float:
        return min(largest, max(least, 1 - (1 + max(0, step - 1 - delay) / inv_gamma) ** -power))

    compare(methods.ema(decay), update, average, model)

"""Averaging code as people write it and as libraries have it: factories for `tb.testing.identify`."""

import copy
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import torchbelay as tb
from torchbelay.testing.toy import Factory

# Loops of one's own ---------------------------------------------------------------------------------------------------


def shadow_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def loop(move: Callable[[Tensor, Tensor, int], object], start: Callable[[Tensor], Tensor] = torch.clone) -> Factory:
    """Return the usual loop: `move(shadow, weight, number of the update)` for every parameter, in place."""

    def factory(model: nn.Module) -> Any:
        shadow = {name: start(p.detach()) for name, p in model.named_parameters()}
        updates = 0

        @torch.no_grad()
        def update() -> None:
            nonlocal updates
            updates += 1
            for name, p in model.named_parameters():
                move(shadow[name], p, updates)

        return update, lambda: shadow

    return factory


def ema(rate: float = 0.01) -> Factory:
    """Return a plain EMA."""
    return loop(lambda shadow, p, t: shadow.lerp_(p, rate))


def coupled(couplings: Sequence[tb.Coupling]) -> Factory:
    """Return a loop that moves weights and shadow by these couplings; it remembers the weights before the step."""

    def factory(model: nn.Module) -> Any:
        shadow, last = shadow_of(model), shadow_of(model)
        numbers = iter(couplings)

        @torch.no_grad()
        def update() -> None:
            c = next(numbers)
            for name, p in model.named_parameters():
                w1, w2, u = last[name], shadow[name], p - last[name]
                p.copy_(w1 + c.a * (w2 - w1) + c.p * u)
                shadow[name] = w2 + c.b * (w1 - w2) + c.q * u
                last[name] = p.clone()

        return update, lambda: shadow

    return factory


# Bugs seen in the wild ------------------------------------------------------------------------------------------------


def swapped_decay(model: nn.Module) -> Any:
    """An EMA whose decay is used as 1 − decay."""
    decay, shadow = 0.999, shadow_of(model)

    def update() -> None:
        for name, p in model.named_parameters():
            shadow[name] = (1 - decay) * shadow[name] + decay * p.detach()

    return update, lambda: shadow


def never_initialised(model: nn.Module) -> Any:
    """An EMA that begins at zero and is never corrected for it."""
    shadow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def update() -> None:
        for name, p in model.named_parameters():
            shadow[name].mul_(0.999).add_(p.detach(), alpha=0.001)

    return update, lambda: shadow


def wrong_sign(model: nn.Module) -> Any:
    """An average that feeds its distance to the weights back with the wrong sign."""
    shadow = shadow_of(model)

    def update() -> None:
        for name, p in model.named_parameters():
            shadow[name] += 0.01 * (shadow[name] - p.detach())

    return update, lambda: shadow


def wrong_feedback(model: nn.Module) -> Any:
    """An EMA that is to pull the weights back, and pushes them away."""
    shadow = shadow_of(model)

    @torch.no_grad()
    def update() -> None:
        for name, p in model.named_parameters():
            shadow[name].lerp_(p, 0.01)
            p.add_(p - shadow[name], alpha=0.02)

    return update, lambda: shadow


def every_second_lost(model: nn.Module) -> Any:
    """An EMA whose flag is toggled twice as often as meant."""
    shadow, ready = shadow_of(model), True

    def update() -> None:
        nonlocal ready
        if ready:
            for name, p in model.named_parameters():
                shadow[name].lerp_(p.detach(), 0.01)
        ready = not ready

    return update, lambda: shadow


# Ours and others' -----------------------------------------------------------------------------------------------------


def belay(method: Callable[[], Any], lr: float = 0.1, **options: Any) -> Factory:
    """Return Belay, stepped by hand: the next step begins as soon as the last one is done."""

    def factory(model: nn.Module) -> Any:
        made = tb.Belay(model, None, method(), **options)
        made.before_step(lr)

        def update() -> None:
            made.after_step()
            made.before_step(lr)

        return update, made.average_state_dict

    return factory


def averaged_model(**options: Any) -> Factory:
    """Return torch's AveragedModel."""

    def factory(model: nn.Module) -> Any:
        average = AveragedModel(model, **options)
        return (lambda: average.update_parameters(model)), (lambda: average)

    return factory


def library(name: str) -> ModuleType:
    """Import a library, or skip the test; its warnings on import are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is averaging code that this test identifies")


def library_file(package: str, path: str) -> ModuleType:
    """Load one file of a package that need not import as a whole, or skip the test."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is averaging code that this test identifies, and it is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    if not file.is_file():
        pytest.skip(f"this {package} has no {path}")
    alone = importlib.util.spec_from_file_location(f"{package}_alone", file)
    assert alone is not None
    assert alone.loader is not None
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    return module


def ema_pytorch(**options: Any) -> Factory:
    """Return ema-pytorch's EMA."""
    package = library("ema_pytorch")

    def factory(model: nn.Module) -> Any:
        average = package.EMA(model, **options)
        return average.update, lambda: average.ema_model

    return factory


def torch_ema(**options: Any) -> Factory:
    """Return torch-ema's ExponentialMovingAverage."""
    package = library("torch_ema")

    def factory(model: nn.Module) -> Any:
        average = package.ExponentialMovingAverage(model.parameters(), **options)
        return average.update, average.state_dict

    return factory


def timm(*, counted: bool = True, **options: Any) -> Factory:
    """Return timm's ModelEmaV3, told the number of the step if `counted`."""
    package = library_file("timm", "utils/model_ema.py")

    def factory(model: nn.Module) -> Any:
        average, steps = package.ModelEmaV3(model, **options), 0

        def update() -> None:
            nonlocal steps
            steps += 1
            average.update(model, step=steps if counted else None)

        return update, lambda: average.module

    return factory


def diffusers(**options: Any) -> Factory:
    """Return diffusers' EMAModel."""
    package = library("diffusers.training_utils")

    def factory(model: nn.Module) -> Any:
        average = package.EMAModel(model.parameters(), **options)
        return (lambda: average.step(model.parameters())), (lambda: average.shadow_params)

    return factory


def lightning(**options: Any) -> Factory:
    """Return Lightning's EMAWeightAveraging, called as its trainer calls it after each batch."""
    pytorch = library("lightning.pytorch")
    callbacks = library("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")

    def factory(model: nn.Module) -> Any:
        module = pytorch.LightningModule()
        module.inner = model
        trainer, callback = SimpleNamespace(global_step=0), callbacks.EMAWeightAveraging(**options)
        callback.setup(trainer, module, "fit")

        def update() -> None:
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, module, None, None, trainer.global_step - 1)

        return update, lambda: callback._average_model

    return factory


def deep_copied(update: Callable[[nn.Module, nn.Module], object]) -> Factory:
    """Return code that deep-copies the model and updates the copy from the model by `update(copy, model)`."""

    def factory(model: nn.Module) -> Any:
        average = copy.deepcopy(model)
        return (lambda: update(average, model)), average.state_dict

    return factory

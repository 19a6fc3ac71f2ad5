"""Who is timed: torch and its peers, the paper's algorithm as it is written, and ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbelay as tb
from torchbelay import optim
from torchbelay.ops import reference

DECAY = 0.999
EMA = tb.Spring.ema(decay=DECAY)
SPRING = tb.Spring(k=1.0, m1=2000.0, m2=500.0)
AFTER = tb.Spring(k=1.0, m1=2000.0, m2=500.0, follow="after")


@dataclass
class Candidate:
    """A way to step, or only to average: `run()` does it once."""

    name: str
    model: nn.ParameterList
    run: Callable[[], object]
    averages: Sequence[Tensor]  # live
    numbers: tb.Coupling | None  # what it must amount to
    bytes: int = 0  # a weight that must be moved at the least, where somebody counted
    keep: list[Any] = field(default_factory=list)
    read: Callable[[], Sequence[Tensor]] | None = None  # returns the averages, if no tensor holds them
    rounding: float = 1e-5  # relative, of a few steps


Make = Callable[[nn.ParameterList], Candidate]


def _live(belay: tb.Belay) -> list[Tensor]:
    return list(belay.state_dict()["averages"]["average"]["weights"].values())


def _belay_candidate(
    name: str, belay: tb.Belay, model: nn.ParameterList, run: Callable[[], object], numbers: tb.Coupling, nbytes: int
) -> Candidate:
    found = Candidate(name, model, run, _live(belay), numbers, nbytes, [belay])
    if "weights_low" in belay.state_dict()["averages"]["average"]:  # 24 bits
        found.read, found.rounding = lambda: list(belay.average_state_dict().values()), 2.0**-13
    return found


def timm_class() -> Any:
    """timm's ModelEmaV3; its file alone if timm cannot be imported, as without torchvision."""
    try:
        from timm.utils import ModelEmaV3
    except ImportError:
        found = find_spec("timm")
        if found is None or found.origin is None:
            raise
        path = Path(found.origin).parent / "utils" / "model_ema.py"
        spec = spec_from_file_location("timm_model_ema", path)
        if spec is None or spec.loader is None:
            raise
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.ModelEmaV3
    return ModelEmaV3


# Whole steps: AdamW(fused=True), then the average


def adamw(model: nn.ParameterList, kind: Any = torch.optim.AdamW) -> Any:
    return kind(model.parameters(), lr=1e-3, fused=True)


def alone(model: nn.ParameterList) -> Candidate:
    return Candidate("torch AdamW(fused=True), no average", model, adamw(model).step, [], None, 28)


def step_torch_ema(model: nn.ParameterList) -> Candidate:
    optimizer, averaged = adamw(model), _torch_average(model)

    def run() -> None:
        optimizer.step()
        averaged.update_parameters(model)

    return Candidate("torch AdamW, then AveragedModel (EMA)", model, run, list(averaged.parameters()), EMA.coupling())


def step_timm(model: nn.ParameterList) -> Candidate:
    optimizer, ema = adamw(model), timm_class()(model, decay=DECAY)

    def run() -> None:
        optimizer.step()
        ema.update(model)

    return Candidate(
        "torch AdamW, then timm ModelEmaV3", model, run, list(ema.module.parameters()), EMA.coupling(), 0, [ema]
    )


def step_naive(model: nn.ParameterList) -> Candidate:
    optimizer, w2 = adamw(model), [p.detach().clone() for p in model]

    @torch.no_grad()
    def run() -> None:
        before = [p.clone() for p in model]
        optimizer.step()
        for p, average, old in zip(model, w2, before, strict=True):
            new1, new2 = reference.algorithm1(old, average, p - old, k=SPRING.k, m1=SPRING.m1, m2=SPRING.m2)
            p.copy_(new1)
            average.copy_(new2)

    return Candidate("torch AdamW, Algorithm 1 tensor by tensor", model, run, w2, SPRING.coupling())


def step_belay(name: str, method: tb.Spring, kind: Any, nbytes: int = 0, **options: Any) -> Make:
    def make(model: nn.ParameterList) -> Candidate:
        optimizer = adamw(model, kind)
        belay = tb.Belay(model, optimizer, method, **options)
        return _belay_candidate(name, belay, model, optimizer.step, method.coupling(), nbytes)

    return make


def step_24_bits(model: nn.ParameterList) -> Candidate:
    """Its averages are no tensors that could be compared; the weights are."""
    if "bits" not in tb.options.Options.__dataclass_fields__:
        raise ImportError("this version has no 24-bit averages")
    optimizer = adamw(model, optim.AdamW)
    belay = tb.Belay(model, optimizer, EMA, bits=24)
    name = "torchbelay AdamW with EMA of 24 bits, one pass"
    return Candidate(name, model, optimizer.step, [], EMA.coupling(), 34, [belay])


STEPS: list[Make] = [
    alone,
    step_torch_ema,
    step_belay("torch AdamW, torchbelay EMA", EMA, torch.optim.AdamW),
    step_belay("torch AdamW, torchbelay BELAY", SPRING, torch.optim.AdamW),
    step_naive,
    step_belay("torchbelay AdamW with EMA, one pass", EMA, optim.AdamW, 36),
    step_belay("torchbelay AdamW with BELAY, one pass", SPRING, optim.AdamW, 36),
    step_belay("torchbelay AdamW with EMA of 24 bits, one pass", EMA, optim.AdamW, 34, bits=24),
]


# What most users choose between: an EMA beside AdamW
CHOICES: list[Make] = [
    alone,
    step_torch_ema,
    step_timm,
    step_belay("torch AdamW, torchbelay EMA", EMA, torch.optim.AdamW),
    step_belay("torchbelay AdamW with EMA, one pass", EMA, optim.AdamW, 36),
    step_24_bits,
]


# The average alone


def _torch_average(model: nn.ParameterList) -> AveragedModel:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)
    return averaged


def torch_ema(model: nn.ParameterList) -> Candidate:
    averaged = _torch_average(model)
    return Candidate(
        "torch AveragedModel", model, lambda: averaged.update_parameters(model), list(averaged.parameters()),
        EMA.coupling(), 12,
    )  # fmt: skip


def timm_ema(model: nn.ParameterList) -> Candidate:
    ema = timm_class()(model, decay=DECAY)
    return Candidate(
        "timm ModelEmaV3", model, lambda: ema.update(model), list(ema.module.parameters()), EMA.coupling(), 12
    )


def ema_pytorch_foreach(model: nn.ParameterList) -> Candidate:
    import ema_pytorch

    ema = ema_pytorch.EMA(
        model, beta=DECAY, update_after_step=-1, update_every=1, power=0.0, min_value=DECAY, use_foreach=True
    )
    ema.update()
    return Candidate("ema-pytorch (foreach)", model, ema.update, list(ema.ema_model.parameters()), EMA.coupling(), 12)


def torch_ema_package(model: nn.ParameterList) -> Candidate:
    from torch_ema import ExponentialMovingAverage

    ema = ExponentialMovingAverage(model.parameters(), decay=DECAY, use_num_updates=False)
    return Candidate("torch-ema", model, ema.update, ema.shadow_params, EMA.coupling(), 12)


def diffusers_ema(model: nn.ParameterList) -> Candidate:
    from diffusers.training_utils import EMAModel

    parameters = list(model.parameters())
    ema = EMAModel(parameters, decay=DECAY, min_decay=DECAY, foreach=True)
    ema.step(parameters)  # its first step copies the weights
    return Candidate(
        "diffusers EMAModel (foreach)", model, lambda: ema.step(parameters), ema.shadow_params, EMA.coupling(), 12
    )


def by_hand(name: str, method: tb.Spring, nbytes: int, **options: Any) -> Make:
    def make(model: nn.ParameterList) -> Candidate:
        optimizer = _Still(model.parameters())
        belay = tb.Belay(model, optimizer, method, **options)
        return _belay_candidate(name, belay, model, optimizer.step, method.coupling(), nbytes)

    return make


class _Still(torch.optim.Optimizer):
    """Steps nowhere, so that what is around the step is all there is to time."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        pass


def naive(model: nn.ParameterList) -> Candidate:
    w2 = [p.detach().clone() for p in model]

    @torch.no_grad()
    def run() -> None:
        for average, p in zip(w2, model, strict=True):
            average.mul_(DECAY).add_(p, alpha=1 - DECAY)

    return Candidate("EMA tensor by tensor", model, run, w2, EMA.coupling(), 12)


ALONE: list[Make] = [
    torch_ema,
    timm_ema,
    ema_pytorch_foreach,
    torch_ema_package,
    diffusers_ema,
    naive,
    by_hand("torchbelay EMA (foreach)", EMA, 12, impl="foreach"),
    by_hand("torchbelay EMA", EMA, 12),
    by_hand("torchbelay EMA of 24 bits", EMA, 10, bits=24),
    by_hand("torchbelay BELAY, follow after", AFTER, 16),
]


def importable(makes: Sequence[Make], model: nn.ParameterList) -> tuple[list[Make], dict[str, str]]:
    """Those that can be made here, and why the others cannot."""
    found, missing = [], {}
    for make in makes:
        try:
            make(model)
            found.append(make)
        except ImportError as problem:
            missing[make.__name__] = str(problem)
    return found, missing

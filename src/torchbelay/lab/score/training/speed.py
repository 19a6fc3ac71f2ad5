"""The speed of the training loop: images per second, the limit of the arithmetic, and the cost of averaging."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record
from torchbelay.lab.records import rounded
from torchbelay.lab.score.models.objective import Objective

from .batches import Batches
from .learner import Learner, LearnerGroup, Loss

StepMode = Literal["eager", "captured", "compiled and captured"]
MATRIX_TFLOPS = {"NVIDIA H200": 790.0}  # measured with products of large random bfloat16 matrices


def flops_per_image(objective: Objective) -> int:
    """Count the operations of a training step per image: forward and backward, a product and a sum as two."""
    network = objective.network()
    draws = objective.draws(1, torch.Generator().manual_seed(0), augment=False)
    with FlopCounterMode(display=False) as counter:
        objective.loss(network, torch.zeros(1, *objective.shape), draws).mean().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


@cache
def build_loss(objective: Objective, mode: StepMode) -> Loss:
    """Return the objective's loss, compiled if the mode says so; once for all groups, because that takes long."""
    return torch.compile(objective.loss, dynamic=False) if mode == "compiled and captured" else objective.loss


def build_learners(
    objective: Objective, lanes: Sequence[Lane], seed: int, device: torch.device, mode: StepMode
) -> LearnerGroup:
    """Build a learner per lane, all with the same initial weights."""
    loss, members = build_loss(objective, mode), []
    for lane in lanes:
        torch.manual_seed(seed)
        network = objective.network().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        members.append(Learner(network, lane, loss, capture=mode != "eager"))
    return LearnerGroup(members)


def seconds_per_step(
    groups: Sequence[LearnerGroup], batches: Batches, *, warm: int = 8, steps: int = 30
) -> list[float]:
    """Measure the time of a step of each group: the median of five rounds, in which the groups take turns."""
    for each in groups:
        for _ in range(warm):
            each.step(*batches.next())
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(5):
        for found, each in zip(times, groups, strict=True):
            _finish(batches.images)
            begin = time.perf_counter()
            for _ in range(steps):
                each.step(*batches.next())
            each.wait()
            _finish(batches.images)
            found.append((time.perf_counter() - begin) / steps)
    return [sorted(found)[2] for found in times]


def throughput(
    objective: Objective,
    images: Tensor,
    lane: Lane,
    batch: int,
    *,
    side_by_side: int = 1,
    mode: StepMode,
    steps: int = 30,
) -> Record:
    """Measure the speed of `side_by_side` networks with and without averaging. Return a record."""
    device = images.device
    with_average, without = (build_learners(objective, [lane] * side_by_side, 0, device, mode) for _ in range(2))
    for learner in without.members:
        learner.belay.detach()
    batches = Batches(images, objective, batch, seed=0)
    step_s, bare_s = seconds_per_step([with_average, without], batches, steps=steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops, limit = flops_per_image(objective), MATRIX_TFLOPS.get(name)
    return {
        "kind": "throughput",
        "model": objective.MODEL,
        "parameters": sum(p.numel() for p in with_average.members[0].network.parameters()),
        "batch": batch,
        "side_by_side": side_by_side,
        "how": mode,
        "images_per_s": round(side_by_side * batch / step_s),
        "flops_per_image": flops,
        "limit_tflops": limit,
        "arithmetic_limit_images_per_s": None if limit is None else round(limit * 1e12 / flops),
        "averaging_share": rounded(1 - bare_s / step_s),
        "device": name,
        "step_s": rounded(step_s),
    }


def _finish(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)

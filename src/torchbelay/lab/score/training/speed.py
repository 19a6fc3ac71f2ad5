"""How fast the training loop is: images a second beside what the arithmetic allows, and what averaging costs of it."""

import time
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchbelay.lab.arms import Lane
from torchbelay.lab.part import Record
from torchbelay.lab.score.models.objective import Objective

from .batches import Batches
from .learner import Loss, Together, Trainee
from .validation import number

How = Literal["eager", "captured", "compiled and captured"]
MATRIX_TFLOPS = {"NVIDIA H200": 790.0}  # measured: products of large bfloat16 matrices of random numbers


def flops_per_image(objective: Objective) -> int:
    """Of a training step: forward and backward, products and sums counted apart."""
    network = objective.network()
    draws = objective.draws(1, torch.Generator().manual_seed(0), augment=False)
    with FlopCounterMode(display=False) as counter:
        objective.loss(network, torch.zeros(1, *objective.shape), draws).mean().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def loss_of(objective: Objective, how: How) -> Loss:
    """The objective's loss, as it is called in that way."""
    return torch.compile(objective.loss, dynamic=False) if how == "compiled and captured" else objective.loss


def group(objective: Objective, lanes: Sequence[Lane], seed: int, device: torch.device, how: How) -> Together:
    """Fresh trainees that start from the same weights."""
    loss, trainees = loss_of(objective, how), []
    for lane in lanes:
        torch.manual_seed(seed)
        network = objective.network().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        trainees.append(Trainee(network, lane, loss, capture=how != "eager"))
    return Together(trainees)


def seconds_a_step(groups: Sequence[Together], batches: Batches, *, warm: int = 8, steps: int = 30) -> list[float]:
    """The median over five rounds, the groups taking turns, of the time of a step."""
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
    objective: Objective, images: Tensor, lane: Lane, batch: int, *, together: int = 1, how: How, steps: int = 30
) -> Record:
    """A record of the loop's speed with so many networks side by side; without averaging, too."""
    device = images.device
    with_average, without = (group(objective, [lane] * together, 0, device, how) for _ in range(2))
    for trainee in without.trainees:
        trainee.belay.detach()
    batches = Batches(images, objective, batch, seed=0)
    step_s, bare_s = seconds_a_step([with_average, without], batches, steps=steps)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    flops, limit = flops_per_image(objective), MATRIX_TFLOPS.get(name)
    return {
        "kind": "throughput",
        "model": objective.MODEL,
        "parameters": sum(p.numel() for p in with_average.trainees[0].network.parameters()),
        "batch": batch,
        "side_by_side": together,
        "how": how,
        "images_per_s": round(together * batch / step_s),
        "flops_per_image": flops,
        "limit_tflops": limit,
        "arithmetic_limit_images_per_s": None if limit is None else round(limit * 1e12 / flops),
        "averaging_share": number(1 - bare_s / step_s),
        "device": name,
        "step_s": number(step_s),
    }


def _finish(images: Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize(images.device)

"""What only a GPU can show of the drop-ins: a host that does not wait, and averages on another device."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils as torchs

from helpers.problems import no_waiting
from helpers.random_settings import assert_close, walk
from torchbelay.compat import swa_utils
from torchbelay.compat.diffusers import EMAModel
from torchbelay.compat.torch_ema import ExponentialMovingAverage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has this")


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}], ids=["swa", "ema"])
def test_the_host_does_not_wait_for_an_averaged_model(given: dict[str, Any], dtype: torch.dtype) -> None:
    model = net(dtype)
    average = swa_utils.AveragedModel(model, device=torch.device("cuda"), use_buffers=True, **given)
    for _ in range(2):
        average.update_parameters(model)
    with no_waiting():
        for _ in range(3):
            average.update_parameters(model)
    assert average.n_averaged == 5
    average.n_averaged.zero_()
    average.update_parameters(model)
    assert average.n_averaged == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_does_not_wait_for_lists(dtype: torch.dtype) -> None:
    weights = list(net(dtype).parameters())
    model, ema = EMAModel(weights), ExponentialMovingAverage(weights, decay=0.9)
    model.step(weights)
    ema.update()
    with no_waiting():
        model.step(weights)
        ema.update()
    assert (model.optimization_step, ema.num_updates) == (2, 2)


def test_averages_may_be_in_host_memory() -> None:
    model, generator = net(), torch.Generator().manual_seed(0)
    mine, theirs = (
        module.AveragedModel(model, device="cpu", multi_avg_fn=module.get_ema_multi_avg_fn(0.5))
        for module in (swa_utils, torchs)
    )
    listed, ema = EMAModel(model.parameters(), min_decay=0.5), ExponentialMovingAverage(model.parameters(), 0.5, False)
    listed.to("cpu")
    ema.to("cpu")
    for _ in range(3):
        walk_on_device(model, generator)
        mine.update_parameters(model)
        theirs.update_parameters(model)
        listed.step(model.parameters())
        ema.update()
    assert_close(
        [*mine.module.parameters(), *mine.module.buffers()], [*theirs.module.parameters(), *theirs.module.buffers()]
    )
    assert {t.device.type for t in (*mine.parameters(), *listed.shadow_params, *ema.shadow_params)} == {"cpu"}
    listed.copy_to(model.parameters())
    assert_close([p.cpu() for p in model.parameters()], listed.shadow_params)
    with ema.average_parameters():
        assert_close([p.cpu() for p in model.parameters()], ema.shadow_params)


def test_a_moved_average_goes_on() -> None:
    model = net(torch.bfloat16)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for device in ("cuda", "cpu", "cuda"):
        average.to(device)
        average.update_parameters(model)
    assert average.n_averaged == 3
    assert_close(list(average.module.parameters()), list(model.parameters()))


def walk_on_device(model: nn.Module, generator: torch.Generator) -> None:
    copies = [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
    walk(copies, generator)
    for t, copy in zip((*model.parameters(), *model.buffers()), copies, strict=True):
        t.data.copy_(copy)

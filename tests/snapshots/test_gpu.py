"""Recording on a GPU: copies are begun in the step and are those of that step, whatever follows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import same
from torchbelay.snapshots import Recorder, synthesize, window
from torchbelay.snapshots.folder import Folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, tb.optim.AdamW])
def test_snapshots_are_those_of_their_steps(tmp_path: Path, kind: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)).cuda()
    optimizer = kind(model.parameters(), lr=1e-3)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    expected = {}
    with Recorder(belay, tmp_path, every=3):
        for step in range(1, 31):
            train(model, optimizer, 1)
            if step % 3 == 0:
                expected[step] = {
                    name: {key: t.cpu() for key, t in belay.average_state_dict(name).items()}
                    for name in ("average", "power_05", "power_10")
                }
    found = Folder(tmp_path).snapshots
    assert len(found) == 31
    for each in found[1:]:
        with each.open() as file:
            wanted = expected[each.step][str(each.average)]
            assert same({key: file.read(key) for key in wanted}, wanted)
    made = synthesize(tmp_path, window(12), max_error=0.5).state_dict()
    assert made["0.weight"].device.type == "cpu"
    nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1)).load_state_dict(made, strict=True)


def test_the_host_does_not_wait_for_the_copies(tmp_path: Path) -> None:
    """While the device is busy with something long, a step that records returns to the host."""
    model = nn.Linear(2048, 2048, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    model.weight.grad = torch.zeros_like(model.weight)
    made = Recorder(belay, tmp_path, every=1)
    for _ in range(3):
        optimizer.step()
    made.wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000_000)  # about three seconds
    slept = torch.cuda.Event()
    slept.record()
    optimizer.step()
    still_asleep = not slept.query()
    made.close()
    assert still_asleep  # the step has returned, although its copies wait for the device
    assert slept.query()
    assert made.recorded == [0, 1, 2, 3, 4]

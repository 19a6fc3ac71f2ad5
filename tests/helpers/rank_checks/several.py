"""Several optimizers, and several models, on several ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchbelay as tb

from .runs import EMA, SPECTATORS, Net, agree, batch, each_its_own, here, loss_of, mine, on, sharded, whole


class Pair:
    """A model in training by two optimizers, of which the second steps every other time."""

    def __init__(self, method: Any, spread: Any = lambda net: net, share: Any = lambda x: x, **options: Any) -> None:
        net = Net(seed=options.pop("seed", 0))
        net.norm.eval()
        self.share, self.model = share, spread(net)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizers = [torch.optim.AdamW(matrices, lr=0.02), torch.optim.SGD(vectors, lr=0.05)]
        self.belay = tb.Belay(self.model, self.optimizers, method, **options)

    def train(self, steps: range) -> "Pair":
        for step in steps:
            self.model.zero_grad()
            loss_of(self.model, self.share(batch(step))).backward()
            for optimizer in self.optimizers[: 1 + step % 2]:
                optimizer.step()
        return self

    def average(self, name: str = "average") -> dict[str, torch.Tensor]:
        return {key: whole(value) for key, value in self.belay.average_state_dict(name).items()}


@on(2, 3)
def several_optimizers_of_a_sharded_model_have_the_average_of_one_process(folder: Path) -> None:
    run = Pair(each_its_own, sharded, mine, spectators=SPECTATORS, on_nonfinite="skip").train(range(6))
    one = Pair(each_its_own, spectators=SPECTATORS).train(range(6))
    for name in ("average", *SPECTATORS):
        agree(run.average(name), one.average(name))
    said, expected = run.belay.stats(), one.belay.stats()
    assert abs(said["tension"] - expected["tension"]) <= 1e-12 * expected["tension"]
    assert said["effective_lr/1"] == expected["effective_lr/1"]
    average = run.average()
    with run.belay.averaged():
        for name, p in run.model.named_parameters():
            assert torch.equal(whole(p), average[name]), name
    full = run.belay.average_state_dict(full=True)
    assert list(full) == (list(one.average()) if dist.get_rank() == 0 else [])


@on(2)
def several_optimizers_of_a_sharded_model_are_resumed_by_distributed_checkpoints(folder: Path) -> None:
    run = Pair(each_its_own, sharded, mine).train(range(5))
    dcp.save({"belay": run.belay}, checkpoint_id=folder / "several")
    again = Pair(each_its_own, sharded, mine, seed=1)
    dcp.load({"belay": again.belay}, checkpoint_id=folder / "several")
    ours, theirs = run.belay.state_dict(), again.belay.state_dict()
    assert ours["optimizers"] == theirs["optimizers"]
    for name, w in ours["averages"]["average"]["weights"].items():
        assert torch.equal(here(w), here(theirs["averages"]["average"]["weights"][name]))


@on(2)
def sharded_stages_keep_their_own_names(folder: Path) -> None:
    first, second = nn.ModuleDict({"0": nn.Linear(3, 5)}), nn.ModuleDict({"1": nn.Linear(5, 1)})
    for layer in (first["0"], second["1"]):
        fully_shard(layer)
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in (first, second)]
    belay = tb.Belay([first, second], optimizers, EMA)
    for stage in (first, second):
        for p in stage.parameters():
            p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    assert list(belay.average_state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    whole_model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    full = belay.average_state_dict(full=True)
    if dist.get_rank() == 0:
        whole_model.load_state_dict(full, strict=True)
    parameters = [*first.parameters(), *second.parameters()]
    before = [whole(p) for p in parameters]
    with belay.averaged() as inside:
        assert [each is stage for each, stage in zip(inside, (first, second), strict=True)] == [True, True]
    assert all(torch.equal(whole(p), q) for p, q in zip(parameters, before, strict=True))

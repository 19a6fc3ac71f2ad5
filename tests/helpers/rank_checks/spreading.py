"""Other ways to spread a model over ranks: DDP, FSDP1, HSDP and tensor parallel."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb

from .runs import BELAY, EMA, SWINGING, TOLERANCE, Net, Run, agree, batch, here, loss_of, mine, on, whole


def compare(run: Run, one: Run) -> None:
    """Train, look at the average, train on."""
    x = batch(99)
    for steps in (range(3), range(3, 5)):
        outputs = []
        for each in (run, one):
            each.train(steps)
            with torch.no_grad(), each.belay.averaged() as model:
                outputs.append(model(x))
        torch.testing.assert_close(*map(whole, outputs), rtol=0, atol=TOLERANCE)
        agree(run.weights(), one.weights())
        agree(run.average(), one.average())


def talks(run: Run) -> int:
    run.optimizer.zero_grad()
    loss_of(run.model, run.share(batch(7))).backward()
    with CommDebugMode() as talk:
        run.optimizer.step()
    return talk.get_total_counts()


@on(2, 3)
def replicas_of_ddp_have_the_average_of_one_process(folder: Path) -> None:
    run = Run(BELAY, DistributedDataParallel, share=mine)
    compare(run, Run(BELAY))
    for t in run.belay.state_dict()["averages"]["average"]["weights"].values():
        everybody = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, t.contiguous())
        assert all(torch.equal(everybody[0], other) for other in everybody)
    assert talks(run) == 0
    assert bool(run.belay.average_state_dict(full=True)) is (dist.get_rank() == 0)


def fsdp1(model: nn.Module, strategy: str, *, use_orig_params: bool = True) -> nn.Module:
    how = ShardingStrategy[strategy]
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params, sharding_strategy=how
    )


@on(2)
def what_fsdp1_has_flattened_is_refused(folder: Path) -> None:
    inside = [nn.Sequential(fsdp1(Net(), how)) for how in ("FULL_SHARD", "SHARD_GRAD_OP")]
    flat = [fsdp1(Net(), how, use_orig_params=False) for how in ("FULL_SHARD", "NO_SHARD")]
    around = [fsdp1(Net(), "FULL_SHARD").module, flat[0].module, fsdp1(Net(), "FULL_SHARD").first]
    for model in (*inside, *flat, *around):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"by FullyShardedDataParallel \(FSDP1\).*use .*fully_shard \(FSDP2\)"):
            tb.Belay(model, optimizer, BELAY)
        assert not optimizer._optimizer_step_pre_hooks


@on(2)
def fsdp1_that_flattens_nothing_has_the_average_of_one_process(folder: Path) -> None:
    compare(Run(BELAY, lambda net: fsdp1(net, "NO_SHARD"), share=mine), Run(BELAY))


@on(4)
def hybrid_shards_have_the_average_of_one_process(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def hybrid(net: Net) -> nn.Module:
        fully_shard(net.first, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    run = Run(SWINGING, hybrid, share=mine)
    assert run.belay.state_dict()["averages"]["average"]["weights"]["scale"].placements == (Replicate(), Shard(0))
    one = Run(SWINGING)
    compare(run, one)
    assert abs(run.belay.stats()["tension"] - one.belay.stats()["tension"]) < 1e-12
    assert talks(run) == 0


PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}


class Parallel(nn.Module):
    """What tensor parallelism is for: one layer by columns, the next by rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 12), nn.Linear(12, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class ParallelRun(Run):
    def __init__(
        self, method: Any, spread: Callable[[Parallel], nn.Module], share: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self.share, self.model = share, spread(Parallel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.belay = tb.Belay(self.model, self.optimizer, method, spectators={"short": EMA})


@on(2, 3, 4)
def tensor_parallel_weights_have_the_average_of_one_process(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    run = ParallelRun(SWINGING, lambda net: parallelize_module(net, mesh, PLAN))
    placements = {n: t.placements for n, t in run.belay.state_dict()["averages"]["average"]["weights"].items()}
    assert placements["first.weight"] == (Shard(0),)
    assert placements["second.weight"] == (Shard(1),)
    compare(run, ParallelRun(SWINGING, lambda net: net))
    assert talks(run) == 0


@on(2, 3)
def a_buffer_that_is_spread_over_ranks_is_averaged_in_its_parts(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(2, 2)
    model.register_buffer("seen", distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.5), buffers="average", dtype=torch.float64)

    def taken() -> Tensor:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return whole(belay.state_dict()["averages"]["average"]["buffers"]["seen"])

    model.seen.add_(1.0)
    assert torch.equal(taken(), torch.arange(5.0).double() + 0.5)
    belay.load_state_dict(copy.deepcopy(belay.state_dict()))
    model.seen = distribute_tensor(torch.arange(5.0), mesh, [Replicate()])  # laid out otherwise: it begins again
    assert torch.equal(taken(), torch.arange(5.0).double())
    model.seen = torch.zeros(5)
    assert torch.equal(taken(), torch.zeros(5).double())


@on(4)
def shards_of_tensor_parallel_weights_have_the_average_of_one_process(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def both(net: Parallel) -> nn.Module:
        parallelize_module(net, mesh["tensor"], PLAN)
        return fully_shard(net, mesh=mesh["data"])

    run = ParallelRun(BELAY, both, lambda x: x.chunk(2)[mesh.get_coordinate()[0]])
    one = ParallelRun(BELAY, lambda net: net)
    compare(run, one)
    assert abs(run.belay.stats()["tension"] - one.belay.stats()["tension"]) < 1e-12
    exported = run.belay.average_state_dict(full=True)
    if dist.get_rank() == 0:
        agree(exported, one.average())
    assert talks(run) == 0


@on(2, 3)
def buffers_that_are_spread_over_ranks_come_back_without_talk(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Replicate()):
        for mode in ("copy", "average"):
            net = Net()
            net.norm.eval()
            net.register_buffer("spread", distribute_tensor(torch.arange(7.0), mesh, [placement]))
            belay = tb.Belay(net, torch.optim.SGD(net.parameters(), lr=0.1), EMA, buffers=mode)
            buffer, own = net.spread, here(net.spread).clone()
            with CommDebugMode() as talk:
                with belay.averaged():
                    pass
                with belay.averaged():
                    if dist.get_rank() == 0:
                        net.spread.to_local().fill_(9.0)
            assert talk.get_total_counts() == 0
            assert net.spread is buffer
            assert torch.equal(here(buffer), own)
            kept = here(belay.average_state_dict()["spread"])
            assert torch.equal(kept, torch.full_like(own, 9.0) if dist.get_rank() == 0 else own)

"""One rank on a GPU, sharded by FSDP2 or sharing its average, against a plain model; and a compiled model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import torchbelay as tb

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has this"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own collectives and compiler
]
X = torch.randn(12, 4, 6, 16, generator=torch.Generator().manual_seed(1))


class Root(nn.Module):
    """Blocks, and parameters of the root's own, which FSDP2 keeps gathered after a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss(model: Callable[[Tensor], Tensor], i: int) -> Tensor:
    x = X[i].cuda()
    with torch.autocast("cuda", torch.bfloat16):
        return (model(x) - x.sin()).float().square().mean()


def train(model: nn.Module, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses on the way and inside `averaged()` every few steps, and the average in the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    belay = tb.Belay(model, optimizer, tb.Spring(k=1.0, m1=10.0, m2=20.0), **options)
    seen = []
    for i in range(len(X)):
        optimizer.zero_grad()
        value = loss(model, i)
        value.backward()
        optimizer.step()
        seen.append(value.item())
        if i % 4 == 3:
            with belay.averaged(), torch.no_grad():
                seen.append(loss(model, 0).item())
    return seen, belay.average_state_dict(full=True)


def test_one_rank_of_fsdp2_trains_and_averages_as_a_plain_model(one_rank: None) -> None:
    plain = train(Root().cuda())
    model = Root().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    losses, average = train(model)
    assert losses == plain[0]  # the same kernels on the same numbers, to the bit
    assert all(torch.equal(average[name], value.cpu()) for name, value in plain[1].items())


def test_one_replica_that_shares_its_average_trains_as_one_that_keeps_it(one_rank: None) -> None:
    plain = train(Root().cuda())
    losses, average = train(Root().cuda(), shard=dist.group.WORLD)
    assert losses == plain[0]
    assert all(torch.equal(average[name], value.cpu()) for name, value in plain[1].items())


def test_a_compiled_model_computes_with_the_average() -> None:
    model = Root().cuda()
    optimizer = tb.optim.AdamW(model.parameters(), lr=1e-2)
    belay = tb.Belay(model, optimizer, tb.Spring(k=1.0, m1=10.0, m2=20.0))
    compiled = torch.compile(model)
    for i in range(4):
        optimizer.zero_grad()
        loss(compiled, i).backward()
        optimizer.step()
    assert "in one pass with the optimizer" in repr(belay)
    alone = Root().cuda()
    alone.load_state_dict(belay.average_state_dict())
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with belay.averaged(), torch.no_grad():
        inside = loss(compiled, 5).item()
    with torch.no_grad():
        assert inside == pytest.approx(loss(alone, 5).item(), rel=1e-2)  # bfloat16 has eight bits
        assert abs(inside - loss(compiled, 5).item()) > 1e-4  # and the weights themselves are elsewhere
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= compilations + 1  # one more, for no_grad

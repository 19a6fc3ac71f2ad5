"""`belay.module(into=...)` of models that are spread over ranks: the teacher's own shards are the average."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb

from .runs import (
    BELAY,
    EMA,
    TOLERANCE,
    Net,
    Run,
    agree,
    batch,
    everything,
    fsdp,
    here,
    loss_of,
    mine,
    on,
    refused,
    same,
    sharded,
    whole,
)

Spread = Callable[[Net], nn.Module]


def teacher_of(spread: Spread, *, seed: int = 5, tied: bool = False) -> nn.Module:
    """A second network, with other weights, spread in some way."""
    net = Net(seed=seed, tied=tied)
    net.norm.eval()
    return spread(net)


class Pair(nn.Module):
    """Two layers of sizes that two ranks divide evenly, along any dimension."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(torch.cat([x, x[:, :1]], 1))))


def pair(spread: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Any, tb.Belay]:
    model = spread(Pair())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, tb.Belay(model, optimizer, EMA)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(t) for name, t in module.state_dict().items()}


def lie_in(module: nn.Module, belay: tb.Belay) -> bool:
    """Whether the average lies in the shards of the module."""
    module.reshard()
    parameters = dict(module.named_parameters())
    pairs = [(here(parameters[name]), here(t)) for name, t in belay.tensors().items()]
    return all(x.data_ptr() == y.data_ptr() for x, y in pairs if x.numel())


@on(2, 3, 4)
def a_teacher_that_is_sharded_like_the_model_is_the_average(folder: Path) -> None:
    """At every step, also to a root that keeps what it has gathered, and compared with one process."""
    for method in (EMA, BELAY):
        run, one = fsdp(method, tied=True), Run(method, tied=True)
        teacher = run.belay.module(into=teacher_of(sharded, tied=True))
        plain = one.belay.module()
        assert not teacher.training
        assert lie_in(teacher, run.belay)
        assert same(dict(teacher.state_dict()), dict(run.belay.average_state_dict()))
        for step in range(4):
            with torch.no_grad():
                torch.testing.assert_close(teacher(batch(50)), plain(batch(50)), rtol=0, atol=TOLERANCE)
            run.train([step])
            one.train([step])
            assert same(dict(teacher.state_dict()), dict(run.belay.average_state_dict()))
            agree(state_of(teacher), run.average())
            agree(state_of(teacher), one.average())
        assert lie_in(teacher, run.belay)


@on(2)
def a_student_learns_from_a_sharded_teacher(folder: Path) -> None:
    """As in a loop of self-distillation: the graph of the student lives on while the teacher is asked."""
    run, one = fsdp(EMA), Run(EMA)
    teachers = run.belay.module(into=teacher_of(sharded)), one.belay.module()
    for step in range(4):
        for each, teacher in zip((run, one), teachers, strict=True):
            x = each.share(batch(step))
            each.optimizer.zero_grad()
            found = each.model(x)
            with torch.no_grad():
                wanted = teacher(x + 0.1)
            (found - wanted).square().mean().backward()
            each.optimizer.step()
    agree(run.weights(), one.weights())
    agree(state_of(teachers[0]), state_of(teachers[1]))


@on(2)
def a_sharded_teacher_costs_a_step_no_talk_and_no_memory(folder: Path) -> None:
    run = fsdp(EMA)
    teacher = run.belay.module(into=teacher_of(sharded))
    for step in range(2):
        run.optimizer.zero_grad()
        loss_of(run.model, mine(batch(step))).backward()
        with torch.no_grad():
            teacher(batch(step))
        with CommDebugMode() as talk:
            run.optimizer.step()
        assert talk.get_total_counts() == 0, talk.get_comm_counts()
    sizes = [t.untyped_storage().nbytes() for t in map(here, run.belay.tensors().values())]
    assert lie_in(teacher, run.belay)  # so the average has no memory besides the teacher's
    assert sizes


@on(2, 3)
def a_sharded_teacher_follows_whatever_the_average_does(folder: Path) -> None:
    run = fsdp(EMA, start=2, spectators={"short": EMA})
    teacher, short = (run.belay.module(name, into=teacher_of(sharded)) for name in ("average", "short"))

    def check() -> None:
        for each in (teacher, short):
            each.reshard()
        assert same(dict(teacher.state_dict()), dict(run.belay.average_state_dict()))
        assert same(dict(short.state_dict()), dict(run.belay.average_state_dict("short")))

    check()
    for step in range(4):
        run.train([step])
        with torch.no_grad():
            teacher(batch(0))
        check()
        assert lie_in(teacher, run.belay) is (step > 0)
    state = copy.deepcopy(run.belay.state_dict())
    run.train([4])
    run.belay.load_state_dict(state)
    check()
    before = everything(run)
    for name in ("average", "short"):
        with run.belay.averaged(name):
            check()
            with torch.no_grad():
                inside = run.model(batch(9))
                torch.testing.assert_close((teacher, short)[name == "short"](batch(9)), inside, rtol=0, atol=TOLERANCE)
        assert same(everything(run), before)
    run.belay.reset()
    check()
    assert lie_in(teacher, run.belay)
    run.train([5])
    check()


@on(2)
def a_teacher_of_16_bit_shards_is_renewed_at_every_step(folder: Path) -> None:
    """The average is in float32, the shards of model and teacher are in bfloat16."""
    run = Run(EMA, lambda net: sharded(net.bfloat16()), share=lambda x: mine(x).bfloat16())
    teacher = run.belay.module(into=teacher_of(lambda net: sharded(net.bfloat16())))
    for number in range(3):
        run.train([number])
        assert same(dict(teacher.state_dict()), dict(run.belay.average_state_dict()))
        with torch.no_grad():
            seen = teacher(batch(0).bfloat16())
            with run.belay.averaged():
                assert torch.equal(run.model(batch(0).bfloat16()), seen)


@on(2)
def a_teacher_may_compute_in_16_bits(folder: Path) -> None:
    """Its shards are those of the model, and what it gathers is narrower."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model, optimizer, belay = pair(fully_shard)
    teacher = belay.module(into=fully_shard(Pair(5), mp_policy=policy))
    for number in range(3):
        step(model, optimizer, number)
        with torch.no_grad():
            seen = teacher(batch(0))
            with belay.averaged():
                torch.testing.assert_close(seen, model(batch(0)), rtol=0.02, atol=0.02)
    assert lie_in(teacher, belay)


def tensor_parallel(net: nn.Module) -> nn.Module:
    plan: dict[str, Any] = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net, mesh, plan)


@on(4)
def a_teacher_of_hybrid_shards_is_the_average(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def hybrid(net: Net) -> nn.Module:
        fully_shard(net.first, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    run = Run(EMA, hybrid, share=mine)
    teacher = run.belay.module(into=teacher_of(hybrid))
    run.train(range(3))
    assert same(dict(teacher.state_dict()), dict(run.belay.average_state_dict()))
    assert lie_in(teacher, run.belay)


@on(2)
def a_teacher_that_does_not_fit_is_refused_and_changes_nothing(folder: Path) -> None:
    run = fsdp(EMA).train(range(2))

    cases: dict[str, Spread] = {
        "sharded as not at all in into=": lambda net: net,
        "it must be torch.float64, as that of the model or of its average": lambda net: sharded(net.float()),
    }
    before = everything(run)
    for words, spread in cases.items():
        teacher = teacher_of(spread)
        theirs = state_of(teacher)
        with refused(ValueError, words):
            run.belay.module(into=teacher)
        assert same(everything(run), before)
        assert same(state_of(teacher), theirs)
        assert teacher.training
    with refused(ValueError, "shares weights with the model"):
        run.belay.module(into=run.model)
    with refused(ValueError, "module() cannot copy", "which is sharded; build a second one", "module(into=...)"):
        run.belay.module()
    _, _, belay = pair(fully_shard)
    turned = fully_shard(Pair(5), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with refused(ValueError, "parameter 'first.weight' is sharded as", "by the same calls of fully_shard()"):
        belay.module(into=turned)
    one = Run(EMA)
    with refused(ValueError, "is sharded as", "and as not at all in the model"):
        one.belay.module(into=teacher_of(sharded))
    run.train([2])


@on(2)
def replicas_of_ddp_have_plain_modules(folder: Path) -> None:
    run = Run(EMA, DistributedDataParallel, share=mine)
    made = run.belay.module()
    assert type(made) is Net
    run.train(range(3))
    assert same(dict(made.state_dict()), dict(run.belay.average_state_dict()))
    inside = Run(EMA, lambda net: nn.Sequential(DistributedDataParallel(net)), share=mine)
    made = inside.belay.module()
    inside.train(range(2))
    assert [type(part) for part in made] == [Net]
    assert same(dict(made.state_dict()), dict(inside.belay.average_state_dict()))


@on(2)
def a_teacher_of_tensor_parallel_weights_is_the_average(folder: Path) -> None:
    model, optimizer, belay = pair(tensor_parallel)
    teacher = belay.module(into=tensor_parallel(Pair(5)))
    for number in range(3):
        step(model, optimizer, number)
        assert same(dict(teacher.state_dict()), dict(belay.average_state_dict()))
        with torch.no_grad():
            seen = teacher(batch(0))
            with belay.averaged():
                assert torch.equal(model(batch(0)), seen)

"""One average for all replicas: each rank keeps a slice of it, and all is as if each had kept the whole of it."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchbelay as tb
from torchbelay.belay import traffic

from .runs import (
    BELAY,
    EMA,
    LAGGED,
    SPECTATORS,
    SWINGING,
    Run,
    agree,
    batch,
    each_its_own,
    loss_of,
    mine,
    on,
    refused,
    same,
)

WATCHING = {"ema": EMA, "lagged": LAGGED, "swa": tb.methods.swa()}


def world() -> Any:
    return dist.group.WORLD


def replica(method: Any, **options: Any) -> Run:
    """A replica of DDP that keeps all of its average."""
    return Run(method, DistributedDataParallel, share=mine, **options)


def sharing(method: Any, **options: Any) -> Run:
    """A replica of DDP that shares its average with the others."""
    return replica(method, shard=world(), **options)


class Messages(TorchDispatchMode):
    """Notes the bytes that this rank gives to each collective of torch.distributed inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.sent.append(next((t.nbytes for t in reversed(tree_leaves(args)) if isinstance(t, Tensor)), -1))
        return func(*args, **kwargs or {})


def counted_step(run: Run, step: int) -> list[int]:
    run.optimizer.zero_grad()
    loss_of(run.model, run.share(batch(step))).backward()
    with Messages() as messages:
        run.optimizer.step()
    return messages.sent


def held(run: Run) -> int:
    """The bytes of averages and velocities on this rank."""
    found = 0
    for saved in run.belay.state_dict()["averages"].values():
        for kind in ("weights", "velocities1", "velocities2"):
            found += sum(t.to_local().untyped_storage().nbytes() for t in saved[kind].values())
    return found


def compare(run: Run, whole: Run, names: Any = ("average",)) -> None:
    """The two runs agree bit for bit: weights and averages."""
    agree(run.weights(), whole.weights(), 0)
    for name in names:
        agree(run.average(name), whole.average(name), 0)


@on(2, 3, 4)
def replicas_that_share_an_average_are_those_that_each_keep_it(folder: Path) -> None:
    run, whole = (make(each_its_own, spectators=SPECTATORS) for make in (sharing, replica))
    for steps in (range(4), range(4, 7)):
        run.train(steps)
        whole.train(steps)
        compare(run, whole, ("average", *SPECTATORS))
    mine, theirs = run.belay.stats(), whole.belay.stats()
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert abs(mine[key] - theirs[key]) <= 1e-12 * abs(theirs[key]), key
    assert f"slice {dist.get_rank() + 1} of {dist.get_world_size()}" in repr(run.belay)


# What it costs --------------------------------------------------------------------------------------------------------


@on(2, 3, 4)
def each_rank_stores_its_share_of_the_bytes_as_the_formula_says(folder: Path) -> None:
    ranks = dist.get_world_size()
    run = sharing(SWINGING, spectators={"short": EMA}, dtype=torch.float32)
    run.train(range(2))
    shapes = [tuple(p.shape) for p in run.model.parameters()]
    per_rank: list[Any] = [None] * ranks
    dist.all_gather_object(per_rank, held(run))
    total = 4 * sum(p.numel() for p in run.model.parameters()) * 4  # four tensors per weight, of four bytes
    assert sum(per_rank) == total
    assert max(per_rank) == per_rank[0] == 4 * traffic.stored(shapes, ranks, itemsize=4)
    assert per_rank[0] < 2 * total / ranks  # of a model whose largest tensor has 15 numbers


@on(2, 3, 4)
def watching_sends_nothing(folder: Path) -> None:
    run = sharing(EMA, spectators=WATCHING, buffers="average", on_nonfinite="skip")
    assert [counted_step(run, step) for step in range(3)] == [[], [], []]
    with Messages() as messages:
        run.belay.reset()
        run.belay.state_dict()
    assert not messages.sent
    with Messages() as messages:
        run.belay.average_state_dict()
    assert len(messages.sent) == len(list(run.model.parameters()))  # they are seen: an export gathers


@on(2, 3, 4)
def a_pull_sends_one_message_of_the_bytes_that_the_formula_says(folder: Path) -> None:
    ranks = dist.get_world_size()
    run = sharing(BELAY, spectators=WATCHING)
    shapes = [tuple(p.shape) for p in run.model.parameters()]
    expected = traffic.gathered(shapes, ranks, itemsize=8)
    assert expected.messages == 1
    assert [counted_step(run, step) for step in range(3)] == [[expected.given]] * 3


@on(2, 3)
def a_method_that_pulls_at_some_steps_sends_at_those_alone(folder: Path) -> None:
    run = sharing(tb.methods.lookahead(k=3))
    assert [len(counted_step(run, step)) for step in range(6)] == [0, 0, 1, 0, 0, 1]
    thin = sharing(BELAY, every=2)
    assert [len(counted_step(thin, step)) for step in range(4)] == [0, 1, 0, 1]


@on(2, 3)
def more_weights_than_one_message_carries_go_in_several(folder: Path) -> None:
    run, whole = sharing(BELAY), replica(BELAY).train(range(3))
    shapes = [tuple(p.shape) for p in run.model.parameters()]
    usual, traffic.BUCKET = traffic.BUCKET, 128
    try:
        expected = traffic.gathered(shapes, dist.get_world_size(), itemsize=8)
        assert 1 < expected.messages < len(shapes)
        for step in range(3):
            found = counted_step(run, step)
            assert (len(found), sum(found)) == (expected.messages, expected.given)
    finally:
        traffic.BUCKET = usual
    compare(run, whole)


# Tensors of all kinds -------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Parameters of every shape, layout and dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scalar = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.rand(1))
        self.wide = nn.Parameter(torch.rand(1, 3, 37))
        self.tall = nn.Parameter(torch.rand(301, 2))
        self.image = nn.Parameter(torch.rand(9, 4, 3, 3).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.rand(7, 11).t())
        self.gaps = nn.Parameter(torch.rand(8, 10)[:, ::2])
        self.double_ = nn.Parameter(torch.rand(5, 5, dtype=torch.float64))
        self.half_ = nn.Parameter(torch.rand(33).to(torch.bfloat16))
        self.half2 = nn.Parameter(torch.rand(6, 3).half())
        self.complex = nn.Parameter(torch.rand(5, 3, dtype=torch.complex64))


def push(model: nn.Module, step: int) -> None:
    """Gradients that are the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


@on(2, 3)
def tensors_of_every_kind_are_shared(folder: Path) -> None:
    for method, dtype, impl in (
        (EMA, None, "foreach"),
        (BELAY, torch.bfloat16, "foreach"),
        (SWINGING, torch.float64, "foreach"),
        (BELAY, None, "reference"),
    ):
        found = []
        for shard in (world(), None):
            model = Zoo()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", tb.BelayWarning)  # about pulls on 16-bit weights
                how = {"spectators": {"x": LAGGED}, "dtype": dtype, "impl": impl, "shard": shard}
                belay = tb.Belay(model, optimizer, method, **how)
            for step in range(3):
                push(model, step)
                optimizer.step()
            with belay.averaged("x"):
                inside = copy.deepcopy(model.state_dict())
            found.append([model.state_dict(), belay.average_state_dict(), belay.average_state_dict("x"), inside])
        assert all(map(same, *found)), (method, dtype, impl)


@on(2)
def a_number_that_is_not_cut_is_that_of_the_first_rank_after_a_pull(folder: Path) -> None:
    """Ranks that round at random would drift apart in what each of them moves by itself."""
    model = nn.ParameterDict({"number": torch.ones(()), "row": torch.ones(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, BELAY, shard=world())
    model["number"].data += 1e-6 * dist.get_rank()
    push(model, 0)
    optimizer.step()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, model["number"].item())
    assert len(set(everybody)) == 1


@on(2, 3)
def a_model_that_is_moved_cast_or_laid_out_anew_takes_its_slices_along(folder: Path) -> None:
    found = []
    for shard in (world(), None):
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 1, 1))
        torch.manual_seed(3)
        for p in model.parameters():
            nn.init.normal_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, BELAY, spectators={"x": EMA}, shard=shard)
        for change in (
            lambda model: model.to(memory_format=torch.channels_last),
            lambda model: model.double(),
            lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
            lambda model: model.to(memory_format=torch.contiguous_format),
        ):
            push(model, 0)
            optimizer.step()
            change(model)
            push(model, 1)
            optimizer.step()
        found.append([model.state_dict(), belay.average_state_dict(), belay.average_state_dict("x")])
    assert all(map(same, *found))


class Replacing(torch.optim.SGD):
    """An optimizer that puts new memory in the place of the weights, as some do."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.1 * p.grad


@on(2)
def weights_whose_memory_the_optimizer_replaces_are_followed(folder: Path) -> None:
    for method in (EMA, BELAY):
        found = []
        for shard in (world(), None):
            model = Zoo().float()
            optimizer = Replacing(model.parameters(), lr=0.1)
            belay = tb.Belay(model, optimizer, method, spectators={"x": EMA}, shard=shard)
            for step in range(3):
                push(model, step)
                optimizer.step()
            found.append([model.state_dict(), belay.average_state_dict(), belay.average_state_dict("x")])
        assert all(map(same, *found)), method


# The life of a training -----------------------------------------------------------------------------------------------


def both(method: Any, **options: Any) -> tuple[Run, Run]:
    return sharing(method, **options), replica(method, **options)


@on(2, 3)
def the_model_holds_the_average_inside_the_block_and_leaves_without_a_message(folder: Path) -> None:
    x = batch(99)
    for method, how in ((EMA, {}), (BELAY, {"dtype": torch.float32}), (tb.methods.swa(), {"start": 9})):
        run, whole = both(method, **how)
        run.train(range(3))
        whole.train(range(3))
        before = copy.deepcopy(run.model.state_dict())
        with Messages() as messages:
            with run.belay.averaged() as model:
                gathered = len(messages.sent)
                output = model.module(x)  # DDP itself would send its buffers
                exported = run.belay.average_state_dict()
                own = run.belay.model_state_dict()
                with run.belay.averaged():
                    pass
            assert len(messages.sent) == gathered == (0 if "start" in how else 1)
        with whole.belay.averaged() as model:
            assert torch.equal(model.module(x), output)
        agree(exported, whole.average(), 0)
        agree(own, whole.belay.model_state_dict(), 0)
        assert same(dict(run.model.state_dict()), dict(before))
        compare(run.train(range(3, 5)), whole.train(range(3, 5)))


@on(2, 3)
def an_exception_on_one_rank_alone_leaves_its_weights_as_they_were(folder: Path) -> None:
    run, whole = both(BELAY)
    run.train(range(2))
    whole.train(range(2))
    before = copy.deepcopy(run.model.state_dict())
    try:
        with run.belay.averaged():
            if dist.get_rank() == 0:
                raise KeyError("one rank alone")
    except KeyError:
        assert dist.get_rank() == 0
    assert same(dict(run.model.state_dict()), dict(before))
    with run.belay.averaged(), refused(RuntimeError, "inside averaged"):
        run.optimizer.step()
    compare(run.train(range(2, 4)), whole.train(range(2, 4)))


@on(2, 3)
def readouts_are_those_of_a_whole_average(folder: Path) -> None:
    run, whole = both(tb.methods.ema(0.9), keep_initial=True, dtype=torch.float32)
    readout, x = tb.readouts.bema(), batch(5)
    outputs = []
    for each in (run, whole):
        each.train(range(4))
        with each.belay.averaged(readout=readout) as model:
            outputs.append(model(x))
    assert torch.equal(*outputs)
    agree(run.average(readout=readout), whole.average(readout=readout), 0)
    agree(run.weights(), whole.weights(), 0)


@on(3)
def changes_of_the_model_and_of_the_method_are_followed(folder: Path) -> None:
    run, whole = both(BELAY, spectators={"x": EMA})
    for each in (run, whole):
        each.train(range(2))
        each.belay.change(tb.methods.lookahead(k=2))
        each.train(range(2, 5))
        each.belay.change(SWINGING)
        each.belay.change(tb.Spring.ema(decay=0.5), "x")
        each.train(range(5, 7))
    compare(run, whole, ("average", "x"))
    for each in (run, whole):
        each.belay.reset()
        each.train(range(7, 9))
    compare(run, whole, ("average", "x"))
    for each in (run, whole):
        each.belay.copy_to_model("x")
    compare(run, whole, ("average", "x"))
    for each in (run, whole):
        each.train(range(9, 11))
    compare(run, whole, ("average", "x"))


@on(2)
def after_a_reset_at_another_shape_the_initial_weights_are_cut_like_the_average(folder: Path) -> None:
    """Four rows in two halves, then three: the part of one rank keeps its size, and that of the other does not."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4))})
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA, shard=world(), keep_initial=True)
    model["w"].data = torch.arange(3.0)
    belay.reset()
    saved = belay.state_dict()["averages"]["average"]
    assert saved["initial"]["w"].shape == saved["weights"]["w"].shape == (3,)
    full = belay.state_dict(full=True)
    if dist.get_rank() == 0:
        assert torch.equal(full["averages"]["average"]["initial"]["w"], torch.arange(3.0))


@on(2, 3)
def a_parameter_that_joins_late_is_shared_too(folder: Path) -> None:
    runs = []
    for shard in (world(), None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5)).double()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, BELAY, spectators={"x": EMA}, shard=shard)
        for step in range(4):
            push(model, step)
            if step == 2:
                optimizer.add_param_group({"params": model[1].parameters()})
                with pytest.warns(tb.BelayWarning, match=r"2 parameter\(s\) were added"):
                    optimizer.step()
            else:
                optimizer.step()
        del optimizer.param_groups[0]["params"][0]
        with pytest.warns(tb.BelayWarning, match=r"1 parameter\(s\) were taken"):
            optimizer.step()
        runs.append([model.state_dict(), belay.average_state_dict(), belay.average_state_dict("x")])
    assert all(map(same, *runs))


@on(2)
def options_do_with_a_shared_average_what_they_do_with_a_whole_one(folder: Path) -> None:
    for method, how in (
        (EMA, {"device": "cpu"}),
        (BELAY, {"start": 2}),
        (EMA, {"every": 3}),
        (tb.methods.ema(0.9), {"buffers": "average"}),
        (BELAY, {"on_nonfinite": "raise"}),
    ):
        run, whole = both(method, **how)
        compare(run.train(range(5)), whole.train(range(5)))


@on(2)
def a_step_that_leaves_bad_weights_is_ignored_on_every_rank(folder: Path) -> None:
    for policy in ("skip", "raise"):
        run = sharing(BELAY, on_nonfinite=policy).train(range(2))
        before = run.average()
        for p in run.model.parameters():
            p.grad = torch.full_like(p, float("nan"))
        if policy == "skip":
            run.optimizer.step()
        else:
            with refused(FloatingPointError, "'scale' is not finite"):
                run.optimizer.step()
        assert run.belay.step == 2
        agree(run.average(), before, 0)


@on(2)
def optimizers_of_every_kind_step_beside_a_shared_average(folder: Path) -> None:
    """In one pass, two at once, by hand, and with a second Belay that keeps its average whole."""
    found = []
    for shard in (world(), None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5))
        fused = tb.optim.AdamW(model[0].parameters(), lr=0.1)
        plain = torch.optim.SGD(model[1].parameters(), lr=0.1)
        belay = tb.Belay(model, [fused, plain], BELAY, spectators={"x": EMA}, shard=shard)
        other = tb.Belay(model, fused, EMA)
        for step in range(3):
            push(model, step)
            fused.step()
            plain.step()
        with belay.averaged():
            inside = copy.deepcopy(model.state_dict())
        hand = tb.Belay.from_parameters(
            dict(model.named_parameters()).items(), None, tb.Spring.ema(decay=0.5), shard=shard
        )
        for p in model.parameters():
            p.data.mul_(1.5)
        hand.update()
        hand.update(rate=0.25)
        found.append([model.state_dict(), *(b.average_state_dict() for b in (belay, other, hand)), inside])
        found[-1].append(belay.state_dict(full=True)["step"] if dist.get_rank() == 0 else belay.state_dict(full=True))
        belay.detach()
    assert all(map(same, *found))


@on(4)
def groups_of_some_ranks_share_among_themselves(folder: Path) -> None:
    """Two nodes of two ranks: an average within each node, and gradients of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    for shard in (mesh["node"], mesh["node"].get_group()):
        run, whole = replica(BELAY, shard=shard), replica(BELAY)
        compare(run.train(range(3)), whole.train(range(3)))
        expected = traffic.gathered([tuple(p.shape) for p in run.model.parameters()], 2, itemsize=8)
        assert counted_step(run, 9) == [expected.given]
        path = folder / "nodes.safetensors"
        run.belay.save_average(path)
        dist.barrier()
        assert same(dict(sorted(load_file(path).items())), dict(sorted(run.average().items())))
        dist.barrier()


@on(3)
def of_a_group_without_rank_0_the_first_rank_gets_and_writes_all(folder: Path) -> None:
    group = dist.new_group([1, 2])
    path = folder / "without_rank_0.safetensors"
    if dist.get_rank() > 0:
        run = Run(EMA, adam=False, shard=group).train(range(2))
        expected = run.average()
        found = [run.belay.average_state_dict(full=True), run.belay.model_state_dict(full=True)]
        state = run.belay.state_dict(full=True)
        run.belay.save_average(path)
        dist.barrier(group)
        if dist.get_rank() == 1:
            agree(found[0], expected, 0)
            agree(found[1], run.belay.model_state_dict(), 0)
            weights = state["averages"]["average"]["weights"]
            agree(
                {name: t.to(expected[name].dtype) for name, t in weights.items()}, {n: expected[n] for n in weights}, 0
            )
        else:
            assert [*found, state] == [{}, {}, {}]
        assert same(dict(sorted(load_file(path).items())), dict(sorted(expected.items())))
    dist.barrier()

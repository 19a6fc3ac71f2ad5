"""Several workers that share one average, against one program that simulates all of them."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from torchbelay.ops import workers as cost

from .runs import Net, agree, batch, loss_of, on, refused, same, whole

STEPS = 14
EVERY_STEP = tb.methods.easgd(0.1)
SELDOM = tb.methods.easgd(rho=4.0, every=3)
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
DILOCO = tb.methods.diloco(every=3, lr=0.6, momentum=0.8)
LOCAL_SGD = tb.methods.lookahead(k=4, alpha=1.0)


def rows(step: int, worker: int) -> Tensor:
    """The batch of one worker, which no other has."""
    return batch(100 * worker + step)


class Worker:
    """A model that one worker trains alone."""

    def __init__(self, worker: int, net: nn.Module | None = None) -> None:
        self.worker, self.net = worker, Net() if net is None else net
        self.net.norm.eval()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.02)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.net, rows(step, self.worker)).backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]

    def write(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for p, w in zip(self.net.parameters(), weights, strict=True):
                p.copy_(w)

    def named(self) -> dict[str, Tensor]:
        return {name: whole(p) for name, p in self.net.named_parameters()}


class Attached(Worker):
    """A worker with a Belay."""

    def __init__(self, method: Any, *, net: nn.Module | None = None, workers: Any = None, **options: Any) -> None:
        group = dist.group.WORLD if workers is None else workers
        super().__init__(dist.get_rank(), net)
        self.belay = tb.Belay(self.net, self.optimizer, method, workers=group, **options)

    def train(self, steps: Any) -> "Attached":
        for step in steps:
            self.step(step)
        return self

    def average(self) -> dict[str, Tensor]:
        found = self.belay.average_state_dict()
        return {name: found[name] for name, _ in self.net.named_parameters()}


Sync = Callable[[int, list[list[Tensor]], list[list[Tensor]], list[Tensor]], tuple[list[list[Tensor]], list[Tensor]]]


def simulate(sync: Sync, steps: int = STEPS) -> tuple[list[Worker], dict[str, Tensor]]:
    """Train all workers in one program. `sync` has the weights before and after a step, and the common average."""
    all_of_them = [Worker(i) for i in range(dist.get_world_size())]
    average = all_of_them[0].weights()
    for step in range(steps):
        before = [each.weights() for each in all_of_them]
        for each in all_of_them:
            each.step(step)
        after, average = sync(step + 1, before, [each.weights() for each in all_of_them], average)
        for each, weights in zip(all_of_them, after, strict=True):
            each.write(weights)
    names = [name for name, _ in all_of_them[0].net.named_parameters()]
    return all_of_them, dict(zip(names, average, strict=True))


def elastic(alpha: float, every: int) -> Sync:
    """EASGD as it was published: x_i and the centre move at once, from where they were."""

    def sync(step: int, before: Any, after: Any, centre: Any) -> Any:
        if step % every:
            return after, centre
        moved = [[x - alpha * (o - c) for x, o, c in zip(xs, os, centre)] for xs, os in zip(after, before)]  # noqa: B905
        new = [c + alpha * sum(os[i] - c for os in before) for i, c in enumerate(centre)]
        return moved, new

    return sync


def springs(k: float, m1: float, m2: float) -> Sync:
    """Algorithm 1 for many bodies: each spring pulls its worker and the average."""

    def sync(step: int, before: Any, after: Any, average: Any) -> Any:
        one, two = k / (2 * m1), k / (2 * m2)
        moved = [[(1 - one) * x + one * c for x, c in zip(xs, average, strict=True)] for xs in after]
        new = [c + sum(two * (os[i] - c) for os in before) for i, c in enumerate(average)]
        return moved, new

    return sync


def outer(every: int, lr: float, momentum: float) -> Sync:
    """DiLoCo: torch's own SGD with Nesterov momentum, on the mean of the displacements as a gradient."""
    held: list[nn.Parameter] = []
    optimizers: list[torch.optim.Optimizer] = []

    def sync(step: int, before: Any, after: Any, average: Any) -> Any:
        if step % every:
            return after, average
        if not held:
            held.extend(nn.Parameter(w.clone()) for w in average)
            optimizers.append(torch.optim.SGD(held, lr=lr, momentum=momentum, nesterov=momentum > 0))
        for i, p in enumerate(held):
            p.grad = torch.stack([average[i] - xs[i] for xs in after]).mean(0)
        optimizers[0].step()
        new = [p.detach().clone() for p in held]
        return [new for _ in after], new

    return sync


def agrees(mine: Attached, everybody: list[Worker], average: dict[str, Tensor]) -> None:
    """Compare this worker with its double in the simulation, and the average of all workers with each other."""
    agree(mine.named(), everybody[dist.get_rank()].named(), 1e-12)
    agree(mine.average(), average, 1e-12)
    assert_same_average(mine)


def assert_same_average(mine: Attached) -> None:
    """Compare the average, bit for bit, with that of the first worker."""
    theirs = [copy.deepcopy(mine.average())]
    dist.broadcast_object_list(theirs, src=0)
    assert same(theirs[0], mine.average())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes of every message of several ranks."""
    sent: list[int] = []
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "reduce_scatter_tensor")
    right = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes if isinstance(tensor, Tensor) else 0)
            return right[name](tensor, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, right[name])


@on(1, 2, 3, 4)
def workers_on_springs_equal_one_program_that_simulates_them(folder: Path) -> None:
    for method, sync in (
        (EVERY_STEP, elastic(0.1, 1)),
        (SELDOM, elastic(4.0 * 0.02, 3)),
        (BELAY, springs(1.0, 10.0, 20.0)),
        (tb.methods.belay(0.5, 5.0, 40.0), springs(0.5, 5.0, 40.0)),
    ):
        agrees(Attached(method).train(range(STEPS)), *simulate(sync))


@on(1, 2, 3, 4)
def workers_that_meet_equal_one_program_that_simulates_them(folder: Path) -> None:
    for method, *numbers in (
        (DILOCO, 3, 0.6, 0.8),
        (tb.methods.diloco(every=4), 4, 0.7, 0.9),
        (LOCAL_SGD, 4, 1.0, 0.0),
        (tb.methods.lookahead(k=2, alpha=0.5), 2, 0.5, 0.0),
    ):
        mine = Attached(method).train(range(12))
        agrees(mine, *simulate(outer(*numbers), 12))
        assert same(mine.named(), mine.average())  # after a sync not a bit is between them
        agrees(mine.train([12]), *simulate(outer(*numbers), 13))


@on(2, 3, 4)
def a_spring_that_syncs_seldom_moves_mean_and_average_as_all_the_steps_between_would(folder: Path) -> None:
    n, one, two = dist.get_world_size(), 1 / 20, 1 / 40
    left = (1 - one - n * two) ** 4  # of the distance between the mean of the workers and the average
    pull, follow = (share / (one + n * two) * (1 - left) for share in (one, two))

    def sync(step: int, before: Any, after: Any, average: Any) -> Any:
        if step % 4:
            return after, average
        moved = [[(1 - pull) * x + pull * c for x, c in zip(xs, average, strict=True)] for xs in after]
        new = [c + follow * sum(os[i] - c for os in before) for i, c in enumerate(average)]
        return moved, new

    agrees(Attached(BELAY, every=4).train(range(STEPS)), *simulate(sync))


@on(1, 2, 3, 4)
def a_sync_is_one_message_and_steps_between_are_none(folder: Path) -> None:
    n, size = dist.get_world_size(), sum(p.numel() for p in Net().parameters())
    payload = cost.exchanged_bytes(size, n, bytes_per_number=8)
    for method, every, momentum in ((EVERY_STEP, 1, False), (SELDOM, 3, False), (DILOCO, 3, True)):
        mine = Attached(method)
        for step in range(1, 7):
            with counted() as sent:
                mine.train([step])
            assert sent == [payload] * (cost.messages(n) if step % every == 0 else 0), (method, step)
        assert cost.sent_bytes(size, n, bytes_per_number=8) == pytest.approx(sent_around_a_ring(payload, n))
        saved = mine.belay.state_dict()["averages"]["average"]
        stored = sum(t.nbytes for kind in ("weights", "velocities1", "velocities2") for t in saved[kind].values())
        assert stored == cost.stored_bytes(size, momentum=momentum, bytes_per_number=8)


def sent_around_a_ring(payload: int, n: int) -> float:
    """Return what a rank sends if each sums a part and passes it on: n − 1 parts there, and n − 1 parts back."""
    return (n - 1) * payload / n + (n - 1) * payload / n


@on(2, 3)
def every_worker_can_look_at_the_average_and_export_it_alone(folder: Path) -> None:
    mine = Attached(DILOCO).train(range(4))
    if dist.get_rank() == 1:  # without the others
        with mine.belay.averaged():
            assert same(mine.named(), mine.average())
            with refused(RuntimeError, "an optimizer step inside averaged"):
                mine.step(5)
        exported = mine.belay.average_state_dict()
        Net().load_state_dict(exported, strict=True)
        assert mine.belay.stats()["step"] == 4
    assert "2 workers" in repr(mine.belay) or "3 workers" in repr(mine.belay)
    agrees(mine.train(range(4, 8)), *simulate(outer(3, 0.6, 0.8), 8))


@on(2, 4)
def workers_that_save_and_load_end_where_undisturbed_ones_do(folder: Path) -> None:
    for method in (SELDOM, BELAY, DILOCO):
        undisturbed = Attached(method).train(range(10))
        first = Attached(method).train(range(5))
        file = io.BytesIO()
        parts = {"net": first.net, "optimizer": first.optimizer, "belay": first.belay}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net = Net(seed=5)
        net.load_state_dict(saved["net"])  # before or after the Belay is made: both are right
        again = Attached(method, net=net)
        again.optimizer.load_state_dict(saved["optimizer"])
        again.belay.load_state_dict(saved["belay"])
        again.train(range(5, 10))
        assert same(again.named(), undisturbed.named())
        assert same(again.average(), undisturbed.average())
        assert again.belay.step == 10


@on(2, 3)
def workers_refuse_states_of_different_steps_or_averages_all_together(folder: Path) -> None:
    mine = Attached(DILOCO).train(range(4))
    early = copy.deepcopy(mine.belay.state_dict())
    mine.train(range(4, 7))
    late, before = copy.deepcopy(mine.belay.state_dict()), mine.average()
    last = dist.get_rank() == dist.get_world_size() - 1
    with refused(ValueError, "disagree about the state of optimizer 0: 'step' is"):
        mine.belay.load_state_dict(early if last else late)
    spoilt = copy.deepcopy(late)
    if last:
        spoilt["averages"]["average"]["velocities2"]["scale"][0] += 1e-9
    with refused(ValueError, "disagree about velocities2 of the state: 'scale' is"):
        mine.belay.load_state_dict(spoilt)
    if last:
        del spoilt["averages"]["average"]["weights"]["scale"]
    with refused(ValueError, "scale" if last else "could not go on"):
        mine.belay.load_state_dict(spoilt if last else late)
    assert same(mine.average(), before)
    assert mine.belay.step == 7
    alone = tb.Belay(Net(), None, DILOCO)
    with refused(ValueError, "workers differs", "1 in the checkpoint", "here; build Belay with a group of 1 workers"):
        mine.belay.load_state_dict(alone.state_dict())
    with pytest.warns(tb.BelayWarning, match=f"workers was {dist.get_world_size()} and is 1 from now on"):
        alone.load_state_dict(late, strict=False)
    alone.detach()


@on(2, 3)
def workers_that_disagree_all_refuse_and_nothing_is_attached(folder: Path) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    narrow = Net()
    narrow.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    cast = Net()
    cast.first.bias.data = cast.first.bias.data.float()
    renamed = Net()
    renamed.third = renamed.second
    del renamed.second
    for words, method, net, options in (
        (("the methods: 'scale' is easgd", "easgd"), tb.methods.easgd(0.2 if last else 0.1), Net(), {}),
        (("the parameters: 'scale' is (5,)", "(1,)"), DILOCO, narrow if last else Net(), {}),
        (("the parameters: 'second.weight' is", "missing"), DILOCO, renamed if last else Net(), {}),
        (("the parameters: 'scale' is (5,) in torch.float64", "float32"), DILOCO, Net().float() if last else Net(), {}),
        (("the parameters: 'first.bias' is", "float64", "float32"), DILOCO, cast if last else Net(), {}),
        (("options: 'every' is 4", "2"), BELAY, Net(), {"every": 2 if last else 4}),
        (("options: 'dtype' is None", "float32"), BELAY, Net(), {"dtype": torch.float32 if last else None}),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with refused(ValueError, "disagree about", *words):
            tb.Belay(net, optimizer, method, workers=dist.group.WORLD, **options)
        assert not optimizer._optimizer_step_pre_hooks
    net = Net()
    some, rest = [net.scale], [p for p in net.parameters() if p is not net.scale]
    optimizers = [torch.optim.SGD(ps, lr=0.1) for ps in ([some, rest] if last else [[*some, *rest]])]
    with refused(ValueError, "disagree about the parameters", "of group 0 in optimizer 0", "of group 0 in optimizer 1"):
        tb.Belay(net, optimizers, DILOCO, workers=dist.group.WORLD)
    groups = [{"params": some}, {"params": rest}] if last else [{"params": [*some, *rest]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with refused(ValueError, "disagree about the parameters", "of group 0 in optimizer 0", "of group 1 in optimizer 0"):
        tb.Belay(net, optimizer, DILOCO, workers=dist.group.WORLD)
    assert not any(each._optimizer_step_pre_hooks for each in (*optimizers, optimizer))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with refused(ValueError, "dtype=torch.int8 cannot hold" if last else "could not go on"):
        tb.Belay(net, optimizer, DILOCO, workers=dist.group.WORLD, dtype=torch.int8 if last else None)
    with refused(TypeError if last else ValueError, "not a torch.optim.Optimizer"):
        tb.Belay(net, "Adam" if last else optimizer, DILOCO, workers=dist.group.WORLD)
    assert not optimizer._optimizer_step_pre_hooks
    Attached(DILOCO).train(range(3))  # and afterwards they go on together


@on(2)
def what_does_not_go_with_workers_is_refused_on_every_one(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("none", "workers"))
    for words, method, options in (
        (("easgd(alpha=0.4", "2 workers has a + N·b = 1.2", "use α < 1/(N + 1) = 0.3333"), tb.methods.easgd(0.4), {}),
        (("says nothing of several workers", "methods.diloco"), tb.methods.centred(0.5, 0.1), {}),
        (("velocities", "leave c1 and c2 out"), tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0), {}),
        (("would let every worker go its own way", "m1"), tb.Spring.ema(decay=0.9), {}),
        (("says nothing of several workers",), tb.methods.swa(), {}),
        (("start=3 does not go with workers=",), DILOCO, {"start": 3}),
        (("buffers='average' does not go with workers=",), DILOCO, {"buffers": "average"}),
        (("impl='reference' does not go with workers=",), DILOCO, {"impl": "reference"}),
        (("device='cpu' does not go with workers=",), DILOCO, {"device": "cpu"}),
        (("spectators=['ema'] do not go with workers=",), DILOCO, {"spectators": {"ema": tb.Spring.ema(decay=0.9)}}),
        (("save_with_optimizer=True does not go with workers=",), DILOCO, {"save_with_optimizer": True}),
        (("every=2 does not go with easgd", "easgd(..., every=2)"), EVERY_STEP, {"every": 2}),
        (("DeviceMesh of 2 dimensions", "mesh["), DILOCO, {"workers": mesh}),
        (("workers=7 is neither a process group nor a DeviceMesh",), DILOCO, {"workers": 7}),
    ):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises((ValueError, TypeError)) as caught:
            tb.Belay(net, optimizer, method, **{"workers": dist.group.WORLD} | options)
        assert all(word in str(caught.value) for word in words), caught.value
        assert not optimizer._optimizer_step_pre_hooks
    assert Attached(DILOCO, workers=mesh["workers"]).train(range(3)).belay.step == 3
    mine = Attached(tb.methods.easgd(rho=5.0))  # α = 0.1
    mine.optimizer.param_groups[0]["lr"] = 0.08
    before = mine.named()
    with refused(ValueError, "2 workers has a + N·b = 1.2"):
        mine.step(0)
    assert same(mine.named(), before)
    with refused(RuntimeError, "change() of an average that several workers share"):
        mine.belay.change(EVERY_STEP)


@on(2)
def ranks_that_exchange_gradients_or_share_a_model_are_not_workers(folder: Path) -> None:
    ddp = DistributedDataParallel(Net())
    with refused(ValueError, "DistributedDataParallel together with rank", "exchange gradients"):
        tb.Belay(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), DILOCO, workers=dist.group.WORLD)
    net = fully_shard(Net())
    with refused(ValueError, "is sharded over rank", "mesh['workers']"):
        tb.Belay(net, torch.optim.SGD(net.parameters(), lr=0.1), DILOCO, workers=dist.group.WORLD)
    mine, _ = (dist.new_group([rank]) for rank in range(2))
    outside = dist.new_group([1])
    if dist.get_rank() == 0:
        with refused(ValueError, "workers is a group that this process, rank 0, is not part of"):
            tb.Belay(Net(), None, DILOCO, workers=outside)
    del mine


@on(4)
def a_worker_may_be_several_ranks(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shard"))
    worker = mesh.get_coordinate()[0]

    def train(net: nn.Module, steps: int, **options: Any) -> tuple[nn.Module, tb.Belay]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        belay = tb.Belay(net, optimizer, DILOCO, **options)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net, rows(step, worker)).backward()  # all ranks of a worker have the same rows
            optimizer.step()
        return net, belay

    plain = Net()
    plain.norm.eval()
    ours = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]  # one rank of each worker
    net, belay = train(plain, 8, workers=ours)
    for wrap in (
        lambda n: fully_shard(n, mesh=mesh["shard"]),
        lambda n: DistributedDataParallel(n, process_group=mesh["shard"].get_group()),
    ):
        inner = Net()
        inner.norm.eval()
        spread, other = train(wrap(inner), 8, workers=mesh["workers"])
        agree({k: whole(v) for k, v in other.average_state_dict().items()}, belay.average_state_dict(), 1e-12)
        found = {name.removeprefix("module."): whole(p) for name, p in spread.named_parameters()}
        agree(found, dict(net.named_parameters()), 1e-12)


@on(3)
def workers_that_begin_apart_are_warned_and_get_the_average_of_the_first(folder: Path) -> None:
    first = dist.get_rank() == 0
    mine = Attached(EVERY_STEP, net=Net(seed=dist.get_rank()))
    assert same(mine.average(), dict(Net(seed=0).named_parameters()))
    if first:
        mine.step(0)
    else:
        with pytest.warns(tb.BelayWarning, match="began with other weights than the first one .*'scale' differs"):
            mine.step(0)
    mine.train(range(1, 3))
    assert_same_average(mine)
    mine.belay.reset()
    weights = [mine.named()]
    dist.broadcast_object_list(weights, src=0)
    assert same(mine.average(), weights[0])
    resumed = Attached(EVERY_STEP, net=Net(seed=dist.get_rank()))
    resumed.belay.load_state_dict(mine.belay.state_dict())
    resumed.step(0)  # silent: workers may be apart in a state


@on(2)
def a_late_parameter_begins_at_the_same_average_on_every_worker(folder: Path) -> None:
    mine = Attached(DILOCO).train(range(2))
    mine.net.late = nn.Parameter(torch.full((3,), float(dist.get_rank()), dtype=torch.float64))
    mine.optimizer.add_param_group({"params": [mine.net.late]})
    with pytest.warns(tb.BelayWarning) as caught:
        mine.step(2)
    said = [str(w.message) for w in caught]
    assert any("1 parameter(s) were added" in text for text in said)
    assert any("'late' differs" in text for text in said) is (dist.get_rank() > 0)
    mine.train(range(3, 6))
    assert_same_average(mine)
    assert mine.belay.average_state_dict()["late"].shape == (3,)


@on(2, 3)
def a_worker_that_is_not_finite_keeps_no_other_from_going_on(folder: Path) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for on_nonfinite in ("skip", "raise"):
        mine = Attached(DILOCO, on_nonfinite=on_nonfinite).train(range(2))
        if last:
            with torch.no_grad():
                mine.net.scale[0] = float("nan")
        before = mine.average()
        if on_nonfinite == "raise":
            with refused(FloatingPointError, "not finite at the sync of step 3"):
                mine.step(2)
        else:
            mine.step(2)
        assert same(mine.average(), before)
        assert mine.belay.step == 2  # the sync has not taken place
        if last:
            mine.belay.copy_to_model()
            mine.optimizer.state.clear()
        mine.step(3)
        assert mine.belay.step == 3
        assert all(bool(t.isfinite().all()) for t in (*mine.average().values(), *mine.named().values()))
        assert_same_average(mine)


@on(2, 3)
def a_second_belay_that_raises_on_one_worker_does_so_before_the_exchange(folder: Path) -> None:
    mine = Attached(EVERY_STEP)
    own = tb.Belay(mine.net, mine.optimizer, tb.Spring.ema(decay=0.9), on_nonfinite="raise")
    mine.train(range(2))
    if dist.get_rank() == 0:
        before, weights = mine.average(), mine.weights()
        state = copy.deepcopy(mine.optimizer.state_dict())
        mine.optimizer.zero_grad()
        mine.net.scale.grad = torch.full_like(mine.net.scale, float("nan"))
        with refused(FloatingPointError, "'scale' is not finite after the optimizer's step 3"):
            mine.optimizer.step()
        assert same(mine.average(), before)
        assert (mine.belay.step, own.step) == (2, 2)
        mine.write(weights)
        mine.optimizer.load_state_dict(state)
    mine.train(range(2, 5))  # the other workers have waited
    assert (mine.belay.step, own.step) == (5, 5)
    own.detach()
    agrees(mine, *simulate(elastic(0.1, 1), 5))


@on(4)
def all_ranks_of_all_workers_skip_or_raise_if_one_part_of_one_worker_is_not_finite(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shard"))
    for on_nonfinite, method in (("skip", EVERY_STEP), ("raise", EVERY_STEP), ("skip", DILOCO), ("raise", DILOCO)):
        net = Net()
        net.norm.eval()
        net.tiny = nn.Parameter(torch.ones(1, dtype=torch.float64))  # one rank of each worker has none of it
        fully_shard(net, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        belay = tb.Belay(net, optimizer, method, workers=mesh["workers"], on_nonfinite=on_nonfinite)

        def step() -> None:
            for p in net.parameters():  # noqa: B023
                p.grad = torch.ones_like(p)
            optimizer.step()  # noqa: B023

        def average() -> dict[str, Tensor]:
            return {name: whole(w).clone() for name, w in belay.average_state_dict().items()}  # noqa: B023

        for _ in range(2):
            step()
        before = average()
        if dist.get_rank() == 0:
            with torch.no_grad():
                net.first.weight.to_local().fill_(float("nan"))
        if on_nonfinite == "raise":
            with refused(FloatingPointError, "not finite at the sync of step 3"):
                step()
        else:
            step()
        assert belay.step == 2
        assert same(average(), before)
        belay.copy_to_model()
        step()
        assert belay.step == 3
        assert all(bool(whole(t).isfinite().all()) for t in (*average().values(), *net.parameters()))


@on(2)
def weights_of_any_dtype_and_layout_meet_at_the_average(folder: Path) -> None:
    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Module()
        net.conv = nn.Conv2d(3, 4, 3).to(
            memory_format=torch.channels_last if dist.get_rank() else torch.contiguous_format
        )
        net.empty, net.frozen = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.ones(2), requires_grad=False)
        net.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        net.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        net.narrow = nn.Parameter(torch.randn(5).to(dtype))
        net.tied = net.narrow
        return net

    for dtype in (torch.bfloat16, torch.float16):
        for method in (tb.methods.diloco(every=2), EVERY_STEP):
            net = made(dtype)
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5)
            with pytest.warns(tb.BelayWarning, match="16 bits wide"):
                belay = tb.Belay(net, optimizer, method, workers=dist.group.WORLD)
            w1, w2 = [net.conv.weight.detach().double()] * 2, net.conv.weight.detach().double()
            for step in range(2):
                for p in net.parameters():
                    p.grad = torch.ones_like(p) * (dist.get_rank() + 1) if p.requires_grad else None
                optimizer.step()
                updates = [-0.5, -1.0]
                if method is EVERY_STEP:
                    w1, w2 = (
                        [w + u - 0.1 * (w - w2) for w, u in zip(w1, updates, strict=True)],
                        w2 + 0.1 * sum(w - w2 for w in w1),
                    )
                elif step == 0:
                    w1 = [w + u for w, u in zip(w1, updates, strict=True)]
                else:
                    w2 = w2 + 0.7 * 1.9 * (sum(w + u for w, u in zip(w1, updates, strict=True)) / 2 - w2)
                    w1 = [w2, w2]
            found = belay.average_state_dict()
            torch.testing.assert_close(found["conv.weight"].double(), w2, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(net.conv.weight.double(), w1[dist.get_rank()], rtol=1e-5, atol=1e-6)
            theirs = [copy.deepcopy(belay.state_dict()["averages"]["average"]["weights"])]
            dist.broadcast_object_list(theirs, src=0)
            assert same(theirs[0], belay.state_dict()["averages"]["average"]["weights"])
            if method is not EVERY_STEP:
                assert torch.equal(net.narrow, found["narrow"])
                assert torch.equal(net.wave, found["wave"])


@on(2, 3)
def a_worker_that_casts_some_weights_alone_adds_each_to_its_own_average(folder: Path) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for method, share in ((tb.methods.lookahead(k=1, alpha=1.0), 1.0), (EVERY_STEP, 0.1 * n)):
        for dtype in (torch.bfloat16, torch.float64):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            belay = tb.Belay(net, optimizer, method, workers=dist.group.WORLD)
            for i in range(2):
                before = copy.deepcopy(belay.state_dict()["averages"]["average"]["weights"])
                with torch.no_grad():
                    for j, p in enumerate(net.parameters()):
                        p.fill_(8.0 * (j + 1) + rank + i)
                if rank == 1:
                    net[0].bias.data = net[0].bias.data.to(dtype)
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
                found = belay.state_dict()["averages"]["average"]["weights"]
                for j, (name, value) in enumerate(found.items()):
                    mean = 8.0 * (j + 1) + (n - 1) / 2 + i
                    right = before[name].double() + share * (mean - before[name].double())
                    torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)
                theirs = [copy.deepcopy(found)]
                dist.broadcast_object_list(theirs, src=0)
                assert same(theirs[0], found)


@on(2)
def a_failed_exchange_moves_nothing_and_the_step_may_be_taken_again(folder: Path) -> None:
    mine, other = Attached(EVERY_STEP).train(range(2)), Attached(EVERY_STEP).train(range(2))
    right = dist.all_reduce

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("connection closed by peer")

    before, average = mine.named(), mine.average()
    state = copy.deepcopy(mine.optimizer.state_dict())
    dist.all_reduce = failing
    try:
        with refused(RuntimeError, "connection closed by peer"):
            mine.step(2)
    finally:
        dist.all_reduce = right
    assert same(mine.average(), average)
    mine.write(list(before.values()))  # the optimizer had stepped
    mine.optimizer.load_state_dict(state)
    assert same(mine.train(range(2, 5)).named(), other.train(range(2, 5)).named())
    assert same(mine.average(), other.average())


@on(2)
def workers_have_several_optimizers_or_none_and_an_average_of_their_own_beside(folder: Path) -> None:
    joint = Worker(dist.get_rank())
    halves = list(joint.net.parameters())
    optimizers = [torch.optim.AdamW(some, lr=0.02) for some in (halves[:2], halves[2:])]
    belay = tb.Belay(joint.net, optimizers, DILOCO, workers=dist.group.WORLD)
    own = tb.Belay(joint.net, optimizers, tb.Spring.ema(decay=0.5))
    hand = Worker(dist.get_rank())
    by_hand = tb.Belay(hand.net, None, DILOCO, workers=dist.group.WORLD)
    mine = Attached(DILOCO)
    for step in range(7):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(joint.net, rows(step, joint.worker)).backward()
        for optimizer in optimizers:
            optimizer.step()
        by_hand.before_step()
        hand.step(step)
        by_hand.after_step()
        mine.step(step)
    for net, average in ((joint.net, belay), (hand.net, by_hand)):
        assert same(dict(net.named_parameters()), dict(mine.net.named_parameters()))
        assert same(average.average_state_dict(), mine.belay.average_state_dict())
    with pytest.raises(AssertionError):
        assert_same_average_of(own)


def assert_same_average_of(belay: tb.Belay) -> None:
    theirs = [copy.deepcopy(belay.average_state_dict())]
    dist.broadcast_object_list(theirs, src=0)
    found = same(theirs[0], belay.average_state_dict())
    everybody: list[bool] = [True] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    assert all(everybody)


@on(2, 3)
def numbers_to_log_are_those_of_the_worker_and_the_effective_rate_that_of_all(folder: Path) -> None:
    n = dist.get_world_size()
    for method, scale in ((EVERY_STEP, n / (n + 1)), (DILOCO, 0.6 / 0.2), (BELAY, 0.95 * n / (n + 2))):
        stats = Attached(method).train(range(2)).belay.stats()
        assert stats["effective_lr"] == pytest.approx(0.02 * scale), method
        assert stats["tension"] > 0


@on(1, 2, 3)
def the_decay_is_what_the_average_keeps_when_all_workers_pull_it(folder: Path) -> None:
    for method, options in (
        (EVERY_STEP, {}),
        (BELAY, {}),
        (BELAY, {"every": 4}),
        (tb.methods.easgd(0.1, every=3), {}),
        (tb.methods.lookahead(k=3, alpha=0.25), {}),
    ):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with torch.no_grad():
            net.scale.zero_()
        belay = tb.Belay(net, optimizer, method, workers=dist.group.WORLD, **options)
        with torch.no_grad():
            net.scale.fill_(1.0)
        for _ in range(options.get("every", getattr(method, "period", 1))):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        kept = 1 - belay.state_dict()["averages"]["average"]["weights"]["scale"][0].item()
        assert 0.1 < kept < 0.99
        assert belay.decay == pytest.approx(kept, rel=1e-12), (method, options)


@on(2)
def replicas_that_share_an_average_are_no_workers(folder: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with refused(ValueError, "shard= and workers= exclude each other", "leave one of them out"):
        tb.Belay(net, optimizer, DILOCO, shard=dist.group.WORLD, workers=dist.group.WORLD)
    assert not optimizer._optimizer_step_pre_hooks

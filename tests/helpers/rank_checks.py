"""What must hold on several ranks. Every function runs on all ranks of the worlds that it names.

Weights are float64. A sharded run adds its gradients up in another order than one process does, so that the two agree
to rounding errors alone: TOLERANCE. The coupling itself is the same arithmetic on each number, and is compared bit for
bit with ordinary tensors that go the same way.
"""

import copy
import io
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchbelay as tb
from helpers import seams
from torchbelay import testing

TOLERANCE = 1e-13  # some ulps of numbers around 1, in float64
ROWS = 12  # of a batch: a multiple of every number of ranks

BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.Spring.ema(decay=0.9)
LAGGED = tb.Spring(k=0.2, m1=float("inf"), m2=1.0)
SWINGING = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
OF = {
    "scale": BELAY,
    "first.weight": SWINGING,
    "first.bias": tb.methods.heavy_ball(0.9),
    "second.weight": EMA,
    "second.bias": tb.methods.lookahead(k=3),
}
SPECTATORS = {"ema": EMA, "lagged": LAGGED, "swa": tb.methods.swa()}


def each_its_own(name: str, parameter: Tensor) -> tb.Method:
    """A method for each parameter: one run shows them all."""
    return OF[name]


Check = Callable[[Path], None]
_CHECKS: list[tuple[tuple[int, ...], Check]] = []


def on(*worlds: int) -> Callable[[Check], Check]:
    """Register a check for these numbers of ranks."""

    def register(check: Check) -> Check:
        _CHECKS.append((worlds, check))
        return check

    return register


def for_ranks(world: int) -> dict[str, Check]:
    """The checks for this number of ranks, by name, in order."""
    return {check.__name__: check for worlds, check in _CHECKS if world in worlds}


class Net(nn.Module):
    """A root with parameters of its own, of sizes that no number of ranks divides, some of them smaller than it."""

    def __init__(self, *, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 5, bias=False) if tied else nn.Linear(5, 1)
        if tied:
            self.third = nn.Linear(5, 5, bias=False)
            self.third.weight = self.second.weight
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.norm(torch.tanh(self.first(x))) * self.scale)
        return self.third(h).sum(1, keepdim=True) if hasattr(self, "third") else h


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def mine(x: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


class Run:
    """A model in training; `spread` says what happens to it before the optimizer is made."""

    def __init__(
        self,
        method: Any,
        spread: Callable[[Net], nn.Module] = lambda net: net,
        *,
        share: Callable[[Tensor], Tensor] = lambda x: x,
        seed: int = 0,
        tied: bool = False,
        adam: bool = True,
        before: Callable[["Run"], None] = lambda run: None,
        **options: Any,
    ) -> None:
        net = Net(seed=seed, tied=tied)
        net.norm.eval()  # statistics of a rank's own rows are not those of all
        self.share, self.model = share, spread(net)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=0.02)
        before(self)
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def train(self, steps: Any) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, self.share(batch(step))).backward()
            self.optimizer.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p) for name, p in seams.named_parameters(self.model).items()}

    def average(self, name: str = "average") -> dict[str, Tensor]:
        return {key: whole(value) for key, value in self.belay.average_state_dict(name).items()}


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def here(t: Tensor) -> Tensor:
    return (t._local_tensor if isinstance(t, DTensor) else t).detach()


def sharded(net: Net) -> nn.Module:
    """FSDP2: one child on its own, the rest with the root."""
    fully_shard(net.first)
    return fully_shard(net)


def fsdp(method: Any, **options: Any) -> Run:
    return Run(method, sharded, share=mine, **options)


def agree(mine: dict[str, Tensor], one: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert list(mine) == list(one)
    for name in mine:
        torch.testing.assert_close(
            mine[name], one[name], rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def same(x: Any, y: Any) -> bool:
    """Bit-identical, as far as it is here."""
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, Tensor):
        return x.dtype == y.dtype and torch.equal(here(x), here(y))
    return x == y


def everything(run: Run) -> Any:
    return copy.deepcopy({"model": run.model.state_dict(), "belay": run.belay.state_dict()})


def refused(kind: type[BaseException], *words: str) -> Any:
    return pytest.raises(kind, match=".*".join(map(re.escape, words)))


# FSDP2 --------------------------------------------------------------------------------------------------------------


@on(2, 3, 4)
def averages_are_sharded_like_their_parameters(folder: Path) -> None:
    run = fsdp(SWINGING, spectators={"short": EMA})
    state = run.belay.state_dict()["averages"]
    parameters = dict(run.model.named_parameters())
    for average, kinds in (("average", ("weights", "velocities1", "velocities2")), ("short", ("weights",))):
        for kind in kinds:
            assert list(state[average][kind]) == list(parameters)
            for name, t in state[average][kind].items():
                p = parameters[name]
                assert (t.device_mesh, t.placements, t.shape) == (p.device_mesh, p.placements, p.shape)
                assert here(t).shape == here(p).shape
                assert here(t).untyped_storage().data_ptr() != here(p).untyped_storage().data_ptr() or not p.numel()
    sizes = torch.tensor([here(parameters["second.weight"]).numel(), here(parameters["scale"]).numel()])
    everybody = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, sizes)
    assert {0, 5} == {int(size[0]) for size in everybody}  # some ranks have nothing of it
    assert len({int(size[1]) for size in everybody}) > 1  # and some less than others


@on(2, 3, 4)
def sharded_training_is_that_of_one_process(folder: Path) -> None:
    run, one = (make(each_its_own, spectators=SPECTATORS).train(range(6)) for make in (fsdp, Run))
    agree(run.weights(), one.weights())
    for name in ("average", *SPECTATORS):
        agree(run.average(name), one.average(name))
    said, expected = run.belay.stats(), one.belay.stats()
    for key in ("tension", "tension_ratio"):
        assert abs(said[key] - expected[key]) <= 1e-12 * expected[key], (key, said, expected)


@on(2, 3, 4)
def the_coupling_of_shards_is_bit_for_bit_that_of_ordinary_tensors(folder: Path) -> None:
    """Replayed: ordinary parameters that are given, around each step, what the optimizer made of the shards."""
    seen: list[list[Tensor]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append([here(p).clone() for p in optimizer.param_groups[0]["params"]])

    def watch(run: Run) -> None:  # in line before Belay's own hooks
        run.optimizer.register_step_pre_hook(look)
        run.optimizer.register_step_post_hook(look)

    run = fsdp(each_its_own, spectators=SPECTATORS, before=watch).train(range(6))
    names = list(seams.named_parameters(run.model))
    plain = nn.ParameterList([nn.Parameter(t.clone()) for t in seen[0]])
    by_hand = tb.Belay(plain, None, lambda name, p: OF[names[int(name)]], spectators=SPECTATORS)
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert all(torch.equal(p, t) for p, t in zip(plain, before, strict=True))
        by_hand.before_step(lr=0.02)
        with torch.no_grad():
            for p, t in zip(plain, after, strict=True):
                p.copy_(t)
        by_hand.after_step()
    for average in ("average", *SPECTATORS):
        weights, replayed = (b.state_dict()["averages"][average]["weights"].values() for b in (run.belay, by_hand))
        assert all(torch.equal(here(x), y) for x, y in zip(weights, replayed, strict=True))
    assert all(torch.equal(here(x), y) for x, y in zip(run.model.parameters(), plain, strict=True))


@on(2, 3, 4)
def a_step_talks_to_nobody(folder: Path) -> None:
    run = fsdp(each_its_own, spectators=SPECTATORS)
    for step in range(3):
        run.optimizer.zero_grad()
        loss_of(run.model, mine(batch(step))).backward()
        with CommDebugMode() as talk:
            run.optimizer.step()
        assert talk.get_total_counts() == 0, talk.get_comm_counts()
    with CommDebugMode() as talk:
        with run.belay.averaged():
            pass
        run.belay.state_dict()
        run.belay.average_state_dict()
        run.belay.reset()
    assert talk.get_total_counts() == 0, talk.get_comm_counts()
    with CommDebugMode() as talk:  # and this is how it looks when somebody does
        run.belay.average_state_dict(full=True)
    assert talk.get_total_counts() > 0


@on(2, 3, 4)
def averaged_is_seen_by_a_root_that_keeps_its_parameters_gathered(folder: Path) -> None:
    x = batch(99)
    run, one = fsdp(BELAY).train(range(3)), Run(BELAY).train(range(3))
    for step in range(3, 5):
        outputs = []
        for each in (run, one):
            with torch.no_grad():
                plain = each.model(x)
                with each.belay.averaged():
                    inside = each.model(x)
                again = each.model(x)
            assert torch.equal(plain, again)
            assert (plain - inside).abs().max() > 1e-3
            outputs.append(torch.stack([plain, inside]))
            each.train([step])
        torch.testing.assert_close(*outputs, rtol=0, atol=TOLERANCE)
        agree(run.weights(), one.weights())
        agree(run.average(), one.average())
    with torch.no_grad():
        with run.belay.averaged():
            inside = run.model(x)
        run.model(x)  # gathered again
        run.belay.copy_to_model()
        assert torch.equal(run.model(x), inside)


@on(2, 4)
def averaged_is_seen_whatever_is_kept_gathered_and_in_whatever_precision(folder: Path) -> None:
    """Modules that keep everything after a forward, or a part of it, and compute in bfloat16."""
    keep: bool | int = False if dist.get_world_size() == 2 else 2
    x = batch(99).float()
    narrow, wide = (MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=d) for d in (None, torch.float32))

    def spread(net: Net) -> nn.Module:
        net.float()
        fully_shard(net.first, reshard_after_forward=keep, mp_policy=narrow)
        return fully_shard(net, reshard_after_forward=keep, mp_policy=wide)

    run = Run(EMA, spread, share=lambda x: mine(x).float()).train(range(3))
    fresh = Run(EMA, spread, seed=5)
    fresh.model.load_state_dict(run.belay.average_state_dict())
    with torch.no_grad():
        plain = run.model(x)
        with run.belay.averaged():
            inside = run.model(x)
        assert torch.equal(inside, fresh.model(x))
        assert not torch.equal(inside, plain)
        assert torch.equal(run.model(x), plain)


@on(2, 3)
def a_sharded_model_that_is_converted_keeps_its_average(folder: Path) -> None:
    """FSDP2 gives its parameters other memory before the first forward; the averages must not go on with the old."""
    run, one = (make(BELAY, adam=False, dtype=torch.float64) for make in (fsdp, Run))
    old = here(run.model.scale)
    for each in (run, one):
        each.model.float()
        each.share = lambda x, share=each.share: share(x).float()
        each.train(range(4))
    assert here(run.model.scale).data_ptr() != old.data_ptr() or not old.numel()
    agree(run.weights(), one.weights(), 1e-6)  # float32 by now
    agree(run.average(), one.average(), 1e-6)
    assert run.belay.stats()["tension"] > 0.01


@on(2, 3)
def an_export_between_forward_and_backward_disturbs_nothing(folder: Path) -> None:
    runs = [fsdp(EMA).train(range(2)) for _ in range(2)]
    for run in runs:
        run.optimizer.zero_grad()
        loss = loss_of(run.model, mine(batch(2)))
        if run is runs[0]:
            run.belay.average_state_dict()
            run.belay.state_dict()
        loss.backward()
        run.optimizer.step()
    assert same(everything(runs[0]), everything(runs[1]))


@on(2)
def without_resharding_the_average_would_be_trained(folder: Path) -> None:
    """What the check above would see: the root still holds what it gathered of the average."""
    run, one = fsdp(EMA).train(range(3)), Run(EMA).train(range(3))
    with pytest.MonkeyPatch.context() as patch:
        seams.drop_resharding(patch)
        with torch.no_grad(), run.belay.averaged():
            run.model(batch(99))
    run.train([3])
    one.train([3])
    with refused(AssertionError):
        agree(run.weights(), one.weights())


@on(2, 3, 4)
def names_are_those_of_the_shards_whatever_is_gathered(folder: Path) -> None:
    """Construction, adoption of late parameters and steps by hand, right after a forward without a backward."""
    x = batch(0)
    net = sharded(Net())
    with torch.no_grad():
        net(x)
    assert not isinstance(net.scale, DTensor)  # the root is gathered indeed
    by_hand = tb.Belay(net, None, EMA)
    start = whole(by_hand.average_state_dict()["scale"])
    for _ in range(2):
        with torch.no_grad():
            net(x)
        by_hand.before_step()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1.0)
        by_hand.after_step()
    w1, w2 = start + 2, 0.9 * (0.9 * start + 0.1 * (start + 1)) + 0.1 * (start + 2)
    torch.testing.assert_close(whole(net.scale), w1, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(whole(by_hand.average_state_dict()["scale"]), w2, rtol=0, atol=TOLERANCE)


@on(2, 3, 4)
def a_full_export_is_on_the_first_rank_and_gathers_one_tensor_at_a_time(folder: Path) -> None:
    run, one = (make(EMA, tied=True).train(range(3)) for make in (fsdp, Run))
    whole_ones: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    full_tensor = DTensor.full_tensor

    def counted(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in whole_ones))
        found = full_tensor(self, *args, **kwargs)
        whole_ones.append(weakref.ref(found))
        return found

    DTensor.full_tensor = counted
    try:
        exported = run.belay.average_state_dict(full=True)
    finally:
        DTensor.full_tensor = full_tensor
    assert alive == [0] * len(list(run.model.parameters()))  # tied weights once
    if dist.get_rank():
        assert exported == {}
    else:
        assert all(type(t) is Tensor and t.device.type == "cpu" for t in exported.values())
        agree(exported, one.average())
        assert exported["third.weight"] is exported["second.weight"]
        Net(tied=True).load_state_dict(exported, strict=True)
    with run.belay.averaged():
        inside = run.belay.average_state_dict(full=True)
    assert same(inside, exported)


@on(2, 3, 4)
def every_rank_saves_and_the_first_one_writes(folder: Path) -> None:
    run, one = (make(EMA, tied=True).train(range(3)) for make in (fsdp, Run))
    path = folder / f"average{dist.get_world_size()}.safetensors"
    run.belay.save_average(path)
    dist.barrier()
    found = load_file(path)
    agree({name: found.pop(name) for name in one.average()}, one.average())
    assert not found
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert (about["method"], about["step"], about["torchbelay"]) == ("Spring.ema(decay=0.9)", "3", tb.__version__)
    assert not list(folder.glob("*.tmp"))


@on(2, 3, 4)
def a_sharded_run_resumes_through_torch_save(folder: Path) -> None:
    run = fsdp(SWINGING, adam=False, spectators={"short": tb.methods.ema(0.9, warmup="ratio")}).train(range(3))
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.belay.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = fsdp(SWINGING, adam=False, seed=5, spectators={"short": tb.methods.ema(0.9, warmup="ratio")})
    again.model.load_state_dict(weights)
    again.belay.load_state_dict(state)
    assert same(everything(again.train(range(3, 6))), everything(run.train(range(3, 6))))


@on(2, 3, 4)
def a_state_of_one_process_fits_a_sharded_model_and_not_the_other_way(folder: Path) -> None:
    one, run = Run(SWINGING, adam=False).train(range(3)), fsdp(SWINGING, adam=False).train(range(3))
    other = fsdp(SWINGING, adam=False, seed=5)
    with CommDebugMode() as talk:
        other.belay.load_state_dict(one.belay.state_dict())
    assert talk.get_total_counts() == 0
    agree(other.average(), one.average(), 0)
    before = everything(one)
    with refused(ValueError, "spread over ranks", "torch.distributed.checkpoint"):
        one.belay.load_state_dict(run.belay.state_dict())
    assert same(everything(one), before)


@on(2, 3, 4)
def averages_in_host_memory_are_sharded_too(folder: Path) -> None:
    run, other = fsdp(EMA, device="cpu").train(range(4)), fsdp(EMA).train(range(4))
    assert same(run.belay.state_dict(), other.belay.state_dict())
    with run.belay.averaged(), torch.no_grad():
        run.model(batch(99))
    assert same(everything(run.train([4])), everything(other.train([4])))


# Faults ---------------------------------------------------------------------------------------------------------------


@on(2, 3, 4)
def a_nan_on_one_rank_is_one_for_all(folder: Path) -> None:
    """Only one rank holds a shard of second.weight, and only that one can see it."""
    for method in (EMA, LAGGED, BELAY):
        run, one = (make(method, adam=False, on_nonfinite="skip").train(range(2)) for make in (fsdp, Run))
        for each in (run, one):
            each.optimizer.zero_grad()
            loss_of(each.model, each.share(batch(2))).backward()
            each.model.second.weight.grad.mul_(float("nan"))
        before = copy.deepcopy(run.belay.state_dict()["averages"])
        run.optimizer.step()
        one.optimizer.step()
        assert same(run.belay.state_dict()["averages"], before)
        assert run.belay.step == 2
        agree(run.average(), one.average())
        raising = fsdp(method, adam=False, on_nonfinite="raise").train(range(2))
        loss_of(raising.model, mine(batch(2))).backward()
        raising.model.second.weight.grad.mul_(float("nan"))
        before = copy.deepcopy(raising.belay.state_dict())
        with refused(FloatingPointError, "'second.weight'", "step 3"):
            raising.optimizer.step()
        assert same(raising.belay.state_dict(), before)


@on(2, 3, 4)
def a_step_that_a_scaler_skips_is_skipped_by_all(folder: Path) -> None:
    for fused, waits in ((False, False), (True, False), (True, True)):  # whether it skips is asked, or on the device
        run = fsdp(BELAY, adam=False)
        run.belay.detach()
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, fused=fused)
        run.belay = tb.Belay(run.model, run.optimizer, BELAY, spectators={"lagged": LAGGED})
        scaler = torch.amp.GradScaler("cpu")
        for step in range(4):
            run.optimizer.zero_grad()
            scaler.scale(loss_of(run.model, mine(batch(step)))).backward()
            if step == 2:
                before = everything(run)
                run.model.second.weight.grad.fill_(float("inf"))
            with pytest.MonkeyPatch.context() as patch:
                seams.set_waiting(patch, waits)
                scaler.step(run.optimizer)
            scaler.update()
            if step == 2:
                assert same(everything(run), before)
        assert run.belay.step == 3


# Other ways to spread a model ---------------------------------------------------------------------------------------


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


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "swinging": {"method": SWINGING, "spectators": {"short": tb.methods.ema(0.9, warmup="ratio")}},
    "with a memory": {"method": tb.methods.heavy_ball(0.9), "buffers": "average"},
    "begun": {"method": BELAY, "start": 2},
    "not begun": {"method": SWINGING, "start": 5},
    "own buffers": {"method": EMA},
}


def prepared(how: str, make: Callable[..., Run], **more: Any) -> Run:
    return make(adam=False, **OPTIONS[how], **more)


def write_statistics(run: Run) -> None:
    """As update_bn does: statistics that are the average's own until the next step."""
    with run.belay.averaged():
        run.model.norm.running_mean.fill_(0.25)


@on(2)
def distributed_checkpoints_are_saved(folder: Path) -> None:
    for how in OPTIONS:
        run = prepared(how, fsdp).train(range(3))
        assert isinstance(run.belay, Stateful)
        if how == "own buffers":
            write_statistics(run)
        dcp.save({"model": run.model, "belay": run.belay}, checkpoint_id=folder / how)


@on(1, 2, 3, 4)
def distributed_checkpoints_are_loaded_on_any_number_of_ranks(folder: Path) -> None:
    make = Run if dist.get_world_size() == 1 else fsdp
    for how in OPTIONS:
        one = prepared(how, Run).train(range(3))
        if how == "own buffers":
            write_statistics(one)
        run = prepared(how, make, seed=5)
        dcp.load({"model": run.model, "belay": run.belay}, checkpoint_id=folder / how)
        assert run.belay.step == 3
        for steps in ((), range(3, 8)):
            one.train(steps)
            run.train(steps)
            agree(run.weights(), one.weights())
            for name in one.belay.state_dict()["averages"]:
                agree(run.average(name), one.average(name))
        ages, expected = (each.belay.state_dict()["averages"]["average"]["ages"] for each in (run, one))
        assert ages == expected


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another decay": ({"method": tb.Spring.ema(decay=0.5)}, "decay=0.5"),
    "another method": ({"method": BELAY}, "Spring(k=1"),
    "another dtype": ({"method": EMA, "dtype": torch.float32}, "float32"),
    "another start": ({"method": EMA, "start": 7}, "start=7"),
    "another model": ({"method": EMA, "tied": True}, ""),
    "another spectator": ({"method": EMA, "spectators": {"short": EMA}}, "short"),
}


@on(1, 3)
def a_distributed_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(folder: Path) -> None:
    make = Run if dist.get_world_size() == 1 else fsdp
    for options, word in WRONG.values():
        run = make(adam=False, seed=5, **options).train(range(2))
        before = everything(run)
        with refused(BaseException, word):  # torch's CheckpointException is no Exception
            dcp.load({"belay": run.belay}, checkpoint_id=folder / "own buffers")
        assert same(everything(run), before)


# The contract suite ---------------------------------------------------------------------------------------------------


@on(2, 3)
def the_contract_holds_for_sharded_models(folder: Path) -> None:
    def make() -> nn.Module:
        net = Net()
        net.norm.eval()
        return sharded(net)

    report = testing.check(
        make,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        batch=lambda step: mine(batch(step)),
        loss=loss_of,
        steps=3,
    )
    assert report.skipped == {}, report

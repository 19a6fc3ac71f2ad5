"""Parameters on two devices, on a machine that has one. A process of its own, because it adds a device to torch.

Tensors are fake: they have devices, shapes and dtypes, and no numbers. A mode on top refuses every operation that mixes
devices, other than copies and numbers from the host. The script prints what went wrong, if anything.
"""

import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torchbelay as tb

OTHER = "other"
METHODS: dict[str, Any] = {
    "ema": tb.Spring.ema(decay=0.9),
    "lagged": tb.Spring(k=0.2, m1=float("inf"), m2=1.0),
    "swinging, watching": tb.Spring(k=1.0, m1=float("inf"), m2=20.0, c2=10.0),
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "swinging": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
}


class OneDeviceEach(TorchDispatchMode):
    """Refuses operations on tensors of several devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # the only number that is asked for: whether all weights are finite
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        devices = {t.device for t in tensors if t.dim() or t.device.type != "cpu"}
        if len(devices) > 1 and "copy" not in str(func):
            raise AssertionError(f"{func} on {devices}")
        return func(*args, **kwargs or {})


def two_layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 1, device=OTHER)])


def attached(model: nn.Module, method: Any, **options: Any) -> tuple[torch.optim.Optimizer, tb.Belay]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return optimizer, tb.Belay(model, optimizer, method, spectators={"short": METHODS["ema"]}, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def homes(belay: tb.Belay) -> list[str]:
    return [w.device.type for w in belay.state_dict()["averages"]["average"]["weights"].values()]


def average_and_swap(how: str, device: str | None, guarded: str) -> None:
    model = two_layers()
    optimizer, belay = attached(model, METHODS[how], device=device, on_nonfinite=guarded, keep_initial=True)
    step(model, optimizer)
    step(model, optimizer)
    there = ["cpu", "cpu", OTHER, OTHER]
    assert homes(belay) == ([device] * 4 if device else there)
    with belay.averaged("short"):
        assert [p.device.type for p in model.parameters()] == there
    assert [t.device.type for t in belay.average_state_dict().values()] == ([device] * 4 if device else there)
    assert [t.device.type for t in belay.average_state_dict(full=True).values()] == ["cpu"] * 4
    for readout in (tb.readouts.blend(0.5), tb.readouts.bema()):
        with belay.averaged("short", readout=readout):
            assert [p.device.type for p in model.parameters()] == there
        read = belay.average_state_dict(readout=readout).values()
        assert [t.device.type for t in read] == ([device] * 4 if device else there)
    belay.load_state_dict(belay.state_dict())
    belay.copy_to_model()
    belay.reset()
    assert homes(belay) == ([device] * 4 if device else there)


def follow_a_model_that_moves() -> None:
    model = nn.Linear(3, 2)
    optimizer, following = attached(model, METHODS["swinging"], keep_initial=True)
    hosted = tb.Belay(model, optimizer, METHODS["swinging, watching"], device="cpu", keep_initial=True)
    elsewhere = tb.Belay(model, optimizer, METHODS["swinging, watching"], device=torch.device(OTHER), keep_initial=True)
    for now in (torch.device("cpu"), torch.device(OTHER, 0), torch.device("cpu")):
        for p in model.parameters():
            p.fake_device = now  # type: ignore[attr-defined]  # as model.to() would move it in place
        step(model, optimizer)
        for belay, expected in ((following, now.type), (hosted, "cpu"), (elsewhere, OTHER)):
            assert {t.device.type for t in belay.state_dict()["averages"]["average"]["initial"].values()} == {expected}
            read = belay.average_state_dict(readout=tb.readouts.bema())
            assert {t.device.type for t in read.values()} == {expected}
            for average in belay.state_dict()["averages"].values():
                kinds = [average[kind] for kind in ("weights", "velocities1", "velocities2")]
                assert {t.device.type for tensors in kinds for t in tensors.values()} == {expected}
        assert len(following.state_dict()["averages"]["average"]["velocities1"]) == 2


def with_statistics(device: str, dtype: torch.dtype) -> Any:
    model = nn.Linear(3, 2, device=device, dtype=dtype)
    model.register_buffer("running_mean", torch.zeros(3, device=device, dtype=dtype))
    model.register_buffer("batches", torch.zeros((), device=device, dtype=torch.int64))
    return model


def buffers_of(belay: tb.Belay) -> set[tuple[str, torch.dtype]]:
    found = [average["buffers"] for average in belay.state_dict()["averages"].values()]
    return {(t.device.type, t.dtype) for buffers in found for t in buffers.values()}


def averaged_buffers_follow_a_model_that_moves(dtype: torch.dtype) -> None:
    model = with_statistics("cpu", dtype)
    optimizer, belay = attached(model, METHODS["ema"], buffers="average")
    for now in (torch.device("cpu"), torch.device(OTHER, 0), torch.device("cpu")):
        for t in (*model.parameters(), *model.buffers()):
            t.fake_device = now  # type: ignore[attr-defined]  # as model.to() would move it in place
        step(model, optimizer)
        assert buffers_of(belay) == {(now.type, torch.float32), (now.type, torch.int64)}
        model.running_mean = model.running_mean.clone()  # replaced, as some modules do
        with belay.averaged():
            assert {b.device.type for b in model.buffers()} == {now.type}
        belay.copy_to_model()


def a_state_read_into_host_memory_goes_to_the_models_device(buffers: str) -> None:
    model = with_statistics(OTHER, torch.float32)
    optimizer, belay = attached(model, METHODS["ema"], buffers=buffers)
    step(model, optimizer)
    with belay.averaged():
        model.running_mean.fill_(1.0)  # the average's own, until the next step
    state = tree_map_only(Tensor, lambda t: t.cpu(), belay.state_dict())
    belay.load_state_dict(state)
    assert {device for device, _ in buffers_of(belay)} == {OTHER}
    step(model, optimizer)
    assert {t.device.type for t in belay.average_state_dict().values()} == {OTHER}


def cases() -> dict[str, Callable[[], None]]:
    """All cases, by name."""
    found: dict[str, Callable[[], None]] = {"follow a model that moves": follow_a_model_that_moves}
    for dtype in (torch.float32, torch.bfloat16):
        found[f"averaged buffers that move, {dtype}"] = partial(averaged_buffers_follow_a_model_that_moves, dtype)
    for buffers in ("average", "copy"):
        found[f"a state in host memory, {buffers}"] = partial(
            a_state_read_into_host_memory_goes_to_the_models_device, buffers
        )
    for how, device, guarded in product(METHODS, (None, "cpu", OTHER), ("ignore", "skip")):
        if device is None or how not in ("belay", "swinging"):
            found[f"{how}, {device}, {guarded}"] = lambda how=how, device=device, guarded=guarded: average_and_swap(  # type: ignore[misc]
                how, device, guarded
            )
    return found


if __name__ == "__main__":
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(OTHER)
    for name, case in cases().items():
        try:
            with FakeTensorMode(), OneDeviceEach():
                case()
        except Exception:
            print(f"{name}:\n{traceback.format_exc()}")  # noqa: T201
    print(f"{len(cases())} cases")  # noqa: T201

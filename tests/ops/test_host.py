"""Averages in host memory (`device="cpu"`), and how much memory each way of averaging takes."""

import copy
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torchbelay as tb
from helpers import seams, two_devices
from helpers.operations import Memory
from helpers.problems import no_waiting
from helpers.root import ROOT
from helpers.small import BELAY, EMA, SWINGING, attached, batch, mlp, same, snapshot, train, values, with_batchnorm

INF = float("inf")
LAGGED = tb.Spring(k=0.2, m1=INF, m2=1.0)
WATCHING = {
    "ema": EMA,
    "lagged": LAGGED,
    "with velocities": tb.Spring(k=1.0, m1=INF, m2=20.0, c2=10.0),
    "swa": tb.methods.swa(),
    "warming up": tb.methods.ema(0.9, warmup="ratio"),
}
PULLING = {
    "belay": BELAY,
    "swinging": SWINGING,
    "lookahead": tb.methods.lookahead(k=7),
    "switch": tb.methods.switch_ema(0.9, every=1000),
}
every_method = pytest.mark.parametrize("how", WATCHING)


@every_method
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("scratch", [None, 7])
def test_it_is_the_same_average(how: str, impl: str, scratch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces or not, to one rounding: vectorised code rounds a tensor's last few numbers differently."""
    if scratch is not None:
        seams.limit_scratch(monkeypatch, scratch)
    runs = [
        attached(WATCHING[how], spectators={"short": LAGGED}, impl=impl, **device) for device in ({"device": "cpu"}, {})
    ]
    for model, optimizer, _ in runs:
        train(model, optimizer, 5)
    (model, _, belay), (other, _, other_belay) = runs
    assert same(values(model), values(other))
    for name in ("average", "short"):
        torch.testing.assert_close(
            belay.average_state_dict(name), other_belay.average_state_dict(name), rtol=0, atol=1e-7
        )
    if scratch is None:
        assert same(belay.state_dict(), other_belay.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swaps_exports_and_checkpoints_work_as_ever(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=mlp(dtype), device="cpu", spectators={"short": EMA})
    other, other_optimizer, other_belay = attached(EMA, model=mlp(dtype), spectators={"short": EMA})
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, each_optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged("short"):
        assert same(values(model), dict(other_belay.average_state_dict("short")))
        with pytest.raises(RuntimeError, match="step inside averaged"):
            optimizer.step()
    assert same(snapshot(model, belay), before)
    assert same(dict(belay.average_state_dict()), dict(other_belay.average_state_dict()))
    assert belay.stats() == other_belay.stats()
    again, again_optimizer, again_belay = attached(EMA, model=mlp(dtype, seed=1), spectators={"short": EMA})
    for target, state in ((again, model), (again_optimizer, optimizer), (again_belay, belay)):
        target.load_state_dict(copy.deepcopy(state.state_dict()))  # a checkpoint moves between host and device
    for each, each_optimizer in ((model, optimizer), (again, again_optimizer)):
        train(each, each_optimizer, 2, first=3)
    assert same(snapshot(model, belay), snapshot(again, again_belay))
    belay.copy_to_model()
    belay.reset()
    belay.detach()


@pytest.mark.usefixtures("skipping")
def test_buffers_skipped_steps_and_bad_weights_are_handled_alike() -> None:
    model, optimizer, belay = attached(
        LAGGED, model=with_batchnorm(), device="cpu", buffers="average", on_nonfinite="skip"
    )
    train(model, optimizer, 3)
    before = copy.deepcopy(belay.state_dict())
    model[0].weight.grad.fill_(float("nan"))
    optimizer.step()
    assert same(belay.state_dict(), before)
    scaled = torch.optim.AdamW(mlp().parameters(), fused=True)
    model = nn.ParameterList(scaled.param_groups[0]["params"])
    belay = tb.Belay(model, scaled, LAGGED, device="cpu")
    before = copy.deepcopy(belay.state_dict())
    for p in model:
        p.grad = torch.ones_like(p)
    scaled.found_inf, scaled.grad_scale = torch.ones(()), torch.ones(())  # as GradScaler does
    scaled.step()
    assert same(belay.state_dict(), before)


@pytest.mark.parametrize("how", PULLING)
def test_with_feedback_it_is_refused_with_the_reason(how: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"device='cpu' .* pulls the weights: .* second Belay on the same optimizer"):
        tb.Belay(model, optimizer, PULLING[how], device="cpu")
    assert not optimizer._optimizer_step_pre_hooks


def test_a_second_belay_can_watch_from_the_host() -> None:
    """What the refusal advises."""
    model, optimizer, belay = attached(BELAY)
    watching = tb.Belay(model, optimizer, EMA, device="cpu")
    other, other_optimizer, both = attached(BELAY, spectators={"ema": EMA})
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, each_optimizer, 4)
    assert same(dict(watching.average_state_dict()), dict(both.average_state_dict("ema")))
    assert same(dict(belay.average_state_dict()), dict(both.average_state_dict()))


def test_a_method_that_begins_to_pull_unannounced_is_stopped_before_anything_moves() -> None:
    class Late:
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            a = 0.0 if step < 3 else 0.5
            return tb.Coupling(a, 0.1, 1.0 - a, 0.1)

    model, optimizer, _ = attached(Late(), device="cpu")
    train(model, optimizer, 2)
    before = values(model)
    with pytest.raises(ValueError, match="the average on cpu 'average' may only watch"):
        optimizer.step()
    assert same(values(model), before)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", "device='meta' holds no numbers; use None"),
        (torch.device("meta"), "device='meta' holds no numbers; use None"),
        ("cuda:99", "device='cuda:99' cannot be used here"),
        ("nowhere", "device='nowhere' cannot be used here .* use None, .* or 'cpu'"),
        (0, "device=0 is not a device; give its name"),
        (True, "device=True is not a device"),
    ],
)
def test_a_device_that_cannot_hold_an_average_is_refused(device: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        attached(EMA, device=device)


def test_a_device_may_be_given_by_name_or_as_a_device() -> None:
    for device in ("cpu", torch.device("cpu")):
        model, optimizer, belay = attached(EMA, device=device)
        train(model, optimizer, 2)
        assert "foreach, kept in host memory" in repr(belay)


def test_triton_is_refused_and_repr_says_where_the_average_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:  # the refusal must not depend on the platform
        installed = ModuleType("triton")
        installed.__spec__ = ModuleSpec("triton", None)
        monkeypatch.setitem(sys.modules, "triton", installed)
    with pytest.raises(ValueError, match="impl='triton' does not go with device='cpu'"):
        attached(EMA, device="cpu", impl="triton")
    assert "foreach, kept in host memory" in repr(attached(EMA, device="cpu")[2])


@pytest.mark.slow  # a process of its own
def test_parameters_on_several_devices() -> None:
    """Weights and averages on two devices; only copies cross. Runs in a process that registers another device."""
    script = ROOT / "tests" / "helpers" / "two_devices.py"
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}  # the other device is the made-up one
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == f"{len(two_devices.cases())} cases\n", done.stdout + done.stderr


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has memory of its own")


@gpu
@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_of_weights_on_a_gpu_is_pinned_and_the_same(how: str, dtype: torch.dtype) -> None:
    runs, tensions = [], []
    for options in ({"device": "cpu"}, {"impl": "foreach"}):
        model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 1)).to("cuda", dtype)
        model.load_state_dict(runs[0][0] if runs else model.state_dict())
        start = values(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, WATCHING[how], **options)
        for step in range(5):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        said = belay.stats()["tension"]
        with belay.averaged():
            inside = values(model)
            assert belay.stats()["tension"] == pytest.approx(said, rel=1e-12)
        tensions.append(said)
        optimizer.step()
        runs.append((start, inside, values(model), {k: t.cpu() for k, t in belay.average_state_dict().items()}))
        weights = belay.state_dict()["averages"]["average"]["weights"].values()
        assert all(w.is_pinned() and w.device.type == "cpu" for w in weights) is ("device" in options)
    assert same(*(list(run[1:]) for run in runs))
    assert tensions[0] == pytest.approx(tensions[1], rel=1e-12)


@gpu
@every_method
def test_an_average_on_a_gpu_of_weights_in_host_memory_is_the_same(how: str) -> None:
    runs = [attached(WATCHING[how], spectators={"short": LAGGED}, **device) for device in ({"device": "cuda"}, {})]
    for model, optimizer, _ in runs:
        train(model, optimizer, 5)
    (model, optimizer, belay), (_, _, other) = runs
    weights = belay.state_dict()["averages"]["average"]["weights"].values()
    assert {w.device for w in weights} == {torch.device("cuda", torch.cuda.current_device())}
    assert "kept on cuda:" in repr(belay)
    own = values(model)
    for name in ("average", "short"):
        found = {key: w.cpu() for key, w in belay.average_state_dict(name).items()}
        torch.testing.assert_close(found, dict(other.average_state_dict(name)), rtol=0, atol=1e-7)
        with belay.averaged(name):
            assert same({key: w.cpu() for key, w in values(model).items()}, found)
    assert same(values(model), own)
    assert belay.stats()["tension"] == pytest.approx(other.stats()["tension"], rel=1e-6)
    state = copy.deepcopy(belay.state_dict())
    train(model, optimizer, 2)
    belay.load_state_dict(state)
    assert same(belay.state_dict(), state)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_average_on_another_gpu_is_the_same() -> None:
    runs = []
    for options in ({"device": "cuda:1"}, {"impl": "foreach"}):
        torch.manual_seed(0)
        model = nn.Linear(300, 500).to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA, **options)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        runs.append({key: w.cpu() for key, w in belay.average_state_dict().items()})
    assert same(*runs)


@gpu
def test_the_host_does_not_wait_for_the_copies() -> None:
    model = nn.Linear(300, 500).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, device="cpu", on_nonfinite="skip")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with no_waiting():
        optimizer.step()
        optimizer.step()
    assert belay.step == 3


# Memory: bytes counted, as docs/memory.md has them --------------------------------------------------------------------


N = 1000  # weights
SMALL = 60  # a scratch buffer, in elements; the weights come in pieces of 50

# in bytes per weight, what an average keeps, and the copy that a step needs; and the scratch buffers of a step
STEPS: dict[str, tuple[dict[str, Any], torch.dtype, int, int, int]] = {
    "ema, float32": ({"method": EMA}, torch.float32, 4, 0, 0),
    "ema, bfloat16": ({"method": EMA}, torch.bfloat16, 4, 0, 1),
    "ema, bfloat16 in bfloat16": ({"method": EMA, "dtype": torch.bfloat16}, torch.bfloat16, 2, 0, 0),
    "ema, 24 bits": ({"method": EMA, "bits": 24}, torch.float32, 3, 0, 1),
    "ema, bfloat16 in 24 bits": ({"method": EMA, "bits": 24}, torch.bfloat16, 3, 0, 1),
    "ema, lagged": ({"method": LAGGED}, torch.float32, 4, 4, 0),
    "ema, guarded": ({"method": EMA, "on_nonfinite": "raise"}, torch.float32, 4, 0, 0),
    "ema, lagged, guarded": ({"method": LAGGED, "on_nonfinite": "raise"}, torch.float32, 4, 4, 0),
    "ema, on the host": ({"method": EMA, "device": "cpu"}, torch.float32, 4, 0, 1),
    "belay": ({"method": BELAY}, torch.float32, 4, 4, 0),
    "belay, after": ({"method": tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after")}, torch.float32, 4, 0, 1),
    "velocities": ({"method": SWINGING}, torch.float32, 12, 4, 6),
    "a spectator more": ({"method": EMA, "spectators": {"short": EMA}}, torch.float32, 8, 0, 0),
    "initial weights": ({"method": EMA, "keep_initial": True}, torch.float32, 8, 0, 0),
    "initial weights, spectator": (
        {"method": EMA, "spectators": {"short": EMA}, "keep_initial": True},
        torch.float32,
        12,
        0,
        0,
    ),
}


@pytest.mark.parametrize("how", STEPS)
def test_the_memory_of_a_step(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the copy of the first step stays for the next one."""
    seams.limit_scratch(monkeypatch, SMALL)
    options, dtype, keeps, copies, scratches = STEPS[how]
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(N // 50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with Memory() as memory:
        belay = tb.Belay(model, optimizer, **options)
        assert memory.now() == keeps * N
    belay.detach()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    belay = tb.Belay(model, optimizer, **options)
    few = 400  # numbers that do not depend on the size of the model: norms, flags
    for new in (copies * N, 0):  # in the first step, and in any other
        with Memory() as memory:
            optimizer.step()
        assert new <= memory.now() <= new + few
        assert new + bool(scratches) * 50 * 2 <= memory.peak <= new + scratches * SMALL * 4 + few


@pytest.mark.parametrize(
    ("dtype", "copies", "options"),
    [
        (torch.float32, 0, {}),
        (torch.bfloat16, 1, {}),
        (torch.float32, 1, {"bits": 24}),
        (torch.bfloat16, 1, {"bits": 24}),
    ],
    ids=["traded", "weights kept aside", "24 bits", "24 bits, bfloat16"],
)
def test_the_memory_of_a_swap(
    dtype: torch.dtype, copies: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.limit_scratch(monkeypatch, SMALL)
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(N // 50)])
    belay = tb.Belay(model, None, EMA, **options)
    with Memory() as memory, belay.averaged():
        assert memory.now() == copies * N * dtype.itemsize
    assert memory.peak <= copies * N * dtype.itemsize + SMALL * 4
    assert memory.now() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readout", [tb.readouts.blend(0.5), tb.readouts.bema()], ids=["blend", "bema"])
def test_the_memory_of_a_readout(dtype: torch.dtype, readout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the weights, and up to 3 scratch buffers while the mixture is made."""
    seams.limit_scratch(monkeypatch, SMALL)
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(N // 50)])
    belay = tb.Belay(model, None, EMA, keep_initial=True)
    with Memory() as memory, belay.averaged(readout=readout):
        assert memory.now() == N * dtype.itemsize
    assert N * dtype.itemsize < memory.peak <= N * dtype.itemsize + 3 * SMALL * 4
    assert memory.now() == 0
    with Memory() as memory:
        exported = belay.average_state_dict(readout=readout)
    assert memory.now() == N * dtype.itemsize
    assert memory.peak <= N * dtype.itemsize + 3 * SMALL * 4
    assert len(exported) == N // 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_the_memory_of_an_export_is_one_copy(dtype: torch.dtype, full: bool) -> None:
    """For 16-bit weights the rounded average is held beside the copy, and is released tensor by tensor."""
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(N // 50)])
    belay = tb.Belay(model, None, EMA)
    size = N * dtype.itemsize
    with Memory() as memory:
        exported = belay.average_state_dict(full=full)
    assert memory.now() == size
    assert memory.peak <= size + 2 * 50 * dtype.itemsize
    assert len(exported) == N // 50


class Written(nn.ParameterList):
    """A model that writes itself, as those of Transformers do."""

    def save_pretrained(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_what_needs_no_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    """An optimizer's state with averages, another method, and a folder, for which 16-bit weights are rounded."""
    model = Written([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(N // 50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, save_with_optimizer=True)
    with Memory() as saving:
        state = optimizer.state_dict()
    with Memory() as changing:
        belay.change(tb.Spring.ema(decay=0.99))
    with Memory() as writing:
        belay.save_pretrained(tmp_path / "folder")
    assert len(state["state"]) == N // 50
    few = 4 * 4 * N // 50  # a number of each tensor, to see whether it has changed without a step
    assert saving.peak == 0
    assert changing.peak <= few
    assert writing.peak <= few + (0 if dtype == torch.float32 else 2 * N)


def test_a_batch_is_seen_by_the_average_alike() -> None:
    model, optimizer, belay = attached(EMA, device="cpu")
    train(model, optimizer, 3)
    with torch.no_grad(), belay.averaged():
        inside = model(batch(0))
    plain = mlp()
    plain.load_state_dict(belay.average_state_dict())
    assert torch.equal(plain(batch(0)), inside)

"""What only a GPU can show: captured graphs, a host that does not wait, no memory beside the average."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import torchbelay as tb
from helpers.problems import no_waiting
from torchbelay import optim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has this")

METHODS: dict[str, Any] = {
    "belay": tb.Spring(k=1.0, m1=10.0, m2=20.0),
    "ema": tb.Spring.ema(decay=0.9),
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "swa": tb.methods.swa(),
    "power": tb.methods.power_ema(sigma_rel=0.1),
    "warm-up": tb.methods.ema(0.99, warmup="ratio"),
    "lookahead": tb.methods.lookahead(k=3),
    "lagged": tb.methods.ema(0.9, follow="before"),
}
INNER = {
    "ours": lambda p: optim.AdamW(p, lr=torch.tensor(0.02, device="cuda"), capturable=True),
    "torch's": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02, device="cuda"), fused=True, capturable=True),
    "torch's, foreach": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.02, device="cuda"), foreach=True, capturable=True
    ),
}
X = torch.randn(40, 8, 3, generator=torch.Generator().manual_seed(0))

every_method = pytest.mark.parametrize("how", METHODS)
every_inner = pytest.mark.parametrize("inner", INNER)


class Run:
    def __init__(self, inner: str, how: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 1)).cuda()
        self.optimizer = INNER[inner](self.model.parameters())
        self.belay = tb.Belay(self.model, self.optimizer, METHODS[how], **options)
        self.x = torch.zeros(8, 3, device="cuda")

    def forward_and_backward(self) -> None:
        (self.model(self.x) - self.x.sin().sum(1, keepdim=True)).square().mean().backward()

    def step(self, i: int) -> None:
        self.x.copy_(X[i])
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_and_backward()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.belay.average_state_dict().values()]


@every_inner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_a_module_that_is_an_average_follows_the_replays_of_a_captured_graph(inner: str, dtype: torch.dtype) -> None:
    """Shared memory and, for 16-bit weights and buffers, copies that are part of the graph."""
    run = Run(inner, "ema")
    run.belay.detach()
    run.model = nn.Sequential(nn.Linear(3, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 1)).to("cuda", dtype)
    run.optimizer = INNER[inner](run.model.parameters())
    run.belay, run.x = tb.Belay(run.model, run.optimizer, METHODS["ema"]), run.x.to(dtype)
    made = run.belay.module()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            run.step(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    run.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        run.forward_and_backward()
        run.optimizer.step()
    for i in range(3, 8):
        run.x.copy_(X[i])
        graph.replay()
        exported = run.belay.average_state_dict()
        assert all(torch.equal(t, exported[name]) for name, t in made.state_dict().items())


@every_method
@every_inner
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_a_captured_graph_replays_the_schedule(how: str, inner: str) -> None:
    run, eager = (Run(inner, how, spectators={"second": tb.methods.swa()}) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(3):
            run.step(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    run.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        run.forward_and_backward()
        run.optimizer.step()
    for i in range(3, 14):
        if i == 9:
            run.optimizer.param_groups[0]["lr"].fill_(0.003)  # a schedule, as graphs have it
        run.x.copy_(X[i])
        graph.replay()
    assert run.belay.step == 14
    run.step(14)  # a step of the host's between replays counts too
    run.x.copy_(X[15])
    graph.replay()
    assert run.belay.step == 16
    for i in range(16):
        if i == 9:
            eager.optimizer.param_groups[0]["lr"].fill_(0.003)
        eager.step(i)
    torch.testing.assert_close(run.values(), eager.values(), rtol=1e-5, atol=1e-5)
    assert (
        run.belay.state_dict()["averages"]["second"]["ages"] == eager.belay.state_dict()["averages"]["second"]["ages"]
    )


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_method_that_asks_the_host_is_not_captured_in_silence() -> None:
    model = nn.Linear(3, 1).cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.heavy_ball(0.9))
    x = torch.ones(2, 3, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    with (
        pytest.raises(RuntimeError, match="a captured graph cannot replay this average"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert belay.step == 2


@every_method
@pytest.mark.parametrize("inner", ["ours", "torch's"])
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_a_scaler_is_not_waited_for_whatever_the_schedule(how: str, inner: str) -> None:
    run, scaler = Run(inner, how), GradScaler("cuda")

    def step(i: int, *, spoilt: bool) -> None:
        run.optimizer.zero_grad()
        loss = (run.model(run.x) - run.x.sin().sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        if spoilt:
            next(run.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.step(run.optimizer)

    run.x.copy_(X[0])
    for i in range(2):
        step(i, spoilt=False)
        scaler.update()
    before = run.values()
    with no_waiting():
        step(2, spoilt=True)
    scaler.update()
    assert all(map(torch.equal, run.values(), before))
    with no_waiting():
        step(3, spoilt=False)
    assert run.belay.step == 3


def big(n: int = 1 << 22) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.randn(n, device="cuda")) for _ in range(4)])


def test_the_pass_needs_no_memory_beside_the_average() -> None:
    model = big()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for p in model:
        p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated()
    belay = tb.Belay(model, optimizer, METHODS["belay"])
    optimizer.step()
    weights = sum(p.numel() for p in model)
    state = 8 * weights  # exp_avg and exp_avg_sq
    held = torch.cuda.memory_allocated() - before - state
    assert 4 * weights <= held < 4.02 * weights  # the average, and a table
    torch.cuda.reset_peak_memory_stats()
    settled = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - settled < 1 << 16
    assert "in one pass" in repr(belay)


def test_swapping_needs_no_memory_where_the_dtypes_are_equal() -> None:
    model = big()
    belay = tb.Belay(model, None, METHODS["ema"])
    weights = [p.detach().clone() for p in model]
    torch.cuda.reset_peak_memory_stats()
    settled = torch.cuda.memory_allocated()
    with belay.averaged():
        pass
    assert torch.cuda.max_memory_allocated() - settled < 1 << 18  # a table
    assert all(map(torch.equal, model, weights))


def test_auto_says_that_it_is_triton() -> None:
    model = nn.Linear(3, 1).cuda()
    assert "impl='triton'" in repr(tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), METHODS["ema"]))


def test_a_model_that_is_moved_to_the_gpu_is_followed() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, METHODS["ema"])
    assert "impl='foreach'" in repr(belay)
    model.cuda()
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert "impl='triton'" in repr(belay)
    assert belay.average_state_dict()["weight"].is_cuda


# What went wrong in silence before


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1e-3) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    optimizer.step()


def test_offloaded_state_gives_its_memory_back() -> None:
    model = big(1 << 21)  # four times: 2²³ weights
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    belay = tb.Belay(model, optimizer, METHODS["belay"])
    for _ in range(3):
        one_step(model, optimizer)
    assert "in one pass" in repr(belay)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    assert before - torch.cuda.memory_allocated() == 2 * 4 * (1 << 23)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cuda()
    one_step(model, optimizer)
    assert "in one pass" in repr(belay)


def test_weights_that_were_moved_away_give_their_memory_back() -> None:
    model = big(1 << 21)  # four times: 2²³ weights
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tb.Belay(model, optimizer, METHODS["belay"])
    one_step(model, optimizer)
    optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model.cpu()
    assert before - torch.cuda.memory_allocated() == 4 * (1 << 23)
    model.cuda()
    one_step(model, optimizer)


@pytest.mark.parametrize("method", ["belay", "ema"])
def test_an_optimizer_that_replaces_its_weights_is_followed(method: str) -> None:
    """The memory of the old weights is used again at once, so that stale addresses would read something else."""

    class Replacing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - group["lr"] * p.grad
                    torch.full_like(p, float("nan"))

    values = []
    for kind, impl in ((Replacing, "auto"), (torch.optim.SGD, "reference")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 10)).cuda()
        optimizer = kind(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, METHODS[method], impl=impl)
        for i in range(5):
            one_step(model, optimizer, 0.1 * i)
        values.append([*model.state_dict().values(), *belay.average_state_dict().values()])
    for mine, theirs in zip(*values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_default_device_does_not_matter() -> None:
    torch.set_default_device("cuda")
    try:
        model = nn.Linear(30, 10)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        belay = tb.Belay(model, optimizer, METHODS["belay"], spectators={"swa": METHODS["swa"]})
        for _ in range(3):
            one_step(model, optimizer)
        assert "in one pass" in repr(belay)
        assert belay.stats()["tension"] > 0
        belay.load_state_dict(belay.state_dict())
        with belay.averaged():
            pass
    finally:
        torch.set_default_device(None)


def test_raw_and_averaged_evaluation_in_one_autocast_block_differ() -> None:
    model = nn.Linear(30, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, METHODS["ema"])
    for _ in range(5):
        one_step(model, optimizer, 0.3)
    x = torch.ones(4, 30, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        raw = model(x)
        with belay.averaged():
            averaged = model(x)
        again = model(x)
    with torch.autocast("cuda", torch.bfloat16), belay.averaged():
        expected = model(x)
    assert torch.equal(averaged, expected)
    assert torch.equal(raw, again)
    assert not torch.equal(raw, averaged)


@pytest.mark.parametrize("how", ["loaded on the host", "moved"])
def test_averaged_buffers_are_where_the_model_is(how: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model = model if how == "moved" else model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, METHODS["ema"], buffers="average")
    if how == "moved":
        model.cuda()
    else:
        state = belay.state_dict()
        for average in state["averages"].values():
            average["buffers"] = {name: b.cpu() for name, b in average["buffers"].items()}
        belay.load_state_dict(state)
    for i in range(3):
        optimizer.zero_grad()
        model(X[i].cuda()).square().mean().backward()
        optimizer.step()
    buffers = belay.state_dict()["averages"]["average"]["buffers"]
    assert {b.device.type for b in buffers.values()} == {"cuda"}
    assert belay.step == 3


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
def test_gradients_that_are_laid_out_unlike_their_weights_step(kind: Any) -> None:
    values = []
    for make in (kind, getattr(torch.optim, kind.__name__)):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(40, 60, device="cuda"))
        model = nn.ParameterList([w])
        optimizer = make(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, METHODS["belay"])
        for i in range(3):
            w.grad = torch.linspace(-1, 1 + i, 2400, device="cuda").reshape(60, 40).t()
            optimizer.step()
        values.append([w.detach(), *belay.average_state_dict().values()])
    for mine, theirs in zip(*values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [None, "cpu"], ids=["beside the weights", "in host memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_readouts_are_mixed_on_the_gpu(device: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 50).to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, METHODS["ema"], device=device, keep_initial=True)
    w0 = {name: p.detach().double() for name, p in model.named_parameters()}
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    w1 = {name: p.detach().clone() for name, p in model.named_parameters()}
    w2 = belay.state_dict()["averages"]["average"]["weights"]
    assert {t.device.type for t in belay.state_dict()["averages"]["average"]["initial"].values()} == {
        "cpu" if device else "cuda"
    }
    for readout in (tb.readouts.blend(0.65), tb.readouts.bema()):
        exported = belay.average_state_dict(readout=readout)
        for name, t in exported.items():
            r0, r1, r2 = readout.shares(name, METHODS["ema"], 3, 0.1)
            mixed = r0 * w0[name] + r1 * w1[name].double() + r2 * w2[name].cuda().double()
            torch.testing.assert_close(t.cuda(), mixed.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        with belay.averaged(readout=readout):
            assert all(torch.equal(p, exported[name].cuda()) for name, p in model.named_parameters())
        assert all(torch.equal(p, w1[name]) for name, p in model.named_parameters())

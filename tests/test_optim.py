"""Our AdamW, Adam and SGD against torch's: the same numbers, the same state, one pass if possible."""

import copy
import sys
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

import torchbelay as tb
from helpers import seams
from helpers.problems import MLP, advance, different, everything, f32, same
from torchbelay import optim

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
BELAY = tb.Spring(k=1.0, m1=10.0, m2=20.0)
EMA = tb.Spring.ema(decay=0.9)
INNER = {
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.1, "fused": True}),
    "Adam": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "fused": True}),
    "Adam, plain": ("Adam", {"lr": 0.02, "betas": (0.0, 0.99), "eps": 1e-6, "fused": True}),
    "SGD": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
METHODS = {
    "belay": BELAY,
    "after": tb.Spring(k=1.0, m1=10.0, m2=20.0, follow="after"),
    "ema": EMA,
    "velocities": tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0),
    "swa": tb.methods.swa(),
    "power": tb.methods.power_ema(sigma_rel=0.1),
    "lookahead": tb.methods.lookahead(k=3),
    "primal averaging": tb.methods.primal_averaging(mu_x=0.9, mu_y=0.5),
    "schedule-free": tb.methods.schedule_free(0.9),
}
USUAL = ("AdamW", "momentum")  # what `make quick` runs
every_inner = pytest.mark.parametrize(
    "inner", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in INNER]
)
every_method = pytest.mark.parametrize("how", METHODS)


class Run:
    """A training with our optimizer in one pass, or with torch's and the ordinary coupling."""

    def __init__(
        self, ours: bool, inner: str = "AdamW", method: Any = BELAY, *, dtype: torch.dtype = f32, **options: Any
    ):
        kind, arguments = INNER[inner] if isinstance(inner, str) else inner
        self.model = MLP.model(f32).to(WHERE, dtype)
        self.optimizer = getattr(optim if ours else torch.optim, kind)(self.model.parameters(), **arguments)
        options = {"impl": "triton" if ours else "foreach", **options}
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def train(self, steps: Any, **how: Any) -> "Run":
        advance(self.model, self.optimizer, MLP, steps, **how)
        return self

    def everything(self) -> dict[str, Any]:
        return everything(model=self.model, optimizer=self.optimizer, belay=self.belay)

    @property
    def one_pass(self) -> bool:
        return "in one pass with the optimizer" in repr(self.belay)


def agree(mine: Run, theirs: Run, *, tolerance: float = 2e-6) -> None:
    """Same names, same dtypes and shapes, and values that differ by float32's rounding of numbers of order 1."""
    x, y = mine.everything(), theirs.everything()
    assert x.keys() == y.keys()
    for name in x:
        if isinstance(x[name], Tensor):
            torch.testing.assert_close(
                x[name], y[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
        elif "options" not in name:
            assert x[name] == y[name], name


@every_inner
@every_method
def test_one_pass_is_torchs_step_and_the_ordinary_coupling(inner: str, how: str) -> None:
    mine, theirs = (Run(ours, inner, METHODS[how]).train(range(6)) for ours in (True, False))
    assert mine.one_pass
    assert mine.belay.step == 6
    # velocities and a repulsive spring hand roundings on, amplified
    agree(mine, theirs, tolerance=2e-5 if how in ("velocities", "schedule-free", "primal averaging") else 2e-6)


@pytest.mark.thorough
def test_a_thousand_steps_of_adamw_are_torchs_to_rounding() -> None:
    steps = 1000 if WHERE == "cuda" else 150  # the interpreter needs a second for thirty

    def run(kind: Any, impl: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        p = nn.ParameterList([nn.Parameter(torch.randn(5, generator=draw).to(WHERE))])
        optimizer = kind(p, lr=1e-2, weight_decay=0.05, fused=True)
        belay = tb.Belay(p, optimizer, EMA, impl=impl)
        for _ in range(steps):
            p[0].grad = (p[0].detach() - 1 + torch.randn(5, generator=draw).to(WHERE)).clone()
            optimizer.step()
        return p[0].detach(), belay.average_state_dict()["0"], optimizer.state[p[0]]

    mine, theirs = run(optim.AdamW, "triton"), run(torch.optim.AdamW, "foreach")
    # every step may round each of the weights, of order 1, once; the pull towards the minimum forgets
    torch.testing.assert_close(mine[:2], theirs[:2], rtol=0, atol=5e-6)
    assert mine[2]["step"].item() == theirs[2]["step"].item() == steps
    torch.testing.assert_close(mine[2]["exp_avg_sq"], theirs[2]["exp_avg_sq"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:.*16 bits wide")
def test_narrow_weights_agree_to_their_own_rounding(dtype: torch.dtype) -> None:
    mine, theirs = (Run(ours, "AdamW", EMA, dtype=dtype).train(range(1)) for ours in (True, False))
    assert mine.one_pass
    for x, y in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert all(p.dtype == dtype for p in mine.model.parameters())


def test_a_sparse_gradient_after_a_weight_without_one_is_left_to_torch() -> None:
    found = []
    for kind, impl in ((optim.SGD, "triton"), (torch.optim.SGD, "foreach")):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Embedding(4, 2, sparse=True)]).to(WHERE)
        optimizer = kind(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA, impl=impl)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()  # in one pass
        optimizer.zero_grad()
        model[1](torch.tensor([1], device=WHERE)).sum().backward()
        assert model[0].weight.grad is None
        assert model[1].weight.grad.is_sparse
        optimizer.step()
        found.append([*model.state_dict().values(), *belay.average_state_dict().values()])
    torch.testing.assert_close(*found, rtol=2e-6, atol=2e-6)


# Settings


@pytest.mark.parametrize(
    "unusual",
    [
        ("AdamW", {"amsgrad": True}), ("AdamW", {"maximize": True}), ("AdamW", {"foreach": False}),
        ("AdamW", {"foreach": True}), ("AdamW", {"fused": False}), ("SGD", {"lr": 0.1, "maximize": True}),
        ("SGD", {"lr": 0.1, "foreach": False}), ("SGD", {"lr": 0.1, "fused": False}),
    ],
    ids=str,
)  # fmt: skip
def test_whatever_is_unusual_is_torchs_own_to_the_bit(unusual: Any) -> None:
    kind, arguments = unusual
    told = {"fused": True} if "foreach" not in arguments and "fused" not in arguments and kind == "AdamW" else {}
    mine = Run(True, (kind, arguments), impl="foreach").train(range(5))
    theirs = Run(False, (kind, arguments | told)).train(range(5))
    assert not mine.one_pass
    assert different(mine.everything(), theirs.everything()) == []
    kernel = Run(True, (kind, arguments)).train(range(5))
    assert not kernel.one_pass
    agree(kernel, theirs)


@pytest.mark.skipif(WHERE == "cuda", reason="on a GPU the update is the kernel's own")
@every_inner
def test_on_the_cpu_they_are_torchs_to_the_bit(inner: str) -> None:
    mine, theirs = (Run(ours, inner, impl="auto").train(range(5)) for ours in (True, False))
    assert not mine.one_pass
    assert different(mine.everything(), theirs.everything()) == []


def test_fused_is_the_default_where_nothing_is_asked_for() -> None:
    model = MLP.model(f32)
    assert optim.AdamW(model.parameters()).param_groups[0]["fused"] is True
    assert optim.AdamW(model.parameters())._step_supports_amp_scaling
    for asked in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        assert not optim.AdamW(model.parameters(), **asked).param_groups[0]["fused"]
    assert optim.Adam([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]).param_groups[0]["fused"] is None


def test_without_a_belay_they_are_torchs_to_the_bit() -> None:
    models = [MLP.model(f32).to(WHERE) for _ in range(2)]
    for model, kind in zip(models, (optim.AdamW, torch.optim.AdamW), strict=True):
        advance(model, kind(model.parameters(), lr=0.02, fused=True), MLP, range(4))
    assert all(map(same, *(model.parameters() for model in models)))


@pytest.mark.parametrize("inner", ["AdamW", "momentum"])
def test_groups_schedules_and_learning_rates_that_are_tensors(inner: str) -> None:
    def run(ours: bool) -> Run:
        run = Run(ours, inner)
        run.belay.detach()
        kind, arguments = INNER[inner]
        groups = [
            {"params": run.model.inner.parameters()},
            {"params": [run.model.outer.weight, run.model.gain], "lr": 0.005, "weight_decay": 0.0},
        ]
        run.optimizer = getattr(optim if ours else torch.optim, kind)(groups, **arguments)
        run.belay = tb.Belay(run.model, run.optimizer, BELAY, impl="triton" if ours else "foreach")
        if inner == "AdamW":
            run.optimizer.param_groups[0]["lr"] = torch.tensor(0.02, device=WHERE)
        for step in range(6):
            run.optimizer.param_groups[1]["lr"] = 0.005 * (step + 1)
            if step == 3 and inner == "AdamW":
                run.optimizer.param_groups[0]["lr"].fill_(0.001)
            run.train([step])
        return run

    mine, theirs = run(True), run(False)
    assert mine.one_pass
    for x, y in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


def test_a_closure_is_evaluated_once_and_its_loss_returned() -> None:
    run, calls = Run(True), []

    def closure() -> Tensor:
        calls.append(1)
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, 0)
        loss.backward()
        return loss

    assert run.optimizer.step(closure).item() > 0
    assert len(calls) == 1
    assert run.one_pass
    agree(run, Run(False).train([0]))


def step_with(run: Run, step: int, meanwhile: Callable[[], object]) -> None:
    """Take a step whose closure does something besides."""

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = MLP.loss(run.model, step)
        loss.backward()
        meanwhile()
        return loss

    run.optimizer.step(closure)


def replace_data(run: Run) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize("how", ["belay", "swa", "lookahead"])
@pytest.mark.parametrize("before", [0, 2], ids=["at the first step", "later"])
def test_weights_that_a_closure_puts_elsewhere_still_step(how: str, before: int) -> None:
    runs = [Run(ours, "momentum", METHODS[how]).train(range(before)) for ours in (True, False)]
    for run in runs:
        old = [p.data for p in run.model.parameters()]
        as_they_were = [t.clone() for t in old]
        step_with(run, before, lambda run=run: replace_data(run))
        assert all(map(torch.equal, old, as_they_were))  # that memory may be anyone's now
        run.train(range(before + 1, before + 3))
    assert runs[0].one_pass
    agree(*runs)


@pytest.mark.parametrize("some", [slice(None), slice(1, 2)], ids=["all", "one"])
def test_weights_that_are_put_elsewhere_between_steps_still_step(some: slice) -> None:
    runs = [Run(ours, "AdamW").train(range(2)) for ours in (True, False)]
    for run in runs:
        moved = list(run.model.parameters())[some]
        old = [p.data for p in moved]
        as_they_were = [t.clone() for t in old]
        for p in moved:
            p.data = p.data.clone()
        run.train([2])
        assert all(map(torch.equal, old, as_they_were))
        run.train([3])
    assert runs[0].one_pass
    agree(*runs)


@pytest.mark.parametrize(
    ("inner", "change"), [("SGD", {"momentum": 0.9}), ("momentum", {"maximize": True}), ("AdamW", {"amsgrad": True})]
)
def test_a_setting_that_a_closure_changes_counts_at_once(inner: str, change: dict[str, Any]) -> None:
    runs = [Run(ours, inner).train(range(2)) for ours in (True, False)]
    if inner == "AdamW":
        for run in runs:
            for state in run.optimizer.state.values():
                state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    for run in runs:
        step_with(run, 2, lambda run=run: run.optimizer.param_groups[0].update(change))
        run.train([3])
    agree(*runs)


def test_an_average_that_is_detached_in_a_closure_stays_where_it_is() -> None:
    run = Run(True, "SGD").train(range(2))
    before = run.belay.average_state_dict()
    step_with(run, 2, run.belay.detach)
    assert different(run.belay.average_state_dict(), before) == []
    other = Run(False, "SGD").train(range(2))
    other.belay.detach()
    other.train([2])
    for x, y in zip(run.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("inner", ["AdamW", "SGD", "momentum"])
def test_parameters_without_a_gradient_do_not_step_but_couple(inner: str) -> None:
    runs = [Run(ours, inner) for ours in (True, False)]
    for run in runs:
        for step in range(5):
            run.optimizer.zero_grad()
            MLP.loss(run.model, step).backward()
            if step != 3:
                run.model.gain.grad = None
            if step == 2:
                run.model.inner.bias.grad = None
            run.optimizer.step()
    assert runs[0].one_pass
    agree(*runs)


def test_a_parameter_that_no_average_follows_still_steps() -> None:
    def rule(name: str, p: Tensor) -> Any:
        return None if name == "gain" else BELAY

    mine, theirs = (Run(ours, "AdamW", rule).train(range(4)) for ours in (True, False))
    assert mine.one_pass
    agree(mine, theirs)


def test_spectators_come_along() -> None:
    watching = {
        "short": tb.Spring.ema(decay=0.5),
        "lagged": tb.methods.ema(0.7, follow="before"),
        "swa": tb.methods.swa(),
    }
    mine, theirs = (Run(ours, "AdamW", BELAY, spectators=watching).train(range(5)) for ours in (True, False))
    assert mine.one_pass
    agree(mine, theirs)


@pytest.mark.parametrize(
    "options", [{"every": 3}, {"start": 2}, {"start": 3, "every": 2}, {"buffers": "average"}], ids=str
)
def test_options_hold_in_one_pass_too(options: dict[str, Any]) -> None:
    mine, theirs = (Run(ours, "AdamW", BELAY, **options).train(range(8)) for ours in (True, False))
    assert mine.one_pass
    agree(mine, theirs)


def test_steps_between_two_couplings_keep_the_pass(monkeypatch) -> None:
    run = Run(True, "AdamW", tb.methods.ema(0.9, warmup="ratio"), every=2).train(range(2))
    assert run.one_pass
    made = seams.tables(monkeypatch)
    run.train(range(2, 8))
    assert run.one_pass
    assert made.count == 0


def test_a_parameter_that_joins_later_is_taken_along() -> None:
    runs = []
    for ours in (True, False):
        model = MLP.model(f32).to(WHERE)
        kind = optim.AdamW if ours else torch.optim.AdamW
        optimizer = kind(model.inner.parameters(), lr=0.02, fused=True)
        belay = tb.Belay(model, optimizer, tb.methods.swa(), impl="triton" if ours else "foreach")
        advance(model, optimizer, MLP, range(2))
        optimizer.add_param_group({"params": model.outer.parameters(), "lr": 0.01})
        with pytest.warns(tb.BelayWarning, match="added to the optimizer"):
            advance(model, optimizer, MLP, [2])
        advance(model, optimizer, MLP, [3, 4])
        runs.append((belay, everything(model=model, optimizer=optimizer, belay=belay)))
    assert "in one pass" in repr(runs[0][0])
    for name, x in runs[0][1].items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(x, runs[1][1][name], rtol=2e-6, atol=2e-6)


def test_averages_that_do_not_fit_one_pass_are_not_tried_again_and_again(monkeypatch) -> None:
    """A spring with velocities and a spectator without: two launches."""
    watching = {"short": EMA}
    swinging = METHODS["velocities"]
    mine, theirs = (Run(ours, "AdamW", swinging, spectators=watching).train(range(2)) for ours in (True, False))
    assert not mine.one_pass
    seams.forbid_one_pass(monkeypatch)
    for run in (mine, theirs):
        run.train([2, 3])
    agree(mine, theirs, tolerance=2e-5)


def test_a_compiled_step_takes_the_averages_along() -> None:
    run, other = Run(True), Run(True).train(range(3))
    step = torch.compile(run.optimizer.step, backend="eager")
    for i in range(3):
        run.optimizer.zero_grad()
        MLP.loss(run.model, i).backward()
        step()
    assert run.one_pass
    assert different(run.everything(), other.everything()) == []


def test_two_averages_of_one_optimizer_go_the_ordinary_way() -> None:
    runs = []
    for ours in (True, False):
        run = Run(ours, "AdamW", EMA)
        other = tb.Belay(run.model, run.optimizer, tb.Spring.ema(decay=0.5), impl="triton" if ours else "foreach")
        run.train(range(4))
        runs.append((run, other.average_state_dict()))
    assert not runs[0][0].one_pass
    agree(runs[0][0], runs[1][0])
    for name, x in runs[0][1].items():
        torch.testing.assert_close(x, runs[1][1][name], rtol=2e-6, atol=2e-6)


# Checkpoints


@pytest.mark.parametrize("inner", ["AdamW", "Adam", "momentum"])
@pytest.mark.parametrize("to_ours", [True, False], ids=["torch to ours", "ours to torch"])
def test_a_run_goes_on_in_the_other_library(inner: str, to_ours: bool) -> None:
    first, second = Run(not to_ours, inner).train(range(4)), Run(to_ours, inner)
    whole = Run(False, inner).train(range(8))
    for part in ("model", "optimizer", "belay"):
        getattr(second, part).load_state_dict(copy.deepcopy(getattr(first, part).state_dict()))
    second.train(range(4, 8))
    assert second.one_pass is to_ours
    agree(second, whole)


def test_a_checkpoint_of_an_unfused_torch_optimizer_loads() -> None:
    plain = Run(False, ("AdamW", {"lr": 0.02, "weight_decay": 0.1})).train(range(3))
    mine = Run(True, ("AdamW", {"lr": 0.02, "weight_decay": 0.1})).train(range(1))
    for part in ("model", "optimizer", "belay"):
        getattr(mine, part).load_state_dict(copy.deepcopy(getattr(plain, part).state_dict()))
    mine.train(range(3, 6))
    assert mine.one_pass
    plain.train(range(3, 6))
    for x, y in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)
    assert next(iter(mine.optimizer.state.values()))["step"].item() == 6


@pytest.mark.parametrize("setting", [{"foreach": True}, {"fused": False}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("inner", ["AdamW", "Adam", "SGD"])
def test_a_scaler_goes_with_a_checkpoint_of_an_unfused_optimizer(setting: dict[str, bool], inner: str) -> None:
    plain = Run(False, (inner, {"lr": 0.02, **setting})).train(range(3))
    mine = Run(True, (inner, {"lr": 0.02})).train(range(1))
    for part in ("model", "optimizer", "belay"):
        getattr(mine, part).load_state_dict(copy.deepcopy(getattr(plain, part).state_dict()))
    for run in (mine, plain):
        scaler = GradScaler(WHERE, init_scale=8.0)
        for step in range(3, 6):
            run.optimizer.zero_grad()
            loss = scaler.scale(MLP.loss(run.model, step))
            (inf * loss if step == 4 else loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
    assert mine.belay.step == plain.belay.step == 5
    agree(mine, plain)


def test_a_copy_of_the_optimizer_is_one_without_averages() -> None:
    run = Run(True).train(range(2))
    other = copy.deepcopy(run.optimizer)
    assert different(everything(o=other), everything(o=run.optimizer)) == []
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    assert run.belay.step == 2


# Changes of the state from outside


def reset_entry(state: dict[str, Tensor]) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def move_data(state: dict[str, Tensor]) -> None:
    state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()
    state["exp_avg"].data = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize("hand", [reset_entry, move_data, lambda state: state.clear()], ids=["entry", "data", "clear"])
def test_a_state_that_is_replaced_is_noticed(hand: Callable[[dict[str, Tensor]], None]) -> None:
    runs = [Run(ours).train(range(3)) for ours in (True, False)]
    for run in runs:
        hand(run.optimizer.state[run.model.inner.weight])
        run.train(range(3, 5))
    assert runs[0].one_pass
    agree(*runs)


def test_a_replaced_entry_counts_in_the_very_next_step() -> None:
    run = Run(True).train(range(3))
    gradients = {p: torch.ones_like(p) for p in run.model.parameters()}
    for last in (False, True):
        for p, g in gradients.items():  # the same gradients in the same place: nothing else gives it away
            p.grad = g
        if last:
            state = run.optimizer.state[run.model.inner.bias]
            reset_entry(state)
        run.optimizer.step()
    torch.testing.assert_close(state["exp_avg"], torch.full_like(state["exp_avg"], 0.1))


def test_state_that_is_moved_away_is_freed() -> None:
    """Who offloads the state of an optimizer between two phases of a training wants its memory back."""
    run = Run(True).train(range(3))
    assert run.one_pass
    weights, memory = run.model.inner.weight, []
    for key in ("exp_avg", "exp_avg_sq"):
        state = run.optimizer.state[weights]
        memory.append(weakref.ref(state[key].untyped_storage()))
        state[key] = state[key].clone()
    del state
    assert [held() for held in memory] == [None, None]
    other = Run(True).train(range(3))
    agree(run.train(range(3, 5)), other.train(range(3, 5)))
    assert run.one_pass


@pytest.mark.parametrize("inner", ["SGD", "AdamW"])
def test_gradients_laid_out_in_another_way_take_the_ordinary_path(inner: str) -> None:
    runs = [Run(ours, inner) for ours in (True, False)]
    for run in runs:
        for step in range(3):
            run.optimizer.zero_grad()
            MLP.loss(run.model, step).backward()
            weight = run.model.inner.weight
            if run is runs[0]:  # on a CPU torch's fused AdamW gets such wrong, on a GPU it refuses them
                weight.grad = weight.grad.t().contiguous().t()
            run.optimizer.step()
    assert not runs[0].one_pass
    agree(*runs)


@pytest.mark.parametrize("inner", ["AdamW", "Adam"])
@pytest.mark.parametrize("averaged", [True, False])
def test_gradients_that_autograd_lays_out_in_another_way_are_right(inner: str, averaged: bool) -> None:
    """As for some einsums. torch's fused step on a CPU takes both as flat memory, and trains something else."""
    results = []
    for make in (getattr(optim, inner), lambda ps, **k: getattr(torch.optim, inner)(ps, **k, foreach=False)):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(4, 6, device=WHERE))
        x = torch.randn(5, 6, 4, device=WHERE)
        model = nn.ParameterList([w])
        optimizer = make(model.parameters(), lr=0.1)
        if averaged:
            tb.Belay(model, optimizer, BELAY, impl="foreach")
        for _ in range(3):
            optimizer.zero_grad()
            torch.einsum("ij,bji->b", w, x).sin().sum().backward()
            w.grad = w.grad.t().contiguous().t()
            assert w.grad.stride() != w.stride()
            optimizer.step()
        results.append(w.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skipped", [False, True])
def test_such_gradients_are_unscaled_and_skipped_as_others_are(skipped: bool) -> None:
    runs = [Run(ours, method=BELAY) for ours in (True, False)]
    for run in runs:
        scaler = GradScaler(WHERE, init_scale=8.0)
        for step in range(3):
            run.optimizer.zero_grad()
            scaler.scale(MLP.loss(run.model, step)).backward()
            weight = run.model.inner.weight
            if skipped and step == 1:
                weight.grad[0, 0] = inf
            if run is runs[0]:
                weight.grad = weight.grad.t().contiguous().t()
            scaler.step(run.optimizer)
            scaler.update()
        assert run.belay.step == (2 if skipped else 3)
    agree(*runs)


def test_sparse_gradients_take_the_ordinary_path() -> None:
    runs = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Embedding(7, 3, sparse=True).to(WHERE)
        optimizer = (optim if ours else torch.optim).SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, EMA, impl="triton" if ours else "foreach")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 3], device=WHERE)).square().sum().backward()
            optimizer.step()
        runs.append([model.weight.detach(), *belay.average_state_dict().values()])
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


# Hooks, mixed precision, errors


def test_other_hooks_fire_once_a_step() -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on torch's own step calls hooks too
    run, calls = Run(True, ("AdamW", {"amsgrad": True})), []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run.train(range(2))
    assert calls == ["before", "after"] * 2
    assert run.belay.step == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("skipping")
@pytest.mark.parametrize("inner", ["AdamW", "Adam"])
@pytest.mark.parametrize("how", ["belay", "ema", "swa", "lookahead", "velocities"])
def test_a_run_with_skipped_steps_is_the_run_without_them(inner: str, how: str) -> None:
    run, other = (Run(True, inner, METHODS[how]) for _ in range(2))
    scaler, infs = GradScaler(WHERE), (0, 3, 4)
    for step in range(7):
        run.optimizer.zero_grad()
        scaler.scale(MLP.loss(run.model, step)).backward()
        if step in infs:
            run.model.gain.grad.fill_(inf)
        scaler.step(run.optimizer)
        scaler.update()
    other.train([step for step in range(7) if step not in infs])
    assert run.one_pass
    assert run.belay.step == 4
    assert different(run.everything(), other.everything()) == []  # the scale is a power of two


def test_a_step_that_raises_has_moved_nothing() -> None:
    def fails(*_: object) -> None:
        raise KeyError("on the way")

    run, other = (Run(True, "AdamW", tb.methods.ema(0.9, follow="before")).train(range(2)) for _ in range(2))
    before = run.everything()
    handle = run.optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        run.train([2])
    handle.remove()
    assert different(run.everything(), before) == []
    run.train([2])
    other.train([2])
    assert different(run.everything(), other.everything()) == []


def test_a_subclass_that_forgets_its_parent_is_told() -> None:
    class Own(optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    model = MLP.model(f32).to(WHERE)
    optimizer = Own(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, EMA, impl="triton")
    with pytest.raises(RuntimeError, match=r"Own stepped without its averages: .* must call super\(\)\.step\(\)"):
        optimizer.step()


def test_impl_says_what_it_needs(monkeypatch) -> None:
    model = MLP.model(f32)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"impl='triton' runs on a GPU, and parameter 'gain' is on cpu"):
        tb.Belay(model, optimizer, EMA, impl="triton")
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        tb.Belay(model, optimizer, EMA, impl="triton")
    assert "impl='foreach'" in repr(tb.Belay(model, optimizer, EMA))
    assert not optimizer.state


def test_a_gradient_is_compared_with_its_own_weights_whichever_others_have_none() -> None:
    """Two weights of one shape, laid out in two ways, of which only one has a gradient at each later step."""

    def trained(kind: Any, impl: str, **settings: Any) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(0)
        plain = torch.randn(4, 4, generator=drawn).to(WHERE)
        model = nn.ParameterList([nn.Parameter(plain.t().contiguous().t()), nn.Parameter(plain.clone())])
        optimizer = kind(model.parameters(), lr=0.02, **settings)
        belay = tb.Belay(model, optimizer, EMA, impl=impl)
        for step in range(4):
            for i, p in enumerate(model):
                gradient = torch.randn(4, 4, generator=drawn).to(WHERE)
                missing = (step, i) in ((2, 1), (3, 0))
                p.grad = None if missing else gradient.t().contiguous().t() if i == 0 or step == 3 else gradient
            optimizer.step()
        return [*map(Tensor.detach, model), *belay.average_state_dict().values()]

    mine = trained(optim.AdamW, "triton", fused=True)
    for x, y in zip(mine, trained(torch.optim.AdamW, "reference", foreach=False), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)

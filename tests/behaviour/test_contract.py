"""One contract for Belay around every optimizer that torch has.

The oracle is a program of its own: the same optimizer on a copy of the model, w1 copied before the step by hand, and
the formulas of `ops.reference` with numbers that are written out in helpers/optimizers_under_test.py,
not taken from the library.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import torchbelay as tb
from helpers.optimizers_under_test import (
    CASES,
    ORACLES,
    Run,
    State,
    attach,
    every_dtype,
    every_method,
    every_optimizer,
    in_torch,
    make,
    optimizers,
)
from helpers.problems import (
    FULL_BATCH,
    MLP,
    advance,
    bf16,
    copies,
    different,
    everything,
    f32,
    f64,
    same,
)
from torchbelay.ops import reference


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    assert set(in_torch) <= set(CASES)


# 1. What it computes


class ByHand:
    """The program that Belay saves its user from writing."""

    def __init__(self, name: str, how: str, dtype: torch.dtype, **arguments: Any) -> None:
        self.plain = Run(name, None, dtype, **arguments)
        self.formula, self.t = ORACLES[how].formula, 0
        self.w1 = dict(self.plain.model.named_parameters())
        self.w2 = {name: w1.detach().to(f64, copy=True) for name, w1 in self.w1.items()}
        self.v1, self.v2 = ({name: torch.zeros_like(w2) for name, w2 in self.w2.items()} for _ in range(2))

    @torch.no_grad()
    def step(self) -> dict[str, tuple[State, Tensor]]:
        """Take one; return for every parameter the new state in float64 and the size of what was added up."""
        before = {name: w1.detach().to(f64, copy=True) for name, w1 in self.w1.items()}
        with torch.enable_grad():
            self.plain.train(range(self.t, self.t + 1))
        self.t += 1
        out = {}
        for name, w1 in self.w1.items():
            old = (before[name], self.w2[name], self.v1[name], self.v2[name])
            u = w1.to(f64) - before[name]
            new = self.formula(old, u, self.t)
            self.put(name, new)
            out[name] = new, sum(x.abs() for x in (*old, u))
        return out

    @torch.no_grad()
    def put(self, name: str, state: State) -> None:
        self.w1[name].copy_(state[0])
        self.w2[name], self.v1[name], self.v2[name] = (x.to(f64, copy=True) for x in state[1:])


def state_of(run: Run, name: str) -> State:
    saved = run.belay.state_dict()["averages"]["average"]
    w1 = dict(run.model.named_parameters())[name].detach()
    still = torch.zeros_like(w1, dtype=f64)
    return w1, saved["weights"][name], *(saved[v].get(name, still) for v in ("velocities1", "velocities2"))


def agree(run: Run, oracle: ByHand, *, steps: int = 15) -> None:
    """Both take this number of steps, each on its own, and end at the same place."""
    run.train(range(steps))
    for _ in range(steps):
        expected = oracle.step()
    for each, (new, _) in expected.items():
        # relative to the largest weight: rounding differs with the order of the operations, and the steps add it up
        size = max(1.0, *(x.abs().max().item() for x in new))
        for ours, theirs in zip(state_of(run, each), new, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * size)
    assert run.belay.step == steps


@optimizers(lambda case: not case.magnifies)
@every_method
def test_fifteen_steps_agree_with_the_program_by_hand(name: str, how: str) -> None:
    agree(Run(name, how, f64), ByHand(name, how, f64))


@every_optimizer
@every_method
@every_dtype
def test_each_step_is_the_formula_rounded_once(name: str, how: str, dtype: torch.dtype) -> None:
    run, oracle = Run(name, how, dtype), ByHand(name, how, dtype)
    wide = torch.promote_types(dtype, f32)
    assert {w2.dtype for w2 in run.belay.state_dict()["averages"]["average"]["weights"].values()} == {wide}
    for t in range(15):
        run.train(range(t, t + 1))
        for each, (new, added) in oracle.step().items():
            ours = state_of(run, each)
            # a handful of roundings of what is added up, in float32 or wider; then 16-bit weights are rounded once
            allowed = 4 * torch.finfo(wide).eps * ORACLES[how].largest * added
            once = torch.finfo(bf16).eps / 2 * new[0].abs() if dtype == bf16 else 0.0
            assert ((ours[0] - new[0]).abs() <= allowed + once).all()
            for x, y in zip(ours[1:], new[1:], strict=True):
                assert ((x - y).abs() <= allowed).all()
            oracle.put(each, ours)  # go on from the same bits, so that the next step is a step of its own
    assert run.belay.step == 15


VARIANTS = [(name, {way: True}) for name in ("Adam", "AdamW", "SGD") for way in ("foreach", "fused")]
if torch.cuda.is_available():  # torch refuses it elsewhere
    VARIANTS += [(name, {"capturable": True, "device": "cuda"}) for name in ("Adam", "AdamW")]


@pytest.mark.parametrize("how", ["belay", "velocities", "schedule_free"])
@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_the_way_in_which_an_optimizer_runs_makes_no_difference(name: str, variant: dict[str, Any], how: str) -> None:
    agree(Run(name, how, f64, **variant), ByHand(name, how, f64, **variant))


@pytest.mark.parametrize("how", ["belay", "schedule_free"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_the_learning_rate_may_be_a_tensor(name: str, how: str) -> None:
    lr = torch.tensor(CASES[name].arguments["lr"], dtype=f64)
    agree(Run(name, how, f64, lr=lr.clone(), foreach=False), ByHand(name, how, f64, lr=lr.clone(), foreach=False))


def test_two_hundred_steps_of_adamw_are_algorithm_1() -> None:
    run = Run("AdamW", "belay", f64)
    run.train(range(200))
    lr, decay, (beta1, beta2), eps = 0.02, 0.1, (0.9, 0.999), 1e-8
    model = MLP.model(f64)
    w1 = {name: p.detach().clone() for name, p in model.named_parameters()}
    w2 = dict(w1)
    mean = {name: torch.zeros_like(w) for name, w in w1.items()}
    square = {name: torch.zeros_like(w) for name, w in w1.items()}
    for t in range(1, 201):
        model.load_state_dict(w1)
        gradients = torch.autograd.grad(MLP.loss(model, t - 1), list(model.parameters()))
        for name, g in zip(w1, gradients, strict=True):
            mean[name] = beta1 * mean[name] + (1 - beta1) * g
            square[name] = beta2 * square[name] + (1 - beta2) * g * g
            adam = mean[name] / (1 - beta1**t) / ((square[name] / (1 - beta2**t)).sqrt() + eps)
            u = -lr * (adam + decay * w1[name])
            w1[name], w2[name] = reference.algorithm1(w1[name], w2[name], u, k=1.0, m1=10.0, m2=20.0)
    for name in w1:
        torch.testing.assert_close(state_of(run, name)[:2], (w1[name], w2[name]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_without_a_gradient_the_optimizer_leaves_a_parameter_alone_and_the_spring_does_not(name: str) -> None:
    run = Run(name, "belay", f64)
    run.train(range(5))
    w1, w2, *_ = copies(state_of(run, "inner.bias"))
    assert not torch.equal(w1, w2)
    for step in range(5, 10):
        run.optimizer.zero_grad()
        MLP.loss(run.model, step).backward()
        run.model.inner.bias.grad = None
        run.optimizer.step()
        w1, w2 = reference.algorithm1(w1, w2, 0.0, k=1.0, m1=10.0, m2=20.0)
    # five steps, a few roundings each, of numbers below 1
    torch.testing.assert_close(state_of(run, "inner.bias")[:2], (w1, w2), rtol=0, atol=1e-14)


def scheduled(kind: str, optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    kinds = torch.optim.lr_scheduler
    if kind == "StepLR":
        return kinds.StepLR(optimizer, step_size=4, gamma=0.3)
    if kind == "OneCycleLR":
        return kinds.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=40, cycle_momentum=False)
    return kinds.LambdaLR(optimizer, [lambda t: 1 / (1 + t), lambda t: min(1.0, (1 + t) / 10)])


@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR", "LambdaLR"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("number", [float, lambda x: torch.tensor(x, dtype=f64)], ids=["float", "tensor"])
def test_momentum_as_a_spring_is_torchs_own_under_every_schedule(
    kind: str, nesterov: bool, number: Callable[[float], Any]
) -> None:
    weights = []
    for by_spring in (True, False):
        model = MLP.model(f64)
        inner, rest = list(model.inner.parameters()), [model.outer.weight, model.gain]
        own = {} if by_spring else {"momentum": 0.8, "nesterov": nesterov}
        optimizer = torch.optim.SGD([{"params": inner, "lr": number(0.1)}, {"params": rest}], lr=number(0.05), **own)
        if by_spring:
            tb.Belay(model, optimizer, (tb.methods.nesterov if nesterov else tb.methods.heavy_ball)(0.8))
        schedule = scheduled(kind, optimizer)
        for step in range(30):
            advance(model, optimizer, MLP, [step])
            schedule.step()
        weights.append([p.detach() for p in model.parameters()])
    # the spring has the displacement where torch has the buffer: equal but for rounding, which 30 steps add up
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


# 2. Resuming


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumes(name: str, how: str, dtype: torch.dtype, **options: Any) -> None:
    whole, half = (Run(name, how, dtype, options=options) for _ in range(2))
    whole.train(range(12))
    half.train(range(6))
    parts = ("model", "optimizer", "belay")
    saved = through_a_file({part: getattr(half, part).state_dict() for part in parts})
    again = Run(name, how, dtype, options=options, seed=8)
    for part in parts:
        getattr(again, part).load_state_dict(saved[part])
    assert different(again.everything(), half.everything()) == []
    again.train(range(6, 12))
    assert again.belay.step == 12
    assert different(again.everything(), whole.everything()) == []


@every_optimizer
@every_method
def test_a_run_in_two_halves_is_the_whole_run_bit_for_bit(name: str, how: str) -> None:
    resumes(name, how, f32)


@optimizers(lambda case: not case.forgets_16_bits)
@pytest.mark.parametrize("how", ["belay", "ema"])
def test_a_16_bit_run_in_two_halves_is_the_whole_run_bit_for_bit(name: str, how: str) -> None:
    resumes(name, how, bf16)


@pytest.mark.parametrize("how", ["belay", "lookahead", "schedule_free"])
@pytest.mark.parametrize("start", [4, 6, 8])
def test_a_run_may_be_cut_before_or_after_its_average_begins(how: str, start: int) -> None:
    resumes("AdamW", how, f32, start=start)


@pytest.mark.parametrize("how", ["belay", "ema"])
@pytest.mark.parametrize("start", [0, 1])
def test_a_run_may_be_cut_between_two_couplings(how: str, start: int) -> None:
    resumes("AdamW", how, f32, every=4, start=start)


# 3. Letting go


@every_optimizer
@pytest.mark.parametrize("how", ["belay", "velocities"])
def test_detach_leaves_the_optimizer_as_it_was(name: str, how: str) -> None:
    run = Run(name, None)
    run.optimizer.register_step_post_hook(lambda *_: None)  # of the user's own
    attributes = set(vars(run.optimizer))
    hooks = {key: dict(getattr(run.optimizer, key)) for key in attributes if key.endswith("_hooks")}
    assert hooks["_optimizer_step_post_hooks"]
    run.belay = attach(how, run.model, run.optimizer)
    run.train(range(4))
    run.belay.detach()
    assert {key: dict(getattr(run.optimizer, key)) for key in hooks} == hooks
    assert set(vars(run.optimizer)) == attributes
    average, plain = everything(belay=run.belay), run.twin()
    run.train(range(4, 9))
    plain.train(range(4, 9))
    assert different(run.plainly(), plain.plainly()) == []
    assert different(everything(belay=run.belay), average) == []


# 4. What is not ours


@every_optimizer
@pytest.mark.parametrize("how", ["belay", "lookahead", "velocities"])
def test_gradients_and_the_optimizers_state_are_what_the_plain_optimizer_makes_them(name: str, how: str) -> None:
    run = Run(name, how)
    for step in range(5):
        plain = run.twin()
        run.train(range(step, step + 1))
        plain.train(range(step, step + 1))
        assert different(everything(optimizer=run.optimizer), everything(optimizer=plain.optimizer)) == []
        for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            assert same(mine.grad, theirs.grad)


@every_optimizer
@every_dtype
def test_an_average_that_watches_changes_no_bit_of_the_training(name: str, dtype: torch.dtype) -> None:
    watched, plain = Run(name, "ema", dtype), Run(name, None, dtype)
    watched.train(range(15))
    plain.train(range(15))
    assert different(watched.plainly(), plain.plainly()) == []
    assert watched.belay.step == 15


# 5. Closures


@optimizers(lambda case: not case.closure)
@pytest.mark.parametrize("how", ["belay", "schedule_free"])
def test_a_closure_makes_no_difference(name: str, how: str) -> None:
    ordinary, closed = Run(name, how), Run(name, how)
    ordinary.train(range(6))
    closed.train(range(6), closure=True)
    assert different(closed.everything(), ordinary.everything()) == []


@every_optimizer
def test_a_closure_is_called_as_often_as_without_a_belay_and_its_loss_is_returned(name: str) -> None:
    told: dict[bool, list[float]] = {}
    for attached in (True, False):
        run = Run(name, "ema" if attached else None)
        calls: list[float] = []

        def closure(run: Run = run, calls: list[float] = calls) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.case.problem.loss(run.model, 0)
            loss.backward()
            calls.append(loss.item())
            return loss

        calls.append(run.optimizer.step(closure).item())
        told[attached] = calls
    assert told[True] == told[False]
    assert len(told[True]) >= 2


@pytest.mark.parametrize("how", [how for how, oracle in ORACLES.items() if oracle.pulls])
def test_lbfgs_with_feedback_warns_and_names_the_cure(how: str) -> None:
    model = FULL_BATCH.model()
    with pytest.warns(tb.BelayWarning, match=r"LBFGS.*Use an average that only watches \(Spring\.ema\)"):
        tb.Belay(model, make("LBFGS", model), ORACLES[how].method)


# Subclasses


def test_a_step_that_calls_its_parents_step_counts_once() -> None:
    class Child(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    parent = Run("AdamW", "belay")  # an instance of the parent class: from now on its step fires hooks, too
    model = MLP.model(f32)
    optimizer = Child(model.parameters(), **CASES["AdamW"].arguments)
    fired = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    belay = tb.Belay(model, optimizer, ORACLES["belay"].method)
    advance(model, optimizer, MLP, range(6))
    parent.train(range(6))
    assert len(fired) == 12
    assert belay.step == 6
    assert different(everything(model=model, optimizer=optimizer, belay=belay), parent.everything()) == []

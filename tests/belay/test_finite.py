"""Weights that are nan or inf after a step: ignored, skipped, or raised, as `on_nonfinite` says."""

import copy
from collections.abc import Iterable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.operations import Operations, Reading
from helpers.small import BELAY, EMA, SWINGING, batch, mlp, same, snapshot, train, values, with_batchnorm

LAGGED = tb.Spring(k=0.2, m1=inf, m2=1.0)
METHODS = {
    "belay": BELAY,
    "ema": EMA,
    "lagged": LAGGED,
    "swinging": SWINGING,
    "swa": tb.methods.swa(),
    "lookahead": tb.methods.lookahead(k=2),
    "heavy ball": tb.methods.heavy_ball(0.9),
    "schedule-free": tb.methods.schedule_free(0.9),
}
every_method = pytest.mark.parametrize("how", METHODS)


class Run:
    def __init__(self, method: Any, on_nonfinite: str, *, model: nn.Module | None = None, **options: Any) -> None:
        self.model = mlp() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.belay = tb.Belay(self.model, self.optimizer, method, on_nonfinite=on_nonfinite, **options)

    def train(self, steps: Iterable[int]) -> "Run":
        for step in steps:
            train(self.model, self.optimizer, 1, first=step)
        return self

    def spoil(self, *, at: int = 0, value: float = nan) -> None:
        """A step that leaves one bad number in one parameter."""
        p = self.optimizer.param_groups[0]["params"][at]
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[-1] = value
        self.optimizer.step()

    def averages(self) -> Any:
        return copy.deepcopy(self.belay.state_dict())


@every_method
@pytest.mark.parametrize("impl", ["foreach", "reference"])
def test_a_skipped_step_moves_no_average_and_pulls_no_weight(how: str, impl: str) -> None:
    run = Run(METHODS[how], "skip", impl=impl, spectators={"short": tb.Spring.ema(decay=0.5), "lagged": LAGGED})
    plain = mlp()
    run.train(range(3))
    plain.load_state_dict(run.model.state_dict())
    before = run.averages()
    run.optimizer.zero_grad()
    run.spoil(at=2, value=inf)
    assert same(run.averages(), before)
    assert run.belay.step == 3
    bad = values(run.model)
    assert torch.isinf(bad["2.weight"]).sum() == 1
    assert same({name: bad[name] for name in ("0.weight", "0.bias", "2.bias")}, {
        name: w for name, w in values(plain).items() if name != "2.weight"
    })  # fmt: skip


@every_method
def test_after_the_weights_are_restored_the_run_is_the_one_without_the_bad_step(how: str) -> None:
    """Under a schedule: methods that keep learning rates must not keep that of the bad step."""
    run, other = Run(METHODS[how], "skip"), Run(METHODS[how], "ignore")
    for step in range(6):
        for each in (run, other):
            each.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        if step in (3, 4):
            good = values(run.model)
            run.spoil(value=nan if step == 3 else inf)
            run.model.load_state_dict(good)
        run.train([step])
        other.train([step])
    assert same(snapshot(run.model, run.belay), snapshot(other.model, other.belay))


@every_method
def test_without_a_bad_number_nothing_is_different(how: str) -> None:
    runs = [Run(METHODS[how], choice).train(range(6)) for choice in ("ignore", "skip", "raise")]
    for run in runs[1:]:
        assert same(snapshot(run.model, run.belay), snapshot(runs[0].model, runs[0].belay))


@every_method
def test_raising_names_the_first_bad_parameter_and_changes_no_average(how: str) -> None:
    run = Run(METHODS[how], "raise").train(range(3))
    before = run.averages()
    with pytest.raises(FloatingPointError, match=r"parameter '0.bias' is not finite after .* step 4\..*copy_to_model"):
        run.spoil(at=1)
    assert same(run.averages(), before)
    assert torch.isnan(run.model[0].bias).sum() == 1  # as the optimizer left it
    with pytest.raises(FloatingPointError, match=r"'0.bias'"):  # the bad weight is still present
        run.spoil(at=2)
    run.belay.copy_to_model()
    run.train(range(3, 5))
    assert run.belay.step == 5


def test_ignoring_lets_it_through_and_looks_at_nothing() -> None:
    def operations(choice: str) -> list[str]:
        run = Run(EMA, choice).train(range(2))
        with Operations() as asked:
            run.optimizer.step()
        return asked.names

    assert not [name for name in operations("ignore") if "norm" in name or "finite" in name]
    assert sum("norm" in name for name in operations("skip")) == 1  # one pass
    run = Run(EMA, "ignore").train(range(2))
    run.spoil()
    assert torch.isnan(run.belay.average_state_dict()["0.weight"]).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
def test_one_bad_number_among_many_is_found_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(3), torch.zeros(0), torch.full((40, 70), 6e4), torch.zeros(2, 0)]  # near fp16's largest
    model = nn.ParameterList([nn.Parameter(t.to(dtype)) for t in parameters])
    belay = tb.Belay(model, None, EMA, on_nonfinite="skip")
    belay.before_step()
    belay.after_step()
    assert belay.step == 1
    belay.before_step()
    with torch.no_grad():
        model[2][39, 69] = complex(0, value) if dtype.is_complex else value
    belay.after_step()
    assert belay.step == 1
    assert all(bool(torch.isfinite(t).all()) for t in belay.average_state_dict().values() if t is not model[2])


def test_averaged_buffers_do_not_see_a_skipped_step() -> None:
    run = Run(EMA, "skip", model=with_batchnorm(), buffers="average").train(range(3))
    before = run.averages()
    assert "1.running_mean" in before["averages"]["average"]["buffers"]
    run.model(batch(3))  # the model's own statistics move on
    run.spoil()
    assert same(run.averages(), before)


def test_what_update_bn_found_stays_through_a_skipped_step() -> None:
    run = Run(EMA, "skip", model=with_batchnorm()).train(range(3))
    with run.belay.averaged() as model:
        model(batch(9))
    before = run.averages()
    assert before["averages"]["average"]["own_buffers"] == 1
    run.spoil()
    assert same(run.averages(), before)


@pytest.mark.parametrize("how", ["lagged", "belay"])
@pytest.mark.parametrize("tries", [1, 3])
def test_a_bad_step_that_had_raised_before_leaves_no_trace(how: str, tries: int) -> None:
    def fails(*_: object) -> None:
        raise KeyError("no luck")

    run = Run(METHODS[how], "skip").train(range(3))
    before = run.averages()
    handle = run.optimizer.register_step_pre_hook(fails)
    for _ in range(tries):
        with pytest.raises(KeyError):
            run.optimizer.step()
    handle.remove()
    good = values(run.model)
    run.spoil()
    assert same(run.averages(), before)
    run.model.load_state_dict(good)
    other = Run(METHODS[how], "ignore").train(range(5))
    run.train(range(3, 5))
    assert same(snapshot(run.model, run.belay), snapshot(other.model, other.belay))


@pytest.mark.parametrize("how", ["lagged", "belay"])
@pytest.mark.parametrize("then", [[nan, None], [None], [inf, nan, None], [-inf, None], [inf, -inf, None]], ids=str)
def test_steps_that_raise_are_skipped_and_leave_bad_weights_in_any_order(
    how: str, then: list[float | None], skipping: str
) -> None:
    """The optimizer skips steps itself: at inf it skips, nan leaves bad weights, -inf is both."""

    def fails(*_: object) -> None:
        raise KeyError("no luck")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    belay = tb.Belay(model, optimizer, METHODS[how], on_nonfinite="skip")
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())  # as GradScaler does
    train(model, optimizer, 3)
    before, good = copy.deepcopy(belay.state_dict()), values(model)
    handle = optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    for what in then:
        optimizer.found_inf = torch.tensor(float(what in (inf, -inf)))
        if what is None:
            train(model, optimizer, 1, first=3)
            continue
        if what is nan:
            model[0].weight.grad.fill_(nan)
        if what == -inf:
            model[0].weight.data.fill_(nan)
        optimizer.step()
        model.load_state_dict(good)
        if what is nan or (what == -inf and skipping == "unasked"):  # else the weights are not looked at
            assert same(belay.state_dict(), before)
    train(model, optimizer, 1, first=4)
    other = mlp()
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, fused=True)
    other_belay = tb.Belay(other, other_optimizer, METHODS[how])
    train(other, other_optimizer, 5)
    assert same(snapshot(model, belay), snapshot(other, other_belay))


@pytest.mark.usefixtures("skipping")
@pytest.mark.parametrize("how", ["lagged", "belay", "swa"])
@pytest.mark.parametrize("fused", [False, True])
def test_it_goes_together_with_steps_that_a_scaler_skips(how: str, fused: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    belay = tb.Belay(model, optimizer, METHODS[how], on_nonfinite="skip")
    scaler = torch.amp.GradScaler("cpu")
    for step in range(8):
        before = copy.deepcopy(belay.state_dict())
        optimizer.zero_grad()
        x = batch(step)
        scaler.scale((model(x) - x.sin().sum(1, keepdim=True)).square().mean()).backward()
        good = values(model)
        if step in (2, 5):  # the scaler sees it
            model[0].weight.grad[0, 0] = inf
        if step in (3, 5):  # the scaler does not see it, Belay does
            model[2].bias.data.fill_(nan)
        scaler.step(optimizer)
        scaler.update()
        model.load_state_dict(good) if step in (3, 5) else None
        assert same(belay.state_dict(), before) is (step in (2, 3, 5))
    assert belay.step == 5


@pytest.mark.parametrize(("choice", "reads"), [("ignore", 0), ("skip", 0), ("raise", 1)])
@pytest.mark.parametrize("how", ["belay", "ema", "lagged", "swinging"])
def test_only_raising_waits_for_the_device(how: str, choice: str, reads: int) -> None:
    run = Run(METHODS[how], choice).train(range(2))
    with Reading() as reading:
        run.optimizer.step()
        run.optimizer.step()
    assert reading.count == 2 * reads
    assert run.belay.step == 4


def test_a_coupling_at_every_other_step_is_looked_at_only_then() -> None:
    run = Run(EMA, "raise", every=2).train(range(2))
    good = values(run.model)
    run.spoil()  # nothing moves at this step
    run.model.load_state_dict(good)
    run.train([3])
    run.spoil()
    with pytest.raises(FloatingPointError):
        run.spoil()


def test_an_average_begins_at_finite_weights() -> None:
    for choice in ("skip", "raise"):
        model = mlp()
        model[2].bias.data.fill_(nan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'2.bias' is not finite: no average can begin there"):
            tb.Belay(model, optimizer, EMA, on_nonfinite=choice)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert Run(EMA, "ignore", model=model).belay.step == 0


def test_a_later_start_waits_for_finite_weights_or_raises() -> None:
    run = Run(EMA, "skip", start=2).train([0])
    good = values(run.model)
    run.spoil()
    assert run.belay.state_dict()["began"] == 0
    run.model.load_state_dict(good)
    run.train([2])
    assert run.belay.state_dict()["began"] == 1
    assert same(values(run.model), dict(run.belay.average_state_dict()))
    raising = Run(EMA, "raise", start=2).train([0])
    with pytest.raises(FloatingPointError, match=r"'0.weight' .* step 2"):
        raising.spoil()


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_reset_at_bad_weights_is_refused_and_changes_nothing(choice: str) -> None:
    run = Run(EMA, choice).train(range(2))
    run.model[2].weight.data[0, 0] = inf
    before = snapshot(run.model, run.belay)
    with pytest.raises(ValueError, match=r"'2.weight' is not finite"):
        run.belay.reset()
    assert same(snapshot(run.model, run.belay), before)


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_a_late_parameter_that_is_bad_is_refused_before_anything_moves(choice: str) -> None:
    run = Run(EMA, choice).train(range(2))
    run.model.append(nn.Linear(1, 1))
    run.model[3].bias.data.fill_(nan)
    run.optimizer.add_param_group({"params": run.model[3].parameters()})
    before = values(run.model)
    with pytest.raises(ValueError, match=r"'3.bias' is not finite"):
        run.optimizer.step()
    assert same(values(run.model), before)
    run.model[3].bias.data.fill_(1.0)
    with pytest.warns(tb.BelayWarning, match="3.weight"):
        run.train([2])
    assert len(run.belay.state_dict()["averages"]["average"]["weights"]) == 6


def test_an_optimizer_that_would_take_the_averages_along_steps_on_its_own() -> None:
    """In one pass with the optimizer the weights could not be looked at in between."""
    pytest.importorskip("triton", reason="only the kernels can go along with an optimizer")

    where = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the interpreter runs the kernels

    class Fusing(torch.optim.SGD):
        asked = 0

        def take_over(self, work: object) -> bool:
            self.asked += 1
            return False

    for choice, asked in (("ignore", 1), ("skip", 0), ("raise", 0)):
        model = mlp().to(where)
        optimizer = Fusing(model.parameters(), lr=0.1)
        tb.Belay(model, optimizer, EMA, on_nonfinite=choice, impl="triton")
        train(model, optimizer, 1)
        assert optimizer.asked == asked


def test_a_lagged_average_moves_once_if_the_look_at_the_weights_fails(monkeypatch) -> None:
    """A collective that fails, or a Ctrl-C: the step is taken again."""
    model = mlp()
    belay = tb.Belay(model, None, tb.methods.ema(0.5, follow="before"), on_nonfinite="raise")
    first = belay.average_state_dict()
    for p in model.parameters():
        p.data += 1
    expected = {name: (own + w) / 2 for (name, own), w in zip(first.items(), values(model).values(), strict=True)}
    with pytest.warns(tb.BelayWarning, match="before the first step"):
        belay.before_step()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_norm", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            belay.after_step()
    belay.before_step()
    belay.after_step()
    assert belay.step == 1
    for name, w in belay.average_state_dict().items():
        torch.testing.assert_close(w, expected[name])


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="on_nonfinite='warn'"):
        Run(EMA, "warn")


def test_a_checkpoint_moves_between_the_choices() -> None:
    run, other = Run(EMA, "skip").train(range(2)), Run(EMA, "ignore")
    other.belay.load_state_dict(run.belay.state_dict())
    assert same(other.belay.average_state_dict(), run.belay.average_state_dict())

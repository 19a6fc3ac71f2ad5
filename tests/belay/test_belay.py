"""The public surface of Belay, as a person uses it."""

import contextlib

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.interrupting import SOURCE, Interruption, raising_at
from helpers.operations import foreach_calls
from helpers.small import BELAY, EMA, SWINGING, Still, attached, batch, mlp, same, train, values


def test_inside_averaged_the_model_is_the_average_and_outside_it_is_itself() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 20)
    weights, average = values(model), belay.average_state_dict()
    with belay.averaged() as inside:
        assert inside is model
        assert same(values(model), average)
    assert same(values(model), weights)
    assert not same(weights, average)


def test_an_exception_inside_averaged_gives_the_weights_back() -> None:
    model, optimizer, belay = attached(BELAY)
    train(model, optimizer, 3)
    weights, average = values(model), belay.average_state_dict()
    with pytest.raises(KeyError), belay.averaged():
        raise KeyError("from the evaluation")
    assert same(values(model), weights)
    assert same(belay.average_state_dict(), average)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_swapping_loses_no_bit_of_weights_or_average(dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(EMA, model=mlp(dtype))
    train(model, optimizer, 5)
    weights, state = values(model), belay.state_dict()["averages"]["average"]["weights"]
    kept = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(3):
        with belay.averaged():
            assert same(values(model), {name: tensor.to(dtype) for name, tensor in kept.items()})
    assert same(values(model), weights)
    assert same(belay.state_dict()["averages"]["average"]["weights"], kept)


def test_averaged_within_averaged_of_the_same_name_changes_nothing() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    average = belay.average_state_dict()
    with belay.averaged():
        with belay.averaged():
            assert same(values(model), average)
        assert same(values(model), average)


def test_evaluation_under_inference_mode_leaves_a_trainable_model() -> None:
    model, optimizer, belay = attached(EMA, buffers="average", model=nn.Sequential(mlp(), nn.BatchNorm1d(1)))
    train(model, optimizer, 2)
    with torch.inference_mode(), belay.averaged():
        model(batch(0))  # in training mode: the statistics move too
    train(model, optimizer, 2)
    assert belay.step == 4


@pytest.mark.parametrize("method", [BELAY, EMA, SWINGING, tb.methods.lookahead(k=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::torchbelay.BelayWarning")
def test_the_export_and_the_state_are_right_inside_averaged_too(method: tb.Method, dtype: torch.dtype) -> None:
    model, optimizer, belay = attached(method, model=mlp(dtype), spectators={"short": tb.Spring.ema(decay=0.5)})
    train(model, optimizer, 7)
    outside = [belay.average_state_dict(), belay.average_state_dict("short"), belay.stats()]
    state = belay.state_dict()
    for name in ("average", "short"):
        with belay.averaged(name):
            inside = [belay.average_state_dict(), belay.average_state_dict("short"), belay.stats()]
            inside_state = belay.state_dict()
        assert same(inside, outside)
        assert same(inside_state, state)


def test_the_export_loads_into_a_plain_model_and_shares_nothing_with_it() -> None:
    model, optimizer, belay = attached(EMA, model=nn.Sequential(mlp(), nn.BatchNorm1d(1)))
    train(model, optimizer, 5)
    exported = belay.average_state_dict()
    plain = nn.Sequential(mlp(seed=1), nn.BatchNorm1d(1))
    plain.load_state_dict(exported, strict=True)
    with belay.averaged():
        assert torch.equal(plain.eval()(batch(9)), model.eval()(batch(9)))
    model.train()
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    train(model, optimizer, 2)
    assert same(exported, kept)


def test_spectators_watch_the_weights_as_they_are_after_the_pull() -> None:
    model, optimizer, belay = attached(BELAY, spectators={"short": tb.Spring.ema(decay=0.5)})
    by_hand = values(model)
    for step in range(6):
        train(model, optimizer, 1, first=step)
        by_hand = {name: torch.lerp(old, model.state_dict()[name], 0.5) for name, old in by_hand.items()}
    assert same(belay.average_state_dict("short"), by_hand)


def test_spectators_do_not_disturb_the_pair() -> None:
    model, optimizer, belay = attached(BELAY, spectators={"a": EMA, "b": tb.methods.swa()})
    train(model, optimizer, 6)
    alone, optimizer_alone, belay_alone = attached(BELAY)
    train(alone, optimizer_alone, 6)
    assert same(values(model), values(alone))
    assert same(belay.average_state_dict(), belay_alone.average_state_dict())


def test_before_start_the_average_is_the_model_itself() -> None:
    model, optimizer, belay = attached(EMA, start=3)
    train(model, optimizer, 2)
    assert same(belay.average_state_dict(), values(model))
    with belay.averaged():
        assert same(belay.average_state_dict(), values(model))
    assert belay.stats()["tension"] == 0
    assert "begins after step 3" in repr(belay)
    train(model, optimizer, 1, first=2)
    at_start = values(model)
    assert same(belay.average_state_dict(), at_start)
    train(model, optimizer, 1, first=3)
    expected = {name: torch.lerp(old, model.state_dict()[name], 1 - 0.9) for name, old in at_start.items()}
    assert same(belay.average_state_dict(), expected)


def test_all_averages_begin_or_none_wherever_an_exception_comes() -> None:
    files = [SOURCE / "belay" / name for name in ("average.py", "averages.py")]

    def first_step(line: int | None) -> tuple[nn.Module, torch.optim.Optimizer, tb.Belay, int]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, BELAY, spectators={"short": EMA}, start=1)
        with contextlib.suppress(Interruption), raising_at(line, files) as place:
            train(model, optimizer, 1)
        return model, optimizer, belay, place.lines

    began = set()
    for line in range(first_step(None)[3]):
        model, optimizer, belay, _ = first_step(line)
        began.add(belay.state_dict()["began"])
        if not belay.state_dict()["began"]:
            alone = mlp()
            alone.load_state_dict(model.state_dict())
            train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 1, first=1)
            train(model, optimizer, 1, first=1)
            assert same(values(model), values(alone)), f"line {line}: an average pulls that has not begun"
    assert began == {0, 1}


def test_every_counts_from_the_start_of_the_average() -> None:
    model, optimizer, belay = attached(EMA, every=3, start=1)
    train(model, optimizer, 1)
    start = values(model)
    train(model, optimizer, 2, first=1)
    assert same(belay.average_state_dict(), start)
    train(model, optimizer, 1, first=3)
    for name, old in start.items():
        expected = torch.lerp(old, model.state_dict()[name], 1 - 0.9**3)
        torch.testing.assert_close(belay.average_state_dict()[name], expected, rtol=1e-6, atol=1e-7)


def test_by_hand_is_the_same_as_by_hooks() -> None:
    hooked, optimizer, belay = attached(BELAY)
    train(hooked, optimizer, 5)
    model = mlp()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manual = tb.Belay(model, None, BELAY)
    for step in range(5):
        x = batch(step)
        plain.zero_grad()
        (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        manual.before_step()
        plain.step()
        manual.after_step()
    assert same(values(model), values(hooked))
    assert same(manual.average_state_dict(), belay.average_state_dict())
    assert manual.step == 5


def test_by_hand_methods_take_the_learning_rate() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    belay = tb.Belay(model, None, tb.methods.easgd(rho=2.0))
    for lr in (0.1, 0.2):
        belay.before_step(lr=lr)
        with torch.no_grad():
            model.weight.add_(1.0)
        belay.after_step()
    # w1 = 1, w2 = 0 after the first; then α = 0.2·2: w1 = 1 − 0.4 + 1, w2 = 0.4
    assert model.weight.item() == pytest.approx(1.6)
    assert belay.average_state_dict()["weight"].item() == pytest.approx(0.4)


def test_reset_begins_again_at_the_weights() -> None:
    model, optimizer, belay = attached(tb.methods.swa(), spectators={"short": EMA})
    train(model, optimizer, 5)
    model.load_state_dict(mlp(seed=3).state_dict())
    belay.reset()
    assert same(belay.average_state_dict(), values(model))
    assert same(belay.average_state_dict("short"), values(model))
    assert set(belay.state_dict()["averages"]["average"]["ages"].values()) == {0}
    train(model, optimizer, 1)
    assert same(belay.average_state_dict(), values(model))  # swa counts from 1 again


def test_reset_brings_velocities_to_rest() -> None:
    model, optimizer, belay = attached(SWINGING)
    train(model, optimizer, 5)
    belay.reset()
    saved = belay.state_dict()["averages"]["average"]
    assert all(not v.any() for kind in ("velocities1", "velocities2") for v in saved[kind].values())
    assert len(saved["velocities1"]) == 4


def test_copy_to_model_is_for_good() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 5)
    average = belay.average_state_dict()
    belay.copy_to_model()
    assert same(values(model), average)
    assert belay.stats()["tension"] == 0


def test_after_detach_the_average_is_still_there_and_moves_no_more() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 3)
    average = belay.average_state_dict()
    belay.detach()
    belay.detach()
    train(model, optimizer, 2)
    assert same(belay.average_state_dict(), average)
    with belay.averaged():
        assert same(values(model), average)


@pytest.mark.parametrize(
    ("method", "scale", "regime"),
    [
        (BELAY, 0.95 / 3, "velocity-free"),
        (SWINGING, 2 * 0.95 * 10 / 15, "underdamped"),
        (EMA, 1.0, "velocity-free"),
        (tb.methods.lookahead(k=5, alpha=0.5), 0.5, "lookahead"),
        (tb.methods.schedule_free(0.9), 1.0, "schedule_free"),
        (tb.methods.switch_ema(decay=0.5, every=2), 1 - 0.5 * 0.75 / (2 * 0.5), "switch_ema"),
    ],
    ids=str,
)
def test_stats_say_what_is_going_on(method: tb.Method, scale: float, regime: str) -> None:
    model, optimizer, belay = attached(method)
    train(model, optimizer, 4)
    stats = belay.stats()
    average = belay.average_state_dict()
    tension = sum((average[name] - w).double().square().sum() for name, w in model.state_dict().items()).sqrt()
    size = sum(w.double().square().sum() for w in model.state_dict().values()).sqrt()
    assert stats["step"] == 4
    assert stats["tension"] == pytest.approx(tension.item(), rel=1e-6)
    assert stats["tension_ratio"] == pytest.approx((tension / size).item(), rel=1e-6)
    assert stats["effective_lr"] == pytest.approx(scale * 1e-2, rel=1e-9)
    assert belay.regime == regime


def test_stats_of_a_drift_agree_with_the_effective_learning_rate() -> None:
    """Under a constant gradient the pair moves at the `effective_lr` of `stats()`, with `every` too."""
    for options in ({}, {"every": 4}):
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        belay = tb.Belay(model, optimizer, BELAY, **options)
        for step in range(804):
            if step == 400:
                start = model.weight.item()
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        assert (start - model.weight.item()) / 404 == pytest.approx(belay.stats()["effective_lr"], rel=1e-9)


def test_looking_at_the_stats_changes_nothing_that_follows() -> None:
    looked, optimizer, belay = attached(tb.methods.schedule_free(0.9))
    belay.stats()
    optimizer.param_groups[0]["lr"] = 1e-3
    train(looked, optimizer, 3)
    plain, optimizer_plain, _ = attached(tb.methods.schedule_free(0.9))
    optimizer_plain.param_groups[0]["lr"] = 1e-3
    train(plain, optimizer_plain, 3)
    assert same(values(looked), values(plain))


def test_stats_name_the_learning_rate_of_every_group() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], lr=0.1
    )
    belay = tb.Belay(model, optimizer, EMA)
    stats = belay.stats()
    assert stats["effective_lr"] == pytest.approx(0.1)
    assert stats["effective_lr/1"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("method", "separate"), [(EMA, False), (tb.methods.swa(), False), (tb.methods.schedule_free(0.9), True)], ids=str
)
def test_groups_are_moved_together_unless_the_method_asks_for_their_learning_rates(
    method: tb.Method, separate: bool
) -> None:
    """With a learning rate for each layer there are many groups, and each move has its price."""

    def moves(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        tb.Belay(model, optimizer, method, impl="foreach")
        return foreach_calls(optimizer.step)

    model = mlp()
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
    assert len(groups) == 4
    one = moves(other := mlp(), Still(other.parameters()))
    assert one > 0
    assert moves(model, Still(groups)) == (4 * one if separate else one)


@pytest.mark.parametrize(("impl", "chosen"), [("auto", "foreach"), ("foreach", "foreach"), ("reference", "reference")])
def test_repr_says_what_runs(impl: str, chosen: str) -> None:
    model, optimizer, belay = attached(BELAY, impl=impl, spectators={"short": EMA})
    train(model, optimizer, 2)
    text = repr(belay)
    for part in ("Spring(k=1.0, m1=10.0, m2=20.0)", "4 tensors, 26 weights", "float32", "spectators short", "step 2"):
        assert part in text
    assert f"impl={chosen!r}" in text


@pytest.mark.parametrize("follow", ["before", "after"])
def test_m1_infinite_is_an_ordinary_average(follow: str) -> None:
    """Claim: EMA is BELAY at m1 = ∞, in either convention, and the weights do not notice."""
    model, optimizer, belay = attached(tb.Spring(k=0.2, m1=float("inf"), m2=1.0, follow=follow))
    plain = mlp()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    average = values(plain)
    for step in range(10):
        old = values(plain)
        train(plain, plain_optimizer, 1, first=step)
        seen = old if follow == "before" else plain.state_dict()
        average = {name: torch.lerp(average[name], seen[name], 0.1) for name in average}
    train(model, optimizer, 10)
    assert same(values(model), values(plain))
    assert same(belay.average_state_dict(), average)


def test_a_method_of_ones_own_needs_no_learning_rate_by_hand() -> None:
    class Mine:
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            return tb.Coupling(0.0, 0.1, 1.0, 0.1)

    belay = tb.Belay(mlp(), None, Mine())
    belay.before_step()
    belay.after_step()
    assert belay.step == 1


def test_stats_have_no_effective_rate_where_no_rate_is_known() -> None:
    belay = tb.Belay(mlp(), None, tb.methods.heavy_ball(0.9))
    assert "effective_lr" not in belay.stats()
    belay.before_step(lr=0.5)
    belay.after_step()
    assert belay.stats()["effective_lr"] == pytest.approx(0.5 / (1 - 0.9))


def test_stats_at_learning_rate_zero_say_zero() -> None:
    _, optimizer, belay = attached(BELAY)
    optimizer.param_groups[0]["lr"] = 0.0
    assert belay.stats()["effective_lr"] == 0.0


def test_buffers_are_averaged_in_the_rhythm_of_the_first_parameters() -> None:
    """With every=2 and parameters that were born at odd and even steps, buffers still move at every other step."""
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, every=2, buffers="average")
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.warns(tb.BelayWarning):
        train(model, optimizer, 1, first=1)
    moved = []
    for step in range(2, 6):
        before = belay.average_state_dict()["1.running_mean"]
        train(model, optimizer, 1, first=step)
        moved.append(not torch.equal(before, belay.average_state_dict()["1.running_mean"]))
    assert moved == [False, True, False, True]

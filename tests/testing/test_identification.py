"""`identify` finds the four numbers of any averaging code, says what is not linear, and names bugs."""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import torchbelay as tb
from helpers import averaging_code as code
from helpers.methods_under_test import METHODS
from torchbelay.physics.coupling import Coupling, watch
from torchbelay.testing import Identification, identify

STEPS = 24


def quickly(factory: Any, **options: Any) -> Identification:
    return identify(factory, **{"steps": STEPS} | options)


def only_problem(factory: Any, **options: Any) -> str:
    """Return the one problem of the code, which its paragraph has too."""
    found = quickly(factory, **options)
    (problem,) = found.problems
    assert str(found).count(problem) == 1
    return problem


def numbers(c: Coupling) -> tuple[float, ...]:
    return c.a, c.b, c.p, c.q


# The four numbers ----------------------------------------------------------------------------------------------------


SUSPECT = {  # methods of ours that would be mistakes in most code
    "ema, a copy": ["Every update() copies the weights"],
    "ema, standing still": ["The average does not move"],
}


@pytest.mark.parametrize("name", [name for name in METHODS if "diloco" not in name])
def test_the_coupling_of_our_own_methods_comes_back(name: str) -> None:
    method = METHODS[name]()
    found = quickly(code.belay(METHODS[name]))
    assert len(found.couplings) == STEPS
    for t, c in enumerate(found.couplings, start=1):
        expected = method.coupling(t, 0.1)
        assert (c.p, c.q) == pytest.approx((expected.p, expected.q), abs=1e-12)
        if t not in found.hidden:
            assert (c.a, c.b) == pytest.approx((expected.a, expected.b), abs=1e-12)
    assert 1 in found.hidden  # the average begins at the weights, so that nobody can see how it would close a distance
    if name == "ema, a copy":  # it is always at the weights
        assert len(found.hidden) == STEPS
    else:
        assert len(found.hidden) <= STEPS / 2
    problems = [p for p in found.problems if not p.startswith("Only every")]
    assert [p.partition(f" in {STEPS}")[0].partition(",")[0] for p in problems] == SUSPECT.get(name, [])


def test_a_method_with_a_velocity_is_told_to_be_more_than_four_numbers() -> None:
    found = quickly(code.belay(METHODS["diloco"]))
    assert not found.couplings
    assert "a linear map, but not of four numbers: update 6 depends on more than the weights" in found.reason


def test_a_method_of_the_learning_rate_has_the_numbers_of_that_rate() -> None:
    found = quickly(code.belay(lambda: tb.methods.schedule_free(0.8, weight_lr_power=1.0), lr=0.3))
    method = tb.methods.schedule_free(0.8, weight_lr_power=1.0)
    assert numbers(found.couplings[9]) == pytest.approx(numbers(method.coupling(10, 0.3)), abs=1e-12)


@pytest.mark.thorough
@given(
    a=st.floats(-0.4, 0.9),
    b=st.floats(0.001, 1.0),
    p=st.floats(-1.0, 1.0),
    q=st.floats(-1.0, 1.0),
)
@settings(max_examples=25, deadline=None)
def test_any_constant_coupling_comes_back(a: float, b: float, p: float, q: float) -> None:
    coupling = Coupling(a, b, p, q)
    found = identify(code.coupled([coupling] * 10), steps=10)
    assert found.reason is None
    for t, c in enumerate(found.couplings, start=1):
        assert (c.p, c.q) == pytest.approx((p, q), abs=1e-12)
        if t not in found.hidden:
            apart = abs(p - q) if t > 1 else 1.0
            assert (c.a, c.b) == pytest.approx((a, b), abs=1e-12 / min(1.0, max(apart, 1e-5)) * 10)
    if abs(p - q) > 0.1:
        assert found.hidden == (1,)


@pytest.mark.thorough
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_couplings_that_change_at_every_update_come_back(seed: int) -> None:
    draw = random.Random(seed)
    couplings = [
        Coupling(draw.uniform(-0.2, 0.3), draw.uniform(0.2, 0.9), draw.uniform(0.8, 1), draw.uniform(0, 0.5))
        for _ in range(12)
    ]
    found = identify(code.coupled(couplings), steps=12)
    for expected, c in zip(couplings[1:], found.couplings[1:], strict=True):
        assert numbers(c) == pytest.approx(numbers(expected), abs=1e-11)


def test_growth_and_eigenvalues_are_those_of_the_coupling() -> None:
    found = quickly(code.coupled([Coupling(0.05, 0.025, 0.95, 0.0)] * STEPS))
    assert found.growth == pytest.approx(0.925, abs=1e-12)
    assert found.eigenvalues == pytest.approx((1.0, 0.925), abs=1e-12)


def test_a_hidden_coupling_takes_the_numbers_of_an_update_with_the_same_push() -> None:
    found = quickly(code.coupled([Coupling(0.05, 0.025, 0.95, 0.0)] * STEPS))
    assert found.hidden == (1,)
    assert numbers(found.couplings[0]) == pytest.approx((0.05, 0.025, 0.95, 0.0), abs=1e-12)


def test_an_average_that_begins_elsewhere_hides_nothing() -> None:
    found = quickly(code.never_initialised)
    assert found.hidden == ()
    assert [c.b for c in found.couplings] == pytest.approx([0.001] * STEPS, abs=1e-12)


# The bugs ------------------------------------------------------------------------------------------------------------


def test_a_decay_used_as_one_minus_decay_is_named() -> None:
    problem = only_problem(code.swapped_decay)
    assert "keeps 0.001 of the average and takes 0.999 of the weights" in problem
    assert "decay and 1 − decay are swapped" in problem


def test_an_average_that_is_never_initialised_is_named() -> None:
    found = quickly(code.never_initialised)
    assert found.start == "elsewhere"
    assert found.left == pytest.approx(0.999**STEPS)
    (problem,) = found.problems
    assert "never begins at the weights" in problem
    assert "98% is left after 24 updates" in problem


def test_a_wrong_sign_is_named_with_the_growth() -> None:
    problem = only_problem(code.wrong_sign)
    assert "wrong sign" in problem
    assert "grows 1.01× per update" in problem


def test_a_feedback_with_the_wrong_sign_is_named() -> None:
    found = quickly(code.wrong_feedback)
    # w2' = 0.99·w2 + 0.01·w1*, then w1' = w1* + 0.02·(w1* − w2')
    assert numbers(found.couplings[-1]) == pytest.approx((-0.0198, 0.01, 1.0198, 0.01), abs=1e-12)
    (problem,) = found.problems
    assert "feedback pushes the weights away" in problem
    assert "grows 1.0098× per update" in problem


def test_a_feedback_that_pushes_as_fast_as_the_average_follows_is_named() -> None:
    assert "never come together" in only_problem(code.coupled([Coupling(-0.1, 0.1, 1.1, 0.1)] * STEPS))


def test_an_overshoot_is_named() -> None:
    assert "overshoots" in only_problem(code.loop(lambda shadow, p, t: shadow.lerp_(p, 2.1)))


def test_updates_lost_on_every_second_step_are_named_and_every_2_accepts_them() -> None:
    problem = only_problem(code.every_second_lost)
    assert "Only every second update() moves the average (numbers 1, 3, 5, …)" in problem
    assert "every=2" in problem
    assert quickly(code.every_second_lost, every=2).problems == ()


def test_another_rhythm_than_the_one_meant_is_named() -> None:
    assert "not every third, as every=3 says" in only_problem(code.ema(), every=3)
    irregular = code.loop(lambda shadow, p, t: shadow.lerp_(p, 0.1) if t in (2, 3, 7, 12, 13) else None)
    assert "irregular updates: numbers 2, 3, 7, …" in only_problem(irregular)


def test_an_average_that_shares_the_memory_of_the_weights_is_named() -> None:
    def factory(model: nn.Module) -> Any:
        shadow = {name: p.data for name, p in model.named_parameters()}  # no clone

        def update() -> None:
            for name, p in model.named_parameters():
                shadow[name].lerp_(p.data, 0.1)

        return update, lambda: shadow

    assert "shares their memory" in only_problem(factory)


def test_weights_of_an_average_that_do_not_add_up_to_1_are_named() -> None:
    problem = only_problem(code.loop(lambda shadow, p, t: shadow.mul_(0.99).add_(p, alpha=0.02)))
    assert "0.02·weights + 0.99·average, which add up to 1.01 and not to 1" in problem


def test_an_average_that_never_moves_is_named() -> None:
    found = quickly(code.loop(lambda shadow, p, t: None))
    assert found.coupling is found.eigenvalues is None
    (problem,) = found.problems
    assert "does not move in 24 updates" in problem
    assert "steps=" in problem


def test_an_average_that_only_copies_is_named() -> None:
    assert "copies the weights" in only_problem(code.loop(lambda shadow, p, t: shadow.copy_(p)))


def test_a_copy_at_every_tenth_update_is_a_target_network_and_no_problem() -> None:
    sync = code.loop(lambda shadow, p, t: shadow.copy_(p) if t % 10 == 0 else None)
    assert quickly(sync, steps=40, every=10).problems == ()


def test_a_rising_decay_below_one_half_is_no_swapped_decay() -> None:
    assert quickly(code.loop(lambda shadow, p, t: shadow.lerp_(p, 9 / (10 + t))), steps=6).problems == ()


def test_parameters_that_are_averaged_unlike_others_are_named() -> None:
    uneven = code.loop(lambda shadow, p, t: shadow.lerp_(p, 0.1 if p.ndim > 1 else 0.2))
    assert "'layer.bias' is averaged otherwise than 'layer.weight'" in only_problem(uneven)

    def matrices(model: nn.Module) -> Any:
        shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}

        def update() -> None:
            for name, p in model.named_parameters():
                if name in shadow:
                    shadow[name].lerp_(p.detach(), 0.1)

        return update, lambda: shadow

    assert only_problem(matrices) == "'layer.bias' has no average."


# What is no linear map -----------------------------------------------------------------------------------------------


def test_a_clipped_update_is_not_fitted() -> None:
    found = quickly(code.loop(lambda shadow, p, t: shadow.add_((0.1 * (p - shadow)).clamp(-0.2, 0.2))))
    assert found.couplings == ()
    assert found.growth is found.warmup is found.idle is None
    assert found.reason == "not a linear map: an impulse of -3 does not move it -3 times as far as an impulse of 1"
    assert found.problems == (f"It is {found.reason}.",)


def test_small_changes_that_are_dropped_are_noticed() -> None:
    found = quickly(
        code.loop(lambda shadow, p, t: shadow.add_(torch.where((p - shadow).abs() > 0.1, 0.1 * (p - shadow), 0.0)))
    )
    assert "not a linear map" in (found.reason or "")


def test_a_norm_over_all_weights_is_noticed() -> None:
    found = quickly(code.loop(lambda shadow, p, t: shadow.lerp_(p, float(0.1 / (1 + (p - shadow).norm())))))
    assert found.reason == "not a linear map: what one weight does depends on how the others move"


def test_a_median_of_the_last_weights_is_noticed() -> None:
    def factory(model: nn.Module) -> Any:
        seen: list[dict[str, torch.Tensor]] = [code.shadow_of(model)]

        def read() -> dict[str, torch.Tensor]:
            return {name: torch.stack([old[name] for old in seen[-5:]]).median(0).values for name in seen[0]}

        return (lambda: seen.append(code.shadow_of(model))), read

    assert "not a linear map" in (quickly(factory).reason or "")


def test_a_velocity_is_linear_but_not_of_four_numbers() -> None:
    spring = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
    found = quickly(code.belay(lambda: spring))
    assert "a linear map, but not of four numbers" in (found.reason or "")
    assert "velocity" in (found.reason or "")


def test_an_average_of_the_last_five_weights_is_not_of_four_numbers() -> None:
    def factory(model: nn.Module) -> Any:
        seen = [code.shadow_of(model)]

        def read() -> dict[str, torch.Tensor]:
            return {name: sum(old[name] for old in seen[-5:]) / len(seen[-5:]) for name in seen[0]}

        return (lambda: seen.append(code.shadow_of(model))), read

    assert "not of four numbers" in (quickly(factory).reason or "")


def test_code_that_draws_random_numbers_of_its_own_is_noticed() -> None:
    draw = random.Random(0)
    found = quickly(code.loop(lambda shadow, p, t: shadow.lerp_(p, 0.1 * draw.random())))
    assert "two equal runs differ" in (found.reason or "")


def test_torchs_random_numbers_are_the_same_in_every_run_and_left_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = quickly(code.loop(lambda shadow, p, t: shadow.add_(1e-3 * torch.randn(()).double() * (p - shadow))))
    assert torch.equal(torch.get_rng_state(), before)
    assert "two equal runs differ" not in (found.reason or "")


# Hostile code --------------------------------------------------------------------------------------------------------


def test_a_factory_that_raises_is_said_and_not_raised() -> None:
    def factory(model: nn.Module) -> Any:
        raise ValueError("needs\na transformer.")

    found = quickly(factory)
    assert found.problems == ("It cannot be identified: factory(model) raised ValueError: needs a transformer.",)
    assert str(found) == found.problems[0]
    assert found.couplings == ()


def test_a_library_that_exits_does_not_end_the_process() -> None:
    def factory(model: nn.Module) -> Any:
        raise SystemExit(3)

    assert "factory(model) raised SystemExit: 3" in only_problem(factory)


def test_an_interrupt_is_not_swallowed() -> None:
    def factory(model: nn.Module) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quickly(factory)


def test_the_update_that_raises_is_numbered() -> None:
    def move(shadow: torch.Tensor, p: torch.Tensor, t: int) -> None:
        if t == 3:
            raise KeyError("scaler")

    assert "update() number 3 raised KeyError: 'scaler'" in only_problem(code.loop(move))


def test_an_update_that_forgets_no_grad_is_named() -> None:
    def update(average: nn.Module, model: nn.Module) -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs, alpha=0.1)

    assert "a leaf Variable that requires grad" in only_problem(code.deep_copied(update))


def test_an_average_that_keeps_autograds_graph_is_named() -> None:
    def factory(model: nn.Module) -> Any:
        shadow = dict(model.named_parameters())

        def update() -> None:
            for name, p in model.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p

        return update, lambda: {name: w * 1.0 for name, w in shadow.items()}

    found = quickly(factory)
    assert any("keeps the graph of autograd" in problem for problem in found.problems)


def test_a_read_that_computes_with_parameters_keeps_no_history() -> None:
    @torch.no_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)

    def factory(model: nn.Module) -> Any:
        average = copy.deepcopy(model)  # its parameters require gradients
        return (lambda: update(average, model)), lambda: {name: 1.0 * p for name, p in average.named_parameters()}

    assert quickly(factory).problems == ()


def test_a_factory_that_fails_on_other_models_only_is_described_on_the_plain_one() -> None:
    def factory(model: nn.Module) -> Any:
        return code.ema(0.1)(model) if len(list(model.parameters())) == 2 else None

    found = quickly(factory)
    assert len(found.couplings) == STEPS
    assert "must return (update, read)" in found.tied.error
    assert [problem.partition(":")[0] for problem in found.problems] == ["Frozen weights", "Tied weights"]


def test_a_read_that_breaks_if_it_was_not_called_before_is_said() -> None:
    def factory(model: nn.Module) -> Any:
        update, read = code.ema(0.1)(model)
        reads = 0

        def impatient() -> Any:
            nonlocal reads
            reads += 1
            return None if reads == 1 else read()

        return update, impatient

    assert "read() returned NoneType" in only_problem(factory)


def test_a_read_that_updates_is_named() -> None:
    def factory(model: nn.Module) -> Any:
        shadow = code.shadow_of(model)

        def read() -> Any:
            for name, p in model.named_parameters():
                shadow[name].lerp_(p.detach(), 0.1)
            return shadow

        return (lambda: None), read

    assert "read() changes the average" in only_problem(factory)


def test_a_read_that_swaps_the_average_into_the_model_is_named_and_undone() -> None:
    def factory(model: nn.Module) -> Any:
        shadow = code.shadow_of(model)

        def update() -> None:
            for name, p in model.named_parameters():
                shadow[name].lerp_(p.detach(), 0.1)

        @torch.no_grad()
        def read() -> Any:
            for name, p in model.named_parameters():
                p.copy_(shadow[name])
            return model

        return update, read

    found = quickly(factory)
    assert found.problems == ("read() changes the weights of the model; return a copy of the average instead.",)
    assert numbers(found.couplings[-1]) == pytest.approx((0, 0.1, 1, 0.1), abs=1e-12)


def test_an_average_that_can_be_read_only_after_some_updates_is_found() -> None:
    def factory(model: nn.Module) -> Any:
        shadow: dict[str, torch.Tensor] = {}
        updates = 0

        def update() -> None:
            nonlocal updates
            updates += 1
            for name, p in model.named_parameters():
                if updates == 3:
                    shadow[name] = p.detach().clone()
                elif updates > 3:
                    shadow[name].lerp_(p.detach(), 0.1)

        return update, lambda: shadow if updates >= 3 else None

    found = quickly(factory)
    assert (found.start, found.problems) == ("at the weights", ())
    assert [c.b for c in found.couplings[4:]] == pytest.approx([0.1] * (STEPS - 4), abs=1e-12)


def test_an_average_that_is_made_of_zeros_in_the_first_update_is_named() -> None:
    def factory(model: nn.Module) -> Any:
        shadow: dict[str, torch.Tensor] = {}

        def update() -> None:
            for name, p in model.named_parameters():
                shadow.setdefault(name, torch.zeros_like(p)).lerp_(p.detach(), 0.1)

        return update, lambda: shadow

    found = quickly(factory)
    assert found.start == "elsewhere"
    assert "never begins at the weights" in " ".join(found.problems)
    assert found.idle == "counts"


def test_an_average_that_is_corrected_for_zeros_is_right_although_it_is_0_by_0_at_first() -> None:
    def factory(model: nn.Module) -> Any:
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        updates = 0

        def update() -> None:
            nonlocal updates
            updates += 1
            for name, p in model.named_parameters():
                sums[name].lerp_(p.detach(), 0.1)

        return update, lambda: {name: s / (1 - 0.9**updates) for name, s in sums.items()}

    found = quickly(factory)
    assert (found.warmup.law, found.warmup.numbers["beta"]) == ("debiased", pytest.approx(0.9))
    assert [c.b for c in found.couplings] == pytest.approx([0.1 / (1 - 0.9**t) for t in range(1, STEPS + 1)], abs=1e-12)
    assert found.problems == ()


def test_an_average_that_is_never_readable_says_what_read_returned() -> None:
    problem = only_problem(lambda model: ((lambda: None), (lambda: None)))
    assert "read() returned NoneType; it must return a state dict" in problem


def test_code_that_takes_only_float32_is_identified_in_float32() -> None:
    def factory(model: nn.Module) -> Any:
        assert next(model.parameters()).dtype is torch.float32
        return code.ema(0.01)(model)

    found = quickly(factory)
    assert (found.weights_dtype, found.dtype) == ("float32", "float32")
    assert [c.b for c in found.couplings] == pytest.approx([0.01] * STEPS, abs=1e-5)
    assert found.problems == ()
    assert "AssertionError" in found.sixteen_bit[0].error


@pytest.mark.parametrize(("kept", "digits"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_an_average_of_another_dtype_is_said(kept: torch.dtype, digits: float) -> None:
    found = quickly(code.loop(lambda shadow, p, t: shadow.lerp_(p.to(kept), 0.1), start=lambda p: p.to(kept)))
    name = str(kept).removeprefix("torch.")
    assert (found.weights_dtype, found.dtype) == ("float64", name)
    assert f"The average of float64 weights is {name}." in str(found)
    assert [c.b for c in found.couplings] == pytest.approx([0.1] * STEPS, abs=digits)


def test_a_factory_that_casts_the_model_is_followed() -> None:
    found = quickly(lambda model: code.ema(0.1)(model.float()))
    assert found.dtype == "float32"
    assert found.couplings[-1].b == pytest.approx(0.1, abs=1e-5)


def test_numbers_that_explode_end_the_record() -> None:
    found = quickly(code.loop(lambda shadow, p, t: shadow.lerp_(p, -9.0)))
    assert found.growth == pytest.approx(10)
    assert 2 <= len(found.couplings) < 10


def test_values_that_are_not_finite_are_said() -> None:
    assert "not finite" in only_problem(code.loop(lambda shadow, p, t: None, start=lambda p: p * float("nan")))


def test_warnings_of_the_code_are_silenced() -> None:
    def move(shadow: torch.Tensor, p: torch.Tensor, t: int) -> None:
        warnings.warn("deprecated since 1857", DeprecationWarning, stacklevel=2)
        shadow.lerp_(p, 0.1)

    assert quickly(code.loop(move)).problems == ()


def test_it_works_under_inference_mode_and_another_default_dtype_and_device() -> None:
    torch.set_default_dtype(torch.float16)
    try:
        with torch.inference_mode(), torch.device("meta"):
            found = quickly(code.averaged_model())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == quickly(code.averaged_model())
    assert (found.weights_dtype, found.problems) == ("float64", ())


def test_an_average_of_an_average_has_a_state_that_read_does_not_show() -> None:
    def factory(model: nn.Module) -> Any:
        inner, outer = code.shadow_of(model), code.shadow_of(model)

        def update() -> None:
            for name, p in model.named_parameters():
                inner[name].lerp_(p.detach(), 0.1)
                outer[name].lerp_(inner[name], 0.1)

        return update, lambda: outer

    assert "not of four numbers" in only_problem(factory)


# Arguments -----------------------------------------------------------------------------------------------------------


def test_what_is_not_a_factory_is_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match=r"factory=3 is not a function; give one that takes a model"):
        identify(3)  # type: ignore[arg-type]
    for wrong in (None, 1, (1, 2), (print,), nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"must return \(update, read\)"):
            quickly(lambda model, wrong=wrong: wrong)


def test_steps_and_every_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"steps=3 is too small; it needs steps ≥ 4"):
        identify(code.ema(), steps=3)
    with pytest.raises(TypeError, match=r"steps=10\.0 is not a whole number"):
        identify(code.ema(), steps=10.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0 is too small"):
        identify(code.ema(), every=0)


def test_steps_that_would_take_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"steps=2049 is too large; it needs steps ≤ 2048, as memory grows"):
        identify(code.ema(), steps=2049)


@pytest.mark.parametrize("steps", [4, 5, 7])
def test_few_steps_are_enough_for_the_numbers(steps: int) -> None:
    found = quickly(code.ema(0.1), steps=steps)
    assert [c.b for c in found.couplings] == pytest.approx([0.1] * steps, abs=1e-12)
    assert found.problems == ()


# The words -----------------------------------------------------------------------------------------------------------


def test_the_paragraph_says_everything_once() -> None:
    said = str(quickly(code.ema(0.01), steps=64))
    assert "\n" not in said
    assert said == (
        "The average follows the weights and never moves them: w2' = 0.99·w2 + 0.01·w1. It begins at the weights. It "
        "has no warm-up. It is stable: the distance to the weights shrinks by 0.99 per update and is halved in 69 "
        "(eigenvalues 1 and 0.99 in the end). Buffers are left out. Whole numbers are left out. Frozen weights are "
        "averaged. Tied weights move once per update. The average of bfloat16 weights is read as bfloat16, and small "
        "changes round away: at decay 0.9999 it stands still. The average of float16 weights is read as float16, and "
        "small changes round away: at decay 0.9999 it stands still. An update() without a change of the weights counts "
        "like any other. Nothing looks wrong."
    )


WORDS = {
    "ratio": (lambda t: 9 / (10 + t), "Its decay warms up by (1 + τ)/(10 + τ), τ = update, and rises still."),
    "late": (lambda t: 1.0 if t < 3 else 9 / (8 + t), "τ = update − 2"),
    "early": (lambda t: 9 / (15 + t), "τ = update + 5"),
    "limited": (lambda t: max(0.5, 9 / (10 + t)), "(1 + τ)/(10 + τ), τ = update, up to 0.5."),
    "power": (lambda t: (1 + t / 2) ** -0.7, "1 − (1 + τ/2)^−0.7, τ = update, and rises still."),
    "mean": (lambda t: 1 / t, "It is the uniform mean of the weights that it saw."),
    "mean with the start": (lambda t: 1 / (t + 1), "with the start counted as 1."),
    "relative": (lambda t: 1 - (1 - 1 / t) ** 3, "power-function EMA with γ = 2."),
    "linear": (lambda t: 0.5 - 0.01 * t, "Its decay rises by 0.01 per update, from 0.51, and rises still."),
    "other": (lambda t: 0.1 + 0.01 * (t % 5), "Its decay varies: 0.89, 0.88, 0.87, 0.86, …, 0.86."),
    "ignored": (lambda t: 0.1 if t > 5 else 0.0, "5 calls of update() do nothing."),
    "copies": (lambda t: 0.1 if t > 5 else 1.0, "Its first 5 updates copy the weights, until update() number 5."),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_warm_up_in_words(case: str) -> None:
    rate, words = WORDS[case]
    said = str(quickly(code.coupled([watch(rate(t)) for t in range(1, STEPS + 1)])))
    assert words in said


def test_an_average_that_pulls_has_its_numbers_in_words() -> None:
    said = str(quickly(code.belay(METHODS["belay"])))
    assert said.startswith("The average moves the weights too: a = 0.05, b = 0.025, p = 0.95, q = 0.")
    changing = str(quickly(code.belay(METHODS["schedule_free"])))
    assert "at first, and a =" in changing
    assert "in the end" in changing


def test_a_lagged_average_is_said_to_be_late() -> None:
    assert "0.9·w2 + 0.1·w1 of a step ago" in str(quickly(code.coupled([watch(0.1, "before")] * STEPS)))


def test_several_problems_are_numbered() -> None:
    def move(shadow: torch.Tensor, p: torch.Tensor, t: int) -> None:
        if t % 2:
            shadow.lerp_(p, 0.01)

    said = str(quickly(code.loop(move, start=torch.zeros_like)))
    assert "2 problems: (1) The average never begins at the weights" in said
    assert "(2) Only every second update() moves the average" in said


def test_a_result_can_be_copied_compared_and_shown() -> None:
    found = quickly(code.ema())
    assert copy.deepcopy(found) == found == quickly(code.ema())
    assert repr(found).startswith("Identification(couplings=(Coupling(a=0.0, b=0.01")

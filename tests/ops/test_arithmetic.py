"""The operations in place on lists, each against the oracle, in every dtype, layout and size that they claim."""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import seams
from helpers.list_operations import (
    LAYOUTS,
    NAMES,
    OPERATIONS,
    SHAPES,
    SWING2,
    Operation,
    assert_equals_the_oracle,
    bf16,
    c64,
    copied,
    couple,
    embed,
    every_dtype,
    every_operation,
    every_pair,
    f16,
    f32,
    f64,
    groups,
    joined,
    lerp,
    make_state,
    operations,
    pull_together,
    widest,
)
from helpers.problems import no_waiting
from torchbelay.ops import arithmetic

# Values


@every_operation
@pytest.mark.parametrize("dtype", [f64, f32, c64], ids=str)
@pytest.mark.parametrize("layouts", [[layout] for layout in LAYOUTS] + [LAYOUTS], ids=lambda ls: "+".join(ls))
def test_equals_the_reference_in_any_layout_and_touches_nothing_around(draw, same_bits, operation, dtype, layouts):
    old = make_state(draw, (dtype, dtype))
    places = {
        name: [embed(t, layouts[(i + n) % len(layouts)]) for n, t in enumerate(old[name])]
        for i, name in enumerate(NAMES)
    }
    new = {name: [inside for inside, _ in places[name]] for name in NAMES}
    operation.apply(new, None)
    assert_equals_the_oracle(operation, old, new, same_bits)
    for name in NAMES:
        for inside, buffer in places[name]:
            inside.fill_(nan)  # all that is left of what the buffer held must be the nan that it was filled with
            assert same_bits([buffer], [torch.full_like(buffer, nan)])


# When they meet, w1 takes what w2 holds, rounded already: a test of its own, below.
@operations(*(name for name in OPERATIONS if name != "meet"))
@every_pair
def test_narrow_dtypes_are_computed_wide_and_rounded_once(draw, same_bits, operation, dtypes):
    narrow = make_state(draw, dtypes)
    wide = copied(narrow, torch.promote_types(f32, torch.promote_types(*dtypes)))
    operation.apply(narrow, None)
    operation.apply(wide, None)
    for name in NAMES:
        assert same_bits(narrow[name], [w.to(n.dtype) for n, w in zip(narrow[name], wide[name], strict=True)])


# float16 holds each of them, but neither w2 − w1 nor w2 − before: its largest number is 65504
FAR = (36000.0, -36000.0, 34976.0, -1000.0, 1000.0)


@every_operation
def test_float16_does_not_overflow_on_the_way_to_a_result_that_it_can_hold(device, operation):
    state = {name: [torch.tensor([value], dtype=f16, device=device)] for name, value in zip(NAMES, FAR, strict=True)}
    expected = [float(x) for x in operation.expect(*FAR)]
    assert max(map(abs, expected)) < torch.finfo(f16).max
    operation.apply(state, None)
    # one rounding to 11 bits, and those of float32 before it
    assert [state[name][0].item() for name in NAMES] == pytest.approx(expected, rel=2**-11 + 1e-6)


@every_operation
def test_a_list_of_mixed_dtypes_and_shapes_equals_its_parts(mixed_state, same_bits, operation):
    parts = [{name: [t.clone()] for name, t in zip(NAMES, group, strict=True)} for group in groups(mixed_state)]
    operation.apply(mixed_state, None)
    for part in parts:
        operation.apply(part, None)
    for name in NAMES:
        assert same_bits(mixed_state[name], joined(*parts)[name])


@every_dtype
@pytest.mark.parametrize("weight", [0.001, 0.3, 0.5, 0.9, 1.0, -0.4, 1.7])
def test_lerp_of_one_dtype_is_torchs_own_bit_for_bit(draw, same_bits, dtype, weight):
    w, end = ([draw.normal(shape, dtype) for shape in SHAPES] for _ in range(2))
    expected = [t.clone() for t in w]
    torch._foreach_lerp_(expected, end, weight)
    arithmetic.lerp_(w, end, weight)
    assert same_bits(w, expected)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    numbers=st.tuples(*[st.floats(-2, 2)] * 4),
    swings=st.tuples(*[st.just(()) | st.tuples(*[st.floats(-2, 2)] * 4)] * 2),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_any_numbers_equal_the_reference(drawing, same_bits, shape, numbers, swings, seed):
    operation = couple(numbers, *swings)
    old = make_state(drawing(seed), (f64, f64), [shape])
    new = copied(old)
    operation.apply(new, None)
    for was, is_ in zip(groups(old), groups(new), strict=True):
        # eight terms of up to 2·10, with a few roundings each
        torch.testing.assert_close(is_, tuple(operation.expect(*was)), rtol=0, atol=1e-13)


@every_operation
def test_a_list_may_be_empty(operation):
    state = {name: [] for name in NAMES}
    operation.apply(state, None)
    operation.apply(state, torch.tensor(1.0))
    assert not any(state.values())


@every_operation
def test_what_is_only_read_may_be_expanded(draw, same_bits, operation):
    old = make_state(draw, (f64, f64), [(3, 4)])
    old["before"] = [draw.normal((4,)).expand(3, 4)]
    if operation.expect(*(t[0] for t in old.values()))[0] is old["w1"][0]:
        old["w1"] = [draw.normal((3, 1)).expand(3, 4)]
    new = {name: [t if t._is_view() else t.clone() for t in old[name]] for name in NAMES}
    operation.apply(new, None)
    assert_equals_the_oracle(operation, old, new, same_bits)


@every_operation
def test_parameters_are_moved_without_a_gradient(draw, same_bits, monkeypatch, operation):
    seams.limit_scratch(monkeypatch, 7)
    plain = make_state(draw, (bf16, f32))
    trained = copied(plain)
    trained["w1"] = [torch.nn.Parameter(t) for t in trained["w1"]]
    with torch.no_grad():
        operation.apply(trained, torch.tensor(1.0))
    operation.apply(plain, None)
    for name in NAMES:
        assert same_bits(trained[name], plain[name])
    assert all(t.is_leaf and t.grad is None for t in trained["w1"])


# Lists that are converted at once, as those of a GPU are


@pytest.mark.parametrize(
    "shapes", [[(3, 4), (), (5,)], [(3, 4)], [(3, 4), (0, 4), ()]], ids=["many", "one", "an empty one"]
)
def test_tensors_are_converted_as_each_would_be_alone(draw, same_bits, shapes):
    tensors = [draw.normal(shape, dtype=f32).to(bf16) for shape in shapes]
    tensors += [draw.normal((2, 3, 4, 5), dtype=f32).to(bf16).to(memory_format=torch.channels_last)]
    tensors += [
        draw.normal((6, 4), dtype=f32).to(bf16).t()[1:, ::2],
        draw.normal((3, 1), dtype=f32).to(bf16).expand(3, 4),
    ]
    before = [t.clone() for t in tensors]
    found = arithmetic._converted(tensors, f32)
    assert same_bits(found, [t.to(f32) for t in tensors])
    assert [t.shape for t in found] == [t.shape for t in tensors]
    torch._foreach_add_(found, 1.0)
    assert same_bits(tensors, before)


class Sharded(torch.Tensor):
    """A stand-in for a DTensor: to put two of them together, every rank would have to send its part."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function.__name__ not in ("cat", "flatten_dense_tensors"), "the ranks exchange their parts"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_sharded_tensors_are_converted_one_by_one(draw, same_bits):
    tensors = [draw.normal(shape, dtype=f32).to(bf16).as_subclass(Sharded) for shape in ((3, 4), (5,))]
    with pytest.raises(AssertionError, match="the ranks exchange"):
        torch._utils._flatten_dense_tensors(tensors)
    found = arithmetic._converted(tensors, f32)
    assert {type(t) for t in found} == {Sharded}
    assert same_bits(found, [t.to(f32) for t in tensors])


# Numbers that are not finite


@every_operation
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_inf_are_carried_where_they_belong_and_nowhere_else(draw, operation, name):
    pairs = [(f64, f64), (f32, f32), (bf16, f32), (f16, f16), (c64, c64)]
    state = joined(*(make_state(draw, pair, [(7,)]) for pair in pairs))
    for t in state[name]:
        t[1], t[3], t[4] = nan, inf, -inf
    old = copied(state)
    operation.apply(state, None)
    for was, is_ in zip(groups(old), groups(state), strict=True):
        expected = operation.expect(*(t.to(widest(t.dtype)) for t in was))
        for own, x, y in zip(NAMES, is_, expected, strict=True):
            if operation is OPERATIONS["couple, Algorithm 1"] and (name, own) in (("w1", "w2"), ("before", "w1")):
                y = torch.zeros(7)  # w2 does not see w1*, and w1 nothing but w1* and w2: finite
            assert torch.isfinite(x).tolist() == torch.isfinite(y).tolist()


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize(
    "operation",
    [lerp(0.3), pull_together(0.0, 0.3), couple((0.0, 0.3, 1.0, 1.0)), couple((0.0, 0.3, 1.0, 0.0), swing2=SWING2)],
    ids=["lerp", "pull together", "couple", "couple, w2 swings"],
)
def test_an_average_that_only_watches_never_spoils_the_weights(draw, same_bits, operation, value):
    state = make_state(draw, (f32, f32), [(7,)])
    state["w1"][0][0] = -0.0
    for name in ("w2", "v2"):
        state[name][0].fill_(value)
    weights = [t.clone() for t in state["w1"]]
    operation.apply(state, None)
    assert same_bits(state["w1"], weights)


# Steps that are skipped


KEEP_DTYPES = [f32, f64, f16, torch.bool, torch.int64]
every_keep_dtype = pytest.mark.parametrize("keep_dtype", KEEP_DTYPES, ids=str)


@every_operation
@every_keep_dtype
def test_keep_0_leaves_every_bit_as_it_was(mixed_state, same_bits, operation, keep_dtype, device):
    for tensors in mixed_state.values():
        for t in tensors:
            if t.numel() > 5:
                t.view(-1)[:4] = torch.tensor([-0.0, inf, -inf, nan])
    old = copied(mixed_state)
    operation.apply(mixed_state, torch.zeros((), dtype=keep_dtype, device=device))
    for name in NAMES:
        assert same_bits(mixed_state[name], old[name])


@every_operation
@every_keep_dtype
def test_keep_1_is_a_step_like_any_other(mixed_state, same_bits, operation, keep_dtype, device):
    plain = copied(mixed_state)
    operation.apply(mixed_state, torch.ones((), dtype=keep_dtype, device=device))
    operation.apply(plain, None)
    for name in NAMES:
        assert same_bits(mixed_state[name], plain[name])


@every_operation
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_with_keep_too_nothing_around_is_touched(draw, same_bits, operation, keep, device):
    old = make_state(draw, (bf16, f32))
    places = {name: [embed(t, "strided") for t in old[name]] for name in NAMES}
    new = {name: [inside for inside, _ in places[name]] for name in NAMES}
    operation.apply(new, torch.tensor(keep, device=device))
    if keep:
        operation.apply(old, None)
    for name in NAMES:
        assert same_bits(new[name], old[name])
        for inside, buffer in places[name]:
            inside.fill_(nan)
            assert same_bits([buffer], [torch.full_like(buffer, nan)])


# Meeting


@pytest.mark.parametrize("keep", [None, 1.0])
@pytest.mark.parametrize("pull", [0.25, 0.5, 0.1, 0.999, 1 / 3])
def test_where_pull_and_follow_are_the_whole_way_no_bit_is_left_between(mixed_state, same_bits, pull, keep, device):
    w1, w2 = mixed_state["w1"], mixed_state["w2"]
    expected = []
    for x, y in zip(w1, w2, strict=True):
        wide = torch.promote_types(f32, torch.promote_types(x.dtype, y.dtype))
        expected.append(torch.lerp(y.to(wide), x.to(wide), 1 - pull).to(y.dtype))
    arithmetic.pull_together_(w1, w2, pull, 1 - pull, keep if keep is None else torch.tensor(keep, device=device))
    assert same_bits(w2, expected)
    assert same_bits(w1, [y.to(x.dtype) for x, y in zip(w1, w2, strict=True)])


# Velocities


def test_fifty_steps_of_a_spring_are_algorithm_1(draw, spring, algorithm1):
    c = spring.coupling()
    operation = couple((c.a, c.b, c.p, c.q), spring.inertia1 or (), spring.inertia2 or ())
    state = make_state(draw, (f64, f64), [(3, 4), (5,)])
    oracle = [(w1, w2, v1, v2) for w1, w2, _, v1, v2 in groups(copied(state))]
    for _ in range(50):
        updates = [draw.normal(tuple(t.shape)) for t in state["w1"]]
        oracle = [algorithm1(*group, u) for group, u in zip(oracle, updates, strict=True)]
        state["before"] = [t.clone() for t in state["w1"]]
        torch._foreach_add_(state["w1"], updates)
        operation.apply(state, None)
    for (w1, w2, _, v1, v2), (x1, x2, y1, y2) in zip(groups(state), oracle, strict=True):
        kept = [(w1, x1), (w2, x2)] + [(v1, y1)] * bool(spring.inertia1) + [(v2, y2)] * bool(spring.inertia2)
        for is_, expected in kept:
            # fifty steps with some ten roundings each of numbers of up to about fifty
            torch.testing.assert_close(is_, expected, rtol=1e-12, atol=1e-12)


# On a GPU


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")
on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@needs_cuda
@on_cuda
@every_operation
def test_nothing_waits_for_the_device(draw, operation):
    for dtypes in [(f32, f32), (bf16, f32)]:
        for keep in (None, torch.tensor(0.0, device="cuda"), torch.tensor(1.0, device="cuda")):
            state = make_state(draw, dtypes, [(7,), (3, 5)])
            old = copied(state)
            with no_waiting():
                operation.apply(state, keep)
            moved = any(not torch.equal(x, y) for name in NAMES for x, y in zip(state[name], old[name], strict=True))
            assert moved == (keep is None or bool(keep))


OVERWRITE = Operation(
    lambda s, keep: arithmetic.overwrite_(s["w1"][-1], s["w2"][-1], keep), lambda w1, w2, *rest: (w2, w2, *rest)
)


@needs_cuda
@pytest.mark.parametrize("operation", [*OPERATIONS.values(), OVERWRITE], ids=[*OPERATIONS, "overwrite"])
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_keep_may_be_on_another_device(draw, same_bits, operation, keep, device):
    state = make_state(draw, (bf16, f32))
    expected = copied(state)
    there = torch.tensor(keep, device="cpu" if device == "cuda" else "cuda")
    if there.is_cuda:
        torch.cuda._sleep(50_000_000)  # so that it is not known yet when it is asked for
        there = there * 1
    operation.apply(state, there)
    if keep:
        operation.apply(expected, None)
    for name in NAMES:
        assert same_bits(state[name], expected[name])

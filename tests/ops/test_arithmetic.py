"""The operations in place on lists, each against the oracle, in every dtype, layout and size that they claim."""

from collections.abc import Callable
from math import inf, nan, prod
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import seams
from helpers.operations import Allocations, Memory
from helpers.problems import no_waiting
from torchbelay.ops import arithmetic, reference
from torchbelay.ops.arithmetic import Swing

f64, f32, bf16, f16, c64 = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64
DTYPES = [f64, f32, bf16, f16, c64]
PAIRS = [(bf16, f32), (f16, f32), (f32, bf16), (f32, f16), (bf16, f16), (bf16, bf16), (f16, f16), (f32, f64)]
SHAPES = [(), (0,), (1,), (7,), (3, 5, 2), (0, 4), (2, 3, 4, 5)]
LAYOUTS = ["contiguous", "transposed", "channels_last", "strided"]

State = dict[str, list[Tensor]]
NAMES = ("w1", "w2", "before", "v1", "v2")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_pair = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can be waited for")


# The operations under test, and what the oracle says of each


class Operation(NamedTuple):
    """`apply` moves a state in place, `expect` says what one group of tensors becomes (itself if it must not move)."""

    apply: Callable[[State, Tensor | None], None]
    expect: Callable[..., tuple[Any, ...]]


def lerp(weight: float) -> Operation:
    def expect(w1, w2, before, v1, v2):
        return w1, reference.couple(w1, w2, 0, a=0, b=weight, p=0, q=0)[1], before, v1, v2

    return Operation(lambda s, keep: arithmetic.lerp_(s["w2"], s["w1"], weight, keep), expect)


def pull_together(pull: float, follow: float) -> Operation:
    def expect(w1, w2, before, v1, v2):
        new1, new2 = reference.couple(w1, w2, 0, a=pull, b=follow, p=0, q=0)
        return (new1 if pull else w1), (new2 if follow else w2), before, v1, v2

    return Operation(lambda s, keep: arithmetic.pull_together_(s["w1"], s["w2"], pull, follow, keep), expect)


def couple(numbers: tuple[float, ...], swing1: tuple[float, ...] = (), swing2: tuple[float, ...] = ()) -> Operation:
    a, b, p, q = numbers

    def apply(s, keep):
        swings = {
            name: Swing(s[v], swing) if swing else None
            for name, v, swing in (("swing1", "v1", swing1), ("swing2", "v2", swing2))
        }
        arithmetic.couple_(s["w1"], s["w2"], s["before"], numbers, keep, **swings)

    def expect(w1, w2, before, v1, v2):
        u = w1 - before
        new1, new2 = reference.couple(before, w2, u, a=a, b=b, p=p, q=q)
        new_v1, new_v2 = v1, v2
        if swing1:
            carry, keep, pull, push = swing1
            new1, new_v1 = new1 + carry * v1, keep * v1 + pull * (w2 - before) + push * u
        if swing2:
            carry, keep, pull, push = swing2
            new2, new_v2 = new2 + carry * v2, keep * v2 + pull * (before - w2) + push * u
        return new1, new2, before, new_v1, new_v2

    return Operation(apply, expect)


SWING1, SWING2 = (0.7, 0.4, -0.3, 1.9), (-0.6, 1.2, 0.35, 0.25)
FREE = (0.3, -0.2, 1.4, 0.6)  # numbers that no shorter way gives
OPERATIONS = {
    "lerp, first half": lerp(0.3),
    "lerp, second half": lerp(0.7),
    "lerp, all the way": lerp(1.0),
    "lerp, beyond the end": lerp(1.3),
    "lerp, away from it": lerp(-0.3),
    "pull together": pull_together(0.3, 0.1),
    "pull together, past each other": pull_together(0.8, 0.9),
    "pull together, w1 alone": pull_together(0.3, 0.0),
    "pull together, w2 alone": pull_together(0.0, 0.3),
    "meet": pull_together(0.25, 0.75),
    "couple, Algorithm 1": couple((0.05, 0.025, 0.95, 0.0)),
    "couple, four numbers": couple(FREE),
    "couple, w1 swings": couple(FREE, swing1=SWING1),
    "couple, w2 swings": couple(FREE, swing2=SWING2),
    "couple, both swing": couple(FREE, SWING1, SWING2),
}


def operations(*names: str):
    return pytest.mark.parametrize("operation", [OPERATIONS[name] for name in names], ids=names)


every_operation = operations(*OPERATIONS)


# States to apply them to


def embed(t: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the same values, in this layout, inside a larger buffer of nan; and that buffer."""
    fastest_first = list(reversed(range(t.dim())))
    if layout == "transposed" or (layout == "channels_last" and t.dim() != 4):
        fastest_first.reverse()
    elif layout == "channels_last":
        fastest_first = [1, 3, 2, 0]
    gap = 2 if layout == "strided" else 1
    strides, size = [0] * t.dim(), gap
    for d in fastest_first:
        strides[d] = size
        size *= max(1, t.shape[d]) * gap
    margin = 3
    buffer = torch.full((size + 2 * margin,), nan, dtype=t.dtype, device=t.device)
    inside = buffer.as_strided(t.shape, strides, margin)
    inside.copy_(t)
    return inside, buffer


def make_state(draw, dtypes: tuple[torch.dtype, torch.dtype], shapes=SHAPES) -> State:
    """Draw a state; weights have the first dtype, average and velocities the second."""
    of = {"w1": dtypes[0], "before": dtypes[0]}
    return {name: [draw.normal(shape, of.get(name, dtypes[1])) for shape in shapes] for name in NAMES}


def joined(*states: State) -> State:
    return {name: [t for state in states for t in state[name]] for name in NAMES}


def copied(state: State, dtype: torch.dtype | None = None) -> State:
    return {name: [t.to(dtype or t.dtype, copy=True) for t in state[name]] for name in NAMES}


def groups(state: State):
    """The aligned tensors, group by group."""
    return zip(*(state[name] for name in NAMES), strict=True)


def widest(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else f64


def assert_equals_the_oracle(operation: Operation, old: State, new: State, same_bits) -> None:
    """Compare with the oracle in double precision; what must not move has every bit as it was."""
    for before, after in zip(groups(old), groups(new), strict=True):
        doubled = [t.to(widest(t.dtype)) for t in before]
        for x, y, is_, was in zip(operation.expect(*doubled), doubled, after, before, strict=True):
            if x is y:
                assert same_bits([is_], [was])
            else:
                # a dozen roundings of numbers of up to about ten
                torch.testing.assert_close(is_, x.to(is_.dtype), rtol=0, atol=64 * torch.finfo(is_.dtype).eps)


@pytest.fixture
def mixed_state(draw, device) -> State:
    """Every dtype, and every pair of dtypes, in one list."""
    return joined(*(make_state(draw, pair) for pair in [*((d, d) for d in DTYPES), *PAIRS]))


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


# Scratch


def long_shapes(scratch: int) -> list[tuple[int, ...]]:
    """Some that fit, and some that are longer than the buffer whichever way they lie."""
    return [(1, 2 * scratch + 5), (2 * scratch + 5, 1), (3, 5, 2), (), (0, 4), (7,)]


scratch_sizes = pytest.mark.parametrize("scratch", [1, 7, 64])


@every_operation
@pytest.mark.parametrize("keep", [None, 1.0])
@scratch_sizes
def test_a_smaller_scratch_buffer_gives_the_same(draw, same_bits, monkeypatch, operation, keep, scratch):
    whole = joined(*(make_state(draw, pair, long_shapes(scratch)) for pair in [(bf16, f32), (f64, f64)]))
    cut = copied(whole)
    keep = keep if keep is None else torch.tensor(keep)
    operation.apply(whole, keep)
    seams.limit_scratch(monkeypatch, scratch)
    operation.apply(cut, keep)
    for name in NAMES:
        assert same_bits(whole[name], cut[name])


@every_operation
@pytest.mark.parametrize("keep", [None, 1.0])
@scratch_sizes
def test_no_scratch_buffer_exceeds_the_bound(draw, monkeypatch, operation, keep, scratch):
    state = make_state(draw, (bf16, f32), long_shapes(scratch))
    seams.limit_scratch(monkeypatch, scratch)
    with Allocations() as allocations:
        operation.apply(state, keep if keep is None else torch.tensor(keep, device=draw.device))
    assert max(allocations.sizes) <= scratch
    assert max(allocations.sizes) > scratch / 2  # and it is used


def test_exchange_stays_within_the_bound_too(draw, monkeypatch):
    x, y = ([draw.normal(shape) for shape in long_shapes(64)] for _ in range(2))
    seams.limit_scratch(monkeypatch, 64)
    with Allocations() as allocations:
        arithmetic.exchange_(x, y)
    assert 32 < max(allocations.sizes) <= 64


@settings(deadline=None)  # a scratch buffer of one element makes many pieces
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.just((1, 300)) | st.just((300, 1))),
    scratch=st.integers(1, 100),
)
def test_pieces_of_any_shapes_trade_each_element_once_and_fit(shapes, scratch):
    numbered = [torch.arange(prod(shape), dtype=f32).reshape(shape) for shape in shapes]
    labelled = [torch.full(shape, -1.0 - i) for i, shape in enumerate(shapes)]
    old = [t.clone() for t in numbered], [t.clone() for t in labelled]
    with pytest.MonkeyPatch.context() as patch, Memory() as memory:
        seams.limit_scratch(patch, scratch)
        arithmetic.exchange_(numbered, labelled)
    assert all(map(torch.equal, numbered, old[1]))
    assert all(map(torch.equal, labelled, old[0]))
    assert memory.peak <= scratch * f32.itemsize  # though every piece may have several tensors


# Not a number


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


# Steps that did not take place


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


# Meeting, exchanging, copying


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


@every_dtype
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("strided", "transposed"), ("channels_last",) * 2])
@pytest.mark.parametrize("scratch", [1 << 24, 7])
def test_exchange_swaps_every_bit_and_twice_is_nothing(draw, same_bits, monkeypatch, dtype, layouts, scratch):
    seams.limit_scratch(monkeypatch, scratch)
    old_x, old_y = ([draw.bits(shape, dtype) for shape in SHAPES] for _ in range(2))
    (x, around_x), (y, around_y) = (
        zip(*(embed(t, layout) for t in old), strict=True)
        for old, layout in zip((old_x, old_y), layouts, strict=True)
    )  # fmt: skip
    for expected_x, expected_y in [(old_y, old_x), (old_x, old_y)]:
        arithmetic.exchange_(x, y)
        assert same_bits(x, expected_x)
        assert same_bits(y, expected_y)
    for inside, buffer in zip(x + y, around_x + around_y, strict=True):
        inside.fill_(nan)
        assert same_bits([buffer], [torch.full_like(buffer, nan)])


def test_exchange_takes_lists_of_mixed_dtypes(draw, same_bits):
    x, y = ([draw.bits((5,), dtype) for dtype in DTYPES] for _ in range(2))
    old_x, old_y = ([t.clone() for t in ts] for ts in (x, y))
    arithmetic.exchange_(x, y)
    assert same_bits(x, old_y)
    assert same_bits(y, old_x)


@pytest.mark.parametrize("dtypes", [*PAIRS, (f32, f32)], ids=str)
def test_copy_rounds_to_the_dtype_that_is_there(draw, same_bits, dtypes):
    to, source = ([draw.normal(shape, dtype) for shape in SHAPES] for dtype in dtypes)
    expected = [t.to(dtypes[0]) for t in source]
    old = [t.clone() for t in source]
    arithmetic.copy_(to, source)
    assert same_bits(to, expected)
    assert same_bits(source, old)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("keep", [None, 0.0, 1.0])
def test_overwrite_takes_any_dtype_and_only_steps_that_took_place(draw, same_bits, dtype, keep, device):
    for shape in SHAPES:
        to, source = (100 * draw.normal(shape)).to(dtype), (100 * draw.normal(shape)).to(dtype)
        expected = to.clone() if keep == 0 else source.clone()
        arithmetic.overwrite_(to, source, keep if keep is None else torch.tensor(keep, device=device))
        assert same_bits([to], [expected])


def test_exchange_and_copy_take_empty_lists():
    x, y = [], []
    arithmetic.exchange_(x, y)
    arithmetic.copy_(x, y)
    assert x == y == []


@pytest.mark.parametrize("function", [arithmetic.exchange_, lambda x, y: arithmetic.lerp_(x, y, 0.5)])
def test_lists_of_unequal_length_are_refused(draw, function):
    with pytest.raises(ValueError, match="zip"):
        function([draw.normal((2,))], [draw.normal((2,)), draw.normal((2,))])


# Sizes


def doubled(tensors: list[Tensor]) -> Tensor:
    """All of them in one vector in double precision."""
    return torch.cat([t.to(widest(t.dtype)).flatten() for t in tensors])


@every_dtype
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("scratch", [1 << 24, 7])
def test_norm_and_distance_are_those_of_one_long_vector(draw, monkeypatch, dtype, size, scratch):
    x, y = ([size * draw.normal(shape, dtype) for shape in SHAPES] for _ in range(2))
    long_x, long_y = doubled(x), doubled(y)
    seams.limit_scratch(monkeypatch, scratch)
    norm, distance = arithmetic.norm(x), arithmetic.distance(x, y)
    assert norm.dtype == distance.dtype == f64
    assert norm.shape == distance.shape == ()
    # sums of about 150 squares in float64; the differences themselves are rounded to float32 where the dtype is not f64
    torch.testing.assert_close(norm, long_x.norm(), rtol=1e-14, atol=0)
    torch.testing.assert_close(distance, (long_x - long_y).norm(), rtol=1e-14 if dtype == f64 else 1e-7, atol=0)


def test_distance_between_dtypes_is_that_of_their_values(draw):
    x, y = ([draw.normal(shape, pair[i]) for pair in PAIRS for shape in SHAPES] for i in range(2))
    torch.testing.assert_close(arithmetic.distance(x, y), (doubled(x) - doubled(y)).norm(), rtol=1e-7, atol=0)


@every_dtype
def test_norm_does_not_overflow_where_its_square_would(device, dtype):
    large = 2.0**15 if dtype == f16 else 2.0**100
    x = [torch.full((64, 64), large, dtype=dtype, device=device)]
    assert arithmetic.norm(x).item() == 64 * large
    assert arithmetic.distance(x, [-t for t in x]).item() == 128 * large


def test_nothing_has_no_size():
    assert arithmetic.norm([]).item() == arithmetic.distance([], []).item() == 0


# On a GPU


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


@needs_cuda
@on_cuda
def test_nobody_waits_for_sizes_copies_and_exchanges(draw):
    x, y = [draw.normal((3, 5), f32)], [draw.normal((3, 5), f32)]
    expected = [x[0].clone(), (x[0] - y[0]).norm().double(), y[0].norm().double()]
    with no_waiting():
        distance = arithmetic.distance(x, y)
        arithmetic.exchange_(x, y)
        norm = arithmetic.norm(x)
        arithmetic.copy_(x, y)
    torch.testing.assert_close([x[0], distance, norm], expected)  # that it works at all: float32's own tolerance


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

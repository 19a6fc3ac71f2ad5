"""Averages of 24 bits: the format, its rounding, its random bytes, and steps by every backend."""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import seams
from helpers.backends_under_test import WHERE, Counter, Tensors, f32, normal, still, take
from helpers.problems import same
from helpers.seams import Motion, Swing, choose
from torchbelay.ops import planes
from torchbelay.ops.place import Place, name_key
from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.spring import Spring

SHAPES = [(3, 5), (), (0, 2), (1,), (700,), (4, 3, 5, 2)]
EMA, BELAY = Spring.ema(decay=0.99), Spring(k=1.0, m1=20.0, m2=5.0)
SWINGING = Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)
LARGEST = torch.tensor(0x7F7FFF00, dtype=torch.int32).view(f32).item()

numbers = st.integers(-(2**31), 2**31 - 1)  # the bits of any float32


def of_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(f32)


def kept(x: Tensor, random: Tensor | None = None) -> Tensor:
    return planes.joined(*planes.split(x, random))


# The format -----------------------------------------------------------------------------------------------------------


def test_planes_are_a_bfloat16_and_a_byte() -> None:
    high, low = planes.split(torch.tensor([1.0 + 2**-7 + 2**-15, -3.0]))
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.uint8)
    assert high.tolist() == [1.0 + 2**-7, -3.0]
    assert low.tolist() == [1, 0]


@given(st.lists(numbers, min_size=1, max_size=50), st.integers(0, 255))
def test_a_number_of_24_bits_is_kept_as_it_is_whatever_the_random_byte(bits: list[int], byte: int) -> None:
    x = of_bits(*(b & ~0xFF for b in bits))
    for random in (None, torch.full(x.shape, byte, dtype=torch.int32)):
        found = kept(x, random)
        bad = x.isnan()
        assert found.isnan().equal(bad)
        assert found.view(torch.int32)[~bad].equal(x.view(torch.int32)[~bad])


@given(numbers)
def test_the_mean_over_all_random_bytes_is_the_number(bits: int) -> None:
    """Of either sign, and of subnormal numbers too: exactly, as multiples of the smallest float32."""
    x = of_bits(bits)
    if not x.isfinite() or abs(x.item()) >= LARGEST:
        return
    found = kept(x.expand(256), torch.arange(256, dtype=torch.int32)).double()
    exact = x.double()
    assert len(found.unique()) <= 2
    assert found.min() <= exact <= found.max()
    smallest = 2.0**-149
    assert sum(int(v / smallest) for v in found.tolist()) == 256 * int(exact.item() / smallest)


@given(numbers)
def test_without_random_bytes_a_number_goes_to_its_nearest_neighbour(bits: int) -> None:
    x = of_bits(bits)
    if not x.isfinite() or abs(x.item()) >= LARGEST:
        return
    below, above = of_bits(bits & ~0xFF), of_bits((bits & ~0xFF) + 0x100)
    exact, found = x.double().item(), kept(x).double().item()
    distances = [abs(n.double().item() - exact) for n in (below, above)]
    assert abs(found - exact) == min(distances)
    if distances[0] == distances[1]:
        assert not kept(x).view(torch.int32).item() & 0x100  # the even one


def test_what_is_not_finite_stays_what_it_is_and_what_is_finite_stays_finite() -> None:
    largest, smallest = torch.finfo(f32).max, torch.finfo(f32).smallest_normal
    signalling = of_bits(0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF)  # some have nothing but bits that are dropped
    for byte in (None, 0, 255):
        random = None if byte is None else torch.tensor(byte, dtype=torch.int32)
        assert kept(torch.tensor([inf, -inf]), random).tolist() == [inf, -inf]
        assert kept(torch.tensor([largest, -largest]), random).tolist() == [LARGEST, -LARGEST]
        if random is None:
            assert kept(signalling, random).isnan().all()
            assert kept(signalling + 0.0, torch.tensor(255, dtype=torch.int32)).isnan().all()  # as steps have them
        assert kept(torch.tensor([nan]), random).isnan().all()
        assert kept(torch.tensor([0.0, -0.0, smallest]), random).tolist() == [0.0, -0.0, smallest]
        assert kept(torch.tensor([-0.0]), random).signbit().all()


@pytest.mark.parametrize("dtype", [f32, torch.bfloat16, torch.float64])
def test_planes_are_copied_in_pieces_to_tensors_of_any_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seams.limit_scratch(monkeypatch, 7)
    values = [kept(normal(shape, f32, seed=i)) for i, shape in enumerate(SHAPES)]
    high, low = zip(*map(planes.split, values), strict=True)
    to = [torch.full_like(v, nan, dtype=dtype) for v in values]
    planes.copy_(to, high, low)
    assert all(t.equal(v.to(dtype)) for t, v in zip(to, values, strict=True))


# Random bytes ---------------------------------------------------------------------------------------------------------

MASK = (1 << 32) - 1


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def byte(name: str, index: int, step: int) -> int:
    """The definition once more, in whole numbers of Python."""
    key0 = mixed(mixed(mixed(step & MASK) ^ step >> 32) ^ name_key(name) & MASK)
    key1 = mixed((key0 + (name_key(name) >> 32)) & MASK)
    x = ((index & MASK) ^ key0 ^ mixed(index >> 32)) * 0x7FEB352D & MASK
    x ^= x >> 15
    x = (x + key1) * 0x846CA68B & MASK
    x ^= x >> 16
    return (x * 0x7FEB352D & MASK) >> 24


def bytes_of(places: list[Place], step: int) -> list[int]:
    return planes.random_bytes(places, torch.tensor(step, device=WHERE)).tolist()


@pytest.mark.parametrize("step", [1, 12345, 2**31 + 5, 2**40 + 7])
def test_random_bytes_are_as_they_are_defined(step: int) -> None:
    places = [Place.of("layers.0.weight", (3, 4)), Place.of("b", ()), Place.of("none", (0, 2)), Place.of("ß", (5,))]
    expected = [byte(p.name, i, step) for p, n in zip(places, (12, 1, 0, 5), strict=True) for i in range(n)]
    assert bytes_of(places, step) == expected


def test_the_definition_never_changes() -> None:
    """Checkpoints of older versions go on with the same numbers."""
    assert bytes_of([Place.of("layer.weight", (8,))], 1) == GOLDEN


GOLDEN = [74, 12, 49, 243, 68, 172, 7, 66]


def test_a_part_has_the_bytes_that_its_elements_have_in_the_whole() -> None:
    shape = (6, 5, 4)
    whole = torch.tensor(bytes_of([Place.of("w", shape)], 3)).view(shape)
    for dim in range(3):
        for part, place in zip(whole.split(2, dim), Place.of("w", shape).split(2, dim), strict=True):
            assert bytes_of([place], 3) == part.flatten().tolist()
            for small, within in zip(part.split(3, 1), place.split(3, 1), strict=True):
                assert bytes_of([within], 3) == small.flatten().tolist()


def test_a_part_is_a_run_if_its_elements_follow_each_other_in_the_whole() -> None:
    shape = (3, 4, 2)
    index = torch.arange(24).view(shape)
    for start in [(a, b, c) for a in range(3) for b in range(4) for c in range(2)]:
        for size in [(a, b, c) for a in range(1, 4) for b in range(1, 5) for c in range(1, 3)]:
            place = Place("w", shape, start, size)
            part = index[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
            if part.shape == size:
                run = part.flatten()
                assert place.first == run[0]
                assert place.is_run == bool((run == run[0] + torch.arange(len(run))).all())


def test_parameters_of_more_than_32_bits_of_elements_have_bytes_of_their_own() -> None:
    rows, columns = 1 << 20, 1 << 14  # 2³⁴ elements, of which four are here, around 2³² and 2³³
    for row in (1 << 18, 1 << 19):
        place = Place("w", (rows, columns), (row - 1, columns - 2), (1, 2))
        after = Place("w", (rows, columns), (row, 0), (1, 2))
        first = row * columns
        assert bytes_of([place, after], 9) == [byte("w", first + i, 9) for i in (-2, -1, 0, 1)]


def test_bytes_are_spread_evenly_and_independent_of_neighbours_steps_and_names() -> None:
    n = 1 << 16

    def drawn(name: str, step: int) -> Tensor:
        return torch.tensor(bytes_of([Place.of(name, (n,))], step)).double()

    def correlation(x: Tensor, y: Tensor) -> float:
        """In its own standard deviations."""
        return float(((x - 127.5) * (y - 127.5)).mean() / (256**2 - 1) * 12) * len(x) ** 0.5

    one = drawn("w", 1)
    counts = torch.bincount(one.long(), minlength=256).double()
    chi2 = float((counts - n / 256).square().sum() / (n / 256))
    assert abs(chi2 - 255) < 6 * 510**0.5
    others = [one.roll(shift) for shift in (1, 2, 4, 128, 256, 1024)]
    others += [drawn("w", step) for step in (2, 3, 1000)] + [drawn("v", 1)]
    assert max(abs(correlation(one, other)) for other in others) < 5
    pairs = torch.bincount((one // 16 * 16 + one.roll(1024) // 16).long(), minlength=256).double()
    assert abs(float((pairs - n / 256).square().sum() / (n / 256)) - 255) < 6 * 510**0.5


# Steps ----------------------------------------------------------------------------------------------------------------


def group(
    dtype: torch.dtype = f32, *, shapes=SHAPES, turned: bool = False, places: list[Place] | None = None
) -> Tensors:
    """Weights with averages of 24 bits; `turned`: laid out in another order in memory."""
    w1 = [normal(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
    if turned:
        w1 = [w.mT.contiguous().mT if w.dim() > 1 else w for w in w1]
    found = Tensors(w1, [])
    for i, w in enumerate(w1):
        high, low = planes.split(normal(tuple(w.shape), f32, seed=100 + i))
        found.w2.append(torch.empty_like(w, dtype=high.dtype).copy_(high))
        found.low.append(torch.empty_like(w, dtype=low.dtype).copy_(low))
    found.places = places or [Place.of(f"p{i}", shape) for i, shape in enumerate(shapes)]
    return found


def values(some: Tensors) -> list[Tensor]:
    return [planes.joined(high, low) for high, low in zip(some.w2, some.low, strict=True)]


def updates(some: Tensors, step: int) -> list[Tensor]:
    return [normal(tuple(w.shape), w.dtype, seed=1000 * step + i).mul_(0.01) for i, w in enumerate(some.w1)]


def moved(impl: str, some: Tensors, method, steps: int = 3, *, first: int = 0) -> Tensors:
    """The same tensors after some steps."""
    backend, count = choose(impl), Counter(first)
    for step in range(1, steps + 1):
        motion = Motion(method.coupling(step, 0.1))
        take(backend, [still(some, motion)], updates(some, step), count=count)
        assert backend.used_for(some) == impl
    return some


@pytest.mark.parametrize("impl", ["foreach", "reference"])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16, torch.float16])
def test_a_step_is_that_of_float32_numbers_rounded_by_their_bytes(impl: str, dtype: torch.dtype) -> None:
    some = group(dtype)
    exact = Tensors([w.clone() for w in some.w1], values(some))
    take(choose(impl), [still(exact, Motion(EMA.coupling()))], updates(some, 1))
    moved(impl, some, EMA, 1, first=41)
    for i, (x, y) in enumerate(zip(values(some), exact.w2, strict=True)):
        random = torch.tensor(bytes_of([some.places[i]], 42), dtype=torch.int32, device=WHERE).view(y.shape)
        assert x.equal(kept(y, random))
        assert all(w.equal(v) for w, v in zip(some.w1, exact.w1, strict=True))


@pytest.mark.parametrize("method", [EMA, BELAY, methods.lookahead(k=2)], ids=["ema", "belay", "lookahead"])
@pytest.mark.parametrize("dtype", [f32, torch.bfloat16])
def test_backends_agree_but_for_roundings_of_float32(method, dtype: torch.dtype) -> None:
    """They draw the same bytes, so that only a number beside the border between two roundings goes another way."""
    x, y = (values(moved(impl, group(dtype), method)) for impl in ("foreach", "reference"))
    differing = sum(int((a != b).sum()) for a, b in zip(x, y, strict=True))
    assert differing < 0.02 * sum(a.numel() for a in x)
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-14, atol=1e-6)


@pytest.mark.parametrize("impl", ["foreach", "reference"])
def test_pieces_and_memory_layouts_do_not_matter(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(moved(impl, group(), EMA))
    assert all(map(torch.equal, values(moved(impl, group(turned=True), EMA)), expected))
    seams.limit_scratch(monkeypatch, 56)  # seven elements at a time
    assert all(map(torch.equal, values(moved(impl, group(), EMA)), expected))


@pytest.mark.parametrize("impl", ["foreach", "reference"])
@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
def test_a_skipped_step_leaves_every_bit(impl: str, method) -> None:
    some = group()
    some.w2[4][:3] = torch.tensor([nan, inf, -0.0])
    before, count = some.copy(), Counter(7)
    take(choose(impl), [still(some, Motion(method.coupling()))], updates(some, 1), torch.tensor(0.0), count)
    assert all(map(same, some.all(), before.all()))


def test_weights_and_average_that_meet_are_equal_to_the_last_bit() -> None:
    some = moved("foreach", group(), methods.lookahead(k=1), 1)
    meet = Motion(Coupling(0.25, 0.75, 0.75, 0.75))
    take(choose("foreach"), [still(some, meet)], updates(some, 2))
    assert all(map(torch.equal, some.w1, values(some)))
    kept_one = [w.clone() for w in some.w1]
    take(choose("foreach"), [still(some, meet)], None, torch.tensor(0.0))
    assert all(map(torch.equal, some.w1, kept_one))


@pytest.mark.parametrize("impl", ["foreach", "reference"])
def test_velocities_stay_float32(impl: str) -> None:
    some = group()
    exact = Tensors([w.clone() for w in some.w1], values(some))
    for each in (some, exact):
        each.v1, each.v2 = ([torch.full_like(w, v) for w in each.w1] for v in (0.1, -0.2))
        swings = [Swing(v, i) for v, i in ((each.v1, SWINGING.inertia1), (each.v2, SWINGING.inertia2)) if i]
        take(choose(impl), [still(each, Motion(SWINGING.coupling(), *swings))], updates(some, 1), count=Counter())
    for x, y in zip(some.v1 + some.v2, exact.v1 + exact.v2, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    for x, y in zip(values(some), exact.w2, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-15, atol=1e-30)


def test_a_small_step_counts_in_the_mean_and_is_lost_by_nobody() -> None:
    """Steps of a fiftieth of the spacing, of both signs: 16-bit averages that round to the nearest would not move."""
    n = 20_000
    w1 = [torch.cat([torch.full((n,), 2.0), torch.full((n,), -2.0)]).to(WHERE)]
    some = Tensors(w1, [], places=[Place.of("w", (2 * n,))])
    high, low = planes.split(w1[0] / 2)
    some.w2, some.low = [high], [low]
    rate = 2.0**-15 / 50
    take(choose("foreach"), [still(some, Motion(Coupling(0.0, rate, 1.0, rate)))], count=Counter())
    change = (values(some)[0].double() - w1[0].double() / 2).abs()
    assert set(change.unique().tolist()) == {0.0, 2.0**-15}
    deviation = 2.0**-15 * (0.02 * 0.98 / n) ** 0.5
    for part in change.split(n):
        assert abs(float(part.mean()) - rate) < 5 * deviation

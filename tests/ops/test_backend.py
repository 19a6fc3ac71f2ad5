"""Both backends of lists, around a step that an optimizer takes, against a plain loop of the oracle."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import backends_under_test as under_test
from helpers.backends_under_test import Counter, Tensors, still
from helpers.methods_under_test import METHODS
from helpers.operations import Copies
from helpers.seams import Motion, Swing, choose
from torchbelay.ops import reference
from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling, Inertia
from torchbelay.physics.spring import Spring

STEPS = 20
SHAPES = [(3, 4), (), (0, 2), (5,)]
BACKENDS = {name: choose(name) for name in ("foreach", "reference")}
FOREACH, REFERENCE = BACKENDS["foreach"], BACKENDS["reference"]

# Which of them cannot do without a copy of w1. (Nesterov can if the learning rate stays.)
NEEDS_COPY = {
    "belay", "ema, lagged", "easgd", "easgd, rho", "heavy_ball", "primal_averaging", "schedule_free",
    "centred", "centred, negative", "centred, lagged", "centred, scheduled", "centred, lagged, scheduled",
}  # fmt: skip

each_way = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
every_method = pytest.mark.parametrize("name", METHODS)


def couplings(name: str) -> list[Coupling]:
    """Return the coupling of each step under a learning rate that rises and falls."""
    method = METHODS[name]()
    return [method.coupling(step, 0.1 * (1.5 + math.sin(step))) for step in range(1, STEPS + 1)]


def motions(couplings: Sequence[Coupling]) -> list[Motion]:
    return [Motion(c) for c in couplings]


def swinging(spring: Spring, v1: list[Tensor], v2: list[Tensor]) -> Motion:
    swings = [Swing(v, inertia) if inertia else None for v, inertia in ((v1, spring.inertia1), (v2, spring.inertia2))]
    return Motion(spring.coupling(), *swings)


def take(backend: Any, w1: list[Tensor], w2: list[Tensor], u: list[Tensor], motion: Motion, keep=None) -> None:
    """Take one step as an optimizer does, with the backend around it."""
    under_test.take(backend, [still(Tensors(w1, w2), motion)], u, keep)


def prepared(backend: Any, w1: list[Tensor], w2: list[Tensor], motion: Motion) -> tuple[Any, list[Tensor]]:
    """A step that is prepared, and the copies of w1 that were made for it."""
    with Copies() as copies:
        step = backend.prepare([still(Tensors(w1, w2), motion)], Counter())
    return step, copies.made


def needs_copy(backend: Any, motion: Motion) -> bool:
    """Whether the backend copies w1 before a step of this motion."""
    w1, w2 = ([torch.zeros(3)] for _ in range(2))
    _, copies = prepared(backend, w1, w2, motion)
    assert len(copies) <= 1
    return bool(copies)


def cloned(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.fixture
def w1(draw) -> list[Tensor]:
    return [draw.normal(shape) for shape in SHAPES]


@pytest.fixture
def w2(draw) -> list[Tensor]:
    return [draw.normal(shape) for shape in SHAPES]


@pytest.fixture
def updates(draw) -> list[list[Tensor]]:
    return [[draw.normal(shape) for shape in SHAPES] for _ in range(STEPS)]


def assert_close(is_: list[Tensor], expected: list[Tensor]) -> None:
    """Equal but for the roundings of twenty steps in float64, the largest factor being schedule-free's 10."""
    torch.testing.assert_close(is_, expected, rtol=1e-12, atol=1e-12)


def test_every_method_is_tested():
    assert {name.partition(",")[0] for name in METHODS} == set(methods.__all__) - {"Method"}


@each_way
@every_method
def test_a_run_equals_the_loop_of_the_reference(backend, name, w1, w2, updates):
    x1, x2 = cloned(w1), cloned(w2)
    for c, u in zip(couplings(name), updates, strict=True):
        take(backend, w1, w2, u, Motion(c))
        for i, by in enumerate(u):
            x1[i], x2[i] = reference.couple(x1[i], x2[i], by, a=c.a, b=c.b, p=c.p, q=c.q)
    assert_close(w1, x1)
    assert_close(w2, x2)


@each_way
@pytest.mark.parametrize("lagged", [False, True])
def test_an_average_that_watches_leaves_every_bit_of_the_weights(backend, lagged):
    w1, w2, stepped = (under_test.normal((4000,), seed=seed) for seed in range(3))
    move = still(Tensors([w1], [w2]), Motion(Coupling(0.0, 0.1, 1.0, 0.0 if lagged else 0.1)))
    step = backend.prepare([move], Counter())
    w1.copy_(stepped)  # stepped − w1 is no float32 number
    step.finish(None)
    assert torch.equal(w1, stepped)


@pytest.fixture
def v1(draw, w1) -> list[Tensor]:
    return [draw.normal(tuple(t.shape)) for t in w1]


@pytest.fixture
def v2(draw, w2) -> list[Tensor]:
    return [draw.normal(tuple(t.shape)) for t in w2]


@each_way
def test_a_run_with_velocities_equals_the_loop_of_the_reference(backend, spring, algorithm1, w1, w2, v1, v2, updates):
    motion = swinging(spring, v1, v2)
    oracle = list(zip(cloned(w1), cloned(w2), cloned(v1), cloned(v2), strict=True))
    for u in updates:
        take(backend, w1, w2, u, motion)
        oracle = [algorithm1(*group, by) for group, by in zip(oracle, u, strict=True)]
    x1, x2, y1, y2 = (list(ts) for ts in zip(*oracle, strict=True))
    assert_close(w1, x1)
    assert_close(w2, x2)
    if motion.swing1 is not None:
        assert_close(v1, y1)
    if motion.swing2 is not None:
        assert_close(v2, y2)


coefficient = st.floats(-2, 2)


@st.composite
def couplings_without_a_copy(draw) -> Coupling:
    pull, follow = draw(coefficient), draw(coefficient)
    return Coupling(pull, follow, 1 - pull, follow)


@given(
    coupling=couplings_without_a_copy() | st.builds(Coupling, *[coefficient] * 4),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    seed=st.integers(0, 2**32),
)
def test_any_coupling_and_shape_equals_the_reference_both_ways(drawing, coupling, shape, seed):
    random = drawing(seed)
    w1, w2, u = (random.normal(shape) for _ in range(3))
    expected = reference.couple(w1, w2, u, a=coupling.a, b=coupling.b, p=coupling.p, q=coupling.q)
    for backend in BACKENDS.values():
        x1, x2 = [w1.clone()], [w2.clone()]
        take(backend, x1, x2, [u], Motion(coupling))
        torch.testing.assert_close((x1[0], x2[0]), expected, rtol=0, atol=1e-12)


# Copies


@every_method
def test_foreach_asks_for_a_copy_where_the_theory_does(name):
    asked = [needs_copy(FOREACH, motion) for motion in motions(couplings(name))]
    assert asked == [c.needs_copy for c in couplings(name)]
    # nesterov's a goes with the ratio of two learning rates
    changes = [c.a != -0.9 for c in couplings(name)] if name == "nesterov" else [False] * len(asked)
    if name == "easgd, every 3":
        changes = [step % 3 == 0 for step in range(1, STEPS + 1)]
    assert asked == [name in NEEDS_COPY or change for change in changes]


def test_velocities_need_a_copy_both_ways(spring):
    motion = swinging(spring, [], [])
    assert motion.swings
    assert needs_copy(FOREACH, motion)
    assert needs_copy(REFERENCE, motion)


@every_method
def test_the_reference_always_asks_for_a_copy(name):
    assert all(needs_copy(REFERENCE, motion) for motion in motions(couplings(name)))


@each_way
@every_method
def test_preparing_touches_neither_weights_nor_averages(backend, name, w1, w2, same_bits):
    old = cloned(w1), cloned(w2)
    for motion in motions(couplings(name)):
        prepared(backend, w1, w2, motion)
    assert same_bits(w1, old[0])
    assert same_bits(w2, old[1])


@each_way
def test_preparing_touches_nothing_where_there_are_velocities(backend, spring, w1, w2, v1, v2, same_bits):
    old = [cloned(ts) for ts in (w1, w2, v1, v2)]
    prepared(backend, w1, w2, swinging(spring, v1, v2))
    for ts, was in zip((w1, w2, v1, v2), old, strict=True):
        assert same_bits(ts, was)


@each_way
@every_method
def test_the_copy_is_left_as_it_was(backend, name, w1, w2, updates, same_bits):
    for motion, u in zip(motions(couplings(name)), updates, strict=True):
        old = cloned(w1)
        step, copies = prepared(backend, w1, w2, motion)
        for t, by in zip(w1, u, strict=True):
            t += by
        step.finish(None)
        needed = backend is REFERENCE or motion.needs_copy
        assert bool(copies) is needed
        assert not needed or same_bits(copies, old)


# Steps that are skipped


@pytest.fixture
def kept(draw) -> list[bool]:
    kept = [bool(x > -0.5) for x in draw.normal((STEPS,))]
    assert 0 < sum(kept) < STEPS
    return kept


@each_way
@every_method
def test_skipped_steps_are_steps_left_out(backend, name, w1, w2, updates, kept, device, same_bits):
    x1, x2 = cloned(w1), cloned(w2)
    for motion, u, took in zip(motions(couplings(name)), updates, kept, strict=True):
        take(backend, w1, w2, u, motion, torch.tensor(float(took), device=device))
        if took:
            take(backend, x1, x2, u, motion)
    assert same_bits(w1, x1)
    assert same_bits(w2, x2)


@each_way
def test_skipped_steps_move_no_velocity(backend, spring, w1, w2, v1, v2, updates, kept, device, same_bits):
    left_out = [cloned(ts) for ts in (w1, w2, v1, v2)]
    for u, took in zip(updates, kept, strict=True):
        take(backend, w1, w2, u, swinging(spring, v1, v2), torch.tensor(float(took), device=device))
        if took:
            take(backend, *left_out[:2], u, swinging(spring, *left_out[2:]))
    for ts, expected in zip((w1, w2, v1, v2), left_out, strict=True):
        assert same_bits(ts, expected)


# Narrow weights


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@every_method
@pytest.mark.parametrize("dtypes", [(bf16, f32), (f16, f32), (f32, bf16), (bf16, bf16), (f16, f16)], ids=str)
def test_both_ways_agree_to_a_rounding_in_narrow_dtypes(name, dtypes, draw):
    for motion in motions(couplings(name)):
        w1, w2, u = (draw.normal((7,), dtype) for dtype in (*dtypes, dtypes[0]))
        results = []
        for backend in BACKENDS.values():
            x1, x2 = [w1.clone()], [w2.clone()]
            take(backend, x1, x2, [u], motion)
            results.append((x1[0], x2[0]))
        # float32 on the way, with numbers of up to 60; and without a copy the average, of up to 4, is rounded to its
        # own dtype once more, between its two parts or before w1 is set to it
        atol = 60 * torch.finfo(f32).eps
        if not needs_copy(FOREACH, motion):
            atol += 4 * torch.finfo(dtypes[1]).eps / 2
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=torch.finfo(x.dtype).eps, atol=atol)


# Choosing


@pytest.mark.parametrize("name", ["foreach", "reference"])
def test_an_implementation_is_chosen_by_its_name(name):
    assert choose(name).name == name


def test_auto_is_foreach_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto").name == "foreach"


def test_auto_is_triton_where_there_is_a_gpu_and_foreach_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytest.importorskip("triton", reason="there is no Triton to choose")
    assert choose("auto").name == "triton"
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert choose("auto").name == "foreach"


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"^impl='fast' is unknown; choose one of 'auto', 'foreach', 'reference', 'triton'$"
    ):
        choose("fast")


def test_a_motion_says_its_numbers_and_whether_it_swings():
    still = Motion(Coupling(0.1, 0.2, 0.3, 0.4))
    assert still.numbers == (0.1, 0.2, 0.3, 0.4)
    assert not still.swings
    swing = Swing([], Inertia(1.0, 1.0, 1.0, 1.0))
    assert replace(still, swing1=swing).swings
    assert replace(still, swing2=swing).swings

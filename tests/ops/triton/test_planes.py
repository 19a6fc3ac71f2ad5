"""Kernels on averages of 24 bits: the same random bytes, whatever the layout, and code that a GPU's compiler takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this platform")

from helpers.backends_under_test import WHERE, Counter, Tensors, bf16, f16, f32, normal, scheduled, still, take
from helpers.problems import same
from helpers.seams import Motion, Swing, choose
from torchbelay.ops import planes
from torchbelay.ops.place import Place
from torchbelay.ops.triton.table import BLOCK
from torchbelay.physics import methods
from torchbelay.physics.coupling import Coupling
from torchbelay.physics.spring import Spring

SHAPES = [(3, 5), (), (0, 2), (1,), (BLOCK + 3,), (2, BLOCK), (4, 3, 5, 2)]
EMA, BELAY = Spring.ema(decay=0.99), Spring(k=1.0, m1=20.0, m2=5.0)
SWINGING = Spring(k=1.0, m1=10.0, m2=20.0, c1=5.0, c2=10.0)


def laid_out(t: Tensor, layout: str) -> Tensor:
    if layout == "turned" and t.dim() > 1:
        return t.mT.contiguous().mT
    return t.to(memory_format=torch.channels_last) if layout == "channels last" and t.dim() == 4 else t


def group(
    dtype: torch.dtype = f32, *, layout: str = "plain", places: list[Place] | None = None, shapes=SHAPES
) -> Tensors:
    w1 = [laid_out(normal(shape, dtype, seed=i), layout) for i, shape in enumerate(shapes)]
    found = Tensors(w1, [], places=places or [Place.of(f"p{i}", shape) for i, shape in enumerate(shapes)])
    for i, w in enumerate(w1):
        high, low = planes.split(normal(tuple(w.shape), f32, seed=100 + i))
        found.w2.append(torch.empty_like(w, dtype=high.dtype).copy_(high))
        found.low.append(torch.empty_like(w, dtype=low.dtype).copy_(low))
    return found


def values(some: Tensors) -> list[Tensor]:
    return [planes.joined(high, low) for high, low in zip(some.w2, some.low, strict=True)]


def updates(some: Tensors, step: int) -> list[Tensor]:
    return [normal(tuple(w.shape), w.dtype, seed=1000 * step + i).mul_(0.01) for i, w in enumerate(some.w1)]


def moved(impl: str, some: Tensors, method, steps: int = 3, *, first: int = 5) -> list[Tensor]:
    backend, count = choose(impl), Counter(first)
    for step in range(1, steps + 1):
        take(backend, [still(some, Motion(method.coupling(step, 0.1)))], updates(some, step), count=count)
        assert backend.used_for(some) == impl
    return values(some)


def nearly(x: list[Tensor], y: list[Tensor]) -> None:
    """Equal, but for numbers beside the border between two roundings: compilers join a product and a sum."""
    differing = sum(int((a != b).sum()) for a, b in zip(x, y, strict=True))
    assert differing <= 0.01 * sum(a.numel() for a in x)
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-14, atol=1e-6)


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("layout", ["plain", "turned", "channels last"])
def test_ema_is_that_of_foreach_to_the_last_bit_if_float32_computes_exactly(dtype: torch.dtype, layout: str) -> None:
    """On numbers of few bits no compiler can round otherwise: what is left is the bytes and the rounding by them."""
    found = []
    for impl in ("triton", "foreach", "reference"):
        some = group(dtype, layout=layout)
        for w1, high, low in zip(some.w1, some.w2, some.low, strict=True):
            w1.mul_(16).round_().div_(16)
            high.mul_(16).round_().div_(16)
            low.zero_()
        rate = 2.0**-12
        take(choose(impl), [still(some, Motion(Coupling(0.0, rate, 1.0, rate)))], count=Counter(5))
        found.append(values(some))
        assert sum(int((v * 16 != (v * 16).round()).sum()) for v in found[-1]) > 100  # there was something to round
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("layout", ["plain", "channels last"])
def test_ema_is_that_of_foreach(layout: str) -> None:
    nearly(*(moved(impl, group(layout=layout), EMA) for impl in ("triton", "foreach")))


@pytest.mark.parametrize("method", [BELAY, methods.lookahead(k=2)], ids=["belay", "lookahead"])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_averages_that_pull_are_those_of_foreach(method, dtype: torch.dtype) -> None:
    some, other = group(dtype), group(dtype)
    nearly(moved("triton", some, method), moved("foreach", other, method))
    for x, y in zip(some.w1, other.w1, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2 if dtype == bf16 else 1e-5, atol=1e-5)


def test_velocities_are_those_of_foreach() -> None:
    runs = []
    for impl in ("triton", "foreach"):
        some = group()
        some.v1, some.v2 = ([torch.full_like(w, v) for w in some.w1] for v in (0.1, -0.2))
        swings = [Swing(v, i) for v, i in ((some.v1, SWINGING.inertia1), (some.v2, SWINGING.inertia2)) if i]
        take(choose(impl), [still(some, Motion(SWINGING.coupling(), *swings))], updates(some, 1), count=Counter())
        runs.append(some)
    nearly(*map(values, runs))
    for x, y in zip(*(run.v1 + run.v2 + run.w1 for run in runs), strict=True):
        assert x.dtype == f32
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_parts_of_a_parameter_have_its_bytes() -> None:
    """However ranks share it, and whatever order memory has: rows, columns, or both."""
    shape = (6, 4, 5)
    whole = moved("triton", group(shapes=[shape]), EMA, 1)[0]
    start = normal(shape, f32, seed=0), planes.joined(*planes.split(normal(shape, f32, seed=100)))
    update = normal(shape, f32, seed=1000).mul_(0.01)
    for dim in range(3):
        for layout in ("plain", "turned"):
            rows = Place.of("p0", shape).split(2, dim)
            for i, place in enumerate(rows):
                w1, w2, u = (laid_out(t.split(2, dim)[i].contiguous(), layout) for t in (*start, update))
                part = Tensors([w1.clone()], *([p] for p in planes.split(w2)[:1]), places=[place])
                part.low = [planes.split(w2)[1]]
                backend = choose("triton")
                take(backend, [still(part, Motion(EMA.coupling()))], [u], count=Counter(5))
                assert backend.used_for(part) == "triton"
                assert values(part)[0].equal(whole.split(2, dim)[i])


def test_parameters_of_more_than_32_bits_of_elements() -> None:
    rows, columns = 1 << 20, 1 << 14
    places = [Place("w", (rows, columns), (row - 1, columns - 40), (1, 40)) for row in (1 << 18, 1 << 19)]
    places += [Place("w", (1, rows * columns), (0, (1 << 32) - 15), (1, 40))]  # begins below 2³² and ends above it
    places += [Place("w", (rows, columns), (1 << 18, 0), (20, 2))]  # and one that is not a run
    shapes = [place.shape for place in places]
    runs = [moved(impl, group(shapes=shapes, places=places), EMA, 2) for impl in ("triton", "foreach")]
    nearly(*runs)
    others = moved("triton", group(shapes=shapes), EMA, 2)
    assert not any(map(torch.equal, runs[0], others))  # that bytes matter shows here


def test_layouts_that_kernels_cannot_tell_are_left_to_foreach() -> None:
    shape = (3, 4, 5, 2, 3)
    w1 = normal(shape, f32).permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
    some = Tensors([w1], [torch.zeros_like(w1, dtype=bf16)], low=[torch.zeros_like(w1, dtype=torch.uint8)])
    some.places = [Place.of("p0", shape)]
    backend = choose("triton")
    take(backend, [still(some, Motion(EMA.coupling()))], count=Counter())
    assert backend.used_for(some) == "foreach"
    assert (values(some)[0] / w1).mean().item() == pytest.approx(0.01, rel=1e-3)


def test_a_skipped_step_leaves_every_bit_and_so_does_a_step_of_rest() -> None:
    for motion, keep in ((Motion(BELAY.coupling()), 0.0), (Motion(Coupling(0.0, 0.0, 1.0, 0.0)), None)):
        some = group()
        before = some.copy()
        keep_it = None if keep is None else torch.tensor(keep, device=WHERE)
        take(choose("triton"), [still(some, motion)], None if keep is None else updates(some, 1), keep_it, Counter())
        assert all(map(same, some.all(), before.all()))


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
def test_nothing_finite_becomes_infinite_and_nothing_else_finite() -> None:
    largest = torch.finfo(f32).max
    w1 = torch.tensor([largest, -largest, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 0.0], device=WHERE)
    runs = []
    for impl in ("triton", "foreach"):
        some = Tensors([w1.clone()], [], places=[Place.of("w", (8,))])
        some.w2, some.low = ([p] for p in planes.split(torch.where(w1.isinf(), 0.0, w1)))
        take(choose(impl), [still(some, Motion(Coupling(0.0, 0.25, 1.0, 0.25)))], count=Counter(3))
        runs.append(values(some)[0])
    assert same(*(run.nan_to_num(7.0) for run in runs))
    assert runs[0][:2].isfinite().all()
    assert runs[0][2:4].tolist() == [float("inf"), float("-inf")]
    assert runs[0].isnan().tolist() == [False] * 4 + [True] + [False] * 3


def test_weights_and_average_that_meet_are_equal_to_the_last_bit() -> None:
    some = group()
    take(choose("triton"), [still(some, Motion(Coupling(0.25, 0.75, 0.75, 0.75)))], updates(some, 1), count=Counter())
    assert all(map(torch.equal, some.w1, values(some)))


def test_schedules_on_the_device_draw_the_bytes_of_the_step() -> None:
    runs = []
    for impl in ("triton", "foreach"):
        some, count, backend = group(), Counter(0), choose(impl)
        motions = [Motion(Coupling(0.0, b, 1.0, b)) for b in (0.1, 0.2)]
        for step in range(4):
            move = scheduled(some, *motions) if impl == "triton" else still(some, motions[step % 2])
            take(backend, [move], updates(some, step), count=count)
        runs.append(values(some))
    nearly(*runs)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchbelay.ops.triton import layout
from torchbelay.ops.triton.kernels import move

POINTERS = {"table": "*i64", "blocks": "*i32", "current": "*fp32", "grads": "*i64", "shares": "*fp32", "keep": "*i64",
            "scale": "*i64", "count": "*i64"}
WAYS = int(layout.WAYS)
for rule, kinds, mapped in ((layout.STEPPED, 1 << 3, True), (layout.ADAMW, 1 << 3 | 1 << WAYS + 3, False)):
    constants = {
        "COLUMNS": int(layout.HEAD) + int(layout.SLOT), "KINDS": kinds, "AVERAGES": 1, "RULE": rule.value,
        "PULLS": False, "SWING1": False, "SWING2": False, "RESTS": False, "KEEP": False, "SCALED": False,
        "HOLES": False, "STOCHASTIC": False, "MAPPED": mapped, "BLOCK": 1024,
    }
    signature = POINTERS | {"copies": "i64"} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in move.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(move.arg_names) if name in POINTERS}
    source = ASTSource(move, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    print(made.asm["ptx"].count("ld.global.v4.b32"))
"""


@pytest.mark.slow
def test_a_gpus_compiler_takes_the_kernels_and_whole_blocks_are_loaded_in_wide_words(tmp_path: Path) -> None:
    """What the interpreter runs may not compile. No GPU is needed for that."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    file = tmp_path / "compile.py"
    file.write_text(COMPILE)  # kernels are read from files
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = [int(line) for line in done.stdout.split()]
    assert counts == [2, 8 + 4]  # w1 alone; p, g, m and v of float32, two per thread, and of bfloat16, one

"""What the tests of the operations share: the device, random tensors, springs, and equality to the last bit."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers import problems
from helpers.list_operations import DTYPES, PAIRS, State, joined, make_state
from torchbelay.ops import reference
from torchbelay.physics.spring import Spring

Shape = tuple[int, ...]


@pytest.fixture(scope="session", params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Draw:
    """Fresh random tensors, the same for the same seed on every device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Shape, dtype: torch.dtype = torch.float64) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.generator, dtype=wide).to(self.device, dtype)

    def bits(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Any value that the dtype has, nans with their payloads included."""
        size = (*shape, dtype.itemsize)
        drawn = torch.randint(256, size, generator=self.generator, dtype=torch.uint8).to(self.device)
        return drawn.reshape(-1).view(dtype).reshape(shape)


@pytest.fixture(scope="session")
def drawing(device: str) -> Callable[[int], Draw]:
    """A function that makes a Draw from a seed."""
    return lambda seed: Draw(device, seed)


@pytest.fixture
def draw(drawing: Callable[[int], Draw]) -> Draw:
    return drawing(20231109)


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Iterable[Tensor], Iterable[Tensor]], bool]:
    """Whether two lists agree in dtype, shape and every bit: nan equals nan, 0 and −0 differ."""

    def same(xs: Iterable[Tensor], ys: Iterable[Tensor]) -> bool:
        return all(problems.same(x, y) for x, y in zip(xs, ys, strict=True))

    return same


@pytest.fixture
def mixed_state(draw, device) -> State:
    """Every dtype, and every pair of dtypes, in one list."""
    return joined(*(make_state(draw, pair) for pair in [*((d, d) for d in DTYPES), *PAIRS]))


SPRINGS = {
    "both swing": {"k": 1.0, "m1": 10.0, "m2": 20.0, "c1": 5.0, "c2": 10.0},
    "unequal damping": {"k": 0.3, "m1": 2.0, "m2": 1.5, "c1": 1.0, "c2": 2.5},
    "w1 swings": {"k": 1.0, "m1": 10.0, "m2": 20.0, "c1": 8.0},
    "w2 swings": {"k": 1.0, "m1": 10.0, "m2": 20.0, "c2": 16.0},
    "w2 swings and watches": {"k": 1.0, "m1": float("inf"), "m2": 20.0, "c2": 16.0},
    "another dt": {"k": 1.0, "m1": 10.0, "m2": 20.0, "c1": 5.0, "c2": 10.0, "dt": 0.5},
}


@pytest.fixture(params=["derived", "printed"])
def force(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=SPRINGS.values(), ids=SPRINGS.keys())
def spring(request: pytest.FixtureRequest, force: str) -> Spring:
    """A spring with velocities, of one mass or of both."""
    return Spring(**request.param, force=force)


@pytest.fixture
def algorithm1(spring: Spring) -> Callable[..., tuple[Tensor, ...]]:
    """The oracle's step of that spring, in (w1, w2, v1, v2, u): every number is spelled out, none is infinite."""
    m1, m2, dt = min(spring.m1, 1e300), spring.m2, spring.dt  # at 1e300 α is 1 to the last bit
    c1, c2 = (2 * m / dt if c is None else c for m, c in ((m1, spring.c1), (m2, spring.c2)))
    return partial(
        reference.algorithm1_with_velocities, k=spring.k, m1=m1, m2=m2, c1=c1, c2=c2, dt=dt, force=spring.force
    )

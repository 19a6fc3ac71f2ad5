"""Random settings and random weights for comparisons of two classes that should do the same."""

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DECAYS = (0.0, 1.0, 0.5, 0.9, 0.999, 0.9999)


def decay(chance: random.Random) -> float:
    """A decay: 0, 1, a usual one, or any."""
    return chance.choice([*DECAYS, chance.random()])


@torch.no_grad()
def walk(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Give floating-point weights a random step of about their own size, and add 1 to integers."""
    for w in weights:
        if w.is_floating_point() or w.is_complex():
            w.add_(torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype))
        else:
            w.add_(1)


def assert_close(mine: Sequence[Tensor], theirs: Sequence[Tensor], *, loose: bool = False) -> None:
    """Compare lists of tensors, to about 10 roundings of their dtype, or to those of float32 if `loose`."""
    assert len(mine) == len(theirs)
    for x, y in zip(mine, theirs, strict=True):
        assert x.dtype == y.dtype
        precise = x.dtype in (torch.float64, torch.complex128) and not loose
        torch.testing.assert_close(x, y, rtol=0.0, atol=1e-14 if precise else 3e-6)

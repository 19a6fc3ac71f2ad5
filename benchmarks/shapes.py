"""The models that are timed, as lists of shapes: three made up, and a real one where its library is there."""

from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def gpt() -> Shapes:
    """1.1B weights in 121 tensors: 20 layers of a transformer of width 2048, and its embedding."""
    d = 2048
    layer = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d), (d,), (d,)]
    return [(50304, d), *layer * 20]


def medium() -> Shapes:
    """355M weights in 292 tensors: GPT-2 medium."""
    d = 1024
    layer = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 24, (d,), (d,)]


def unet() -> Shapes:
    """61M weights in 510 tensors: 170 convolutions, each with a bias and a norm."""
    return [(200, 200, 3, 3), (200,), (200,)] * 170


def small() -> Shapes:
    """16.5M weights in 2,000 tensors."""
    return [(8250,)] * 2000


def vit() -> Shapes:
    """torchvision's ViT-B/16, 86M weights in 152 tensors."""
    from torchvision.models import vit_b_16

    return [tuple(p.shape) for p in vit_b_16().parameters()]


def laptop() -> Shapes:
    """10M weights in 200 tensors, for a CPU."""
    return [(50_000,)] * 200


def few() -> Shapes:
    """10M weights in 10 tensors, for a CPU: arithmetic alone."""
    return [(1000, 1000)] * 10


def many() -> Shapes:
    """1M weights in 2,000 tensors, for a CPU: Python alone."""
    return [(500,)] * 2000


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt": gpt,
    "medium": medium,
    "unet": unet,
    "small": small,
    "vit": vit,
    "laptop": laptop,
    "few": few,
    "many": many,
}


def capped(shapes: Shapes, most: int = 1500) -> Shapes:
    """As many tensors, each small enough to be checked in float64."""
    found = []
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        found.append(shape if size <= most else (most - size % 7,))
    return found

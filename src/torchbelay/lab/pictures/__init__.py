"""The drawings of the documentation, as SVG: every one is made by code, from the library's own numbers.

`python -m torchbelay.lab.pictures docs/images` writes them. Nothing here needs matplotlib or torch.
"""

from collections.abc import Callable

from . import responses, rooms, spring

# What draws each picture, by its path in docs/images. docs/start.md has one more, drawn from its own run.
PICTURES: dict[str, Callable[[], str]] = {
    "spring.svg": spring.draw,
    "rooms.svg": rooms.draw,
    **{f"methods/{name}.svg": responses.drawing(name) for name in responses.EXAMPLES},
}

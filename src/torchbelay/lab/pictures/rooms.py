"""The rooms of the package, from numbers alone at the bottom to the command at the top."""

from .svg import BLUE, GREEN, GREY, ORANGE, Drawing

# From the room that imports nothing to the one that may import all: names, what they do, colour.
FLOORS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("physics/", "explorer/"), "what a method is: four numbers, no torch; a page to play with", ORANGE),
    (("ops/",), "how four numbers move tensors: CPU and GPU", ORANGE),
    (("belay/",), "which tensors move, and when: the class Belay", BLUE),
    (("optim.py", "options.py", "curvature/", "snapshots/", "integrations/"), "what is built on Belay", BLUE),
    (("testing/", "compat/"), "checks for your code, other libraries' classes", BLUE),
    (("lab/",), "the paper's experiments and their report", GREEN),
    (("cli/",), "the command torchbelay", GREEN),
)


def draw() -> str:
    """Return the picture: one floor per layer, and arrows from a floor to the one that may import it."""
    height, gap, width = 58, 15, 470
    total = len(FLOORS) * (height + gap) + 6
    picture = Drawing(
        width,
        total,
        "The rooms of torchbelay, from the lowest: " + "; ".join(f"{', '.join(n)}: {w}" for n, w, _ in FLOORS),
    )
    for level, (names, words, colour) in enumerate(reversed(FLOORS)):
        top = 4 + level * (height + gap)
        picture.box((4, top), (width - 8, height), colour, fill=f"{colour}1f")
        picture.text((18, top + 24), ",  ".join(names), colour, size=15, bold=True)
        picture.text((18, top + 45), words, GREY, size=14)
        if level:
            picture.line((width / 2, top), (width / 2, top - gap + 1), GREY, 1.4, arrow=True)
    return picture.render()

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


WIDTH, HEIGHT, GAP, LINE = 470, 58, 15, 20  # of the picture, of a floor, between two, and of one more line of names
MOST = 3  # names in a line


def draw() -> str:
    """Return the picture: one floor per layer, and arrows from a floor to the one that may import it."""
    lines = [[names[i : i + MOST] for i in range(0, len(names), MOST)] for names, _, _ in FLOORS]
    total = sum(HEIGHT + GAP + LINE * (len(each) - 1) for each in lines) + 6
    picture = Drawing(
        WIDTH,
        total,
        "The rooms of torchbelay, from the lowest: " + "; ".join(f"{', '.join(n)}: {w}" for n, w, _ in FLOORS),
    )
    top = 4
    for level, ((_, words, colour), rows) in enumerate(reversed([*zip(FLOORS, lines, strict=True)])):
        height = HEIGHT + LINE * (len(rows) - 1)
        picture.box((4, top), (WIDTH - 8, height), colour, fill=f"{colour}1f")
        for number, row in enumerate(rows):
            picture.text((18, top + 24 + LINE * number), ",  ".join(row), colour, size=15, bold=True)
        picture.text((18, top + height - 13), words, GREY, size=14)
        if level:
            picture.line((WIDTH / 2, top), (WIDTH / 2, top - GAP + 1), GREY, 1.4, arrow=True)
        top += height + GAP
    return picture.render()

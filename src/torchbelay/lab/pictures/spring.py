"""The two masses on a spring: what the four numbers of a step do."""

from .svg import BLUE, GREY, ORANGE, Drawing, Point

_W1, _W2 = (150.0, 120.0), (470.0, 120.0)  # the centres of the masses


def draw() -> str:
    """Return the picture: weights and average, the spring between them, and the update that moves both."""
    picture = Drawing(
        620,
        250,
        "Two masses on a spring. The optimizer's update u moves the weights w1 by p·u and the average w2 by "
        "q·u. The spring moves the weights by a of the distance towards the average, and the average by b of the "
        "distance towards the weights.",
    )
    picture.curve(_coil((_W1[0] + 40, _W1[1]), (_W2[0] - 40, _W2[1])), GREY, 1.8)
    picture.circle(_W1, 40, BLUE)
    picture.circle(_W2, 40, ORANGE)
    for (x, y), name, below, mass, colour in (
        (_W1, "w1", "the weights that you train", "mass m1", BLUE),
        (_W2, "w2", "the average that you ship", "mass m2", ORANGE),
    ):
        picture.text((x, y + 7), name, colour, size=20, anchor="middle", bold=True)
        picture.text((x, y + 66), below, colour, size=13, anchor="middle")
        picture.text((x, y + 84), mass, GREY, size=12, anchor="middle")
    picture.text((310, 158), "spring, constant k", GREY, size=12, anchor="middle")
    picture.line((204, 88), (284, 88), BLUE, 2.4, arrow=True)
    picture.text((244, 78), "a of the distance", BLUE, size=13, anchor="middle")
    picture.line((416, 88), (336, 88), ORANGE, 2.4, arrow=True)
    picture.text((376, 78), "b of the distance", ORANGE, size=13, anchor="middle")
    for (x, y), factor, colour in ((_W1, "p", BLUE), (_W2, "q", ORANGE)):
        picture.line((x, 20), (x, y - 46), colour, 2.4, arrow=True)
        picture.text((x + 10, 40), f"{factor} · u", colour, size=14, bold=True)
    picture.text((310, 24), "u: the optimizer's update", GREY, size=13, anchor="middle")
    picture.text(
        (310, 238),
        "EMA: a = 0, the weights are not pulled.   BELAY: a > 0.   Momentum: a < 0.",
        GREY,
        size=13,
        anchor="middle",
    )
    return picture.render()


def _coil(start: Point, end: Point, turns: int = 9, height: float = 13) -> list[Point]:
    """Return the corners of a spring between two points on one level."""
    (left, y), (right, _) = start, end
    straight = 16
    step = (right - left - 2 * straight) / (2 * turns)
    zigzag = [(left + straight + (i + 0.5) * step, y + (height if i % 2 else -height)) for i in range(2 * turns)]
    return [start, (left + straight, y), *zigzag, (right - straight, y), end]

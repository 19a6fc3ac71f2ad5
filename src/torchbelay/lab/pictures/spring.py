"""The two masses on a spring: what the four numbers of a step do."""

from .svg import BLUE, GREY, ORANGE, Drawing, Point

_W1, _W2 = (95.0, 132.0), (375.0, 132.0)  # the centres of the masses
_MIDDLE = (_W1[0] + _W2[0]) / 2


def draw() -> str:
    """Return the picture: weights and average, the spring between them, and the update that moves both."""
    picture = Drawing(
        470,
        310,
        "Two masses on a spring. The optimizer's update u moves the weights w1 by p·u and the average w2 by "
        "q·u. The spring moves the weights by a of the distance towards the average, and the average by b of the "
        "distance towards the weights.",
    )
    picture.curve(_coil((_W1[0] + 40, _W1[1]), (_W2[0] - 40, _W2[1])), GREY, 1.8)
    picture.circle(_W1, 40, BLUE)
    picture.circle(_W2, 40, ORANGE)
    for (x, y), name, below, mass, colour in (
        (_W1, "w1", "weights that you train", "mass m1", BLUE),
        (_W2, "w2", "average that you ship", "mass m2", ORANGE),
    ):
        picture.text((x, y + 7), name, colour, size=20, anchor="middle", bold=True)
        picture.text((x, y + 62), below, colour, size=14, anchor="middle")
        picture.text((x, y + 81), mass, GREY, size=14, anchor="middle")
    picture.text((_MIDDLE, 170), "spring, constant k", GREY, size=14, anchor="middle")
    for x, end, share, colour in ((_W1[0] + 46, _MIDDLE - 8, "a", BLUE), (_W2[0] - 46, _MIDDLE + 8, "b", ORANGE)):
        picture.line((x, 98), (end, 98), colour, 2.4, arrow=True)
        picture.text(((x + end) / 2, 88), share, colour, size=16, anchor="middle", bold=True)
    for (x, y), factor, colour in ((_W1, "p", BLUE), (_W2, "q", ORANGE)):
        picture.line((x, 26), (x, y - 46), colour, 2.4, arrow=True)
        picture.text((x + 10, 52), f"{factor} · u", colour, size=16, bold=True)
    picture.text((_MIDDLE, 30), "u: the optimizer's update", GREY, size=14, anchor="middle")
    picture.text((_MIDDLE, 66), "shares of the distance", GREY, size=14, anchor="middle")
    signs = (
        "EMA: a = 0, the weights are not pulled.",
        "BELAY: a > 0, the spring attracts.",
        "a < 0: the spring repels",
        "(momentum, Generalized Primal Averaging).",
    )
    for line, words in enumerate(signs):
        picture.text((_MIDDLE, 244 + 19 * line), words, GREY, size=14, anchor="middle")
    return picture.render()


def _coil(start: Point, end: Point, turns: int = 9, height: float = 13) -> list[Point]:
    """Return the corners of a spring between two points on one level."""
    (left, y), (right, _) = start, end
    straight = 16
    step = (right - left - 2 * straight) / (2 * turns)
    zigzag = [(left + straight + (i + 0.5) * step, y + (height if i % 2 else -height)) for i in range(2 * turns)]
    return [start, (left + straight, y), *zigzag, (right - straight, y), end]

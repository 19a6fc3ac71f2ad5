"""A few shapes of SVG, in colours that are legible on a light and on a dark page.

The background is transparent and every colour has a middle lightness, because an image does not know the theme of the
page around it.
"""

from collections.abc import Iterable, Sequence
from html import escape

GREY, FAINT = "#7d828a", "#9aa0a855"  # of text and axes, and of lines that only guide the eye
BLUE, ORANGE, GREEN = "#1f8bc9", "#d9640c", "#159a72"  # Okabe and Ito's, a little nearer to the middle

Point = tuple[float, float]


class Drawing:
    """A picture of a given size, to which shapes are added one by one; coordinates are pixels from the upper left."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def line(self, start: Point, end: Point, colour: str = GREY, width: float = 1.2, *, arrow: bool = False) -> None:
        """Draw a straight line, with a head at its end if it is an arrow."""
        (x1, y1), (x2, y2) = start, end
        self._shapes.append(
            f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" stroke="{colour}" stroke-width="{width}"/>'
        )
        if arrow:
            self._head(start, end, colour, 4 + 2 * width)

    def _head(self, start: Point, end: Point, colour: str, size: float) -> None:
        (x1, y1), (x2, y2) = start, end
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length * size, (y2 - y1) / length * size
        corners = [(x2, y2), (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2)]
        self._shapes.append(f'<polygon points="{_points(corners)}" fill="{colour}"/>')

    def curve(self, points: Iterable[Point], colour: str, width: float) -> None:
        """Draw straight lines from point to point."""
        self._shapes.append(
            f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="{width}" '
            'stroke-linejoin="round"/>'
        )

    def box(self, corner: Point, size: Point, colour: str, *, radius: float = 6, fill: str = "none") -> None:
        """Draw a rectangle with round corners."""
        (x, y), (width, height) = corner, size
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'fill="{fill}" stroke="{colour}" stroke-width="1.6"/>'
        )

    def circle(self, centre: Point, radius: float, colour: str) -> None:
        """Draw a circle with a faint filling."""
        x, y = centre
        self._shapes.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{colour}33" stroke="{colour}" stroke-width="2"/>'
        )

    def text(
        self, at: Point, words: str, colour: str = GREY, *, size: float = 12, anchor: str = "start", bold: bool = False
    ) -> None:
        """Write one line of text; `at` is its start, middle or end on the base line."""
        x, y = at
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" fill="{colour}" font-size="{_n(size)}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def render(self) -> str:
        """Return the picture as the text of an SVG file."""
        width, height = _n(self.width), _n(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'role="img" font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self._shapes, "</svg>\n"])


class Axes:
    """A part of a drawing with a scale of its own: maps numbers to pixels, and draws the frame around curves."""

    def __init__(self, drawing: Drawing, corner: Point, size: Point, x: Point, y: Point) -> None:
        self.drawing, self.corner, self.size, self.x, self.y = drawing, corner, size, x, y

    def at(self, x: float, y: float) -> Point:
        """Return the pixel of a point; points beyond the scale lie on its edge."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = min(max((y - self.y[0]) / (self.y[1] - self.y[0]), 0.0), 1.0)
        return self.corner[0] + across * self.size[0], self.corner[1] + (1 - up) * self.size[1]

    def frame(self, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]]) -> None:
        """Draw a faint line and a label per tick of y, and a label per tick of x below the lowest line."""
        low = self.y[0]
        for value, label in ys:
            self.drawing.line(self.at(self.x[0], value), self.at(self.x[1], value), FAINT, 1)
            x, y = self.at(self.x[0], value)
            self.drawing.text((x - 6, y + 4), label, size=11, anchor="end")
        self.drawing.line(self.at(self.x[0], low), self.at(self.x[1], low))
        for value, label in xs:
            x, y = self.at(value, low)
            self.drawing.line((x, y), (x, y + 4))
            self.drawing.text((x, y + 17), label, size=11, anchor="middle")

    def curve(self, xs: Sequence[float], ys: Sequence[float], colour: str, width: float) -> None:
        """Draw a curve through these points."""
        self.drawing.curve((self.at(x, y) for x, y in zip(xs, ys, strict=True)), colour, width)


def _n(value: float) -> str:
    """Return a coordinate, to a tenth of a pixel: finer than anyone sees, and equal on every machine."""
    return f"{round(value, 1) + 0.0:g}"


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)

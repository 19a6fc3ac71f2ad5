"""Words and numbers as the page prints them: sentences, lists of names, durations, cells of a table."""

import re
from collections.abc import Sequence

from markupsafe import Markup, escape


def listed(names: Sequence[str], none: str = "") -> str:
    """Return names joined with commas and a final "and"; `none` replaces an empty list.

    >>> listed(["EMA", "SWA", "BELAY"]), listed(["EMA"]), listed([], none="none")
    ('EMA, SWA and BELAY', 'EMA', 'none')
    """
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names) or none


def sentence(text: str) -> str:
    """Return text with a capital at its beginning and a full stop at its end; a symbol keeps its case.

    >>> sentence("needs ring, which has not been run")
    'Needs ring, which has not been run.'
    >>> sentence("w2 converges from 90% of the starts.")
    'w2 converges from 90% of the starts.'
    """
    text = text.strip()
    if re.match(r"(?!lr\b)[a-z]{2,}\b|a [a-z]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def code(text: str) -> Markup:
    """Return text as HTML, with code between backticks marked as code.

    >>> print(code("`a < b` & c"))
    <code>a &lt; b</code> &amp; c
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def pieces(cell: str) -> list[str]:
    """Split a cell into the pieces that may stand on their own lines: a number, its interval, the lost seeds.

    >>> pieces("1.013 (1.006 to 1.02), 2 of 3 pairs")
    ['1.013', '(1.006 to 1.02),', '2 of 3 pairs']
    """
    return re.split(r"(?<=,) | (?=\()", cell)


def duration(seconds: float) -> str:
    """Return a time in seconds, or in minutes and seconds.

    >>> duration(2.34), duration(100.2)
    ('2.3 s', '1 min 40 s')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def excess(ratio: float) -> str:
    """Return by how much a ratio is above 1, in whole percents.

    >>> excess(1.118), excess(0.998), excess(0.97)
    ('+12%', '+0%', '−3%')
    """
    return f"{ratio - 1:+.0%}".replace("-0%", "+0%").replace("-", "−")

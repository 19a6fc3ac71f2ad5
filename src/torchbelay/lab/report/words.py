"""Words and numbers as the page prints them: sentences, lists of names, durations, cells of a table."""

import re
from collections.abc import Sequence

from markupsafe import Markup, escape


def listed(names: Sequence[str], none: str = "") -> str:
    """Join names as a sentence does; `none` stands for an empty list.

    >>> listed(["EMA", "SWA", "BELAY"]), listed(["EMA"]), listed([], none="none")
    ('EMA, SWA and BELAY', 'EMA', 'none')
    """
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names) or none


def sentence(text: str) -> str:
    """Text that begins and ends as a sentence does.

    >>> sentence("needs ring, which has not been run")
    'Needs ring, which has not been run.'
    >>> sentence("w2 converges from 90% of the starts.")  # a symbol stays as it is
    'w2 converges from 90% of the starts.'
    """
    text = text.strip()
    if re.match(r"(?!lr\b)[a-z]{2,}\b|a [a-z]", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def code(text: str) -> Markup:
    """Text as HTML, in which what stands between backticks is code.

    >>> print(code("`a < b` & c"))
    <code>a &lt; b</code> &amp; c
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def pieces(cell: str) -> list[str]:
    """What may stand on lines of its own in a narrow column: a number, its interval, what was lost.

    >>> pieces("1.013 (1.006 to 1.02), 2 of 3 pairs")
    ['1.013', '(1.006 to 1.02),', '2 of 3 pairs']
    """
    return re.split(r"(?<=,) | (?=\()", cell)


def duration(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"

"""The forms of Markdown that the pages of rules use, as HTML: headings, lists, tables, paragraphs, bold, code, links.

Everything else is shown as it is written. No text can become markup.
"""

import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

TOP = 3  # the level of the page's title, which stands below a heading of level 2
LOWEST = 6

_BLOCK = re.compile(r"#{1,6} |- |\|")
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\[(?P<label>[^]]+)\]\((?P<target>[^)\s]+)\)|\*\*(?P<strong>.+?)\*\*|\*(?P<em>[^*]+)\*"
)


def render(text: str, prefix: str) -> Markup:
    """Return Markdown as HTML. The ids of its headings begin with `prefix`, and links within the text lead to them.

    >>> print(render("## The rules\\n\\nA test is **passed**,\\nsee [the rules](#the-rules).", "p"))
    <h4 id="p-the-rules">The rules</h4>
    <p>A test is <strong>passed</strong>, see <a href="#p-the-rules">the rules</a>.</p>
    """
    return Markup("\n").join(_render_block(block, prefix) for block in _split_blocks(text))


def _split_blocks(text: str) -> list[list[str]]:
    """Return the lines of each heading, list, table and paragraph."""
    blocks: list[list[str]] = []
    previous = ""
    for line in text.splitlines():
        kind, last = _kind(line), _kind(blocks[-1][0]) if blocks else ""
        joins = bool(previous.strip()) and last != "#" and (kind == last or not kind)
        if line.strip() and joins:
            blocks[-1].append(line)
        elif line.strip():
            blocks.append([line])
        previous = line
    return blocks


def _kind(line: str) -> str:
    """Return the first character of a heading, of a list's item or of a table's row; nothing for other lines."""
    return line[0] if _BLOCK.match(line) else ""


def _render_block(lines: Sequence[str], prefix: str) -> Markup:
    kind = _kind(lines[0])
    if kind == "#":
        marks, title = lines[0].split(" ", 1)
        level = min(LOWEST, TOP - 1 + len(marks))
        return Markup('<h{0} id="{1}-{2}">{3}</h{0}>').format(level, prefix, _anchor(title), _inline(title, prefix))
    if kind == "-":
        items = re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE)[1:]
        return Markup("<ul>{}</ul>").format(_join("<li>{}</li>", (_inline(item, prefix) for item in items)))
    if kind == "|":
        return _render_table([_cells(line) for line in lines], prefix)
    return Markup("<p>{}</p>").format(_inline("\n".join(lines), prefix))


def _render_table(rows: Sequence[Sequence[str]], prefix: str) -> Markup:
    """Return a table, whose second row is the line below its headings."""
    head, _, *body = rows
    heads = _join('<th scope="col">{}</th>', (_inline(cell, prefix) for cell in head))
    lines = (_join("<td>{}</td>", (_inline(cell, prefix) for cell in row)) for row in body)
    form = "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
    return Markup(form).format(heads, _join("<tr>{}</tr>", lines))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _inline(text: str, prefix: str) -> Markup:
    """Return text with its code, links and emphasis; a link to another file of the repository becomes its label."""
    text, found, place = " ".join(text.split()), Markup(), 0
    for each in _INLINE.finditer(text):
        found += escape(text[place : each.start()]) + _render_span(each, prefix)
        place = each.end()
    return found + escape(text[place:])


def _render_span(span: re.Match[str], prefix: str) -> Markup:
    if span["code"]:
        return Markup("<code>{}</code>").format(span["code"])
    if span["strong"]:
        return Markup("<strong>{}</strong>").format(_inline(span["strong"], prefix))
    if span["em"]:
        return Markup("<em>{}</em>").format(_inline(span["em"], prefix))
    label, target = _inline(span["label"], prefix), span["target"]
    if target.startswith("#"):
        return Markup('<a href="#{}-{}">{}</a>').format(prefix, target[1:], label)
    if target.startswith("https://"):
        return Markup('<a href="{}" rel="noreferrer">{}</a>').format(target, label)
    return label


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _join(form: str, parts: Iterable[Markup]) -> Markup:
    return Markup().join(Markup(form).format(part) for part in parts)

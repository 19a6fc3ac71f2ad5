"""The pages of rules as HTML: every form that they use, and nothing that could become markup."""

from html.parser import HTMLParser

import pytest

from torchbelay.lab.claims.protocol import read_protocol
from torchbelay.lab.claims.study import read_study
from torchbelay.lab.report.markdown import render


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Title", '<h3 id="p-title">Title</h3>'),
        ("##### Far: below, `x`", '<h6 id="p-far-below-x">Far: below, <code>x</code></h6>'),
        ("one\ntwo\n\nthree", "<p>one two</p>\n<p>three</p>"),
        ("- one,\n  still one\n- two", "<ul><li>one, still one</li><li>two</li></ul>"),
        ("before:\n- one", "<p>before:</p>\n<ul><li>one</li></ul>"),
        ("- one\n\nafter", "<ul><li>one</li></ul>\n<p>after</p>"),
        ("**Equal** and *not run*", "<p><strong>Equal</strong> and <em>not run</em></p>"),
        ("**a\nb `c`**", "<p><strong>a b <code>c</code></strong></p>"),
        ("`a * b * c`", "<p><code>a * b * c</code></p>"),
        ("3 * 4 is 12", "<p>3 * 4 is 12</p>"),
        ("[here](#the-end)", '<p><a href="#p-the-end">here</a></p>'),
        ("[far](https://a.b/c)", '<p><a href="https://a.b/c" rel="noreferrer">far</a></p>'),
        ("[study.md](study.md)", "<p>study.md</p>"),
        ("[run](javascript:alert)", "<p>run</p>"),
        ("<b> & `<i>`", "<p>&lt;b&gt; &amp; <code>&lt;i&gt;</code></p>"),
        ('[x](https://a"onclick)', '<p><a href="https://a&#34;onclick" rel="noreferrer">x</a></p>'),
        (
            "| a | b |\n|---|---|\n| 1 | *2* |",
            '<table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead><tbody><tr>'
            "<td>1</td><td><em>2</em></td></tr></tbody></table>",
        ),
        ("", ""),
    ],
)
def test_each_form(text: str, expected: str) -> None:
    assert str(render(text, "p")) == expected


class Words(HTMLParser):
    """The words of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("page", [read_protocol(), read_study()], ids=["protocol", "study"])
def test_no_mark_of_the_pages_of_rules_is_left(page: str) -> None:
    shown = Words(str(render(page, "p"))).text
    assert not [mark for mark in ("**", "`", "](", "## ", "|--", "| ") if mark in shown]
    assert len(shown) > 0.9 * len(page)

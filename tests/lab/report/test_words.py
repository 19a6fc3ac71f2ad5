"""Words and numbers as the page prints them."""

import pytest

from torchbelay.lab.report.words import code, duration, listed, pieces, sentence


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (119.7, "2 min 0 s"), (3725.0, "62 min 5 s")],
)
def test_a_time_never_has_60_seconds(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("names", "expected"), [([], "none"), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_names_are_listed_as_in_a_sentence(names: list[str], expected: str) -> None:
    assert listed(names, none="none") == expected


def test_an_empty_list_is_empty_unless_a_word_replaces_it() -> None:
    assert listed([]) == ""
    assert listed(["a"], none="none") == "a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("needs ring", "Needs ring."),
        (" a rate fails. ", "A rate fails."),
        ("w2 converges", "w2 converges."),
        ("lr 0.1 works", "lr 0.1 works."),
        ("κ is 1", "κ is 1."),
        ("Does it hold?", "Does it hold?"),
    ],
)
def test_a_sentence_has_a_capital_and_a_full_stop_and_symbols_keep_their_case(text: str, expected: str) -> None:
    assert sentence(text) == expected


def test_code_is_marked_and_everything_else_escaped() -> None:
    assert code("`a < b` & <i>") == "<code>a &lt; b</code> &amp; &lt;i&gt;"
    assert code("one ` alone") == "one ` alone"


@pytest.mark.parametrize(
    ("cell", "split"),
    [
        ("0.0363 ± 0.0006", ["0.0363 ± 0.0006"]),
        ("0.989 (0.981 to 0.998), 2 of 3 pairs", ["0.989", "(0.981 to 0.998),", "2 of 3 pairs"]),
    ],
)
def test_a_cell_splits_before_its_interval_and_after_commas(cell: str, split: list[str]) -> None:
    assert pieces(cell) == split
    assert " ".join(pieces(cell)) == cell

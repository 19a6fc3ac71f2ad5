"""docs/methods.md: its code runs, its numbers are those of the code, and its command says what the page shows."""

import ast
import inspect
import re
from functools import cache

import pytest

import torchbelay as tb
from helpers.root import ROOT
from torchbelay.cli import main

PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
ROWS = {
    found[1]: [cell.strip() for cell in line.strip("|").split("|")[1:]]
    for line in PAGE.splitlines()
    if (found := re.match(r"\| \[`(\w+)\([^`]*\)`\]\(#\1\)", line))
}
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", PAGE, re.S | re.M))
# A method of each row, a step at which the row holds, and the values of the row's symbols.
EXAMPLES = {
    "belay": (tb.methods.belay(k=1.0, m1=10.0, m2=20.0), 1, {"κ1": 0.05, "κ2": 0.025}),
    "ema": (tb.methods.ema(0.9), 3, {"d": 0.9}),
    "hard_sync": (tb.methods.hard_sync(4), 8, {}),
    "swa": (tb.methods.swa(), 5, {"t": 5}),
    "power_ema": (tb.methods.power_ema(gamma=2.5), 5, {"t": 5, "γ": 2.5, "b": 1 - 0.8**3.5}),
    "lookahead": (tb.methods.lookahead(k=4, alpha=0.7), 8, {"s": 0.7}),
    "switch_ema": (tb.methods.switch_ema(decay=0.8, every=3), 6, {"d": 0.8}),
    "diloco": (tb.methods.diloco(every=4, lr=0.5, momentum=0.8), 8, {"α": 0.5, "μ": 0.8}),
    "easgd": (tb.methods.easgd(alpha=0.3), 2, {"s": 0.3}),
    "heavy_ball": (tb.methods.heavy_ball(0.9), 1, {"μ": 0.9}),
    "nesterov": (tb.methods.nesterov(0.9), 1, {"μ": 0.9}),
    "ema_nesterov": (tb.methods.ema_nesterov(0.7, 0.9), 1, {"β": 0.7, "γ": 0.9}),
    "schedule_free": (tb.methods.schedule_free(0.9), 4, {"β": 0.9, "c": 1 / 4}),
    "primal_averaging": (tb.methods.primal_averaging(mu_x=0.9, mu_y=0.6), 1, {"μx": 0.9, "μy": 0.6}),
    "centred": (tb.methods.centred(-0.5, rate=0.3), 1, {"θ": -0.5, "c": 0.3}),
}


def value(formula: str, symbols: dict[str, float]) -> float:
    """Return a cell's formula at these values."""
    code = formula.replace("−", "-").replace("·", "*").replace("^", "**")
    return float(eval(code, {"__builtins__": {}}, symbols))


def test_every_method_has_a_row() -> None:
    assert set(ROWS) == set(EXAMPLES) == set(tb.methods.__all__) - {"Method"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_has_the_four_numbers_of_the_code(name: str) -> None:
    method, step, symbols = EXAMPLES[name]
    found = method.coupling(step, 0.1)
    assert [value(cell, symbols) for cell in ROWS[name]] == pytest.approx([found.a, found.b, found.p, found.q])


# One section per method -----------------------------------------------------------------------------------------------


@cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _item(name: str, title: str) -> str:
    """Return what the section of a method says under a title."""
    (found,) = re.findall(rf"^- \*\*{title}.*?:\*\*\s(.*?)(?=^- |^$|\Z)", SECTIONS[name], re.S | re.M)
    return " ".join(found.split())


def test_every_method_has_a_section_in_the_order_of_the_table() -> None:
    assert list(SECTIONS) == list(ROWS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_section_has_the_four_numbers_of_the_table(name: str) -> None:
    a, b, p, q = ROWS[name]
    assert _item(name, "Four numbers") == f"a = {a}, b = {b}, p = {p}, q = {q}."


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_section_has_all_its_parts(name: str) -> None:
    section = SECTIONS[name]
    assert re.match(r"\n\*\*[^*]+\.\*\* \w", section)  # what it is
    assert re.search(r"^    \S.* = ", section, re.M)  # its equation
    assert f"](images/methods/{name}.svg)" in section
    assert len(_item(name, "When to use it").split()) > 8
    relatives = re.findall(r"\]\(#(\w+)\)", _item(name, "Relatives"))
    assert relatives
    assert {*relatives} <= {*EXAMPLES} - {name}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_section_names_the_source_of_the_docstring(name: str) -> None:
    (reference,) = re.findall(r"Reference: (.*?)\n\n", inspect.getdoc(getattr(tb.methods, name)) or "", re.S)
    said = _item(name, "Source").lower()
    (year, *_) = re.findall(r"\b(?:19|20)\d\d\b", reference)
    if name == "ema":  # the page has an older source, and the paper as a link
        assert "2310.13854" in said
    else:
        assert year in said
    if '"' in reference and name not in ("ema", "centred"):
        (title, *_) = re.findall(r'"([^"]+)"', reference)
        assert " ".join(title.split()).lower() in said


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_tests_that_a_section_names_exist(name: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", _item(name, "Test"))
    assert named
    for file, test in named:
        assert (ROOT / file).exists()
        assert not test or test in _tests(file)


# Readouts -------------------------------------------------------------------------------------------------------------

# A readout of each row, and the values of the row's symbols after 6 steps of BELAY with θ = 3.
READOUTS = {
    "blend": (tb.readouts.blend(0.65), {"s": 0.65}),
    "centre": (tb.readouts.centre(), {"θ": 3.0}),
    "bema": (tb.readouts.bema(bias_power=0.5, lag=4.0, multiplier=2.0), {"α": 0.25}),
}


def test_every_readout_has_a_row_with_the_shares_of_the_code() -> None:
    rows = re.findall(r"^\| `readouts\.(\w+)\(.*?\)` \|(.*)\|$", PAGE, re.M)
    assert {name for name, _ in rows} == set(READOUTS) == set(tb.readouts.__all__) - {"Readout", "Shares"}
    for name, cells in rows:
        readout, symbols = READOUTS[name]
        found = readout.shares("weight", tb.Spring(k=1.0, m1=10.0, m2=30.0), 6, 0.1)
        assert [value(cell, symbols) for cell in cells.split("|")] == pytest.approx(found)


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), "methods.md", "exec"), {})
    assert "'tension'" in capsys.readouterr().out


def test_the_command_says_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (command, shown), *others = re.findall(r"```\n\$ torchbelay (.*?)\n(.*?)…\n```", PAGE, re.S)
    assert not others
    assert main(command.split()) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(" ".join(shown.split()))

"""docs/theory.md: its code runs and prints what it says, its figures are drawn, and its tests exist.

`PYTHONPATH=src:tests python tests/docs/test_theory.py` fills in what was measured anew.
"""

import re

import pytest

import torchbelay as tb
from helpers import kept_records, measured
from helpers.root import ROOT
from helpers.spectra import THETAS
from torchbelay.cli import main
from torchbelay.lab.registry import PARTS
from torchbelay.physics import theta_floor

PATH = ROOT / "docs" / "theory.md"
PAGE = PATH.read_text(encoding="utf-8")


def test_the_python_of_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 4
    exec(compile("\n".join(blocks), "theory.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = re.findall(r"print\(.*\)  # (.+)", "\n".join(blocks))
    assert len(expected) == 5
    assert printed[:5] == expected
    assert printed[5].startswith("centred(theta=")
    assert printed[6].startswith("Use tb.methods.")


def test_its_figures_are_those_of_the_part() -> None:
    shown = re.findall(r"\]\((images/[\w-]+\.png)\)", PAGE)
    drawn = {f"images/{plate.name}.png" for plate in PARTS["theory"].draw(kept_records.lines("theory"))}
    assert len(shown) == 4
    assert {*shown} == drawn | {"images/advice-regret.png"}
    assert all((ROOT / "docs" / path).is_file() for path in shown)


def test_its_commands_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^torchbelay (recommend .*)$", PAGE, re.M)
    assert len(commands) == 3
    assert main([*commands[0].split(), "--json"]) == 0
    assert main(commands[1].split()) == 2  # there is no such run, and nothing else is wrong
    assert "cannot read runs/a/stats.jsonl" in capsys.readouterr().err
    assert main(commands[2].split()) == 2
    assert "there is no file 'train.py'" in capsys.readouterr().err


def test_the_numbers_in_its_words() -> None:
    words = " ".join(PAGE.split())
    assert f"the floor of β = 0.9 is {theta_floor(0.9, 1.0):.1f}".replace("-", "−") in words
    assert f"so close to the floor ({theta_floor(0.9, 0.0895):.3f})".replace("-", "−") in words
    assert f"grid of {len(THETAS) * 10 * 19:,} settings" in words
    assert tb.methods.centred(-0.9, 0.05).coupling(1, 0.1).max_stable_lr(1.0, 0.9) == pytest.approx(0.25, abs=1e-3)


def test_it_says_what_was_measured() -> None:
    assert len(measured.MARKED.findall(PAGE)) == 6
    assert measured.filled(PAGE) == PAGE, "fill it in with: PYTHONPATH=src:tests python tests/docs/test_theory.py"
    (cell,) = re.findall(r"^\| the ring's score models; .*\| (<!--.*-->) \|", PAGE, re.M)
    assert len(re.sub(r"<!--.*?-->", "", cell).split()) <= 25


if __name__ == "__main__":
    PATH.write_text(measured.filled(PAGE), encoding="utf-8")

"""docs/theory.md: its code runs and prints what it says, its figures are drawn, and its tests exist.

`PYTHONPATH=src:tests python tests/docs/test_theory.py` fills in what was measured anew.
"""

import re

import numpy as np
import pytest

import torchbelay as tb
from helpers import kept_records, measured
from helpers.root import ROOT
from helpers.spectra import THETAS, Case, best_of_grid
from torchbelay.cli import main
from torchbelay.lab.advice.analysis import Outcomes, problems
from torchbelay.lab.advice.figures import GOAL
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
    below = [t for t in range(2, 200) if theta_floor(0.9, 1 / t) > -0.9 + 1e-9]
    assert f"With β = 0.9 its steps {below[0]} to {below[-1]} are below the floor" in words
    third, ema = (tb.methods.centred(theta, 1 / 3).coupling(1, 0.1).max_stable_lr(1.0, 0.9) for theta in (-0.9, 0.0))
    assert f"at step 3 the stable range is {third:.2f}, where that of an EMA is {ema:.0f}" in words
    assert f"so close to the floor ({theta_floor(0.9, 0.0895):.3f})".replace("-", "−") in words
    assert f"grid of {len(THETAS) * 10 * 19:,} settings" in words
    assert tb.methods.centred(-0.9, 0.05).coupling(1, 0.1).max_stable_lr(1.0, 0.9) == pytest.approx(0.25, abs=1e-3)
    further = [(2 - c) ** 2 / (4 * (1 - c)) - 1 for c in (0.2, 0.4, 0.8)]
    assert "{:.0%} below the floor at c = 0.2, {:.0%} at c = 0.4 and {:.0%} at c = 0.8".format(*further) in words
    wide, ema = (tb.methods.centred(theta, 0.8).coupling(1, 0.1).max_stable_lr(1.0, 0.5) for theta in (-0.9, 0.0))
    floor = f"{theta_floor(0.5, 0.8):.3f}".replace("-", "−")
    assert (
        f"far below the floor ({floor}), which does not bind, and has {wide:.2f}, where an EMA has {ema:.0f}" in words
    )


@pytest.mark.thorough
def test_what_it_costs_to_keep_away_from_the_floor() -> None:
    assert "12 curvatures from 1 to 10⁻⁵, 10,000 steps and β1 = 0" in " ".join(PAGE.split())
    found = []
    for noise in (1e-4, 1e-8):
        case = Case(np.geomspace(1e-5, 1, 12).tolist(), 10_000, noise, 0.0)
        advice = tb.recommend(case.steps, curvatures=case.curvatures, noise=noise, batch=1)
        assert advice.is_at_the_lowest_theta
        found.append(advice.loss.total / best_of_grid(case))
    said = "the advice has {:.1f} times the least loss of the grid below at a noise of 10⁻⁴, and {:.1f} times at 10⁻⁸"
    assert said.format(*found) in " ".join(PAGE.split())


def test_what_it_says_of_searches_that_failed_follows_from_the_records() -> None:
    words, lines = " ".join(PAGE.split()), kept_records.lines("advice")
    ring, autoencoder = (Outcomes.of(lines, problem) for problem in ("ring", "autoencoder"))
    failed = [each for each in ring.ends if each.regret > GOAL]
    assert len(failed) > len(ring.ends) / 2
    assert max(each.regret for each in failed) < 1.5
    assert "Most searches on the ring ended somewhat further away." in words
    first = min(each.lr for each in autoencoder.ends if each.regret > GOAL)
    assert f"Those of the autoencoder that failed began at a rate of {first:g} or more" in words
    for problem in problems(lines):
        lrs = Outcomes.of(lines, problem).lrs
        assert f"from learning rates that are {lrs[-1] / lrs[0]:.0f}-fold apart" in words


def test_the_circles_of_the_floor_lie_where_it_binds() -> None:
    for r in kept_records.lines("theory"):
        if r["kind"] == "floor":
            c = r["rate"]
            binds = r["floor"] * (2 - c) ** 2 / (4 * (1 - c))
            assert r["measured"] == pytest.approx(binds, abs=0.01)  # θ has steps of 0.004, and x is 3% below


def test_it_says_what_was_measured() -> None:
    assert len(measured.MARKED.findall(PAGE)) == 6
    assert measured.filled(PAGE) == PAGE, "fill it in with: PYTHONPATH=src:tests python tests/docs/test_theory.py"
    (cell,) = re.findall(r"^\| the ring's score models; .*\| (<!--.*-->) \|", PAGE, re.M)
    assert len(re.sub(r"<!--.*?-->", "", cell).split()) <= 25


if __name__ == "__main__":
    PATH.write_text(measured.filled(PAGE), encoding="utf-8")

"""The page about workers: its script runs with torchrun and goes on, and its numbers are those of the code."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from helpers.root import ROOT
from helpers.torchrun import torchrun
from torchbelay.ops import workers

PAGE = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")
SCRIPT, MODES = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(COMMAND,) = re.findall(r"^    torchrun (.*)$", PAGE, re.M)


def test_the_modes_are_those_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(MODES, {"__name__": "docs"})
    shown = re.findall(r"^    (\[1\.0, .*|4 workers .*)$", PAGE, re.M)
    assert capsys.readouterr().out.splitlines() == shown
    assert len(shown) == 2


@pytest.mark.parametrize("row", re.findall(r"^\| (.*) \| (.*) \| `(\w+)\((.*)\)` \|$", PAGE, re.M), ids=lambda r: r[2])
def test_the_table_of_costs_is_that_of_the_functions(row: tuple[str, str, str, str]) -> None:
    _, formula, name, arguments = row
    for p, n in ((1000, 2), (1000, 5)):
        code = formula.replace("−", "-").replace("·", "*").replace("8P", "8*P").replace("4P", "4*P")
        found = getattr(workers, name)(**_named(arguments, p, n))
        assert found == pytest.approx(eval(code, {"P": p, "N": n}))


def _named(arguments: str, p: int, n: int) -> dict[str, object]:
    known: dict[str, dict[str, object]] = {
        "P": {"weights": p},
        "N": {"workers": n},
        "momentum=True": {"momentum": True},
    }
    return {key: value for each in arguments.split(", ") for key, value in known[each].items()}


@pytest.mark.slow
def test_the_script_runs_on_two_workers_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(command: str) -> list[str]:
        said = torchrun(command.split(), tmp_path)
        return sorted(re.findall(r"worker \d of \d, step \d+: loss of the average \d\.\d{6}", said))

    assert COMMAND.endswith("train.py 200 run")
    half = run(COMMAND.replace("200", "100"))
    whole = run(COMMAND)
    for said, steps in ((half, 100), (whole, 200)):
        losses = [re.fullmatch(rf"worker {i} of 2, step {steps}: loss of the average (.*)", said[i])[1] for i in (0, 1)]
        assert losses[0] == losses[1]
    assert float(whole[0].split()[-1]) < float(half[0].split()[-1])
    assert load_file(tmp_path / "run" / "average.safetensors")["2.weight"].shape == (1, 32)

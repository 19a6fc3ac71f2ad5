"""docs/after-training.md: its code runs, its commands are understood, and its numbers are those of the library."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import torchbelay as tb
from helpers import kept_records
from helpers.root import ROOT
from torchbelay.cli import main
from torchbelay.lab.records import select
from torchbelay.lab.registry import PARTS
from torchbelay.snapshots import merger, recorder, spacing

PAGE = (ROOT / "docs" / "after-training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
MERGES = [line for line in re.findall(r"^torchbelay merge .*$", PAGE, re.M) if "$(" not in line]


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[3][:30] for block in BLOCKS])
def test_the_code_of_the_page_runs(block: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "after-training.md", "exec"), {})


@pytest.mark.parametrize("line", MERGES)
def test_the_commands_of_the_page_run(line: str, tmp_path: Path, monkeypatch, capsys) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "my_evaluation.py").write_text("import torch\ndef accuracy(path): return 1.0\n")
    checkpoints = words[1 : min(i for i, word in enumerate(words) if word.startswith("--"))]
    for number, name in enumerate(checkpoints):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        if not name.endswith(".pt"):
            place.mkdir()
            place /= "pytorch_model.bin"
        state = {"w": torch.full((2,), float(number))}
        torch.save({"model": state, "ema": state} if "--key" in words else state, place)
    assert main(words) == 0, capsys.readouterr().err


SYNTHESES = re.findall(r"^torchbelay synthesize .*$", PAGE, re.M)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the first block of the page has run."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.manual_seed(0)
        exec(compile(BLOCKS[0], "after-training.md", "exec"), {})
    return folder


@pytest.mark.parametrize("line", SYNTHESES)
def test_the_commands_that_make_averages_run(line: str, recorded: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(recorded)
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert len(SYNTHESES) == 3


def test_it_says_how_many_snapshots_its_first_program_writes(recorded: Path) -> None:
    made = tb.snapshots.synthesize(recorded / "snapshots", tb.methods.ema(half_life=60), at=400)
    (said,) = re.findall(r"The last `print` says “(at step .*? snapshots)”", PAGE)
    assert said in str(made)
    count = len({step for average, step in made.weights if average == "average"})
    assert f"Each was written every 20 steps, so {count} times. With the first weights that makes 61 snapshots." in (
        " ".join(PAGE.split())
    )
    assert said.endswith(f"from {3 * count + 1} snapshots")


def test_the_numbers_of_averages_made_afterwards_are_those_of_the_records() -> None:
    kept = kept_records.lines("posthoc")
    said = " ".join(PAGE.partition("<!-- numbers")[2].partition("<!-- /numbers")[0].split())
    errors = {(r["recorded"], r["steps"]): r["predicted"] for r in select(kept, "error", target="window(1000)")}
    assert (f"{errors['averages', 32]:.1e}", f"{errors['weights', 64]:.1e}") == ("1.9e-04", "3.1e-02")
    assert "at 32 steps make the mean of the last 1,000 weights with an error of 1.9e-4. As many" in said
    assert "themselves make it with an error of 3.1e-2." in said
    white = [r["actual"] / r["predicted"] for r in select(kept, "white")]
    assert f"the measured error is {min(white):.2f} to {max(white):.2f} times the predicted one" in said
    networks = select(kept, "network")
    factors = [a / r["predicted"] for r in networks for a in r["actual"]]
    good = [r for r in networks if r["predicted"] <= 0.01]
    apart = max(abs(m / a - 1) for r in good for m, a in zip(r["made"], r["along"], strict=True))
    assert f"it is {min(factors):.2g} to {max(factors):.2g} times the predicted one" in said
    assert f"trained along, to {apart:.1%}" in said


def test_the_numbers_of_mnist_are_those_of_the_records() -> None:
    kept = kept_records.lines("posthoc")
    said = " ".join(PAGE.partition("<!-- numbers")[2].partition("<!-- /numbers")[0].split())
    (about,), (plain,) = select(kept, "mnist protocol"), select(kept, "mnist weights")
    lines = select(kept, "mnist network")
    factors = [r["actual"] / r["predicted"] for r in lines]
    good = [r for r in lines if r["predicted"] <= 0.01]
    apart = max(abs(r["made"] / r["along"] - 1) for r in good)
    best = min(good, key=lambda r: r["made"])
    assert f"score model of MNIST ({about['weights']:,} weights, {about['trained_steps']:,} steps of Adam)" in said
    assert f"it is {min(factors):.2g} to {max(factors):.2g} times, and the losses agree to {apart:.1%}: " in said
    assert best is min(good, key=lambda r: r["along"])
    assert (
        f"the best of {len(good)} lengths, a half-life of {best['half_life']:g} steps, has a test loss of "
        f"{best['made']:.4f} made afterwards and {best['along']:.4f} trained along; "
        f"the weights have {plain['loss']:.4f}"
    ) in said


def test_the_pictures_of_the_page_are_figures_of_the_laboratory() -> None:
    drawn = {f"images/{plate.name}.png" for plate in PARTS["posthoc"].draw(kept_records.lines("posthoc"))}
    shown = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert shown == ["images/posthoc-profiles.png", "images/posthoc-errors.png"]
    assert set(shown) <= drawn
    assert all((ROOT / "docs" / name).is_file() for name in shown)


def test_what_the_page_says_of_the_recorder_is_so() -> None:
    assert f"{spacing.PER_DOUBLING} snapshots per doubling" in PAGE
    assert recorder.MOST_WAITING == 1 << 30
    assert "two snapshots and 1 GiB wait in memory" in " ".join(PAGE.split())


def test_the_times_are_those_that_were_measured() -> None:
    spec = importlib.util.spec_from_file_location("merge_benchmark", ROOT / "benchmarks" / "merge.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    results = json.loads((ROOT / "benchmarks" / "results" / "merge.json").read_text())
    section = PAGE.partition("### Time\n")[2].partition("\n### ")[0]
    said = " ".join(section.split())
    rows, least, spans = [], [], []
    for name, turns in results["turns"].items():
        s = benchmark.summary(turns)
        times = f"{s['merge']:.2f} s | {s['copy']:.2f} s | {s['merge/copy']:.2f} | {s['CPU']:.2f} s"
        rows.append(f"| {name.replace(' ', ', ')} | {times} |")
        least.append(s["one"])
        ratios = [merged[0] / copied[0] for merged, copied in zip(turns["merge"], turns["copy"], strict=True)]
        spans.append(max(ratios) / min(ratios))
        assert s["merge/copy"] <= 1.5
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown[0] == "| inputs | merge | copy of all three | merge ÷ copy | time of the merge's computing |"
    assert shown[2:] == rows  # and no other row
    assert (results["checkpoints"], results["cores"]) == (3, 2)
    loads = sorted([results["load before"], results["load after"]])
    sentences = [
        f"Here are three safetensors files of {results['gigabytes']:g} GB each, on two cores that other programs used "
        f"as well (a load of {loads[0]:.0f} to {loads[1]:.0f}), medians of {results['rounds']} rounds.",
        f"took {min(least):.2f} to {max(least):.2f} s: on this machine",
        f"lie a factor of {min(spans):.1f} to {max(spans):.1f} apart.",
    ]
    assert [sentence for sentence in sentences if sentence not in said] == []
    numbers = re.findall(r"\d[\d.]*", " ".join(line for line in section.splitlines() if not line.startswith("|")))
    assert len(numbers) == sum(len(re.findall(r"\d[\d.]*", sentence)) for sentence in sentences)  # and no other number


def test_the_size_of_a_part_is_the_librarys() -> None:
    assert f"parts of {merger._PART:,} elements" in PAGE

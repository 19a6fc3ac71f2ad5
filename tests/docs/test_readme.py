"""README's code runs as it is printed, and its numbers are those that were measured.

`PYTHONPATH=src:tests python tests/docs/test_readme.py` fills in what was measured anew.
"""

import json
import re
import tomllib
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch

import torchbelay as tb
from helpers import kept_records, measured
from helpers.root import ROOT
from torchbelay.lab.claims import CLAIMS
from torchbelay.lab.claims.verdict import judge_claim
from torchbelay.lab.gpt.analysis import Runs, judged
from torchbelay.lab.score.effects import WAYS

README = (ROOT / "README.md").read_text(encoding="utf-8")
_BEFORE, _, _REST = README.partition("## What else")
_INSIDE, _, _AFTER = _REST.partition("\n## ")
BLOCKS = re.findall(r"```python\n(.*?)```", _BEFORE + _AFTER, re.S)
TRAINERS = re.findall(r"```python\n(.*?)```", _INSIDE, re.S)
CELL = 25  # words of a cell, at most
ATTACH = re.compile(r"^belay = tb\.Belay\(.*\).*\n", re.M)


def ema_with_settings() -> str:
    """Return the cell of EMA, which points to the decays, steps and seeds."""
    return f"{measured.ema_beside_weights()} [Settings](docs/which-method.md#a-better-model-to-evaluate-and-ship)."


def belay_below() -> str:
    """Return the cell of BELAY, which points to the table below it."""
    return f"{measured.belay()} The numbers are below."


def row(use: str) -> str:
    """Return what the row of "Which method?" that recommends `use` says was measured."""
    (found,) = [line for line in README.splitlines() if line.startswith("| ") and f"`{use}`" in line]
    return found.strip("|").split("|")[-1].strip()


# The code ------------------------------------------------------------------------------------------------------------


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    setup, example, evaluation, _, fused = BLOCKS
    assert example.count("\n") == 6
    exec(compile(setup + example + evaluation, "README.md", "exec"), names := {})
    assert names["belay"].step == 100
    assert "tensor(" in capsys.readouterr().out
    names["model"].load_state_dict(torch.load("average.pt"), strict=True)
    names["belay"].detach()
    exec(compile(fused, "README.md", "exec"), names)
    assert type(names["optimizer"]) is tb.optim.AdamW


def test_what_else_runs_in_lightning(tmp_path, monkeypatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    names = {"tb": tb, "module": Regression(), "data": torch.utils.data.DataLoader(torch.randn(8, 3))}
    names["Trainer"] = partial(lightning.Trainer, max_epochs=1, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers
        exec(compile(TRAINERS[0], "README.md", "exec"), names)
    (callback,) = [each for each in names["trainer"].callbacks if isinstance(each, names["BelayCallback"])]
    assert callback.belay.step == 8


def test_what_else_runs_in_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    data = [{"input_ids": x, "labels": x} for x in torch.randint(11, (8, 8))]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(tmp_path), max_steps=3, **quiet)
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=data)
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(TRAINERS[1], "README.md", "exec"), {"tb": tb, "trainer": trainer})
    moved = [(p.detach() - first[name]).abs().max() for name, p in trainer.model.named_parameters()]
    average = weights = 0.0  # Adam's first steps are about as long as the learning rate, which falls from 5e-5 to 0
    for step, decay in enumerate((2 / 11, 3 / 12, 4 / 13)):
        weights += 5e-5 * (3 - step) / 3
        average = decay * average + (1 - decay) * weights
    assert float(max(moved)) == pytest.approx(average, rel=0.01)  # the model is the average now
    assert average < 0.95 * weights


def test_what_else_runs_in_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(3, 1)
    names = {"tb": tb, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names["accelerator"] = accelerate.Accelerator(cpu=True)
    exec(compile(TRAINERS[2], "README.md", "exec"), names)
    names["accelerator"].backward(names["model"](torch.ones(2, 3)).sum())
    names["optimizer"].step()
    assert names["belay"].step == 1


def test_what_else_has_drop_ins_and_teachers() -> None:
    student = torch.nn.Linear(3, 1)
    names = {"tb": tb, "student": student, "optimizer": torch.optim.SGD(student.parameters(), lr=0.1)}
    exec(compile(TRAINERS[3] + TRAINERS[4], "README.md", "exec"), names)
    assert {"AveragedModel", "EMAModel", "ExponentialMovingAverage"} <= names.keys()
    student(torch.ones(2, 3)).sum().backward()
    names["optimizer"].step()
    assert torch.equal(names["teacher"].weight, names["belay"].average_state_dict()["weight"])


def test_belay_is_a_change_of_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    setup, example, _, line, _ = BLOCKS
    assert line.count("\n") == 1
    changed, times = ATTACH.subn(line, example)
    assert times == 1
    exec(compile(setup + changed, "README.md", "exec"), names := {})
    assert names["belay"].stats()["effective_lr"] == pytest.approx(0.7998e-3)


def test_the_two_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^    make (\w+)", README, re.M)
    assert commands == ["reproduce", "test"]
    assert all(re.search(rf"^{command}:", makefile, re.M) for command in commands)


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = project["dependencies"]
    versions = f"Python {project['requires-python']} and {needed}".replace(">=", "≥ ").replace("torch≥", "torch ≥")
    assert versions in README


def test_it_counts_the_methods() -> None:
    others = {*tb.methods.__all__} - {"Method", "ema", "swa", "belay"}
    assert len(others) == 12
    assert "EMA, SWA, BELAY and twelve other methods" in README


# What was measured ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["README.md", "docs/performance.md"])
def test_the_tables_say_what_was_measured(document: str) -> None:
    report = measured.load_report()
    text = (ROOT / document).read_text(encoding="utf-8")
    assert ROOT / document in report.DOCUMENTS
    assert text.count("<!-- from ") == text.count("<!-- end -->") > 0
    parts = report.tables(json.loads(report.RESULT.read_text()))
    assert report.filled(text, parts) == text, "rewrite the tables with: python benchmarks/report.py --no-figure"
    assert report.filled(text, dict.fromkeys(parts, "")) != text  # and the tables are found


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ('tb.methods.ema(0.999, warmup="ratio")', ema_with_settings),
        ('spectators={"short": tb.methods.ema(0.99), …}', measured.several_averages),
        ("tb.methods.swa()", measured.swa),
        ("tb.methods.centred(theta=-0.5, rate=1/200)", measured.repelling),
        ("tb.Spring(k=1.0, m1=2000.0, m2=500.0)", belay_below),
    ],
)
def test_a_row_says_what_was_measured(use: str, sentence: Callable[[], str]) -> None:
    assert row(use) == sentence()
    assert len(row(use).split()) <= CELL


def test_the_row_of_a_spring_that_repels_says_what_it_is_what_it_costs_and_where_its_range_is_wider() -> None:
    page, title = "which-method.md", "A learning rate that is high"
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert measured.repelling_with_a_short_average() in section
    assert (
        "| Its spring repels (Generalized Primal Averaging; schedule-free is the 1/t case). On a quadratic that widens "
        f"the stable range. It [costs loss](docs/{page}#{title.lower().replace(' ', '-')}) in some settings. |"
    ) in README
    ranges = [h for h in judged(Runs(kept_records.lines("gpt"))) if h.id.startswith("H2")]
    assert {str(h.answer) for h in ranges} == {"undecided"}
    assert "Whether it does so for networks is [undecided](docs/paper.md#with-the-controls-in)." in " ".join(
        README.split()
    )


def test_its_sentences_and_its_table_of_belay_and_ema_say_what_was_measured() -> None:
    assert measured.MARKED.findall(README) == [
        "repelling_is_lost_too",
        "belays_range_by_own_losses",
        "belay_in_three_ways",
    ]
    assert measured.filled(README) == README, "fill it in with: PYTHONPATH=src:tests python tests/docs/test_readme.py"


def test_the_table_of_belay_and_ema_is_below_that_of_methods_with_losses_before_fids_and_the_ways_in_order() -> None:
    sections = README.partition("## Which method?")[2].split("\n## ")[:2]
    assert sections[1].startswith("BELAY beside EMA\n")
    methods, ratios = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
        for section in sections
        for found in re.findall(r"(?:^\|.*\n)+", section, re.M)
    )
    assert methods[0][0] == "you want"
    images = (("MNIST", "equal memory"), ("MNIST", "decay 0.999"), ("CIFAR-10", "equal memory"))
    rows = [[f"{data}, {quantity}", ema] for data, ema in images for quantity in ("test loss", "FID")]
    rows += [["ring of Gaussians, excess test loss", "decay 0.999"], ["byte-level GPT, test loss", "equal memory"]]
    assert [row[:2] for row in ratios[2:]] == rows
    assert ratios[0] == ["", "EMA", "seeds", "equal nominal rate", "equal effective rate", "each one's best"]
    assert ratios[0][3:] == [*WAYS]
    interval, reach = r"[\d.]+ \([\d.]+ to [\d.]+\)", r"[\d.]+( \(undecided\))? to [\d.]+"
    assert all(re.fullmatch(f"{interval}|{reach}|–", cell) for _, _, _, *cells in ratios[2:] for cell in cells)


def test_belay_beats_ema_in_no_run_of_images() -> None:
    """What the caveat and BELAY's row say: in no comparison is BELAY shown to be better, whatever the rates."""
    assert measured.belay()
    readings = [each.reading for effect in measured.image_effects() for way in effect.ways for each in way]
    assert len(readings) > 12
    assert "lower" not in readings
    records = {name: kept_records.lines(name) for name in measured.IMAGES}
    answers = {
        claim.id: str(judge_claim(claim, records).finding.answer) for claim in CLAIMS if claim.id in ("C9", "C10")
    }
    assert answers == {"C9": "undecided", "C10": "holds"}
    assert "**BELAY does not beat a tuned EMA in our runs.**" in README


def test_that_the_average_steadies_the_weights_is_said_of_the_paper_alone() -> None:
    """C11 says whether BELAY makes training more robust."""
    (robust,) = [claim for claim in CLAIMS if claim.id == "C11"]
    finding = judge_claim(robust, {name: kept_records.lines(name) for name in robust.needs}).finding
    assert str(finding.answer) == "does not hold"
    assert f"| {measured.belays_range()} |" in README


def test_it_counts_the_claims() -> None:
    assert f"each of its {len(CLAIMS)} claims" in README


def test_the_effective_learning_rate_of_the_caveat() -> None:
    spring = tb.Spring(k=1.0, m1=2000.0, m2=500.0)
    assert spring.effective_lr_scale == pytest.approx(spring.alpha * spring.m1 / (spring.m1 + spring.m2))
    assert spring.alpha == pytest.approx(1, abs=5e-4)  # which the caveat leaves out
    words = f"about `m1/(m1+m2)` of the optimizer's rate: {spring.effective_lr_scale:.2f} of it"
    assert words in " ".join(README.split())


if __name__ == "__main__":
    (ROOT / "README.md").write_text(measured.filled(README), encoding="utf-8")

"""`torchbelay recommend --probe`: the curvatures of a model that a function of the user returns."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchbelay as tb
from torchbelay import measure_curvatures

PROGRAM = """
from dataclasses import dataclass

import torch
from torch import nn

from parts import layer

print("words of a script")


@dataclass
class Data:
    x: torch.Tensor


def probe():
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Tanh(), nn.Linear(5, 1))
    data = Data(torch.randn(64, 4))
    print("and of its function")
    return model, lambda: model(data.x).square().mean()


def adam():
    model, loss = probe()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return model, loss, optimizer


class Setup:
    probe = staticmethod(probe)


def single():
    return probe()[0]


def swapped():
    return probe()[::-1]


def failing():
    raise OSError("no data\\nhere")


def leaving():
    raise SystemExit("usage")


def late():
    model, _ = probe()
    return model, lambda: {}["batch"]


def arguments(config):
    return probe()


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The current folder has inner/train.py, and files that cannot be loaded."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "train.py").write_text(PROGRAM)
    (inner / "parts.py").write_text("from torch import nn\n\n\ndef layer():\n    return nn.Linear(4, 5)\n")
    (tmp_path / "needy.py").write_text("import a_package_of_nobody")
    (tmp_path / "script.py").write_text("import sys; sys.exit('usage: script')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def expected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(64, 4)
    return measure_curvatures(model, lambda: model(x).square().mean())


@pytest.mark.parametrize(
    "target", ["inner/train.py:probe", "inner/train.py:Setup.probe", "{folder}/inner/train.py:probe"]
)
def test_it_prints_what_was_measured_and_the_advice_for_it(run, folder: Path, target: str) -> None:
    printed = run(["recommend", "--steps", "300", "--batch", "16", "--probe", target.format(folder=folder)])
    found = expected()
    words = f"{found.explain()} {tb.recommend(300, batch=16, curvatures=found).explain()}"
    assert printed.status == 0
    assert " ".join(printed.out.split()) == " ".join(words.split())
    assert (
        "advice from measured curvatures was often bad: it made many of the runs worse" in words.rpartition("\n\n")[2]
    )
    assert "measured curvatures was" not in tb.recommend(300, curvatures=[1.0]).explain()
    assert printed.err == "words of a script\nand of its function\n"  # no part of the answer
    assert printed.out.startswith(
        f"20 Hessian-vector products: curvatures from {found.lowest:.3g} to {found.largest:.3g}"
    )


def test_a_module_is_found_by_its_name(run, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(folder / "inner")
    assert run("recommend --steps 300 --probe train:probe").status == 0


def test_json_has_what_was_measured(run) -> None:
    got = run("recommend --steps 300 --probe inner/train.py:probe --json").json
    found = expected()
    assert got["probe"] == {
        "curvatures": list(found.curvatures),
        "counts": list(found.counts),
        "lowest": found.lowest,
        "products": 20,
        "optimizer": "SGD",
        "foreign": [],
        "beta1": 0.0,
    }
    assert got["lr"] == tb.recommend(300, curvatures=found).lr
    assert "probe" not in run("recommend --steps 300 --curvatures 1 --json").json


def test_an_adam_is_measured_in_its_own_units(run) -> None:
    got = run("recommend --steps 300 --probe inner/train.py:adam --json").json
    assert (got["probe"]["optimizer"], got["beta1"]) == ("Adam", 0.9)
    assert run("recommend --steps 300 --beta1 0.5 --probe inner/train.py:adam --json").json["beta1"] == 0.5
    assert got["probe"]["curvatures"][0] > 3 * expected().largest  # its steps are divided by small gradients


def test_a_terminal_sees_the_progress_and_then_a_clear_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    assert run("recommend --steps 300 --probe inner/train.py:probe").status == 0
    written = shown.getvalue()
    assert "Hessian-vector product 1 of 20" in written
    assert "Hessian-vector product 20 of 20" in written
    assert written.endswith("\r\x1b[K")


WRONG = {
    "--probe train.py": "'train.py' is not FILE.py:FUNCTION; give a file and a function in it, as train.py:probe",
    "--probe :probe": "':probe' is not FILE.py:FUNCTION",
    "--probe inner/train.py:": "'inner/train.py:' is not FILE.py:FUNCTION",
    "--probe train.py:probe": "there is no file 'train.py'; give the path of a file of Python",
    "--probe trian:probe": "there is no module 'trian'; call this from its folder",
    "--probe needy.py:probe": "the file 'needy.py' needs a_package_of_nobody, which is not installed",
    "--probe script.py:probe": "the file 'script.py' raised SystemExit on import: usage: script; if it is a script",
    "--probe inner/train.py:prob": "the file 'inner/train.py' has no 'prob'; did you mean probe?",
    "--probe inner/train.py:NUMBER": "inner/train.py:NUMBER is int, not a function; name one that returns (model",
    "--probe inner/train.py:single": "inner/train.py:single returned Sequential; it must return (model, loss)",
    "--probe inner/train.py:swapped": "failed with TypeError: model=function is not a torch.nn.Module",
    "--probe inner/train.py:failing": "inner/train.py:failing failed with OSError: no data here",
    "--probe inner/train.py:leaving": "inner/train.py:leaving failed with SystemExit: usage",
    "--probe inner/train.py:late": "inner/train.py:late failed with KeyError: 'batch'",
    "--probe inner/train.py:arguments": "failed with TypeError: arguments() missing 1 required positional argument",
    "--probe x.py:f --curvatures 1 2": "--probe measures the curvatures; leave out --curvatures",
    "--probe x.py:f --from-run a.jsonl": "--probe measures the curvatures; leave out --from-run",
    "--probe x.py:f --decay 0.9": "--probe measures the curvatures; leave out --decay",
    "--probe x.py:f --beta1 1": "beta1=1.0 is out of range",  # before any work
    "--probe x.py:f --batch 0": "batch=0.0 is out of range",
    "--probe": "argument --probe: expected one argument",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_mistake_is_one_line_with_the_cure_and_status_2(run, arguments: str) -> None:
    printed = run(f"recommend --steps 300 {arguments}")
    assert WRONG[arguments] in printed.mistake("recommend", own_words=r"(?:(?:words|and) of [\w ]+\n)*")


def test_the_help_shows_how(run) -> None:
    said = " ".join(run("recommend --help").out.split())
    assert "torchbelay recommend --steps 10000 --batch 256 --probe train.py:probe" in said
    assert "returns (model, loss) for SGD, or (model, loss, optimizer) for an Adam that has stepped" in said

"""`torchbelay train`, `sample` and `fid`, through the command line."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from helpers.score_models import EDM_PRESET, NCSN_PRESET, preset_images
from torchbelay.cli import fid, main, sample, train
from torchbelay.cli.parser import Parser
from torchbelay.lab.score import data
from torchbelay.lab.score import fid as fid_module
from torchbelay.lab.score.training import commands
from torchbelay.lab.score.training.budget import Plan
from torchbelay.lab.score.training.commands import TrainedModel, evaluations_per_image
from torchbelay.lab.score.training.folder import Folder
from torchbelay.lab.score.training.presets import PRESETS, Preset

PRESET = replace(EDM_PRESET, images=32)


class Printed(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Printed]:
    """`torchbelay …` in this process and in an empty folder, with a tiny preset."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHBELAY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny-edm", PRESET)
    monkeypatch.setattr(data, "load", lambda name, path: preset_images(PRESET))

    def command(line: str) -> Printed:
        status = main(shlex.split(line))
        return Printed(status, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is finished, to be read only."""
    out = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny-edm", PRESET)
        patch.setattr(data, "load", lambda name, path: preset_images(PRESET))
        assert main(["train", "tiny-edm", "--out", str(out), "--device", "cpu"]) == 0
    return out


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# torchbelay train -----------------------------------------------------------------------------------------------------


def test_a_run_goes_to_its_own_folder(command: Callable[..., Printed], tmp_path: Path) -> None:
    printed = command("train tiny-edm --seed 7 --device cpu --every 2")
    assert (printed.status, printed.err) == (0, "")
    run = "runs/tiny-edm-seed7"
    assert files(tmp_path) == {
        f"{run}/{name}" for name in ("options.json", "stats.jsonl", "checkpoint.pt", "samples.png")
    }
    assert "step 4 of 4" in printed.out
    again = command("train tiny-edm --seed 7 --device cpu --every 2")
    assert again == (0, f"{run} is finished: 4 steps\n", "")


def test_every_option_arrives(command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(commands, "run", lambda order, console: asked.append(order) or 0)
    assert command("train tiny-edm --checkpoint 0").status == 0
    assert asked.pop().checkpoint_s == 0
    line = "train tiny-edm --out r --data d --seed 5 --budget 3m --lr 0.5 --every 9 --checkpoint 2 --device cpu"
    assert command(f"{line} --compile --keep-going").status == 0
    (order,) = asked
    assert (order.preset, order.out, order.data, order.seed) == (PRESET, Path("r"), Path("d"), 5)
    assert (order.budget.seconds, order.lr, order.every, order.checkpoint_s) == (180, 0.5, 9, 120)
    assert (order.device, order.compile, order.keep_going) == ("cpu", True, True)
    assert command("train tiny-edm").status == 0
    assert (asked[1].out, asked[1].budget, asked[1].lr) == (Path("runs/tiny-edm-seed0"), None, None)
    assert (asked[1].every, asked[1].checkpoint_s, asked[1].compile, asked[1].keep_going) == (None, 300, False, False)


def test_a_dry_run_tells_everything_and_writes_nothing(command: Callable[..., Printed], tmp_path: Path) -> None:
    printed = command("train table1-belay --dry-run --budget 2.56Mimg --device cpu")
    assert (printed.status, printed.err) == (0, "")
    expected = [
        "MNIST, to be downloaded",
        "ncsnv2, 7,426,881 parameters",
        "20,000 of 128 images: 2.56M images",
        "BELAY: Spring(k=1.0, m1=200.0, m2=50.0)",
        f"half-life {math.log(0.5) / math.log(1 - 0.0125):.4g} steps, 0.28% of the run; θ = 0.25",
        "0.05 for Adam",
        "At lr 0.05 nothing trained from a cold start in our runs (docs/paper.md); give --lr 3e-4",
        "loss .042 train / .040 test, FID 15.2",
        "runs/table1-belay-seed0: new",
        "nothing was run, and nothing written",
    ]
    for text in expected:
        assert text in printed.out
    assert "nothing trained" not in command("train table1-belay --dry-run --lr 3e-4 --device cpu").out
    assert files(tmp_path) == set()


def test_a_dry_run_does_not_measure(command: Callable[..., Printed]) -> None:
    printed = command("train tiny-edm --dry-run --budget 10m --device cpu")
    assert printed.status == 0
    assert "as many as fit into 10m: measured first" in printed.out


def test_a_dry_run_knows_what_is_there(command: Callable[..., Printed], trained: Path) -> None:
    before = {name: (trained / name).read_bytes() for name in files(trained)}
    assert f"{trained}: finished" in command(f"train tiny-edm --out {trained} --dry-run --device cpu").out
    refused = command(f"train tiny-edm --out {trained} --dry-run --device cpu --lr 1")
    assert (refused.status, refused.out) == (2, "")
    assert "was begun with no --lr, not --lr 1;" in refused.err
    assert {name: (trained / name).read_bytes() for name in files(trained)} == before


def test_the_list_says_of_every_preset_what_it_is_and_what_the_paper_has(command: Callable[..., Printed]) -> None:
    printed = command("train --list")
    assert (printed.status, printed.err) == (0, "")
    lines = printed.out.splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    assert list(rows) == list(PRESETS)
    assert rows["table1-belay"] == "BELAY [paper: loss .042 train / .040 test, FID 15.2]"
    assert rows["table1-ema"].startswith("EMA: decay .999, BELAY as m1 → ∞, and NCSNv2's own [paper: loss .056 ")
    for stem in ("table1", "cifar10", "cifar10-small", "mnist-edm"):
        assert rows[f"{stem}-matched"] == (
            "the EMA matched to BELAY: its averaging rate, at its effective learning rate"
        )
    first = lines.index(next(line for line in lines if "table1-belay" in line))
    above, caution = lines[first - 2 : first]
    assert re.fullmatch(r"Table 1: NCSNv2 on MNIST; .* \(25\.6M images, lr 0\.05\)", above)
    assert caution == "At lr 0.05 nothing trained from a cold start in our runs (docs/paper.md); give --lr 3e-4."
    assert printed.out.count("nothing trained") == 1  # of the other presets, all train


def test_a_dry_run_refuses_the_data_that_a_run_would(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHBELAY_DATA", "/nowhere")
    printed = command("train tiny-edm --dry-run --device cpu")
    assert (printed.status, printed.out) == (2, "")
    assert printed.err == (
        f"torchbelay train: TORCHBELAY_DATA names {Path('/nowhere')}, which is no folder; set it right, or use --data\n"
    )


def test_a_dry_run_of_a_timed_run_shows_what_was_measured_then(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = replace(Plan.make(PRESET, images=40), every=3)  # fewer reports than a budget of images would have
    monkeypatch.setattr(Plan, "fit_time", lambda *_, **__: plan)
    assert command("train tiny-edm --budget 2s --out run --device cpu").status == 0
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    printed = command("train tiny-edm --budget 2s --out run --device cpu --dry-run")
    assert (printed.status, printed.err) == (0, "")
    assert "5 of 8 images: 40 images, a report every 3 steps" in printed.out
    assert "run: finished" in printed.out
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_a_dry_run_refuses_a_preset_that_has_changed(
    trained: Path, command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny-edm", replace(PRESET, ramp=0.5))
    printed = command(f"train tiny-edm --out {trained} --dry-run --device cpu")
    assert (printed.status, printed.out) == (2, "")
    assert "has changed: ramp was 0.25, and is 0.5 now; train in another folder" in printed.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train", "PRESET is missing; --list shows the names"),
        ("train tabel1-belay", "unknown preset 'tabel1-belay'; did you mean table1-belay"),
        ("train tiny-edm --budget 10M", "--budget '10M' is not understood; give a time, as 90s, 10m or 1.5h, or"),
        ("train table1-belay --budget 1kimg", "8 steps are too few for table1-belay"),
        ("train tiny-edm --lr 0", "--lr 0 is not a learning rate"),
        ("train tiny-edm --lr x", "argument --lr: invalid number value: 'x'"),
        ("train tiny-edm --every 0", "argument --every: '0' is not a whole number"),
        ("train tiny-edm --seed -1", "argument --seed: '-1' is not a whole number"),
        ("train tiny-edm --device warp", "--device 'warp' is not a device; give cuda, cuda:1 or cpu"),
        ("train tiny-edm --checkpoint -1", "argument --checkpoint: '-1' is not a number of minutes; give 0 or more"),
        ("train tiny-edm --checkpoint nan", "argument --checkpoint: 'nan' is not a number of minutes; give 0 or more"),
        ("train tiny-edm --checkpoint inf", "argument --checkpoint: 'inf' is not a number of minutes; give 0 or more"),
        ("train tiny-edm --dry-run --data nowhere", "nowhere does not exist; give mnist.npz"),
        ("train tiny-edm --what", "unknown argument: --what"),
        ("sample nowhere", "nowhere has no checkpoint; train it first"),
        ("sample nowhere --out x.jpg", "--out x.jpg has the ending '.jpg'; give .png or .npz"),
        ("sample nowhere --count 0", "argument --count: '0' is not a whole number"),
        ("sample nowhere --weights w3", "argument --weights: invalid choice: 'w3'"),
        ("sample", "the following arguments are required: RUN"),
        ("fid nowhere --samples 1", "--samples 1 are too few for a covariance"),
    ],
)
def test_what_is_typed_wrongly_is_one_line_and_exit_status_2(
    command: Callable[..., Printed], line: str, said: str, tmp_path: Path
) -> None:
    printed = command(line)
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(rf"torchbelay {line.split()[0]}: [^\n]+\n", printed.err)
    assert said in printed.err
    assert files(tmp_path) == set()


@pytest.mark.parametrize("name", ["train", "sample", "fid"])
def test_every_example_of_the_help_is_understood(command: Callable[..., Printed], name: str) -> None:
    printed = command(f"{name} --help")
    assert (printed.status, printed.err) == (0, "")
    examples = re.findall(
        rf"^  (?:torchbelay|torchrun .* torchbelay\.cli) ({name} .+?)(?:  .*)?$", printed.out, flags=re.M
    )
    assert len(examples) == {"train": 5, "sample": 3, "fid": 2}[name]
    parser = Parser()
    subparsers = parser.add_subparsers()
    for verb in (train, sample, fid):
        verb.add(subparsers)
    for example in examples:
        args = parser.parse_args(shlex.split(example))
        if getattr(args, "preset", None):
            assert args.preset in PRESETS
            assert command(f"{example} --dry-run --device cpu".replace("--dry-run --dry-run", "--dry-run")).status == 0


def test_what_is_not_installed_is_said_with_a_cure(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("commands", "train"):
        monkeypatch.delitem(sys.modules, f"torchbelay.lab.score.training.{module}")
        monkeypatch.delattr(f"torchbelay.lab.score.training.{module}")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for line in ("train --list", "sample x", "fid x"):
        printed = command(line)
        assert (printed.status, printed.out) == (2, "")
        said = "this needs rich.console: pip install '.[lab]' in a clone of torchbelay"
        assert printed.err == f"torchbelay {line.split()[0]}: {said}\n"


def test_an_interruption_before_the_first_step_is_one_line(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "load", load)
    printed = command("train tiny-edm --device cpu")
    assert (printed.status, printed.out) == (130, "")
    assert re.fullmatch(r"torchbelay train: ended at once; [^\n]+\n", printed.err)


# torchbelay sample ----------------------------------------------------------------------------------------------------


def test_the_weights_are_those_of_the_checkpoint(trained: Path, command: Callable[..., Printed]) -> None:
    folder = Folder(trained)
    state = folder.load()
    assert state is not None
    own = TrainedModel.load(folder, "w1", torch.device("cpu"))
    average = TrainedModel.load(folder, "w2", torch.device("cpu"))
    assert own.step == average.step == 4
    averages = state["trainee"]["belay"]["averages"]["average"]["weights"]
    assert averages
    for name, value in own.sampler.network.state_dict().items():
        assert torch.equal(value, state["trainee"]["network"][name])
    for name, value in averages.items():
        assert torch.equal(average.sampler.network.state_dict()[name], value)
        assert name not in ("last.weight",) or not torch.equal(value, state["trainee"]["network"][name])


def test_samples_are_a_grid(trained: Path, command: Callable[..., Printed], tmp_path: Path) -> None:
    printed = command(f"sample {trained} --count 5 --out five.png --device cpu")
    assert printed == (0, "five.png: 5 images of w2 after step 4\n", "")
    assert imread(tmp_path / "five.png").shape[:2] == (2 * 8, 3 * 8)


def test_by_default_they_are_those_of_the_training(trained: Path, command: Callable[..., Printed]) -> None:
    assert command(f"sample {trained} --device cpu").status == 0
    made = trained / "samples-w2-seed0.png"
    assert made.read_bytes() == (trained / "samples.png").read_bytes()
    made.unlink()


def test_samples_as_bytes(trained: Path, command: Callable[..., Printed], tmp_path: Path) -> None:
    for out, options in (("a", ""), ("b", ""), ("c", "--seed 1"), ("d", "--weights w1")):
        assert command(f"sample {trained} --count 3 --device cpu --out {out}.npz {options}").status == 0
    a, b, c, d = (np.load(tmp_path / f"{name}.npz")["arr_0"] for name in "abcd")
    assert (a.dtype, a.shape) == (np.uint8, (3, 8, 8, 1))
    assert (a == b).all()
    assert (a != c).any()
    assert (a != d).any()


def test_a_preset_that_has_changed_cannot_be_sampled(
    trained: Path, command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny-edm", replace(PRESET, objective=replace(PRESET.objective, steps=3)))
    printed = command(f"sample {trained} --device cpu --out x.png")
    assert printed.status == 2
    assert "has changed: steps_to_sample was 2, and is 3 now" in printed.err
    assert "--out" not in printed.err  # which is a file's name here


@pytest.mark.parametrize("name", ["sample", "fid"])
def test_a_folder_that_is_no_run_is_told_without_out(
    command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(fid_module, "Inception", Stub)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint.pt").touch()
    printed = command(f"{name} other --device cpu")
    assert (printed.status, printed.out) == (2, "")
    said = "other is not a run: it has a checkpoint but no options.json; choose another folder"
    assert printed.err == f"torchbelay {name}: {said}\n"


@pytest.mark.parametrize("preset", [NCSN_PRESET, EDM_PRESET], ids=["NCSN", "EDM"])
def test_the_evaluations_of_a_sampler_are_counted(preset: Preset) -> None:
    ticks: list[int] = []
    network = preset.objective.network().eval()
    with torch.no_grad():
        preset.objective.sample(network, 2, torch.Generator().manual_seed(0), ticks.append)
    assert sum(ticks) == 2 * evaluations_per_image(preset.objective)


# torchbelay fid -------------------------------------------------------------------------------------------------------


class Stub:
    """Features that are means over quarters of an image."""

    identity = "a stub"

    def __init__(self, device: torch.device, weights: Path | None) -> None:
        self.weights = weights
        self.asked = 0

    def features(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        self.asked += len(images)
        return torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).flatten(1)


def test_fid_is_printed_and_kept(
    trained: Path, command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stubs: list[Stub] = []

    def stub(device: torch.device, weights: Path | None) -> Stub:
        stubs.append(Stub(device, weights))
        return stubs[-1]

    monkeypatch.setattr(fid_module, "Inception", stub)
    printed = command(f"fid {trained} --samples 9 --seed 3 --inception w.pth --device cpu")
    assert (printed.status, printed.err) == (0, "")
    assert command(f"fid {trained} --samples 9 --weights w1 --device cpu").status == 0
    average, own = (json.loads(line) for line in (trained / "fid.jsonl").read_text().splitlines())
    (trained / "fid.jsonl").unlink()

    folder, inception = Folder(trained), Stub(torch.device("cpu"), None)
    made = TrainedModel.load(folder, "w2", torch.device("cpu")).sampler.make(9, seed=3)
    reference = fid_module.statistics(inception.features(preset_images(PRESET).train))
    assert average["fid"] == pytest.approx(fid_module.distance(made, reference, inception), rel=1e-5)
    assert printed.out.startswith(
        f"FID {average['fid']:.4g}: 9 images of w2 after step 4 (seed 3, Heun, 2 steps) against"
    )
    told = {name: average[name] for name in ("samples", "seed", "weights", "step", "images", "sampler", "network")}
    expected = {"samples": 9, "seed": 3, "weights": "w2", "step": 4, "images": 32}
    assert told == expected | {"sampler": "Heun, 2 steps", "network": "a stub"}
    assert average["reference"] == "MNIST, 24 training images"
    assert (own["weights"], own["seed"]) == ("w1", 0)
    assert own["fid"] != average["fid"]
    assert [stub.weights for stub in stubs] == [Path("w.pth"), None]
    assert [stub.asked for stub in stubs] == [24 + 9, 9]  # the training images were kept
    assert [path for path in files(tmp_path) if path.startswith("cache/torchbelay/fid-mnist-24-")]


def test_without_torch_fidelity_it_is_one_line(
    trained: Path, command: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    printed = command(f"fid {trained} --device cpu")
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(r"torchbelay fid: FID needs torch-fidelity and torchvision .*\n", printed.err)

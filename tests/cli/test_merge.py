"""`torchbelay merge`, through `main(argv)`: what it writes, says and refuses."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchbelay.cli.progress import Bar
from torchbelay.snapshots.merger import Merge


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three checkpoints with the weights 1, 2 and 6."""
    for number, value in enumerate((1.0, 2.0, 6.0)):
        save_file({"w": torch.full((4,), value), "steps": torch.tensor(number)}, tmp_path / f"{number}.safetensors")
    return [str(tmp_path / f"{number}.safetensors") for number in range(3)]


def test_a_merge_is_written_and_described(run, paths: list[str], tmp_path: Path) -> None:
    printed = run(["merge", *paths, "--out", str(tmp_path / "out.safetensors")])
    assert printed.status == 0
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == [3.0] * 4
    *rows, last = printed.out.splitlines()
    assert [row.split()[:2] for row in rows] == [[path, "0.333333"] for path in paths]
    assert all(row.endswith("a safetensors file, 24 bytes") for row in rows)
    assert re.fullmatch(rf"{tmp_path}/out\.safetensors: 2 tensors, 24 bytes, in \d+\.\d s", last)
    assert printed.err.splitlines() == [
        "torchbelay merge: note: 'steps': integers that differ are taken from the last checkpoint",
        f"merge to {tmp_path}/out.safetensors: 100%",
    ]


@pytest.mark.parametrize(
    ("weights", "value"),
    [
        ("1-sqrt", 1 * (1 / 3) ** 0.5 + 2 * ((2 / 3) ** 0.5 - (1 / 3) ** 0.5) + 6 * (1 - (2 / 3) ** 0.5)),
        ("ema:0.5", 3.75),
        ("0,0.5,0.5", 4.0),
        ("-1,2,0", 3.0),
        ("-.5,-5e-1,2", 10.5),
    ],
)
def test_weights_are_those_of_the_function(run, paths: list[str], tmp_path: Path, weights: str, value: float) -> None:
    assert run(["merge", *paths, "--weights", weights, "--out", str(tmp_path / "out.safetensors")]).status == 0
    assert load_file(tmp_path / "out.safetensors")["w"].tolist() == pytest.approx([value] * 4, rel=1e-6)


def test_errors_name_the_flag_for_the_entry_with_the_weights(run, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, tmp_path / "a.pt")
    line = f"merge {tmp_path}/a.pt --out {tmp_path}/out.pt"
    assert "say which entry holds the weights: --key NAME" in run(line).err
    assert "--key other is not in" in run(f"{line} --key other").err


def test_normalize_key_precision_threads_and_overwrite_are_passed_on(run, tmp_path: Path) -> None:
    for number in range(2):
        whole = {"model": {"w": torch.tensor([number + 0.0])}, "ema": {"w": torch.tensor([number + 10.0])}}
        torch.save(whole, tmp_path / f"{number}.pt")
    (tmp_path / "out.pt").write_text("old")
    line = (
        f"merge {tmp_path}/0.pt {tmp_path}/1.pt --out {tmp_path}/out.pt --key ema --weights 1,3 --normalize --overwrite"
    )
    assert run(line + " --precision float64 --threads 1").status == 0
    found = torch.load(tmp_path / "out.pt")
    assert (found["ema"]["w"].item(), found["model"]["w"].item()) == (10.75, 1.0)


def test_a_dry_run_says_all_and_writes_nothing(run, paths: list[str], tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    printed = run(["merge", *paths, "--out", str(tmp_path / "out.safetensors"), "--dry-run"])
    assert (printed.status, len(printed.out.splitlines())) == (0, 3)
    assert "integers that differ" in printed.err
    assert sorted(os.listdir(tmp_path)) == before


WRONG = {
    "--out {t}/out --weights even": "weights='even' is unknown; give 'uniform'",
    "--out {t}/0.safetensors --overwrite": "is or holds the checkpoint",
    "--out {t}/no/out": "there is no folder",
    "{t}/gone --out {t}/out": "gone does not exist",
    "--out {t}/out --precision float8": "argument --precision: invalid choice",
    "--out {t}/out --threads 0": "argument --threads: '0' is not a whole number of at least 1",
    "--out {t}/out --lower": "--lower is about --greedy; give both, or none",
    "--out {t}/out --log x": "--log is about --greedy; give both, or none",
    "--out {t}/out --greedy nothing": "--greedy nothing: give a module and a function, as in my_evaluation:accuracy",
    "--out {t}/out --greedy no_module_of_this_name:f": "there is no module 'no_module_of_this_name'; call this",
    "--out {t}/out --greedy math:nothing": "the module 'math' has no 'nothing'",
    "--out {t}/out --greedy math:pi": "math:pi is float, not a function; name one that takes a path and returns a",
    "--out {t}/out --greedy math:sqrt --weights linear": "--weights and --greedy exclude each other",
    "": "the following arguments are required: --out",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_mistake_ends_in_one_line_and_status_2(run, paths: list[str], tmp_path: Path, arguments: str) -> None:
    before = sorted(os.listdir(tmp_path))
    assert WRONG[arguments] in run(["merge", *paths, *arguments.format(t=tmp_path).split()]).mistake("merge")
    assert sorted(os.listdir(tmp_path)) == before


def test_nan_ends_in_one_line_that_names_file_and_tensor(run, paths: list[str], tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, torch.nan, 1.0, 1.0]), "steps": torch.tensor(1)}, paths[1])
    printed = run(["merge", *paths, "--out", str(tmp_path / "out.safetensors")])
    assert printed.status == 2
    assert f"{paths[1]}: 'w' holds NaN or infinity" in printed.err.splitlines()[-1]
    assert not (tmp_path / "out.safetensors").exists()


def test_ctrl_c_ends_with_status_130(run, paths: list[str], tmp_path: Path, monkeypatch) -> None:
    def interrupted(self: Merge, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Merge, "write", interrupted)
    printed = run(["merge", *paths, "--out", str(tmp_path / "out.safetensors")])
    assert (printed.status, printed.err.splitlines()[-1]) == (130, "torchbelay merge: stopped; nothing was written")


INTERRUPTED = """
import os, signal, sys, threading
from torchbelay import cli
from torchbelay.snapshots import merger

came, mean = threading.Event(), merger.mean

def notice(*signal_and_frame):
    came.set()
    signal.default_int_handler(*signal_and_frame)

def late_mean(*given, **more):
    open("computing", "w").close()
    came.wait()
    return mean(*given, **more)

signal.signal(signal.SIGINT, notice)
merger.mean = late_mean
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_a_real_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The merge has begun and cannot end before the signal, however long either takes."""
    for number in range(2):
        save_file({"w": torch.full((3_000_000,), float(number))}, tmp_path / f"{number}.safetensors")
    line = [sys.executable, "-c", INTERRUPTED, "merge", "0.safetensors", "1.safetensors", "--out", "out.safetensors"]
    process = subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (tmp_path / "computing").exists():
        time.sleep(0.005)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert (process.returncode, said.splitlines()[-1]) == (130, "torchbelay merge: stopped; nothing was written")
    assert sorted(os.listdir(tmp_path)) == ["0.safetensors", "1.safetensors", "computing"]


EVALUATION = """
from safetensors.torch import load_file

def near_one_and_a_half(path):
    return abs(load_file(path)["w"][0].item() - 1.4)

def broken(path):
    return {}["key"]
"""


def test_a_greedy_soup_by_a_function_of_the_current_folder(run, paths: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "soup_evaluation.py").write_text(EVALUATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    out, log = tmp_path / "out.safetensors", tmp_path / "log"
    line = [
        "merge",
        *paths,
        "--out",
        str(out),
        "--greedy",
        "soup_evaluation:near_one_and_a_half",
        "--lower",
        "--log",
        str(log),
    ]
    printed = run(line)
    assert printed.status == 0
    assert load_file(out)["w"].tolist() == [1.5] * 4
    assert [row.split()[0] for row in printed.out.splitlines()[:-1]] == ["0.4", "0.6", "4.6", "0.1", "1.6"]
    assert printed.out.splitlines()[-1] == f"{out}: the mean of 2 of 3, score 0.1"
    assert "integers that differ" in printed.err
    assert len(log.read_text().splitlines()) == 5
    printed = run(["merge", *paths, "--out", str(tmp_path / "x"), "--greedy", "soup_evaluation:broken"])
    assert printed.status == 2
    assert "Traceback" in printed.err
    assert printed.err.splitlines()[-1].endswith(
        f"--greedy soup_evaluation:broken failed for {paths[0]}: KeyError('key')"
    )


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path: Path, ending: str) -> None:
    resource = pytest.importorskip("resource")  # a limit on the size of files stands for the disk
    state = {"w": torch.ones(10_000)}
    path = tmp_path / f"0{ending}"
    torch.save(state, path) if ending == ".pt" else save_file(state, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        printed = run(["merge", str(path), "--out", str(tmp_path / f"out{ending}")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert printed.status == 2
    assert re.match(r"torchbelay merge: .*(could not be written|File too large)", printed.err.splitlines()[-1])
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:", "the module 'soup_script' raised SyntaxError on import"),
        ("import sys; sys.exit('usage: soup')", "the module 'soup_script' raised SystemExit on import: usage: soup"),
        ("import sys\ndef f(path): sys.exit('no data')", "failed for {path}: SystemExit('no data')"),
    ],
)
def test_an_evaluation_that_is_a_broken_script_or_exits_ends_in_a_line_with_status_2(
    run, paths: list[str], tmp_path: Path, monkeypatch, source: str, said: str
) -> None:
    (tmp_path / "soup_script.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "soup_script", raising=False)
    printed = run(["merge", *paths, "--out", "out.safetensors", "--greedy", "soup_script:f"])
    assert (printed.status, printed.out) == (2, "")
    assert said.format(path=paths[0]) in printed.err.splitlines()[-1]
    assert not (tmp_path / "out.safetensors").exists()


def test_help_has_the_weights_and_examples(run) -> None:
    printed = run("merge --help")
    assert printed.status == 0
    for word in ("uniform", "1-sqrt", "ema:0.9", "2507.17634", "--greedy", "ls -dv"):
        assert word in printed.out


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("columns", ["200", "80", "30"])
def test_the_bar_fits_its_line_and_clears_it(monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Bar("work") as bar:
        for done in (0, 50, 100):
            bar(done, 100)
    *_, zero, half, whole, cleared = terminal.text.split("\r\x1b[K")
    assert "0%" in zero
    assert " 50%" in half
    assert "100%" in whole
    assert cleared == ""
    if columns != "30":
        assert all(len(line) <= int(columns) for line in (zero, half, whole))
        assert whole.count("#") == 2 * half.count("#") == 40


def test_without_a_terminal_a_quarter_is_a_line(capsys) -> None:
    with Bar("work") as bar:
        for done in range(0, 101, 5):
            bar(done, 100)
        bar(0, 0)
    assert capsys.readouterr().err.splitlines() == [f"work: {share}%" for share in (25, 50, 75, 100)]

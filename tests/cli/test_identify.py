"""`torchbelay identify`: the paragraph, the JSON, the exit status, and what it says of a wrong MODULE:FACTORY."""

import re
import subprocess
import sys

import pytest

from torchbelay.testing import identify

MODULE = """
import torch


def averaging(model, rate=0.01):
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update():
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach(), rate)

    return update, lambda: shadow


def swapped(model):
    return averaging(model, rate=0.99)


def tenth(model):
    update, read = averaging(model)
    calls = []

    def sometimes():
        calls.append(1)
        if len(calls) % 10 == 0:
            update()

    return sometimes, read


def raising(model):
    return (lambda: 1 / 0), (lambda: model)


def squared(model):
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update():
        for name, p in model.named_parameters():
            shadow[name].lerp_(p.detach() ** 2, 0.1)

    return update, lambda: shadow


def chatty(model):
    print("epoch 1")
    return averaging(model)


class Trainer:
    averaging = staticmethod(averaging)


def whole_numbers(model):
    shadow = {name: t.detach().clone() for name, t in model.state_dict().items()}

    def update():
        for name, t in model.state_dict().items():
            shadow[name].lerp_(t.detach(), 0.01)

    return update, lambda: shadow


def late(model):
    return (lambda: None), averaging(model)[1]


def single(model):
    return averaging(model)[0]


CONFIG = {"decay": 0.99}
"""


MODULES = ("train", "needy", "broken", "script")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder has train.py, and modules that do not import."""
    (tmp_path / "train.py").write_text(MODULE)
    (tmp_path / "needy.py").write_text("import a_package_of_nobody")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no GPU\\nhere')")
    (tmp_path / "script.py").write_text("import sys; sys.exit('usage: script')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def factory(name: str):
    namespace: dict = {}
    exec(MODULE, namespace)
    return namespace[name]


def test_it_prints_the_paragraph_and_ends_with_0_if_nothing_looks_wrong(run) -> None:
    printed = run("identify train:averaging --steps 32")
    assert (printed.status, printed.err) == (0, "")
    assert max(map(len, printed.out.splitlines())) <= 80
    assert " ".join(printed.out.split()) == str(identify(factory("averaging"), steps=32))


def test_it_ends_with_1_if_there_is_a_problem(run) -> None:
    printed = run("identify train:swapped --steps 32")
    assert (printed.status, printed.err) == (1, "")
    assert "decay and 1 − decay are swapped" in " ".join(printed.out.split())


@pytest.mark.parametrize(("name", "said"), [("raising", "ZeroDivisionError"), ("squared", "linear")])
def test_it_ends_with_3_if_the_code_cannot_be_identified(run, name: str, said: str) -> None:
    printed = run(f"identify train:{name} --steps 16")
    assert (printed.status, printed.err) == (3, "")
    assert said in printed.out
    assert run(f"identify train:{name} --steps 16 --json").json["reason"] is not None


def test_it_ends_with_1_if_the_code_raises_on_tensors_that_models_have(run) -> None:
    printed = run("identify train:whole_numbers --steps 16")
    assert (printed.status, printed.err) == (1, "")
    said = " ".join(printed.out.split())
    assert "Nothing looks wrong" not in said
    assert "One problem: Whole numbers: update() number 1 raised" in said


@pytest.mark.parametrize("form", ["", " --json"])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("train:tenth --steps 64", "say so by --every 10."),
        ("train:averaging --steps 64 --every 3", "as --every 3 says."),
        ("train:late --steps 16", "look at more of them by --steps."),
    ],
)
def test_problems_name_the_flags_of_the_command(run, asked: str, said: str, form: str) -> None:
    printed = run(f"identify {asked}{form}")
    assert printed.status == 1
    assert said in " ".join(printed.out.split())


@pytest.mark.parametrize("steps", ["-1", "3", "4.5", "many"])
def test_the_least_number_of_steps_is_named(run, steps: str) -> None:
    printed = run(f"identify train:averaging --steps {steps}")
    assert printed.status == 2
    assert f"'{steps}' is not a whole number of at least 4" in printed.err


def test_every_says_what_is_meant(run) -> None:
    assert run("identify train:tenth --steps 64").status == 1
    assert run("identify train:tenth --steps 64 --every 10").status == 0


def test_a_function_of_a_class_is_found(run) -> None:
    assert run("identify train:Trainer.averaging --steps 16").status == 0


def test_json_has_every_digit(run) -> None:
    printed = run("identify train:tenth --steps 64 --json")
    found = identify(factory("tenth"), steps=64)
    got = printed.json
    assert printed.status == 1
    assert [tuple(c.values()) for c in got["couplings"]] == [(c.a, c.b, c.p, c.q) for c in found.couplings]
    assert (got["warmup"]["law"], got["warmup"]["every"], got["growth"]) == ("none", 10, found.growth)
    assert got["problems"] == [each.replace("every=10", "--every 10") for each in found.problems]
    assert got["buffers"] == {"treatment": "left out", "dtype": "", "error": ""}
    assert got.keys() == set(vars(found))


def test_json_of_code_that_prints_is_json(run) -> None:
    printed = run("identify train:chatty --steps 16 --json")
    assert printed.json["problems"] == []
    assert "epoch 1" in printed.err


def test_json_of_code_that_does_not_run_is_json(run) -> None:
    printed = run("identify os:path.join --json")
    assert printed.status == 3
    assert printed.json["couplings"] == []
    assert "factory(model) raised TypeError" in printed.json["problems"][0]


WRONG = {
    "train": "'train' is not MODULE:FACTORY; give a module and a function in it, as train:averaging",
    "train:": "'train:' is not MODULE:FACTORY",
    ":averaging": "':averaging' is not MODULE:FACTORY",
    "train.py:averaging": "'train.py:averaging' names a file; give the module: train:averaging, from its folder",
    "folder/train.py": "names a file; give the module: train:FACTORY",
    "trian:averaging": "there is no module 'trian'; call this from its folder, or put that on PYTHONPATH",
    "train.inner:averaging": "there is no module 'train.inner'",
    "needy:averaging": "the module 'needy' needs a_package_of_nobody, which is not installed",
    "broken:averaging": "the module 'broken' raised RuntimeError on import: no GPU here; if it is a script",
    "script:averaging": "the module 'script' raised SystemExit on import: usage: script; if it is a script",
    "train:averging": "the module 'train' has no 'averging'; did you mean averaging?",
    "train:zzz": "the module 'train' has no 'zzz'; give the name of a function in it",
    "train:CONFIG": "train:CONFIG is dict, not a function; name one that takes a model and returns (update, read)",
    "train:single": "factory(model) returned function; it must return (update, read)",
    "train:averaging --steps 3": "argument --steps: '3' is not a whole number of at least 4",
    "train:averaging --steps many": "argument --steps: 'many' is not a whole number of at least 4",
    "train:averaging --every 0": "argument --every: '0' is not a whole number of at least 1",
    "": "the following arguments are required: MODULE:FACTORY",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_ends_in_one_line_with_the_cure_and_status_2(run, arguments: str) -> None:
    assert WRONG[arguments] in run(f"identify {arguments}").mistake("identify")


def test_every_example_of_the_help_runs(run) -> None:
    printed = run("identify --help")
    assert (printed.status, printed.err) == (0, "")
    examples = re.findall(r"^  torchbelay (identify \S+(?: --\w+(?: \d+)?)*)", printed.out, flags=re.M)
    assert len(examples) == 4
    for example in examples:
        quick = example.replace("--steps 1000", "--steps 100")
        assert run(quick).status == (1 if "--every 10" in example else 0)  # its average moves at every update


@pytest.mark.slow
def test_the_installed_command_finds_a_module_of_the_current_folder(folder) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.remove(''); from torchbelay.cli import main; sys.exit(main())",
    ]
    done = subprocess.run([*command, "identify", "train:averaging", "--steps", "16"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The average follows the weights")

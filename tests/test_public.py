"""Public names are documented with an example that runs, internal names are hidden, and imports are few."""

import doctest
import inspect
import subprocess
import sys

import pytest

import torchbelay as tb

MODULES = ("methods", "optim", "readouts", "schedules", "snapshots")
PUBLIC = {name: getattr(tb, name) for name in tb.__all__ if name not in MODULES}
PUBLIC |= {
    f"{module}.{name}": getattr(getattr(tb, module), name) for module in MODULES for name in getattr(tb, module).__all__
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    assert any(found.examples for found in doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name)) or name in (
        "UnstableSpringWarning",  # an example would only repeat its parent's
    )


@pytest.mark.parametrize("name", [name for name, item in PUBLIC.items() if inspect.isclass(item)])
def test_every_public_member_is_documented(name: str) -> None:
    for member, value in vars(PUBLIC[name]).items():
        if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod)):
            assert inspect.getdoc(getattr(PUBLIC[name], member)), f"{name}.{member} has no docstring"


def test_nothing_else_is_in_the_namespace() -> None:
    names = {name for name in dir(tb) if not name.startswith("_")}
    modules = {name for name in names if inspect.ismodule(getattr(tb, name))}
    assert names - modules == set(tb.__all__) - set(MODULES)


def test_the_library_runs_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import torch, torchbelay as tb;"
        "model = torch.nn.Linear(3, 1); optimizer = tb.optim.AdamW(model.parameters());"
        "belay = tb.Belay(model, optimizer, tb.Spring.ema(decay=0.9));"
        "model(torch.ones(2, 3)).sum().backward(); optimizer.step(); assert belay.step == 1;"
        "assert 'torchbelay.ops.triton.kernels' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def imported(program: str) -> set[str]:
    """Return the names of the modules that a program imports after the line `start()`, in a process of its own."""
    frame = f"import sys\ndef start():\n    global known\n    known = set(sys.modules)\n{program}\n"
    frame += "print(*sorted(set(sys.modules) - known), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", frame], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_physics_runs_without_torch() -> None:
    modules = imported(
        "start()\n"
        "import torchbelay as tb\n"
        "from torchbelay import BelayWarning, Coupling, Method, Spring, UnstableSpringWarning, __version__, methods\n"
        "from torchbelay import schedules\n"
        "Spring(k=1.0, m1=10.0, m2=20.0).explain(), tb.methods.ema(schedules.linear(0, 1, 9)).coupling(1, 0.1), dir(tb)"
    )
    assert "torchbelay.physics.methods" in modules
    assert not {name.partition(".")[0] for name in modules} & {"torch", "numpy"}


def test_the_package_by_itself_imports_no_other_module_of_it() -> None:
    modules = imported("start()\nimport torchbelay")
    assert {name for name in modules if name.startswith("torchbelay")} == {"torchbelay", "torchbelay._version"}


def test_the_library_imports_little_besides_torch() -> None:
    modules = imported("import torch\nstart()\nimport torchbelay\ntorchbelay.Belay, torchbelay.optim.AdamW")
    assert {"torchbelay.belay", "torchbelay.optim"} <= modules
    assert not {name for name in modules if name.startswith("torch._dynamo")}
    others = {name for name in modules if not name.startswith("torchbelay")}
    assert len(others) < 20, sorted(others)


def test_a_star_import_brings_all_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from torchbelay import *", namespace)
    assert {name for name in namespace if not name.startswith("_")} == set(tb.__all__)
    assert all(namespace[name] is getattr(tb, name) for name in tb.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchbelay' has no attribute 'nothing'"):
        tb.nothing  # noqa: B018
    assert not hasattr(tb, "nothing")

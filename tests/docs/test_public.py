"""What is public is documented, with an example that runs; what is internal stays out of sight."""

import doctest
import inspect
import subprocess
import sys

import pytest

import torchbelay as tb

MODULES = ("methods", "optim")
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
            assert inspect.getdoc(getattr(PUBLIC[name], member)), f"{name}.{member} says nothing about itself"


def test_nothing_else_is_in_the_namespace() -> None:
    names = {name for name in vars(tb) if not name.startswith("_")}
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


def test_the_physics_runs_without_torch() -> None:
    """Imported on its own, from its folder, physics must not bring torch in."""
    program = (
        "import sys, types, pathlib; root = types.ModuleType('torchbelay');"
        f"root.__path__ = [{str(next(iter(tb.__path__)))!r}]; sys.modules['torchbelay'] = root;"
        "from torchbelay.physics import methods, spring; spring.Spring(k=1.0, m1=10.0, m2=20.0).explain();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

"""Functions of the user that the command line names, as MODULE:FUNCTION or FILE.py:FUNCTION."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any


class LoadError(Exception):
    """The argument does not name a function that can be loaded; the message has the cure."""


def load_function(target: str, duty: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION or FILE.py:FUNCTION names; `duty` says in errors what it has to do."""
    name, _, attribute = target.rpartition(":")
    if name.endswith(".py"):
        module, called = _import_file(Path(name)), f"the file {name!r}"
    else:
        module, called = _import_module(name), f"the module {name!r}"
    try:
        found = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        near = difflib.get_close_matches(attribute, [n for n in dir(module) if callable(getattr(module, n))])
        cure = f"did you mean {near[0]}?" if near else "give the name of a function in it"
        raise LoadError(f"{called} has no {attribute!r}; {cure}") from None
    if not callable(found):
        raise LoadError(f"{target} is {type(found).__name__}, not a function; name one that {duty}")
    return found


def _import_module(name: str) -> ModuleType:
    """Import a module by its name; the current folder comes first, as for `python -m`."""
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _one_line(f"the module {name!r}", name):
        return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module; its folder comes first, as for `python FILE`."""
    if not path.is_file():
        raise LoadError(f"there is no file {str(path)!r}; give the path of a file of Python")
    folder = path.parent.resolve()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    name = path.stem if path.stem not in sys.modules else f"_{folder.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look for it there
    with _one_line(f"the file {str(path)!r}"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _one_line(called: str, name: str = "") -> Iterator[None]:
    """Turn whatever an import raises into one line; `name` is the module that may be missing itself."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise LoadError(
                f"there is no module {missing.name!r}; call this from its folder, or put that on PYTHONPATH"
            ) from None
        raise LoadError(f"{called} needs {missing.name}, which is not installed") from None
    except (Exception, SystemExit) as error:
        raise LoadError(
            f"{called} raised {type(error).__name__} on import: {error}; if it is a script, put what it runs below: "
            "if __name__ == '__main__'"
        ) from error

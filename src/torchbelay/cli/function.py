"""The functions of users that arguments name as MODULE:FUNCTION."""

import difflib
import importlib
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any


class FunctionError(ValueError):
    """An argument does not name a function; the message has the cure."""


def load_function(target: str, *, form: str, example: str, use: str) -> Callable[..., Any]:
    """Import the function that an argument names; the current folder comes first, as for `python -m`.

    `form` is what the argument looks like, such as MODULE:FACTORY, and `use` says what the function does.
    """
    name, colon, attribute = target.partition(":")
    if name.endswith(".py"):
        wanted = attribute or form.partition(":")[2]
        raise FunctionError(f"{target!r} names a file; give the module: {Path(name).stem}:{wanted}, from its folder")
    if not (name and colon and attribute):
        raise FunctionError(f"{target!r} is not {form}; give a module and a function in it, as {example}")
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise FunctionError(
                f"there is no module {missing.name!r}; call this from its folder, or put that on PYTHONPATH"
            ) from None
        raise FunctionError(f"the module {name!r} needs {missing.name}, which is not installed") from None
    except (Exception, SystemExit) as error:
        raise FunctionError(
            f"the module {name!r} raised {type(error).__name__} on import: {error}; if it is a script, put what it "
            "runs below: if __name__ == '__main__'"
        ) from error
    try:
        function = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        near = difflib.get_close_matches(attribute, [n for n in dir(module) if callable(getattr(module, n))])
        cure = f"did you mean {near[0]}?" if near else "give the name of a function in it"
        raise FunctionError(f"the module {name!r} has no {attribute!r}; {cure}") from None
    if not callable(function):
        raise FunctionError(f"{target} is {type(function).__name__}, not a function; name one that {use}")
    return function

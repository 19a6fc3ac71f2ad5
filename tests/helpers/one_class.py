"""One class of an installed package, loaded from its file alone: the package itself may need what is not installed."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def class_alone(package: str, file: str, name: str, **around: Any) -> Any:
    """Return a class of a package's file; `around` has what the class takes from its module. Skips without the package.

    The package is not imported, and nothing else of the file is run.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is a peer that this test is about")
    path = Path(spec.submodule_search_locations[0]) / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    namespace: dict[str, Any] = {"__name__": package, **around}
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace[name]

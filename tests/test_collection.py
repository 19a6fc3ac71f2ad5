"""A file of tests that cannot be imported is an error, and not a file without tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.root import ROOT


@pytest.mark.thorough
def test_a_file_of_tests_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_broken.py").write_text(
        "from torchbelay import no_such_name\n\ndef test_it():\n    assert False\n"
    )
    (tmp_path / "test_absent.py").write_text("import pytest\n\npytest.importorskip('no_such_package')\n")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib --doctest-modules --doctest-ignore-import-errors\n"
    )
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2, found.stdout + found.stderr
    assert "ImportError: cannot import name 'no_such_name'" in found.stdout
    assert "could not import 'no_such_package'" in found.stdout  # a missing framework still skips its tests


def test_pytest_is_called_as_that_test_calls_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'addopts = "--import-mode=importlib --doctest-modules --doctest-ignore-import-errors' in text

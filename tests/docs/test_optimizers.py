"""The page about optimizers and models: its Python runs as one script."""

import re

import pytest

from helpers.root import ROOT

PAGE = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 6
    exec("\n".join(blocks), {"__name__": "docs"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "10 4",
        "1",
        "['encoder.weight', 'encoder.bias', 'decoder.weight', 'decoder.bias']",
        "True",
        "20",
        "True",
    ]

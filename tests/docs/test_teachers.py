"""The page about teachers: its Python runs as one script, and every module in it is an average that has moved."""

import re

import pytest
import torch
from torch import nn

from helpers.root import ROOT

PAGE = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 6
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        exec(block, names)
        pairs = {"student": "teacher", "critics": "targets", "generator": "sampler", "model": "teacher"}
        for trained, made in pairs.items():
            if re.search(rf"^{made} = ", block, re.M) and re.search(rf"^{trained} = ", block, re.M):
                check(names[trained], names[made])
    assert capsys.readouterr().out.splitlines() == ["True", "True", "['0.weight', '0.bias', '2.weight', '2.bias']"]


def check(model: object, made: object) -> None:
    """The average has the model's form, and is neither where the model is nor where it began."""
    assert isinstance(model, nn.Module)
    assert isinstance(made, nn.Module)
    assert type(made) is type(model)
    away = [float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), made.parameters(), strict=True)]
    assert 0 < max(away) < 0.5

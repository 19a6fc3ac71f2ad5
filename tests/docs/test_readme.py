"""README's code runs as it is printed, top to bottom, and what it shows of the command is what the command says."""

import importlib.util
import json
import re

import pytest

from helpers.root import ROOT
from torchbelay.cli import main

README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
    assert (tmp_path / "average.pt").exists()
    assert "'tension'" in capsys.readouterr().out


def test_the_command_says_what_the_readme_shows(capsys) -> None:
    (command, shown), *others = re.findall(r"```\n\$ torchbelay (.*?)\n(.*?)…\n```", README, re.S)
    assert not others
    assert main(command.split()) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(" ".join(shown.split()))


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_what_the_readme_links_to_exists(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("document", ["README.md", "docs/performance.md"])
def test_the_tables_say_what_was_measured(document: str) -> None:
    root = ROOT
    spec = importlib.util.spec_from_file_location("report", root / "benchmarks" / "report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    text = (root / document).read_text()
    assert text.count("<!-- from ") == text.count("<!-- end -->") > 0
    parts = report.tables(json.loads(report.RESULT.read_text()))
    assert report.filled(text, parts) == text
    assert report.filled(text, dict.fromkeys(parts, "")) != text  # and the tables are found

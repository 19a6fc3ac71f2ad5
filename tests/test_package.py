"""The package that is released: what the sdist and the wheel hold, and the files that the repository's hosts read."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.root import ROOT
from torchbelay import __version__, explorer

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, BUILD = SETTINGS["project"], SETTINGS["tool"]["hatch"]["build"]["targets"]
LARGEST = 3_000_000  # bytes of the wheel
LIMIT = 600  # seconds for a process, which takes a few on an idle machine


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The sdist and the wheel ---------------------------------------------------------------------------------------------


def build(source: Path, target: Path, *kinds: str) -> None:
    """Build the package at `source` without a network; the files of `source` stay as they are."""
    arguments = [word for kind in kinds for word in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *arguments]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling builds the package")
    target = tmp_path_factory.mktemp("dist")
    build(ROOT, target, "sdist", "wheel")
    return target


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(dist / f"torchbelay-{__version__}-py3-none-any.whl")


@pytest.fixture(scope="module")
def sdist(dist: Path) -> tarfile.TarFile:
    return tarfile.open(dist / f"torchbelay-{__version__}.tar.gz")


def code(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if name.startswith("torchbelay/")}


@pytest.mark.slow
def test_the_sdist_is_the_repository(sdist: tarfile.TarFile) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files are the repository's")
    found = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()} - {"PKG-INFO"}
    tracked = listed("--cached")
    assert {name for name in tracked if (ROOT / name).is_file()} - found == set()
    assert found - tracked - listed("--others", "--exclude-standard") == set()


def listed(*which: str) -> set[str]:
    """Return files of the clone that git knows, tracked ones or new ones."""
    command = ["git", "ls-files", "-z", *which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git does not tell its files: {done.stderr.strip()}")
    return {*done.stdout.split("\0")} - {""}


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_licence_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "torchbelay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "torchbelay/py.typed" in files
    added = BUILD["wheel"].get("force-include", {})  # what lives elsewhere in the repository
    for folder, place in added.items():
        files |= {
            f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.is_file()
        }
    assert code(wheel) == files
    about = {name.partition("/")[2] for name in wheel.namelist()} - {name.partition("/")[2] for name in code(wheel)}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


@pytest.mark.slow
def test_the_wheel_is_small(dist: Path) -> None:
    (size,) = [path.stat().st_size for path in dist.glob("*.whl")]
    assert size < LARGEST


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(sdist: tarfile.TarFile, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    sdist.extractall(tmp_path, filter="data")
    build(tmp_path / f"torchbelay-{__version__}", tmp_path / "again", "wheel")
    (path,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(path) as again:
        assert {name: again.read(name) for name in again.namelist()} == {
            name: wheel.read(name) for name in wheel.namelist()
        }


@pytest.mark.slow
def test_the_metadata_are_those_of_the_project(wheel: zipfile.ZipFile) -> None:
    about = message_from_bytes(wheel.read(f"torchbelay-{__version__}.dist-info/METADATA"))
    assert (about["Name"], about["Version"], about["License-Expression"]) == ("torchbelay", __version__, "Apache-2.0")
    assert about["Requires-Python"] == PROJECT["requires-python"]
    always = [need for need in about.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert always == PROJECT["dependencies"] == ["torch>=2.11"]
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload(decode=True).decode().strip() == read("README.md").strip()


@pytest.mark.slow
def test_the_wheel_trains_and_explains_with_torch_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """What torch does not need is made absent; `.venv` has all of it."""
    wheel.extractall(tmp_path / "site")
    program = f"""
import sys
absent = {sorted(needs())}
sys.modules.update(dict.fromkeys(absent))
sys.path.insert(0, {str(tmp_path / "site")!r})
import torch
import torchbelay as tb
from torchbelay.cli import main
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
belay = tb.Belay(model, optimizer, tb.methods.ema(0.999))
for x in torch.randn(10, 16, 8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
assert belay.step == 10
torch.save(belay.average_state_dict(), "average.pt")
assert tb.__file__.startswith({str(tmp_path)!r}), tb.__file__
assert main(["explain", "--k", "1", "--m1", "2000", "--m2", "500"]) == 0
assert main(["recommend", "--steps", "1000"]) == 0
assert main(["explore", "--no-open"]) == 0
assert main(["reproduce", "fig1"]) == 2
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "In the long run the pair moves at 0.7998" in " ".join(done.stdout.split())
    assert "pip install '.[lab]' in a clone of torchbelay" in done.stderr
    assert (tmp_path / "explorer.html").read_text(encoding="utf-8") == explorer.page()


def needs() -> set[str]:
    """Return the modules of all extras, but for those that torch needs itself."""
    extras = [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    names = {re.match(r"[\w-]+", need)[0].replace("-", "_") for need in extras}
    return names - {"jinja2", "sympy"} | {"sklearn", "PIL"}


# The version ---------------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == __version__
    newest = re.search(r"^## (.*)$", read("CHANGELOG.md"), re.M)[1]
    assert newest == "Unreleased" or newest.split()[0] == __version__


# What hosts read -----------------------------------------------------------------------------------------------------


def test_the_citation_has_what_the_format_demands_and_the_paper() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    (paper,) = citation["references"]
    authors = ", ".join(f"{each['given-names']} {each['family-names']}" for each in paper["authors"])
    assert f'{authors}: "{paper["title"]}"' in " ".join(read("README.md").split())
    assert paper["url"] in read("README.md")
    assert paper["url"] == PROJECT["urls"]["Paper"]


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
INPUTS = {  # what GitHub knows, with the attributes that each may have
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_takes(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() <= {"name", "description", "body", "labels", "title", "assignees", "projects", "type"}
    assert all(isinstance(form[key], str) and form[key] for key in ("name", "description"))
    ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
    assert len(ids) == len({*ids}) > 0
    for each in form["body"]:
        assert each.keys() <= {"type", "id", "attributes", "validations"}
        assert each["attributes"].keys() <= INPUTS[each["type"]]
        assert each["attributes"].get("label" if each["type"] != "markdown" else "value")
        assert each.get("validations", {}).keys() <= {"required"}
        assert each["type"] != "dropdown" or len({*each["attributes"]["options"]}) > 1


def test_there_is_a_form_for_bugs_wrong_numbers_and_features() -> None:
    assert [path.stem for path in FORMS] == ["bug", "config", "feature", "wrong-number"]


ACTIONS = {  # the inputs that these versions of the actions have, as far as we use them
    "actions/checkout@v4": {"fetch-depth"},
    "actions/setup-python@v5": {"python-version", "cache", "cache-dependency-path"},
    "actions/upload-artifact@v4": {"name", "path", "if-no-files-found", "retention-days"},
}


def steps() -> list[dict[str, Any]]:
    flow = yaml.safe_load(read(".github/workflows/ci.yml"))
    return [step for job in flow["jobs"].values() for step in job["steps"]]


def test_the_workflow_is_one_that_github_takes() -> None:
    flow = yaml.safe_load(read(".github/workflows/ci.yml"))
    assert flow.keys() == {"name", True, "permissions", "concurrency", "env", "jobs"}  # YAML reads `on` as true
    assert flow[True].keys() == {"push", "pull_request", "workflow_dispatch"}
    assert flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert job.keys() <= {"name", "runs-on", "timeout-minutes", "steps", "needs", "strategy"}
        assert job["runs-on"] == "ubuntu-latest"
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
    for step in steps():
        assert ("uses" in step) != ("run" in step)
        assert step.keys() <= {"uses", "with", "run", "name", "if", "env"}
        assert "uses" not in step or step.get("with", {}).keys() <= ACTIONS[step["uses"]]


def test_the_workflow_runs_what_the_repository_has() -> None:
    commands = [step["run"] for step in steps() if "run" in step]
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert "release" in targets
    makefile = read("Makefile")
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []
    versions = {step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", "")}
    assert all(f"Programming Language :: Python :: {version}" in PROJECT["classifiers"] for version in versions)


def test_the_badges_of_the_readme_say_what_the_project_says() -> None:
    badges = re.findall(r"!\[.*?\]\(https://img\.shields\.io/badge/(.*?)-blue\)", read("README.md"))
    python = PROJECT["requires-python"].removeprefix(">=")
    assert badges == [f"license-{PROJECT['license'].replace('-', '--')}", f"python-{python}%2B"]


# Security ------------------------------------------------------------------------------------------------------------


def test_the_package_loads_no_file_that_could_run_code() -> None:
    """What SECURITY.md says of torch.load."""
    loads = [
        (path, node)
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"\b(torch|pickle)\.loads?\(", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads")
    ]
    assert len(loads) > 5
    for path, call in loads:
        assert {each.arg: ast.unparse(each.value) for each in call.keywords}.get("weights_only") == "True", path

"""The site is built without a warning, holds every document, has no broken link, and asks no other host for a file."""

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import torchbelay as tb
from helpers import axe
from helpers.documents import PAGES, name, read
from helpers.root import ROOT
from helpers.site import Built, Page, broken, build, is_elsewhere

pytest.importorskip("zensical", reason="zensical, of the extra docs, builds the site")
pytest.importorskip("griffe", reason="griffelib, of the extra docs, reads the docstrings")

CONFIG = ROOT / "mkdocs.yml"
# Documents at the top of the repository, and the pages that they are.
AT_THE_TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
MODULES = ("methods", "schedules", "readouts", "optim", "options", "snapshots", "testing", "physics")


@pytest.fixture(scope="module")
def built() -> Built:
    return build()


@pytest.fixture(scope="module")
def html(built: Built) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(built.site.rglob("*.html"))}


def nav() -> list[str]:
    """Return the targets of the navigation."""
    text = re.sub(r"!!python\S*", "", CONFIG.read_text(encoding="utf-8"))

    def leaves(item: object) -> list[str]:
        if isinstance(item, dict):
            return [leaf for value in item.values() for leaf in leaves(value)]
        return [leaf for each in item for leaf in leaves(each)] if isinstance(item, list) else [str(item)]

    return leaves(yaml.safe_load(text)["nav"])


def test_every_document_is_in_the_navigation_once() -> None:
    documents = [AT_THE_TOP.get(name(page), name(page).removeprefix("docs/")) for page in PAGES]
    listed = nav()
    assert sorted(listed) == sorted({*listed})
    assert {*documents} - {*listed} == set()


def test_the_navigation_leads_to_pages(built: Built) -> None:
    assert [target for target in nav() if not (built.pages / target).is_file()] == []
    for target in nav():
        assert (built.site / target).with_suffix(".html").is_file()


def test_no_link_of_the_site_is_broken(built: Built, html: dict[Path, Page]) -> None:
    found = [
        broken(built.site, path, address, html)
        for path, page in html.items()
        if path.name != "404.html"  # its links begin at the root of a host
        for address in [*page.links, *page.loaded]
    ]
    assert [each for each in found if each] == []
    assert len(found) > 1000


def test_no_page_loads_anything_from_another_host(built: Built, html: dict[Path, Page]) -> None:
    assert [(str(path), each) for path, page in html.items() for each in page.loaded if is_elsewhere(each)] == []
    for path in built.site.rglob("*.css"):
        style = path.read_text(encoding="utf-8")
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*;", style) == [], path


def test_the_check_of_links_sees_what_is_broken(tmp_path: Path) -> None:
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    one.write_text('<a href="two.html#here">x</a><a href="#there">y</a><img src="no.png"><p id="here">')
    two.write_text('<h2 id="here">z</h2><script src="https://example.com/x.js"></script>')
    known = {path: Page(path.read_text()) for path in (one, two)}
    asked = [*known[one].links, *known[one].loaded]
    assert [broken(tmp_path, one, each, known) is None for each in asked] == [True, False, False]
    assert [is_elsewhere(each) for each in known[two].loaded] == [True]


def test_links_to_other_files_of_the_repository_become_addresses(built: Built, html: dict[Path, Page]) -> None:
    (repository,) = re.findall(r"^  repository: (\S+)", CONFIG.read_text(encoding="utf-8"), re.M)
    paper = html[built.site / "paper.html"].links
    assert f"{repository}/blob/main/src/torchbelay/physics/spring.py" in paper
    for page in html.values():
        for link in page.links:
            if link.startswith(f"{repository}/"):
                _, _, path = link.removeprefix(f"{repository}/").partition("/main/")
                assert (ROOT / path.partition("#")[0]).exists(), link


def test_a_page_that_links_to_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    pages = import_module("site_pages")
    source = ROOT / "docs" / "methods.md"
    places = {ROOT / "README.md": Path("index.md"), ROOT / "docs" / "paper.md": Path("paper.md")}

    def rewritten(text: str) -> str:
        return pages.rewritten(text, Path("how/methods.md"), source, places, "https://host/repository")

    assert rewritten("[a](../README.md#cost) [b](paper.md) [c](#x)") == "[a](../index.md#cost) [b](../paper.md) [c](#x)"
    assert rewritten("[a](../src) [b](../LICENSE)") == (
        "[a](https://host/repository/tree/main/src) [b](https://host/repository/blob/main/LICENSE)"
    )
    assert (
        rewritten("[docs/paper.md](paper.md#x), [README.md](../README.md)")
        == "[paper](../paper.md#x), [readme](../index.md)"
    )
    assert rewritten("```\n[a](nothing.md)\n```\n") == "```\n[a](nothing.md)\n```\n"
    badge = "[![license](https://elsewhere/badge.svg)](../LICENSE)\n![tests](https://elsewhere/tests.svg)\n"
    assert rewritten(f"# Title\n\n{badge}\nText ![a](paper.md)") == "# Title\n\n\nText ![a](../paper.md)"
    with pytest.raises(SystemExit, match=r"docs/methods.md links to nothing.md, which does not exist"):
        rewritten("[a](nothing.md)")
    for module in ("site_pages", "api_pages"):
        sys.modules.pop(module)


def test_the_explorer_is_one_file_that_needs_no_other(built: Built, html: dict[Path, Page]) -> None:
    page = html[built.site / "explorer" / "index.html"]
    assert [each for each in page.loaded if not each.startswith("data:")] == []
    assert [path.name for path in (built.site / "explorer").iterdir()] == ["index.html"]
    assert "../index.html" in page.links  # the way back
    assert "explorer/index.html" in [link.removeprefix("./") for link in html[built.site / "index.html"].links]


def test_an_npm_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def wait(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise subprocess.TimeoutExpired("npm", axe.LIMIT)

    monkeypatch.delenv("TORCHBELAY_AXE", raising=False)
    monkeypatch.setattr(axe.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(axe.subprocess, "run", wait)
    axe._fetched.cache_clear()
    for _ in range(3):
        with pytest.raises(pytest.skip.Exception, match=r"npm cannot get axe-core .*timed out.*TORCHBELAY_AXE"):
            axe.script()
    axe._fetched.cache_clear()
    assert len(asked) == 1


# Search ---------------------------------------------------------------------------------------------------------------


def test_search_knows_every_page(built: Built) -> None:
    found = {
        entry["location"].partition("#")[0] for entry in json.loads((built.site / "search.json").read_text())["items"]
    }
    pages = {Path(target).with_suffix(".html").as_posix() for target in nav() if target.endswith(".md")}
    assert pages - found - {"index.html"} == set()


# The API --------------------------------------------------------------------------------------------------------------


def public() -> dict[str, object]:
    """Return the public names with the objects that they stand for."""
    found = {last: getattr(tb, last) for last in tb.__all__ if last not in MODULES}
    for module in MODULES:
        home = (
            import_module(f"torchbelay.{module}")
            if module not in ("methods", "schedules", "readouts")
            else getattr(tb, module)
        )
        found |= {f"{module}.{name}": getattr(home, name) for name in home.__all__}
    return found


def test_every_public_name_has_an_entry_with_its_summary(built: Built) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (built.pages / "api").glob("*.md")}
    for path, item in public().items():
        module, _, last = path.rpartition(".")
        text = pages[module or "torchbelay"]
        assert f"`{last}` {{ #{path.lower()} .api }}" in text, path
        if inspect.isclass(item) or inspect.isfunction(item):
            first = (inspect.getdoc(item) or "").split("\n")[0].split("`")[0].replace("*", "\\*").replace("_", "\\_")
            assert first[:40] in text, path


CALLED = [path for path, item in public().items() if inspect.isclass(item) or inspect.isfunction(item)]


@pytest.mark.parametrize("path", CALLED)
def test_a_signature_has_the_arguments_that_python_sees(path: str, built: Built) -> None:
    module, _, last = path.rpartition(".")
    text = (built.pages / "api" / f"{module or 'torchbelay'}.md").read_text(encoding="utf-8")
    shown = re.search(rf"{{ #{re.escape(path.lower())} \.api }}\n.*?```python\n(.*?)\n```", text, re.S)
    assert shown is not None
    if shown[1].startswith("class "):
        item = public()[path]
        own = "__init__" in vars(item) and not getattr(item, "_is_protocol", False)
        assert not own  # the arguments, if it can be called, are those of a class of Python or torch
    else:
        assert arguments(f"def {last}{shown[1][shown[1].index('(') :]}: ...") == [
            each.name for each in inspect.signature(public()[path]).parameters.values()
        ]


def arguments(program: str) -> list[str]:
    """Return the names of the parameters of the function that a program defines."""
    (function,) = ast.parse(program).body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    many = [[each] if each else [] for each in (given.vararg, given.kwarg)]
    return [each.arg for each in (*given.posonlyargs, *given.args, *many[0], *given.kwonlyargs, *many[1])]


def test_every_verb_of_the_command_is_on_its_page(built: Built) -> None:
    text = (built.pages / "api" / "command.md").read_text(encoding="utf-8")
    verbs = {path.stem for path in (ROOT / "src" / "torchbelay" / "cli").glob("*.py") if "def add(" in path.read_text()}
    assert {*re.findall(r"^## `torchbelay (\w+)`", text, re.M)} == verbs
    assert all(f"usage: torchbelay {verb} " in text for verb in verbs)


def test_documents_are_read_as_they_are(built: Built) -> None:
    """One copy of each: a page of the site is the document, but for its links and badges."""
    link = r"(\[(docs/)?[\w/-]+)?(\.md)?\]\([^)]*\)"
    for document, page in AT_THE_TOP.items():
        badges = r"^(\[!|!)\[[^]]*\]\(https?:.*\n"
        mine = re.sub(badges, "", read(ROOT / document), flags=re.M)
        theirs = (built.pages / page).read_text(encoding="utf-8")
        assert re.sub(link, "", mine) == re.sub(link, "", theirs)

"""Every page links to files, and to headings of pages, that exist, and names files of the repository that exist."""

import ast
import re
from pathlib import Path

import pytest

from helpers.documents import PAGES, anchors, links, name, read
from helpers.root import ROOT

LINKS = [(page, target) for page in PAGES for target in links(read(page)) if "://" not in target]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=[f"{name(page)}-{target}" for page, target in LINKS])
def test_a_link_leads_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists()
    if anchor:
        assert anchor in anchors(read(file))


def test_readme_links_to_every_page() -> None:
    linked = {target for page, target in LINKS if page == ROOT / "README.md"}
    assert {name(page) for page in PAGES if page.parent == ROOT / "docs"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_line_of_words_begins_with_a_comment(page: Path) -> None:
    """Markdown would take the rest of such a line as HTML, and end the paragraph before it."""
    assert re.findall(r"^<!--.*?-->[^\n<]+", read(page), re.M) == []


def test_the_make_targets_of_contributing_exist() -> None:
    targets = re.findall(r"^    make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|docs|benchmarks)/[\w./-]+?\.\w+)(?:::\w+)?`", read(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tests_that_the_page_of_memory_names_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8"))
    files = ("ops/test_host.py", "ops/test_workers.py", "belay/test_live_module.py", "belay/test_live.py")
    trees = [ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")) for file in files]
    assert len(named) == 9
    assert {*named} <= {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}

"""Every page links to files, and to headings of pages, that exist, and names files of the repository that exist."""

import ast
import re

import pytest

from helpers.root import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    if "://" not in target
]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "target"), LINKS, ids=[f"{page.name}-{target}" for page, target in LINKS])
def test_a_link_leads_somewhere(page, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists()
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8"))


def test_readme_links_to_every_page() -> None:
    linked = {target for page, target in LINKS if page.name == "README.md"}
    assert {f"docs/{page.name}" for page in PAGES[2:]} <= linked


def test_the_make_targets_of_contributing_exist() -> None:
    targets = re.findall(r"^    make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_exist(page) -> None:
    named = re.findall(r"`((?:tests|docs|benchmarks)/[\w./-]+?\.\w+)(?:::\w+)?`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_tests_that_the_page_of_memory_names_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8"))
    files = ("ops/test_host.py", "ops/test_workers.py", "belay/test_live_module.py", "belay/test_live.py")
    trees = [ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")) for file in files]
    assert len(named) == 9
    assert {*named} <= {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}

"""Every block of Python on every page runs as a test, and every command is understood.

A block that cannot run in a test is marked in the page, above the block, and has the kind `py`:

    <!-- not run: it needs several machines -->

It must compile all the same, and the names that it imports exist (test_names.py).
"""

import ast
import builtins
import importlib.util
import re
import shlex
import symtable
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from helpers.documents import COMMANDS, DOCS, PAGES, blocks, commands, indented, name, read
from helpers.root import ROOT
from torchbelay.cli import main

TESTS = Path(__file__).parent
# The test that runs the Python of a page, or of all pages of a folder.
RUN_BY = {
    "README.md": "test_readme.py",
    "docs/accelerate.md": "test_accelerate.py",
    "docs/after-training.md": "test_after_training.py",
    "docs/checkpoints.md": "test_checkpoints.py",
    "docs/deepspeed.md": "test_deepspeed.py",
    "docs/diffusers.md": "test_diffusers.py",
    "docs/failures.md": "test_failures.py",
    "docs/how-to/": "test_guides.py",
    "docs/identify.md": "test_identify.py",
    "docs/lightning.md": "test_lightning.py",
    "docs/methods.md": "test_methods.py",
    "docs/migrate.md": "test_migrate.py",
    "docs/optimizers.md": "test_optimizers.py",
    "docs/real-training.md": "test_real_training.py",
    "docs/scale.md": "test_scale.py",
    "docs/start.md": "test_start.py",
    "docs/teachers.md": "test_teachers.py",
    "docs/theory.md": "test_theory.py",
    "docs/timm.md": "test_recipes.py",
    "docs/torchtitan.md": "test_recipes.py",
    "docs/transformers.md": "test_transformers.py",
    "docs/which-method.md": "test_which_method.py",
    "docs/workers.md": "test_workers.py",
}
WITH_PYTHON = [page for page in PAGES if any(block.kind in ("python", "py") for block in blocks(read(page)))]
MARKED = [(page, block) for page in PAGES for block in blocks(read(page)) if block.kind == "py" or block.not_run]
LINES = [(page, line) for page in PAGES for line in commands(read(page))]


def test_every_page_with_python_has_a_test_that_runs_it() -> None:
    pages = {name(page) for page in WITH_PYTHON}
    assert {page for page in pages if page not in RUN_BY and f"{Path(page).parent.as_posix()}/" not in RUN_BY} == set()
    assert {key for key in RUN_BY if not any(page.startswith(key) for page in pages)} == set()


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_that_runs_a_page_is_there(page: str) -> None:
    source = (TESTS / RUN_BY[page]).read_text(encoding="utf-8")
    assert f'"{Path(page).name}"' in source
    assert re.search(r"\bexec\(|\btorchrun\(|\bfollow\(", source)


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page.parent != ROOT], ids=name)
def test_a_page_makes_every_name_that_it_uses(page: Path) -> None:
    """A reader copies the blocks from top to bottom; README has fragments beside its whole program."""
    module = symtable.symtable(
        "\n".join(block.text for block in blocks(read(page)) if block.kind == "python"), "", "exec"
    )
    made = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    scopes, used = [module], set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        used |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if symbol.is_referenced() and (scope is module or symbol.is_global())
        }
    assert used - made - {*dir(builtins), "__file__"} == set()


@pytest.mark.parametrize(("page", "block"), MARKED, ids=[f"{name(page)}-{block.text[:20]}" for page, block in MARKED])
def test_a_block_that_does_not_run_says_why_and_compiles(page: Path, block) -> None:
    assert block.kind == "py", "a block that is not run has the kind py, which no test takes for one that runs"
    assert block.not_run, f"above a block of py, {name(page)} must say why: <!-- not run: the reason -->"
    compile(block.text, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_python_hides_in_an_indented_block(page: Path) -> None:
    for block in indented(read(page)):
        try:
            tree = ast.parse(block)
        except SyntaxError:
            continue  # a formula, a drawing, a command
        assert not any(isinstance(node, ast.Call) for node in ast.walk(tree)), f"fence this as python: {block}"


def test_blocks_have_kinds_that_are_checked() -> None:
    kinds = {block.kind for page in PAGES for block in blocks(read(page))}
    assert kinds <= {"", "bash", "console", "diff", "json", "py", "python", "sh", "text", "toml", "yaml"}


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{name(page)}-{line[:40]}" for page, line in LINES])
def test_a_command_is_understood(page: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(line, page, monkeypatch)


def check(line: str, page: Path, patch: pytest.MonkeyPatch) -> None:
    """Fail if a command of a page cannot be right."""
    words = shlex.split(re.sub(r"\$\(.*?\)", "word", line), comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):  # PYTHONPATH=src
        words.pop(0)
    program = Path(words[0]).name
    assert program in COMMANDS, f"nothing here says whether {line!r} is right"
    CHECKS[program](words[1:], page, patch)


def check_torchbelay(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    seen = []
    for verb in {module.stem for module in (ROOT / "src" / "torchbelay" / "cli").glob("*.py")}:
        module = importlib.import_module(f"torchbelay.cli.{verb}") if not verb.startswith("_") else None
        if hasattr(module, "run"):
            patch.setattr(module, "run", lambda args: seen.append(args) or 0)
    assert main(words) == 0
    assert len(seen) == 1


def check_torchrun(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    args = get_args_parser().parse_args(words)
    assert args.training_script in read(page).replace(" ".join(words), "")  # the page has the program too


def check_make(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    targets = [word for word in words if "=" not in word]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def check_pip(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words[1:]:
        found = re.fullmatch(r"(?:\.|torchbelay)(?:\[([\w,]+)\])?", word)
        assert not found or {*(found[1] or "").split(",")} - {""} <= {*extras}, f"no such extra: {word}"


def check_python(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1])
    else:
        assert (ROOT / words[0]).is_file() or f"`{words[0]}`" in read(page)


def check_pre_commit(words: list[str], page: Path, patch: pytest.MonkeyPatch) -> None:
    assert (ROOT / ".pre-commit-config.yaml").is_file()


CHECKS = {
    "torchbelay": check_torchbelay,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "pre-commit": check_pre_commit,
}


# The checks themselves ------------------------------------------------------------------------------------------------

SAMPLE = """# Title

```python
x = 1
```

<!-- not run: it needs a GPU -->
```py
y = 2
```

```console
$ torchbelay explain --decay 0.9
an output
```

- In a list:

  ```bash
  make test \\
    PYTHON=python3
  # a comment
  ```

Indented:

    torchrun --nproc-per-node 2 train.py
    w1' = w1 + u

```text
make nothing
```
"""


def test_blocks_and_commands_of_a_page_are_found() -> None:
    found = blocks(SAMPLE)
    assert [block.kind for block in found] == ["python", "py", "console", "bash", "text"]
    assert [block.not_run for block in found] == [None, "it needs a GPU", None, None, None]
    assert found[0].text == "x = 1\n"
    assert [" ".join(line.split()) for line in commands(SAMPLE)] == [
        "torchbelay explain --decay 0.9",
        "make test PYTHON=python3",
        "torchrun --nproc-per-node 2 train.py",
    ]
    assert indented(SAMPLE) == ["torchrun --nproc-per-node 2 train.py\nw1' = w1 + u\n"]


@pytest.mark.parametrize(
    "line",
    [
        "torchbelay explode --k 1",
        "torchbelay explain --spring 1",
        "make nothing",
        "pip install 'torchbelay[nothing]'",
        "python nothing.py",
        "torchrun nothing.py",
        "rm -r folder",
    ],
)
def test_a_command_that_is_wrong_is_noticed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        check(line, ROOT / "docs" / "methods.md", monkeypatch)


def test_there_are_commands_in_the_documents() -> None:
    assert {page.parent for page, _ in LINES} >= {ROOT, DOCS}
    assert {line.split()[0] for _, line in LINES} >= {"torchbelay", "torchrun", "make", "pip"}

"""The pages of the site, gathered in build/docs: docs, README, CHANGELOG, CONTRIBUTING, the API and the explorer.

    python docs/site/site_pages.py            # gather once
    python docs/site/site_pages.py --watch    # and again whenever a page changes

The documents link to each other as files of the repository, so that they can be read there. In the site a link to a
page leads to the page, and a link to any other file of the repository to that file at its address. A link that has its
file's name for words, `docs/start.md`, says `start` in the site, which has no files.
"""

import argparse
import io
import os
import re
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path

import api_pages

from torchbelay import explorer
from torchbelay.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXPLORER = DOCS / "explorer"
PLAYGROUND = Path("explorer/index.html")  # the explorer's place in the site
GATHERED = ROOT / "build" / "docs"
# Documents that are not in docs, and what they are in the site.
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ASSETS = (".png", ".svg", ".css", ".js")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
NAMED = re.compile(r"\[(?:docs/)?([\w/-]+?)(?:/index)?\.md(?=\]\()")  # a link that has its file's name for words
# A picture of another host, such as a badge, with the link around it: the site loads nothing from elsewhere.
BADGE = re.compile(r"(?:\[!\[[^]]*\]\(https?://[^)\s]+\)\]\([^)\s]+\)|!\[[^]]*\]\(https?://[^)\s]+\))[ \t]*\n?")
FENCE = re.compile(r"(^ *```.*?^ *```\s*?$)", re.M | re.S)


def repository() -> str:
    """Return the address of the repository, which mkdocs.yml has."""
    (found,) = re.findall(r"^  repository: (\S+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    return str(found)


def sources() -> dict[Path, Path]:
    """Return every page and file of the site that is a file of the repository, by its place in the site."""
    found = {Path(place): ROOT / name for name, place in OUTSIDE.items()}
    for path in sorted(DOCS.rglob("*")):
        place = path.relative_to(DOCS)
        if path.is_file() and path.suffix in (".md", *ASSETS) and path.parent != EXPLORER:
            found[place] = path
    return found


def rewritten(text: str, place: Path, source: Path, places: dict[Path, Path], address: str) -> str:
    """Return a page with the links that the site needs."""

    def replace(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path, sharp, anchor = target.partition("#")
        file = (source.parent / path).resolve()
        if not file.exists():
            raise SystemExit(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
        if file in places:
            new = os.path.relpath(places[file], place.parent).replace(os.sep, "/")
        else:
            kind = "tree" if file.is_dir() else "blob"
            new = f"{address}/{kind}/main/{file.relative_to(ROOT).as_posix()}"
        return f"{found[1]}{new}{sharp}{anchor}{found[3]}"

    parts = FENCE.split(text)
    plain = (NAMED.sub(lambda found: f"[{found[1].lower()}", BADGE.sub("", part)) for part in parts[::2])
    parts[::2] = [LINK.sub(replace, part) for part in plain]
    return "".join(parts)


def command_page() -> str:
    """Return the page of the command: what each of its verbs says with `--help`."""
    os.environ["COLUMNS"] = "100"

    def said(*words: str) -> str:
        with redirect_stdout(io.StringIO()) as out:
            main([*words, "--help"])
        return out.getvalue().rstrip()

    whole = said()
    verbs = re.findall(r"^    (\w+)\b", whole.partition("commands:")[2], re.M)
    parts = [f"## `torchbelay {verb}` {{ #{verb} .api }}\n\n```text\n{said(verb)}\n```" for verb in verbs]
    return "\n\n".join(["# The command torchbelay", f"```text\n{whole}\n```", *parts]) + "\n"


def explorer_page() -> str:
    """Return the explorer as one file, which works from a disk too, with a way back to the site."""
    page, brand = explorer.page(), '<p class="brand">torchbelay</p>'
    if page.count(brand) != 1:
        raise SystemExit(f"the explorer's page has no {brand}, which is the way back to the site")
    return page.replace(brand, '<p class="brand"><a href="../index.html" style="color: inherit">torchbelay</a></p>')


def gather(into: Path) -> None:
    """Write all pages and files of the site into a folder; files that have not changed keep their time."""
    files, address = sources(), repository()
    places = {source.resolve(): place for place, source in files.items()} | {EXPLORER / "index.html": PLAYGROUND}
    wanted: dict[Path, bytes] = {}
    for place, source in files.items():
        content = source.read_bytes()
        if source.suffix == ".md":
            content = rewritten(content.decode("utf-8"), place, source, places, address).encode("utf-8")
        wanted[place] = content
    for name, text in api_pages.pages(ROOT / "src", address).items():
        wanted[Path(name)] = text.encode("utf-8")
    wanted[PLAYGROUND] = explorer_page().encode("utf-8")
    wanted[Path("api/command.md")] = command_page().encode("utf-8")
    for place, content in wanted.items():
        file = into / place
        if not file.is_file() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    for path in sorted(into.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(into) not in wanted:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            shutil.rmtree(path)


def watch(into: Path) -> None:
    """Gather the pages again whenever a file that they are made from has changed."""
    seen: dict[Path, float] = {}
    while True:
        made_from = [*sources().values(), *EXPLORER.iterdir(), *(ROOT / "src").rglob("*.py")]
        now = {path: path.stat().st_mtime for path in made_from if path.exists()}
        if now != seen:
            gather(into)
            seen = now
        time.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Gather the pages of the site in build/docs.")
    parser.add_argument("--into", type=Path, default=GATHERED, help="the folder (build/docs)")
    parser.add_argument("--watch", action="store_true", help="gather again whenever a page changes")
    args = parser.parse_args()
    (watch if args.watch else gather)(args.into)

"""Pages of the API: signatures and docstrings of the public names as Markdown, read from the source, not imported.

A docstring is Markdown already: this file escapes `*` and `_` in its prose, makes a list of its `Args:`, fences its
examples, and links the names that have an entry of their own.
"""

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import griffe

# One page per public module: file, title, modules. Modules of one page come one after the other.
PAGES = (
    ("torchbelay", "torchbelay", ("torchbelay",)),
    ("methods", "torchbelay.methods", ("torchbelay.physics.methods",)),
    ("schedules", "torchbelay.schedules", ("torchbelay.physics.schedules",)),
    ("readouts", "torchbelay.readouts", ("torchbelay.physics.readouts",)),
    ("optim", "torchbelay.optim", ("torchbelay.optim",)),
    ("options", "torchbelay.options", ("torchbelay.options",)),
    ("snapshots", "torchbelay.snapshots", ("torchbelay.snapshots",)),
    ("testing", "torchbelay.testing", ("torchbelay.testing",)),
    ("physics", "torchbelay.physics", ("torchbelay.physics",)),
    (
        "integrations",
        "torchbelay.integrations",
        tuple(f"torchbelay.integrations.{name}" for name in ("lightning", "transformers", "accelerate", "deepspeed")),
    ),
    (
        "compat",
        "torchbelay.compat",
        tuple(f"torchbelay.compat.{name}" for name in ("swa_utils", "diffusers", "torch_ema")),
    ),
)
# Modules that users know by a shorter name.
ALIASES = {f"torchbelay.physics.{name}": f"torchbelay.{name}" for name in ("methods", "schedules", "readouts")}
WIDTH = 100
# A class in small letters is a setting, as ema(0.999): what it does is in its docstring. These members concern users.
MEMBERS_OF_SETTINGS = ("effective_lr_scale", "max_stable_lr", "scaled")
# Members that a framework or the library calls, not the user.
HOOKS = re.compile(r"on_\w+|setup|teardown|state_key")


@dataclass
class Entry:
    """A name with its place: the page, the anchor and the object that it stands for."""

    name: str
    title: str
    page: str
    item: griffe.Object
    members: list["Entry"] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Return the anchor of the entry within its page."""
        return self.name.removeprefix("torchbelay.").lower()


def pages(source: Path, repository: str) -> dict[str, str]:
    """Return the text of every page, by its name within the site."""
    package = griffe.load("torchbelay", search_paths=[str(source)], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    found = {
        file: [(module, entries(package, module, f"{file}.md")) for module in modules] for file, _, modules in PAGES
    }
    known = index([entry for parts in found.values() for _, listed in parts for entry in listed])
    written = {}
    for file, title, _ in PAGES:
        writer = Writer(source.parent, repository, known, f"{file}.md")
        written[f"api/{file}.md"] = writer.page(title, [(package_of(package, m), m, e) for m, e in found[file]])
    return written


def package_of(package: griffe.Module, module: str) -> griffe.Object:
    """Return a module of the package."""
    path = module.removeprefix("torchbelay").strip(".")
    return final(package[path]) if path else package


def final(item: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return what a name stands for in the end."""
    return item.final_target if isinstance(item, griffe.Alias) else item


def entries(package: griffe.Module, module: str, page: str) -> list[Entry]:
    """Return the entries of a module: what `__all__` lists, or the public names that the module defines."""
    home = package_of(package, module)
    names = exported(home) or [
        name
        for name, item in home.members.items()
        if not name.startswith("_") and not item.is_alias and (item.is_class or item.is_function)
    ]
    public, listed = ALIASES.get(module, module), []
    for name in names:
        if borrowed(home[name]):
            continue
        item = final(home[name])
        if item.is_module and name in item.members:  # methods.ema is a class, and the file that defines it
            item = final(item.members[name])
        if item.is_module:
            continue
        entry = Entry(f"{public}.{name}", name, page, item)
        if isinstance(item, griffe.Class):
            entry.members = [
                Entry(f"{entry.name}.{each.name}", f"{name}.{each.name}", page, each) for each in members(item)
            ]
        listed.append(entry)
    return listed


def exported(module: griffe.Object) -> list[str]:
    """Return the names of a module's `__all__`."""
    return [str(each).strip("'\"") for each in module.exports or []]


def borrowed(item: griffe.Object | griffe.Alias) -> str:
    """Return the path of a name that another package defines, or nothing."""
    return item.target_path if isinstance(item, griffe.Alias) and not item.target_path.startswith("torchbelay") else ""


def members(item: griffe.Class) -> list[griffe.Object]:
    """Return the public methods and properties of a class: inherited ones too, if the package has them."""
    if item.name.islower() or item.name == "Options":
        names = [name for name in MEMBERS_OF_SETTINGS if name in item.members]
    else:
        names = [name for name in item.all_members if not name.startswith("_") and not HOOKS.fullmatch(name)]
    found = [final(item.all_members[name]) for name in names]
    found = [each for each in found if each.docstring and (each.is_function or "property" in each.labels)]
    return sorted(found, key=lambda each: (str(each.filepath) != str(item.filepath), each.lineno or 0))


def index(listed: list[Entry]) -> dict[str, Entry]:
    """Return every entry by the ways in which a docstring may write it."""
    known: dict[str, Entry] = {}
    for entry in [each for one in listed for each in (one, *one.members)]:
        short = entry.name.removeprefix("torchbelay.")
        for name in (entry.name, f"tb.{short}"):
            known.setdefault(name, entry)
        if "." in short and short.split(".")[0][0].isupper():  # Belay.averaged
            known.setdefault(short, entry)
        elif entry.item.is_class and short[0].isupper():
            known.setdefault(short.split(".")[-1], entry)
    return known


class Writer:
    """Writes one page."""

    def __init__(self, root: Path, repository: str, known: dict[str, Entry], page: str) -> None:
        self.root, self.repository, self.known, self.file = root, repository, known, page

    def page(self, title: str, parts: list[tuple[griffe.Object, str, list[Entry]]]) -> str:
        """Return the page: for each module its docstring, a table of its names, and their entries."""
        lines = [f"# {title}", ""]
        for module, path, listed in parts:
            if len(parts) > 1:
                lines += [f"## {path} {{ #{path.removeprefix('torchbelay.')} }}", ""]
            if module.docstring:
                lines += [self.prose(module.docstring.value), ""]
            lines += ["| name | what it is |", "|---|---|"]
            lines += [f"| [`{e.title}`](#{e.anchor}) | {self.summary(e)} |" for e in listed]
            others = {name: borrowed(module[name]) for name in exported(module)}
            lines += [f"| `{name}` | `{path}` itself |" for name, path in others.items() if path]
            lines.append("")
            for entry in listed:
                lines += self.entry(entry, "###" if len(parts) > 1 else "##")
        return "\n".join(lines).rstrip() + "\n"

    def entry(self, entry: Entry, level: str) -> list[str]:
        """Return an entry, and below it its members."""
        item = entry.item
        lines = [
            f"{level} `{entry.title}` {{ #{entry.anchor} .api }}",
            "",
            f'<p class="api-meta">{kind(item)} · <a href="{self.source(item)}">source</a></p>',
            "",
            "```python",
            signature(entry),
            "```",
            "",
        ]
        if item.docstring:
            lines += [self.prose(item.docstring.value), ""]
        for member in entry.members:
            lines += self.entry(member, f"{level}#")
        return lines

    def source(self, item: griffe.Object) -> str:
        """Return the address of the source of an object."""
        path = Path(str(item.filepath)).resolve().relative_to(self.root.resolve())
        return f"{self.repository}/blob/main/{path.as_posix()}#L{item.lineno}-L{item.endlineno}"

    def summary(self, entry: Entry) -> str:
        """Return the first sentence of an entry's docstring."""
        text = entry.item.docstring.value if entry.item.docstring else ""
        first = " ".join(text.partition("\n\n")[0].split())
        sentence = re.match(r"(.*?[.:])(?: [A-Z`]|$)", first)
        return self.inline((sentence[1] if sentence else first).rstrip(":")).replace("|", "\\|")

    def prose(self, text: str) -> str:
        """Return a docstring as Markdown."""
        return "\n\n".join(self.block(each) for each in blocks(text))

    def block(self, block: str) -> str:
        """Return a block of a docstring as Markdown: an example, a list of arguments, code or a paragraph."""
        if block.startswith(">>> "):
            return f"```pycon\n{block}\n```"
        if block.startswith("Args:\n"):
            return self.arguments(textwrap.dedent(block.partition("\n")[2]))
        return block if block.startswith("    ") else self.inline(block)

    def arguments(self, text: str) -> str:
        """Return the list of arguments."""
        items = re.split(r"\n(?=\S)", text.strip("\n"))
        lines = ["**Arguments**", ""]
        for item in items:
            name, _, what = " ".join(item.split()).partition(": ")
            lines.append(f"- `{name.strip('`')}`: {self.inline(what)}")
        return "\n".join(lines)

    def inline(self, text: str) -> str:
        """Return prose with its special characters escaped and its names linked; code in backticks stays."""
        parts = re.split(r"(`[^`]+`)", text)
        return "".join(
            self.link(part) if number % 2 else re.sub(r"([*_<\[\]])", r"\\\1", part)
            for number, part in enumerate(parts)
        )

    def link(self, code: str) -> str:
        """Return code in backticks, as a link if it is the name of an entry."""
        entry = self.known.get(re.sub(r"\(.*\)$", "", code.strip("`")))
        if entry is None:
            return code
        return f"[{code}]({'' if entry.page == self.file else entry.page}#{entry.anchor})"


def kind(item: griffe.Object) -> str:
    """Return what an object is, in a word."""
    if "property" in item.labels:
        return "property"
    if item.is_function and item.parent is not None and item.parent.is_class:
        return "class method" if "classmethod" in item.labels else "method"
    return item.kind.value


def blocks(text: str) -> list[str]:
    """Return the blocks of a docstring that empty lines separate; a list of arguments and an example are one each."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        previous = found[-1] if found else ""
        if (block.startswith("    ") and previous.startswith(("Args:", "    "))) or (
            block.startswith(">>> ") and previous.startswith(">>> ")
        ):
            found[-1] = f"{previous}\n\n{block}"
        else:
            found.append(block)
    return found


def signature(entry: Entry) -> str:
    """Return the call of an object, in several lines if it is long."""
    item, name = entry.item, entry.title
    if isinstance(item, griffe.Attribute):
        return f"{name}: {item.annotation}" if item.annotation else name
    if isinstance(item, griffe.Class):
        if "__init__" not in item.all_members:
            bases = ", ".join(str(each) for each in item.bases if not str(each).startswith("_"))
            return f"class {name}({bases})" if bases else f"class {name}"
        function, end = final(item.all_members["__init__"]), ""
    else:
        function, end = item, ""
    assert isinstance(function, griffe.Function)
    if function.returns is not None and function is item:
        end = f" -> {function.returns}"
    parameters = list(function.parameters)
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    arguments = written(parameters)
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){end}"


def written(parameters: list[griffe.Parameter]) -> list[str]:
    """Return parameters as the source writes them, with the `*` and `/` between them."""
    kinds = griffe.ParameterKind
    found, starred = [], False
    for number, each in enumerate(parameters):
        if each.kind is kinds.keyword_only and not starred:
            found.append("*")
            starred = True
        starred = starred or each.kind is kinds.var_positional
        prefix = "*" if each.kind is kinds.var_positional else "**" if each.kind is kinds.var_keyword else ""
        text = prefix + each.name + (f": {each.annotation}" if each.annotation is not None else "")
        if each.default is not None and not prefix:
            text += f" = {each.default}" if each.annotation is not None else f"={each.default}"
        found.append(text)
        following = parameters[number + 1].kind if number + 1 < len(parameters) else None
        if each.kind is kinds.positional_only and following is not kinds.positional_only:
            found.append("/")
    return found

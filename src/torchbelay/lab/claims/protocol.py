"""The rules that all claims share, as a text: protocol.md, which comes with the package."""

from importlib.resources import files


def read_protocol() -> str:
    """Return the text of protocol.md."""
    return (files(__package__) / "protocol.md").read_text(encoding="utf-8")

"""Which tensors are averaged, and when: `Belay` and its parts. No arithmetic, and no method's formula, lives here."""

from .average_file import load_average
from .belay import Belay

__all__ = ["Belay", "load_average"]

"""Which tensors are averaged, and when: `Belay` and its parts. No arithmetic, and no method's formula, lives here."""

from .belay import Belay

__all__ = ["Belay"]

"""Which parameter a name is that of: names pass to others if layers trade places, or one is put between others."""

from collections.abc import Mapping
from weakref import ref

from torch import nn


class Names:
    """Knows parameters by the names that they were first seen with.

    A snapshot says which of its names are those of parameters that were first seen with others: what an earlier
    snapshot has under such a name belongs to another parameter.

    >>> import torch
    >>> one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    >>> names = Names()
    >>> names.of({"a": one, "b": other}, step=0), names.of({"a": other, "b": one}, step=5)
    ({}, {'a': 'b', 'b': 'a'})
    """

    def __init__(self, origins: Mapping[str, str] | None = None) -> None:
        self._origins = dict(origins or {})  # as a state or a snapshot tells them, of parameters not seen yet
        self._known: dict[int, tuple[ref[nn.Parameter], str]] = {}
        self._taken = set(self._origins.values())

    def of(self, trained: Mapping[str, nn.Parameter], step: int) -> dict[str, str]:
        """Return the names of parameters that were first seen with others: name -> the first one.

        A new parameter gets its name; if that was another one's first name, with the step.
        """
        found: dict[str, str] = {}
        for name, p in trained.items():
            held, origin = self._known.get(id(p), (None, ""))
            if held is None or held() is not p:  # the id may have been that of another one, which is gone
                new = name if name not in self._taken else f"{name} since step {step}"
                origin = self._origins.pop(name, new)
                self._known[id(p)] = ref(p), origin
                self._taken.add(origin)
            if origin != name:
                found[name] = origin
        return found

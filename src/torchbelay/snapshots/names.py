"""Names of parameters that have become those of others, as if two layers trade places."""

from collections.abc import Mapping
from weakref import ref

from torch import nn

from torchbelay.physics.warnings import warn


class Names:
    """Notes which names were those of other parameters when they were last looked at.

    Snapshots know a tensor by its name alone, so those from before and after belong to different averages. A parameter
    that has joined since needs no note: its average began when it did.
    """

    def __init__(self) -> None:
        self.exchanged: set[str] = set()
        self._held: dict[str, ref[nn.Parameter]] = {}

    def look(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Compare names with those of the last look, and warn of the first that was another parameter's."""
        before = {name: held() for name, held in self._held.items()}
        known = {id(p) for p in before.values() if p is not None}
        new = {n for n, p in trained.items() if n in before and before[n] is not p and id(p) in known} - self.exchanged
        self._held = {name: ref(p) for name, p in trained.items()}
        self.exchanged |= new
        if new:
            warn(
                f"the name {min(new)!r} was that of another parameter when averages were last recorded: synthesize() "
                "refuses steps from now on, because snapshots know a tensor by its name alone. Record to a new folder, "
                "or call reset()"
            )

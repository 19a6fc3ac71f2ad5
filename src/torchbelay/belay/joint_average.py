"""One average of a model that several optimizers train: that of each optimizer, taken together."""

from torch import Tensor

from .average import Average, Entry
from .cohort import Cohort


class JointAverage:
    """One average of all parts."""

    def __init__(self, parts: list[Average]) -> None:
        self.name, self._parts = parts[0].name, parts

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries of all parts, by name."""
        return {name: entry for part in self._parts for name, entry in part.entries.items()}

    @property
    def cohorts(self) -> list[Cohort]:
        """The cohorts of all parts."""
        return [cohort for part in self._parts for cohort in part.cohorts]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The average's own buffers, which the first part has."""
        return self._parts[0].buffers

    @buffers.setter
    def buffers(self, buffers: dict[str, Tensor]) -> None:
        self._parts[0].buffers = buffers

    def refuse_other_shapes(self) -> None:
        """Refuse weights that have another shape now: their average would be broadcast to them, or torn."""
        for part in self._parts:
            part.refuse_other_shapes()

    def gather(self) -> None:
        """Let all replicas have the weights of which each has written its slice; nothing if they share no average."""
        for part in self._parts:
            part.gather()

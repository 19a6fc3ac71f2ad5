"""Weights that are trained on although no step is seen any more: then the average is what it was at the last one."""

from torch import Tensor
from torch.optim import Optimizer

from torchbelay.physics.warnings import warn

from .parameters import Parameters

_FEW = 500  # writes that are nothing unusual: of weights that are loaded, clipped, or views of what others write too


class Writes:
    """Warns, once, if weights are written again and again after the last step that was seen: by another optimizer.

    torch counts the writes to each tensor, on the host. What users write between steps, as WGAN clips weights, is known
    from the steps before. Some weights are watched, not all: so it costs a step next to nothing. torch does not count
    the writes of fused optimizers, of graphs, and by way of `p.data`: those are not seen.
    """

    def __init__(self) -> None:
        # Weights, and their counts when they were last known. torch moves no parameter that has a weak reference.
        self._watched: list[tuple[Tensor, int]] = []
        self._all: list[Tensor] | None = None  # those that they were chosen of
        self._usual, self._warned = 0, False
        self._before: list[int] = []  # what was counted when a swap began

    def begin_step(self) -> None:
        """Learn how often the weights are written between two steps."""
        self._usual = max(self._usual, *self._counts(), 0)

    def remember(self, parameters: Parameters) -> None:
        """Take the weights as they are now for those that belong to the averages."""
        if self._all is not parameters.all:
            self._all = parameters.all
            held = [p for p in self._all if p.requires_grad and not p.is_inference()]
            self._watched = [(p, 0) for p in (*held[:2], *held[2:][-2:])]
        self._count_from([0] * len(self._watched))

    def begin_swap(self) -> None:
        """Do not count what an average that is put into the model writes."""
        self._before = self._counts()

    def end_swap(self) -> None:
        """Count again from where it was."""
        if len(self._before) == len(self._watched):
            self._count_from(self._before)

    def look(self, optimizer: Optimizer) -> None:
        """Warn if the weights were written more often than ever between two steps."""
        count = max(self._counts(), default=0)
        if self._warned or count <= _FEW + 2 * self._usual:
            return
        self._warned = True
        warn(
            f"the weights were written {count} times since the last {type(optimizer).__name__}.step() that was seen, "
            "and the average has not moved since then. If another optimizer trains them now, make a Belay for that "
            "one, and give it this one's state by load_state_dict(). If you loaded weights, call reset() after that"
        )

    def _counts(self) -> list[int]:
        """Return how often each was written since it was last known."""
        return [p._version - before for p, before in self._watched]

    def _count_from(self, counts: list[int]) -> None:
        self._watched = [(p, p._version - count) for (p, _), count in zip(self._watched, counts, strict=True)]

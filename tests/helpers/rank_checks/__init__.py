"""What must hold on several ranks. Every check runs on all ranks of the worlds that its decorator `on` names.

Weights are float64. A sharded run adds its gradients up in another order than one process does. The two therefore agree
only up to rounding errors: TOLERANCE. The coupling itself is the same arithmetic on each number. It is compared bit for
bit with ordinary tensors that take the same steps.
"""

from . import carrying, planes, recording, saving, several, sharding, spreading, teaching  # noqa: F401  # each registers its checks
from .runs import CHECKS, Check


def for_ranks(world: int) -> dict[str, Check]:
    """The checks for this number of ranks, by name, in order."""
    return {check.__name__: check for worlds, check in CHECKS if world in worlds}

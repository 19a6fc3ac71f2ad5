"""What must hold on several ranks. Every check runs on all ranks of the worlds that its decorator `on` names.

Weights are float64. A sharded run adds its gradients up in another order than one process does. The two therefore agree
only up to rounding errors: TOLERANCE. The coupling itself is the same arithmetic on each number. It is compared bit for
bit with ordinary tensors that take the same steps.
"""

from . import (
    agreeing,
    carrying,
    planes,
    planning,
    recording,
    saving,
    several,
    sharding,
    sharing,
    sharing_saved,
    spreading,
    teaching,
    workers,
)
from .runs import CHECKS, Check

# Each registers its checks.
MODULES = (
    agreeing, carrying, planes, planning, recording, saving, several, sharding, sharing, sharing_saved, spreading,
    teaching, workers,
)  # fmt: skip


def for_ranks(world: int) -> dict[str, Check]:
    """The checks for this number of ranks, by name, in order."""
    return {check.__name__: check for worlds, check in CHECKS if world in worlds}

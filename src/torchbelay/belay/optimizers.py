"""The optimizer that takes the steps, whatever wraps it, and its own momentum."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .shard import loaded

# Where each wrapper is defined, and the attribute that holds the wrapped optimizer. A wrapper's own step may come to no
# step at all (while gradients are accumulated, or if GradScaler skips it); the hooks belong on what it wraps.
_WRAPPERS = (
    ("accelerate.optimizer", "AcceleratedOptimizer", "optimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer", "optimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer", "optimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer", "optimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer", "optimizer"),
)


def unwrapped(optimizer: object) -> object:
    """Return the optimizer inside the wrappers of accelerate, Fabric and Lightning; any other one as it is."""
    for where, name, attribute in _WRAPPERS:
        if isinstance(optimizer, loaded(where, name)):
            return unwrapped(getattr(optimizer, attribute))
    return optimizer


class Momentum(NamedTuple):
    """The momentum of one of the optimizer's groups."""

    beta: float
    nesterov: bool
    setting: str  # as the user wrote it
    cure: str  # the setting without momentum


def momentum_of(group: Mapping[str, Any]) -> Momentum | None:
    """Return a group's momentum: the first of its `betas`, or its `momentum`; None if it has none."""
    # NAdam, which has a `momentum_decay`, is Adam with Nesterov's momentum
    nesterov = bool(group.get("nesterov")) or "momentum_decay" in group
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and betas:
        found = Momentum(float(betas[0]), nesterov, f"betas=({float(betas[0]):g}, …)", "betas=(0.0, …)")
    else:
        beta = float(group.get("momentum") or 0.0)
        found = Momentum(beta, nesterov, f"momentum={beta:g}", "momentum=0.0")
    return found if 0 < found.beta < 1 else None

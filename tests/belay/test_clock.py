"""The count of steps, on the host and on every device that has asked for it."""

import pytest
import torch

from torchbelay.belay.clock import Clock

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)  # two keys: each has a count of its own


@pytest.mark.parametrize("keep", [None, torch.tensor(1.0), torch.tensor(0.0)], ids=["taken", "kept", "skipped"])
def test_a_device_that_counts_by_itself_leaves_no_other_device_behind(keep: torch.Tensor | None) -> None:
    """As a model does that was on the CPU, and is stepped by kernels on a GPU now."""
    clock = Clock()
    there, here = clock.on(CPU), clock.on(OTHER)
    clock.tick(None)
    clock.on(OTHER)
    here += 1 if keep is None else int(keep)  # the kernel's own count
    clock.tick(keep, counted=True)
    assert int(there) == int(here) == clock.count == (1 if keep is not None and not keep else 2)


def test_a_single_device_that_counts_by_itself_is_not_counted_again() -> None:
    clock = Clock(3)
    here = clock.on(CPU)
    here += 1
    clock.tick(None, counted=True)
    assert int(here) == clock.count == 4

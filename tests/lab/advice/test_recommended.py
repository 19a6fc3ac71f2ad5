"""The regret of advice from a run on networks that no record has seen: other seeds, on the ring and on MNIST.

The bounds follow from the kept records, so that a change which makes the advice worse fails.
"""

import os
from pathlib import Path

import pytest

from helpers import kept_records
from torchbelay.lab.advice import mnist, ring
from torchbelay.lab.advice.analysis import Outcomes
from torchbelay.lab.advice.trial import Protocol, Train, describe, measure
from torchbelay.lab.part import Settings
from torchbelay.lab.threads import one_thread

pytestmark = pytest.mark.thorough

SEED = 11  # the records have 0
MARGIN = 1.25  # what one fresh seed may be worse than the worst of the records


def outcomes(problem: str, lrs: tuple[float, ...], train: Train) -> Outcomes:
    """Ask for advice and follow it, with one seed."""
    how = Protocol(lrs=lrs, seeds=1)
    with one_thread():
        found = list(measure(problem, how, train, lambda _: None))
    return Outcomes.of([describe(problem, how, weights=0, batch=0), *found], problem)


def check(found: Outcomes, low: tuple[float, ...]) -> None:
    """Check the regret against the records, and the gain from runs at low rates if no warning came with it."""
    kept = Outcomes.of(kept_records.lines("advice"), found.about["problem"])
    for each in found.all:
        assert each.regret <= MARGIN * max(other.regret for other in kept.at(each.lr)), each
        if each.lr in low:
            assert each.ratio < (1.05 if each.warned else 0.95), each
            assert each.lr in {other.lr for other in kept.low}
    assert any(not each.warned for each in found.all if each.lr in low)
    assert all(each.warned for each in found.all if each.ratio > 1.1)


def test_on_the_ring_the_regret_is_that_of_the_records_and_runs_at_low_rates_improve() -> None:
    lrs = (0.0025, 0.005, 0.02, 0.04)
    found = outcomes(ring.NAME, lrs, ring.trainer(Settings(seed=SEED), Protocol.steps))
    assert len(found.all) == len(lrs)
    check(found, low=lrs[:2])


def test_on_mnist_the_regret_is_that_of_the_records_and_runs_at_low_rates_improve() -> None:
    path = Path(os.environ.get("TORCHBELAY_DATA", "")) / "mnist.npz"
    if not path.is_file():
        pytest.skip("there is no mnist.npz in the folder that TORCHBELAY_DATA names")
    lrs = (0.0025, 0.02)
    found = outcomes(mnist.NAME, lrs, mnist.trainer(mnist.read(path), SEED, Protocol.steps))
    assert len(found.all) == len(lrs)
    check(found, low=lrs[:1])

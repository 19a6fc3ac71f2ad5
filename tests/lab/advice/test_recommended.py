"""Advice on networks that no record has seen: other seeds, on the ring and on MNIST.

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


def check(problem: str, lrs: tuple[float, ...], train: Train) -> Outcomes:
    """Ask for advice and follow it, with one seed; check where it ended against the records."""
    how = Protocol(lrs=lrs, seeds=1)
    with one_thread():
        records = list(measure(problem, how, train, lambda _: None))
    found = Outcomes.of([describe(problem, how, weights=0, batch=0), *records], problem)
    kept = Outcomes.of(kept_records.lines("advice"), problem)
    assert len(found.all) == len(found.ends) == len(lrs)
    for lr in lrs:
        (first,), (end,) = found.at(lr), found.ends_at(lr)
        assert first.ratio <= MARGIN * max(each.ratio for each in kept.at(lr)), first
        assert end.regret <= MARGIN * max(each.regret for each in kept.ends_at(lr)), end
    return found


def test_on_the_ring_searches_end_where_those_of_the_records_do() -> None:
    found = check(ring.NAME, (0.005, 0.02, 0.08), ring.trainer(Settings(seed=SEED), Protocol.steps))
    (low,), (high,) = found.ends_at(0.005), found.ends_at(0.08)
    assert low.ratio < 0.8
    assert high.ratio < 0.5


def test_on_mnist_searches_end_where_those_of_the_records_do() -> None:
    path = Path(os.environ.get("TORCHBELAY_DATA", "")) / "mnist.npz"
    if not path.is_file():
        pytest.skip("there is no mnist.npz in the folder that TORCHBELAY_DATA names")
    train = mnist.trainer(mnist.CLASSIFIER, mnist.read(path), SEED, Protocol.steps)
    found = check(mnist.CLASSIFIER.name, (0.0025, 0.02), train)
    assert found.ends_at(0.0025)[0].ratio < 0.95

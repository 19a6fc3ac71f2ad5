"""Random events, against an independent account in float64: models moved, cast and laid out anew, steps interrupted.

100 runs, or the number in TORCHBELAY_EVENTS, which `make soak` sets. A run is wholly given by its seed: to see a failed
run again, set TORCHBELAY_EVENTS=1 and TORCHBELAY_EVENTS_FROM to its seed.
"""

import gc
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import torchbelay as tb
from helpers.events.changes import Changing
from helpers.events.holding import Held
from helpers.events.step import Step
from helpers.events.steps import Stepping
from helpers.events.swaps import Swapping

RUNS, FIRST = int(os.environ.get("TORCHBELAY_EVENTS", "100")), int(os.environ.get("TORCHBELAY_EVENTS_FROM", "0"))
TOGETHER = 10  # runs in one test, so that several processes share them

# How often each happens, relative to the others.
EVENTS = {
    "step": 40,
    "skipped_step": 4,
    "bad_step": 3,
    "interrupted_step": 8,
    "swap": 10,
    "write_inside": 4,
    "interrupted_swap": 6,
    "interrupted_call": 3,
    "convert_inside": 1,
    "copy_to_model": 2,
    "reset": 2,
    "export": 2,
    "lay_out": 4,
    "replace_data": 4,
    "share_memory": 1,
    "cast": 3,
    "change_buffer": 4,
    "add_layer": 3,
    "take_out": 3,
    "reload_optimizer": 2,
    "watch": 2,
    "second_pull": 1,
    "resume": 3,
    "remember": 2,
    "go_back": 2,
    "lose": 1,
    "replace": 1,
    "set_default": 2,
    "hold": 3,
    "drop": 2,
    "swap_held": 2,
}


class Run(Stepping, Swapping, Changing, Held):
    """A training to which things happen."""

    def settle(self, step: Step) -> None:
        super().settle(step)
        self.check_holdings()

    def go(self) -> None:
        for _ in range(self.length):
            (event,) = self.dice.choices(list(EVENTS), list(EVENTS.values()))
            self.note(event)
            getattr(self, event)()
            if self.dice.random() < 0.7:  # a look at a Belay brings it up to date, so do not always look
                self.check()
        self.check()


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """Keep what is alive already out of the collector's sight: every run collects what it leaves behind."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def go(seed: int) -> None:
    gc.collect()  # Belays of the last run would be walked over, and lines are counted
    trace: list[str] = []
    default = torch.get_default_dtype()
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore", tb.BelayWarning)
            run = Run(seed, patch, trace, kernels=find_spec("triton") is not None)
            run.go()
    except (Exception, pytest.fail.Exception) as error:
        happened = "\n".join(trace)
        raise AssertionError(f"run {seed}: {error!r}\n{happened}") from error
    finally:
        torch.set_default_dtype(default)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(FIRST, FIRST + RUNS, TOGETHER))
def test_whatever_happens_every_number_is_that_of_the_account(first: int) -> None:
    for seed in range(first, min(first + TOGETHER, FIRST + RUNS)):
        go(seed)

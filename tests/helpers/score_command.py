"""`torchbelay train` with the tiny presets of score_models and a handful of made-up images:

    python tests/helpers/score_command.py train tiny-ncsn --out RUN

The environment lets a test watch it and stop it. In the folder TINY_MARKS it creates a file for each step and for each
signal that it notices. After the step TINY_HOLD it waits, until a signal comes or, with TINY_DEAF, for good. After the
step TINY_STOP it sends itself a SIGTERM. TINY_AGREE is the number of steps after which several processes agree whether
to stop.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from helpers.score_models import EDM_PRESET, NCSN_PRESET, preset_images
from torchbelay import cli
from torchbelay.lab.score import data
from torchbelay.lab.score.training import train
from torchbelay.lab.score.training.presets import PRESETS
from torchbelay.lab.score.training.signals import StopSignal
from torchbelay.lab.score.training.training_run import TrainingRun


def main(argv: list[str]) -> int:
    """Run the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    torch.set_num_threads(1)
    PRESETS.update({preset.name: preset for preset in (NCSN_PRESET, EDM_PRESET)})
    preset = next((PRESETS[word] for word in argv if word in PRESETS), NCSN_PRESET)
    data.load = lambda name, path: preset_images(preset)  # type: ignore[assignment]
    train.AGREE = int(os.environ.get("TINY_AGREE", train.AGREE))
    hold, stop = (int(os.environ.get(name, "0")) for name in ("TINY_HOLD", "TINY_STOP"))
    marks, deaf = os.environ.get("TINY_MARKS"), bool(os.environ.get("TINY_DEAF"))
    advance, notice, noticed = TrainingRun.advance, StopSignal._notice, []

    def mark(name: str) -> None:
        if marks:
            Path(marks, name).touch()

    def notice_and_mark(stop: StopSignal, *arguments: Any) -> None:
        notice(stop, *arguments)
        noticed.append(stop)
        mark("signal")

    def advance_and_mark(run: TrainingRun) -> None:
        advance(run)
        mark(f"step{run.step}")
        while run.step == hold and (deaf or not noticed):
            time.sleep(0.01)
        if run.step == stop and run.ranks.first:
            signal.raise_signal(signal.SIGTERM)

    TrainingRun.advance, StopSignal._notice = advance_and_mark, notice_and_mark  # type: ignore[method-assign]
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

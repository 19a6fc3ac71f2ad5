"""`torchbelay reproduce` in which one part, HELD_PART of the environment, never comes to its end.

    HELD_PART=fig2 python -c "from helpers import reproduce_command as it; it.main()" reproduce fig1 fig2

A test that interrupts the command does not depend on how long a part takes.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from torchbelay import cli
from torchbelay.lab import workers
from torchbelay.lab.part import Settings

run_part = workers._run_part


def run_or_wait(pipe: Connection, name: str, settings: Settings) -> None:
    """Run a part, or report no progress until the command or this process ends; this is what the workers do."""
    if name == os.environ.get("HELD_PART"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a part does
        with suppress(BrokenPipeError):  # the command has ended
            while True:
                pipe.send(workers.Progress(name, 0))
                time.sleep(0.05)
        return
    run_part(pipe, name, settings)


def main() -> None:
    """Run the command with the arguments of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    workers._run_part = run_or_wait
    sys.exit(cli.main(sys.argv[1:]))

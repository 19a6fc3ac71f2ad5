"""After training: any average from a few snapshots of others, and weights in files, read and written one by one.

Nothing here needs a whole model in memory besides the one that is trained.
"""

from .opening import open_checkpoint
from .recorder import Recorder, defaults
from .synthesis import Synthesis, synthesize
from .targets import decay, window

__all__ = ["Recorder", "Synthesis", "decay", "defaults", "open_checkpoint", "synthesize", "window"]

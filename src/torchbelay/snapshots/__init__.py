"""After training: any average from a few snapshots of others, and merges of checkpoints that exist already.

Weights in files are read and written one tensor at a time; nothing here needs a whole model in memory.
"""

from .basis import defaults
from .greedy import greedy
from .merger import merge
from .opening import open_checkpoint
from .recorder import Recorder
from .synthesis import Synthesis, synthesize
from .targets import decay, window
from .weights import merge_weights

__all__ = [
    "Recorder",
    "Synthesis",
    "decay",
    "defaults",
    "greedy",
    "merge",
    "merge_weights",
    "open_checkpoint",
    "synthesize",
    "window",
]

"""After training: any average from a few snapshots of others, and weights in files, read and written one by one.

Nothing here needs a whole model in memory besides the one that is trained.
"""

from .opening import open_checkpoint
from .targets import decay, window

__all__ = ["decay", "open_checkpoint", "window"]

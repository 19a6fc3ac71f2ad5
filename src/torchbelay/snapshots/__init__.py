"""After training: weights that lie in files, read and written tensor by tensor.

No formula of a method lives here, and nothing here needs a whole model in memory.
"""

from .opening import open_checkpoint

__all__ = ["open_checkpoint"]

"""After training: weights that lie in files, read and written tensor by tensor.

Nothing here needs a whole model in memory, and no formula of a method lives here.
"""

from .greedy import greedy
from .merger import merge
from .opening import open_checkpoint
from .weights import merge_weights

__all__ = ["greedy", "merge", "merge_weights", "open_checkpoint"]

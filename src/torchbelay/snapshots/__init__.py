"""After training: weights that lie in files, read and written tensor by tensor.

Nothing here needs a whole model in memory, and no formula of a method lives here.
"""

from .greedy import Soup, greedy
from .merger import Merged, merge
from .opening import open_checkpoint
from .weights import merge_weights

__all__ = ["Merged", "Soup", "greedy", "merge", "merge_weights", "open_checkpoint"]

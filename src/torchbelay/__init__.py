"""Weight averaging for PyTorch as two masses on a damped spring."""

from . import optim
from ._version import __version__ as __version__
from .belay import Belay
from .physics import methods
from .physics.coupling import Coupling
from .physics.method import Method
from .physics.spring import Spring
from .physics.warnings import BelayWarning, UnstableSpringWarning

__all__ = [
    "Belay",
    "BelayWarning",
    "Coupling",
    "Method",
    "Spring",
    "UnstableSpringWarning",
    "methods",
    "optim",
]

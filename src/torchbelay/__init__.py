"""Weight averaging for PyTorch as two masses on a damped spring.

Names are imported at their first use: `import torchbelay` is quick, and the physics and `torchbelay explain` run
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import optim, snapshots
    from .belay import Belay, load_average
    from .curvature import measure_curvatures
    from .physics import methods, readouts, schedules
    from .physics.coupling import Coupling
    from .physics.method import Method
    from .physics.recommend import recommend
    from .physics.spring import Spring
    from .physics.warnings import BelayWarning, UnstableSpringWarning

__all__ = [
    "Belay",
    "BelayWarning",
    "Coupling",
    "Method",
    "Spring",
    "UnstableSpringWarning",
    "load_average",
    "measure_curvatures",
    "methods",
    "optim",
    "readouts",
    "recommend",
    "schedules",
    "snapshots",
]

# Where the public names live, and the modules that are attributes of the package.
_OBJECTS = {
    "Belay": "torchbelay.belay",
    "BelayWarning": "torchbelay.physics.warnings",
    "Coupling": "torchbelay.physics.coupling",
    "Method": "torchbelay.physics.method",
    "Spring": "torchbelay.physics.spring",
    "UnstableSpringWarning": "torchbelay.physics.warnings",
    "load_average": "torchbelay.belay",
    "measure_curvatures": "torchbelay.curvature",
    "recommend": "torchbelay.physics.recommend",
}
_MODULES = {
    "belay": "torchbelay.belay",
    "methods": "torchbelay.physics.methods",
    "ops": "torchbelay.ops",
    "optim": "torchbelay.optim",
    "options": "torchbelay.options",
    "physics": "torchbelay.physics",
    "readouts": "torchbelay.physics.readouts",
    "schedules": "torchbelay.physics.schedules",
    "snapshots": "torchbelay.snapshots",
    "testing": "torchbelay.testing",
}

if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        """Import a name at its first use (PEP 562)."""
        if name in _OBJECTS:
            value = getattr(import_module(_OBJECTS[name]), name)
        elif name in _MODULES:
            value = import_module(_MODULES[name])
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # later uses find it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})

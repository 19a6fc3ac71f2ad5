"""The averaging methods, one per file: objects whose `coupling(step, lr)` returns the four numbers of a step.

Steps count from 1. Gradients are taken at the weights w1; w2 is their average; u = w1* − w1 is the update of the
inner optimizer. Each method's docstring has its equation, its reference and a line on when to use it. A method of your
own needs only `coupling(step, lr) -> Coupling` (see `Method`).
"""

from torchbelay.physics.method import Method

from .belay import belay
from .centred import centred
from .diloco import diloco
from .easgd import easgd
from .ema import ema
from .ema_nesterov import ema_nesterov
from .hard_sync import hard_sync
from .lookahead import lookahead
from .momentum import heavy_ball, nesterov
from .power_ema import power_ema
from .primal_averaging import primal_averaging
from .schedule_free import schedule_free
from .swa import swa
from .switch_ema import switch_ema

__all__ = [
    "Method",
    "belay",
    "centred",
    "diloco",
    "easgd",
    "ema",
    "ema_nesterov",
    "hard_sync",
    "heavy_ball",
    "lookahead",
    "nesterov",
    "power_ema",
    "primal_averaging",
    "schedule_free",
    "swa",
    "switch_ema",
]

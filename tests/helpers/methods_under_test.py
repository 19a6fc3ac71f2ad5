"""Every averaging method, for tests that must hold for all of them."""

from torchbelay.physics import methods
from torchbelay.physics.schedules import cosine, linear

# Every method, in both variants if it has two. Each test calls anew, because some methods remember learning rates.
METHODS = {
    "belay": lambda: methods.belay(1.0, 10.0, 20.0),
    "belay, follow after": lambda: methods.belay(1.0, 10.0, 20.0, follow="after"),
    "ema": lambda: methods.ema(0.9),
    "ema, lagged": lambda: methods.ema(half_life=5, follow="before"),
    "ema, warm-up": lambda: methods.ema(0.99, warmup="ratio"),
    "ema, warm-up with all its numbers": lambda: methods.ema(0.99, warmup="inverse-power", power=0.7, inv_gamma=3.0),
    "ema, scheduled": lambda: methods.ema(cosine(0.5, 1.0, steps=12), min_decay=0.6),
    "ema, ramp-up": lambda: methods.ema(half_life=5, rampup_ratio=0.3),
    "ema, a copy": lambda: methods.ema(0.0),
    "ema, standing still": lambda: methods.ema(1.0),
    "ema_nesterov": lambda: methods.ema_nesterov(0.5, 0.8),
    "ema_nesterov, scheduled": lambda: methods.ema_nesterov(linear(0.0, 0.9, steps=12), 0.8),
    "hard_sync": lambda: methods.hard_sync(3),
    "swa": lambda: methods.swa(),
    "swa, every 3": lambda: methods.swa(every=3),
    "power_ema": lambda: methods.power_ema(sigma_rel=0.1),
    "easgd": lambda: methods.easgd(0.1),
    "easgd, rho": lambda: methods.easgd(rho=0.5),
    "easgd, every 3": lambda: methods.easgd(0.1, every=3),
    "diloco": lambda: methods.diloco(every=3),
    "diloco, every step": lambda: methods.diloco(every=1, lr=0.5, momentum=0.5),
    "lookahead": lambda: methods.lookahead(k=3, alpha=0.4),
    "lookahead, all the way": lambda: methods.lookahead(k=3, alpha=1.0),
    "switch_ema": lambda: methods.switch_ema(0.8, every=4),
    "heavy_ball": lambda: methods.heavy_ball(0.9),
    "nesterov": lambda: methods.nesterov(0.9),
    "primal_averaging": lambda: methods.primal_averaging(0.9, 0.7),
    "schedule_free": lambda: methods.schedule_free(0.9),
    "centred": lambda: methods.centred(theta=0.5, rate=0.1),
    "centred, negative": lambda: methods.centred(theta=-0.5, rate=0.1),
    "centred, lagged": lambda: methods.centred(theta=0.5, rate=0.1, follow="before"),
    "centred, scheduled": lambda: methods.centred(linear(-0.5, 0.5, steps=12), cosine(1.0, 0.1, steps=15)),
    "centred, lagged, scheduled": lambda: methods.centred(linear(0.5, -0.5, steps=12), 0.1, follow="before"),
}

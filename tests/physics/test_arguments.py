"""Numbers that methods are made with: stored as plain floats, whatever they were given as."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch

import torchbelay as tb
from torchbelay import Spring, methods, readouts, schedules

METHODS: dict[str, Callable[[Callable[[float], Any]], Any]] = {
    "belay": lambda n: methods.belay(k=n(1.0), m1=n(10.0), m2=n(20.0)),
    "Spring": lambda n: Spring(k=n(1.0), m1=n(10.0), m2=n(20.0), c1=n(5.0), c2=n(10.0), dt=n(1.0)),
    "Spring.ema": lambda n: Spring.ema(decay=n(0.5)),
    "Spring.ema by half-life": lambda n: Spring.ema(half_life=n(5.0)),
    "centred": lambda n: methods.centred(theta=n(0.5), rate=n(0.25)),
    "diloco": lambda n: methods.diloco(every=3, lr=n(0.5), momentum=n(0.5)),
    "easgd": lambda n: methods.easgd(n(0.5)),
    "easgd by rho": lambda n: methods.easgd(rho=n(0.5)),
    "ema": lambda n: methods.ema(n(0.5)),
    "ema by half-life": lambda n: methods.ema(half_life=n(5.0), min_decay=n(0.25), rampup_ratio=n(0.5)),
    "ema by samples": lambda n: methods.ema(half_life_samples=n(500.0), batch_size=10),
    "ema, warm-up": lambda n: methods.ema(n(0.5), warmup="inverse-power", power=n(0.5), inv_gamma=n(2.0)),
    "ema_nesterov": lambda n: methods.ema_nesterov(beta=n(0.5), gamma=n(0.5)),
    "heavy_ball": lambda n: methods.heavy_ball(n(0.5)),
    "lookahead": lambda n: methods.lookahead(k=3, alpha=n(0.5)),
    "nesterov": lambda n: methods.nesterov(n(0.5)),
    "power_ema": lambda n: methods.power_ema(gamma=n(2.0)),
    "power_ema by width": lambda n: methods.power_ema(sigma_rel=n(0.125)),
    "primal_averaging": lambda n: methods.primal_averaging(mu_x=n(0.5), mu_y=n(0.5)),
    "schedule_free": lambda n: methods.schedule_free(n(0.5), r=n(1.0), weight_lr_power=n(1.0)),
    "switch_ema": lambda n: methods.switch_ema(decay=n(0.5), every=3),
    "cosine": lambda n: schedules.cosine(n(0.5), n(0.75), steps=10),
    "linear": lambda n: schedules.linear(n(0.5), n(0.75), steps=10),
    "blend": lambda n: readouts.blend(n(0.5)),
    "bema": lambda n: readouts.bema(bias_power=n(0.5), lag=n(2.0), multiplier=n(2.0)),
}


@pytest.mark.parametrize("kind", [torch.tensor, numpy.float32, numpy.float64, numpy.array])
@pytest.mark.parametrize("name", METHODS)
def test_numbers_of_any_kind_become_plain_floats(name: str, kind: Callable[[float], Any]) -> None:
    made, plain = METHODS[name](kind), METHODS[name](float)

    assert made == plain
    assert repr(made) == repr(plain)
    for field in fields(made):
        assert type(getattr(made, field.name)) is type(getattr(plain, field.name)), field.name


def test_a_tensor_that_changes_later_leaves_the_method_as_it_was() -> None:
    decay = torch.tensor(0.5)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    belay = tb.Belay(model, optimizer, tb.methods.ema(decay))
    text = repr(belay.state_dict())

    decay.fill_(0.0)

    assert repr(belay.state_dict()) == text
    assert belay.decay == 0.5


@pytest.mark.parametrize("warmup", [None, "ratio"])
@pytest.mark.parametrize("setting", [{"power": 0.75}, {"inv_gamma": 2.0}])
def test_numbers_of_a_warmup_that_nothing_uses_are_refused(setting: dict[str, float], warmup: Any) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name}=.* belongs to warmup='inverse-power', and .* leave {name} out"):
        methods.ema(0.9999, warmup=warmup, **setting)


def test_the_range_in_a_message_has_the_ends_that_are_accepted() -> None:
    assert methods.lookahead(alpha=1.0).alpha == 1
    with pytest.raises(ValueError, match=r"alpha=1\.5 .* alpha > 0 and alpha ≤ 1"):
        methods.lookahead(alpha=1.5)
    assert methods.power_ema(sigma_rel=12**-0.5).exponent == pytest.approx(0, abs=1e-9)
    with pytest.raises(ValueError, match=r"sigma_rel=0\.3 .* sigma_rel ≤ 0\.288675"):
        methods.power_ema(sigma_rel=0.3)

"""The repr of methods and readouts: the call that makes them, without defaults."""

import pytest

from torchbelay import methods, readouts
from torchbelay.physics import identity, schedules

NAMES = {**vars(methods), **vars(readouts), **vars(schedules)}
TEXTS = {
    "ema(decay=0.9)": methods.ema(0.9),
    "ema(half_life=50.0)": methods.ema(half_life=50),
    "ema(decay=0.9999, warmup='inverse-power', power=0.75)": methods.ema(0.9999, warmup="inverse-power", power=3 / 4),
    "ema(decay=cosine(start=0.9, end=1.0, steps=10), follow='before')": methods.ema(
        schedules.cosine(0.9, 1.0, 10), follow="before"
    ),
    "swa()": methods.swa(every=1),
    "swa(every=5)": methods.swa(every=5),
    "lookahead()": methods.lookahead(),
    "lookahead(k=7)": methods.lookahead(7),
    "power_ema(gamma=2.0)": methods.power_ema(2.0),
    "schedule_free(beta=0.5, weight_lr_power=1.0)": methods.schedule_free(0.5, weight_lr_power=1.0),
    "centred(theta=-0.5, rate=0.01)": methods.centred(-0.5, 0.01),
    "switch_ema(decay=0.9, every=10)": methods.switch_ema(decay=0.9, every=10),
    "bema(lag=20.0)": readouts.bema(lag=20),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_repr_is_the_call_without_defaults_and_makes_an_equal_one(text: str) -> None:
    assert repr(TEXTS[text]) == text
    assert eval(text, dict(NAMES)) == TEXTS[text]


def test_the_text_by_which_a_checkpoint_knows_a_method_has_what_it_had() -> None:
    assert identity.describe(methods.lookahead(7)) == "lookahead(k=7, alpha=0.5)"
    assert identity.describe(methods.swa()) == "swa(every=1)"
    assert identity.describe(methods.ema(0.9)).startswith("ema(decay=0.9, half_life=None, half_life_samples=None, ")

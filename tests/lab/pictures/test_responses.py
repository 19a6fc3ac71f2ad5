"""The impulse responses that the documentation draws are those of `Belay` itself."""

import pytest
import torch

import torchbelay as tb
from torchbelay.lab.pictures.responses import AT, EXAMPLES, STEPS, example, respond


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_response_is_what_one_update_does_to_a_real_belay(name: str) -> None:
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    belay = tb.Belay.from_parameters([("weight", weight)], optimizer, example(name))
    w1, w2 = [0.0], [0.0]
    for step in range(1, STEPS + 1):
        weight.grad = torch.full_like(weight, -float(step == AT))
        optimizer.step()
        w1.append(weight.item())
        w2.append(belay.average_state_dict()["weight"].item())
    found = respond(example(name))
    assert found.w1 == pytest.approx(w1, rel=1e-12, abs=1e-14)
    assert found.w2 == pytest.approx(w2, rel=1e-12, abs=1e-14)
    assert max(w2) > 0.2  # the average has moved


def test_every_method_is_drawn() -> None:
    assert {*EXAMPLES} == {*tb.methods.__all__} - {"Method"}

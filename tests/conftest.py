"""What holds for every test."""

import os

import pytest
import torch

torch.set_num_threads(1)  # tensors are tiny here: threads of several test processes would only wait for each other
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are run by Triton's interpreter where there is no GPU for them


@pytest.fixture(params=["asked", "unasked"])
def skipping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether GradScaler skips a step is asked, as with a CPU, or known to the device alone, as with a GPU."""
    from torchbelay.belay import stepper

    if request.param == "unasked":
        monkeypatch.setattr(stepper, "_waits", lambda number: True)
    return str(request.param)

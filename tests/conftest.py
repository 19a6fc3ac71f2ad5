"""What holds for every test."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine must not fail a test of numbers
settings.load_profile("untimed")
torch.set_num_threads(1)  # tensors are tiny here: threads of several test processes would only wait for each other
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, Triton's interpreter runs the kernels


@pytest.fixture(params=["asked", "unasked"])
def skipping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the host asks if GradScaler skips a step, as on a CPU, or leaves that to the device, as on a GPU."""
    from helpers import seams  # the library, only for tests that need it

    if request.param == "unasked":
        seams.set_waiting(monkeypatch, True)
    return str(request.param)

"""What holds for every test."""

import os
import random
from collections.abc import Generator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine must not fail a test of numbers, and a test must not fail in one run out of many: hypothesis draws the
# same examples every time. `make soak` looks for new ones.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=not os.environ.get("TORCHBELAY_NEW_EXAMPLES"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")
torch.set_num_threads(1)  # tensors are tiny here: threads of several test processes would only wait for each other
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, Triton's interpreter runs the kernels
# At the first use of `with torch.device(...)`, torch lists the functions that it covers. transformers replaces
# torch.linspace while it loads a model: if that were the first use, the real one would never be covered.
with torch.device("meta"):
    assert torch.linspace(0, 1, 2).is_meta


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let a file of tests that cannot be imported be an error.

    --doctest-ignore-import-errors is for the integrations in src whose framework is missing. Here it would hide every
    test of the file: the failed import leaves an empty module behind, in which pytest then finds no test.
    """
    option = collector.config.option
    before, option.doctest_ignore_import_errors = option.doctest_ignore_import_errors, False
    try:
        return (yield)
    finally:
        option.doctest_ignore_import_errors = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed all generators before each test and its fixtures: its numbers must not depend on what ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # torch-fidelity and others draw from the old generator
    torch.manual_seed(0)


@pytest.fixture(params=["asked", "unasked"])
def skipping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the host asks if GradScaler skips a step, as on a CPU, or leaves that to the device, as on a GPU."""
    from helpers import seams  # the library, only for tests that need it

    if request.param == "unasked":
        seams.set_waiting(monkeypatch, True)
    return str(request.param)

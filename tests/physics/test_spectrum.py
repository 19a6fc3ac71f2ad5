"""Measured curvatures as plain numbers: when they make advice doubtful, and their words."""

import pytest

from torchbelay.physics.spectrum import FAR, Spectrum


def spectrum(lowest: float, **more) -> Spectrum:
    return Spectrum((4.0, 1.0), (1.0, 30.0), lowest=lowest, products=12, **more)


@pytest.mark.parametrize(("lowest", "doubtful"), [(0.1, False), (-3.9 * FAR, False), (-4.1 * FAR, True), (-9.0, True)])
def test_only_a_considerable_downward_curvature_is_doubtful(lowest: float, doubtful: bool) -> None:
    found = spectrum(lowest).caveats
    assert len(found) == doubtful
    assert all("far from a quadratic" in caveat for caveat in found)


def test_operations_of_others_are_named() -> None:
    assert "uses Flash, Fused, not torch's own" in spectrum(0.0, foreign=("Flash", "Fused")).caveats[0]
    assert len(spectrum(-4.0, foreign=("Flash",)).caveats) == 2


def test_it_says_what_was_measured_and_for_whom() -> None:
    said = spectrum(-0.25).explain()
    assert said.startswith("12 Hessian-vector products: curvatures from -0.25 to 4, as SGD meets them.")
    assert said.endswith("The learning rates below are for SGD.")
    assert "as AdamW meets them at its present second moments" in spectrum(0.0, optimizer="AdamW").explain()

"""How far averages of 24 bits are from float32 after a long run, held to the bound that docs/memory.md shows."""

import importlib.util
import json
from types import ModuleType

import pytest

from helpers.root import ROOT


def rounding() -> ModuleType:
    """Return benchmarks/rounding.py as a module."""
    spec = importlib.util.spec_from_file_location("rounding", ROOT / "benchmarks" / "rounding.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_the_error_over_ten_thousand_steps_is_below_the_bound_and_a_twelfth_of_bfloat16s() -> None:
    rows = rounding().measured(0.01, weights=1000, steps=10_000, seed=1)
    assert [row["decay"] for row in rows] == [0.999, 0.9999]
    for row in rows:
        assert 0.005 < row["tau"] < 0.02
        assert row["24 bits"] <= row["bound"]
        assert row["24 bits"] <= row["bfloat16"] / 12
        assert row["24 bits"] > row["bound"] / 20  # it is rounded, after all


def test_the_record_keeps_to_the_bound_and_the_page_shows_it() -> None:
    module = rounding()
    result = json.loads(module.RESULT.read_text())
    assert (result["steps"], {row["decay"] for row in result["rows"]}) == (10_000, {0.999, 0.9999})
    for row in result["rows"]:
        assert row["bound"] == pytest.approx((2.0**-15 / (2 * row["tau"])) ** 0.5)
        assert row["24 bits"] <= row["bound"]
        assert row["24 bits"] <= row["bfloat16"] / 12
    page = module.DOCUMENT.read_text(encoding="utf-8")
    assert module.filled(page, result) == page, "renew the table with: python benchmarks/rounding.py --no-run"


def test_the_bound_is_four_percent_at_a_tension_of_one_percent() -> None:
    assert rounding().bound(0.01) == pytest.approx(0.04, abs=0.001)

"""C11's rule on constructed records of each outcome."""

import pytest

from torchbelay.lab.claims import CLAIMS, judge
from torchbelay.lab.claims.trained import more_robust, on_the_plane, on_the_ring, working
from torchbelay.lab.claims.verdict import Answer
from torchbelay.lab.part import Record

RATES = [10.0**e for e in range(-5, 5)]
FUNCTIONS = ("Rosenbrock", "Beale", "absolute", "bowl")


def rates(arm: str, works: int) -> list[Record]:
    """An arm that works at the first so many rates, on every function."""
    common = {"kind": "rate", "arm": arm, "judged": "w2"}
    return [
        common | {"function": function, "lr": lr, "converged": 0.9 if i < works else 0.89}
        for function in FUNCTIONS
        for i, lr in enumerate(RATES)
    ]


def plane(belay: int, ema: int, matched: int) -> list[Record]:
    return [
        record
        for family in ("SGD", "Adam")
        for arm, works in (("BELAY", belay), ("EMA", ema), ("matched EMA", matched))
        for record in rates(f"{arm}+{family}", works)
    ]


LRS = (1e-3, 1e-2, 1e-1, 1.0)
Losses = tuple[float | None, ...]
FLAT, NARROW, FLAT_BUT_BAD = (1.0,) * 4, (9.0, 1.0, 9.0, 9.0), (2.0,) * 4
LOST: Losses = (None,) * 4


def runs(arm: str, curves: list[Losses], setting: str = "the paper's") -> list[Record]:
    """A loss for each learning rate, for each seed."""
    return [
        {"kind": "run", "arm": arm, "setting": setting, "seed": seed, "lr": lr, "test": loss}
        for seed, curve in enumerate(curves)
        for lr, loss in zip(LRS, curve, strict=True)
    ]


def ring(belay: Losses, ema: Losses, matched: Losses) -> list[Record]:
    tuned = runs("BELAY", [FLAT] * 10, setting="another")  # not to be looked at
    return runs("BELAY", [belay] * 10) + tuned + runs("EMA", [ema] * 10) + runs("matched EMA", [matched] * 10)


@pytest.mark.parametrize(
    ("on_plane", "on_ring", "answer"),
    [
        ((6, 4, 4), (FLAT, NARROW, NARROW), Answer.HOLDS),
        ((5, 4, 4), (FLAT, NARROW, NARROW), Answer.IN_PART),  # one step of the grid is not notable
        ((6, 4, 4), (FLAT, NARROW, FLAT), Answer.IN_PART),
        ((4, 6, 6), (FLAT_BUT_BAD, NARROW, NARROW), Answer.IN_PART),  # flat, but because it is nowhere good
        ((6, 4, 8), (NARROW, FLAT, FLAT), Answer.IN_PART),
        ((4, 4, 4), (FLAT, FLAT, FLAT), Answer.FAILS),
        ((4, 6, 6), (LOST, NARROW, NARROW), Answer.FAILS),
        ((4, 6, 6), (LOST, LOST, LOST), Answer.FAILS),
    ],
)
def test_each_outcome(on_plane: tuple[int, int, int], on_ring: tuple[Losses, Losses, Losses], answer: Answer) -> None:
    found = more_robust({"robustness": plane(*on_plane), "ring": ring(*on_ring)})
    assert found.answer is answer


@pytest.mark.parametrize(("agree", "kept"), [(9, True), (8, False)])
def test_nearly_all_seeds_must_agree(agree: int, kept: bool) -> None:
    belay: list[Losses] = [FLAT] * agree + [NARROW] * (10 - agree)
    of_ring = runs("BELAY", belay) + runs("EMA", [NARROW] * 10) + runs("matched EMA", [NARROW] * 10)
    for shared in (True, False):
        assert on_the_ring({"ring": of_ring}, "EMA", shared=shared) == (agree, 0, 10)
    answer = more_robust({"robustness": plane(4, 4, 4), "ring": of_ring}).answer
    assert answer is (Answer.IN_PART if kept else Answer.FAILS)


def test_the_numbers_are_those_of_the_records() -> None:
    wider, narrower, tried, numbers = on_the_plane({"robustness": plane(6, 4, 9)}, "EMA")
    assert (wider, narrower, tried) == (8, 0, 8)
    assert numbers[0] == ("Rosenbrock, SGD: decades that work, BELAY and EMA", "6, 4")
    summary = more_robust({"robustness": plane(6, 4, 9), "ring": ring(NARROW, NARROW, FLAT)}).summary
    assert (
        "against EMA wider in 8 of 8 cases on the plane and narrower in 0, and on the ring wider for 0 of 10" in summary
    )
    assert "against matched EMA wider in 0 of 8 cases on the plane and narrower in 8" in summary


def test_the_two_bars_are_told_apart_and_a_hair_wider_is_not_wider() -> None:
    def counts(belay: Losses, rival: Losses) -> list[tuple[int, int, int]]:
        records = {"ring": runs("BELAY", [belay]) + runs("EMA", [rival])}
        return [on_the_ring(records, "EMA", shared=shared) for shared in (True, False)]

    assert counts(FLAT_BUT_BAD, NARROW) == [(0, 1, 1), (1, 0, 1)]
    assert counts((1.0, 1.0, 9.0, 9.0), (1.0, 1.0, 9.1, 9.0)) == [(0, 0, 1), (0, 0, 1)]


def test_a_range_is_unbroken() -> None:
    with_a_hole = [{"converged": share} for share in (0.9, 0.9, 0.0, 0.9, 1.0, 0.95, 0.1)]
    assert working(with_a_hole) == 3


def test_every_claim_of_the_paper_has_a_rule_and_without_records_none_is_judged() -> None:
    assert [claim.id for claim in CLAIMS] == [f"C{i}" for i in range(1, 14)]
    assert {verdict.finding.answer for verdict in judge({})} == {Answer.OPEN}

"""Rules are symmetric: what makes a claim hold makes its opposite fail; a tie is open; missing records are "not run".

The opposite of a claim is the same rule on records in which the two arms have changed places.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import kept_records
from torchbelay.lab.claims import CLAIMS
from torchbelay.lab.claims.planar import SIX
from torchbelay.lab.claims.score import CIFAR10
from torchbelay.lab.claims.sensitivity import SETTINGS
from torchbelay.lab.claims.verdict import Answer, Finding, Records, judge_claim
from torchbelay.lab.part import Record

BY_ID = {claim.id: claim for claim in CLAIMS}
HOLDING = (Answer.HOLDS, Answer.IN_PART)
FUNCTIONS = ("Rosenbrock", "Beale", "absolute", "bowl")
examples = settings(deadline=None, max_examples=60, derandomize=True)


def judge(name: str, records: Records) -> Finding:
    return judge_claim(BY_ID[name], records).finding


def check_opposite(one: Finding, other: Finding) -> None:
    """Every passed test must fail for the opposite, and an open test of a tie must be open."""
    outcomes = list(zip(one.tests.values(), other.tests.values(), strict=True))
    assert all(not (a and b) for a, b in outcomes), "a test and its opposite are both passed"
    assert all(b is False for a, b in outcomes if a), "a test is passed, and its opposite does not fail"
    if one.answer is Answer.HOLDS:
        assert other.answer is Answer.FAILS
    if one.answer in HOLDING and other.answer in HOLDING:
        assert 2 * len(one.passed) == len(one.tests) == 2 * len(other.passed)


# The plane ------------------------------------------------------------------------------------------------------------

shares = st.sampled_from([0.0, 0.05, 0.5, 0.88, 0.9, 0.92, 1.0])
steps = st.sampled_from([None, 1, 100, 101, 102])
counts = st.integers(0, 6)


@given(st.tuples(shares, shares, shares, shares))
@examples
def test_c2(given: tuple[float, ...]) -> None:
    def share(arm: str, diverged: float) -> Record:
        about = {"kind": "share", "arm": arm, "lr": 0.01, "half_width": 0.5, "starts": 300, "converged": 0.0}
        return about | {"judged": "w2" if "+" in arm else "w1", "diverged": diverged}

    def records(sgd: float, average: float) -> Records:
        arms = {"SGD": sgd, "EMA+SGD": average, "BELAY+SGD": average, "SGD at BELAY's effective rate": 0.0}
        return {"fig2": [share(arm, x) for arm, x in arms.items()]}

    one, other, *_ = given
    check_opposite(judge("C2", records(one, other)), judge("C2", records(other, one)))


@given(st.lists(steps, min_size=4, max_size=4))
@examples
def test_c4(given: list[int | None]) -> None:
    """Swap the optimizer with momentum and all that it is compared with, which share one number here."""

    def saddle(with_momentum: Sequence[int | None], others: Sequence[int | None]) -> Records:
        slow = "momentum at SGD's effective rate"  # no test is about it
        made: list[Record] = [{"kind": "saddle", "arm": slow, "median_of_arrived": None, "converged": 0.5}]
        for inner, bare, own, other in zip(
            ("momentum", "Adam"), ("SGD", "Adam without momentum"), with_momentum, others, strict=True
        ):
            arms = {inner: own} | dict.fromkeys((bare, f"EMA+{inner}", f"BELAY+{inner}"), other)
            made += [
                {"kind": "saddle", "arm": arm, "median_of_arrived": n, "converged": 0.5} for arm, n in arms.items()
            ]
        return {"fig3": made}

    one, other = judge("C4", saddle(given[:2], given[2:])), judge("C4", saddle(given[2:], given[:2]))
    check_opposite(one, other)
    assert [*other.tests.values()] == [None if x is None else not x for x in one.tests.values()]


@given(st.lists(steps, min_size=8, max_size=8))
@examples
def test_c3_has_two_fastest_of_six_and_ties_are_open(given: list[int | None]) -> None:
    arms = (*SIX, "Adam at BELAY's effective rate", "SGD at BELAY's effective rate")
    made = [
        {"kind": "arrival", "function": "bowl", "arm": arm, "median_arrival": n}
        for arm, n in zip(arms, given, strict=True)
    ]
    (outcome,) = judge("C3", {"fig3": made}).tests.values()
    at = {arm: float("inf") if n is None else n for arm, n in zip(arms, given, strict=True)}
    best = min(at["BELAY+Adam"], at["BELAY+SGD"])
    rivals = sorted(at[arm] for arm in SIX[2:])
    if rivals[1] > best:
        assert outcome is True
    elif rivals[1] < best:
        assert outcome is False
    elif best < float("inf"):
        assert outcome is None  # the second of the rivals is as fast


def curve(arm: str, function: str, works: int) -> list[Record]:
    """An arm that works at the first `works` of eight rates."""
    about = {"kind": "rate", "function": function, "arm": arm, "judged": "w2" if "+" in arm else "w1"}
    return [about | {"lr": 2.0**i, "effective_lr": 2.0**i, "converged": float(i < works)} for i in range(8)]


def plane(arms: Mapping[str, Sequence[int]]) -> Records:
    return {
        "robustness": [
            record
            for arm, works in arms.items()
            for function, count in zip(FUNCTIONS, works, strict=True)
            for record in curve(arm, function, count)
        ]
    }


ranges_of_two = st.tuples(*[st.lists(counts, min_size=4, max_size=4)] * 2)


@given(ranges_of_two)
@example(([0, 0, 3, 3], [3, 3, 0, 0]))
@example(([0] * 4, [0] * 4))
@examples
def test_c13(given: tuple[list[int], list[int]]) -> None:
    def found(average: list[int], momentum: list[int]) -> Finding:
        return judge("C13", plane({"EMA+SGD": average, "BELAY+SGD": average, "momentum": momentum}))

    one, other = found(*given), found(*given[::-1])
    check_opposite(one, other)
    assert [*other.tests.values()] == [None if x is None else not x for x in one.tests.values()]


@given(ranges_of_two)
@example(([0] * 4, [6] * 4))
@examples
def test_c14(given: tuple[list[int], list[int]]) -> None:
    def found(adam: list[int], sgd: list[int]) -> Finding:
        arms = {
            f"{around}{inner}": n for around in ("", "EMA+", "BELAY+") for inner, n in (("Adam", adam), ("SGD", sgd))
        }
        return judge("C14", plane(arms))

    one, other = found(*given), found(*given[::-1])
    check_opposite(one, other)
    assert [*other.tests.values()] == [None if x is None else not x for x in one.tests.values()]


# Networks -------------------------------------------------------------------------------------------------------------

losses = st.sampled_from([None, 0.05, 0.0505, 0.055, 0.06, 0.1])
seeds_of_two = st.lists(st.tuples(losses, losses), min_size=2, max_size=6)
ONE_RATE = (0.05,)


def runs(study: str, arms: Mapping[str, Sequence[float | None]], rates: Iterable[float]) -> list[Record]:
    """Runs with the same losses at all rates, by arm and seed."""
    return [
        {
            "kind": "run",
            "study": study,
            "arm": arm,
            "lr": lr,
            "seed": seed,
            "effective_lr": lr,
            "theta": 0.0,
            "curve": [],
            "steps": 10,
            "final": {"w2": {"train": loss, "test": loss}},
        }
        for arm, by_seed in arms.items()
        for lr in rates
        for seed, loss in enumerate(by_seed)
    ]


@given(seeds_of_two)
@example([(0.0485, 0.05), (0.04851, 0.05)])
@example([(None, 0.05)] * 5)
@examples
def test_c9(given: list[tuple[float | None, float | None]]) -> None:
    ones, others = ([pair[i] for pair in given] for i in (0, 1))

    def found(belay: Sequence[float | None], ema: Sequence[float | None]) -> Finding:
        arms = {"BELAY": belay, "EMA": ema, "matched EMA": ema}
        return judge("C9", {"mnist": runs("rates", arms, ONE_RATE) + runs("table1", arms, ONE_RATE)})

    one, other = found(ones, others), found(others, ones)
    check_opposite(one, other)
    if ones == others and one.tests:
        assert not one.passed


@given(seeds_of_two)
@example([(0.0505, 0.05)] * 3)
@examples
def test_c10_is_the_same_from_either_side(given: list[tuple[float | None, float | None]]) -> None:
    ones, others = ([pair[i] for pair in given] for i in (0, 1))

    def found(belay: Sequence[float | None], ema: Sequence[float | None]) -> Finding:
        return judge("C10", {"cifar10": runs(CIFAR10, {"BELAY": belay, "EMA": ema, "matched EMA": ema}, (1e-3,))})

    assert found(ones, others).tests == found(others, ones).tests


RATES = (1e-3, 1e-2, 1e-1)
curves = st.lists(st.tuples(losses, losses, losses), min_size=2, max_size=4)


@given(st.tuples(curves, curves), ranges_of_two)
@examples
def test_c11(on_ring: tuple[list[Any], list[Any]], on_plane: tuple[list[int], list[int]]) -> None:
    """Ties count against BELAY, so an open test may fail for both; what is passed still fails for the opposite."""

    def found(one: int, other: int) -> Finding:
        arms = {"BELAY": one, "EMA": other, "matched EMA": other}
        ring = [
            {"kind": "run", "arm": arm, "setting": "first", "seed": seed, "lr": lr, "test": loss}
            for arm, i in arms.items()
            for seed, by_rate in enumerate(on_ring[i])
            for lr, loss in zip(RATES, by_rate, strict=True)
        ]
        ranges = plane({f"{arm}+{inner}": on_plane[i] for arm, i in arms.items() for inner in ("SGD", "Adam")})
        return judge("C11", {**ranges, "ring": ring, "mnist": [{"kind": "origin"}]})

    check_opposite(found(0, 1), found(1, 0))


@given(seeds_of_two)
@examples
def test_c15_is_the_same_from_either_side(given: list[tuple[float | None, float | None]]) -> None:
    def found(longer: int, shorter: int) -> Finding:
        ring = [
            {"kind": "run", "arm": "EMA", "setting": setting, "lr": 0.01, "seed": seed, "failed": loss is None}
            | dict.fromkeys(("validation", "test"), loss)
            for setting, i in zip(SETTINGS["EMA"], (longer, shorter), strict=True)
            for seed, pair in enumerate(given)
            for loss in [pair[i]]
        ]
        return judge("C15", {"ring": ring, "posthoc": [{"kind": "protocol"}]})

    assert found(0, 1).tests == found(1, 0).tests


# Missing records ------------------------------------------------------------------------------------------------------


@cache
def kept() -> dict[str, list[Record]]:
    parts = {part for claim in CLAIMS for part in claim.needs} | {"readings", "sign"}
    return {part: kept_records.lines(part) for part in parts}


FIELDS = ("arm", "kind", "function", "network", "lr", "seed", "setting", "study", "name", "rule", "steps", "judged")


def groups(records: Sequence[Record]) -> list[tuple[str, object]]:
    """Return every value of the fields that tell records apart."""
    found = {
        (field, r[field]): None for r in records for field in FIELDS if isinstance(r.get(field), str | int | float)
    }
    return [*found]


CUTS: dict[str, Callable[[Record, tuple[str, object]], bool]] = {
    "without": lambda r, group: r.get(group[0]) != group[1],
    "only": lambda r, group: r.get(group[0], group[1]) == group[1],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
@given(st.data())
@settings(deadline=None, max_examples=25, derandomize=True)
def test_missing_records_are_never_an_exception(claim, cut: str, data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(claim.needs))
    group = data.draw(st.sampled_from(groups(kept()[part])))
    left = [r for r in kept()[part] if CUTS[cut](r, group)]
    finding = judge_claim(claim, kept() | {part: left}).finding
    assert finding.summary
    if not finding.tests:
        assert finding.answer in (Answer.OPEN, Answer.NOT_REPRODUCED)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_part_without_a_record_is_a_part_that_was_not_run(claim) -> None:
    for part in claim.needs:
        finding = judge_claim(claim, kept() | {part: []}).finding
        assert finding == Finding(Answer.OPEN, f"needs {part}, which has not been run")
        header = judge_claim(claim, kept() | {part: [{"kind": "protocol"}]}).finding
        assert header.summary

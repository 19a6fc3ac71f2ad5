"""The rules behind C1 to C4, C12 and C13, on records made for each outcome."""

from collections.abc import Iterable

import pytest

from helpers import golden_records
from torchbelay.lab.claims.planar import CLAIMS, PAPER_RATES, SIX
from torchbelay.lab.claims.verdict import Answer, Claim, Finding, judge_claim
from torchbelay.lab.part import Record

HOLDS, IN_PART, FAILS, UNDECIDED, OPEN = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.UNDECIDED, Answer.OPEN
BY_ID = {claim.id: claim for claim in CLAIMS}
NEVER = None


def judge(name: str, **records: list[Record]) -> Finding:
    found = judge_claim(BY_ID[name], records)
    assert found.claim is BY_ID[name]
    return found.finding


def weights_of(arm: str) -> str:
    """What the rules must judge an arm by, written a second time."""
    return "w2" if "+" in arm else "w1"


# All of them --------------------------------------------------------------------------------------------------------


def test_the_claims_are_those_about_the_plane() -> None:
    assert list(BY_ID) == ["C1", "C2", "C3", "C4", "C12", "C13"]
    for claim in CLAIMS:
        assert claim.rule.endswith(".")
        assert claim.text.endswith(".")
        assert claim.plate is not None
        assert claim.plate.split("-")[0] == claim.needs[0]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_whose_part_was_not_run_says_so(claim: Claim) -> None:
    found = judge_claim(claim, {"fig1": []})
    assert found.finding == Finding(OPEN, f"needs {claim.needs[0]}, which has not been run")


@pytest.mark.parametrize("part", golden_records.PARTS[1:], ids=lambda part: part.NAME)
def test_the_rules_understand_what_the_parts_record(part) -> None:
    """Quick records mean little, but every rule finds in them what it looks for."""
    records = {part.NAME: golden_records.quick(part)}
    asked = [claim for claim in CLAIMS if claim.needs == (part.NAME,)]
    assert asked
    for claim in asked:
        finding = judge_claim(claim, records).finding
        assert finding.answer is not OPEN
        assert finding.numbers


# C1 and C2: shares of the starts on Rosenbrock ----------------------------------------------------------------------

TEN = (
    *SIX,
    "Adam at BELAY's effective rate",
    "SGD at BELAY's effective rate",
    "matched EMA+Adam",
    "matched EMA+SGD",
)


def shares(lr: float, field: str, of: dict[str, float]) -> list[Record]:
    """A share of each arm, 0 if not given, among records that the rules must not look at."""
    records: list[Record] = []
    for arm in TEN:
        wrong = 1.0 - round(of.get(arm, 0.0))  # a rule that counts it gives another answer
        about = {"kind": "share", "arm": arm, "lr": lr, "half_width": 0.5, "judged": weights_of(arm), "starts": 1000}
        values = {"converged": 0.0, "diverged": 0.0, field: of.get(arm, 0.0)}
        decoy = values | {field: wrong}
        records += [
            about | values,
            about | {"lr": 0.001} | decoy,
            about | {"half_width": 0.3} | decoy,
            about | {"kind": "curve"} | decoy,
        ]
        if "+" in arm:
            records.append(about | {"judged": "w1"} | decoy)
    return [{"kind": "path", "arm": "SGD", "lr": lr}, *records]


BOTH = ("BELAY+Adam", "EMA+Adam")
OTHERS = ("BELAY+SGD", "EMA+SGD", "Adam", "SGD")


@pytest.mark.parametrize(
    ("works", "answer"),
    [
        (dict.fromkeys(BOTH, 1.0), HOLDS),
        (dict.fromkeys(BOTH, 0.92), HOLDS),  # just enough: 90.1% to 93.5%
        (dict.fromkeys(BOTH, 0.9), UNDECIDED),  # on the bar itself nothing is shown
        (dict.fromkeys(BOTH, 0.92) | dict.fromkeys(OTHERS, 0.88), HOLDS),
        ({"BELAY+Adam": 1.0, "EMA+Adam": 0.88}, FAILS),
        ({"BELAY+Adam": 1.0, "EMA+Adam": 0.9}, UNDECIDED),
        (dict.fromkeys(BOTH, 1.0) | {"Adam": 0.9}, IN_PART),
        (dict.fromkeys(BOTH, 1.0) | {"Adam": 1.0, "Adam at BELAY's effective rate": 1.0}, IN_PART),
        (dict.fromkeys(BOTH, 1.0) | {"Adam at BELAY's effective rate": 0.88}, HOLDS),
        (dict.fromkeys(BOTH, 1.0) | {"Adam at BELAY's effective rate": 0.903}, IN_PART),
        ({}, FAILS),
        (dict.fromkeys(SIX, 1.0), IN_PART),
        (dict.fromkeys(OTHERS, 1.0), FAILS),
        (dict.fromkeys(OTHERS, 0.95) | dict.fromkeys(BOTH, 0.88), FAILS),
    ],
)
def test_c1_at_a_high_rate_only_averages_around_adam_converge(works: dict[str, float], answer: Answer) -> None:
    finding = judge("C1", fig2=shares(0.15, "converged", works))
    assert finding.answer is answer
    numbers = dict(finding.numbers)
    shown = [numbers[f"{arm}, judged by {weights_of(arm)}"].split()[0] for arm in SIX]
    assert shown == [f"{works.get(arm, 0):.1%}" for arm in SIX]
    assert numbers["BELAY+Adam, judged by w1"] == f"{1 - round(works.get('BELAY+Adam', 0)):.0%}"


def test_c1_says_who_works_and_what_the_control_does() -> None:
    works = {"BELAY+Adam": 0.95, "EMA+Adam": 0.93, "Adam": 0.42, "Adam at BELAY's effective rate": 0.77}
    summary = judge("C1", fig2=shares(0.15, "converged", works)).summary
    assert "BELAY+Adam and EMA+Adam converged from at least 90%" in summary
    assert "Adam alone converged from 42%, and from 77.0% (74.3% to 79.5%) at BELAY's effective rate." in summary
    assert "0.15, no method converged" in judge("C1", fig2=shares(0.15, "converged", {})).summary


@pytest.mark.parametrize(
    ("sgd", "ema", "belay", "answer"),
    [
        (0.6, 0.3, 0.0, HOLDS),
        (0.5, 0.4, 0.4, UNDECIDED),  # exactly a tenth fewer: more starts would tell
        (0.5, 0.35, 0.35, HOLDS),
        (0.5, 0.5, 0.35, IN_PART),
        (0.5, 0.4, 0.0, IN_PART),
        (0.5, 0.0, 0.5, IN_PART),
        (0.5, 0.5, 0.4, UNDECIDED),
        (0.5, 0.5, 0.5, FAILS),
        (0.5, 0.45, 0.45, FAILS),
        (0.0, 0.0, 0.0, FAILS),  # no run diverges: there is nothing to save
        (0.1, 0.9, 0.9, FAILS),
    ],
)
def test_c2_averaging_keeps_sgd_from_diverging(sgd: float, ema: float, belay: float, answer: Answer) -> None:
    lost = {"SGD": sgd, "EMA+SGD": ema, "BELAY+SGD": belay, "SGD at BELAY's effective rate": 0.125}
    finding = judge("C2", fig2=shares(0.01, "diverged", lost))
    assert finding.answer is answer
    for share in (sgd, ema, belay, 0.125):
        assert f"from {share:.0%}" in finding.summary
    assert dict(finding.numbers)["BELAY+SGD: diverged"].startswith(f"{belay:.1%} (")


# C3 and C4: median steps ----------------------------------------------------------------------------------------------

SLOW = dict.fromkeys((*SIX, "Adam at BELAY's effective rate", "SGD at BELAY's effective rate"), 900)


def arrivals(**of: dict[str, int | None]) -> list[Record]:
    """Median steps of each arm on each function, 900 if not given."""
    return [
        {"kind": "arrival", "function": function, "arm": arm, "median_arrival": steps}
        for function, given in of.items()
        for arm, steps in (SLOW | given).items()
    ]


FAST = {"BELAY+Adam": 100}
THIRD = {"BELAY+Adam": 100, "Adam": 99, "EMA+Adam": 98}


@pytest.mark.parametrize(
    ("one", "two", "answer"),
    [
        (FAST, {"BELAY+SGD": 100}, HOLDS),
        (FAST, {"BELAY+Adam": 100, "Adam": 99}, HOLDS),  # second is among the fastest
        (FAST, {"BELAY+Adam": 100, "Adam": 100, "EMA+Adam": 100, "SGD": 100}, HOLDS),  # none is faster
        (FAST, FAST | {"SGD at BELAY's effective rate": 100}, HOLDS),  # the control is not faster either
        (FAST, FAST | {"SGD at BELAY's effective rate": 99}, IN_PART),
        (FAST, FAST | {"Adam at BELAY's effective rate": 99}, IN_PART),
        (FAST, THIRD, IN_PART),
        (FAST, {"BELAY+Adam": NEVER, "BELAY+SGD": NEVER}, IN_PART),
        (THIRD, THIRD, FAILS),
        (dict.fromkeys(SLOW, NEVER), dict.fromkeys(SLOW, NEVER), FAILS),  # all are equal, but none arrives
        (dict.fromkeys(SIX, NEVER), THIRD, FAILS),
    ],
)
def test_c3_belay_is_among_the_fastest(one: dict[str, int | None], two: dict[str, int | None], answer: Answer) -> None:
    assert judge("C3", fig3=arrivals(bowl=one, Beale=two)).answer is answer


def test_c3_counts_functions_and_says_never() -> None:
    records = arrivals(bowl=FAST, Beale=dict.fromkeys(SIX, NEVER), absolute=FAST | {"SGD at BELAY's effective rate": 5})
    finding = judge("C3", fig3=records)
    assert "on 2 of 3 functions" in finding.summary
    assert "is faster on 2 of 3." in finding.summary  # on Beale's, too, because BELAY never arrives
    numbers = dict(finding.numbers)
    assert numbers["bowl: rank of the faster BELAY among the six"] == "1"
    assert numbers["bowl: median steps of BELAY+Adam"] == "100"
    assert numbers["Beale: rank of the faster BELAY among the six"] == "1"
    assert numbers["Beale: median steps of BELAY+Adam"] == "never"
    assert numbers["Beale: median steps of SGD"] == "never"
    assert numbers["absolute: median steps of SGD at BELAY's effective rate"] == "5"


def test_c3_without_a_single_function_is_open() -> None:
    assert judge("C3", fig3=saddle({})).answer is OPEN


EVEN = dict.fromkeys(
    (
        "SGD",
        "momentum",
        "EMA+momentum",
        "BELAY+momentum",
        "Adam without momentum",
        "Adam",
        "EMA+Adam",
        "BELAY+Adam",
    ),
    200,
)


def saddle(given: dict[str, int | None]) -> list[Record]:
    return [
        {
            "kind": "saddle",
            "function": "Beale",
            "arm": arm,
            "median_of_arrived": n,
            "median_arrival": 1,
            "converged": 0.5,
        }
        for arm, n in (EVEN | given).items()
    ]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"momentum": 201, "EMA+momentum": 200}, HOLDS),
        ({"Adam": 201, "BELAY+Adam": 200, "EMA+Adam": 201}, HOLDS),
        ({"momentum": NEVER, "BELAY+momentum": 599}, HOLDS),
        ({"Adam": NEVER, "EMA+Adam": NEVER, "BELAY+Adam": 300}, HOLDS),
        ({"momentum": 201, "EMA+momentum": 201, "BELAY+momentum": 201}, IN_PART),
        ({"momentum": NEVER, "EMA+momentum": NEVER, "BELAY+momentum": NEVER}, IN_PART),
        ({"momentum": 100, "EMA+momentum": 99}, IN_PART),
        ({}, FAILS),  # exactly as fast is not a struggle, nor a cure
        ({"momentum": 100, "EMA+momentum": 100, "BELAY+momentum": NEVER, "SGD": NEVER}, FAILS),
        (dict.fromkeys(EVEN, NEVER), FAILS),
    ],
)
def test_c4_momentum_struggles_at_a_saddle_and_averaging_cures_it(given: dict[str, int | None], answer: Answer) -> None:
    finding = judge("C4", fig3=[*arrivals(Beale=dict.fromkeys(SIX, 1)), *saddle(given)])
    assert finding.answer is answer
    for arm, steps in (EVEN | given).items():
        expected = "never" if steps is NEVER else str(steps)
        assert dict(finding.numbers)[f"{arm}: median steps of the runs that converge"] == f"{expected} (50% converge)"


def test_c4_counts_the_cures() -> None:
    summary = judge("C4", fig3=saddle({"momentum": NEVER, "BELAY+Adam": 20})).summary
    assert "with and without momentum are never and 200 for SGD, 200 and 200 for Adam." in summary
    assert summary.endswith("An average needs fewer steps in 3 of 4 cases.")


# C12 and C13: the highest rate that works -----------------------------------------------------------------------------

GRID = (1e-4, 1e-3, 2e-3, 3e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.15, 0.5)


def works_up_to(arm: str, highest: float | None, function: str = "bowl", scale: float = 1.0) -> Iterable[Record]:
    """An arm's records over the grid: it works up to a rate, and nowhere if that is None."""
    for lr in GRID:
        works = highest is not None and lr <= highest
        yield {
            "kind": "rate",
            "function": function,
            "arm": arm,
            "judged": weights_of(arm),
            "lr": lr,
            "effective_lr": scale * lr,
            "converged": 0.9 if works else 0.899,
        }


def rates(*functions: dict[str, float | None]) -> list[Record]:
    """For each function the highest rate of each of the six; their paper rates, if not given."""
    return [
        record
        for i, given in enumerate(functions)
        for arm, highest in (PAPER_RATES | given).items()
        for record in works_up_to(arm, highest, f"f{i}")
    ]


ROOM = dict.fromkeys(PAPER_RATES, 0.5)  # ten times the largest of the paper's


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ([{}], HOLDS),
        ([ROOM, {}], HOLDS),  # one function on which no higher rate works is enough
        ([{"SGD": 2e-3, "BELAY+SGD": 2e-2}], HOLDS),
        ([{"SGD": 1e-4}], HOLDS),  # the paper's own rate fails already
        ([{"SGD": 3e-3}], IN_PART),  # three times the paper's rate still works
        ([{"BELAY+Adam": 0.15}], IN_PART),
        ([{"BELAY+SGD": 3e-2}], IN_PART),
        ([{"SGD": None}], IN_PART),
        ([dict.fromkeys(list(PAPER_RATES)[:3], 0.5)], IN_PART),  # higher rates work for half of them
        ([dict.fromkeys(list(PAPER_RATES)[:4], 0.5)], FAILS),
        ([{"SGD": None}, {}], HOLDS),  # a function on which nothing works does not count
        ([ROOM], FAILS),
        ([ROOM, ROOM], FAILS),
        ([dict.fromkeys(PAPER_RATES, None)], FAILS),
    ],
)
def test_c12_each_method_was_run_at_its_highest_rate(functions: list[dict[str, float | None]], answer: Answer) -> None:
    assert judge("C12", robustness=rates(*functions)).answer is answer


def test_c12_says_at_how_much_higher_rates_the_others_work() -> None:
    finding = judge("C12", robustness=rates(ROOM | {"BELAY+Adam": 5e-2, "Adam": None}))
    assert finding.summary.startswith("Of six methods, BELAY+Adam ran within a factor of 3")
    assert "BELAY+SGD (×50)" in finding.summary
    assert "EMA+SGD (×500)" in finding.summary
    assert finding.summary.endswith("; no rate works for Adam.")
    assert judge("C12", robustness=rates({})).summary.endswith("of the highest rate that works.")
    assert "nan" not in finding.summary
    label = "{}: the paper's rate, and the highest that works on every function"
    numbers = dict(finding.numbers)
    assert numbers[label.format("BELAY+SGD")] == "0.01, 0.5 (50 times the paper's)"
    assert numbers[label.format("Adam")] == "0.001, none"


def test_c12_looks_at_the_average_if_an_arm_has_one() -> None:
    decoys = [r | {"judged": "w1", "converged": 1.0} for arm in SIX if "+" in arm for r in works_up_to(arm, 0.5, "f0")]
    sweep = [r | {"kind": "theta"} for r in works_up_to("SGD", 0.5, "f0")]
    assert judge("C12", robustness=[*decoys, *sweep, *rates({})]).answer is HOLDS


MOMENTUM, BELAYS = 10.0, 0.25  # how much farther a constant gradient moves them than SGD


def against(*functions: tuple[float | None, float | None, float | None]) -> list[Record]:
    """For each function the highest rates of EMA, BELAY and momentum."""
    return [
        record
        for i, highest in enumerate(functions)
        for arm, lr, scale in zip(("EMA+SGD", "BELAY+SGD", "momentum"), highest, (1.0, BELAYS, MOMENTUM), strict=True)
        for record in works_up_to(arm, lr, f"f{i}", scale)
    ]


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ([(0.15, 0.15, 1e-3)], HOLDS),
        ([(0.15, 0.15, None)], HOLDS),
        ([(0.15, 0.15, 1e-3), (0.15, 0.15, 1e-3), (None, None, 1e-3)], HOLDS),  # on most functions
        ([(0.15, 0.15, 1e-3), (None, None, None)], HOLDS),  # a function on which nothing works does not count
        ([(2e-2, 2e-2, 1e-2)], IN_PART),  # more in the nominal rate, less in the effective one: two of four
        ([(0.15, 1e-3, 1e-2)], IN_PART),  # EMA alone, in both rates
        ([(2e-2, 1e-3, 1e-2)], FAILS),  # EMA in the nominal rate alone: one of four
        ([(1e-3, 1e-3, 1e-3)], UNDECIDED),  # equal in the nominal rate, less in the effective one
        ([(None, None, 1e-3)], FAILS),
        ([(None, None, None)], UNDECIDED),
        ([(0.15, 0.15, 1e-3), (1e-3, 1e-3, 1e-2)], UNDECIDED),  # as often higher as lower
    ],
)
def test_c13_averaging_works_at_higher_rates_than_momentum(
    functions: list[tuple[float | None, float | None, float | None]], answer: Answer
) -> None:
    assert judge("C13", robustness=against(*functions)).answer is answer


def test_c13_says_for_which_of_the_four_comparisons() -> None:
    finding = judge("C13", robustness=against((0.15, 2e-2, 1e-2), (0.15, 2e-2, None)))
    won = "EMA by nominal rate, BELAY by nominal rate and EMA by effective rate"
    assert f"in 3 of 4 comparisons (EMA and BELAY, by nominal and effective rate): {won}." in finding.summary
    assert judge("C13", robustness=against((None, None, 1e-3))).summary.endswith("nominal and effective rate).")
    numbers = dict(finding.numbers)
    assert numbers["nominal: the highest rate of BELAY+SGD against that of momentum"] == (
        "higher on 2 and lower on 0 of 2 functions"
    )
    assert numbers["effective: the highest rate of BELAY+SGD against that of momentum"] == (
        "higher on 1 and lower on 1 of 2 functions"
    )
    assert numbers["f0, effective: highest rate of BELAY+SGD and of momentum"] == "0.005, 0.1"
    assert numbers["f1, nominal: highest rate of EMA+SGD and of momentum"] == "0.15, none"

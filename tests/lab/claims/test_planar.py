"""The rules behind C1 to C4, on records made for each outcome."""

import pytest

from helpers import golden_records
from torchbelay.lab.claims.planar import CLAIMS, SIX
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
    assert list(BY_ID) == ["C1", "C2", "C3", "C4"]
    for claim in CLAIMS:
        assert claim.rule.endswith(".")
        assert claim.text.endswith(".")
        assert claim.plate is not None
        assert claim.plate.split("-")[0] == claim.needs[0]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_whose_part_was_not_run_says_so(claim: Claim) -> None:
    found = judge_claim(claim, {"fig1": []})
    assert found.finding == Finding(OPEN, f"needs {claim.needs[0]}, which has not been run")


@pytest.mark.parametrize("part", golden_records.PARTS[1:3], ids=lambda part: part.NAME)
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
    assert "BELAY+Adam and EMA+Adam converged from over 90%" in summary
    assert "Adam from 42%, at BELAY's effective rate from 77.0% (74.3% to 79.5%)." in summary
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
        (FAST, {"BELAY+Adam": 100, "Adam": 100}, HOLDS),
        (FAST, {"BELAY+Adam": 100, "Adam": 100, "EMA+Adam": 100, "SGD": 100}, IN_PART),  # a tie is open
        (THIRD, {"BELAY+Adam": 100, "Adam": 99, "EMA+Adam": 100}, UNDECIDED),
        (FAST, FAST | {"SGD at BELAY's effective rate": 100}, HOLDS),  # the control is not faster either
        (FAST, FAST | {"SGD at BELAY's effective rate": 99}, IN_PART),
        (FAST, FAST | {"Adam at BELAY's effective rate": 99}, IN_PART),
        (FAST, THIRD, IN_PART),
        (FAST, {"BELAY+Adam": NEVER, "BELAY+SGD": NEVER}, IN_PART),
        (THIRD, THIRD, FAILS),
        (dict.fromkeys(SLOW, NEVER), dict.fromkeys(SLOW, NEVER), UNDECIDED),  # none arrives
        (dict.fromkeys(SIX, NEVER), THIRD, UNDECIDED),
    ],
)
def test_c3_belay_is_among_the_fastest(one: dict[str, int | None], two: dict[str, int | None], answer: Answer) -> None:
    assert judge("C3", fig3=arrivals(bowl=one, Beale=two)).answer is answer


def test_c3_counts_functions_and_says_never() -> None:
    records = arrivals(bowl=FAST, Beale=dict.fromkeys(SIX, NEVER), absolute=FAST | {"SGD at BELAY's effective rate": 5})
    finding = judge("C3", fig3=records)
    assert "on 2 of 3 functions" in finding.summary
    assert "at its effective rate wins on 2." in finding.summary  # on Beale's, too, because BELAY never arrives
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
        "momentum at SGD's effective rate",
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
        ({"momentum": 201, "Adam": 201}, HOLDS),  # slower than without momentum, and than every average
        ({"momentum": 201}, IN_PART),  # with SGD alone: the others are open
        ({"momentum": NEVER, "Adam": NEVER}, HOLDS),
        ({"momentum": 201, "EMA+momentum": 202}, UNDECIDED),  # two of six
        ({"momentum": 201, "EMA+momentum": 199, "BELAY+momentum": NEVER}, UNDECIDED),
        ({"SGD": 100, "Adam without momentum": 100, "EMA+Adam": 199}, IN_PART),
        ({}, UNDECIDED),  # exactly as fast is not a struggle, and no cure, nor the opposite
        ({"momentum": 199, "Adam": 199}, FAILS),
        ({"momentum": 100, "EMA+momentum": 100, "BELAY+momentum": NEVER, "SGD": NEVER}, UNDECIDED),
        (dict.fromkeys(EVEN, NEVER), UNDECIDED),
    ],
)
def test_c4_momentum_struggles_at_a_saddle_and_averaging_cures_it(given: dict[str, int | None], answer: Answer) -> None:
    finding = judge("C4", fig3=[*arrivals(Beale=dict.fromkeys(SIX, 1)), *saddle(given)])
    assert finding.answer is answer
    assert len(finding.tests) == 6
    for arm, steps in (EVEN | given).items():
        expected = "never" if steps is NEVER else str(steps)
        assert dict(finding.numbers)[f"{arm}: median steps of the runs that converge"] == f"{expected} (50% converge)"


def test_c4_counts_the_cures() -> None:
    summary = judge("C4", fig3=saddle({"momentum": NEVER, "BELAY+Adam": 20})).summary
    assert "momentum takes never steps (200 at SGD's effective rate), SGD 200; with Adam 200 against 200." in summary
    assert summary.endswith("Averages need fewer in 3 of 4 cases.")

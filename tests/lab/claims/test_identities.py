"""The rules of C6 to C8 on records of every outcome, built by hand."""

from typing import Any

import pytest

from torchbelay.lab.claims.identities import CLAIMS
from torchbelay.lab.claims.verdict import Answer, Finding, judge_claim
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.plane import invariance, momentum
from torchbelay.lab.plane.invariance import HEAVY, PAPER

BY_ID = {claim.id: claim for claim in CLAIMS}
HOLDS, IN_PART, FAILS = Answer.HOLDS, Answer.IN_PART, Answer.FAILS


def judged(claim: str, records: list[Record]) -> Finding:
    (part,) = BY_ID[claim].needs
    return judge_claim(BY_ID[claim], {part: records}).finding


def test_the_claims_of_this_file() -> None:
    assert list(BY_ID) == ["C6", "C7", "C8"]


@pytest.mark.parametrize("claim", BY_ID)
def test_without_its_part_a_claim_is_open(claim: str) -> None:
    assert judge_claim(BY_ID[claim], {}).finding.answer is Answer.OPEN


# C6: EMA is BELAY at an infinite mass --------------------------------------------------------------------------------


def limits(late: float = 1e-16, same: float = 0.03, power: float = -1.0) -> list[Record]:
    ema = {"kind": "ema", "deviation_one_step_later": late, "deviation_same_step": same, "deviation_follow_after": 0.0}
    masses = (1e2, 1e3, 1e4)
    return [ema] + [{"kind": "limit", "m1": m1, "difference": 0.1 * m1**power} for m1 in masses]


@pytest.mark.parametrize(
    ("records", "answer", "expected"),
    [
        (limits(), HOLDS, "one step late (erratum E6)"),
        (limits(late=0.03, same=1e-16), HOLDS, "BELAY is Eq. 1's EMA, within 1e-16"),
        (limits(late=1e-3), IN_PART, "1e-03 off Eq. 1's EMA"),
        (limits(power=-0.5), IN_PART, "power −0.50: BELAY does not tend to that limit."),
        (limits(late=1e-3, power=0.0), FAILS, "does not tend to that limit"),
    ],
)
def test_C6(records: list[Record], answer: Answer, expected: str) -> None:
    finding = judged("C6", records)
    assert finding.answer is answer
    assert expected in finding.summary


# C7: the rule k(T) ---------------------------------------------------------------------------------------------------


def lengths(
    ruled: float = 0.001,
    fixed: float = 0.5,
    losses: tuple[float, float] = (1e-3, 1e-6),
    refused: bool = True,
    real: float = 1e-13,
) -> list[Record]:
    """Paths of two lengths, so far apart with the rule and without, and expected losses at the two."""
    records: list[Record] = []
    for rule in HEAVY.rules:
        apart = ruled if rule in ("printed", "exact") else fixed
        for steps, end, loss in ((1000, 0.1 + apart, losses[0]), (1_000_000, 0.1, losses[1])):
            common: dict[str, Any] = {"masses": HEAVY.name, "rule": rule, "steps": steps}
            short = steps == 1000
            records.append(
                {"kind": "path", **common, "path": [1.0, end], "deviation_of_belay": real if short else None}
            )
            simulated = {"simulated_w2": loss * 1.01, "standard_error": loss * 0.01, "runs": 10}
            records.append({"kind": "noise", **common, "loss_w2": loss} | (simulated if short else {"runs": None}))
    if refused:
        records.append({"kind": "refused", "masses": PAPER.name, "rule": "printed", "steps": 1000, "why": "κ ≥ 1"})
    return records


@pytest.mark.parametrize(
    ("records", "answer"),
    [
        (lengths(losses=(1e-3, 1.05e-3), refused=False), HOLDS),
        (lengths(losses=(1e-3, 1.05e-3)), IN_PART),
        (lengths(refused=False), IN_PART),
        (lengths(), IN_PART),
        (lengths(ruled=0.02), FAILS),  # one of four: without the rule the paths are still farther apart
        (lengths(ruled=0.009, fixed=0.05), FAILS),  # the rule makes no difference worth the name
        (lengths(real=1e-6), FAILS),  # the matrices are not what the library does
        (lengths(real=1e-6, losses=(1e-3, 1e-3), refused=False), IN_PART),
    ],
)
def test_C7(records: list[Record], answer: Answer) -> None:
    assert judged("C7", records).answer is answer


def test_C7_says_its_numbers() -> None:
    finding = judged("C7", lengths())
    assert "From 1,000 to 1,000,000 steps, paths differ by 0.10% (at least 50% without the rule)" in finding.summary
    assert "noisy losses fall 1,000-fold; the rule fails at 1,000 steps." in finding.summary
    (refused,) = [value for what, value in finding.numbers if what.endswith("erratum E5)")]
    assert refused == "1,000"
    assert "noisy losses grow 1,000-fold" in judged("C7", lengths(losses=(1e-6, 1e-3))).summary
    alike = judged("C7", lengths(losses=(1e-3, 1e-3), refused=False))
    assert alike.summary.endswith("noisy losses stay the same.")
    assert alike.numbers[-1][1] == "none"


# C8: a momentum step -------------------------------------------------------------------------------------------------


def links(affine: float = 1e-16, power: float = 2.0, off: float = 1e-15, nu: float = -2.16) -> list[Record]:
    curved = [
        {"kind": "gradient", "function": "Rosenbrock", "distance": d, "deviation": d**power} for d in (1e-4, 1e-3, 1e-2)
    ]
    return [
        *curved,
        {"kind": "gradient", "function": momentum.BOWL.name, "distance": 1.0, "deviation": affine},
        {"kind": "gradient as printed", "function": momentum.BOWL.name, "deviation": 0.9},
        {"kind": "form", "name": "average of the centre of mass", "deviation": 1e-15},
        {"kind": "form", "name": "momentum", "beta": 0.925, "nu": nu, "deviation": off},
        {"kind": "method", "name": "heavy ball", "deviation": 4e-15},
    ]


@pytest.mark.parametrize(
    ("records", "answer", "expected"),
    [
        (links(nu=0.5), HOLDS, "with 0.50 times torch's momentum."),
        (links(), IN_PART, "with −2.16 times torch's momentum: subtracted, not added."),
        (links(power=1.0, nu=0.5), IN_PART, "to the power 1.00"),
        (links(affine=1e-3, nu=0.5), IN_PART, "is not the average gradient"),
        (links(off=1e-3, nu=0.5), IN_PART, "1e-03 off a momentum step"),
        (links(affine=1e-3, off=1e-3), FAILS, "is not the average gradient"),
    ],
)
def test_C8(records: list[Record], answer: Answer, expected: str) -> None:
    finding = judged("C8", records)
    assert finding.answer is answer
    assert expected in finding.summary


# The real thing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("claim", "answer"), [("C6", HOLDS), ("C7", IN_PART), ("C8", IN_PART)])
def test_the_parts_own_records_are_judged(claim: str, answer: Answer) -> None:
    part = {"momentum": momentum, "invariance": invariance}[BY_ID[claim].needs[0]]
    finding = judged(claim, part.run(Settings(quick=True), lambda n: None))
    assert finding.answer is answer
    assert len(finding.numbers) >= 4


def test_every_figure_that_a_claim_names_is_drawn() -> None:
    quick, drawn = Settings(quick=True), set()
    for part in (momentum, invariance):
        drawn |= {plate.name for plate in part.draw(part.run(quick, lambda n: None))}
    assert {claim.plate for claim in CLAIMS} <= drawn

"""One verdict per claim of the paper, computed from the records by a rule that the report prints beside it."""

from . import costs, identities, planar, ranges, rates, score, sensitivity, trained
from .verdict import Records, Verdict, judge_claim

_ALL = tuple(
    claim
    for module in (planar, rates, identities, costs, trained, score, ranges, sensitivity)
    for claim in module.CLAIMS
)
CLAIMS = tuple(sorted(_ALL, key=lambda claim: int(claim.id[1:])))


def judge(records: Records) -> list[Verdict]:
    """Return the verdicts on all claims, C1 first."""
    return [judge_claim(claim, records) for claim in CLAIMS]

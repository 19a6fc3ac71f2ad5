"""One verdict per claim of the paper, computed from the records by a rule that the report prints beside it."""

from . import identities, planar, score, trained
from .verdict import Records, Verdict, judge_claim

_ALL = (*planar.CLAIMS, *identities.CLAIMS, *trained.CLAIMS, *score.CLAIMS)
CLAIMS = tuple(sorted(_ALL, key=lambda claim: int(claim.id[1:])))


def judge(records: Records) -> list[Verdict]:
    """Return the verdicts on all claims, C1 first."""
    return [judge_claim(claim, records) for claim in CLAIMS]

"""A verdict on every claim of the paper, computed from the records by rules that the report prints beside it."""

from . import identities, planar, score, trained
from .verdict import Records, Verdict, verdict

_ALL = (*planar.CLAIMS, *identities.CLAIMS, *trained.CLAIMS, *score.CLAIMS)
CLAIMS = tuple(sorted(_ALL, key=lambda claim: int(claim.id[1:])))


def judge(records: Records) -> list[Verdict]:
    """All claims, C1 first."""
    return [verdict(claim, records) for claim in CLAIMS]

"""The claims about score models of images, C9 and C10: they wait for those."""

from .verdict import Answer, Claim, Finding, Records


def _waits(records: Records) -> Finding:
    return Finding(Answer.OPEN, "Needs the score models, which are not part of the laboratory yet.")


_RULE = "Paired differences over seeds, with a matched EMA among the arms, once the score models are here."
CLAIMS = (
    Claim("C9", "On MNIST BELAY beats EMA (FID 15.2 against 18.1).", _RULE, (), _waits),
    Claim("C10", "On CIFAR-10 BELAY and EMA are about equal (FID 1.99 against 1.98).", _RULE, (), _waits),
)

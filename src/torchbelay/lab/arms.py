"""The methods that are compared: the paper's six, and the controls without which a comparison says little."""

from dataclasses import dataclass

from torchbelay.physics.identity import describe
from torchbelay.physics.method import Method
from torchbelay.physics.spring import Spring

# The name of a method, in records, figures and text alike.
PLAIN, EMA, MATCHED, BELAY, REPULSIVE = "no averaging", "EMA", "matched EMA", "BELAY", "repulsive spring"
EQUAL = "equal-memory EMA"  # with BELAY's averaging rate, at the nominal learning rate; not the paper's EMA

PAPER_SPRING = Spring(k=1.0, m1=10.0, m2=20.0)  # the paper's setting in two dimensions
PAPER_EMA = Spring.ema(decay=0.95)
MOMENTUM = 0.9


@dataclass(frozen=True)
class Arm:
    """An inner optimizer with or without an average, at `lr_scale` times the nominal learning rate."""

    name: str
    inner: str  # a key of plane.race.INNER
    method: Method | None = None
    lr_scale: float = 1.0
    effective_scale: float = 1.0  # how far a constant gradient moves the weights, per nominal learning rate
    spectators: tuple[tuple[str, Method], ...] = ()  # further averages of the same run, which never pull, by name

    @property
    def averages(self) -> bool:
        """Whether the arm has an average w2."""
        return self.method is not None


def in_words(arm: str) -> str:
    """Return an arm's name in a sentence.

    >>> in_words(EMA), in_words(MATCHED)
    ('EMA', 'the matched EMA')
    """
    return arm if arm == EMA else f"the {arm}"


def belay_arm(inner: str, spring: Spring = PAPER_SPRING, name: str = BELAY) -> Arm:
    """Return BELAY around an optimizer."""
    return Arm(f"{name}+{inner}", inner, spring, effective_scale=spring.effective_lr_scale)


def matched_arm(inner: str, spring: Spring = PAPER_SPRING) -> Arm:
    """Return the control that shows what BELAY's feedback adds: EMA with its averaging rate and effective rate."""
    scale = spring.effective_lr_scale
    return Arm(f"{MATCHED}+{inner}", inner, spring.matched_ema(), lr_scale=scale, effective_scale=scale)


def slow_arm(inner: str, spring: Spring = PAPER_SPRING) -> Arm:
    """Return the simpler control: the optimizer alone, at BELAY's effective learning rate."""
    scale = spring.effective_lr_scale
    return Arm(f"{inner} at BELAY's effective rate", inner, lr_scale=scale, effective_scale=scale)


SGD, ADAM = Arm("SGD", "SGD"), Arm("Adam", "Adam")
EMA_SGD, EMA_ADAM = Arm("EMA+SGD", "SGD", PAPER_EMA), Arm("EMA+Adam", "Adam", PAPER_EMA)
BELAY_SGD, BELAY_ADAM = belay_arm("SGD"), belay_arm("Adam")
SLOW_SGD, SLOW_ADAM = slow_arm("SGD"), slow_arm("Adam")
MATCHED_SGD, MATCHED_ADAM = matched_arm("SGD"), matched_arm("Adam")
# a constant gradient moves momentum 1/(1 − μ) times as far
MOMENTUM_SGD = Arm("momentum", "momentum", effective_scale=1 / (1 - MOMENTUM))

PAPER_ARMS = (BELAY_ADAM, BELAY_SGD, EMA_ADAM, EMA_SGD, ADAM, SGD)
CONTROLS = (SLOW_ADAM, SLOW_SGD, MATCHED_ADAM, MATCHED_SGD)


@dataclass(frozen=True)
class Lane:
    """An arm at a nominal learning rate."""

    arm: Arm
    lr: float
    eps: float = 1e-8  # Adam's
    warm_up: int = 0  # steps over which the learning rate grows to its value
    beta1: float = 0.9  # Adam's

    @property
    def actual_lr(self) -> float:
        """The learning rate of the inner optimizer."""
        return self.lr * self.arm.lr_scale

    @property
    def effective_lr(self) -> float:
        """The distance that a constant gradient of 1 moves the weights per step, in the long run."""
        return self.lr * self.arm.effective_scale

    def options(self) -> dict[str, object]:
        """Return the fields of a record that describe the lane."""
        return {
            "arm": self.arm.name,
            "inner": self.arm.inner,
            "method": None if self.arm.method is None else describe(self.arm.method),
            "lr": self.lr,
            "inner_lr": self.actual_lr,
            "effective_lr": self.effective_lr,
        }

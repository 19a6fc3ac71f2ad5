"""The plan of the report's studies: which networks are trained, at which rates, from which seeds, and for how long.

The numbers are the paper's if it prints them. The networks of a `Group` share a seed, batches and noise, and are
trained side by side. A study is all groups of its name; a part of the report is one study or several.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchbelay.lab.arms import BELAY, EMA, EQUAL, MATCHED, Arm, Lane
from torchbelay.physics.methods import centred
from torchbelay.physics.spring import Spring

from .models.edm import EDM
from .models.ncsn import NCSN
from .models.objective import Objective
from .models.unet import UNetShape

MNIST_BELAY = Spring(k=1.0, m1=2000.0, m2=500.0)  # Table 1
MNIST_EMA = Spring.ema(decay=0.999)  # Table 1's: 1 − k/(2·m2), BELAY as m1 → ∞; and NCSNv2's own
CIFAR10_BELAY = Spring(k=1.0, m1=20_000.0, m2=2000.0)  # the appendix
CIFAR10_BATCH, EDM_HALF_LIFE = 512, 500_000  # EDM's batch, and the half-life of its own EMA in images
CIFAR10_EMA = Spring.ema(half_life=EDM_HALF_LIFE / CIFAR10_BATCH)
RULE_STEPS = 1_000_000  # of §3.3: k = 10⁶/T
CIFAR10_STEPS = 390_625  # 200 million images in batches of 512, as EDM trains
MASSES = {"2e4": 20_000.0, "2e5": 200_000.0}  # the appendix, beside Table 1's 2000
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 5e-2)
PAPER_RATE, USUAL_RATE, SAFE_RATE = 5e-2, 1e-3, 3e-4  # at the last, no network of Table 1's size is lost
WARM_UPS, EPSILONS = (0, 500), (1e-8, 1e-3, 1e-2)  # readings of what the paper does not print; 1e-3: NCSNv2 on FFHQ
THETAS = (-0.9, -0.5, -0.25, 0.0, 0.25, 1.0)
SIGN_RATES = (1e-3, 4e-3, 1.2e-2)
AVERAGING = 1 / 200  # c of the centre-of-mass family
# The study of the sign with its controls; claims/study.md states it.
CONTROLLED_THETAS, CONTROLLED_WARM_UPS = (0.0, -0.5), (0, 200)
CONTROLLED_RATES, LOSING_RATE = (1e-3, 4e-3, 1.2e-2, 3.6e-2), 1.2e-2  # at the last, cold EMAs were lost
PENALTY_BETAS, PENALTY_AVERAGING = (0.9, 0.0), (0.0895, 0.005)  # β1 and c

SMALL_NCSN = NCSN(features=32)
MNIST_EDM = EDM((1, 28, 28), UNetShape(channels=32, multipliers=(1, 2, 2), blocks=1, attention=(14,), dropout=0.0))
CIFAR10_EDM = EDM((3, 32, 32), UNetShape(channels=64, multipliers=(1, 2, 2), blocks=1, attention=(16,), dropout=0.0))


@dataclass(frozen=True)
class Group:
    """Networks that start from the same weights and see the same batches."""

    study: str
    dataset: str
    objective: Objective
    lanes: tuple[Lane, ...]
    seed: int
    steps: int
    batch: int
    ramp: float = 0.0  # the share of the run over which the learning rate grows to its value
    points: int = 4  # at which the losses are measured, the end included
    fids: tuple[int, ...] = ()  # the indices of the lanes whose FID is measured
    samples: int = 10_000
    fid_points: int = 0  # at which the FID of the average is measured, the end included; 0: at the end alone
    differs: tuple[str, ...] = ()  # how the setting differs from the paper's, one sentence each


def ema(spring: Spring) -> Arm:
    """Return the paper's EMA around Adam."""
    return Arm(EMA, "Adam", spring)


def equal(spring: Spring) -> Arm:
    """Return the EMA with a spring's averaging rate at the nominal learning rate."""
    return Arm(EQUAL, "Adam", Spring.ema(spring.matched_ema().decay))


def belay(spring: Spring, name: str = BELAY) -> Arm:
    """Return BELAY around Adam."""
    return Arm(name, "Adam", spring, effective_scale=spring.effective_lr_scale)


def matched(spring: Spring) -> Arm:
    """Return the EMA with a spring's averaging rate and effective learning rate: BELAY differs only by its pull."""
    scale = spring.effective_lr_scale
    return Arm(MATCHED, "Adam", spring.matched_ema(), lr_scale=scale, effective_scale=scale)


def coupled(theta: float, rate: float = AVERAGING) -> Arm:
    """Return a member of the centre-of-mass family: θ > 0 as in BELAY, θ = 0 for EMA, or θ < 0."""
    sign = "" if theta == 0 else "+" if theta > 0 else "−"
    return Arm(f"θ {sign}{abs(theta):g}", "Adam", centred(theta=theta, rate=rate))


def heavier_arms(share: float) -> tuple[Arm, ...]:
    """Return Table 1's BELAY with the appendix's masses, for a run `share` times as long."""
    return tuple(
        belay(stretch(replace(MNIST_BELAY, m1=m1), share), f"{BELAY} m1 {name}") for name, m1 in MASSES.items()
    )


def standard_arms(spring: Spring) -> tuple[Arm, Arm, Arm]:
    """Return BELAY and two EMAs with its averaging rate: at the nominal learning rate, and at BELAY's effective one."""
    return equal(spring), matched(spring), belay(spring)


def stretch(spring: Spring, share: float) -> Spring:
    """Return the spring for a run `share` times as long: masses grow in proportion, and an EMA's rate falls inversely.

    Both keep κ·T. That is the paper's k(T) rule (§3.3), because only k/m matters.

    >>> stretch(Spring(k=1.0, m1=2000.0, m2=500.0), 0.5)
    Spring(k=1.0, m1=1000.0, m2=250.0)
    >>> stretch(Spring.ema(decay=0.75), 0.5)
    Spring.ema(decay=0.5)
    """
    if spring.m1 == math.inf:
        return replace(spring, k=spring.k / share)
    return replace(spring, m1=spring.m1 * share, m2=spring.m2 * share)


# The studies. `share` is a budget: it scales the steps, and the masses with them. -------------------------------------


def rates(seeds: Sequence[int] = range(3), share: float = 1.0) -> Iterator[Group]:
    """Yield MNIST over learning rates, with the appendix's masses at the paper's rate and at a usual one."""
    spring, steps = stretch(MNIST_BELAY, share), round(3000 * share)
    lanes = [Lane(arm, lr) for lr in RATES for arm in standard_arms(spring)]
    lanes += [Lane(arm, lr) for lr in (USUAL_RATE, PAPER_RATE) for arm in heavier_arms(share)]
    masses = "BELAY has only the paper's masses here; the heavier masses were run at two learning rates."
    for seed in seeds:
        group = Group("rates", "mnist", SMALL_NCSN, tuple(lanes), seed, steps, batch=32)
        yield replace(group, differs=(*_mnist_differences(group, spring), masses))


def table1(best: Mapping[str, float], seeds: Sequence[int] = (3, 4, 5), share: float = 1.0) -> Iterator[Group]:
    """Yield Table 1: a larger network, longer runs, FID, and fresh seeds.

    Every arm is trained at the best rate of each arm, and at the paper's. Images are made at an arm's own best rate, at
    the lowest best rate, which works for all arms, and at the paper's. A heavier BELAY is trained only if `best` has a
    rate for it, and only at that rate.
    """
    spring, steps = stretch(MNIST_BELAY, share), round(5000 * share)
    lanes = tuple(Lane(arm, lr) for lr in sorted({*best.values(), PAPER_RATE}) for arm in standard_arms(spring))
    lanes += tuple(Lane(arm, best[arm.name]) for arm in heavier_arms(share) if arm.name in best)
    masses = (
        "Rates and mass are the best of the short runs, which have a smaller network and other seeds; the heavier "
        "masses were tried at two rates."
    )
    drawn = {arm: (lr, min(best.values()), PAPER_RATE) for arm, lr in best.items()}
    fids = tuple(i for i, lane in enumerate(lanes) if lane.lr in drawn[lane.arm.name])
    for seed in seeds:
        group = Group("table1", "mnist", NCSN(), lanes, seed, steps, batch=64, points=8, fids=fids)
        yield replace(group, differs=(*_mnist_differences(group, spring), masses))


def figure4(seeds: Sequence[int] = (6, 7, 8), share: float = 1.0) -> Iterator[Group]:
    """Yield Figure 4 and the appendix's masses: losses and FID during training, at a rate that every arm bears.

    The losses of all arms are measured at 40 steps, and the FIDs of EMA and BELAY at 8 of them.
    """
    spring = stretch(MNIST_BELAY, share)
    arms = (ema(stretch(MNIST_EMA, share)), *standard_arms(spring), *heavier_arms(share))
    lanes = tuple(Lane(arm, SAFE_RATE) for arm in arms)
    fids = tuple(i for i, lane in enumerate(lanes) if lane.arm.name in (EMA, BELAY))
    rate = (
        f"The learning rate is {SAFE_RATE:g}, not the paper's {PAPER_RATE:g}, at which no such network trains from a "
        "cold start."
    )
    for seed in seeds:
        group = Group("figure4", "mnist", NCSN(), lanes, seed, round(5000 * share), batch=64, points=40, fids=fids)
        differs = (*_mnist_differences(group, spring), rate)
        yield replace(group, differs=differs, samples=5000, fid_points=8)


def readings(seeds: Sequence[int] = range(5), share: float = 1.0) -> Iterator[Group]:
    """Yield the paper's rate under every reading: with and without warm-up, with three values of Adam's eps."""
    arms = ema(stretch(MNIST_EMA, share)), belay(stretch(MNIST_BELAY, share))
    lanes = tuple(
        Lane(arm, PAPER_RATE, eps, round(warm_up * share)) for warm_up in WARM_UPS for eps in EPSILONS for arm in arms
    )
    for network in (SMALL_NCSN, NCSN()):
        for seed in seeds:
            group = Group("readings", "mnist", network, lanes, seed, round(3000 * share), batch=32)
            yield replace(group, differs=_mnist_differences(group, stretch(MNIST_BELAY, share)))


def sign(seeds: Sequence[int] = range(5), share: float = 1.0) -> Iterator[Group]:
    """Yield the sign of the spring: one averaging rate, θ from −0.9 to +1, at three learning rates."""
    lanes = tuple(Lane(coupled(theta, AVERAGING / share), lr) for lr in SIGN_RATES for theta in THETAS)
    differs = ("The paper has no such experiment: its springs all have θ > 0.",)
    for seed in seeds:
        yield Group("sign", "mnist", MNIST_EDM, lanes, seed, round(2000 * share), batch=32, differs=differs)


def cifar10(seeds: Sequence[int] = range(3), share: float = 1.0) -> Iterator[Group]:
    """Yield CIFAR-10, with the paper's masses scaled to the length of the run, and the other sign of the spring."""
    steps = round(1200 * share)
    spring = stretch(CIFAR10_BELAY, steps / CIFAR10_STEPS)
    arms = (*standard_arms(spring), coupled(-0.5, spring.coupling().rate))
    lanes = tuple(Lane(arm, USUAL_RATE) for arm in arms)
    for seed in seeds:
        group = Group("cifar10", "cifar10", CIFAR10_EDM, lanes, seed, steps, batch=128, ramp=0.05, points=8)
        yield replace(group, differs=_cifar10_differences(group, spring), fids=tuple(range(len(lanes))))


def warmup(
    seeds: Sequence[int] = range(10, 14), more_seeds: Sequence[int] = range(14, 26), share: float = 1.0
) -> Iterator[Group]:
    """Yield the sign of the spring with and without warm-up; more seeds at the rate at which cold EMAs were lost."""

    def group(seed: int, lrs: Sequence[float]) -> Group:
        lanes = tuple(
            Lane(coupled(theta, AVERAGING / share), lr, warm_up=round(warm_up * share))
            for lr in lrs
            for warm_up in CONTROLLED_WARM_UPS
            for theta in CONTROLLED_THETAS
        )
        differs = ("The paper has no such experiment: its springs all have θ > 0.",)
        steps = round(1000 * share)
        return Group("warmup", "mnist", MNIST_EDM, lanes, seed, steps, batch=32, points=2, differs=differs)

    yield from (group(seed, CONTROLLED_RATES) for seed in seeds)
    yield from (group(seed, (LOSING_RATE,)) for seed in more_seeds)


def penalty(seeds: Sequence[int] = range(10, 14), share: float = 1.0) -> Iterator[Group]:
    """Yield what θ = −0.5 costs on CIFAR-10, with and without Adam's momentum, at two averaging rates.

    The steps of θ = 0 do not depend on its averaging rate, so the EMA of the second rate watches the run of the first.
    """
    first, second = (rate / share for rate in PENALTY_AVERAGING)
    zero = replace(coupled(0.0, first), spectators=((averaging_name(PENALTY_AVERAGING[1]), centred(0.0, second)),))
    arms = (zero, *(coupled(-0.5, rate) for rate in (first, second)))
    lanes = tuple(Lane(arm, USUAL_RATE, beta1=beta1) for beta1 in PENALTY_BETAS for arm in arms)
    differs = (
        "The paper has no such experiment: its springs all have θ > 0.",
        "The images are the first 16,000 for training and the first 4,000 for testing.",
    )
    for seed in seeds:
        group = Group("penalty", "cifar10-part", CIFAR10_EDM, lanes, seed, round(1000 * share), batch=128, ramp=0.05)
        yield replace(group, points=2, differs=differs)


def averaging_name(rate: float) -> str:
    """Return the name of a spectator that averages at a rate."""
    return f"c {rate:g}"


STUDIES = {  # of each part of the report
    "mnist": ("rates", "table1"),
    "figure4": ("figure4",),
    "readings": ("readings",),
    "sign": ("sign",),
    "cifar10": ("cifar10",),
    "warmup": ("warmup",),
    "penalty": ("penalty",),
}
PLANS: dict[str, Callable[..., Iterator[Group]]] = {
    "rates": rates,
    "table1": table1,
    "figure4": figure4,
    "readings": readings,
    "sign": sign,
    "cifar10": cifar10,
    "warmup": warmup,
    "penalty": penalty,
}  # the groups of each study


def _reach(steps: int) -> str:
    """Return what §3.3's rule would make of MNIST's average in a run of some steps, in words.

    >>> _reach(5000), _reach(500)
    ('an average over 4 steps', 'which is no average')
    """
    rate = RULE_STEPS / steps * MNIST_BELAY.coupling().rate
    return f"an average over {1 / rate:.2g} steps" if rate < 1 else "which is no average"


def _mnist_differences(group: Group, spring: Spring) -> tuple[str, ...]:
    """Return how a study of MNIST differs from the paper's, one sentence each."""
    features, rate = group.objective.describe()["features"], spring.coupling().rate
    return (
        f"The paper prints neither its network's size nor how long it was trained: here {features} features, "
        f"{group.steps:,} steps and batches of {group.batch}.",
        f"The paper prints no decay for EMA. Read as BELAY with m1 → ∞ it is {MNIST_EMA.decay:g}, NCSNv2's own; the "
        f"equal-memory EMA has {1 - rate:.6g}, so that it averages over as many steps as BELAY.",
        "k = 1 and the masses are those of the paper's experiments, not scaled to the run. §3.3's constant of 10⁶ "
        f"steps would give k = {RULE_STEPS / group.steps:.4g} here, {_reach(group.steps)}. For how many steps k = 1 "
        "was meant is known for CIFAR-10's model (EDM's 200 million images), and not for MNIST's.",
        "Noise levels and step size follow the rules of NCSNv2, whose authors have no setting for MNIST.",
        f"The run is short for an average over {1 / rate:,.0f} steps: at the end, the initial weights still make up "
        f"{spring.decay**group.steps:.1%} of it.",
    )


def _cifar10_differences(group: Group, spring: Spring) -> tuple[str, ...]:
    """Return how the study of CIFAR-10 differs from the paper's, one sentence each."""
    channels = group.objective.describe()["channels"]
    return (
        f"The network is smaller than EDM's 55.7 million weights, {channels} channels, without "
        f"augmentation and dropout, and sees {group.steps * group.batch:,} images instead of 200 million.",
        f"The masses are the paper's, scaled to the number of steps: m1 = {spring.m1:.4g} and m2 = {spring.m2:.4g}.",
        f"The equal-memory EMA has the averaging rate of that spring, {spring.coupling().rate:.3g} per step, not EDM's "
        "own half-life.",
        "One learning rate was run, and no BELAY was tuned.",
        "Such short training gives poor images: the FIDs only compare the arms with each other.",
    )

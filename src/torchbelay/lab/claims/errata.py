"""The paper's mistakes and contradictions, as the report lists them.

docs/errata.md has the full story of each, with the tests that prove it. An installed package does not contain that
file, so a short form is kept here, and `tests/lab/report/test_build.py` compares the two. Text between backticks is a
formula or code.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Erratum:
    """One mistake of the paper."""

    id: str  # "E1" …
    title: str  # as in docs/errata.md
    place: str  # the section or algorithm of the paper
    printed: str
    correct: str
    software: str  # what the software does


ERRATA: tuple[Erratum, ...] = (
    Erratum(
        "E1",
        "the weights of w1 and w2 are swapped",
        "§3",
        "`w2(t+Δt) = α·w1 + (1−α)·w2` with `α = 1 − kΔt²/(2m2)`",
        "`w2(t+Δt) = (1−α)·w1 + α·w2`: an infinitely heavy average does not move",
        "Algorithm 1's form, which is correct",
    ),
    Erratum(
        "E2",
        "alpha and beta change places",
        "§3",
        "the factor of `m1` is β and that of `m2` is α; Algorithm 1 has the opposite",
        "either, if used consistently",
        "Algorithm 1's names: `α = 1 − κ1`, `β = 1 − κ2`",
    ),
    Erratum(
        "E3",
        "what the update adds to the velocity",
        "Algorithm 1, footnote",
        "the velocity gains `η/(2α)·g`",
        "`2α·η·g`, since the position gains `α·η·g` in the same step",
        '`2α`; `force="printed"` gives the printed factor. Without velocities, as in all of the paper\'s experiments, '
        "both give the same weights",
    ),
    Erratum(
        "E4",
        "the constants of the overdamped motion",
        "appendix",
        "`C1 = w0·(δ/√(δ²−k/m) − ½)`, `C2 = w0·(½ − δ/√(δ²−k/m))`: they sum to 0, but the motion starts at `w0`",
        "`C1, C2 = (w0/2)(1 ± δ/√(δ²−k/m))`",
        "the correct constants",
    ),
    Erratum(
        "E5",
        "the spring constant for another number of steps",
        "§3.3, appendix",
        "`k ≈ k0·T0/T` in §3.3, `k = k0/T` in the appendix",
        "`k0·T0/T` to first order; exactly `k(T) = 2(1 − (1−κ0)^(T0/T))/(1/m1 + 1/m2)` with `κ0 = (k0/2)(1/m1 + 1/m2)`",
        '`rule="printed"`, with an error if it gives no average, and `rule="exact"`',
    ),
    Erratum(
        "E6",
        "the weights before the step, or after it",
        "Eq. 1, §3",
        "Eq. 1 averages the weights after the step, the oscillator those before it",
        "two schemes: they differ by one step without feedback, and by more with it",
        '`follow="before"` (Algorithm 1) and `follow="after"` (Eq. 1, and every EMA library)',
    ),
    Erratum(
        "E7",
        "what the number of an EMA means",
        "Eq. 1, §3.3",
        "α weights the new point in Eq. 1, but the old average in “EMA, α = 0.95”",
        "either, if used consistently",
        "`decay` is always the weight of the old average",
    ),
    Erratum(
        "E8",
        "what becomes of the velocity",
        "damping",
        "`c = 2m` returns the velocity to 0 between steps",
        "`v' = −v + …`: it changes sign at every step and never decays, but it drops out of the positions",
        "no velocity is stored in this case; the positions are the same",
    ),
    Erratum(
        "E9",
        "the Rosenbrock function",
        "experiments",
        "`(a−x)² + b·(x−y²)²` with `a = 0`",
        "the textbook has `(a−x)² + b·(y−x²)²`, which is a different function",
        "the function as printed; its curvature at the minimum is 202",
    ),
    Erratum(
        "E10",
        "the sign of momentum",
        "momentum section",
        "`+α·v` is added to the weights, with `v` an average of `+∇L`",
        "`−α·v`: with a plus, every step size diverges",
        "minus; this is the method `heavy_ball`, a spring that repels",
    ),
    Erratum(
        "E11",
        "where the average starts",
        "Algorithm 1",
        "`w1(0)` and `w2(0)` each start at small random values",
        "an average that starts away from the model drags the model towards itself",
        "`w2(0) = w1(0)`",
    ),
    Erratum(
        "E12",
        "gradients of an average",
        "§3.1",
        "`L` must be linear, and the weights of the average sum to 1",
        "`∇L` must be affine (`L` quadratic), and the weights sum to `1 − (1−λ)^(t+1)`",
        "tested in that form; the average starts as a copy of the model, which supplies the missing weight",
    ),
    Erratum(
        "E13",
        "the units of the parameters",
        "parameter table",
        "η in s²/m; masses in g, forces in N",
        "η in s²/kg, and masses in kg: a newton is a kg·m/s²",
        "plain numbers: only `k·Δt²/m` and `c·Δt/m` matter",
    ),
    Erratum(
        "E14",
        "the force on an infinite mass",
        "§3",
        "the update is `f/(2βm1)`, and `m1 → ∞` gives EMA",
        "for a fixed force that update vanishes; the force must grow with the mass",
        "methods are given the update, not a force",
    ),
    Erratum(
        "E15",
        "one mass where two move",
        "§3.3",
        "the rule for runs of another length uses `k·Δt²/(2m)` of one mass",
        "the distance closes by `κ1 + κ2`: the reduced mass `m1·m2/(m1+m2)` belongs there",
        '`rule="exact"` keeps `(1 − κ1 − κ2)^T`',
    ),
    Erratum(
        "E16",
        "k is 1, and is not",
        "§3.3, experiments",
        "`k = 1` in every experiment, and `k = 10⁶/T` in §3.3",
        "both agree for runs of a million steps only",
        "`k` as given; `Spring.for_steps` is the rule",
    ),
    Erratum(
        "E17",
        "the name of the scheme",
        "§3",
        "the discretization is called forward Euler",
        "it has the term `½·a·Δt²`, which forward Euler does not have, and which is all that is left at `c = 2m`",
        "the printed steps",
    ),
)

"""Golden values of the explorer: what Python says about random settings, and paths of torch's optimizers with `Belay`.

`docs/explorer/explorer.js` computes the same in a browser. The values come from `physics` and from `torchbelay
explain`. What these do not have (motion with velocities, rounds of Lookahead, gains over frequencies) is computed here
from the oracle of `ops/reference.py`, with many digits. Write the file anew after a change of a formula:

    PYTHONPATH=src:tests python tests/helpers/explorer_golden.py
"""

import gzip
import json
import math
import random
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import mpmath
import numpy as np
import torch
from torch import nn

from helpers.quadratic import lyapunov
from helpers.root import ROOT
from torchbelay import Belay, Spring, UnstableSpringWarning, methods
from torchbelay.cli.explain import _facts, _momentum_facts
from torchbelay.lab.plane.functions import FUNCTIONS
from torchbelay.lab.plane.quadratic import QUADRATIC
from torchbelay.ops.reference import algorithm1_with_velocities, couple
from torchbelay.physics import critical, theta_floor
from torchbelay.physics.convergence import polynomial
from torchbelay.physics.coupling import Coupling, Follow
from torchbelay.physics.explain import explain_momentum
from torchbelay.physics.matrices import outer
from torchbelay.physics.methods.centred import centred
from torchbelay.physics.modes import roots
from torchbelay.physics.variance import step as step_matrix

PATH = ROOT / "tests" / "data" / "explorer" / "golden.json.gz"
SETTINGS = 500
STEPS = 200
KEPT = (*range(51), *range(60, STEPS + 1, 10))  # the steps of a path that are kept
IMPULSE = 24
OMEGAS = (0.001, 0.03, 0.5, 1.5, 3.0)
GRID = 600  # points on which the limit of a round of Lookahead with momentum is looked for first
CURVE = 5  # points per curve of theorem 3

State = dict[str, Any]

# The state with which the page opens; a state is written without the values that it shares with this one.
DEFAULT: State = {"mode": "spring", "k": 1.0, "m1": 10.0, "m2": 20.0, "damping": 1.0, "follow": "before", "theta": -0.5}
DEFAULT |= {"c": 0.05, "every": 6, "alpha": 0.5, "mu": 0.9, "step": 100, "lr": 0.01, "momentum": 0.0, "curvature": 5.0}
DEFAULT |= {"noise": 1.0, "fn": "Rosenbrock", "x": -0.2, "y": 0.3, "seed": 1, "speed": 30}


# Settings -------------------------------------------------------------------------------------------------------------


def random_states(count: int = SETTINGS, seed: int = 20) -> Iterator[State]:
    """Yield states of all modes, most of them stable, some at and beyond the edge."""
    rng = random.Random(seed)

    def spread(low: float, high: float) -> float:
        """Return a number evenly spread in its logarithm, with four digits, as a slider gives."""
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")

    modes = (
        ("free",) * 7 + ("velocity",) * 5 + ("centred",) * 4 + ("schedule-free", "nesterov", "lookahead", "lookahead")
    )
    for _ in range(count):
        mode = rng.choice(modes)
        state: State = {"mode": "spring" if mode in ("free", "velocity") else mode}
        if state["mode"] == "spring":
            k = spread(0.01, 10)
            state |= {
                "k": k,
                "m1": float(f"{k / 2 / spread(1e-4, 0.9):.4g}"),
                "m2": float(f"{k / 2 / spread(1e-4, 0.9):.4g}"),
            }
            if rng.random() < 0.15:
                state["m1"] = math.inf
            if mode == "velocity":
                state["damping"] = spread(0.02, 0.98)
            else:
                state["follow"] = rng.choice(("before", "after"))
        elif mode == "centred":
            theta = rng.choice((-spread(0.01, 0.98), 0.0, spread(0.01, 10), -0.5))
            state |= {"theta": theta, "c": spread(1e-4, 0.9), "follow": rng.choice(("before", "after", "after"))}
        elif mode == "lookahead":
            state |= {"every": rng.randint(1, 10), "alpha": rng.choice((0.5, 0.8, 1.0, spread(0.1, 1.0)))}
        elif mode == "nesterov":
            state |= {"mu": rng.choice((0.5, 0.9, 0.99, round(rng.uniform(0, 0.99), 4)))}
        else:
            state |= {
                "mu": rng.choice((0.5, 0.9, 0.0, round(rng.uniform(0, 0.99), 4))),
                "step": rng.choice((2, 10, 100, 1000)),
            }
        state["momentum"] = rng.choice((0.0, 0.0, 0.0, 0.5, 0.9, 0.99, round(rng.uniform(0, 0.99), 3)))
        state |= {"curvature": spread(0.01, 1000), "noise": spread(0.1, 10), "lr": 1.0}
        limit = range_of(DEFAULT | state)
        push = (limit if 0 < limit < math.inf else 0.1) * rng.choice((0.02, 0.1, 0.3, 0.5, 0.8, 0.95, 1.1))
        state["lr"] = float(f"{push / state['curvature']:.4g}")
        yield state


def method_of(state: State) -> Any:
    """Return the method of a state."""
    s = DEFAULT | state
    if s["mode"] == "spring":
        return _spring(s["k"], s["m1"], s["m2"], s["damping"], s["follow"])
    if s["mode"] == "centred":
        return methods.centred(s["theta"], s["c"], follow=s["follow"])
    if s["mode"] == "lookahead":
        return methods.lookahead(k=s["every"], alpha=s["alpha"])
    if s["mode"] == "nesterov":
        return methods.nesterov(s["mu"])
    return methods.schedule_free(beta=s["mu"])


@cache
def _spring(k: float, m1: float, m2: float, damping: float, follow: Follow) -> Spring:
    c1, c2 = (2 * m * damping if m < math.inf and damping < 1 else None for m in (m1, m2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnstableSpringWarning)
        return Spring(k=k, m1=m1, m2=m2, c1=c1, c2=c2, follow=follow, allow_unstable=True)


def shown_step(state: State) -> int:
    """Return the step whose numbers are shown."""
    s = DEFAULT | state
    return {"schedule-free": s["step"], "lookahead": s["every"]}.get(s["mode"], 1)


def coupling_of(state: State, step: int | None = None) -> Coupling:
    """Return the four numbers of a step; by default of the one that is shown."""
    s = DEFAULT | state
    found = method_of(s).coupling(shown_step(s) if step is None else step, s["lr"])
    assert isinstance(found, Coupling)
    return found


def has_velocity(state: State) -> bool:
    """Whether the state is a spring that keeps a velocity."""
    method = method_of(state)
    return isinstance(method, Spring) and method.has_velocity


# Quantities that Python does not have: from single steps of the oracle ------------------------------------------------


def oracle(state: State, at: list[Any], u: Any, step: int) -> list[Any]:
    """Return (w1, w2, v1, v2) after a step with the update u."""
    s = DEFAULT | state
    if not has_velocity(s):
        c = coupling_of(s, step)
        return [*couple(at[0], at[1], u, a=c.a, b=c.b, p=c.p, q=c.q), 0.0, 0.0]
    spring = method_of(s)
    if spring.m1 < math.inf:
        masses = {"k": spring.k, "m1": spring.m1, "m2": spring.m2, "c1": spring.c1, "c2": spring.c2}
        exact = {name: mpmath.mpf(value) for name, value in masses.items()} if isinstance(u, mpmath.mpf) else masses
        return list(algorithm1_with_velocities(*at, u, **exact))
    one = type(u)(1.0)  # the weights have no velocity, and the average has
    k, m2, c2 = (one * value for value in (spring.k, spring.m2, spring.c2))
    w1, w2, _, v2 = at
    kappa = k / (2 * m2)
    return [w1 + u, w2 + kappa * (w1 - w2) + (1 - c2 / (2 * m2)) * v2, 0.0, v2 + k / m2 * (w1 - w2) - c2 / m2 * v2]


def exact_matrix(state: State, x: Any, step: int = 1) -> tuple[list[list[Any]], list[Any]]:
    """Return the matrix of a step on (w1, w2, v1, v2, η·m) at ηh = x and where noise enters, with many digits."""
    s = DEFAULT | state
    beta, zero, one = mpmath.mpf(s["momentum"]), mpmath.mpf(0), mpmath.mpf(1)

    def move(at: list[Any], gradient: Any) -> list[Any]:
        m = beta * at[4] + (1 - beta) * gradient
        return [*oracle(s, at[:4], -m, step), m]

    columns = [move([one if i == j else zero for j in range(5)], x if i == 0 else zero) for i in range(5)]
    return [[columns[j][i] for j in range(5)] for i in range(5)], move([zero] * 5, one)


def kept_states(state: State) -> list[int]:
    """Return which of (w1, w2, v1, v2, η·m) a spring with velocities keeps."""
    s = DEFAULT | state
    return [0, 1, *([2] if s["m1"] < math.inf else []), 3, *([4] if s["momentum"] else [])]


def round_of(state: State, x: float) -> tuple[np.ndarray, np.ndarray]:
    """Return a round of Lookahead on (w1, w2, η·m), and the second moments of its noise."""
    s = DEFAULT | state
    size = 3 if s["momentum"] else 2
    rows, noise = np.eye(size), np.zeros((size, size))
    for step in range(1, s["every"] + 1):
        one, kick = (np.array(each) for each in step_matrix(coupling_of(s, step), x, s["momentum"]))
        rows, noise = one @ rows, one @ noise @ one.T + kick
    return rows, noise


@cache
def range_of_rounds(every: int, alpha: float, beta: float) -> float:
    """Return the first ηh at which a round of Lookahead grows."""
    if not beta:  # α(1 − x)ᵏ + 1 − α leaves the circle at 1 or at −1
        return 2.0 if every % 2 == 0 else 1 + (2 / alpha - 1) ** (1 / every)
    grid = np.linspace(0, 4 / alpha * (1 + beta) / (1 - beta), GRID + 1)
    state = {"mode": "lookahead", "every": every, "alpha": alpha}
    couplings = [coupling_of(state, step) for step in range(1, every + 1)]
    steps = [[np.array(step_matrix(one, push, beta)[0]) for push in (0.0, 1.0)] for one in couplings]

    def grows(x: np.ndarray) -> np.ndarray:
        rounds = np.eye(3)
        for free, full in steps:
            rounds = (free + x[:, None, None] * (full - free)) @ rounds
        return np.abs(np.linalg.eigvals(rounds)).max(1) >= 1

    at = int(grows(grid[1:]).argmax()) + 1  # the first
    low, high = grid[at - 1], grid[at]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(np.array([middle]))[0] else (middle, high)
    return float(low)


# All outputs of a state -----------------------------------------------------------------------------------------------


def range_of(state: State) -> float:
    """Return the limit of ηh."""
    s = DEFAULT | state
    if s["mode"] == "lookahead":
        return range_of_rounds(s["every"], s["alpha"], s["momentum"])
    method = method_of(s)
    return (method if isinstance(method, Spring) else coupling_of(s)).max_stable_lr(1.0, s["momentum"])


def eigenvalues_of(state: State, x: float) -> list[complex]:
    """Return the eigenvalues of a step at ηh = x, of a round for Lookahead."""
    s = DEFAULT | state
    if s["mode"] == "lookahead":
        found = list(np.linalg.eigvals(round_of(s, x)[0]))
        found.remove(min(found, key=abs))  # 0: after a sync w1 = w2
        return [complex(z) for z in found]
    if has_velocity(s):
        modes = method_of(s)._modes
        modes = modes.with_momentum(s["momentum"]) if s["momentum"] else modes
        longer = [0.0] * (len(modes.p0) - len(modes.p1)) + [x * c for c in modes.p1]
        return [1 + z for z in roots([c + d for c, d in zip(modes.p0, longer, strict=True)])]
    return [1 + z for z in roots(polynomial(coupling_of(s), x, s["momentum"]))]


def variances_of(state: State) -> tuple[float, float]:
    """Return the variances of w1 and w2 in the long run."""
    s = DEFAULT | state
    x, scale = s["lr"] * s["curvature"], (s["lr"] * s["noise"]) ** 2
    if s["mode"] == "lookahead":
        if x >= range_of(s):
            return math.inf, math.inf
        found = lyapunov(*(tuple(map(tuple, each.tolist())) for each in round_of(s, x)))
        return scale * found[0][0], scale * found[1][1]
    if has_velocity(s):
        if x >= range_of(s):
            return math.inf, math.inf
        rows, kick = exact_matrix(s, mpmath.mpf(x))
        kept = kept_states(s)
        found = lyapunov([[rows[i][j] for j in kept] for i in kept], outer([kick[i] for i in kept]))  # type: ignore[arg-type]
        return scale * float(found[0][0]), scale * float(found[1][1])
    return coupling_of(s).stationary_variance(s["curvature"], s["lr"], s["noise"], s["momentum"])


def explanation_of(state: State) -> str:
    """Return the paragraph: that of `torchbelay explain`, or the first line of the method's documentation."""
    s = DEFAULT | state
    method, beta = method_of(s), s["momentum"]
    if s["mode"] == "schedule-free":
        method = centred(-s["mu"], 1 / s["step"])
    if isinstance(method, Spring | centred):
        facts = _facts(method, None, None, None)
        return str((facts | (_momentum_facts(method, facts, beta) if beta else {}))["explanation"])
    first = (type(method).__doc__ or "").split("\n", 1)[0]
    return f"{first} {explain_momentum(coupling_of(s), beta)}" if beta and s["mode"] == "nesterov" else first


def frequency_gains(state: State) -> tuple[list[float], list[float]] | None:
    """Return |H| from the sum of all updates to w1 and w2, by solving (λ − M)·y = B with many digits."""
    s = DEFAULT | state | {"momentum": 0.0}
    if s["mode"] == "lookahead":
        return None
    rows, _ = exact_matrix(s, mpmath.mpf(0), shown_step(s))
    push = oracle(s, [mpmath.mpf(0)] * 4, mpmath.mpf(1), shown_step(s))
    kept = (0, 1, 2, 3) if has_velocity(s) else (0, 1)
    gains: tuple[list[float], list[float]] = ([], [])
    for omega in OMEGAS:
        point = mpmath.expj(omega)
        m = mpmath.matrix([[(point if i == j else 0) - rows[i][j] for j in kept] for i in kept])
        found = mpmath.lu_solve(m, mpmath.matrix([push[i] for i in kept]))
        for i in (0, 1):
            gains[i].append(float(abs((point - 1) * found[i])))
    return gains


def impulse(state: State) -> list[list[float]]:
    """Return w1 and w2 after one unit update at rest, step by step."""
    s = DEFAULT | state
    first = s["step"] if s["mode"] == "schedule-free" else 1
    at, seen = [mpmath.mpf(0)] * 4, []
    for i in range(IMPULSE):
        at = oracle(s, at, mpmath.mpf(1 if i == 0 else 0), first + i)
        seen.append((float(at[0]), float(at[1])))
    return [[w1 for w1, _ in seen], [w2 for _, w2 in seen]]


def noise_curves(state: State) -> dict[str, Any] | None:
    """Return some points of the curves of theorem 3, as (θ, c, speed, noise)."""
    s = DEFAULT | state
    x = s["lr"] * s["curvature"]
    if x >= 2:
        return None
    plain = methods.ema(0.5).coupling(1, x).stationary_variance(1.0, x).w1
    fastest = min(x, 2 * x / (1 + x) / (1 + 1e-12))
    speeds = [mu for i in range(CURVE) if (mu := fastest * 10 ** (-3 + 3 * i / (CURVE - 1))) < 1]

    def point(theta: float, c: float) -> list[float]:
        one = centred(theta, c).coupling(1, x)
        return [theta, c, 1 - one.convergence_rate((1.0, 1.0), x), one.stationary_variance(1.0, x).w2 / plain]

    found = [critical(1.0, x, mu) for mu in speeds]
    return {"ema": [point(0.0, mu) for mu in speeds], "critical": [point(m.theta, m.rate) for m in found]}  # type: ignore[arg-type]


def outputs(state: State) -> dict[str, Any]:
    """Return all that the page shows of a state."""
    s = DEFAULT | state
    method, c = method_of(s), coupling_of(s)
    lr, h, beta = s["lr"], s["curvature"], s["momentum"]
    spring, rounds = isinstance(method, Spring), s["mode"] == "lookahead"
    limit, found = range_of(s), eigenvalues_of(s, lr * h)
    if spring:
        facts = _facts(method, lr, h, None)
        own = {
            "theta": facts["theta"],
            "regime": facts["regime"],
            "decay": facts["decay"],
            "halfLife": facts["half_life"],
        }
        scale = facts["effective_lr_scale"]
    else:
        left, scale = abs(1 - c.rate), method.effective_lr_scale if rounds else c.effective_lr_scale
        half_life = math.log(0.5) / (math.log1p(-c.rate) if c.rate < 1 else math.log(left)) if 0 < left < 1 else 0.0
        own = {"theta": c.theta, "regime": "velocity-free", "decay": left, "halfLife": half_life}
        own |= dict.fromkeys(("theta", "decay", "halfLife")) if rounds else {}
    if rounds:
        radius = max(map(abs, found)) ** (1 / s["every"])
    else:
        radius = max(map(abs, found)) if has_velocity(s) else c.convergence_rate((h, h), lr, beta)
    w1, w2 = variances_of(s)
    floor = 0 < c.rate <= 1 and not rounds and not has_velocity(s)
    watched = Coupling(0.0, 0.5, 1.0, 0.5)  # an EMA, whose weights are those of SGD alone
    plain = watched.stationary_variance(h, lr, s["noise"]).w1
    return {
        "coupling": [c.a, c.b, c.p, c.q],
        **own,
        "rate": None if rounds else c.rate,
        "hasVelocity": has_velocity(s),
        "effectiveLrScale": scale,
        "effectiveLr": scale * lr,
        "range": limit,
        "maxStableLr": limit / h,
        "maxStableLrOfSgd": watched.max_stable_lr(h, beta),
        "maxStableCurvature": limit / lr,
        "isStable": lr * h < limit,
        "thetaFloor": theta_floor(beta, c.rate, "after" if c.q else "before") if floor else None,
        "eigenvalues": sorted(([z.real, z.imag] for z in found), key=lambda z: [round(part, 9) for part in z]),
        "radius": radius,
        "variance": [w1, w2],
        "speed": 1 - radius,
        "noise": math.inf if w2 == math.inf else w2 / plain,
        "explanation": explanation_of(s),
        "impulse": impulse(s),
        "gains": frequency_gains(s),
        "curves": noise_curves(s),
    }


# Paths ----------------------------------------------------------------------------------------------------------------


def noise_pairs(seed: int, count: int) -> list[list[float]]:
    """Return pairs of normal numbers: Marsaglia's xorshift on 32 bits, then Box and Muller's transform."""
    bits = (seed ^ 0x9E3779B9) & 0xFFFFFFFF or 1

    def uniform() -> float:
        nonlocal bits
        bits ^= bits << 13 & 0xFFFFFFFF
        bits ^= bits >> 17
        bits ^= bits << 5 & 0xFFFFFFFF
        return bits / 2**32

    for _ in range(8):
        uniform()
    pairs = []
    for _ in range(count):
        size, angle = math.sqrt(-2 * math.log(1 - uniform())), 2 * math.pi * uniform()
        pairs.append([size * math.cos(angle), size * math.sin(angle)])
    return pairs


ORDINARY_EMA: State = {"k": 2 * (1 - 0.95), "m1": math.inf, "m2": 1.0, "follow": "after"}
RACES: list[dict[str, Any]] = [
    # the six methods of the report on every function, at a rate at which most are stable
    *({"fn": fn, "lr": lr, "methods": [{}, ORDINARY_EMA, None]} for fn, lr in (("Rosenbrock", 0.004), ("Beale", 0.01))),
    *({"fn": fn, "lr": lr, "methods": [{}, ORDINARY_EMA, None]} for fn, lr in (("absolute", 0.01), ("bowl", 0.1))),
    {"fn": "quadratic", "lr": 0.05, "noise": 1.0, "methods": [{}, ORDINARY_EMA, None]},
    # every mode, around SGD with momentum of its own too
    *(
        {"fn": fn, "lr": lr, "momentum": momentum, "noise": noise, "seed": 7, "methods": every}
        for every in [
            [
                {"k": 1.0, "m1": 40.0, "m2": 20.0, "damping": 0.6},
                {"k": 0.5, "m1": math.inf, "m2": 20.0, "damping": 0.3},
                {"mode": "centred", "theta": -0.3, "c": 0.1, "follow": "after"},
                {"mode": "lookahead", "every": 5, "alpha": 0.8},
                {"mode": "nesterov", "mu": 0.5},
                {"mode": "schedule-free", "mu": 0.5},
            ]
        ]
        for fn, lr, momentum, noise in (("Rosenbrock", 0.001, 0.0, 0.0), ("quadratic", 0.03, 0.5, 0.5))
    ),
]  # fmt: skip


def path(race: dict[str, Any], state: State | None, inner: str) -> dict[str, Any]:
    """Return the path of one lane: torch's optimizer, and `Belay` with the state's method around it."""
    function = next(f for f in (*FUNCTIONS, QUADRATIC) if f.name == race["fn"])
    start = [-0.2, 0.3] if function.name == "Rosenbrock" else [-0.8, 0.7]
    w = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    model = nn.ParameterList([w])
    beta, sigma = race.get("momentum", 0.0), race.get("noise", 0.0)
    if inner == "Adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=race["lr"])
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=race["lr"], momentum=beta, dampening=beta)
    belay = None if state is None else Belay(model, optimizer, method_of(state))
    kicks, gradient = noise_pairs(race.get("seed", 1), STEPS), torch.zeros_like(w)
    w1, w2 = [], []
    for step in range(STEPS + 1):
        if step:
            function.gradient_(w.detach(), out=gradient)
            w.grad = gradient + sigma * torch.tensor(kicks[step - 1], dtype=torch.float64)
            optimizer.step()
        if step in KEPT:
            w1.append(w.detach().tolist())
            w2.append(next(iter(belay.average_state_dict().values())).tolist() if belay else None)
    if belay:
        belay.detach()
    return {"inner": inner, "method": state, "lr": race["lr"], "w1": w1, "w2": w2 if belay else None}


def paths(race: dict[str, Any]) -> dict[str, Any]:
    """Return the paths of all lanes of a race."""
    inners = ("Adam", "SGD") if None in race["methods"] else ("SGD",)
    lanes = [path(race, state, inner) for state in race["methods"] for inner in inners]
    first = lanes[0]["w1"][0]
    about = {"momentum": race.get("momentum", 0.0), "noise": race.get("noise", 0.0), "seed": race.get("seed", 1)}
    return {"fn": race["fn"], "start": first, **about, "at": list(KEPT), "lanes": lanes}


# The file -------------------------------------------------------------------------------------------------------------


@cache
def generate() -> dict[str, Any]:
    """Return all golden values, as Python computes them now; infinity is the text inf."""
    with mpmath.workdps(50):
        settings = [{"state": state, **outputs(state)} for state in random_states()]
    found = {"default": DEFAULT, "omegas": OMEGAS, "curve": CURVE, "settings": settings}
    found |= {"races": [paths(race) for race in RACES], "normal": noise_pairs(5, 6)}
    return json.loads(json.dumps(_without_inf(found), allow_nan=False))


def _without_inf(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_inf(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_inf(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read() -> dict[str, Any]:
    """Return the values of the file."""
    return json.loads(gzip.decompress(PATH.read_bytes()))


def write() -> None:
    """Write the file."""
    PATH.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(generate(), separators=(",", ":"), ensure_ascii=False)
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    write()

"""A spring in words: its kind, its memory, its learning rate, what to change, and why it is unstable."""

import math
from typing import TYPE_CHECKING

from .inner_momentum import is_below_floor, stable_range, theta_floor

if TYPE_CHECKING:
    from .coupling import Coupling
    from .methods.centred import centred
    from .spring import Spring


def explain(spring: "Spring") -> str:
    """Return one paragraph about a spring; `Spring.explain()` calls this."""
    return " ".join([_kind(spring), _memory(spring), *_learning_rate(spring), _advice(spring)])


def explain_instability(spring: "Spring", damping: float | None) -> str:
    """Return why the free motion of a spring grows, and the cure; `damping` is δ if both masses share it."""
    if spring.omega == 0:
        return "both masses are infinite, so that the spring moves neither; give one of them a finite mass"
    if damping is None:
        return (
            f"a mode of its free motion grows by {spring.decay:.4g} per step; change the damping "
            f"(c1={spring.c1!r}, c2={spring.c2!r}), lower k={spring.k!r}, or leave c1 and c2 out"
        )
    return (
        f"δ = c·dt/(2m) = {damping:.4g} and ω² = {spring.omega**2:.4g} need ω² < 4δ and δ < 1; set the "
        f"damping between {spring.omega**2 / 4:.4g} and 1 times 2m/dt, or leave c1 and c2 out"
    )


def explain_centred(method: "centred") -> str:
    """Return one paragraph about a member of the centre-of-mass family whose θ and rate are numbers."""
    theta, c = method.theta, method.rate
    assert isinstance(theta, float)
    assert isinstance(c, float)
    if theta < 0:
        kind = (
            "A spring that repels (Generalized Primal Averaging, of which schedule-free is the case c = 1/t): "
            "gradients are taken between the average and"
        )
    elif theta > 0:
        kind = "A spring that attracts, as BELAY's: gradients are taken further from the average than"
    else:
        kind = "An ordinary average (EMA): gradients are taken at"
    half_life = math.log(0.5) / math.log1p(-c)
    limit = method.coupling(1, 0.0).max_stable_lr(1.0)
    return (
        f"{kind} the trajectory that it averages (θ = {theta:g}). It forgets half of the distance in "
        f"{_steps(half_life)}. The learning rate is what the optimizer says. SGD on curvature h is stable below "
        f"ηh = {limit:.4g}, against 2 for plain SGD or EMA."
    )


def explain_momentum(coupling: "Coupling", beta: float) -> str:
    """Return what the optimizer's own momentum β (Adam's β1) leaves of a coupling's stable range, speed and noise.

    Of SGD with momentum β this holds with dampening = β. Without dampening, torch's default, limits are 1 − β times
    as large.

    >>> from torchbelay import methods
    >>> print(explain_momentum(methods.centred(-0.9, 0.05).coupling(1, 0.1), 0.9))
    Around an optimizer with momentum β1 = 0.9 it is stable below ηh = 0.2502, against 38 with an EMA. ...
    """
    scale, c = coupling.effective_lr_scale, coupling.rate
    nominal = stable_range(coupling, beta)
    said = [explain_stable_range(nominal, scale, coupling.theta, beta)]
    if not 0 < c <= 1 or coupling.b == 0:  # with b = 0 the average stands still, and θ is infinite
        return said[0]
    limit, effective = nominal * scale, "" if math.isclose(scale, 1) else " in the effective rate"
    floor, theta = theta_floor(beta, c, "after" if coupling.q else "before"), coupling.theta
    at = f"At this averaging rate the floor of θ is {floor:.3g}"
    if theta >= 0:
        said.append(f"{at}: below it, a spring that repels and this momentum feed each other. This one does not repel.")
    elif theta < floor:
        said.append(f"{at}, and θ = {theta:.3g} is below it: {_below_floor(coupling, beta, limit)}")
    elif theta < 0.75 * floor:
        said.append(f"{at}. θ = {theta:.3g} is above it, but within a quarter of it: the pair is poorly damped.")
    else:
        said.append(f"{at}, and θ = {theta:.3g} keeps clear of it.")
    if theta and limit > 1:
        lr = 1 / scale
        ema = _ema(c)
        speed = [1 - one.convergence_rate((1.0, 1.0), each, beta) for one, each in ((coupling, lr), (ema, 1.0))]
        noise = [one.stationary_variance(1.0, each, momentum=beta).w2 for one, each in ((coupling, lr), (ema, 1.0))]
        said.append(
            f"At ηh = 1{effective} its errors shrink by {speed[0]:.2g} of themselves per step (EMA of the same rate: "
            f"{speed[1]:.2g}), and its average has {noise[0] / noise[1]:.2g} times the variance of that EMA."
        )
    return " ".join(said)


def _below_floor(coupling: "Coupling", beta: float, limit: float) -> str:
    """Return what a θ below the floor does to the stable range, of which `limit` is the end in the effective rate."""
    if not is_below_floor(coupling, beta):
        return (
            "two momenta feed each other from a finite learning rate on. That rate is above the stable range, so that "
            "the floor does not bind."
        )
    if limit >= _range_of_ema(beta):  # it still widens the range
        return "two momenta feed each other, and that ends the stable range. It is still no smaller than an EMA's."
    return (
        "two momenta feed each other, and the stable range collapses. Give the optimizer β1 = 0, or the spring a θ "
        "nearer to 0."
    )


def explain_stable_range(limit: float, scale: float, theta: float, beta: float) -> str:
    """Return the sentence on the stable range `limit` of ηh with momentum β, `scale` being that of the effective rate.

    A tether, which has no effective rate (scale = 0), is told by the optimizer's.
    """
    around = f"Around an optimizer with momentum β1 = {beta:g}"
    if limit == 0:
        return f"{around} no learning rate is stable with it."
    effective = ""
    if scale != 0 and not math.isclose(scale, 1):
        limit, effective = limit * scale, " in the effective rate"
    against = f", against {_range_of_ema(beta):.4g} with an EMA" if theta else ", as without an average"
    return f"{around} it is stable below ηh = {limit:.4g}{effective}{against}."


def _range_of_ema(beta: float) -> float:
    return 2 * (1 + beta) / (1 - beta)


def _ema(rate: float) -> "Coupling":
    from .coupling import watch  # which imports this package's other files first

    return watch(rate)


def _kind(s: "Spring") -> str:
    if s.omega == 0:
        return "Two infinite masses: the spring moves neither of them."
    if s.m1 == math.inf:
        passive = "it watches the weights and never pulls them."
        if s.has_velocity:
            return f"An average with a velocity of its own ({s.regime}, decay {s.decay:.6g} in the long run): {passive}"
        if s.follow == "after":
            return f"An ordinary average (EMA with decay {s.beta:.6g}): {passive}"
        return f"An average one step behind (EMA with decay {s.beta:.6g}, Algorithm 1 with m1 = inf): {passive}"
    if s.m2 == math.inf:
        return f"A tether: the average never moves and pulls the weights back by {s.kappa1:.4g} of their way each step."
    pulls = (
        f"each step the average pulls the weights back by κ1 = {s.kappa1:.4g} of the distance and follows them by "
        f"κ2 = {s.kappa2:.4g} of it"
    )
    if s.has_velocity:
        return f"BELAY with velocities ({s.regime}): {pulls}."
    return f"BELAY, velocity-free: {pulls} (α = {s.alpha:.6g}, β = {s.beta:.6g})."


def _memory(s: "Spring") -> str:
    if s.omega == 0:
        return "So the average stays what it was at the start."
    if not s.is_stable:
        return "It never forgets: its free motion does not come to rest."
    if s.half_life < 1:
        return "It remembers less than one step."
    return (
        f"It forgets half of the distance in {_steps(s.half_life)} and 99% in {_steps(s.half_life * math.log2(100))}."
    )


def _learning_rate(s: "Spring") -> list[str]:
    if s.m1 == math.inf:
        return [
            "The learning rate is what the optimizer says, and so is the stable range of SGD: ηh < 2 at curvature h."
        ]
    if not s.is_stable:
        return ["No learning rate of SGD is stable with it."]
    scale = s.effective_lr_scale
    if s.m2 == math.inf:
        return ["A constant update moves the weights only so far from where the average stands."]
    limit = s.max_stable_lr(1.0)
    said = [
        f"In the long run the pair moves at {scale:.4g} of the optimizer's learning rate.",
        f"SGD on curvature h is stable below ηh = {limit:.4g}, which is {limit * scale:.4g} in that effective rate, "
        "against 2 for plain SGD or EMA.",
    ]
    try:
        matched = s.matched_ema()
    except ValueError:
        said.append("No EMA matches it.")
    else:
        rest = "the pull, and the velocities," if s.has_velocity else "the pull itself"
        said.append(
            f"Compare it with its matched EMA: decay {matched.decay:.6g}, follow={matched.follow!r}, at {scale:.4g} of "
            f"the learning rate; what remains between the two is {rest} (θ = m2/m1 = {s.theta:.4g})."
        )
    return said


def _advice(s: "Spring") -> str:
    if s.omega == 0:
        return "Give one of them a finite mass."
    if not s.is_stable:
        return "Leave c1 and c2 out, or change the damping, before training with it."
    if s.m1 == math.inf and s.follow == "after":  # an EMA, which most give by its decay
        return "For a longer memory raise the decay."
    if s.m1 == math.inf:
        return (
            "For a longer memory lower k, which raises the decay; to let the average pull the weights make m1 finite."
        )
    if s.m2 == math.inf:
        return "For less pull raise m1; to let the average follow give m2 a finite value."
    return (
        "For a longer memory lower k; for less pull raise m1 (m1 = inf is EMA); to train at the rate you are used to, "
        f"multiply the optimizer's by {1 / s.effective_lr_scale:.4g}."
    )


def _steps(count: float) -> str:
    if 100 <= count < 1e15:
        return f"{count:,.0f} steps"
    return f"{count:.3g} steps"

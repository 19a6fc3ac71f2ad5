"""The findings of `identify` in words: one paragraph."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchbelay.physics.coupling import Coupling

    from .identification import Identification
    from .kinds import Kind, SixteenBit
    from .warmup import Warmup

_IDLE = {
    "counts": "An update() without a change of the weights counts like any other.",
    "ignored": "An update() without a change of the weights is ignored.",
    "moves": "An update() without a change of the weights moves the average, and the warm-up does not count it.",
    "counted only": "An update() without a change of the weights does not move the average, but the warm-up counts it.",
    "otherwise": "An update() without a change of the weights does something else than other updates.",
}


def write(found: "Identification") -> str:
    """Return the paragraph."""
    if found.start is None:  # it did not run
        return " ".join(found.problems)
    said = [] if found.reason is None else [_problems(found)]
    said += [*_map(found), *_begin(found), *_stability(found)]
    if found.dtype != found.weights_dtype:
        said.append(f"The average of {found.weights_dtype} weights is {found.dtype}.")
    said += _kinds(found)
    said += [sentence for low in found.sixteen_bit if (sentence := _sixteen_bit(low))]
    if found.idle:
        said.append(_IDLE[found.idle])
    if found.reason is None:
        said.append(_problems(found))
    return " ".join(said)


def _problems(found: "Identification") -> str:
    match found.problems:
        case ():
            return "Nothing looks wrong."
        case (problem,):
            return f"One problem: {problem}"
        case several:
            return f"{len(several)} problems: " + " ".join(f"({i}) {p}" for i, p in enumerate(several, start=1))


def ordinal(number: int) -> str:
    """Return "second" for 2, "10th" for 10, and "single" for 1."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return {1: "single", 2: "second", 3: "third"}.get(number, f"{number}{suffix}")


def _map(found: "Identification") -> Iterator[str]:
    if found.reason is not None:
        return  # the problems come first then
    last, warmup = found.coupling, found.warmup
    if last is None or warmup is None:
        yield "The average stands still."
        return
    if not _pulls(found):
        what = f"The average {'follows' if last.b > 0 else 'moves away from'} the weights and never moves them"
        if warmup.law == "none" or warmup.decay is not None:
            sign, rate = "+" if last.b >= 0 else "−", abs(last.b)
            yield f"{what}: w2' = {1 - last.b:.6g}·w2 {sign} {rate:.6g}·{'w1' if last.q else 'w1 of a step ago'}."
        else:
            yield f"{what}, with a decay that is {1 - last.b:.6g} at update {warmup.moving[-1]}."
        return
    shown = [found.couplings[t - 1] for t in warmup.moving if t not in found.hidden] or [last]
    if all(math.dist(_four(c), _four(last)) < 1e-6 for c in shown):
        yield f"The average moves the weights too: {_numbers(last)}."
    else:
        yield f"The average moves the weights too: {_numbers(shown[0])} at first, and {_numbers(last)} in the end."


def _pulls(found: "Identification") -> bool:
    return any(c.a or c.p != 1 for c in found.couplings)


def _four(c: "Coupling") -> tuple[float, float, float, float]:
    return c.a, c.b, c.p, c.q


def _numbers(c: "Coupling") -> str:
    return ", ".join(f"{name} = {value:.6g}" for name, value in zip("abpq", _four(c), strict=True))


def _begin(found: "Identification") -> Iterator[str]:
    if found.start == "at the weights":
        yield "It begins at the weights."
    if found.warmup is not None:
        yield from _warmup(found.warmup, pulls=_pulls(found))


def _warmup(w: "Warmup", *, pulls: bool) -> Iterator[str]:
    if w.copies > 1 and not w.decays:
        yield "Its updates copy the weights."
    elif w.copies == 1:
        yield "Its first update copies the weights."
    elif w.copies > 1:
        yield f"Its first {w.copies} updates copy the weights, until update() number {w.copied_until}."
    if w.ignored and w.every:
        yield f"{w.ignored} calls of update() {'after that ' if w.copies == 1 else ''}do nothing."
    if w.every > 1:
        yield f"It moves at every {ordinal(w.every)} update()."
    end = f", up to {w.decay:.6g}" if w.decay is not None else ", and rises still"
    tau = _tau(w.numbers.get("from", 0.0))
    match w.law:
        case "other" if pulls:
            pass  # its numbers have been said
        case "none":
            if w.decays:
                yield "It has no warm-up."
        case "ratio":
            yield f"Its decay warms up by (1 + τ)/(10 + τ), {tau}{end}."
        case "inverse-power":
            scale = f"/{w.numbers['inv_gamma']:g}" if w.numbers["inv_gamma"] != 1 else ""
            yield f"Its decay warms up by 1 − (1 + τ{scale})^−{w.numbers['power']:g}, {tau}{end}."
        case "mean":
            more = f", with the start counted as {w.numbers['before']:g}" if w.numbers["before"] else ""
            limit = f", until its decay is {w.decay:.6g}" if w.decay is not None else ""
            yield f"It is the uniform mean of the weights that it saw{more}{limit}."
        case "power":
            gamma = w.numbers["gamma"]
            yield f"Its decay is (1 − 1/t)^{gamma + 1:g}: power-function EMA with γ = {gamma:g}."
        case "debiased":
            yield f"It is corrected for a beginning at zero, with a decay of {w.numbers['beta']:g}."
        case "linear":
            yield f"Its decay rises by {w.numbers['slope']:.4g} per update, from {w.decays[0]:.6g}{end}."
        case "other":
            yield f"Its decay varies: {', '.join(f'{d:.6g}' for d in w.decays[:4])}, …, {w.decays[-1]:.6g}."


def _tau(begin: float) -> str:
    return "τ = update" if begin == 0 else f"τ = update {'−' if begin > 0 else '+'} {abs(begin):g}"


def _stability(found: "Identification") -> Iterator[str]:
    if found.growth is None or found.coupling is None:
        return
    roots = " and ".join(f"{x:.6g}" for x in found.coupling.eigenvalues)
    if found.growth > 1 + 1e-12:
        yield f"It is unstable: the distance grows {found.growth:.6g}× per update (eigenvalues {roots})."
    elif 0 < found.growth < 1:
        half = math.log(2) / -math.log(found.growth)
        halved = f" and is halved in {half:.3g}" if half >= 1 else ""
        yield (
            f"It is stable: the distance to the weights shrinks by {found.growth:.6g} per update{halved} (eigenvalues "
            f"{roots} in the end)."
        )
    elif found.growth == 0:
        yield f"It is stable: some updates close the whole distance (eigenvalues {roots} in the end)."


def _kinds(found: "Identification") -> Iterator[str]:
    for what, kind in kinds(found):
        if not kind.error:  # which is told as a problem
            yield _kind(what, kind)


def kinds(found: "Identification") -> list[tuple[str, "Kind"]]:
    """Return the kinds of tensors that were tried, each with its name in sentences."""
    each = {"Buffers": found.buffers, "Whole numbers": found.integers, "Frozen weights": found.frozen}
    return [(what, kind) for what, kind in (each | {"Tied weights": found.tied}).items() if kind is not None]


def _kind(what: str, kind: "Kind") -> str:
    if what == "Tied weights":
        if kind.treatment == "averaged":
            return "Tied weights move once per update."
        if kind.treatment == "otherwise":
            return "Tied weights move otherwise than untied ones, twice per update for instance."
    told = {
        "averaged": "are averaged",
        "copied": "are copied",
        "ignored": "keep their first value",
        "left out": "are left out",
        "otherwise": "are neither copied nor averaged like weights",
    }
    return f"{what} {told[kind.treatment or 'otherwise']}."


def _sixteen_bit(low: "SixteenBit") -> str:
    if low.error:
        return f"Weights in {low.weights}: {low.error}."
    kept = f"The average of {low.weights} weights is read as {low.average}"
    if low.accumulates is None:
        return f"{kept}."
    if low.accumulates:
        return f"{kept}, and small changes add up: it moves at decay 0.9999."
    return f"{kept}, and small changes round away: at decay 0.9999 it stands still."

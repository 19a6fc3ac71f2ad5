"""The four numbers of every update of somebody's averaging code, from its responses to impulses.

Every element of the toy model is an experiment of its own: element s gets a unit impulse before update s and rests
otherwise. What weights and average do then, less what they do without it, is the response R_s. The code is a linear map
if single impulses, larger and smaller ones and random moves of everything have the responses that follow from R. It has
four numbers per update if weights and average after update t follow from those before it alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbelay.ops import reference
from torchbelay.physics.coupling import Coupling

from .comparison import widen
from .reading import BrokenError
from .toy import Factory, Run, Toy, Trace, record

CARRIER = 0  # this element moves at every step of every run, so that no step leaves all weights as they are

# The largest error, relative to the response, that is rounding: by the coarsest dtype of weights and average.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4}


@dataclass(frozen=True)
class Measurement:
    """What the impulses told."""

    dtype: torch.dtype  # of the toy's weights
    rest: Trace  # the record without impulses
    couplings: tuple[Coupling, ...]  # of updates 1, 2, …; empty if there are no four numbers
    hidden: tuple[int, ...]  # the updates whose a and b cannot be seen: weights and average are equal before them
    reason: str | None  # why there are no four numbers
    uneven: tuple[str, ...]  # parameters that move unlike the first one
    read_moves: bool  # read() changes the average
    follows_alone: bool  # the average changes with the weights before any update

    @property
    def rounding(self) -> float:
        """The largest relative error of a response that is rounding."""
        return tolerance(self.dtype, self.rest.dtype)

    @property
    def precision(self) -> float:
        """The largest error of the four numbers, which are taken from large responses."""
        return self.rounding / 100


def tolerance(*dtypes: torch.dtype) -> float:
    """Return the largest relative error that is rounding in these dtypes."""
    return max(_ROUNDING.get(dtype, 5e-2) for dtype in dtypes)


def deviation(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest value of the other if that is above 1."""
    length = min(len(one), len(other))
    one, other = one[:length], other[:length]
    return float((one - other).abs().max() / other.abs().max().clamp(min=1.0))


def carried(steps: int, size: int, *, seed: int = 0, dense: bool = False) -> Tensor:
    """Return moves [steps, size] of the carrier alone, or, if `dense`, of all elements."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    moves = torch.randn(steps, size, generator=generator, dtype=torch.float64, device="cpu")
    carrier = torch.randn(steps, generator=generator, dtype=torch.float64, device="cpu")
    moves = moves if dense else torch.zeros_like(moves)
    moves[:, CARRIER] = carrier
    return moves


def predict(couplings: Sequence[Coupling], start: Tensor, moves: Tensor) -> Tensor:
    """Return the states [updates + 1, 2, …] that follow from a start by couplings and moves."""
    states = [start]
    for coupling, u in zip(couplings, moves, strict=True):
        w1, w2 = states[-1]
        numbers = {"a": coupling.a, "b": coupling.b, "p": coupling.p, "q": coupling.q}
        states.append(torch.stack(reference.couple(w1, w2, u, **numbers)))
    return torch.stack(states)


def measure(factory: Factory, steps: int) -> Measurement:
    """Record the responses to impulses before each of `steps` updates, and find the four numbers of each update."""
    size = steps + 1
    still = carried(steps, size)
    try:
        dtype, rest = torch.float64, record(factory, Toy(size, torch.float64), still)
    except BrokenError as error:
        try:
            dtype, rest = torch.float32, record(factory, Toy(size, torch.float32), still)
        except BrokenError:
            raise error from None  # the reason is not the dtype

    def responses(moves: Tensor) -> Tensor:
        """Return the states with these moves less those at rest."""
        states = record(factory, Toy(size, dtype), moves).states
        length = min(len(states), len(rest.states))
        return states[:length] - rest.states[:length]

    allowed = tolerance(dtype, rest.dtype)
    impulses = still.clone()
    impulses[torch.arange(steps), torch.arange(1, size)] = 1.0
    found = responses(impulses)[..., 1:].permute(3, 0, 1, 2)  # R: [impulse, update, weights or average, parameter]
    again = responses(still)
    repeats = deviation(again, torch.zeros_like(again)) <= allowed
    why: str | None = "two equal runs differ; it draws random numbers, or keeps something from one run to the next"
    if repeats:
        why = _nonlinearity(responses, found, still, allowed)
    reason = why and f"not a linear map: {why}"
    couplings: tuple[Coupling, ...] = ()
    hidden: tuple[int, ...] = ()
    if reason is None:
        couplings, hidden, reason = _fit(found[..., 0], rest, allowed)
    uneven = [n for i, n in enumerate(rest.names) if deviation(found[..., i], found[..., 0]) > allowed]
    last, unread = _look_again(factory, Toy(size, dtype), still[: len(rest.states) - 1])
    return Measurement(
        dtype,
        rest,
        couplings,
        hidden,
        reason,
        tuple(uneven),
        read_moves=repeats and deviation(last, rest.states[-1, 1]) > allowed,
        follows_alone=deviation(unread, last) > allowed,
    )


def _look_again(factory: Factory, toy: Toy, moves: Tensor) -> tuple[Tensor, Tensor]:
    """Return the average after all updates, read only then, and once more after weights changed without an update."""
    run = Run(factory, toy)
    names = [name for name, _ in toy.named_parameters()]
    for move in moves:
        run.step(dict.fromkeys(names, move))

    def look() -> Tensor:
        average = run.average()
        return torch.stack([widen(average[name]).flatten() for name in names if name in average])

    last = look()
    run.change(dict.fromkeys(names, torch.ones(moves.shape[1])))
    return last, look()


def _nonlinearity(responses: Callable[[Tensor], Tensor], found: Tensor, still: Tensor, allowed: float) -> str | None:
    """Return why the responses are not those of a linear map; None if they are."""
    steps = len(still)
    step = 1 + 2 * steps // 3
    for size in (1.0, -3.0, 0.01):
        moves = still.clone()
        moves[step - 1, step] = size
        alone = responses(moves)[..., step] / size
        if deviation(alone, found[step - 1]) > allowed / min(1.0, abs(size)):
            if size == 1.0:
                return "what one weight does depends on how the others move"
            return f"an impulse of {size:g} does not move it {size:g} times as far as an impulse of 1"
    moves = carried(steps, still.shape[1], seed=1, dense=True)
    moves[:, CARRIER] = still[:, CARRIER]
    together = responses(moves)[..., 1:]
    parts = torch.einsum("stwp,se->twpe", found, moves[:, 1:])
    if deviation(together, parts) > allowed:
        return "random moves have another response than the sum of the responses to their parts"
    return None


def _fit(found: Tensor, rest: Trace, allowed: float) -> tuple[tuple[Coupling, ...], tuple[int, ...], str | None]:
    """Return the coupling of every update, the updates whose a and b are hidden, and why there are none, if so.

    Takes the responses [impulse, update, weights or average] of one parameter. The states at rest count as responses
    too: they tell the numbers of an average that does not begin at the weights.
    """
    at_rest = rest.states[: found.shape[1], :, 0, 1:].permute(2, 0, 1)
    trajectories = torch.cat([found[:, : len(rest.states)], at_rest])
    couplings: list[Coupling | None] = []
    pushes: list[tuple[float, float]] = []
    for t in range(1, trajectories.shape[1]):
        others = torch.arange(len(trajectories)) != t - 1  # all but the impulse before this very update
        before, after = trajectories[others, t - 1], trajectories[others, t]
        apart = before[:, 1] - before[:, 0]
        a = b = 0.0
        if square := float(apart @ apart):
            a = _whole(float((after - before)[:, 0] @ apart) / square, allowed)
            b = _whole(float((before - after)[:, 1] @ apart) / square, allowed)
        expected = before + torch.stack([a * apart, -b * apart], dim=1)
        if t > rest.began and deviation(after, expected) > allowed:
            return (), (), _what_else(trajectories, t, allowed)
        p, q = (_whole(float(x), allowed) for x in found[t - 1, t])
        pushes.append((p, q))
        seen = t > rest.began and float(apart.abs().max()) > allowed**0.5  # else a and b are mostly rounding
        couplings.append(Coupling(a, b, p, q) if seen else None)
    hidden = [t for t, coupling in enumerate(couplings, start=1) if coupling is None]
    return tuple(_fill(couplings, pushes, allowed)), tuple(hidden), None


def _fill(couplings: list[Coupling | None], pushes: list[tuple[float, float]], allowed: float) -> Iterator[Coupling]:
    """Yield all couplings; one with a hidden a and b takes those of the nearest update with the same p and q.

    If there is none, a = 1 − p and b = q, as for all code that sees the new weights alone.
    """
    for t, (coupling, (p, q)) in enumerate(zip(couplings, pushes, strict=True)):
        if coupling is None:
            alike = [
                (abs(i - t), c.a, c.b)
                for i, c in enumerate(couplings)
                if c is not None and max(abs(c.p - p), abs(c.q - q)) <= allowed
            ]
            _, a, b = min(alike, default=(0, 1 - p, q))
            coupling = Coupling(a, b, p, q)
        yield coupling


def _what_else(trajectories: Tensor, t: int, allowed: float) -> str:
    """Return what the updates do if update t does more than to close a part of the distance."""
    last = trajectories.shape[1] - 1  # by then the trajectories have come apart
    before, after = (trajectories[torch.arange(len(trajectories)) != last - 1, time] for time in (last - 1, last))
    rows = torch.linalg.lstsq(before, after, driver="gelsd").solution.T
    if torch.linalg.matrix_rank(before, rtol=allowed**0.5) == 2 and deviation(after, before @ rows.T) <= allowed:
        for what, (of_weights, of_average) in zip(("weights", "average"), rows.tolist(), strict=True):
            if abs(of_weights + of_average - 1) > allowed:
                return (
                    f"a linear map, but no average: update {last} makes the {what} {of_weights:.6g}·weights + "
                    f"{of_average:.6g}·average, which add up to {of_weights + of_average:.6g} and not to 1"
                )
    return (
        f"a linear map, but not of four numbers: update {t} depends on more than the weights and the average before "
        "it, such as a velocity, earlier weights or constants"
    )


def _whole(value: float, allowed: float) -> float:
    """Return a number without the rounding of a few operations beside 0, 1 or another whole number."""
    if allowed > 1e-6:  # weights or average have less than double precision
        return round(value, 6 if allowed < 1e-2 else 3) + 0.0
    return float(round(value)) if abs(value - round(value)) < allowed * 1e-4 else value

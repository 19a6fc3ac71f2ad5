"""What looks wrong in averaging code, told from its four numbers and its habits: a sentence each, with the cure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .comparison import abridge
from .paragraph import kinds, ordinal

if TYPE_CHECKING:
    from .identification import Identification
    from .impulses import Measurement


def with_problems(found: "Identification", measured: "Measurement", every: int) -> "Identification":
    """Return the findings with their problems; `every` is after how many calls the average is meant to move."""
    sentences = [*_habits(measured), *_failures(found), *_begin(found)]
    if found.reason is not None:
        sentences.append(f"It is {found.reason}.")
    else:
        sentences += [*_rhythm(found, every), *_memory(found, measured), *_sign(found, measured.precision)]
    return replace(found, problems=tuple(sentences))


def _habits(measured: "Measurement") -> Iterator[str]:
    if measured.read_moves:
        yield "read() changes the average: it depends on how often read() was called; let update() alone move it."
    elif measured.follows_alone:
        yield (
            "The average changes with the weights although update() was not called: it shares their memory; clone "
            "the weights when the average is made."
        )
    if measured.rest.run.read_writes:
        yield "read() changes the weights of the model; return a copy of the average instead."
    if measured.rest.run.keeps_graph:
        yield (
            "The average keeps the graph of autograd, and so all earlier weights stay in memory; update it under "
            "torch.no_grad()."
        )
    if measured.uneven:
        yield f"{abridge(list(measured.uneven))} is averaged otherwise than {measured.rest.names[0]!r}."
    averaged = measured.rest.names
    if missing := [n for n, _ in measured.rest.run.model.named_parameters() if n not in averaged]:
        yield f"{abridge(missing)} has no average."


def _failures(found: "Identification") -> Iterator[str]:
    """Tell the tensors that the code raises on, if a model has them."""
    for what, kind in kinds(found):
        if kind.error:
            number = what == "Whole numbers" and kind.error.startswith("update()")
            cure = "copy them instead of averaging them" if number else "models that have them cannot be averaged by it"
            yield f"{what}: {kind.error}; {cure}."


def _begin(found: "Identification") -> Iterator[str]:
    if found.start == "elsewhere":
        yield (
            f"The average never begins at the weights: of the values that it was made with, {found.left:.0%} is left "
            f"after {len(found.couplings) or 'all'} updates; copy the weights into it at the start or in the first "
            "update."
        )


def _rhythm(found: "Identification", every: int) -> Iterator[str]:
    warmup = found.warmup
    assert warmup is not None
    moving = warmup.moving
    if not moving:
        yield (
            f"The average does not move in {len(found.couplings)} updates; if it begins later, look at more of them "
            "by steps=."
        )
    elif warmup.every == 0:
        yield f"The average moves at irregular updates: {_few(moving)}; the others are lost."
    elif warmup.every != every and len(moving) > 1:
        yield (
            f"Only every {ordinal(warmup.every)} update() moves the average ({_few(moving)}): the updates between are "
            f"lost. If that is meant, say so by every={warmup.every}."
            if warmup.every > every
            else f"Every {ordinal(warmup.every)} update() moves the average ({_few(moving)}), not every "
            f"{ordinal(every)}, as every={every} says."
        )


def _memory(found: "Identification", measured: "Measurement") -> Iterator[str]:
    """Tell a memory of less than one update, of averages that only follow."""
    warmup = found.warmup
    assert warmup is not None
    if measured.follows_alone or any(abs(c.a) > measured.precision for c in found.couplings):
        return
    if warmup.copies > 1 and not warmup.decays and warmup.every == 1:
        yield "Every update() copies the weights, so that the average remembers nothing; its decay is 0."
    elif len(warmup.decays) >= 4 and 0 <= (kept := warmup.decays[-1]) < 0.5 and kept < warmup.decays[0] + 1e-6:
        yield (
            f"An update keeps {kept:.6g} of the average and takes {1 - kept:.6g} of the weights, so that the average "
            f"remembers less than one update: decay and 1 − decay are swapped, if a decay of {1 - kept:.6g} is meant."
        )


def _sign(found: "Identification", slack: float) -> Iterator[str]:
    last = found.coupling
    if last is None or found.growth is None:
        return
    if found.growth > 1 + slack:
        faster = f"the distance between weights and average grows {found.growth:.6g}× per update"
        if last.b < -slack:
            yield f"The average moves away from the weights (b = {last.b:.6g}) with a wrong sign: {faster}."
        elif last.a < -slack:
            yield f"The feedback pushes the weights away (a = {last.a:.6g}) with a wrong sign: {faster}."
        else:
            yield f"It overshoots: {faster}, because a + b = {last.rate:.6g} is above 2."
    elif last.a < -slack and abs(last.rate) <= slack:
        yield (
            f"The feedback pushes the weights away (a = {last.a:.6g}) as fast as the average follows (b = "
            f"{last.b:.6g}), with a wrong sign: the two never come together."
        )


def _few(numbers: Sequence[int]) -> str:
    return "numbers " + ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")

"""An average read out: the mixture of stored states that is in the model or in an export in its place."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchbelay.ops import arithmetic
from torchbelay.physics.method import Method
from torchbelay.physics.readouts import Readout, Shares, check, shares_of

from .average import Entry, WholeAverage
from .averages import Averages
from .initial import Initial
from .shard import local

Find = Callable[[Entry], Tensor]


class Reading:
    """A readout of an average, with the shares of w0, w1 and w2 for each of its parameters.

    To make one changes nothing, and refuses what cannot be read out.
    """

    def __init__(self, average: WholeAverage, parts: Sequence[Averages], readout: Readout, initial: Initial) -> None:
        self.readout, self._initial = check(readout), initial
        average.refuse_other_shapes()
        self._each: list[tuple[Entry, Shares]] = []
        for part in parts:
            self._each += self._read(part, average.name)

    def _read(self, part: Averages, name: str) -> Iterator[tuple[Entry, Shares]]:
        """Yield what the average has of one optimizer's parameters."""
        parameters = part.parameters.renewed()  # the optimizer may have got or lost groups since the last step
        rates = {key: parameters.lr(group) or 0.0 for key, group in parameters.groups().items()}
        for e in part.each[name].entries.values():
            yield e, self._shares(e.name, e.method, part.clock.count - e.born, rates.get(id(e.w1), 0.0))
        for w in () if part.began else part.wanted()[name]:  # what cannot be read out later is refused now
            self._shares(w.name, w.method, 0, rates[id(w.parameter)])

    def _shares(self, name: str, method: Method, step: int, lr: float) -> Shares:
        shares = shares_of(self.readout, name, method, step, lr)
        if shares.w0 and not self._initial.kept:
            raise ValueError(
                f"readout={self.readout!r} needs the weights at which the average began, and they were not kept: make "
                "the Belay with keep_initial=True"
            )
        return shares

    def write(self, to: Mapping[int, Tensor], w1: Find, w2: Find) -> None:
        """Write the mixture to local tensors, by the ids of their parameters; w1 and w2 of an entry are found by these.

        Nothing is written to them that they are made from, so this may be repeated.
        """
        alike: dict[tuple[Any, ...], list[Entry]] = {}
        for e, shares in self._each:
            target = to[id(e.w1)]
            alike.setdefault((shares, target.device, target.dtype), []).append(e)
        for (shares, *_), entries in alike.items():
            w1s = [e.part_of(w1(e)) for e in entries]
            terms = [(shares.w2, [local(w2(e)) for e in entries]), (shares.w1, w1s)]
            if shares.w0:
                terms.append((shares.w0, [local(self._initial.of(e.w1)) for e in entries]))
            arithmetic.mix_([to[id(e.w1)] for e in entries], *terms)

"""A Belay of a model whose trained weights lie in flat pieces on several ranks, as engines like DeepSpeed keep them.

The engine's `Layout` says which pieces of which parameters this rank has, and how the model gets its weights from them.
A `Belay` couples the pieces; here is what concerns the whole model.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbelay.physics.method import Method
from torchbelay.physics.readouts import Readout

from . import export, files, modules, stats
from .agreement import agreement
from .average import MAIN, average_dtype
from .belay import Belay
from .options import check_dtype
from .pieces import Piece, PieceModel, changed, cut, saved, whole
from .rules import Rule, as_rule
from .unentered import must_enter

# Arguments of Belay that are refused, and why.
_UNUSED = {
    "save_with_optimizer": "whose own checkpoints carry the average",
    "shard": "which spreads the average over its ranks already",
    "workers": "whose ranks train one model",
    "bits": "whose pieces know nothing of the whole tensors that random bits are drawn for",
}


class Layout(Protocol):
    """How the trained weights of a model lie in pieces."""

    model: nn.Module  # the whole one, which computes
    group: Any  # the ranks that share its weights
    device: torch.device  # where these ranks talk
    pieces: dict[str, Piece]  # of every trained parameter, by its name
    tensors: dict[str, Tensor]  # the pieces themselves
    shapes: dict[str, Tensor]  # tensors on the device "meta" with the shapes and dtypes of the whole parameters
    optimizers: list[Optimizer]  # what steps the pieces

    def follow(self) -> None:
        """Let the tensors be where the engine has the weights now."""

    def set_aside(self) -> list[Callable[[], object]]:
        """Copy what the model computes with; return what puts it back, one call after the other."""

    def renew(self) -> None:
        """Let the model compute with the pieces as they are; a collective."""

    def gathered(self, parameter: Tensor) -> Tensor | None:
        """Return a whole parameter that is not averaged, in the first rank's host memory; a collective."""


class PiecewiseBelay:
    """The averages of a model in pieces, with the ways of a `Belay`.

    `averaged()`, `average_state_dict()`, `save_average()`, `stats()`, `change()`, `copy_to_model()`,
    `load_state_dict()` and `state_dict(full=True)` are collectives: call them on every rank.
    """

    def __init__(self, layout: Layout, method: Method | Rule, options: Mapping[str, Any]) -> None:
        self._layout, self._group = layout, layout.group
        self._undo: list[Callable[[], object]] = []  # what gives the model back what was set aside for a block
        made: list[Belay] = []
        try:
            with agreement(self._group) as facts:
                made.append(self._made(method, dict(options)))
                facts.update(self._facts(made[0]))
        except BaseException:
            for each in made:
                each.detach()
            raise
        self._belay = made[0]

    def _made(self, method: Method | Rule, options: dict[str, Any]) -> Belay:
        """Return the Belay of this rank's pieces."""
        for name, why in _UNUSED.items():
            if options.get(name):
                raise ValueError(f"{name}={options[name]!r} does not go with this engine, {why}; leave it out")
        if options.get("on_nonfinite", "ignore") != "ignore":
            raise ValueError(
                f"on_nonfinite={options['on_nonfinite']!r} would let each rank decide by its own pieces; leave it out, "
                "and let the engine skip steps that overflow"
            )
        if isinstance(options.get("spectators"), Mapping):
            options["spectators"] = {name: self._rule(each) for name, each in options["spectators"].items()}
        self._layout.follow()
        model = PieceModel(self._layout.model, self._layout.tensors)
        return Belay(model, self._layout.optimizers, self._rule(method), **options)

    def _rule(self, method: Method | Rule) -> Rule:
        """Return a rule that is asked about whole parameters."""
        rule, shapes = as_rule(method), self._layout.shapes
        return lambda name, tensor: rule(name, shapes.get(name, tensor))

    def _facts(self, belay: Belay) -> dict[str, object]:
        """Return what ranks must agree about."""
        found: dict[str, object] = {
            "options": vars(belay._options),
            "shapes": {name: piece.shape for name, piece in self._layout.pieces.items()},
        }
        for part in belay._parts.each:
            for name, wanted in part.averages.wanted().items():
                methods = found.setdefault(f"methods of {name!r}", {})
                assert isinstance(methods, dict)
                methods |= {each.name: export.label(each.method) for each in wanted}
        return found

    # The average -------------------------------------------------------------------------------------------------

    @must_enter
    def averaged(self, name: str = MAIN, *, readout: Readout | None = None) -> Iterator[Any]:
        """Let the model hold the average inside the block, and its weights again after it, also after an exception.

        Weights in pieces trade places with the average, and what the model computes with is set aside. To enter costs
        what the model needs to be renewed after a step; to leave costs no communication. All else is as for
        `Belay.averaged`.
        """
        self._layout.follow()
        # Twice, for an exception may come at any line, also of leaving; what is done is not done again.
        try:
            try:
                with self._entered(name, readout):
                    yield self._given()
            finally:
                self._give_back()
        finally:
            self._give_back()

    @contextmanager
    def _entered(self, name: str, readout: Readout | None) -> Iterator[None]:
        """Let pieces and model hold the average inside the block; of several blocks, the first prepares the model."""
        member = self._belay._parts.member
        with ExitStack() as block:
            with member.lock:
                first = member.settled_swap() is None
                if first:
                    _run(self._undo)
                    self._belay._average(name)
                    self._undo = self._layout.set_aside()
                block.enter_context(self._belay.averaged(name, readout=readout))
                if first:
                    self._layout.renew()
            yield

    def _give_back(self) -> None:
        """Give the model back what was set aside, if the last block has been left."""
        with self._belay._parts.member.lock:
            if self._belay._parts.member.swap is None:
                _run(self._undo)

    def _given(self) -> Any:
        """Return what a block of `averaged()` gets."""
        return self._layout.model

    def copy_to_model(self, name: str = MAIN) -> None:
        """Overwrite the model's weights with the average, for good."""
        self._layout.follow()
        self._belay.copy_to_model(name)
        self._layout.renew()

    def average_state_dict(self, name: str = MAIN, *, readout: Readout | None = None) -> dict[str, Any]:
        """Return the average and the rest of the model, laid out like the plain model's `state_dict()`.

        The first rank gets it, in host memory and in the parameters' dtypes; the other ranks get {}.
        """
        return self._exported(name, readout)

    def save_average(
        self,
        path: str | os.PathLike[str],
        name: str = MAIN,
        *,
        dtype: torch.dtype | None = None,
        readout: Readout | None = None,
    ) -> None:
        """Write the average as a safetensors file, as `Belay.save_average` does; the first rank writes."""
        with agreement(self._group):
            export.require("save_average()", "torch.save(belay.average_state_dict(), path)")
            check_dtype(dtype)
            files.check_safetensors_name(path)
            if self._is_first():
                files.destination(path)
        state = self._exported(name, readout, dtype)
        if self._is_first():
            average, start = self._belay._average(name), self._belay._options.start
            export.write(path, state, export.about(average, readout, step=self.step, start=start))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exported(self, name: str, readout: Readout | None, dtype: torch.dtype | None = None) -> dict[str, Any]:
        self._layout.follow()
        with self._belay._exports.one("average_state_dict() or save_average"):
            return self._gathered(name, readout, dtype)

    def _gathered(self, name: str, readout: Readout | None, dtype: torch.dtype | None) -> dict[str, Any]:
        average, parts = self._belay._average(name), self._belay._parts
        if parts.member.swap is None:
            parts.follow_model()
        reading = parts.reading(average, readout)
        found = export.replacement(self._belay._model, average, parts.member, reading, rounded=False)
        model, replaced = self._layout.model, dict[int, Tensor]()
        for key, p in modules.named_parameters(model).items():
            part = self._layout.tensors.get(key)
            if part is not None and id(part) in found:
                value = whole(found.pop(id(part)), self._layout.pieces[key], self._group, self._layout.device)
            else:
                value = self._layout.gathered(p)
            if value is not None:
                replaced[id(p)] = value.to(_dtype(p, dtype))
        if not self._is_first():
            return {}
        for buffer in modules.named_buffers(model).values():
            replaced[id(buffer)] = found.get(id(buffer), buffer).to(_dtype(buffer, dtype))
        return modules.state_dict_with(model, replaced, lambda t: t.detach().to("cpu", copy=True))

    def _is_first(self) -> bool:
        return torch.distributed.get_rank(self._group) == 0

    # Numbers and changes -----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps that the optimizer took; skipped steps do not count."""
        return self._belay.step

    @property
    def regime(self) -> str | dict[str, str]:
        """The kind of motion, as `Belay.regime`."""
        return self._belay.regime

    @property
    def decay(self) -> float | dict[str, float]:
        """The share of itself that the average kept at its last coupling, as `Belay.decay`."""
        return self._belay.decay

    @torch.no_grad()
    def stats(self, prefix: str = "") -> dict[str, float | int]:
        """Return numbers to log, as `Belay.stats`: those of the whole model, on every rank."""
        self._layout.follow()
        found, parts = self._belay.stats(prefix), self._belay._parts
        entries = list(parts.averages[MAIN].entries.values())
        norms = torch.tensor(stats.norms(entries, parts.member.swap), dtype=torch.float64)
        squares = norms.square().to(self._layout.device)
        torch.distributed.all_reduce(squares, group=self._group)
        tension, size = squares.sqrt().tolist()
        return found | {prefix + "tension": tension, prefix + "tension_ratio": tension / size if size else 0.0}

    def reset(self) -> None:
        """Begin every average again at the weights as they are. Call this after you loaded weights into the model."""
        self._layout.follow()
        self._belay.reset()

    def change(self, method: Method | Rule, name: str = MAIN) -> None:
        """Let an average go on with another method, as `Belay.change`; a collective, for ranks must agree about it."""
        self._layout.follow()
        with agreement(self._group) as facts:
            rule = self._rule(method)
            methods = {key: rule(key, shape) for key, shape in self._layout.shapes.items()}
            facts[f"new methods of {name!r}"] = {key: each and export.label(each) for key, each in methods.items()}
        self._belay.change(rule, name)

    def detach(self) -> None:
        """Follow no more steps: the average can still be used."""
        self._belay.detach()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({repr(self._belay).removeprefix('Belay(')}"

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return everything that a bit-exact resume needs: of this rank's pieces, or, with `full`, of the whole model.

        A full state is in the first rank's host memory, and the other ranks get {}. It fits any number of ranks, and a
        plain `Belay` of the same model.
        """
        self._layout.follow()
        state = self._belay.state_dict()
        if not full:
            return state | {"pieces": saved(self._layout.pieces)}

        def gathered(average: str, kind: str, name: str, t: Tensor) -> Tensor | None:
            return whole(t, self._layout.pieces[name], self._group, self._layout.device)

        state = changed(state, gathered)
        return state if self._is_first() else {}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a `state_dict()`: this rank's own, or a full one, which every rank loads.

        A state that does not fit one of the ranks is refused on all, and changes nothing. `strict` is as for
        `Belay.load_state_dict`.
        """
        self._layout.follow()
        parts = self._belay._parts
        with agreement(self._group):
            parts.refuse_now("load_state_dict")
            state = self._own(state)
            parts.wait()
            checked = parts.checked(state, strict=strict)
        for part, each in zip(parts.each, checked, strict=True):
            part.load(each)
        parts.live.follow(moved=True)

    def _own(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a state has of this rank's pieces."""
        if not isinstance(state, Mapping) or "averages" not in state:
            return state  # which is refused as that of any Belay
        if "pieces" not in state:
            return cut(state, self._layout.pieces)
        if state["pieces"] != saved(self._layout.pieces):
            raise ValueError(
                "this state has other pieces of the parameters than this rank: another rank saved it, or another "
                "number of ranks; load the state of this rank, or a full one, which state_dict(full=True) returns"
            )
        return {key: value for key, value in state.items() if key != "pieces"}


@torch.inference_mode(False)
@torch.no_grad()
def _run(calls: list[Callable[[], object]]) -> None:
    """Make all calls, and forget each that is done."""
    while calls:
        calls[0]()
        del calls[0]


def _dtype(t: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor has in an export."""
    is_number = t.is_floating_point() or t.is_complex()
    return t.dtype if asked is None or not is_number else average_dtype(t.dtype, asked)

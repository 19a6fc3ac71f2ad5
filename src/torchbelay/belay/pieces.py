"""Parameters of which each rank holds a flat piece: pieces as a model, whole tensors, states and files of pieces.

Engines such as DeepSpeed's ZeRO keep the weights that are trained as a few flat tensors, which end anywhere in a
parameter. Every rank has a piece of every parameter, many of them empty, so that names are the same on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import modules
from .files import replacing

TENSORS = (
    "weights",
    "weights_low",
    "velocities1",
    "velocities2",
    "initial",
)  # what a state has of an average, by parameter


class Piece(NamedTuple):
    """What a rank holds of a parameter: `numel` elements from `start` on, of the parameter as a flat tensor."""

    start: int
    numel: int
    shape: tuple[int, ...]  # of the whole parameter

    @property
    def end(self) -> int:
        """The first element after the piece."""
        return self.start + self.numel


class PieceModel(nn.Module):
    """Pieces of a model's parameters under the parameters' names, with the model's own buffers."""

    def __init__(self, model: nn.Module, pieces: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters.update(pieces)  # type: ignore[arg-type]  # plain tensors, whose names have dots
        for prefix, _, module in modules.walk(model):
            if module._buffers:
                holder = nn.Module() if prefix else self
                # The model's own dict: what is written to its slots is in the model.
                vars(holder)["_buffers"] = module._buffers
                vars(holder)["_non_persistent_buffers_set"] = module._non_persistent_buffers_set
                if prefix:
                    self._modules[prefix.removesuffix(".")] = holder


def whole(part: Tensor, piece: Piece, group: Any, device: torch.device) -> Tensor | None:
    """Return the whole parameter in the host memory of the group's first rank, None on other ranks; a collective.

        `device` is where the ranks talk.
    Each byte comes from one rank, and the others add 0 to it, so that no bit is lost.
    """
    count = torch.Size(piece.shape).numel()
    flat = torch.zeros(count, dtype=part.dtype, device=device)
    flat[piece.start : piece.end] = part.detach()
    if count:
        first = torch.distributed.get_global_rank(group, 0)
        torch.distributed.reduce(flat.view(torch.uint8), first, group=group)
    return flat.reshape(piece.shape).cpu() if torch.distributed.get_rank(group) == 0 else None


# States ---------------------------------------------------------------------------------------------------------------

Change = Callable[[str, str, str, Any], Any]  # (average, kind, name, tensor) -> what takes the tensor's place


def changed(state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return a Belay's state with other tensors in place of those that belong to parameters."""
    averages = {}
    for average, saved in state["averages"].items():
        averages[average] = dict(saved) | {
            kind: {name: change(average, kind, name, t) for name, t in saved[kind].items()}
            for kind in TENSORS
            if kind in saved
        }
    return {**state, "averages": averages}


def cut(state: Mapping[str, Any], pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Return this rank's part of a state that has whole tensors."""

    def part(average: str, kind: str, name: str, t: Any) -> Any:
        if name not in pieces:
            return t  # a name that is not known here is refused when the state is loaded
        piece = pieces[name]
        if not isinstance(t, Tensor) or tuple(t.shape) != piece.shape:
            found = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"{name!r} in the {kind} of average {average!r} has the shape {found} in the checkpoint, and "
                f"{piece.shape} here; load the state of this model"
            )
        return t.detach().reshape(-1)[piece.start : piece.end]

    return changed(state, part)


def recut(states: Sequence[Mapping[str, Any]], pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Return this rank's part of states that other ranks saved, as many of them as there were; each has "pieces"."""

    def part(average: str, kind: str, name: str, t: Tensor) -> Tensor:
        piece = pieces.get(name, Piece(0, 0, ()))
        new, found = torch.empty(piece.numel, dtype=t.dtype), 0
        for state in states:
            start, numel, *shape = state["pieces"][name]
            low, high = max(start, piece.start), min(start + numel, piece.end)
            if tuple(shape) != piece.shape:
                raise ValueError(
                    f"{name!r} has the shape {tuple(shape)} in the checkpoint, and {piece.shape} here; load the state "
                    "of this model"
                )
            if low < high:
                saved = state["averages"][average][kind][name]
                new[low - piece.start : high - piece.start] = saved[low - start : high - start]
                found += high - low
        if found != piece.numel:
            raise ValueError(f"the files of the ranks that saved hold a part of {name!r} only, or parts of it twice")
        return new

    return changed({key: value for key, value in states[0].items() if key != "pieces"}, part)


# Files ----------------------------------------------------------------------------------------------------------------


def write(folder: Path, label: str, rank: int, world: int, state: Mapping[str, Any]) -> None:
    """Write the state of one rank to a folder that all share; the first rank removes those of other worlds."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for old in {*folder.glob(_file(label))} - {*folder.glob(_file(label, world=str(world)))}:
            old.unlink()
    with replacing(folder / _file(label, str(rank), str(world))) as temporary:
        torch.save(dict(state), temporary)


def read(folder: Path, label: str, rank: int, world: int, pieces: Mapping[str, Piece]) -> dict[str, Any] | None:
    """Return the state of one rank from a folder, whatever number of ranks wrote it; None if none did."""
    own = folder / _file(label, str(rank), str(world))
    if own.exists():
        state: dict[str, Any] = torch.load(own, map_location="cpu", weights_only=True)
        if state["pieces"] == saved(pieces):
            return state
    found = sorted(folder.glob(_file(label)))
    states = [torch.load(each, map_location="cpu", weights_only=True, mmap=True) for each in found]
    return recut(states, pieces) | {"pieces": saved(pieces)} if states else None


def saved(pieces: Mapping[str, Piece]) -> dict[str, list[int]]:
    """Return what a state says of its pieces."""
    return {name: [piece.start, piece.numel, *piece.shape] for name, piece in pieces.items()}


def _file(label: str, rank: str = "*", world: str = "*") -> str:
    return f"{label}_rank_{rank}_of_{world}.pt"

"""What `module(into=...)` refuses: a module of the user's own that cannot hold the average of the model."""

from collections.abc import Mapping
from itertools import zip_longest

from torch import Tensor, nn

from . import company, modules
from .average import WholeAverage
from .live_module import Origin, frozen
from .models import as_model, each_of
from .shard import is_sharded, local, spread_like


def check_teacher(into: object, origin: Origin) -> nn.Module:
    """Return the module, frozen; refuse one that is not built and sharded like the model, before anything changes."""
    try:
        teacher = as_model(into)
    except (TypeError, ValueError) as problem:
        raise type(problem)(f"into= must be built like the model: {problem}") from None
    ours, theirs = modules.named_parameters(origin.model), modules.named_parameters(teacher)
    own = {(p.device, p.untyped_storage().data_ptr()) for p in map(local, ours.values()) if p.numel()}
    if any((q.device, q.untyped_storage().data_ptr()) in own for q in map(local, theirs.values()) if q.numel()):
        raise ValueError("into= shares weights with the model; build it anew, by the code that built the model")
    for each in (each for member in company.members() for each in member.live.modules):
        if each.average is not origin.average and each.contains(teacher):
            raise ValueError(f"into= follows the average {each.average.name!r} already; give each a module of its own")
    _same_names("parameter", ours, theirs)
    _same_names("buffer", modules.persistent_buffers(origin.model), modules.persistent_buffers(teacher))
    _same_order(each_of(origin.model), each_of(teacher))
    for name, p in ours.items():
        _check_parameter(name, theirs[name], p, origin.average)
    return frozen(teacher)


def _same_names(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name in [*ours, *theirs]:
        if name not in theirs or name not in ours:
            where = "model" if name in ours else "module given as into="
            raise ValueError(f"{what} {name!r} is in the {where} alone; build into= by the code that built the model")
        if ours[name].shape != theirs[name].shape:
            raise ValueError(
                f"{what} {name!r} has the shape {tuple(theirs[name].shape)} in into=, and {tuple(ours[name].shape)} in "
                "the model; build into= by the code that built the model"
            )


def _same_order(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    """Refuse several modules of which one has the names of another model than the one at its place."""
    for i, (model, teacher) in enumerate(zip_longest(ours, theirs, fillvalue=nn.Module())):
        for name in modules.named_parameters(model).keys() ^ modules.named_parameters(teacher).keys():
            raise ValueError(
                f"parameter {name!r} is not at the same place: into[{i}] is not built like model {i}; give as many "
                "modules as there are models, in their order"
            )


def _check_parameter(name: str, q: Tensor, p: Tensor, average: WholeAverage) -> None:
    if q.is_meta:
        raise ValueError(f"parameter {name!r} of into= is on the meta device; materialise it by to_empty() first")
    if is_sharded(q) is not is_sharded(p) or spread_like(q) != spread_like(p) or local(q).shape != local(p).shape:
        raise ValueError(
            f"parameter {name!r} is sharded as {_spread(q)} in into=, and as {_spread(p)} in the model; shard into= by "
            "the same calls of fully_shard() or parallelize_module(), over the same ranks"
        )
    allowed = {p.dtype, average.entries[name].w2.dtype if name in average.entries else p.dtype}
    if q.dtype not in allowed:
        raise ValueError(
            f"parameter {name!r} is {q.dtype} in into=; it must be {' or '.join(sorted(map(str, allowed)))}, as that "
            "of the model or of its average"
        )


def _spread(t: Tensor) -> str:
    return f"{t.placements} over {t.device_mesh}" if is_sharded(t) else "not at all"  # type: ignore[attr-defined]

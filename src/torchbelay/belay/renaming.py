"""Parameters that have other names in the model than they had, or none any more."""

from collections.abc import Iterable, Mapping

from torchbelay.physics.warnings import warn

from .average import Entry
from .overlap import is_in, memory
from .parameters import Names, Parameters, why_lost


def lost(entries: Iterable[Entry], names: Names, parameters: Parameters) -> list[Entry]:
    """Return the entries whose parameters left the model; refuses a parameter that is still trained."""
    found = [e for e in entries if id(e.w1) not in names]
    trained = parameters.renewed().groups() if found else {}
    for entry in found:
        if id(entry.w1) in trained:
            raise RuntimeError(why_lost(entry.name))
    return found


def baked(entries: Iterable[Entry], names: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return the old and new names of parameters that have become what was computed from them, as by prune.remove().

    Such a parameter has other memory than before, or is another view of it. `remove_parametrizations()` with
    leave_parametrized=False changes neither.
    """
    found: dict[tuple[str, str], None] = {}
    for e in entries:
        was, now = e.name, names[id(e.w1)]
        if _computed_from(now) is not None:
            e.memory = memory(e.w1)
        elif was != now and now == _computed_from(was) and not is_in(e.memory, e.w1):
            found[was, now] = None
    return list(found)


def _computed_from(name: str) -> str | None:
    """Return the name of the weight that is computed from a parameter; None if the name does not tell of one."""
    head, dot, leaf = name.rpartition(".")
    if leaf.endswith("_orig"):  # torch.nn.utils.prune
        return head + dot + leaf.removesuffix("_orig")
    before, found, place = head.rpartition("parametrizations.")
    if found and leaf == "original" and "." not in place:  # torch.nn.utils.parametrize
        return before + place
    return None


def warn_of_baked(found: list[tuple[str, str]]) -> None:
    """Warn that their averages are those of what they were, to which no mask or parametrization is applied any more."""
    if not found:
        return
    was, now = found[0]
    key = now.rpartition(".")[2]
    if was.endswith("_orig"):
        what, cause = "mask", "prune.remove()"
        back = f"prune.custom_from_mask(module, {key!r}, module.{key} != 0)"
    else:
        what, cause = "parametrization", "remove_parametrizations()"
        back = "register_parametrization(); with leave_parametrized=False there is nothing to do"
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    warn(
        f"parameter {was!r} is {now!r} now{others}: its average is still that of {was!r}, and the {what} that {cause} "
        f"took away is not applied to it any more. Save the average before {cause}, begin again at the weights by "
        f"reset(), or put the {what} back by {back}"
    )

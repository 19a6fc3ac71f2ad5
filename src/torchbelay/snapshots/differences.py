"""How checkpoints differ that shall be merged: what is refused, what is said, and which tensors are averaged."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint import Checkpoint
from .mean import Workspace, same_bytes

_PART = 1 << 20  # elements
_BATCH_NORM = ("running_mean", "running_var")
# What save_pretrained writes into a configuration about itself.
_OWN_WORDS = ("_name_or_path", "transformers_version", "_diffusers_version", "peft_version", "torch_dtype", "dtype")


@dataclass
class Findings:
    """What a look at the checkpoints found."""

    averaged: list[str] = field(default_factory=list)  # tensors of the last checkpoint
    kept: set[str] = field(default_factory=set)  # tensors that are taken from the last checkpoint
    apart: set[str] = field(default_factory=set)  # names that share one tensor in the last checkpoint only
    stand_ins: dict[tuple[int, str], str] = field(default_factory=dict)  # (checkpoint, name) → name of the tied tensor
    notes: list[str] = field(default_factory=list)

    def name_in(self, number: int, name: str) -> str:
        """Return the name that a tensor has in one of the checkpoints."""
        return self.stand_ins.get((number, name), name)


def examine(inputs: Sequence[Checkpoint]) -> Findings:
    """Compare checkpoints, oldest first; raise if no sensible mean exists. Of the weights, nothing is read."""
    found = Findings()
    _names(inputs, found)
    _shapes(inputs, found)
    _dtypes(inputs, found)
    _tied(inputs, found)
    _configurations(inputs, found)
    different = {os.path.realpath(checkpoint.path) for checkpoint in inputs}  # one alone fits its own weights
    if len(different) > 1 and (statistics := [name for name in found.averaged if name.endswith(_BATCH_NORM)]):
        found.notes.append(
            f"{_some(statistics)}: statistics of BatchNorm are averaged too, and do not fit the merged weights; run "
            "torch.optim.swa_utils.update_bn(loader, model) before you use the model"
        )
    if any(path.name == "adapter_config.json" for path in inputs[-1].companions) and len(inputs) > 1:
        found.notes.append(
            "adapters: the factors A and B are averaged, not their product; do that with checkpoints of one run, not "
            "with separate runs"
        )
    return found


def _names(inputs: Sequence[Checkpoint], found: Findings) -> None:
    """Refuse names that some checkpoints lack, except a tied weight that is stored once in one and twice in another."""
    everywhere = set.intersection(*({*checkpoint.tensors} for checkpoint in inputs))
    tied: dict[str, str] = {}
    problems = []
    for number, checkpoint in enumerate(inputs):
        for name in checkpoint.names:
            if name in everywhere or name in tied:
                continue
            lacking = [str(other.path) for other in inputs if name not in other.tensors]
            partner = _partner(inputs, name, everywhere)
            if partner is None:
                problems.append(f"{name!r} is in {inputs[number].path} and not in {lacking[0]}")
            else:
                tied[name] = partner
    if problems:
        more = f" ({len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"the checkpoints are not of one model: {'; '.join(problems[:3])}{more}; give checkpoints with the same "
            "tensors"
        )
    for name, partner in tied.items():
        found.notes.append(
            f"{name!r} is tied to {partner!r} in some checkpoints and left out in others; written as in the last"
        )
        for number, checkpoint in enumerate(inputs):
            if name not in checkpoint.tensors:
                found.stand_ins[number, name] = partner


def _partner(inputs: Sequence[Checkpoint], name: str, everywhere: set[str]) -> str | None:
    """Return a tensor that all checkpoints have, and that equals `name` in every checkpoint that has `name`."""
    holders = [checkpoint for checkpoint in inputs if name in checkpoint.tensors]
    info = holders[0].tensors[name]
    for candidate in sorted(everywhere):
        if all(
            checkpoint.tensors[candidate] == checkpoint.tensors[name] == info
            and _equal([(checkpoint, candidate), (checkpoint, name)])
            for checkpoint in holders
        ):
            return candidate
    return None


def _shapes(inputs: Sequence[Checkpoint], found: Findings) -> None:
    last = inputs[-1]
    problems = []
    for name, info in last.tensors.items():
        for number, checkpoint in enumerate(inputs):
            other = checkpoint.tensors[found.name_in(number, name)]
            if other.shape != info.shape:
                problems.append(f"{name!r} is {[*other.shape]} in {checkpoint.path} and {[*info.shape]} in {last.path}")
                break
    if problems:
        more = f" ({len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"shapes differ: {'; '.join(problems[:3])}{more}; give checkpoints of one model")


def _dtypes(inputs: Sequence[Checkpoint], found: Findings) -> None:
    """Choose the tensors that are averaged: those of real and complex numbers. Integers must be equal or counters."""
    last = inputs[-1]
    mixed: dict[str, list[str]] = {}
    counters = []
    for name, info in last.tensors.items():
        dtypes = [checkpoint.dtype(found.name_in(number, name)) for number, checkpoint in enumerate(inputs)]
        if len({*map(_kind, dtypes)}) > 1:
            other = next(number for number, dtype in enumerate(dtypes) if _kind(dtype) != _kind(info.dtype))
            raise ValueError(
                f"{name!r} is {dtypes[other]} in {inputs[other].path} and {info.dtype} in {last.path}; give "
                "checkpoints of one model"
            )
        if len({*dtypes}) > 1:
            text = " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
            mixed.setdefault(text, []).append(name)
        if _kind(info.dtype) in ("real", "complex"):
            found.averaged.append(name)
            continue
        found.kept.add(name)
        if not _equal([(checkpoint, found.name_in(number, name)) for number, checkpoint in enumerate(inputs)]):
            if info.numel > 1 or _kind(info.dtype) == "float8":
                raise ValueError(
                    f"{name!r} is {info.dtype} and differs between the checkpoints; such numbers have no mean: convert "
                    "the checkpoints to floating point first (dequantize them)"
                )
            counters.append(name)
    for text, names in mixed.items():
        found.notes.append(f"{_some(names)}: dtypes differ ({text}); written in the dtype of the last checkpoint")
    if counters:
        found.notes.append(f"{_some(counters)}: integers that differ are taken from the last checkpoint")


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if not dtype.is_floating_point:
        return "integer"
    return "real" if dtype.itemsize > 1 else "float8"


def _tied(inputs: Sequence[Checkpoint], found: Findings) -> None:
    groups = [{*map(frozenset, checkpoint.tied)} for checkpoint in inputs]
    for number, checkpoint in enumerate(inputs[:-1]):
        for group in sorted(groups[-1] ^ groups[number], key=sorted):
            if all(name in checkpoint.tensors and name in inputs[-1].tensors for name in group):
                one, other = (inputs[-1], checkpoint) if group in groups[-1] else (checkpoint, inputs[-1])
                tied = f"{' and '.join(sorted(group))} are tied in {one.path} and not in {other.path}"
                if group in groups[-1] and not _equal([(checkpoint, name) for name in sorted(group)]):
                    found.apart |= group
                found.notes.append(
                    f"{tied}; in the merge they are {'not ' * (one is checkpoint or group <= found.apart)}tied"
                )


def _configurations(inputs: Sequence[Checkpoint], found: Findings) -> None:
    last = inputs[-1]
    for file in last.companions:
        if not file.name.endswith("config.json"):
            continue
        ours = _content(last, str(file))
        for checkpoint in inputs[:-1]:
            theirs = _content(checkpoint, str(file))
            if theirs is not None and theirs != ours:
                found.notes.append(f"{file} differs between {checkpoint.path} and {last.path}; the last one is kept")
                break


def _content(checkpoint: Checkpoint, file: str) -> Any:
    """Return the content of a configuration without what it says about itself, or None if there is none."""
    path = checkpoint.path / file
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return path.read_bytes()
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key not in _OWN_WORDS}
    return content


def _equal(places: Sequence[tuple[Checkpoint, str]]) -> bool:
    """Return whether tensors of one dtype and shape are equal to the last bit."""
    (first, name), *others = places
    if any(checkpoint.tensors[other] != first.tensors[name] for checkpoint, other in others):
        return False
    info = first.tensors[name]
    step = _PART if all(checkpoint.sliceable for checkpoint, _ in places) else max(info.numel, 1)
    workspace = Workspace()
    for start in range(0, info.numel, step):
        count = min(step, info.numel - start)
        one, two = (workspace.get(use, count, info.dtype) for use in ("one", "two"))
        first.read_into(name, start, one)
        for checkpoint, other in others:
            checkpoint.read_into(other, start, two)
            if not same_bytes(one, two):
                return False
    return True


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} and {len(names) - 1} more"

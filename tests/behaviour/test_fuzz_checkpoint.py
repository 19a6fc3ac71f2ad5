"""Damaged states and files: either they are refused by a ValueError and nothing has changed, or they were harmless.

Damage is drawn at random: branches of the state that are missing, renamed, exchanged or replaced by anything that a
file could hold; bytes of a file that are cut off, flipped, inserted or overwritten.
"""

import copy
import io
import math
import os
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchbelay as tb
from helpers.several_optimizers import several
from helpers.small import EMA, SWINGING, attached, same, snapshot, train, with_batchnorm

pytestmark = pytest.mark.slow

Tree = dict[str, Any]
Path = tuple[str, ...]

KINDS: dict[str, dict[str, Any]] = {
    "several averages": {"method": SWINGING, "spectators": {"short": EMA}},
    "a memory": {"method": tb.methods.schedule_free(0.9)},
    "buffers": {"method": EMA, "buffers": "average"},
    "not begun": {"method": EMA, "start": 9},
    "initial weights": {"method": EMA, "keep_initial": True},
    "several optimizers": {"method": SWINGING, "spectators": {"short": EMA}},
    "several optimizers, buffers": {"method": tb.methods.swa(), "buffers": "average", "start": 2},
}


class Together:
    """Two optimizers that step together, the second one at every other step."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers, self._steps = optimizers, 0

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        self._steps += 1
        for optimizer in self._optimizers[: 1 + self._steps % 2]:
            optimizer.step()


def trained(kind: str) -> tuple[nn.Module, Any, tb.Belay]:
    model: nn.Module
    if kind.startswith("several optimizers"):
        model, optimizers, belay = several(**KINDS[kind], model=with_batchnorm())
        made: tuple[nn.Module, Any, tb.Belay] = (model, Together(optimizers), belay)
    else:
        made = attached(**KINDS[kind], model=with_batchnorm())
    train(*made[:2], 3)
    return made


SAVED = {kind: copy.deepcopy(trained(kind)[2].state_dict()) for kind in KINDS}

SHAPES = st.sampled_from([(), (1,), (5,), (5, 3), (3, 5), (0,), (5, 3, 1)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat])


def tensors() -> st.SearchStrategy[torch.Tensor]:
    plain = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, DTYPES)
    odd = st.sampled_from(
        [
            torch.ones(5, 3).to_sparse(),
            torch.ones(3, 5).t(),
            torch.ones(5, 3, device="meta"),
            torch.ones(1, 3).expand(5, 3),
            torch.full((5, 3), math.nan),
            nn.Parameter(torch.ones(5, 3)),
        ]
    )
    return plain | odd


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 5),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    tensors(),
    st.just(torch.float32),
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.sampled_from(["weights", "ages", "0.weight", "average", 3, None]), inner, max_size=3),
    ),
    max_leaves=4,
)


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Every branch of a state, the root last of all."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from places(branch, (*path, key))
    yield path


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Any]:
    """A kind of Belay and a state of it that has been damaged up to three times."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    state: Any = copy.deepcopy(SAVED[kind])
    for _ in range(draw(st.integers(1, 3))):
        here = list(places(state))
        path = draw(st.sampled_from(here))
        how = draw(st.sampled_from(["replace", "delete", "rename", "add", "exchange", "another's"]))
        if not path:
            if how == "replace":
                state = draw(JUNK)
            continue
        parent, key = at(state, path[:-1]), path[-1]
        if how == "replace":
            parent[key] = draw(JUNK)
        elif how == "delete":
            del parent[key]
        elif how == "rename":
            parent[draw(st.sampled_from(["weights", "0.weight", "other", 7]))] = parent.pop(key)
        elif how == "add":
            parent[draw(st.sampled_from(["other", "1.running_mean", 7, None]))] = draw(JUNK)
        elif how == "exchange":
            other = draw(st.sampled_from(here))
            if other and other[: len(path)] != path and path[: len(other)] != other:
                elsewhere = at(state, other[:-1])
                parent[key], elsewhere[other[-1]] = elsewhere[other[-1]], parent[key]
        else:
            stranger = SAVED[draw(st.sampled_from(sorted(KINDS)))]
            if path in set(places(stranger)):
                parent[key] = copy.deepcopy(at(stranger, path))
    return kind, state


def load_or_refuse(kind: str, state: Any, *, strict: bool = True) -> None:
    """Load; the only error may be a ValueError that changes nothing. If there is none, the training must go on."""
    model, optimizer, belay = trained(kind)
    before = snapshot(model, belay)
    weights = copy.deepcopy(model.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if strict else "ignore")
            belay.load_state_dict(state, strict=strict)
    except ValueError:
        assert same(snapshot(model, belay), before)
    assert same(model.state_dict(), weights)  # loading an average never writes to the model
    train(model, optimizer, 1, first=3)
    with belay.averaged():
        model.eval()(torch.ones(2, 3))
    model.train()
    belay.load_state_dict(copy.deepcopy(belay.state_dict()))


FUZZ = settings(
    max_examples=int(os.environ.get("TORCHBELAY_FUZZ", "150")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(damaged())
def test_a_damaged_state_is_refused_and_changes_nothing_or_was_harmless(case: tuple[str, Any]) -> None:
    load_or_refuse(*case)


@FUZZ
@given(damaged(), st.sampled_from(sorted(KINDS)))
def test_with_strict_false_too_and_into_a_belay_of_any_kind(case: tuple[str, Any], kind: str) -> None:
    load_or_refuse(kind, case[1], strict=False)


@FUZZ
@given(JUNK, st.booleans())
def test_anything_at_all_is_refused(state: Any, strict: bool) -> None:
    model, _, belay = attached(EMA)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"not the state of a Belay|damaged"):
        belay.load_state_dict(state, strict=strict)
    assert same(snapshot(model, belay), before)


def file_of(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


FILES = {kind: file_of(state) for kind, state in SAVED.items()}


@st.composite
def spoilt_files(draw: st.DrawFn) -> tuple[str, bytes]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    content = bytearray(FILES[kind])
    how = draw(st.sampled_from(["cut", "flip", "overwrite", "insert"]))
    where = draw(st.integers(0, len(content) - 1))
    if how == "cut":
        del content[where:]
    elif how == "flip":
        for offset in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
            content[offset] ^= 1 << draw(st.integers(0, 7))
    elif how == "overwrite":
        piece = draw(st.binary(min_size=1, max_size=64))
        content[where : where + len(piece)] = piece
    else:
        content[where:where] = draw(st.binary(min_size=1, max_size=8))
    return kind, bytes(content)


@FUZZ
@given(spoilt_files())
def test_a_damaged_file_is_refused_and_changes_nothing_or_was_harmless(case: tuple[str, bytes]) -> None:
    kind, content = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about pickles of another version
        try:
            state = torch.load(io.BytesIO(content), weights_only=True)
        except Exception:
            return  # torch has refused the file, with an error of its own: Belay was not asked to load anything
    load_or_refuse(kind, state)


def test_a_flipped_bit_inside_a_number_is_found_by_the_files_own_checksum() -> None:
    """torch.load ignores the checksum, and no loader can know which numbers are right."""
    content = bytearray(FILES["buffers"])
    weight = SAVED["buffers"]["averages"]["average"]["weights"]["0.weight"]
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
    content[content.index(weight.numpy().tobytes()) + 3] ^= 1
    changed = torch.load(io.BytesIO(content), weights_only=True)["averages"]["average"]["weights"]["0.weight"]
    assert (changed != weight).sum() == 1
    assert zipfile.ZipFile(io.BytesIO(content)).testzip() is not None

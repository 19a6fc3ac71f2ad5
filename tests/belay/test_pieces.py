"""Flat pieces of parameters: states are cut to them and put together again, and files fit any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchbelay as tb
from helpers.small import SWINGING, attached, train, with_batchnorm
from torchbelay.belay import modules, pieces
from torchbelay.belay.pieces import Piece, PieceModel


def whole_state() -> dict[str, Any]:
    """The state of a Belay with velocities, w0 and a spectator."""
    model, optimizer, belay = attached(SWINGING, keep_initial=True, spectators={"short": tb.Spring.ema(decay=0.5)})
    train(model, optimizer, 3)
    return belay.state_dict()


def shares(state: dict[str, Any], world: int) -> list[dict[str, Piece]]:
    """Even shares of each parameter; those of the last ranks may be small or empty."""
    shapes = {name: tuple(t.shape) for name, t in state["averages"]["average"]["weights"].items()}
    found: list[dict[str, Piece]] = []
    for rank in range(world):
        mine = {}
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            size = -(-count // world)
            start = min(rank * size, count)
            mine[name] = Piece(start, min(size, count - start), shape)
        found.append(mine)
    return found


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for average, saved in state["averages"].items():
        for kind in pieces.TENSORS:
            found |= {f"{average}/{kind}/{name}": t for name, t in saved.get(kind, {}).items()}
    return found


def saved_by(state: dict[str, Any], mine: dict[str, Piece]) -> dict[str, Any]:
    return pieces.cut(state, mine) | {"pieces": pieces.saved(mine)}


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (7, 2)])
def test_what_some_ranks_saved_is_cut_anew_for_others(before: int, after: int) -> None:
    state = whole_state()
    parts = [saved_by(state, mine) for mine in shares(state, before)]
    assert {"average/velocities1/0.weight", "average/initial/0.weight", "short/weights/2.bias"} <= tensors(state).keys()
    for mine in shares(state, after):
        new, expected = pieces.recut(parts, mine), pieces.cut(state, mine)
        assert "pieces" not in new
        assert tensors(new).keys() == tensors(expected).keys()
        for name, tensor in tensors(new).items():
            assert torch.equal(tensor, tensors(expected)[name]), name
        assert new["averages"]["average"]["ages"] == state["averages"]["average"]["ages"]
        assert new["step"] == 3


def test_pieces_of_a_state_are_its_numbers_in_order() -> None:
    state = whole_state()
    found = [tensors(pieces.cut(state, mine)) for mine in shares(state, 4)]
    for name, tensor in tensors(state).items():
        assert torch.equal(torch.cat([each[name] for each in found]), tensor.flatten()), name


def test_a_file_that_is_missing_and_other_shapes_are_refused() -> None:
    state = whole_state()
    parts = [saved_by(state, mine) for mine in shares(state, 3)]
    (mine,) = shares(state, 1)
    with pytest.raises(ValueError, match=r"hold a part of '0.weight' only"):
        pieces.recut(parts[:2], mine)
    with pytest.raises(ValueError, match="twice"):
        pieces.recut([*parts, parts[0]], mine)
    mine["2.bias"] = Piece(0, 4, (2, 2))
    with pytest.raises(ValueError, match=r"'2.bias' has the shape \(1,\) in the checkpoint, and \(2, 2\) here"):
        pieces.recut(parts, mine)
    with pytest.raises(ValueError, match=r"'2.bias' in the weights of average 'average' has the shape \(1,\)"):
        pieces.cut(state, mine)


def test_files_fit_any_number_of_ranks_and_replace_those_of_another(tmp_path: Path) -> None:
    state = whole_state()
    assert pieces.read(tmp_path, "average", 0, 1, shares(state, 1)[0]) is None
    for world in (3, 2):
        for rank, mine in enumerate(shares(state, world)):
            pieces.write(tmp_path / "new", "average", rank, world, saved_by(state, mine))
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == [
        "average_rank_0_of_2.pt",
        "average_rank_1_of_2.pt",
    ]
    for world in (2, 3):
        for rank, mine in enumerate(shares(state, world)):
            found = pieces.read(tmp_path / "new", "average", rank, world, mine)
            assert found is not None
            assert found["pieces"] == pieces.saved(mine)
            for name, tensor in tensors(found).items():
                assert torch.equal(tensor, tensors(pieces.cut(state, mine))[name]), name


def test_a_model_of_pieces_has_the_names_of_the_parameters_and_the_buffers_themselves() -> None:
    model = with_batchnorm()
    model.register_buffer("own", torch.ones(2), persistent=False)
    flat = {name: p.detach().flatten()[:2] for name, p in model.named_parameters()}
    found = PieceModel(model, flat)
    assert modules.named_parameters(found).keys() == flat.keys()
    assert all(modules.named_parameters(found)[name] is t for name, t in flat.items())
    assert modules.named_buffers(found).keys() == modules.named_buffers(model).keys()
    assert modules.persistent_buffers(found).keys() == modules.persistent_buffers(model).keys()
    for name, buffer in modules.named_buffers(found).items():
        assert modules.named_buffers(model)[name] is buffer
    model[1].running_mean = torch.full((5,), 7.0)  # another tensor in the slot is seen
    assert modules.named_buffers(found)["1.running_mean"][0] == 7.0


def test_both_planes_of_24_bits_are_cut_alike() -> None:
    model, optimizer, belay = attached(tb.Spring.ema(decay=0.5), bits=24)
    train(model, optimizer, 2)
    state = belay.state_dict()
    for mine in shares(state, 3):
        saved = pieces.cut(state, mine)["averages"]["average"]
        for name, high in saved["weights"].items():
            assert saved["weights_low"][name].shape == high.shape == (mine[name].numel,)

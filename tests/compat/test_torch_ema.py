"""`compat.torch_ema` against torch-ema itself, and what its documentation promises."""

import copy
import gc
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.random_settings import assert_close, decay, walk
from torchbelay.compat.torch_ema import ExponentialMovingAverage

DTYPES = [torch.float32, torch.float64, torch.complex64]


def weights(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in ((3, 4), (), (0, 2), (5,))]
    walk(tensors, generator)
    return [nn.Parameter(t, requires_grad=i % 3 != 1) for i, t in enumerate(tensors)]


@pytest.mark.parametrize("seed", range(100))
def test_numbers_are_those_of_torch_ema_with_checkpoints_exchanged_midway(seed: int) -> None:
    peer = pytest.importorskip("torch_ema").ExponentialMovingAverage
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    given = {"decay": decay(chance), "use_num_updates": chance.random() < 0.5}
    parameters = weights(*chance.sample(DTYPES, chance.randint(1, 3)))
    other = [p.detach().clone() for p in parameters]
    pairs = [(ExponentialMovingAverage(parameters, **given), peer(parameters, **given))]
    steps, exchange = chance.randint(2, 15), chance.randint(0, 2)
    for step in range(steps):
        walk([*parameters, *other], generator)
        source = chance.choice([None, parameters, other])
        for pair in pairs:
            for average in pair:
                average.update(None if source is None else iter(source))
            assert_close(pair[0].shadow_params, pair[1].shadow_params)
            assert pair[0].num_updates == pair[1].num_updates
        if step == exchange:
            mine, theirs = ExponentialMovingAverage(parameters, decay=0.3), peer(parameters, decay=0.3)
            mine.load_state_dict(pairs[0][1].state_dict())
            theirs.load_state_dict(pairs[0][0].state_dict())
            pairs.append((mine, theirs))
    for mine, theirs in pairs:
        assert mine.state_dict().keys() == theirs.state_dict().keys()
        with mine.average_parameters(other):
            averaged = [o.clone() for o in other]
        with theirs.average_parameters(other):
            assert_close(averaged, other)


def test_a_decay_of_one_stands_still_and_of_zero_copies() -> None:
    parameters = weights(torch.float32)
    still = ExponentialMovingAverage(parameters, decay=1.0, use_num_updates=False)
    copying = ExponentialMovingAverage(parameters, decay=0.0)
    first = [p.detach().clone() for p in parameters]
    walk(parameters, torch.Generator().manual_seed(1))
    still.update()
    copying.update()
    assert all(map(torch.equal, still.shadow_params, first))
    assert all(map(torch.equal, copying.shadow_params, parameters))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_16_bit_weights_is_float32_and_moves(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((4,), 1.0, dtype=dtype))
    ema = ExponentialMovingAverage([weight], decay=0.9999, use_num_updates=False)
    weight.data.fill_(2.0)
    for _ in range(100):
        ema.update()
    (average,) = ema.shadow_params
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((4,), 2 - 0.9999**100), rtol=1e-5, atol=0)
    ema.copy_to()
    assert weight.dtype == dtype
    assert torch.equal(weight, average.to(dtype))


def test_a_16_bit_checkpoint_of_torch_ema_loads_as_float32_and_ours_into_torch_ema() -> None:
    peer = pytest.importorskip("torch_ema").ExponentialMovingAverage
    weight = nn.Parameter(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    mine, theirs = (make([weight], decay=0.5) for make in (ExponentialMovingAverage, peer))
    mine.load_state_dict(theirs.state_dict())
    assert mine.shadow_params[0].dtype == torch.float32
    theirs.load_state_dict(mine.state_dict())
    assert theirs.shadow_params[0].dtype == torch.bfloat16
    assert torch.equal(mine.shadow_params[0], theirs.shadow_params[0].float())


def test_integers_are_copied() -> None:
    counter, mask, weight = torch.tensor(3), torch.tensor([True, False]), torch.zeros(2)
    ema = ExponentialMovingAverage([counter, weight, mask], decay=0.5, use_num_updates=False)
    counter.add_(4)
    mask.logical_not_()
    weight.fill_(2.0)
    ema.update()
    assert ema.shadow_params[0].item() == 7
    assert ema.shadow_params[2].tolist() == [False, True]
    assert ema.shadow_params[1].tolist() == [1.0, 1.0]


def test_weights_come_back_after_an_exception() -> None:
    weight = nn.Parameter(torch.ones(3))
    ema = ExponentialMovingAverage([weight], decay=0.5)
    weight.data.fill_(5.0)

    def fail_inside() -> None:
        with ema.average_parameters():
            assert weight.tolist() == [1.0] * 3
            raise KeyError("stopped")

    with pytest.raises(KeyError):
        fail_inside()
    assert weight.tolist() == [5.0] * 3


def test_what_was_stored_can_be_restored_twice_and_into_other_tensors() -> None:
    weight, other = nn.Parameter(torch.ones(3)), torch.zeros(3)
    ema = ExponentialMovingAverage([weight], decay=0.5)
    with pytest.raises(RuntimeError, match="store"):
        ema.restore()
    ema.store()
    weight.data.fill_(5.0)
    ema.restore()
    ema.restore(iter([other]))
    assert weight.tolist() == other.tolist() == [1.0] * 3
    assert not ema.collected_params[0].requires_grad


def test_a_deep_copy_follows_the_same_parameters_on_its_own() -> None:
    weight = nn.Parameter(torch.zeros(2))
    ema = ExponentialMovingAverage([weight], decay=0.5, use_num_updates=False)
    weight.data.fill_(4.0)
    twin = copy.deepcopy(ema)
    twin.update()
    assert twin.shadow_params[0].tolist() == [2.0, 2.0]
    assert ema.shadow_params[0].tolist() == [0.0, 0.0]


def test_a_pickled_average_goes_on_with_parameters_that_are_given() -> None:
    weight = nn.Parameter(torch.zeros(2))
    ema = ExponentialMovingAverage([weight], decay=0.5)
    weight.data.fill_(4.0)
    ema.update()
    twin = pickle.loads(pickle.dumps(ema))
    with pytest.raises(ValueError, match="no longer exist"):
        twin.update()
    for average in (ema, twin):
        average.update([weight])
    assert torch.equal(ema.shadow_params[0], twin.shadow_params[0])
    assert twin.num_updates == 2


def test_the_average_does_not_keep_its_model_alive() -> None:
    model = nn.Linear(2, 2)
    ema = ExponentialMovingAverage(model.parameters(), decay=0.5)
    state = ema.state_dict()
    del model
    gc.collect()
    with pytest.raises(ValueError, match="no longer exist"):
        ema.copy_to()
    ema.load_state_dict(state)  # as it is: no parameter says where to


def test_to_moves_and_casts_everything_but_integers() -> None:
    weight, counter = nn.Parameter(torch.zeros(2)), torch.tensor(3)
    ema = ExponentialMovingAverage([weight, counter], decay=0.5, use_num_updates=False)
    ema.store()
    ema.to(dtype=torch.float16)
    assert [t.dtype for t in [*ema.shadow_params, *ema.collected_params]] == [torch.float16, torch.int64] * 2
    weight.data.fill_(4.0)
    ema.update()
    assert ema.shadow_params[0].tolist() == [2.0, 2.0]
    ema.to(device="cpu")
    ema.to("meta")
    assert ema.shadow_params[0].device.type == "meta"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decay": 1.5}, "decay=1.5"),
        ({"num_updates": "7"}, "num_updates='7'"),
        ({"shadow_params": []}, "shadow_params has 0 tensors"),
        ({"shadow_params": (torch.zeros(2),)}, "list of tensors"),
        ({"collected_params": [1]}, "list of tensors"),
        ({"shadow_params": [torch.zeros(1)]}, r"shadow_params\[0\] has the shape \(1,\), and the average \(2,\)"),
        ({"collected_params": [torch.zeros(3)]}, r"collected_params\[0\] has the shape \(3,\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(change: dict, said: str) -> None:
    ema = ExponentialMovingAverage([torch.ones(2)], decay=0.5)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(ValueError, match=said):
        ema.load_state_dict(
            {"decay": 0.1, "num_updates": 9, "shadow_params": [torch.zeros(2)], "collected_params": None} | change
        )
    assert str(ema.state_dict()) == str(before)


def test_what_is_no_state_is_refused_with_what_it_lacks() -> None:
    ema = ExponentialMovingAverage([torch.ones(2)], decay=0.5)
    with pytest.raises(ValueError, match=r"^state_dict lacks 'decay', 'num_updates', 'shadow_params', 'coll.*'; give"):
        ema.load_state_dict({})
    state = ema.state_dict()
    del state["collected_params"]
    with pytest.raises(ValueError, match=r"^state_dict lacks 'collected_params'; give what state_dict\(\) of an Exp"):
        ema.load_state_dict(state)
    with pytest.raises(TypeError, match=r"^state_dict=NoneType is not a dict; give what"):
        ema.load_state_dict(None)
    assert ema.decay == 0.5


@pytest.mark.parametrize("decay", [-0.1, "0.9", None, torch.ones(2), float("nan")])
def test_a_decay_that_is_no_number_between_0_and_1_is_refused_by_name(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"decay=.* must be a number between 0 and 1"):
        ExponentialMovingAverage([], decay=decay)


def test_bad_arguments_are_refused_by_name() -> None:
    ema = ExponentialMovingAverage([torch.ones(2)], decay=0.5)
    with pytest.raises(ValueError, match="parameters has 2 tensors, and 1"):
        ema.update([torch.ones(2), torch.ones(2)])
    assert ema.num_updates == 0


@pytest.mark.parametrize("outputs", [1, 3])
def test_parameters_of_other_shapes_are_refused_before_anything_moves(outputs: int) -> None:
    def net(out: int) -> list[Tensor]:
        return list(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, out)).parameters())

    own, other = net(5), net(outputs)
    ema = ExponentialMovingAverage(own, decay=0.5)
    before = [[t.detach().clone() for t in some] for some in (ema.shadow_params, other)]
    said = rf"parameters\[2\] has the shape \({outputs}, 4\), and the average \(5, 4\); give some like those"
    for call in (ema.update, ema.copy_to, ema.store):
        with pytest.raises(ValueError, match=said):
            call(iter(other))
    with pytest.raises(ValueError, match=said), ema.average_parameters(other):
        pytest.fail("the block was entered")
    assert ema.collected_params is None
    ema.store()
    with pytest.raises(ValueError, match=said):
        ema.restore(other)
    for some, now in zip(before, (ema.shadow_params, other), strict=True):
        assert all(map(torch.equal, some, now))
    assert ema.num_updates == 0


def test_own_parameters_that_got_another_shape_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    ema = ExponentialMovingAverage([weight], decay=0.5)
    weight.data = torch.zeros(1)  # as some pruning does
    with pytest.raises(ValueError, match=r"parameters\[0\] has the shape \(1,\), and the average \(3,\)"):
        ema.update()
    assert ema.shadow_params[0].tolist() == [1.0] * 3
    assert ema.num_updates == 0

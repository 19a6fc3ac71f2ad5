"""`compat.diffusers` against diffusers itself, and what its documentation promises."""

import copy
import inspect
import pickle
import random
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.random_settings import assert_close, decay, walk
from torchbelay.compat.diffusers import EMAModel

DTYPES = [torch.float32, torch.float64]


def peer() -> Any:
    return pytest.importorskip("diffusers.training_utils").EMAModel


def weights(*dtypes: torch.dtype) -> list[Tensor]:
    """Parameters, some of them frozen, and a plain tensor."""
    tensors = [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in ((3, 4), (), (0, 2), (5,))]
    walk(tensors, torch.Generator().manual_seed(0))
    return [*(nn.Parameter(t, requires_grad=i % 3 != 1) for i, t in enumerate(tensors)), torch.ones(2)]


@pytest.mark.parametrize("seed", range(100))
def test_numbers_are_those_of_diffusers_with_checkpoints_exchanged_midway(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    given = {
        "decay": decay(chance),
        "min_decay": chance.choice([0.0, 0.0, 0.3]),
        "update_after_step": chance.choice([0, 0, 1, 5]),
        "use_ema_warmup": chance.random() < 0.5,
        "inv_gamma": chance.choice([1.0, 1, 3.5]),
        "power": chance.choice([2 / 3, 3 / 4, 1]),
    }
    parameters = weights(*chance.sample(DTYPES, chance.randint(1, 2)))
    other = [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters]
    flags = [chance.random() < 0.5 for _ in range(4)]
    pairs = [(EMAModel(parameters, foreach=flags[0], **given), peer()(iter(parameters), foreach=flags[1], **given))]
    steps, exchange = chance.randint(2, 15), chance.randint(0, 6)
    for step in range(steps):
        walk([*parameters, *other], generator)
        source = chance.choice([parameters, other])
        for mine, theirs in pairs:
            mine.step(iter(source))
            theirs.step(iter(source))
            assert_close(mine.shadow_params, theirs.shadow_params)
            assert mine.cur_decay_value == theirs.cur_decay_value
        if step == exchange:
            mine, theirs = EMAModel(parameters, foreach=flags[2]), peer()(parameters, foreach=flags[3])
            mine.load_state_dict(pairs[0][1].state_dict())
            theirs.load_state_dict(pairs[0][0].state_dict())
            pairs.append((mine, theirs))
    for mine, theirs in pairs:
        assert mine.state_dict().keys() == theirs.state_dict().keys()
        numbers = [{k: v for k, v in each.state_dict().items() if k != "shadow_params"} for each in (mine, theirs)]
        assert numbers[0] == numbers[1]
        copies = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
        mine.copy_to(copies[0])
        theirs.copy_to(copies[1])
        assert_close(*copies)


def test_attributes_and_arguments_are_those_of_diffusers() -> None:
    theirs = peer()
    assert list(inspect.signature(EMAModel).parameters) == list(inspect.signature(theirs).parameters)
    mine, other = (make([nn.Parameter(torch.ones(1))]) for make in (EMAModel, theirs))
    assert vars(mine).keys() == vars(other).keys()
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public <= {*dir(EMAModel)}
    for name in public - {"from_pretrained"}:
        assert list(inspect.signature(getattr(EMAModel, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_16_bit_weights_is_float32_and_moves(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((4,), 1.0, dtype=dtype))
    ema = EMAModel([weight], decay=0.9999, min_decay=0.9999)
    ema.step([weight])
    weight.data.fill_(2.0)
    for _ in range(100):
        ema.step([weight])
    (average,) = ema.shadow_params
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((4,), 2 - 0.9999**100), rtol=1e-5, atol=0)
    ema.copy_to([weight])
    assert torch.equal(weight, average.to(dtype))


def test_an_average_is_16_bit_if_asked_and_loads_as_what_it_replaces() -> None:
    weight = nn.Parameter(torch.zeros(2))
    ema = EMAModel([weight], decay=0.5, min_decay=0.5)
    ema.to(dtype=torch.bfloat16)
    for value in (0.0, 4.0):
        weight.data.fill_(value)
        ema.step([weight])
    assert ema.shadow_params[0].dtype == torch.bfloat16
    assert ema.shadow_params[0].tolist() == [2.0, 2.0]
    resumed = EMAModel([weight])
    resumed.load_state_dict(ema.state_dict())
    assert resumed.shadow_params[0].dtype == torch.float32
    assert resumed.shadow_params[0].tolist() == [2.0, 2.0]


def test_integers_are_copied_and_stay_integers() -> None:
    counter = torch.tensor(3)
    ema = EMAModel([counter], decay=0.5)
    ema.to(dtype=torch.float16)
    counter.add_(4)
    ema.step([counter])
    assert ema.shadow_params[0].dtype == torch.int64
    assert ema.shadow_params[0].item() == 7


def test_store_and_restore_take_any_list() -> None:
    ema = EMAModel([torch.zeros(2)])
    tensors = [nn.Parameter(torch.ones(3)), torch.tensor(4), torch.ones(2, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError, match="store"):
        ema.restore(tensors)
    ema.store(iter(tensors))
    for t in tensors:
        t.data.fill_(9)
    with pytest.raises(ValueError, match="parameters has 1 tensors, and 3"):
        ema.restore(tensors[:1])
    ema.restore(iter(tensors))
    assert [t.tolist() for t in tensors] == [[1.0] * 3, 4, [1.0] * 2]
    assert ema.temp_stored_params is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda ema: pickle.loads(pickle.dumps(ema))])
def test_copies_go_on_by_themselves(twin: Any) -> None:
    weight = nn.Parameter(torch.zeros(2))
    ema = EMAModel([weight], decay=0.5, min_decay=0.5)
    ema.step([weight])
    other = twin(ema)
    weight.data.fill_(4.0)
    other.step([weight])
    assert other.shadow_params[0].tolist() == [2.0, 2.0]
    assert ema.shadow_params[0].tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("foreach", [True, False])
def test_a_saved_average_loads_as_a_model_in_diffusers_and_here(tmp_path: Any, foreach: bool) -> None:
    theirs = peer()
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    given = {"decay": 0.77, "model_cls": UNet2DModel, "model_config": model.config, "foreach": foreach}
    mine, other = EMAModel(model.parameters(), **given), theirs(model.parameters(), **given)
    for _ in range(3):
        walk(model.parameters(), torch.Generator().manual_seed(5))
        mine.step(model.parameters())
        other.step(model.parameters())
    mine.save_pretrained(tmp_path / "mine")
    other.save_pretrained(tmp_path / "theirs")
    plain = UNet2DModel.from_pretrained(tmp_path / "mine")
    assert all(map(torch.equal, plain.parameters(), mine.shadow_params))
    for make in (EMAModel, theirs):
        for folder in ("mine", "theirs"):
            loaded = make.from_pretrained(tmp_path / folder, model_cls=UNet2DModel, foreach=foreach)
            assert (loaded.decay, loaded.optimization_step) == (0.77, 3)
            assert_close(loaded.shadow_params, mine.shadow_params)
            assert loaded.model_config["sample_size"] == 8


@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("foreach", [True, False])
def test_an_average_before_its_first_step_comes_back_and_goes_on(tmp_path: Any, foreach: bool) -> None:
    """The state of a network for text and images, whose configuration holds more than numbers."""
    theirs = peer()
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).eval()
    ema = EMAModel(
        model.parameters(), decay=0.9, foreach=foreach, model_cls=UNet2DConditionModel, model_config=model.config
    )
    ema.save_pretrained(tmp_path)
    loaded, other = (
        each.from_pretrained(tmp_path, model_cls=UNet2DConditionModel, foreach=foreach) for each in (EMAModel, theirs)
    )
    loaded.to("cpu")
    assert (loaded.optimization_step, loaded.decay, loaded.foreach) == (0, 0.9, foreach)
    assert loaded.model_cls is UNet2DConditionModel
    assert all(map(torch.equal, loaded.shadow_params, ema.shadow_params))
    plain = UNet2DConditionModel.from_pretrained(tmp_path).eval()
    given = torch.randn(1, 2, 8, 8), torch.tensor([3]), torch.randn(1, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(plain(*given).sample, model(*given).sample, rtol=0, atol=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        walk(model.parameters(), generator)
        for each in (ema, loaded, other):
            each.step(model.parameters())
    assert all(map(torch.equal, loaded.shadow_params, ema.shadow_params))
    assert_close(loaded.shadow_params, other.shadow_params)
    assert (loaded.optimization_step, loaded.cur_decay_value) == (3, other.cur_decay_value)


def test_saving_needs_the_model_class() -> None:
    with pytest.raises(ValueError, match="model_cls=None"):
        EMAModel([]).save_pretrained("nowhere")
    with pytest.raises(ValueError, match="model_config=None"):
        EMAModel([], model_cls=object).save_pretrained("nowhere")


def test_arguments_that_diffusers_has_outdated_still_work() -> None:
    model = nn.Linear(1, 1)
    with pytest.warns(FutureWarning) as caught:
        ema = EMAModel(model, max_value=0.8, min_value=0.1, device="cpu")
    assert len(caught) == 4
    with pytest.warns(FutureWarning, match=r"its parameters\(\)"):
        ema.step(model)
    assert (ema.decay, ema.min_decay, ema.use_ema_warmup) == (0.8, 0.1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decay": 1.5}, r"decay=1\.5"),
        ({"min_decay": "a"}, "min_decay='a'"),
        ({"optimization_step": 1.5}, "optimization_step"),
        ({"use_ema_warmup": 1}, "use_ema_warmup=1"),
        ({"shadow_params": torch.zeros(2)}, "list of tensors"),
        ({"shadow_params": []}, "shadow_params has 0 tensors, and 1 are averaged; load the state of"),
        ({"shadow_params": [torch.zeros(1)]}, r"shadow_params\[0\] has the shape \(1,\), and the average \(2,\); load"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(change: dict, said: str) -> None:
    ema = EMAModel([torch.ones(2)])
    before = copy.deepcopy(vars(ema))
    with pytest.raises(ValueError, match=said):
        ema.load_state_dict({"optimization_step": 9, "shadow_params": [torch.zeros(2)], **change})
    assert str(vars(ema)) == str(before)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state_dict=NoneType is not a dict; give what state_dict\(\) of an EMAModel"):
        EMAModel([torch.ones(2)]).load_state_dict(None)


def test_an_average_of_nothing_takes_the_state_of_any_model() -> None:
    ema = EMAModel([])
    ema.load_state_dict(EMAModel(nn.Linear(3, 2).parameters()).state_dict())
    assert [tuple(p.shape) for p in ema.shadow_params] == [(2, 3), (2,)]


@pytest.mark.parametrize("outputs", [1, 3])
def test_parameters_of_other_shapes_are_refused_before_anything_moves(outputs: int) -> None:
    def net(out: int) -> list[Tensor]:
        return list(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, out)).parameters())

    ema, other = EMAModel(net(5), decay=0.5, min_decay=0.5), net(outputs)
    before = [[t.detach().clone() for t in some] for some in (ema.shadow_params, other)]
    said = rf"parameters\[2\] has the shape \({outputs}, 4\), and the average \(5, 4\); give the parameters that"
    for call in (ema.step, ema.copy_to):
        with pytest.raises(ValueError, match=said):
            call(iter(other))
    for some, now in zip(before, (ema.shadow_params, other), strict=True):
        assert all(map(torch.equal, some, now))
    assert (ema.optimization_step, ema.cur_decay_value) == (0, None)
    ema.store(net(5))
    with pytest.raises(ValueError, match=rf"\({outputs}, 4\), and what was stored \(5, 4\); give those that were"):
        ema.restore(other)
    assert all(map(torch.equal, before[1], other))
    assert ema.temp_stored_params is not None


def test_bad_arguments_are_refused_by_name_and_nothing_moves() -> None:
    for name in ("decay", "min_decay"):
        with pytest.raises(ValueError, match=f"^{name}=2"):
            EMAModel([], **{name: 2})
    ema = EMAModel([torch.ones(2)])
    for call in (ema.step, ema.copy_to):
        with pytest.raises(ValueError, match="parameters has 0 tensors, and 1"):
            call([])
    assert ema.optimization_step == 0


def test_parameters_that_deepspeed_has_split_are_gathered_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(4))
    ema = EMAModel([weight])
    weight.ds_id = 0
    weight.data = torch.empty(0)

    @contextmanager
    def gathered(parameters: list[Tensor], modifier_rank: None):
        assert parameters == [weight]
        weight.data = torch.full((4,), 3.0)
        yield
        weight.data = torch.empty(0)

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=SimpleNamespace(GatheredParameters=gathered)))
    ema.step([weight])
    assert ema.shadow_params[0].tolist() == [3.0] * 4

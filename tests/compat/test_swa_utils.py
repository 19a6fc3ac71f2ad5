"""`compat.swa_utils` against torch's own module, and what its documentation promises."""

import copy
import inspect
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils as theirs

from helpers.random_settings import assert_close, decay, walk
from torchbelay.compat import swa_utils as ours
from torchbelay.compat.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Net(nn.Module):
    """Parameters of one or two dtypes, one of them tied and one frozen, and buffers."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, *, complex_too: bool = False, integers: bool = False
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4, dtype=dtype)
        self.outer = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.outer.weight = self.inner.weight
        self.empty = nn.Parameter(torch.zeros(0, 2, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones((), dtype=dtype), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4, dtype=dtype))
        if complex_too:
            self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        if integers:
            self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.outer(x)


def tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def largest(average: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """A function that is not linear and sees the count."""
    return torch.where(average.abs() > weight.abs(), average, weight) * (1 - 1 / (count + 2))


def largest_many(averages: list[Tensor], weights: list[Tensor], count: Tensor) -> None:
    assert len({(t.device, t.dtype) for t in averages + weights}) == 1
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(largest(average, weight, count))


RULES: dict[str, Callable[[Any, float], dict[str, Any]]] = {
    "default": lambda module, d: {},
    "swa": lambda module, d: {"avg_fn": module.get_swa_avg_fn()},
    "swa, lists": lambda module, d: {"multi_avg_fn": module.get_swa_multi_avg_fn()},
    "ema": lambda module, d: {"avg_fn": module.get_ema_avg_fn(d)},
    "ema, lists": lambda module, d: {"multi_avg_fn": module.get_ema_multi_avg_fn(d)},
    "any function": lambda module, d: {"avg_fn": largest},
    "any function, lists": lambda module, d: {"multi_avg_fn": largest_many},
}


@pytest.mark.parametrize("seed", range(100))
def test_numbers_are_those_of_torch_with_checkpoints_exchanged_midway(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rule, d = [*RULES][seed % len(RULES)], decay(chance)
    given = {"use_buffers": chance.random() < 0.5, "device": chance.choice([None, "cpu", torch.device("cpu")])}
    dtype, complex_too = chance.choice([torch.float32, torch.float64]), "any" not in rule and chance.random() < 0.3
    net = Net(dtype, complex_too=complex_too, integers=not given["use_buffers"])
    other = copy.deepcopy(net)

    def make(module: Any) -> Any:
        return module.AveragedModel(net, **RULES[rule](module, d), **given)

    pairs = [(make(ours), make(theirs))]
    steps, exchange = chance.randint(2, 15), chance.randint(0, 4)
    for step in range(steps):
        source = chance.choice([net, other])
        walk(tensors(source), generator)
        for mine, peer in pairs:
            mine.update_parameters(source)
            peer.update_parameters(source)
            # torch divides by the count in float32
            assert_close(tensors(mine.module), tensors(peer.module), loose="ema" not in rule)
            assert mine.n_averaged == peer.n_averaged
        if step == exchange:
            mine, peer = make(ours), make(theirs)
            mine.load_state_dict(pairs[0][1].state_dict())
            peer.load_state_dict(pairs[0][0].state_dict())
            pairs.append((mine, peer))
    for mine, peer in pairs:
        assert [*mine.state_dict()] == [*peer.state_dict()]
        x = torch.ones(2, 3, dtype=dtype)
        torch.testing.assert_close(mine(x), peer(x))


def test_an_ema_in_float32_is_torchs_bit_for_bit() -> None:
    net, generator = Net(), torch.Generator().manual_seed(0)
    mine, peer = (m.AveragedModel(net, multi_avg_fn=m.get_ema_multi_avg_fn(0.9)) for m in (ours, theirs))
    for _ in range(20):
        walk(tensors(net), generator)
        mine.update_parameters(net)
        peer.update_parameters(net)
    assert all(map(torch.equal, tensors(mine), tensors(peer)))


def test_names_and_arguments_are_those_of_torch() -> None:
    assert {*ours.__all__} == {*theirs.__all__}
    for name in theirs.__all__:
        mine, peer = getattr(ours, name), getattr(theirs, name)
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(peer).parameters)
    assert isinstance(AveragedModel(Net()), theirs.AveragedModel)
    assert list(inspect.signature(AveragedModel.update_parameters).parameters) == ["self", "model"]
    with pytest.raises(AssertionError, match="Only one of"):
        AveragedModel(Net(), avg_fn=largest, multi_avg_fn=largest_many)


@pytest.mark.parametrize("rule", [name for name in RULES if "any" not in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_averaged_in_float32(dtype: torch.dtype, rule: str) -> None:
    net = nn.Linear(8, 8, dtype=dtype)
    d, steps = 0.999, 60
    average = AveragedModel(net, **RULES[rule](ours, d))
    expected = net.weight.detach().double()
    generator = torch.Generator().manual_seed(0)
    for count in range(steps):
        walk(net.parameters(), generator)
        average.update_parameters(net)
        share = 1.0 if count == 0 else (1 - d if "ema" in rule else 1 / (count + 1))
        expected += share * (net.weight.detach().double() - expected)
    assert average.module.weight.dtype == dtype
    assert torch.equal(average.module.weight, expected.float().to(dtype)) or torch.allclose(
        average.module.weight.double(), expected, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-7
    )
    assert average(torch.ones(1, 8, dtype=dtype)).dtype == dtype


def test_16_bit_averages_move_by_steps_too_small_for_16_bits() -> None:
    net = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(net.weight, 1.0)
    averages = [m.AveragedModel(net, multi_avg_fn=m.get_ema_multi_avg_fn(0.9999)) for m in (ours, theirs)]
    for average in averages:
        average.update_parameters(net)
    nn.init.constant_(net.weight, 2.0)
    for average in averages:
        for _ in range(1000):
            average.update_parameters(net)
    assert averages[0].module.weight.item() == pytest.approx(2 - 0.9999**1000, rel=2**-9)
    assert averages[1].module.weight.item() == 1.0  # torch's has not moved


@pytest.mark.parametrize("write", ["load", "data", "no_grad"])
def test_what_is_written_into_a_16_bit_average_counts(write: str) -> None:
    net = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(net.weight, 1.0)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for value in (1.0, 1.0078125):
        nn.init.constant_(net.weight, value)
        average.update_parameters(net)
    new = torch.full((1, 1), 5.0, dtype=torch.bfloat16)
    if write == "load":
        average.load_state_dict({"n_averaged": torch.tensor(7), "module.weight": new})
    elif write == "data":
        average.module.weight.data.copy_(new)
    else:
        with torch.no_grad():
            average.module.weight.copy_(new)
    nn.init.constant_(net.weight, 7.0)
    average.update_parameters(net)
    assert average.module.weight.item() == 6.0


def test_a_16_bit_average_survives_a_visit_of_other_values() -> None:
    net = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(net.weight, 1.0)
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99)) for _ in range(2)]
    for average in averages:
        average.update_parameters(net)
    nn.init.constant_(net.weight, 1.0078125)  # the next bfloat16 number
    for _ in range(120):
        for average in averages:
            average.update_parameters(net)
        kept = averages[0].module.weight.data.clone()  # swapped out and back, as for a validation
        averages[0].module.weight.data.copy_(net.weight.data)
        averages[0].module.weight.data.copy_(kept)
    assert averages[0].module.weight.item() == averages[1].module.weight.item() == 1.0078125


def test_integer_buffers_are_copied_and_no_function_sees_them() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = []

    def note(average: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        seen.append(average.dtype)
        return average

    for given in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": note}):
        average = AveragedModel(net, use_buffers=True, **given)
        for _ in range(3):
            net(torch.randn(4, 2))
            average.update_parameters(net)
        assert average.module[1].num_batches_tracked == net[1].num_batches_tracked
    assert {*seen} == {torch.float32}


def test_a_model_with_other_tensors_is_refused_before_anything_moves() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(net)
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(ValueError, match=r"model\.parameters\(\) has 2 tensors, and 4"):
        average.update_parameters(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"model\.buffers\(\) has 0 tensors, and 3"):
        average.update_parameters(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert str(average.state_dict()) == str(before)
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        get_ema_multi_avg_fn(1.5)


class Buffered(nn.Linear):
    """A layer with a buffer of so many numbers, as those that grow."""

    def __init__(self, outputs: int, size: int) -> None:
        super().__init__(4, outputs)
        self.register_buffer("memory", torch.arange(float(size)))


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("updates", [0, 2])
@pytest.mark.parametrize(
    ("outputs", "size", "said"),
    [
        (1, 5, r"model\.parameters\(\)\[0\] has the shape \(1, 4\), and the average \(5, 4\); give a model with"),
        (3, 5, r"model\.parameters\(\)\[0\] has the shape \(3, 4\), and the average \(5, 4\); give a model with"),
        (5, 1, r"model\.buffers\(\)\[0\] has the shape \(1,\), and the average \(5,\); give a model with"),
        (5, 3, r"model\.buffers\(\)\[0\] has the shape \(3,\), and the average \(5,\); give a model with"),
    ],
)
def test_a_model_of_other_shapes_is_refused_before_anything_moves(
    outputs: int, size: int, said: str, updates: int, use_buffers: bool
) -> None:
    net = Buffered(5, 5)
    average = AveragedModel(net, use_buffers=use_buffers)
    for _ in range(updates):
        average.update_parameters(net)
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(ValueError, match=said):
        average.update_parameters(Buffered(outputs, size))
    after = average.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda average: pickle.loads(pickle.dumps(average))])
def test_deep_copies_and_pickled_ones_go_on_alike(twin: Any, dtype: torch.dtype, rule: str) -> None:
    net, generator = Net(dtype), torch.Generator().manual_seed(0)
    average = AveragedModel(net, use_buffers=True, **RULES[rule](ours, 0.9))
    for _ in range(4):
        walk(tensors(net), generator)
        average.update_parameters(net)
    other = twin(average)
    walk(tensors(net), generator)
    other.update_parameters(net)
    assert other.n_averaged == average.n_averaged + 1
    average.update_parameters(net)
    assert all(map(torch.equal, tensors(average), tensors(other)))


@pytest.mark.parametrize("write", [lambda n: n.zero_(), lambda n: n.data.zero_()])
def test_a_counter_that_is_reset_begins_anew(write: Callable[[Tensor], Tensor]) -> None:
    net = Net()
    average = AveragedModel(net)
    for _ in range(3):
        walk(tensors(net), torch.Generator().manual_seed(3))
        average.update_parameters(net)
    write(average.n_averaged)
    average.update_parameters(net)
    assert average.n_averaged == 1
    assert all(map(torch.equal, average.module.parameters(), net.parameters()))


def test_the_model_and_its_average_may_be_cast_moved_and_laid_out_anew() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = net[0].weight.detach().double().clone()
    for step, change in enumerate((None, net.double, average.double, net.half, average.bfloat16, average.float)):
        if change is not None:
            change()
        net.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
        walk(net.parameters(), torch.Generator().manual_seed(step))
        average.update_parameters(net)
        expected += (0.5 if step else 1.0) * (net[0].weight.detach().double() - expected)
    torch.testing.assert_close(average.module[0].weight.double(), expected, rtol=0, atol=0.02)


@pytest.mark.thorough
def test_a_compiled_or_wrapped_model_may_be_given() -> None:
    net = Net()
    average = AveragedModel(net)
    average.update_parameters(nn.DataParallel(net))
    average.update_parameters(torch.compile(net))
    assert average.n_averaged == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_in_inference_mode(dtype: torch.dtype) -> None:
    net = Net(dtype)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.inference_mode():
        average.update_parameters(net)
        average.update_parameters(net)
        inside = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            inside.update_parameters(net)
    average.update_parameters(net)
    average.update_parameters(net)
    assert (int(average.n_averaged), int(inside.n_averaged)) == (4, 3)


def test_a_function_that_fails_leaves_the_count_alone() -> None:
    net = Net(torch.bfloat16)

    def fail(*_: Any) -> Tensor:
        raise KeyError("stopped")

    average = AveragedModel(net, avg_fn=fail)
    average.update_parameters(net)
    with pytest.raises(KeyError):
        average.update_parameters(net)
    assert average.n_averaged == 1


def test_our_functions_work_in_torchs_class_and_torchs_in_ours() -> None:
    net, generator = Net(integers=True), torch.Generator().manual_seed(0)
    for rule in ("swa", "swa, lists", "ema", "ema, lists"):
        mine = ours.AveragedModel(net, **RULES[rule](theirs, 0.7))
        peer = theirs.AveragedModel(net, **RULES[rule](ours, 0.7))
        for _ in range(4):
            walk(tensors(net), generator)
            mine.update_parameters(net)
            peer.update_parameters(net)
        assert_close(tensors(mine), tensors(peer))


def test_batch_statistics_of_the_average_are_computed_by_update_bn() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(net)
    average.update_parameters(net)
    x = torch.randn(64, 2)
    ours.update_bn([x[:32], x[32:]], average)
    with torch.no_grad():
        torch.testing.assert_close(average.module[1].running_mean, net[0](x).mean(0))

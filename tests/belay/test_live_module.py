"""`belay.module()`: a module that is the average, step by step, without a second copy of the weights."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchbelay as tb
from helpers import seams
from helpers.live import assert_is, output, shared, shares_average
from helpers.operations import Memory
from helpers.small import (
    BELAY,
    EMA,
    SWINGING,
    WHERE,
    attached,
    batch,
    mlp,
    same,
    snapshot,
    train,
    values,
    with_batchnorm,
)
from helpers.zoo import ZOO, Transformer

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ema": (EMA, {}),
    "belay": (BELAY, {}),
    "with velocities": (SWINGING, {}),
    "lagged": (tb.Spring(k=0.2, m1=float("inf"), m2=1.0), {}),
    "lookahead": (tb.methods.lookahead(k=3), {}),
    "warming up": (tb.methods.ema(0.9, warmup="ratio"), {}),
    "schedule-free": (tb.methods.schedule_free(), {}),
    "every third step": (EMA, {"every": 3}),
    "from step 2 on": (EMA, {"start": 2}),
    "in float64": (EMA, {"dtype": torch.float64}),
    "in host memory": (EMA, {"device": "cpu"}),
    "guarded": (EMA, {"on_nonfinite": "skip"}),
    "reference": (BELAY, {"impl": "reference"}),
    "kernels": (BELAY, {"impl": "triton"}),
    "averaged buffers": (EMA, {"buffers": "average"}),
}
every_option = pytest.mark.parametrize(("method", "options"), OPTIONS.values(), ids=OPTIONS)


@every_option
def test_after_every_step_it_is_the_average(method: Any, options: dict[str, Any]) -> None:
    model, optimizer, belay = attached(method, model=with_batchnorm(), spectators={"short": EMA}, **options)
    made, short = belay.module(), belay.module("short")
    for step in range(6):
        train(model, optimizer, 1, first=step)
        assert_is(made, belay)
        assert_is(short, belay, "short")
    if "dtype" not in options:
        assert shares_average(made, belay)
        assert shares_average(short, belay, "short")


@pytest.mark.parametrize("kind", [tb.optim.AdamW, tb.optim.SGD], ids=lambda kind: kind.__name__)
def test_in_one_pass_with_the_optimizer_it_is_the_average_too(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(WHERE)
    optimizer = kind(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, BELAY, impl="triton")
    made = belay.module()
    for step in range(3):
        train(model, optimizer, 1, first=step)
        assert "in one pass" in repr(belay)
        assert_is(made, belay)
    assert shares_average(made, belay)
    loss = made(batch(0).to(WHERE).requires_grad_()).sum()
    train(model, optimizer, 1, first=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "bfloat16"])
def test_of_every_kind_of_model_it_is_the_average_and_computes_like_it(name: str, dtype: torch.dtype | None) -> None:
    animal = ZOO[name]
    if dtype is not None and name in ("convolutional", "complex", "mixed"):
        pytest.skip("torch has no such layers in bfloat16")
    model = animal.model(dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    assert type(made) is type(model)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        animal.loss(model, animal.batch(step)).backward()
        optimizer.step()
        assert_is(made, belay)
    model.eval()
    with torch.no_grad():
        found = animal.loss(made, animal.batch(9))
        with belay.averaged():
            assert torch.equal(animal.loss(model, animal.batch(9)), found)


def test_its_numbers_are_those_of_torchs_averaged_model() -> None:
    model, optimizer, belay = attached(EMA)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)
    made = belay.module()
    for step in range(5):
        train(model, optimizer, 1, first=step)
        theirs.update_parameters(model)
        assert same(values(made), values(theirs.module))


# What it is ----------------------------------------------------------------------------------------------------------


def test_it_is_in_eval_mode_without_gradients_and_has_a_switch_of_its_own() -> None:
    model, _, belay = attached(EMA, model=with_batchnorm())
    made = belay.module()
    assert model.training
    assert not any(each.training for each in made.modules())
    assert not any(p.requires_grad for p in made.parameters())
    made.train()
    model.eval()
    assert all(each.training for each in made.modules())
    made.eval()
    model.train()
    assert not made[1].training
    assert model[1].training


def test_tied_weights_stay_tied() -> None:
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, dtype=torch.float64)  # a copy, so that ties are not a matter of memory
    made = belay.module()
    assert made.head.weight is made.embed.weight
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()
    assert made.head.weight is made.embed.weight
    assert_is(made, belay)


def test_what_is_not_averaged_is_the_models_own_memory() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([model[2].weight, model[2].bias], lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if name.endswith("weight") else None)
    made = belay.module()
    train(model, optimizer, 2)
    for own, other in ((made[0].weight, model[0].weight), (made[0].bias, model[0].bias), (made[2].bias, model[2].bias)):
        assert own is not other
        assert shared(own, other)
    assert shares_average(made, belay)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert_is(made, belay)


def test_a_wrapped_model_gives_a_module_of_the_models_own_class() -> None:
    inner = nn.Sequential(torch.compile(nn.Linear(3, 4), backend="eager"), nn.Tanh(), nn.Linear(4, 1))
    model = nn.DataParallel(torch.compile(inner, backend="eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    assert type(made) is nn.Sequential
    assert [type(each) for each in made] == [nn.Linear, nn.Tanh, nn.Linear]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert_is(made, belay)
    assert shares_average(made, belay)


def test_of_one_average_there_may_be_several_and_each_is_its_own() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    one, other = belay.module(), belay.module()
    assert one is not other
    one.train()
    assert not other.training
    train(model, optimizer, 2)
    assert_is(one, belay)
    assert_is(other, belay)
    one[1].running_mean.fill_(9.0)
    assert_is(other, belay)


def test_unknown_names_are_refused() -> None:
    _, _, belay = attached(EMA)
    for use in (belay.module, belay.tensors):
        with pytest.raises(ValueError, match="name='shrot' is no average; choose one of 'average'"):
            use("shrot")


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 0), (torch.bfloat16, 2), (torch.float64, 0)], ids=str)
def test_it_takes_no_memory_for_weights_if_dtypes_agree(dtype: torch.dtype, kept: int) -> None:
    """As docs/memory.md has it. For 16-bit weights, whose average is in float32, it has a copy in 16 bits."""
    count = 1000
    model = nn.ParameterList([nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(count // 50)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    belay = tb.Belay(model, optimizer, EMA)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with Memory() as memory:
        made = belay.module()
    assert memory.now() == memory.peak == kept * count
    assert_is(made, belay)
    with Memory() as memory:
        optimizer.step()
    assert memory.now() <= 400
    if dtype is torch.float32:
        assert memory.peak == 0
    assert_is(made, belay)


def test_an_average_that_somebody_holds_is_copied_by_averaged_and_not_traded() -> None:
    """4 bytes per weight inside the block; as soon as nobody holds it, weights and average trade again."""
    count = 1000
    model = nn.ParameterList([nn.Parameter(torch.ones(50)) for _ in range(count // 50)])
    belay = tb.Belay(model, None, EMA)
    holders: dict[str, Callable[[], Any]] = {
        "a module": belay.module,
        "a part of a module": lambda: list(belay.module().parameters())[3],
        "a mapping": belay.tensors,
        "a tensor": lambda: belay.tensors()["7"],
        "a view": lambda: belay.tensors()["7"][2:4],
        "an array": lambda: belay.tensors()["7"].numpy(),
    }
    for what, hold in holders.items():
        held = hold()
        with Memory() as memory, belay.averaged():
            assert memory.now() == 4 * count, what
        del held
        with Memory() as memory, belay.averaged():
            assert memory.now() == 0, what


def test_a_module_that_is_dropped_costs_nothing_more() -> None:
    model, optimizer, belay = attached(EMA, model=mlp(torch.bfloat16))
    made = belay.module()
    gone = weakref.ref(made)
    del made
    assert gone() is None  # at once, without the garbage collector
    with Memory() as memory:
        train(model, optimizer, 1)
    assert memory.now() < 2000
    assert not seams.live_modules(belay)


def test_a_belay_and_its_module_are_freed_at_once_when_both_are_dropped() -> None:
    """No cycle keeps tensors until the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer, belay = attached(EMA)
        made, tensors = belay.module(), belay.tensors()
        train(model, optimizer, 1)
        with belay.averaged():
            pass
        gone = [weakref.ref(each) for each in (belay, made, tensors, model)]
        belay.detach()
        del model, optimizer, belay, made, tensors
        assert [each() for each in gone] == [None] * 4
    finally:
        gc.enable()


def test_a_part_of_it_that_somebody_holds_goes_on_following() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    first, norm = (part := belay.module())[0], part[1]
    del part
    train(model, optimizer, 2)
    model.double()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1, first=2)
    exported = belay.average_state_dict()
    assert same(first.weight.detach(), exported["0.weight"])
    assert same(norm.running_mean, exported["1.running_mean"])


# It follows ---------------------------------------------------------------------------------------------------------


def test_it_follows_reset_and_loaded_states() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), buffers="average")
    made = belay.module()
    train(model, optimizer, 2)
    state = copy.deepcopy(belay.state_dict())
    train(model, optimizer, 2, first=2)
    belay.load_state_dict(state)
    assert_is(made, belay)
    assert same(made[0].weight.detach(), state["averages"]["average"]["weights"]["0.weight"])
    belay.reset()
    assert_is(made, belay)
    assert same(made[0].weight.detach(), model[0].weight.detach())
    assert not shared(made[0].weight, model[0].weight)
    assert shares_average(made, belay)


def test_it_follows_changes_of_mind_and_states_that_ride_in_the_optimizer() -> None:
    model = with_batchnorm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, EMA, save_with_optimizer=True)
    made = belay.module()
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    before = values(made)
    belay.change(tb.methods.swa())
    assert_is(made, belay)
    train(model, optimizer, 2, first=2)
    assert_is(made, belay)
    assert shares_average(made, belay)
    belay.change(EMA)
    optimizer.load_state_dict(state)
    assert_is(made, belay)
    assert same(made[0].weight.detach(), before["0.weight"])
    other, _, _ = attached(EMA, model=with_batchnorm(seed=3))
    saved = tb.Belay(other, None, tb.methods.ema(0.5)).state_dict()
    with pytest.warns(tb.BelayWarning):
        belay.load_state_dict(saved, strict=False)
    assert_is(made, belay)
    assert same(made[0].weight.detach(), other[0].weight.detach())


def test_before_the_average_begins_it_has_the_models_weights() -> None:
    model, optimizer, belay = attached(EMA, start=2)
    made, tensors = belay.module(), belay.tensors()
    before = copy.deepcopy(belay.state_dict())
    for step in range(5):
        assert_is(made, belay)
        assert shared(made[0].weight, model[0].weight) is (step < 2)
        assert same({name: t.clone() for name, t in tensors.items()}, dict(belay.average_state_dict()))
        assert len(tensors) == 4
        train(model, optimizer, 1, first=step)
    belay.load_state_dict(before)  # of a time before it began
    assert shared(made[0].weight, model[0].weight)
    assert_is(made, belay)


def test_it_follows_a_model_that_is_cast_laid_out_anew_or_given_other_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()

    def step() -> None:
        optimizer.zero_grad()
        p = model[0].weight
        model(torch.randn(4, 3, 5, 5).to(p.dtype)).square().mean().backward()
        optimizer.step()
        assert_is(made, belay)

    step()
    model.to(memory_format=torch.channels_last)
    step()
    assert shares_average(made, belay)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        step()
        step()
    assert shares_average(made, belay)
    model[0].weight.data = model[0].weight.data.clone()
    step()
    assert shares_average(made, belay)


def test_a_module_that_the_user_casts_is_a_copy_and_follows_and_shares_again_when_dtypes_agree() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm().bfloat16())
    made = belay.module()
    for step, dtype in enumerate((torch.float64, torch.float16, torch.float32, torch.bfloat16)):
        made.to(dtype)
        train(model, optimizer, 1, first=step)
        weights = belay.tensors()
        for name, p in made.named_parameters():
            assert same(p.detach(), weights[name].to(dtype)), (name, dtype)
            assert shared(p, weights[name]) is (dtype is torch.float32)
        assert same(made[1].running_mean, model[1].running_mean.to(dtype))
        del weights


def test_a_module_whose_tensors_the_user_replaced_follows_again_after_the_next_step() -> None:
    model, optimizer, belay = attached(EMA)
    made = belay.module()
    made.load_state_dict({name: torch.zeros_like(t) for name, t in made.state_dict().items()}, assign=True)
    train(model, optimizer, 1)
    assert_is(made, belay)
    assert shares_average(made, belay)
    made.to(memory_format=torch.channels_last)
    made[2] = nn.Identity()  # what the user has taken out stays out
    train(model, optimizer, 1, first=1)
    assert isinstance(made[2], nn.Identity)
    assert same(made[0].weight.detach(), belay.average_state_dict()["0.weight"])


@pytest.mark.usefixtures("skipping")
def test_a_skipped_step_and_one_that_leaves_bad_weights_leave_it_as_it_is() -> None:
    model = with_batchnorm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    belay = tb.Belay(model, optimizer, EMA, on_nonfinite="skip")
    made = belay.module()
    train(model, optimizer, 2)
    before = values(made)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())  # as GradScaler does
    optimizer.step()
    assert same(values(made), before)
    optimizer.found_inf = torch.zeros(())
    model[0].weight.grad.fill_(float("nan"))
    optimizer.step()
    assert same(values(made), before)
    assert belay.step == 2


def test_steps_by_hand_under_inference_mode_are_followed_too() -> None:
    model = mlp(torch.bfloat16)
    belay = tb.Belay(model, None, EMA)
    with torch.inference_mode():
        made = belay.module()
        belay.before_step()
        for p in model.parameters():
            p.add_(1.0)
        belay.after_step()
    assert not any(t.is_inference() for t in made.parameters())
    assert_is(made, belay)
    belay.before_step()
    belay.after_step()
    assert_is(made, belay)


def test_after_detach_it_stays_what_the_average_is_and_copy_to_model_does_not_touch_it() -> None:
    model, optimizer, belay = attached(EMA)
    made = belay.module()
    train(model, optimizer, 2)
    before = values(made)
    belay.copy_to_model()
    assert same(values(model), before)
    assert not shared(made[0].weight, model[0].weight)
    belay.detach()
    train(model, optimizer, 2, first=2)
    assert same(values(made), before)
    assert_is(made, belay)


def test_it_follows_although_the_belay_has_been_dropped() -> None:
    """The optimizer keeps the averages alive."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = tb.Belay(model, optimizer, EMA).module()
    twin, twin_optimizer = copy.deepcopy(model), None
    gc.collect()
    train(model, optimizer, 3)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    belay = tb.Belay(twin, twin_optimizer, EMA)
    train(twin, twin_optimizer, 3)
    assert_is(made, belay)


# Beside averaged() ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("when", ["before", "inside"])
def test_inside_averaged_it_stays_what_it_is(dtype: torch.dtype, when: str) -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm().to(dtype), spectators={"short": EMA})
    train(model, optimizer, 3)
    made = {name: belay.module(name) for name in ("average", "short")} if when == "before" else {}
    before, exported = snapshot(model, belay), belay.average_state_dict()
    for name in ("average", "short"):
        with belay.averaged(name):
            made = made or {name: belay.module(name) for name in ("average", "short")}
            assert same(values(made["average"]), dict(exported))
            assert_is(made["average"], belay)
            assert_is(made["short"], belay, "short")
            assert same(belay.state_dict(), before["belay"])
        assert same(snapshot(model, belay), before)
        assert same(values(made["average"]), dict(exported))
    train(model, optimizer, 1, first=3)
    assert_is(made["average"], belay)
    assert_is(made["short"], belay, "short")


def test_weights_that_it_shares_with_the_model_are_the_models_own_inside_averaged_too() -> None:
    """Of another average, which averages them, of the same Belay or of another one."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, lambda name, p: EMA if name == "0.weight" else None, spectators={"all": EMA})
    other = tb.Belay(model, optimizer, EMA)
    later = tb.Belay(model, optimizer, EMA, start=10)
    made, begins_later, tensors = belay.module(), later.module(), later.tensors()
    train(model, optimizer, 2)
    own = values(model)
    for block in (belay.averaged("all"), other.averaged()):
        with block:
            assert not same(values(model), own)
            assert same(values(begins_later), own)
            assert same({name: t.clone() for name, t in tensors.items()}, own)
            assert same(values(made) | {"0.weight": own["0.weight"]}, own)
            assert_is(made, belay)
            assert not shared(made[2].bias, model[2].bias)
        assert shared(made[2].bias, model[2].bias)
    train(model, optimizer, 1, first=2)
    assert_is(made, belay)


def test_a_module_that_is_made_inside_averaged_of_another_average_is_right_after_it() -> None:
    """What it shares with the model lies elsewhere inside the block."""
    for entered in ("all", "average"):
        model = with_batchnorm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        belay = tb.Belay(model, optimizer, lambda name, p: EMA if name[0] == "0" else None, spectators={"all": EMA})
        train(model, optimizer, 2)
        with belay.averaged(entered):
            made = {name: belay.module(name) for name in ("average", "all")}
            torch.optim.swa_utils.update_bn([batch(1), batch(2)], model)
            assert_is(made["average"], belay, buffers=entered == "all")
        for name in ("average", "all"):
            assert_is(made[name], belay, name)
        assert shared(made["average"][3].bias, model[3].bias)
        train(model, optimizer, 1, first=2)
        for name in ("average", "all"):
            assert_is(made[name], belay, name)


def test_steps_look_closer_only_if_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer, belay = attached(EMA, model=with_batchnorm().to(dtype), buffers="average")
        made = belay.module()
        train(model, optimizer, 1, first=9)  # the first step forms cohorts
        looks = seams.looks(monkeypatch)
        train(model, optimizer, 3)
        assert looks.count == 0
        made.double()
        train(model, optimizer, 3, first=3)
        assert looks.count == 1
        assert_is(made.to(dtype), belay, buffers=False)


def test_buffers_that_update_bn_found_inside_averaged_become_the_modules_until_the_next_step() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    made = belay.module()
    train(model, optimizer, 2)
    with belay.averaged():
        torch.optim.swa_utils.update_bn([batch(1), batch(2)], model)
    assert_is(made, belay)
    assert not same(made[1].running_mean, model[1].running_mean)
    train(model, optimizer, 1, first=2)
    assert same(made[1].running_mean, model[1].running_mean)


# Graphs --------------------------------------------------------------------------------------------------------------


def test_the_graph_of_a_student_lives_on_whatever_is_done_with_the_module() -> None:
    model, optimizer, belay = attached(EMA)
    made = belay.module()
    train(model, optimizer, 1)
    loss = (model(batch(5)) - made(batch(5))).square().mean()
    for _ in range(2):
        output(made, batch(6))
        belay.module()
        belay.tensors()
        belay.average_state_dict()
    loss.backward()  # averaged() would have written to the weights, and torch would refuse


def test_the_graph_of_a_loss_of_the_module_itself_is_refused_after_a_step_as_torch_always_does() -> None:
    """A graph through the module to its input needs the weights, and these have moved."""
    for options in ({}, {"impl": "triton"}, {"dtype": torch.float64}):
        model, optimizer, belay = attached(EMA, **options)
        made = belay.module()
        train(model, optimizer, 1)
        for _ in range(2):  # also after the module was bound anew
            x, again = (batch(3).to(next(made.parameters()).device).requires_grad_() for _ in range(2))
            made(x).sum().backward()
            assert x.grad is not None
            loss = made(again).sum()
            train(model, optimizer, 1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            model.to(memory_format=torch.channels_last)
            belay.reset()


# Plain modules -------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_are_plain_modules_that_no_step_touches() -> None:
    model, optimizer, belay = attached(EMA, model=with_batchnorm())
    made = belay.module()
    train(model, optimizer, 2)
    before = values(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    copies = [copy.deepcopy(made), pickle.loads(pickle.dumps(made)), torch.load(file, weights_only=False)]
    train(model, optimizer, 2, first=2)
    assert not same(values(made), before)
    for each in copies:
        assert type(each) is type(model)
        assert same(values(each), before)
        assert vars(each).keys() == vars(model).keys()
    with_batchnorm().load_state_dict(made.state_dict(), strict=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_compiled_it_is_not_compiled_again_after_steps() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, optimizer, belay = attached(EMA, model=with_batchnorm(), start=2)
    made = belay.module()
    compiled = torch.compile(made, backend="eager")
    seen = []
    for step in range(6):
        with torch.no_grad():
            assert torch.equal(compiled(batch(0)), made(batch(0)))
        seen.append(int(counters["stats"]["unique_graphs"]))
        train(model, optimizer, 1, first=step)
        with belay.averaged():
            pass
    belay.reset()
    output(compiled, batch(0))
    assert seen == [1] * 6
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# Models as they are --------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_deep_copied_is_refused_with_the_cure() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle '_thread.lock' object")

    model, optimizer, belay = attached(EMA, model=nn.Sequential(Stubborn(3, 1)))
    before = snapshot(model, belay)
    match = (
        r"deep copy of the model, Sequential, .*thread.lock.*; use averaged\(\), or, .*functional_call\(model, dict\(b"
    )
    with pytest.raises(RuntimeError, match=match):
        belay.module()
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 2)
    found = torch.func.functional_call(model, dict(belay.tensors()), batch(0))
    with belay.averaged():
        assert torch.equal(model(batch(0)), found)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_weights_that_are_computed_before_every_forward_are_those_of_the_average(norm: Any) -> None:
    """torch refuses to copy such a model once it has been called: the weight that it keeps has a graph."""
    model, optimizer, belay = attached(EMA, model=nn.Sequential(norm(nn.Linear(3, 4)), nn.Linear(4, 1)))
    train(model, optimizer, 2)
    made = belay.module()
    for step in range(2, 4):
        train(model, optimizer, 1, first=step)
        assert_is(made, belay)
        with torch.no_grad(), belay.averaged():
            model.eval()
            assert torch.equal(made(batch(0)), model(batch(0)))
            model.train()


def test_a_model_that_holds_its_own_optimizer_belay_and_module() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            self.belay = tb.Belay(self, self.optimizer, EMA)
            self.teacher = self.belay.module()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = Trained()
    assert model.teacher.belay is None
    assert model.teacher.optimizer is None
    for step in range(3):
        train(model, model.optimizer, 1, first=step)
        assert same(model.teacher.layer.weight.detach(), model.belay.average_state_dict()["layer.weight"])
    assert not hasattr(model.teacher, "teacher") or model.teacher.teacher is None
    another = model.belay.module()
    assert another.teacher is None
    train(model, model.optimizer, 1, first=3)
    assert same(another.layer.weight.detach(), model.teacher.layer.weight.detach())
    model.load_state_dict(copy.deepcopy(model.state_dict()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_of_a_scripted_model_it_is_a_scripted_module() -> None:
    model, optimizer, belay = attached(EMA, model=torch.jit.script(with_batchnorm()))
    made = belay.module()
    for step in range(3):
        train(model, optimizer, 1, first=step)
        assert_is(made, belay)
    model.eval()
    with torch.no_grad(), belay.averaged():
        assert torch.equal(made(batch(0)), model(batch(0)))


def test_odd_tensors_are_followed() -> None:
    """Empty, integer and complex parameters, a model without any module inside, and shared modules."""
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": layer, "b": layer})
    model.empty, model.count = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.arange(3), requires_grad=False)
    model.wave = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
    model.view = nn.Parameter(torch.randn(4, 6).t()[::2])
    trained = list(model.parameters())
    model.sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    optimizer = torch.optim.SGD(trained, lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    assert made["a"] is made["b"]
    for _ in range(2):
        for p in trained:
            p.grad = torch.ones_like(p) if p.requires_grad else None
        model.sparse.data = 2 * model.sparse.data
        optimizer.step()
        assert torch.equal(made.sparse.to_dense(), model.sparse.to_dense())
    assert same(made.wave.detach(), belay.tensors()["wave"].clone())
    assert shares_average(made, belay)


def test_memory_that_other_processes_share_is_followed() -> None:
    model, optimizer, belay = attached(lambda name, p: EMA if name == "0.weight" else None, model=mlp(torch.float64))
    made = belay.module()
    model.share_memory()
    model.float()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1)
    assert_is(made, belay)
    made.share_memory()
    train(model, optimizer, 1, first=1)
    assert_is(made, belay)
    assert all(p.is_shared() for p in (made[0].weight, made[2].bias))


def test_lazy_layers_that_are_not_trained_yet_become_what_the_model_has() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    made = belay.module()
    train(model, optimizer, 1)
    assert type(made[1]) is nn.Linear
    assert_is(made, belay)
    optimizer.add_param_group({"params": model[1].parameters()})
    with pytest.warns(tb.BelayWarning, match="were added"):
        train(model, optimizer, 1, first=1)
    assert_is(made, belay)
    assert shares_average(made, belay)


# On a GPU ------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has memory of its own")


@gpu
@pytest.mark.parametrize("impl", ["triton", "foreach"])
def test_it_goes_with_its_model_to_a_gpu_and_back(impl: str) -> None:
    model = with_batchnorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, impl="auto" if impl == "triton" else impl)
    made = belay.module()
    for step, there in enumerate(("cpu", "cuda", "cuda", "cpu", "cuda")):
        model.to(there)
        train(model, optimizer, 1, first=step)
        assert {t.device.type for t in made.state_dict().values()} == {there}
        assert_is(made, belay)
        assert shares_average(made, belay)
    with belay.averaged():
        assert_is(made, belay)


@gpu
def test_of_an_average_in_host_memory_it_is_there_with_all_its_tensors() -> None:
    """A step waits for the copies then; a module that the user moves to the GPU is renewed there."""
    model = with_batchnorm().cuda()
    model[3].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, device="cpu")
    made, there = belay.module(), belay.module().cuda()
    for step in range(4):
        train(model, optimizer, 1, first=step)
        exported = {name: t.cpu() for name, t in belay.average_state_dict().items()}
        assert {t.device.type for t in made.state_dict().values()} == {"cpu"}
        assert {t.device.type for t in there.state_dict().values()} == {"cuda"}
        for module in (made, there):
            assert same({name: t.cpu() for name, t in module.state_dict().items()}, exported)
    assert shares_average(made, belay)
    with torch.no_grad():
        model[3].weight.add_(1.0)
    train(model, optimizer, 1, first=4)
    assert same(made[3].weight.detach(), model[3].weight.detach().cpu())

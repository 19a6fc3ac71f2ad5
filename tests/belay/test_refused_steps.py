"""A step inside `averaged()` is refused, whoever takes it, and optimizers of other parameters go on."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

import torchbelay as tb
from helpers import seams
from helpers.operations import Operations
from helpers.small import BELAY, EMA, Still, batch, mlp, same, snapshot, train, values

REFUSED = (
    r"an optimizer step inside averaged\('average'\) would train the average and lose the weights; leave the block"
)
refused = pytest.raises(RuntimeError, match=REFUSED)


def trained(method: Any = EMA, **options: Any) -> tuple[nn.Module, Optimizer, tb.Belay]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, method, **options)
    train(model, optimizer, 3)
    return model, optimizer, belay


class Passing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def scheduled(model: nn.Module) -> Optimizer:
    """An optimizer whose step a scheduler has wrapped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def patched(model: nn.Module) -> Optimizer:
    """An optimizer whose step somebody has replaced, and which calls torch's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer.step
    optimizer.step = lambda closure=None: own(closure)  # type: ignore[method-assign]
    return optimizer


OTHERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, foreach=True),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1),
    "ours": lambda model: tb.optim.AdamW(model.parameters(), lr=0.1),
    "a subclass": lambda model: Passing(model.parameters(), lr=0.1),
    "scheduled": scheduled,
    "patched": patched,
    "one of the parameters": lambda model: torch.optim.SGD([*model.parameters()][-1:], lr=0.1),
    "a later group": lambda model: Still([{"params": [nn.Parameter(torch.zeros(1))]}, {"params": model.parameters()}]),
}


def step(model: nn.Module, optimizer: Optimizer) -> None:
    """Take a step by a closure, as LBFGS needs it."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("method", [EMA, BELAY], ids=["ema", "belay"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_step_of_an_optimizer_that_is_not_followed_is_refused_before_anything_moves(
    other: str, method: tb.methods.Method
) -> None:
    model, optimizer, belay = trained(method)
    unfollowed = OTHERS[other](model)
    before = snapshot(model, belay)
    for call in (lambda: step(model, unfollowed), unfollowed.step):
        with belay.averaged():
            average = values(model)
            with refused:
                call()
            assert same(values(model), average)
        assert same(snapshot(model, belay), before)
    train(model, optimizer, 1)
    assert belay.step == 4


def test_the_numbers_of_a_step_with_an_optimizer_that_was_made_anew() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    first = torch.optim.SGD(model.parameters(), lr=1.0)
    belay = tb.Belay(model, first, tb.methods.ema(0.5))
    model.weight.grad = torch.ones_like(model.weight)
    first.step()
    second = torch.optim.SGD(model.parameters(), lr=1.0)
    with belay.averaged(), refused:
        second.step()
    assert model.weight.unique().tolist() == [-1.0]
    assert belay.average_state_dict()["weight"].unique().tolist() == [-0.5]
    second.step()  # outside it may train the weights
    assert model.weight.unique().tolist() == [-2.0]


def test_the_step_of_a_detached_belay_and_of_one_by_hand_is_refused_too() -> None:
    model, optimizer, belay = trained()
    belay.detach()
    by_hand = tb.Belay(model, None, EMA)
    for each in (belay, by_hand):
        before = snapshot(model, each)
        with each.averaged(), refused:
            optimizer.step()
        assert same(snapshot(model, each), before)


def test_a_block_that_decorates_refuses_in_every_call() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, belay)
    evaluate = belay.averaged()(other.step)
    for _ in range(2):
        with refused:
            evaluate()
    assert same(snapshot(model, belay), before)


def test_a_readout_and_an_average_of_another_dtype_are_refused_too() -> None:
    model, _, belay = trained(dtype=torch.float64)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, belay)
    for block in (belay.averaged(), belay.averaged(readout=tb.readouts.blend(0.5))):
        with block, refused:
            other.step()
        assert same(snapshot(model, belay), before)


def test_a_frozen_weight_that_has_a_gradient_moves_and_is_refused() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, belay)
    assert all(p.grad is not None for p in model.parameters())
    model.requires_grad_(False)
    with belay.averaged(), refused:
        other.step()
    model.requires_grad_(True)
    assert same(snapshot(model, belay), before)


class Decoupled(Optimizer):
    """It takes gradients from somewhere else, as optimizers of large models do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None, gradients: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(getattr(p, "own_gradient", 0.1))


class Inherited(Decoupled):
    pass


@pytest.mark.parametrize("kind", [Decoupled, Inherited])
def test_an_optimizer_that_may_move_weights_without_their_gradients_is_refused(kind: type[Decoupled]) -> None:
    model, _, belay = trained()
    other = kind(model.parameters())
    model.zero_grad()
    before = snapshot(model, belay)
    with belay.averaged(), refused:
        other.step()
    assert same(snapshot(model, belay), before)


def test_gradients_that_a_hook_gives_right_before_the_step_are_reckoned_with() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def give(*_: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    other.register_step_pre_hook(give)
    model.zero_grad()
    before = snapshot(model, belay)
    with belay.averaged(), refused:
        other.step()
    assert same(snapshot(model, belay), before)


@pytest.mark.parametrize("how", ["in its place", "by name"])
def test_a_closure_may_give_gradients_to_what_has_none_yet(how: str) -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    before = snapshot(model, belay)

    def closure() -> float:
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss.item()

    with belay.averaged(), refused:
        if how == "by name":
            other.step(closure=closure)
        else:
            other.step(closure)
    with belay.averaged():
        other.step()  # without gradients torch moves nothing
        other.step(None)
    assert same(snapshot(model, belay), before)


# Others go on ---------------------------------------------------------------------------------------------------------


def test_another_network_and_a_probe_are_trained_inside_the_block() -> None:
    model, _, belay = trained()
    average = dict(belay.average_state_dict())
    before, probes = snapshot(model, belay), []
    for inside in (False, True):
        network, probe = mlp(seed=1), nn.Linear(1, 1)
        nn.init.ones_(probe.weight)
        with torch.no_grad():
            probe.bias.zero_()
        holding = torch.optim.SGD([*model.parameters(), *probe.parameters()], lr=0.1)
        with ExitStack() as stack:
            if inside:
                stack.enter_context(belay.averaged())
            model.zero_grad()
            model.requires_grad_(False)  # an optimizer may hold frozen weights: they do not move
            train(network, torch.optim.SGD(network.parameters(), lr=0.1), 5)
            for i in range(5):
                holding.zero_grad()
                probe(torch.full((1, 1), float(i))).square().sum().backward()
                holding.step()
            model.requires_grad_(True)
            if inside:
                assert same(values(model), average)
        probes.append([*values(network).values(), *values(probe).values()])
    assert same(probes[0], probes[1])
    assert same(snapshot(model, belay), before)


def test_a_probe_whose_loss_does_not_reach_the_backbone_is_trained_by_one_optimizer_of_both() -> None:
    model, _, belay = trained()
    probe = nn.Linear(1, 1)
    both = torch.optim.Adam([*model.parameters(), *probe.parameters()])
    both.zero_grad()
    weights, average, first = values(model), dict(belay.average_state_dict()), values(probe)
    with belay.averaged():
        probe(model(batch(0)).detach()).square().mean().backward()
        both.step()
        assert same(values(model), average)
    assert same(values(model), weights)
    assert not any(torch.equal(first[name], value) for name, value in values(probe).items())


def test_the_step_of_a_followed_optimizer_of_another_model_goes_on_inside() -> None:
    _, _, belay = trained()
    other, optimizer, second = trained()
    with belay.averaged():
        train(other, optimizer, 2)
    assert (second.step, belay.step) == (5, 3)


def test_several_belays_refuse_each_for_its_own_parameters() -> None:
    models, _, belays = zip(*(trained() for _ in range(2)), strict=True)
    others = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    blocks = [ExitStack(), ExitStack()]
    for block, belay in zip(blocks, belays, strict=True):
        block.enter_context(belay.averaged())
    for other in others:
        with refused:
            other.step()
    blocks[0].close()
    others[0].step()
    with refused:
        others[1].step()
    blocks[1].close()
    others[1].step()


# The hook -------------------------------------------------------------------------------------------------------------


def hooks() -> int:
    return len(_global_optimizer_pre_hooks)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    assert hooks() == 0
    yield
    gc.collect()
    assert hooks() == 0


def test_torch_has_the_hook_only_while_a_block_is_open() -> None:
    model, _, belay = trained()
    _, _, second = trained()
    outer, inner = ExitStack(), ExitStack()
    for block, each in ((outer, belay), (inner, belay), (inner, second)):
        block.enter_context(each.averaged())
        assert hooks() == 1
    with belay.averaged():
        belay.average_state_dict()
    outer.close()
    assert hooks() == 1
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused:
        other.step()
    inner.close()
    assert hooks() == 0
    with pytest.raises(ZeroDivisionError), belay.averaged():
        raise ZeroDivisionError
    assert hooks() == 0
    other.step()


def test_a_block_in_a_generator_that_is_abandoned() -> None:
    model, _, belay = trained()
    weights = values(model)

    def evaluate() -> Iterator[int]:
        with belay.averaged():
            yield hooks()

    generator = evaluate()
    assert next(generator) == 1
    del generator
    gc.collect()
    assert hooks() == 0
    block = belay.averaged()
    block.__enter__()
    assert hooks() == 1
    del block
    gc.collect()
    assert hooks() == 0
    assert same(values(model), weights)


def test_a_block_that_could_not_be_entered_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, belay = trained()
    before = snapshot(model, belay)
    failures = []

    def exhaust(name: str, done: list[str]) -> None:
        if name == "clone" and done.count("_foreach_copy_") == 4 and not failures:
            failures.append(len(done))
            raise MemoryError("the third piece does not fit")

    seams.limit_scratch(monkeypatch, 5)
    with Operations(exhaust), pytest.raises(MemoryError), belay.averaged():
        pytest.fail("the block must not be entered")
    monkeypatch.undo()
    assert hooks() == 0
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert same(snapshot(model, belay), before)


def test_blocks_of_threads_beside_a_training_of_another_network() -> None:
    """The hook comes and goes while the other optimizer's hooks are called, and torch must not stumble over it."""
    _, _, belay = trained()
    network = mlp(seed=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    wrong: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        try:
            while not done.is_set():
                with belay.averaged():
                    pass
        except BaseException as error:  # a thread tells nobody
            wrong.append(error)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    train(network, optimizer, 300)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_step_of_another_thread_is_refused() -> None:
    model, _, belay = trained()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []

    def steal() -> None:
        try:
            other.step()
        except RuntimeError as error:
            said.append(str(error))

    with belay.averaged():
        thread = threading.Thread(target=steal)
        thread.start()
        thread.join()
    assert [REFUSED.replace("\\", "") in each for each in said] == [True]


@pytest.mark.parametrize("shared", [True, False])
def test_a_compiled_step_is_refused_or_goes_on(shared: bool) -> None:
    model, _, belay = trained()
    network = model if shared else mlp(seed=1)
    other = torch.optim.SGD(network.parameters(), lr=0.5)
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    torch._dynamo.reset()
    compiled = torch.compile(other.step, backend="eager")
    compiled()
    expected = [p.detach() - 1.0 for p in network.parameters()]
    for _ in range(2):
        with belay.averaged():
            if shared:
                with refused:
                    compiled()
            else:
                compiled()
    if not shared:
        assert all(torch.allclose(p, e) for p, e in zip(network.parameters(), expected, strict=True))


def test_a_compiled_step_is_not_compiled_again_for_every_block() -> None:
    network = mlp(seed=1)
    other = torch.optim.SGD(network.parameters(), lr=0.5)
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    torch._dynamo.reset()
    compiled = torch.compile(other.step, backend="eager")
    (_, _, first), *belays = [trained() for _ in range(4)]
    compiled()
    with first.averaged():  # torch compiles a step once more when there are hooks
        compiled()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _, _, belay in belays:
            with belay.averaged():
                compiled()
            compiled()


BY_HAND = """
import sys, torch, torchbelay as tb
belay = tb.Belay(torch.nn.Linear(3, 2), None, tb.methods.ema(0.9))
belay.update()
with belay.averaged():
    assert "torch._dynamo" not in sys.modules
"""


def test_a_block_where_no_optimizer_is_does_not_load_the_compiler() -> None:
    """To load it takes about a second."""
    subprocess.run([sys.executable, "-c", BY_HAND], check=True)

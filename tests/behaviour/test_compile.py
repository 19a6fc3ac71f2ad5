"""torch.compile with its real compiler, activation checkpointing, and what neither of them may change."""

import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import torchbelay as tb
from helpers.problems import MLP, different, everything, f64
from helpers.small import BELAY, EMA, same, values
from helpers.zoo import Transformer, next_word, sentences

# torch's compiler imports parts of torch that torch itself has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

real = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform == "win32", reason="torch's compiler needs g++ to make code for the CPU"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # what the compiler can do without on one machine: asking the processor by a trial program, and helpers of its own
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1}):
        yield
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    """How many graphs have been compiled so far."""
    return int(counters["stats"]["unique_graphs"])


class Small(nn.Module):
    """Enough for a kernel that is fused from several operations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)) * 2)


def batch(step: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step))


def train(model: Callable[[Tensor], Tensor], optimizer: Any, steps: range, step: Any = None) -> list[int]:
    """Returns how many graphs there were after each step."""
    compiled = []
    for number in steps:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        (step or optimizer.step)()
        compiled.append(graphs())
    return compiled


# The compiler orders additions as it likes: some 1e-7 of numbers around 1, handed on by a few steps
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}


@real
@pytest.mark.slow
def test_a_model_compiled_to_machine_code_computes_with_the_average_and_is_not_compiled_again() -> None:
    model = Small()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.05)
    belay = tb.Belay(compiled, optimizer, BELAY)
    train(compiled, optimizer, range(2))
    before = graphs()
    assert before > 0
    assert train(compiled, optimizer, range(2, 6)) == [before] * 4
    plain = Small()
    plain.load_state_dict(belay.average_state_dict(), strict=True)
    weights = values(model)
    outside = compiled(batch(0)).detach()
    for _ in range(2):
        with belay.averaged():
            inside = compiled(batch(0)).detach()
            torch.testing.assert_close(inside, plain(batch(0)).detach(), **CLOSE)
        assert (inside - outside).abs().max() > 1e-3  # it makes a difference, a hundred times what is called close
        assert torch.equal(compiled(batch(0)).detach(), outside)
    assert same(values(model), weights)
    train(compiled, optimizer, range(6, 8))
    assert graphs() == before
    assert list(belay.average_state_dict()) == list(model.state_dict())  # no _orig_mod. in the names


@real
@pytest.mark.slow
def test_an_optimizer_step_compiled_to_machine_code_moves_the_average_and_is_not_compiled_again() -> None:
    models = [Small(), Small()]
    # a learning rate that is a tensor, as torch advises: a number would be compiled in
    optimizers = [torch.optim.SGD(m.parameters(), lr=torch.tensor(0.3), momentum=0.9) for m in models]
    belays = [tb.Belay(m, o, BELAY) for m, o in zip(models, optimizers, strict=True)]
    compiled = train(models[0], optimizers[0], range(7), torch.compile(optimizers[0].step))
    assert compiled[0] > 0
    assert len(set(compiled[2:])) == 1  # the first step makes the optimizer's state: the second looks different
    train(models[1], optimizers[1], range(7))
    assert [belay.step for belay in belays] == [7, 7]
    for ours, theirs in zip(*(b.average_state_dict().values() for b in belays), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    for ours, theirs in zip(*(m.state_dict().values() for m in models), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_model_compiled_in_place_is_seen_to_change_and_not_compiled_again() -> None:
    """`module.compile()` leaves no wrapper and no other name."""
    model = nn.Sequential(Small(), nn.Linear(1, 1))
    model[0].compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    belay = tb.Belay(model, optimizer, BELAY)
    train(model, optimizer, range(2))
    before = graphs()
    assert before > 0
    assert train(model, optimizer, range(2, 5)) == [before] * 3
    plain = nn.Sequential(Small(), nn.Linear(1, 1))
    plain.load_state_dict(belay.average_state_dict(), strict=True)
    outside = model(batch(0)).detach()
    with belay.averaged():
        inside = model(batch(0)).detach()
    torch.testing.assert_close(inside, plain(batch(0)).detach(), **CLOSE)
    assert (inside - outside).abs().max() > 1e-3
    assert graphs() == before


def test_evaluation_under_no_grad_makes_one_graph_more_and_then_none() -> None:
    """Training and evaluation are two graphs; swapping between them makes no third."""
    model = Small()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.3)
    belay = tb.Belay(compiled, optimizer, EMA)
    seen = []
    for number in range(6):
        train(compiled, optimizer, range(number, number + 1))
        with belay.averaged(), torch.no_grad():
            compiled(batch(number))
        seen.append(graphs())
    assert len(set(seen[1:])) == 1


class Checkpointed(Transformer):
    """Activations are thrown away and computed again in the backward pass."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("method", [BELAY, EMA], ids=["belay", "ema"])
def test_activation_checkpointing_changes_no_bit(method: Any) -> None:
    runs = []
    for kind in (Transformer, Checkpointed):
        torch.manual_seed(0)
        model = kind(layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        belay = tb.Belay(model, optimizer, method)
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            next_word(model, sentences(step)).backward()
            optimizer.step()
            with belay.averaged():
                torch.manual_seed(step)
                next_word(model, sentences(step)).backward()  # as in fitting a temperature: gradients at the average
        runs.append(everything(model=model, optimizer=optimizer, belay=belay))
    assert different(*runs) == []


def test_a_forward_before_and_a_backward_after_a_swap_are_refused_under_checkpointing_too() -> None:
    """Recomputed from other weights the gradients would be silently wrong; torch notices what was written to."""
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA)
    next_word(model, sentences(0)).backward()
    optimizer.step()
    loss = next_word(model, sentences(1))
    with belay.averaged(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_is_the_plain_one(backend: str) -> None:
    """In float64, forward, backward and the hooks around the optimizer."""
    runs = []
    for wrap in (lambda m: m, partial(torch.compile, backend=backend)):
        model = MLP.model(f64)
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
        belay = tb.Belay(wrapped, optimizer, BELAY)
        for step in range(4):
            optimizer.zero_grad()
            MLP.loss(wrapped, step).backward()
            optimizer.step()
        runs.append(belay.average_state_dict())
    assert list(runs[0]) == list(runs[1])
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=0, atol=1e-13)

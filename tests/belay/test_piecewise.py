"""`PiecewiseBelay` in one process: a model that computes in its own tensors, while flat pieces are trained."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, batch, same, values
from torchbelay.belay.pieces import Piece
from torchbelay.belay.piecewise import PiecewiseBelay


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 1))
    model[2].requires_grad_(False)
    return model


class Flat:
    """A layout with one flat master, which has pieces of all trained parameters."""

    def __init__(self, seed: int = 0) -> None:
        self.model, self.group, self.device = net(seed), dist.group.WORLD, torch.device("cpu")
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        flat = torch.cat([p.detach().flatten() for p in trained.values()])
        parts = flat.split([p.numel() for p in trained.values()])
        self.tensors: dict[str, Tensor] = dict(zip(trained, parts, strict=True))
        self.pieces = {name: Piece(0, p.numel(), tuple(p.shape)) for name, p in trained.items()}
        self.shapes = {name: torch.empty(p.shape, device="meta") for name, p in trained.items()}
        self.optimizers: list[Any] = [torch.optim.AdamW(self.tensors.values(), lr=1e-2)]
        self.fails = False

    def follow(self) -> None:
        pass

    def set_aside(self) -> list[Callable[[], object]]:
        return [partial(p.data.copy_, p.detach().clone()) for p in self.model.parameters()]

    @torch.no_grad()
    def renew(self) -> None:
        if self.fails:
            raise ZeroDivisionError
        for name, p in self.model.named_parameters():
            if name in self.tensors:
                p.copy_(self.tensors[name].view_as(p))

    def gathered(self, parameter: Tensor) -> Tensor | None:
        return parameter.detach().clone()

    def train(self, steps: range) -> None:
        for step in steps:
            self.model.zero_grad()
            x = batch(step)
            (self.model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
            for name, p in self.model.named_parameters():
                if name in self.tensors:
                    self.tensors[name].grad = p.grad.flatten()
            self.optimizers[0].step()
            self.renew()


class Run:
    def __init__(self, method: Any, *, seed: int = 0, **options: Any) -> None:
        self.layout = Flat(seed)
        self.belay = PiecewiseBelay(self.layout, method, options)

    def train(self, steps: range) -> "Run":
        self.layout.train(steps)
        return self


class Plain:
    def __init__(self, method: Any, *, seed: int = 0, **options: Any) -> None:
        self.model = net(seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def train(self, steps: range) -> "Plain":
        for step in steps:
            self.optimizer.zero_grad()
            x = batch(step)
            (self.model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
            self.optimizer.step()
        return self


def by_name(name: str, parameter: Tensor) -> Any:
    return None if name == "3.bias" else BELAY if parameter.ndim > 1 else EMA


@pytest.mark.parametrize("method", [EMA, BELAY, by_name], ids=["ema", "spring", "rule"])
@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
def test_everything_is_as_in_a_belay_of_the_whole_model(method: Any, buffers: Any) -> None:
    spectators = {"short": tb.Spring.ema(decay=0.5)}
    run, plain = (kind(method, buffers=buffers, spectators=spectators).train(range(4)) for kind in (Run, Plain))
    for name in ("average", "short"):
        same(run.belay.average_state_dict(name), plain.belay.average_state_dict(name))
    blend = tb.readouts.blend(share=0.3)
    same(run.belay.average_state_dict(readout=blend), plain.belay.average_state_dict(readout=blend))
    assert run.belay.stats("a/") == pytest.approx(plain.belay.stats("a/"), rel=1e-6)
    assert (run.belay.step, run.belay.decay, run.belay.regime) == (4, plain.belay.decay, plain.belay.regime)
    before = values(run.layout.model)
    with run.belay.averaged() as model, plain.belay.averaged():
        assert model is run.layout.model
        same(values(model), values(plain.model))
        same(run.belay.average_state_dict(), plain.belay.average_state_dict())
        with run.belay.averaged():
            same(values(model), values(plain.model))
        with pytest.raises(RuntimeError, match="leave that block first"), run.belay.averaged("short"):
            pass
    same(values(run.layout.model), before)
    for each in (run, plain):
        each.belay.change(tb.Spring.ema(decay=0.5))
        each.train(range(4, 6))
        each.belay.copy_to_model()
        each.train(range(6, 7))
    same(values(run.layout.model), values(plain.model))
    run.belay.reset()
    assert run.belay.stats()["tension"] == 0.0
    run.belay.detach()
    run.train(range(7, 8))
    assert run.belay.step == 7
    assert repr(run.belay).startswith("PiecewiseBelay(")


def test_weights_come_back_after_exceptions_on_entering_and_inside() -> None:
    run = Run(BELAY).train(range(3))
    before, pieces = values(run.layout.model), [t.clone() for t in run.layout.tensors.values()]
    run.layout.fails = True
    with pytest.raises(ZeroDivisionError), run.belay.averaged():
        pass
    run.layout.fails = False
    with pytest.raises(KeyboardInterrupt), torch.inference_mode(), run.belay.averaged():
        raise KeyboardInterrupt
    same(values(run.layout.model), before)
    assert all(map(torch.equal, run.layout.tensors.values(), pieces))
    run.train(range(3, 4))


@pytest.mark.parametrize("first", [0, 1])
def test_of_blocks_that_overlap_the_last_one_gives_the_weights_back(first: int) -> None:
    run = Run(EMA, spectators={"short": tb.Spring.ema(decay=0.5)}).train(range(4))
    weights, blocks = values(run.layout.model), [ExitStack(), ExitStack()]
    for block in blocks:
        block.enter_context(run.belay.averaged())
    average = values(run.layout.model)
    assert not same(average, weights)
    blocks[first].close()
    assert same(values(run.layout.model), average)
    with (
        pytest.raises(RuntimeError, match=r"averaged\('short'\) inside averaged\('average'\)"),
        run.belay.averaged("short"),
    ):
        pass
    assert same(values(run.layout.model), average)
    blocks[1 - first].close()
    assert same(values(run.layout.model), weights)
    run.train(range(4, 6))
    assert run.belay.step == 6


def test_states_are_exchanged_with_a_belay_of_the_whole_model() -> None:
    run, plain = Run(BELAY).train(range(3)), Plain(BELAY).train(range(3))
    again, other = Run(BELAY, seed=3), Plain(BELAY, seed=3)
    again.belay.load_state_dict(plain.belay.state_dict())
    other.belay.load_state_dict(run.belay.state_dict(full=True))
    expected = plain.belay.state_dict()["averages"]["average"]["weights"]
    same(other.belay.state_dict()["averages"]["average"]["weights"], expected)
    same(again.belay.state_dict(full=True)["averages"]["average"]["weights"], expected)
    own = run.belay.state_dict()
    third = Run(BELAY, seed=4)
    third.belay.load_state_dict(own)
    assert third.belay.step == 3
    own["pieces"]["0.weight"][0] = 1
    with pytest.raises(ValueError, match="other pieces of the parameters than this rank"):
        third.belay.load_state_dict(own)
    with pytest.raises(ValueError, match="not the state of a Belay"):
        third.belay.load_state_dict({"format": 9})
    with pytest.warns(tb.BelayWarning, match="of another Belay"):
        Run(EMA).belay.load_state_dict(run.belay.state_dict(full=True), strict=False)


def test_a_file_has_the_average_in_float32_or_as_asked(tmp_path: Path) -> None:
    run = Run(EMA).train(range(3))
    run.belay.save_average(tmp_path / "average", dtype=torch.float64)
    plain = net(5).double()
    assert tb.load_average(tmp_path / "average", plain)["step"] == "3"
    weights = run.belay.state_dict(full=True)["averages"]["average"]["weights"]
    for name, tensor in weights.items():
        assert torch.equal(plain.get_parameter(name), tensor.double())
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        run.belay.save_average(tmp_path / "no" / "average")
    with pytest.raises(ValueError, match=r"average\.pt' has the name of a file of torch\.save"):
        run.belay.save_average(tmp_path / "average.pt")
    with pytest.raises(ValueError, match="dtype="):
        run.belay.save_average(tmp_path / "average", dtype=torch.int8)


def test_what_does_not_go_with_pieces_is_refused() -> None:
    layout = Flat()
    for name, value in (("save_with_optimizer", True), ("shard", dist.group.WORLD), ("workers", 2), ("bits", 24)):
        with pytest.raises(ValueError, match=rf"{name}=.* does not go with this engine"):
            PiecewiseBelay(layout, EMA, {name: value})
    with pytest.raises(ValueError, match="on_nonfinite='raise' would let each rank decide by its own pieces"):
        PiecewiseBelay(layout, EMA, {"on_nonfinite": "raise"})
    with pytest.raises(TypeError, match="method=3 is neither"):
        PiecewiseBelay(layout, 3, {})  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="name='other' is no average"),
        PiecewiseBelay(layout, EMA, {}).averaged("other"),
    ):
        pass

"""Curvatures are measured in the middle of a training: the model does not notice, and every kind of model is right."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import torchbelay as tb
from helpers.hessians import eigenvalues, hessian
from torchbelay import measure_curvatures

X, Y = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


def network() -> nn.Sequential:
    """A model with all that a measurement could disturb: statistics, masks, modes, frozen weights, gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 5), nn.Linear(5, 3)
    )
    model[4].requires_grad_(False)
    F.cross_entropy(model(X), Y).backward()
    model[5].bias.grad = None
    model[1].eval()
    model[1].train()
    model[3].train()
    model[0].eval()
    return model


def everything(model: nn.Module) -> list[Any]:
    """Return all that a model and torch's generator are, with the identities of tensors."""
    found: list[Any] = [torch.get_rng_state().tolist()]
    for name, p in model.named_parameters():
        gradient = None if p.grad is None else (id(p.grad), p.grad.tolist())
        found.append((name, id(p), p.data_ptr(), p._version, p.tolist(), p.requires_grad, gradient))
    found += [(name, id(b), b.tolist()) for name, b in model.named_buffers()]
    return [*found, *((name, module.training) for name, module in model.named_modules())]


def plain(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), Y)


def backward(model: nn.Module) -> Tensor:
    plain(model).backward()
    return plain(model)


def evaluation(model: nn.Module) -> Tensor:
    return plain(model.eval())


def replaced(model: nn.Module) -> Tensor:
    value = plain(model)
    model[1].running_mean = model[1].running_mean + 1.0
    return value


def unfreezing(model: nn.Module) -> Tensor:
    return backward(model.requires_grad_(True))  # weights that were frozen get gradients


def freezing(model: nn.Module) -> Tensor:
    model[0].requires_grad_(False)
    return plain(model)


def stepping(model: nn.Module) -> Tensor:
    plain(model).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return plain(model)


def failing(model: nn.Module) -> Tensor:
    plain(model.train(False).train())
    raise OSError("no such batch")


def failing_twice(model: nn.Module) -> Tensor:
    return F.ctc_loss(model(X)[:8, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([8]), torch.tensor([2]))


@pytest.mark.parametrize(
    ("loss", "error"),
    [(plain, None), (backward, None), (evaluation, None), (replaced, None), (unfreezing, None), (freezing, None),
     (failing, OSError), (failing_twice, RuntimeError), (lambda model: plain(model).detach(), ValueError)],
    ids=["plain", "backward", "evaluation", "a buffer replaced", "unfreezing", "freezing", "failing",
         "failing in derivatives", "no graph"],
)  # fmt: skip
def test_the_model_is_what_it_was(loss: Callable[..., Tensor], error: type[Exception] | None) -> None:
    model = network()
    before = everything(model)
    with nullcontext() if error is None else pytest.raises(error):
        measure_curvatures(model, lambda: loss(model), products=4)
    assert everything(model) == before


def limited() -> nn.Module:
    """An embedding whose forward shortens the rows that it reads."""
    return nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "loss"),
    [(network, stepping), (limited, lambda model: F.cross_entropy(model(Y), Y))],
    ids=["the loss takes a step", "an embedding with max_norm"],
)
def test_weights_that_the_loss_changes_are_what_they_were(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor]
) -> None:
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    loss(other)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    before = [p.detach().clone() for p in model.parameters()]
    measure_curvatures(model, lambda: loss(model), products=4)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


def test_weights_that_the_loss_freezes_are_not_measured() -> None:
    def frozen() -> nn.Module:
        model = network()
        model[0].requires_grad_(False)
        return model

    model, expected = network(), frozen()
    found = measure_curvatures(model, lambda: freezing(model))
    assert found == measure_curvatures(expected, lambda: plain(expected))


def test_hooks_on_gradients_do_not_act_and_are_kept() -> None:
    model = network()
    expected = measure_curvatures(model, lambda: plain(model))
    called: list[str] = []
    kept = [p.register_hook(lambda g: called.append("") or 3 * g) for p in model.parameters() if p.requires_grad]
    state = torch.get_rng_state()
    assert measure_curvatures(model, lambda: plain(model)) == expected
    assert not called
    torch.set_rng_state(state)
    model.zero_grad()
    plain(model).backward()
    assert len(called) == len(kept)
    tripled = model[5].weight.grad.clone()
    for handle in kept:
        handle.remove()
    torch.set_rng_state(state)
    model.zero_grad()
    plain(model).backward()
    assert torch.equal(tripled, 3 * model[5].weight.grad)


def test_a_frozen_part_without_values_does_not_matter() -> None:
    model = network()
    expected = measure_curvatures(model, lambda: plain(model))
    whole = nn.Module()
    whole.used, whole.rest = model, nn.BatchNorm1d(3, device="meta").requires_grad_(False)
    assert measure_curvatures(whole, lambda: plain(model)) == expected


def test_an_interruption_leaves_the_model_as_it_was() -> None:
    model = network()
    before = everything(model)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_curvatures(model, lambda: plain(model), progress=stop)
    assert everything(model) == before


@pytest.mark.parametrize("method", [tb.Spring(k=1.0, m1=10.0, m2=20.0), tb.Spring.ema(decay=0.9)], ids=["belay", "ema"])
def test_a_training_goes_on_bit_for_bit(method: tb.Spring) -> None:
    def train(measure: bool) -> list[list[float]]:
        model = network()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        belay = tb.Belay(model, optimizer, method)
        for step in range(6):
            optimizer.zero_grad()
            plain(model).backward()
            if measure and step == 3:
                measure_curvatures(model, lambda: plain(model), optimizer=optimizer, products=3)
            optimizer.step()
        return [t.tolist() for t in [*model.state_dict().values(), *belay.average_state_dict().values()]]

    assert train(True) == train(False)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_measures_the_same_without_gradients_around_it(context: Callable[[], Any]) -> None:
    model = network()
    expected = measure_curvatures(model, lambda: plain(model))
    before = everything(model)
    with context():
        assert measure_curvatures(model, lambda: plain(model)) == expected
        assert not torch.is_grad_enabled()
    assert everything(model) == before


def test_dropout_has_one_mask() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    state = torch.get_rng_state()

    def masked(call: Callable[..., Tensor]) -> Tensor:
        torch.set_rng_state(state)  # for the whole Hessian, the mask of the measurement
        return F.cross_entropy(call(X.double()), Y)

    exact = eigenvalues(hessian(model, masked))
    torch.set_rng_state(state)
    found = measure_curvatures(model, lambda: F.cross_entropy(model(X.double()), Y), products=51)
    assert (found.largest, found.lowest) == pytest.approx((exact[0], exact[-1]), rel=1e-6)


# Models --------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers that share a weight; the bias is frozen, one weight is not used, and one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.unused, self.empty = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) + self.empty.sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x.view(4, 1, 8, 4)).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(32, 4)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.view(4, 8, 4))[0].reshape(32, 2)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Images(nn.Sequential):
    """A convolution with its weights in channels_last."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(3, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(32, 1, 2, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied, frozen, unused and empty weights": Tied,
    "attention": Attention,
    "recurrent": Recurrent,
    "checkpointed": lambda: Checkpointed(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "channels_last and BatchNorm": Images,
    "rms_norm and an encoder": lambda: nn.Sequential(
        nn.RMSNorm(4),
        nn.Unflatten(0, (4, 8)),
        nn.TransformerEncoderLayer(4, 1, 4, batch_first=True).eval(),
        nn.Flatten(0, 1),
        nn.Linear(4, 1),
    ),
    "a parametrization": lambda: nn.utils.parametrize.register_parametrization(
        nn.Linear(4, 3), "weight", nn.Softplus()
    ),
    "linear, one number per tensor": lambda: nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Softplus()),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_has_the_curvatures_of_its_hessian(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    target = torch.randn(32, 1, dtype=torch.float64)

    def loss(call: Callable[..., Tensor]) -> Tensor:
        return (call(X.double()) - target).square().mean()

    exact = eigenvalues(hessian(model, loss))
    before = everything(model)
    found = measure_curvatures(model, lambda: loss(model), products=60)
    assert everything(model) == before
    lowest = min(exact[-1], 0.0)  # weights that do not enter the loss have a curvature of 0
    assert (found.largest, min(found.lowest, 0.0)) == pytest.approx((exact[0], lowest), rel=1e-6, abs=1e-9)


def test_unused_weights_are_not_counted() -> None:
    model = Tied().double()
    found = measure_curvatures(model, lambda: model(X.double()).square().mean(), products=100)
    assert found.products <= 4 * 4 + 4


def test_a_reentrant_checkpoint_is_refused_with_the_cure() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = X.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"hides weights from second derivatives; give use_reentrant=False"):
        measure_curvatures(model, lambda: model(checkpoint(model[:1], x, use_reentrant=True)[:, :4]).square().mean())


def test_autocast_inside_the_loss_is_near() -> None:
    model = network()

    def mixed() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model)

    assert measure_curvatures(model, mixed).largest == pytest.approx(
        measure_curvatures(model, lambda: plain(model)).largest, rel=0.05
    )


# Wrappers ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_in_ddp_is_measured_without_it(group: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*; measure model\.module"):
            measure_curvatures(model, lambda: plain(model))
        measure_curvatures(model.module, lambda: plain(model.module))
        plain(model).backward()  # the ranks go on together
    assert model.module[1].num_batches_tracked == 2
    whole = nn.Sequential(model, nn.Tanh())
    with pytest.raises(ValueError, match=r"or a part of it is.*; measure model\.module"):
        measure_curvatures(whole, lambda: plain(whole))


def test_sharded_weights_are_refused(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    with pytest.raises(ValueError, match="the weight 'weight' is sharded; measure a copy"):
        measure_curvatures(model, lambda: plain(model))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["attention", "recurrent", "channels_last and BatchNorm"])
def test_a_gpu_measures_what_a_cpu_does(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name](), nn.Dropout(0.0))
    loss = {"cpu": lambda: model(X).square().mean(), "cuda": lambda: model(X.cuda()).square().mean()}
    expected = measure_curvatures(model, loss["cpu"])
    state = torch.cuda.get_rng_state()
    found = measure_curvatures(model.cuda(), loss["cuda"])
    assert found.largest == pytest.approx(expected.largest, rel=0.01)
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.thorough
def test_a_compiled_model_is_measured_as_it_is_written() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model = torch.compile(inner, backend="aot_eager")
    plain(model).backward()
    assert measure_curvatures(model, lambda: plain(model)) == measure_curvatures(inner, lambda: plain(inner))
    plain(model).backward()  # compiled again

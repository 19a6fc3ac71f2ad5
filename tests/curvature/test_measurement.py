"""Measured curvatures against whole Hessians, what is refused, and advice from what was measured."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torchbelay as tb
from helpers.hessians import Quadratic, eigenvalues, hessian
from torchbelay import measure_curvatures
from torchbelay.physics.quadratics import Quadratic as Problem

X, Y = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def entropy(model: Callable[..., Tensor]) -> Tensor:
    return F.cross_entropy(model(X), Y)


def measured(model: nn.Module, loss: Callable[..., Tensor] = entropy, **options: Any):
    return measure_curvatures(model, lambda: loss(model), **options)


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_as_many_products_as_weights_find_every_curvature_once(seed: int) -> None:
    h = [7.0, 2.0, 0.5, 0.1, 1e-3]
    found = measured(Quadratic(torch.tensor(h, dtype=torch.float64)), lambda model: model(), seed=seed)
    assert found.curvatures == pytest.approx(h, rel=1e-9)
    assert found.counts == (1.0,) * 5
    assert (found.largest, found.lowest) == pytest.approx((7.0, 1e-3), rel=1e-9)
    assert (found.products, found.optimizer) == (5, "SGD")


def test_all_curvatures_of_a_network_are_those_of_its_hessian() -> None:
    model = mlp()
    exact = eigenvalues(hessian(model, entropy))
    assert exact[-1] < 0  # not convex at its first weights
    found = measured(model, products=43)
    assert found.products == 43
    up = [h for h in exact if h > 1e-9]  # a softmax has directions without any curvature
    assert found.curvatures[: len(up)] == pytest.approx(up, abs=1e-9)
    assert found.lowest == pytest.approx(exact[-1], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_some_products_find_the_largest_and_the_least(dtype: torch.dtype) -> None:
    model = mlp()
    exact = eigenvalues(hessian(model, entropy))
    found = measured(model.to(dtype), lambda net: F.cross_entropy(net(X.to(dtype)).float(), Y))
    near = {torch.float64: 0.005, torch.float32: 0.005}.get(dtype, 0.03)
    assert found.largest == pytest.approx(exact[0], rel=near)
    assert found.lowest == pytest.approx(exact[-1], abs=0.05 * exact[0])
    assert found.products == 20


def test_counts_are_the_shares_of_the_start_times_the_number_of_weights() -> None:
    h = torch.cat([torch.full((n,), x, dtype=torch.float64) for x, n in ((5.0, 3), (1.0, 50), (0.1, 947))])
    found = measured(Quadratic(h), lambda model: model(), seed=4)
    start = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    shares = [float(start[h == x].square().sum() / start.square().sum()) for x in (5.0, 1.0, 0.1)]
    assert found.curvatures[:3] == pytest.approx((5.0, 1.0, 0.1), rel=1e-9)
    assert found.counts[:3] == pytest.approx([1000 * share for share in shares], rel=1e-6)
    assert sum(found.counts[3:]) <= 2  # directions of rounding errors, if any


def test_the_curvatures_stand_for_the_whole_spectrum() -> None:
    h = torch.logspace(1, -4, 2000, dtype=torch.float64)
    traces = [
        sum(x * n for x, n in zip(found.curvatures, found.counts, strict=True))
        for found in (measured(Quadratic(h), lambda model: model(), seed=seed) for seed in range(8))
    ]
    assert sum(traces) / 8 == pytest.approx(float(h.sum()), rel=0.1)


def test_the_seed_decides_and_the_callers_generator_does_not() -> None:
    model = mlp()
    first = measured(model, seed=3)
    torch.manual_seed(99)
    assert measured(model, seed=3) == first
    assert measured(model, seed=4) != first


def test_progress_is_told_after_each_product() -> None:
    told = []
    measured(mlp(), products=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"eps": 0.1}),
        (torch.optim.AdamW, {"betas": (0.0, 0.5)}),
        (tb.optim.AdamW, {}),
    ],
)
def test_adam_meets_the_curvatures_of_its_own_units(kind: Callable[..., torch.optim.Optimizer], options: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    squares = [torch.zeros_like(p) for p in model.parameters()]
    highest = [torch.zeros_like(p) for p in model.parameters()]
    beta2 = options.get("betas", (0.9, 0.999))[1]
    for _ in range(6):
        optimizer.zero_grad()
        entropy(model).backward()
        for v, top, p in zip(squares, highest, model.parameters(), strict=True):
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            torch.maximum(top, v, out=top)
        optimizer.step()
    moments = highest if options.get("amsgrad") else squares
    v = torch.cat([v.reshape(-1) for v in moments]) / (1 - beta2**6)
    s = (v.sqrt() + options.get("eps", 1e-8)).rsqrt()
    exact = eigenvalues(s[:, None] * hessian(model, entropy) * s)
    found = measured(model, products=43, optimizer=optimizer)
    assert (found.largest, found.lowest) == pytest.approx((exact[0], exact[-1]), rel=1e-6)
    assert (found.optimizer, found.beta1) == (kind.__name__, options.get("betas", (0.9, 0.999))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adam_of_16_bits_is_measured_with_its_own_moments(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)

    def loss() -> Tensor:
        return F.cross_entropy(model(X.to(dtype)).float(), Y)

    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    moments = torch.cat([optimizer.state[p]["exp_avg_sq"].double().reshape(-1) for p in model.parameters()])
    s = ((moments / (1 - 0.999**3)).sqrt() + 1e-4).rsqrt()
    found = measure_curvatures(model, loss, optimizer=optimizer)
    exact = eigenvalues(s[:, None] * hessian(model.double(), entropy) * s)
    assert found.largest == pytest.approx(exact[0], rel=0.02)


def test_a_sparse_embedding_that_also_has_dense_gradients_is_measured() -> None:
    class Tied(nn.Embedding):
        def forward(self, i: Tensor) -> Tensor:
            return F.linear(super().forward(i), self.weight)

    def loss(call: Callable[..., Tensor]) -> Tensor:
        return F.cross_entropy(call(Y), Y)

    torch.manual_seed(0)
    sparse = Tied(5, 2, sparse=True).double()
    dense = Tied(5, 2).double()
    dense.load_state_dict(sparse.state_dict())
    assert measured(sparse, loss).largest == pytest.approx(eigenvalues(hessian(dense, loss))[0], rel=1e-9)


# Errors --------------------------------------------------------------------------------------------------------------


class Kernel(torch.autograd.Function):
    """x², whose backward is a kernel of its own: for torch its numbers come from nowhere."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).detach()


class Once(Kernel):
    """x², whose backward says that it has no derivative."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Kernel.backward))


class OfTorch(Once):
    """The same, in a module of torch, as what make_graphed_callables makes."""

    __module__ = "torch.cuda.graphs"


def through(operation: type[torch.autograd.Function]) -> Callable[..., Any]:
    return lambda model: measured(model, lambda net: F.cross_entropy(net[2](operation.apply(net[0](X))), Y))


def inside_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return mlp()


def skipped(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam whose steps GradScaler has all skipped: it has a state, and its count is 0."""
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.zeros(()), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def backward(model: nn.Module) -> Tensor:
    value = entropy(model)
    value.backward()
    return value


OPTIMIZERS = {
    "skipped": skipped,
    "wrong": lambda model: "Adam",
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "other": lambda model: torch.optim.Adam(mlp().parameters()),
}


def beside(name: str) -> Callable[..., Any]:
    return lambda model: measured(model, optimizer=OPTIMIZERS[name](model))


def alignment(values: Tensor) -> Tensor:
    """Return a loss of torch that has no second derivative."""
    length = torch.tensor([8])
    return F.ctc_loss(values[:8, None].log_softmax(-1), torch.tensor([[1, 2]]), length, length // 4)


def losing(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model: measured(model, loss)


REFUSED: tuple[tuple[Callable[[Any], Any], type[Exception], str], ...] = (
    (lambda m: measure_curvatures(m, entropy(m)), TypeError, r"loss=tensor.* is not a function; give one"),
    (lambda m: measure_curvatures([m], lambda: 0), TypeError, r"model=list is not a torch\.nn\.Module"),
    (lambda m: measured(m.requires_grad_(False)), ValueError, "model=Sequential has no weight that requires grad"),
    (lambda m: measured(m, products=1), ValueError, "products=1 is too small; it needs products ≥ 2"),
    (lambda m: measured(m, products=1.5), TypeError, r"products=1\.5 is not a whole number"),
    (lambda m: measured(m, seed=-1), ValueError, "seed=-1 is too small"),
    (lambda m: measured(nn.Linear(4, 1, dtype=torch.complex128)), ValueError, "'weight' is torch.complex128; .*real"),
    (lambda m: measured(m.to("meta")), ValueError, r"'0\.weight' has no values yet; initialise"),
    (lambda m: measured(nn.LazyLinear(3)), ValueError, "'weight' has no values yet; .*call it once"),
    (losing(lambda m: entropy(m).item()), TypeError, r"loss\(\) returned a float; return the loss itself"),
    (losing(lambda m: m(X)), ValueError, r"loss\(\) returned torch\.float64 of shape \(64, 3\); return one number"),
    (losing(lambda m: m(X).argmax()), ValueError, r"loss\(\) returned torch.int64 of shape \(\)"),
    (losing(lambda m: entropy(m).detach()), ValueError, r"not depend on trained weights; .*without torch\.no_grad"),
    (losing(lambda m: entropy(m) * math.nan), ValueError, r"loss\(\) returned nan; .* finite loss"),
    (losing(lambda m: entropy(mlp())), ValueError, "no trained weight of the model enters the loss"),
    (losing(lambda m: m[0].weight.sum()), ValueError, r"loss\(\) is linear in the weights"),
    (losing(lambda m: (m[0].weight ** 3).sum() * 0), ValueError, "curves upwards nowhere: .* from 0 to 0"),
    (losing(lambda m: -m[0].weight.square().sum()), ValueError, "upwards nowhere: .*-2 to -2; measure after some"),
    (losing(lambda m: (0 * m[0].weight).abs().pow(1.5).sum()), ValueError, "second derivatives .* are not finite"),
    (through(Once), ValueError, "the loss uses Once, which has no second derivative .*; measure with plain operations"),
    (losing(lambda m: Once.apply(m(X)).mean()), ValueError, "the loss uses Once"),
    (
        losing(lambda m: alignment(m(X))),
        RuntimeError,
        "cannot be differentiated twice: .*ctc_loss.*; use plain operations",
    ),
    (losing(lambda m: OfTorch.apply(m(X)).mean()), ValueError, "the loss uses OfTorch"),
    (losing(backward), ValueError, r"loss\(\) calls backward\(\) on what it returns.*leave backward\(\) out"),
    (losing(lambda m: None), TypeError, r"loss\(\) returned a NoneType; return the loss itself"),
    (losing(lambda m: m(X)[:0]), ValueError, r"loss\(\) returned torch\.float64 of shape \(0, 3\); return one number"),
    (losing(lambda m: entropy(m) + 0j), ValueError, r"loss\(\) returned torch\.complex128 of shape \(\)"),
    (lambda m: measured(nn.Identity()), ValueError, "model=Identity has no weight that requires gradients"),
    (lambda m: measured(inside_inference_mode()), ValueError, r"'0\.weight' was made under torch\.inference_mode\(\)"),
    (lambda m: measured(m, progress=3), TypeError, "progress=3 is not a function; give one of two arguments"),
    (through(Kernel), ValueError, "second derivatives of the loss are not symmetric.*; use plain operations"),
    (beside("SGD"), ValueError, r"optimizer=SGD has no second moment of the weight '0\.weight'; .*or none to"),
    (beside("Adam"), ValueError, "optimizer=Adam has no second moment .* give an Adam or AdamW that has stepped"),
    (beside("skipped"), ValueError, "optimizer=Adam has no second moment .* that has stepped"),
    (beside("wrong"), TypeError, r"optimizer=str is not a torch\.optim\.Optimizer; give the Adam that trains"),
    (beside("other"), ValueError, r"optimizer does not have the weight '0\.weight'; give the one that trains it"),
)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_measured_is_refused(call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(mlp())


def test_operations_that_are_not_torchs_own_are_warned_about() -> None:
    found = measured(mlp(), lambda net: Kernel.apply(net(X)).mean())  # symmetric, and most of the curvature is missing
    assert found.foreign == ("Kernel",)
    assert any("uses Kernel, not torch's own" in warning for warning in tb.recommend(100, curvatures=found).warnings)
    assert measured(mlp()).foreign == ()


def test_an_error_of_the_loss_is_the_users_own() -> None:
    with pytest.raises(ZeroDivisionError):
        measured(mlp(), lambda model: 1 / 0)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match=r"sparse gradients.*nn\.Embedding\(sparse=False\)"):
        measured(table, lambda table: table(torch.tensor([1, 2])).square().sum())


# Advice --------------------------------------------------------------------------------------------------------------


def test_recommend_takes_what_was_measured() -> None:
    found = measured(Quadratic(torch.tensor([4.0, 0.4, 0.04])), lambda model: model())
    advice = tb.recommend(300, curvatures=found, noise=0.1, batch=8, start=2.0)
    same = tb.recommend(300, curvatures=found.curvatures, noise=0.1, batch=8, start=2.0)  # one direction each
    assert (advice.method, advice.lr, advice.loss, advice.warnings) == (same.method, same.lr, same.loss, ())
    many = tb.physics.spectrum.Spectrum((4.0, 0.04), (1.0, 200.0), lowest=0.0, products=2)
    problem = Problem.of([4.0, 0.04], counts=[1.0, 200.0], noise=0.1, batch=8)
    assert tb.recommend(300, curvatures=many, noise=0.1, batch=8).problem == problem


def test_the_momentum_is_that_of_the_adam_that_was_measured() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    entropy(model).backward()
    optimizer.step()
    found = measured(model, optimizer=optimizer)
    by_itself, told, other = (
        tb.recommend(300, curvatures=found, **beta) for beta in ({}, {"beta1": 0.8}, {"beta1": 0})
    )
    assert by_itself.beta1 == 0.8
    assert by_itself == told != other
    assert tb.recommend(300, curvatures=found.curvatures).beta1 == 0


def test_a_loss_that_curves_downwards_is_warned_about() -> None:
    saddle = Quadratic(torch.tensor([4.0, 1.0, -0.5]))
    found = measured(saddle, lambda model: model())
    assert found.lowest == pytest.approx(-0.5, rel=1e-5)
    assert len(found.curvatures) == 2
    (warning,) = tb.recommend(300, curvatures=found, caveats=()).warnings
    assert "far from a quadratic" in warning
    assert "by -0.5 against 4 upwards" in warning
    slight = measured(Quadratic(torch.tensor([4.0, 1.0, -0.1])), lambda model: model())
    assert tb.recommend(300, curvatures=slight).warnings == ()


SPECTRA = {
    "a power law": 10 * torch.arange(1, 2001, dtype=torch.float64) ** -1.0,
    "outliers": torch.cat([torch.tensor([10.0, 6.0, 3.0, 1.0]), torch.logspace(-1, -4, 1996)]).double(),
    "all scales": torch.logspace(1, -4, 2000, dtype=torch.float64),
}


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [0.05, 2.0])
@pytest.mark.parametrize("name", SPECTRA)
def test_advice_from_a_few_products_is_nearly_that_of_all_curvatures(name: str, noise: float) -> None:
    problem = Problem.of(SPECTRA[name].tolist(), noise=noise, batch=32)
    found = measured(Quadratic(SPECTRA[name]), lambda model: model())
    assert 0.95 * problem.largest < found.largest <= problem.largest * (1 + 1e-9)
    fine = problem.merged(40)
    losses = []
    for advice in (
        tb.recommend(1000, curvatures=problem),
        tb.recommend(1000, curvatures=found, noise=noise, batch=32),
    ):
        method, lr = advice.method, advice.lr
        free = isinstance(method, tb.methods.schedule_free)
        loss = fine.loss_free(method.beta, lr, 1000) if free else fine.loss(method.coupling(1, lr), lr, 1000)
        losses.append(loss.total)
    assert losses[1] <= 1.2 * losses[0]

"""What holds for every averaging method, whatever its numbers: symmetries, bounds, round trips.

Each example is a method with random numbers around SGD on weights of a few shapes. Gradients are written by hand, so
that the symmetries hold to the last bit where floating point allows them to.
"""

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchbelay as tb
from helpers.problems import bf16, f32, f64, same
from torchbelay import Coupling, Spring, methods
from torchbelay.ops import reference

STEPS = 15
SHAPES = {"a": (3, 4), "b": (5,), "c": (), "d": (2, 1, 3)}
RATES = {"a": 0.3, "b": 0.3, "c": 0.05, "d": 0.1}  # parameters with one rate form a group

examples = settings(deadline=None, max_examples=50, derandomize=True)
seeds = st.integers(0, 2**31)

# Methods with random numbers ------------------------------------------------------------------------------------------


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def velocity_free(draw: st.DrawFn, m1: st.SearchStrategy[float] | None = None) -> Spring:
    masses = draw(between(1.0, 100.0) | st.just(math.inf) if m1 is None else m1), draw(between(1.0, 100.0))
    k = draw(between(0.01, 1.9)) * min(masses)  # κ = k/(2m) < 0.95 for both
    return Spring(k=k, m1=masses[0], m2=masses[1], follow=draw(st.sampled_from(["before", "after"])))


@st.composite
def swinging(draw: st.DrawFn) -> Spring:
    """A stable spring with velocities: δ, the same for both masses, between ω²/4 and 1."""
    m1, m2 = draw(between(5.0, 50.0)), draw(between(5.0, 50.0))
    k = draw(between(0.05, 1.0)) * min(m1, m2)
    omega2 = k * (1 / m1 + 1 / m2)
    delta = omega2 / 4 + draw(between(0.05, 0.95)) * (1 - omega2 / 4)
    return Spring(
        k=k, m1=m1, m2=m2, c1=2 * m1 * delta, c2=2 * m2 * delta, force=draw(st.sampled_from(["derived", "printed"]))
    )


WATCHING = [
    st.builds(Spring.ema, decay=between(0.01, 0.999)),
    st.builds(
        methods.ema,
        decay=between(0.01, 0.999),
        warmup=st.sampled_from([None, "ratio", "inverse-power"]),
        follow=st.sampled_from(["before", "after"]),
    ),
    st.builds(methods.swa, every=st.integers(1, 4)),
    st.builds(methods.power_ema, gamma=between(0.0, 10.0)),
]
ATTRACTING = [
    velocity_free(),
    st.builds(methods.easgd, alpha=between(0.01, 0.5)),
    st.builds(methods.lookahead, k=st.integers(1, 7), alpha=between(0.1, 1.0)),
    st.builds(methods.switch_ema, decay=between(0.1, 0.99), every=st.integers(1, 7)),
]
REPELLING = [
    st.builds(methods.heavy_ball, momentum=between(0.0, 0.95)),
    st.builds(methods.nesterov, momentum=between(0.0, 0.95)),
    st.builds(methods.schedule_free, beta=between(0.0, 0.9), r=st.sampled_from([0.0, 1.0])),
    st.builds(methods.primal_averaging, mu_x=between(0.0, 0.99), mu_y=between(0.0, 0.9)),
]
any_method = st.one_of(
    *WATCHING,
    *ATTRACTING,
    *REPELLING,
    swinging(),
    st.builds(
        methods.centred,
        theta=between(-0.8, 2.0),
        rate=between(0.01, 0.9),
        follow=st.sampled_from(["before", "after"]),
    ),
)
attracting = st.one_of(*WATCHING, *ATTRACTING)

# Training -------------------------------------------------------------------------------------------------------------

Gradient = Callable[[str, Tensor, int], Tensor]
Weights = dict[str, Tensor]


def weights(seed: int, dtype: torch.dtype = f64) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def pull_of(seed: int) -> Gradient:
    """A gradient that is not linear in the weights, and another one at every step."""
    generator = torch.Generator().manual_seed(seed + 1)
    noise = {name: torch.randn(STEPS, *shape, generator=generator).double() for name, shape in SHAPES.items()}
    return lambda name, w, t: torch.tanh(w) + 0.1 * w - noise[name][t - 1].to(w.dtype)


class Run:
    """A model, its SGD and a Belay; learning rates change, because no method may take them for constant."""

    def __init__(
        self,
        begin: Weights,
        method: Any,
        *,
        order: Iterable[str] = SHAPES,
        rates: dict[str, float] = RATES,
        **options: Any,
    ) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(begin[name].clone()) for name in order})
        groups: dict[float, list[nn.Parameter]] = {}
        for name, p in self.model.items():
            groups.setdefault(rates[name], []).append(p)
        self.optimizer = torch.optim.SGD([{"params": ps, "lr": lr, "base": lr} for lr, ps in groups.items()])
        self.stepped: Weights = {}  # w1*: this hook comes before Belay's
        self.optimizer.register_step_post_hook(lambda *_: self.stepped.update(self.weights()))
        self.belay = tb.Belay(self.model, self.optimizer, method, **options)

    def weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self.model.items()}

    def now(self) -> tuple[Weights, Weights]:
        return self.weights(), self.belay.average_state_dict()

    def step(self, gradient: Gradient, t: int) -> None:
        for name, p in self.model.items():
            p.grad = gradient(name, p.detach(), t)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * (1 + math.sin(3 * t) / 2)
        self.optimizer.step()

    def go(self, gradient: Gradient, since: int = 0, until: int = STEPS) -> tuple[Weights, Weights]:
        """Take the steps after `since`: (weights, average) at the end."""
        for t in range(since + 1, until + 1):
            self.step(gradient, t)
        return self.now()


def assert_same_bits(*pairs: tuple[Weights, Weights]) -> None:
    for x, y in pairs:
        assert x.keys() == y.keys()
        assert not [name for name in x if not same(x[name], y[name])]


# Symmetries -----------------------------------------------------------------------------------------------------------


@examples
@given(method=any_method, seed=seeds, shift=between(-10.0, 10.0))
def test_shifted_weights_take_the_shifted_path(method: Any, seed: int, shift: float) -> None:
    begin, gradient = weights(seed), pull_of(seed)
    here = Run(begin, method).go(gradient)
    there = Run({name: w + shift for name, w in begin.items()}, method).go(
        lambda name, w, t: gradient(name, w - shift, t)
    )
    for x, y in zip(here, there, strict=True):
        for name in SHAPES:
            # w + shift is rounded at every step, to 1e-15; the steepest methods amplify that some hundredfold
            torch.testing.assert_close(x[name], y[name] - shift, rtol=0, atol=1e-12)


@examples
@given(method=any_method, seed=seeds, power=st.integers(-40, 40))
def test_scaled_weights_take_the_scaled_path(method: Any, seed: int, power: int) -> None:
    begin, gradient, scale = weights(seed), pull_of(seed), 2.0**power  # a power of two rounds nothing
    here = Run(begin, method).go(gradient)
    there = Run({name: scale * w for name, w in begin.items()}, method).go(
        lambda name, w, t: scale * gradient(name, w / scale, t)
    )
    for x, y in zip(here, there, strict=True):
        assert_same_bits(({name: scale * w for name, w in x.items()}, y))


@examples
@given(method=any_method, seed=seeds, order=st.permutations(list(SHAPES)))
def test_the_order_of_parameters_and_groups_does_not_matter(method: Any, seed: int, order: list[str]) -> None:
    begin, gradient = weights(seed), pull_of(seed)
    here, there = Run(begin, method).go(gradient), Run(begin, method, order=order).go(gradient)
    assert_same_bits(*zip(here, there, strict=True))


@examples
@given(method=any_method, seed=seeds)
def test_parameters_move_as_if_each_were_alone(method: Any, seed: int) -> None:
    begin, gradient = weights(seed), pull_of(seed)
    together = Run(begin, method).go(gradient)
    for name in SHAPES:
        alone = Run(begin, method, order=[name]).go(gradient)
        assert_same_bits(*((x, {name: y[name]}) for x, y in zip(alone, together, strict=True)))


# Limits and bounds ----------------------------------------------------------------------------------------------------


@examples
@given(spring=velocity_free(m1=st.just(math.inf)), seed=seeds)
def test_a_heavy_model_approaches_an_infinitely_heavy_one(spring: Spring, seed: int) -> None:
    """The difference is of the first order in 1/m1: a hundredfold mass makes it a hundred times smaller."""

    def end(kappa1: float) -> Tensor:
        m1 = spring.k / (2 * kappa1) if kappa1 else math.inf
        run = Run(weights(seed), Spring(k=spring.k, m1=m1, m2=spring.m2, follow=spring.follow))
        return torch.cat([w.reshape(-1) for side in run.go(pull_of(seed)) for w in side.values()])

    limit = end(0.0)
    near, nearer = ((end(kappa1) - limit).abs().max().item() for kappa1 in (1e-5, 1e-7))
    assert near < 1e-3
    assert near / nearer == pytest.approx(100, rel=1e-2)  # what is of the second order is about STEPS·1e-5 of it


@examples
@given(method=attracting, seed=seeds)
def test_an_attracted_average_stays_among_the_weights_it_has_seen(method: Any, seed: int) -> None:
    run, gradient = Run(weights(seed), method), pull_of(seed)
    seen = [run.weights()]
    for t in range(1, STEPS + 1):
        run.step(gradient, t)
        w1, w2 = run.now()
        seen += [dict(run.stepped), w1]
        for name in SHAPES:
            points = torch.stack([w[name] for w in seen])
            slack = 1e-14 * points.abs().max()  # the rounding of that number of interpolations
            assert (w2[name] >= points.amin(0) - slack).all()
            assert (w2[name] <= points.amax(0) + slack).all()


@examples
@given(method=any_method, seed=seeds, power=between(-30, 30), dtype=st.sampled_from([f64, f32]))
def test_weights_that_stand_still_are_their_own_average(
    method: Any, seed: int, power: float, dtype: torch.dtype
) -> None:
    begin = {name: w * 10.0**power for name, w in weights(seed, dtype).items()}
    w1, w2 = Run(begin, method).go(lambda name, w, t: torch.zeros_like(w))
    assert_same_bits((w1, begin), (w2, begin))


# Round trips ----------------------------------------------------------------------------------------------------------


def saved_and_loaded(state: Any) -> Any:
    """Through a file, as a checkpoint goes, and through torch's safe unpickler."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@examples
@given(method=any_method, seed=seeds, cut=st.integers(0, STEPS), start=st.integers(0, 6))
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    method: Any, seed: int, cut: int, start: int
) -> None:
    gradient = pull_of(seed)
    whole = Run(weights(seed), method, start=start).go(gradient)

    first = Run(weights(seed), method, start=start)
    first.go(gradient, until=cut)
    parts = (first.model, first.optimizer, first.belay)
    checkpoint = saved_and_loaded([part.state_dict() for part in parts])
    second = Run(weights(seed + 99), copy.deepcopy(method), start=start)
    for part, state in zip((second.model, second.optimizer, second.belay), checkpoint, strict=True):
        part.load_state_dict(state)
    assert_same_bits(*zip(second.now(), first.now(), strict=True))
    assert_same_bits(*zip(second.go(gradient, since=cut), whole, strict=True))
    assert second.belay.step == STEPS


def any_bits(seed: int, dtype: torch.dtype) -> Weights:
    """Weights with every pattern of bits that the dtype has: infinities, nans and −0 too."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, shape in SHAPES.items():
        size = (math.prod(shape) * dtype.itemsize,)
        drawn[name] = torch.randint(256, size, generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)
    return drawn


@pytest.mark.filterwarnings("ignore:the weights have changed, but no step was seen:UserWarning")  # so it is meant
@examples
@given(
    seed=seeds,
    dtype=st.sampled_from([f64, f32, bf16, torch.float16]),
    own=st.sampled_from([None, f32, f64]),
    fails=st.booleans(),
)
def test_swapping_the_average_in_and_out_twice_changes_no_bit(
    seed: int, dtype: torch.dtype, own: torch.dtype | None, fails: bool
) -> None:
    run = Run(any_bits(seed, dtype), Spring.ema(decay=0.9), dtype=own)
    with torch.no_grad():
        for name, w in any_bits(seed + 1, dtype).items():
            run.model[name].copy_(w)

    def everything() -> tuple[Weights, Weights]:
        return run.weights(), copy.deepcopy(run.belay.state_dict()["averages"]["average"]["weights"])

    before = everything()
    for _ in range(2):
        try:
            with run.belay.averaged():
                inside = run.weights()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        for name, w2 in before[1].items():  # rounding may change which nan it is
            torch.testing.assert_close(inside[name], w2.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert_same_bits(*zip(everything(), before, strict=True))


# The one linear map ---------------------------------------------------------------------------------------------------

numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-4, 0.9999, 2.0]), between(-3.0, 3.0))


def relaxing(a: float, b: float, after: bool) -> Coupling:
    return Coupling(a, b, 1 - a, b if after else 0.0)


def without_copy(before: float, pull: float, follow: float) -> Coupling:
    """What moving w2 before the step, and both after it, comes to."""
    return Coupling(pull * (1 - before), 1 - (1 - follow) * (1 - before), 1 - pull, follow)


couplings = st.one_of(
    st.builds(Coupling, numbers, numbers, numbers, numbers),
    st.builds(relaxing, numbers, numbers, st.booleans()),
    st.builds(without_copy, numbers, numbers, numbers),
)


class Listed:
    """A user's own method: `coupling` and nothing else."""

    def __init__(self, listed: list[Coupling]) -> None:
        self.listed = listed

    def coupling(self, step: int, lr: float) -> Coupling:
        return self.listed[(step - 1) % len(self.listed)]


@settings(examples, max_examples=300)
@given(listed=st.lists(couplings, min_size=1, max_size=6), seed=seeds, impl=st.sampled_from(["foreach", "reference"]))
def test_any_coupling_of_ones_own_is_the_linear_map(listed: list[Coupling], seed: int, impl: str) -> None:
    run, gradient = Run(weights(seed), Listed(listed), impl=impl), pull_of(seed)
    for t, c in enumerate(listed, 1):
        before = run.now()
        run.step(gradient, t)
        for name in SHAPES:
            w1, w2 = (side[name] for side in before)
            u = run.stepped[name] - w1
            expected = reference.couple(w1, w2, u, a=c.a, b=c.b, p=c.p, q=c.q)
            # some ten roundings, and numbers that agree to 1e-14 may be taken for the same
            size = max(x.abs().max().item() for x in (w1, w2, u))
            slack = 2e-14 * size * (1 + abs(c.a) + abs(c.b) + abs(c.p) + abs(c.q))
            for new, right in zip(run.now(), expected, strict=True):
                torch.testing.assert_close(new[name], right, rtol=0, atol=slack)


@pytest.mark.parametrize("coupling", [Coupling(1.0, 1.0, 1 - 1e-6, 1.0), Coupling(0.0, 0.5, 1.0, 1 - 1e-6)])
def test_a_step_without_a_copy_is_as_exact_as_one_with_it(coupling: Coupling) -> None:
    """w2 must not go a million times its way before the step, to be brought back after it, in float32."""
    apart = Coupling(0.0, 0.0, 1.0, 0.0)
    ends = []
    for impl in ("foreach", "reference"):
        run = Run(weights(3, f32), Listed([apart, coupling]), impl=impl)
        ends.append(run.go(pull_of(3), until=2))
    for x, y in zip(*ends, strict=True):
        torch.testing.assert_close(x, y)

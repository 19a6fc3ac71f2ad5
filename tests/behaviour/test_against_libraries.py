"""Averaging methods, through `Belay` around a real torch optimizer, against the libraries that have them.

These are torch's own optimizers and averages and the schedulefree, torch-ema and ema-pytorch packages. Both sides train
the same network on the same fresh batches, and every step of both trajectories is compared.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

import torchbelay as tb
from helpers.problems import MLP, f32, f64
from helpers.side_by_side import STEPS, TOLERANCE, Make, Schedule, adamw, assert_same, belayed, flat, jagged, sgd, train
from torchbelay import methods

# Momentum: torch's own -----------------------------------------------------------------------------------------------


SCHEDULES: dict[str, Schedule] = {
    "constant": lambda t: 0.1,
    "warm-up": lambda t: 0.1 * min(1.0, t / 20),
    "cosine to zero": lambda t: 0.05 * (1 + math.cos(math.pi * (t - 1) / (STEPS - 1))),
    "steps": lambda t: 0.1 * 0.1 ** (t // 40),
    "jagged": jagged,
}
MOMENTUM = [(methods.heavy_ball, False), (methods.nesterov, True)]
both_momenta = pytest.mark.parametrize(("method", "nesterov"), MOMENTUM, ids=["heavy_ball", "nesterov"])


def torch_momentum(
    nesterov: bool, lr: Schedule, *, momentum: float = 0.9, weight_decay: float = 0.0, forget_at: tuple[int, ...] = ()
) -> Tensor:
    """The weights of torch's SGD; momentum buffers emptied after the steps `forget_at`."""
    net = MLP.model()
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
    )

    def forget(t: int) -> None:
        for p in net.parameters() if t in forget_at else ():
            optimizer.state[p]["momentum_buffer"].zero_()

    return train(net, optimizer, lr=lr, after=forget)


@both_momenta
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_momentum_is_torchs_under_any_positive_schedule(method, nesterov, schedule, weight_decay) -> None:
    lr = SCHEDULES[schedule]
    mine = belayed(method(0.9), sgd(weight_decay=weight_decay), lr=lr)
    assert_same(mine[:1], (torch_momentum(nesterov, lr, weight_decay=weight_decay),))


@both_momenta
@pytest.mark.parametrize("momentum", [0.3, 0.99])
def test_momentum_is_torchs_for_any_mu(method, nesterov, momentum) -> None:
    def lr(t: int) -> float:
        return (1 - momentum) * jagged(t)  # at 0.99 the full rate is chaotic

    assert_same(belayed(method(momentum), sgd(), lr=lr)[:1], (torch_momentum(nesterov, lr, momentum=momentum),))


@both_momenta
def test_momentum_remembers_the_learning_rate_of_each_group(method, nesterov) -> None:
    def run(**momentum: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        net = MLP.model()
        groups = [{"params": net.inner.parameters(), "lr": 0.1}, {"params": [net.gain, net.outer.weight], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, **momentum)
        curves = [lambda t: 1 / (1 + t / 30), lambda t: 1 + math.sin(t) / 2]
        return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, curves)

    theirs, their_optimizer, their_schedule = run(momentum=0.9, nesterov=nesterov)
    mine, my_optimizer, my_schedule = run()
    tb.Belay(mine, my_optimizer, method(0.9))
    there = train(theirs, their_optimizer, after=lambda t: their_schedule.step())
    here = train(mine, my_optimizer, after=lambda t: my_schedule.step())
    assert_same((here,), (there,))


@both_momenta
@pytest.mark.parametrize(
    ("schedule", "zero_at"),
    [(lambda t: 0.005 * (t - 1) if t <= 20 else 0.1, (1,)), (lambda t: 0.1 * abs(math.cos(math.pi * t / 40)), (20,))],
    ids=["warm-up from zero", "restart through zero"],
)
def test_a_step_at_learning_rate_zero_forgets_the_momentum(method, nesterov, schedule, zero_at) -> None:
    """The weights did not move, so that the gradient is unknown: the one case in which torch's momentum knows more."""

    def lr(t: int) -> float:
        return 0.0 if t in zero_at or abs(schedule(t)) < 1e-9 else schedule(t)

    zeros = tuple(t for t in range(1, STEPS + 1) if lr(t) == 0)
    assert set(zero_at) <= set(zeros)
    mine = belayed(method(0.9), sgd(), lr=lr)[0]
    assert_same((mine,), (torch_momentum(nesterov, lr, forget_at=zeros),))
    first = zeros[0]
    remembering = torch_momentum(nesterov, lr)
    assert_same((mine[:first],), (remembering[:first],))
    assert (mine[first + 1 :] - remembering[first + 1 :]).abs().amax() > 1e-4  # different after it


# Averages that only watch: torch's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.05, 0.3, 0.5, 0.9, 0.999, 0.9999])
def test_ema_is_torchs_bit_for_bit_in_float32(decay: float) -> None:
    net = MLP.model(f32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torchs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay))
    torchs.update_parameters(net)  # its first update is a copy
    belay = tb.Belay(net, optimizer, tb.Spring.ema(decay), spectators={"method": methods.ema(decay)})

    def compare(t: int) -> None:
        torchs.update_parameters(net)
        for name in ("average", "method"):
            mine = belay.average_state_dict(name)
            assert all(torch.equal(mine[key], value) for key, value in torchs.module.state_dict().items()), (name, t)

    train(net, optimizer, steps=500, after=compare)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(
    ("torchs_way", "dtype", "tolerance"),
    [
        ({"avg_fn": get_swa_avg_fn()}, f64, TOLERANCE),
        # get_swa_multi_avg_fn makes its weights 1/(n+1) in float32, even for float64 parameters
        ({"multi_avg_fn": get_swa_multi_avg_fn()}, f64, 1e-8),
        ({"multi_avg_fn": get_swa_multi_avg_fn()}, f32, 0.0),  # the same to the last bit
    ],
    ids=["avg_fn", "multi_avg_fn", "multi_avg_fn in float32"],
)
def test_swa_is_torchs(every: int, torchs_way: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    net = MLP.model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torchs = AveragedModel(net, **torchs_way)
    belay = tb.Belay(net, optimizer, methods.swa(every=every))

    def compare(t: int) -> None:
        if t % every == 0:
            torchs.update_parameters(net)
        mine, theirs = (flat(d.values()) for d in (belay.average_state_dict(), torchs.module.state_dict()))
        assert_same((mine,), (theirs,), tolerance)

    train(net, optimizer, after=compare)
    assert int(torchs.n_averaged) == STEPS // every


# Warm-ups: the packages that have them -------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.8, 0.9999])
def test_ratio_warm_up_is_torch_emas(decay: float) -> None:
    torch_ema = pytest.importorskip("torch_ema", reason="the warm-up by (1+t)/(10+t) is compared with torch-ema's")
    net = MLP.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    theirs = torch_ema.ExponentialMovingAverage(net.parameters(), decay=decay, use_num_updates=True)
    belay = tb.Belay(net, optimizer, methods.ema(decay, warmup="ratio"))

    def compare(t: int) -> None:
        theirs.update()
        assert_same((flat(belay.average_state_dict().values()),), (flat(theirs.shadow_params),))

    train(net, optimizer, after=compare)


@pytest.mark.parametrize(("decay", "power"), [(0.9, 2 / 3), (0.9999, 2 / 3), (0.9999, 0.75)])
def test_inverse_power_warm_up_is_ema_pytorchs(decay: float, power: float) -> None:
    ema_pytorch = pytest.importorskip("ema_pytorch", reason="the warm-up by 1−(1+t)^−power is compared with its")
    net = MLP.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    theirs = ema_pytorch.EMA(net, beta=decay, power=power, update_every=1, update_after_step=0)
    theirs.update()  # its first update is a copy
    belay = tb.Belay(net, optimizer, methods.ema(decay, warmup="inverse-power", power=power))

    def compare(t: int) -> None:
        theirs.update()
        mine = flat(belay.average_state_dict().values())
        # it computes its decays in float32
        assert_same((mine,), (flat(theirs.ema_model.state_dict().values()),), 1e-7)

    train(net, optimizer, after=compare)


# Schedule-free: the authors' package ---------------------------------------------------------------------------------

WARM_UP = 30
SCHEDULE_FREE: dict[str, tuple[dict[str, Any], Schedule]] = {  # the package's arguments; the same as a factor of lr
    "constant": ({}, lambda t: 1.0),
    "warm-up": ({"warmup_steps": WARM_UP}, lambda t: min(1.0, t / WARM_UP)),
    "warm-up, r and another power": (
        {"warmup_steps": WARM_UP, "r": 0.5, "weight_lr_power": 1.0},
        lambda t: min(1.0, t / WARM_UP),
    ),
}


def compare_schedule_free(theirs_of: Make, mine_of: Make, beta: float, lr: float, case: str, given: Schedule) -> None:
    """Compare y at every step and x at every tenth; `given` is a schedule from outside, known to both."""
    inside, factor = SCHEDULE_FREE[case]
    power = {key: value for key, value in inside.items() if key != "warmup_steps"}
    mine = belayed(methods.schedule_free(beta, **power), mine_of, lr=lambda t: lr * factor(t) * given(t))
    net = MLP.model()
    optimizer = theirs_of(net.parameters())
    for group in optimizer.param_groups:
        group.update(inside)
    optimizer.train()
    compared = []

    def compare(t: int) -> None:
        assert_same((flat(net.parameters()),), (mine[0][t - 1],))
        if t % 10 == 0:
            optimizer.eval()
            assert_same((flat(net.parameters()),), (mine[1][t - 1],))
            optimizer.train()
            compared.append(t)

    train(net, optimizer, after=compare, lr=lambda t: lr * given(t))
    assert len(compared) == STEPS // 10


GIVEN: dict[str, Schedule] = {"as it is": lambda t: 1.0, "under a scheduler": lambda t: 1 / (1 + t / 100)}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("case", SCHEDULE_FREE)
@pytest.mark.parametrize(("beta", "weight_decay"), [(0.9, 0.03), (0.6, 0.0)])
def test_schedule_free_around_sgd_is_the_packages(beta: float, weight_decay: float, case: str, given: str) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedule_free is compared with the authors' package")
    compare_schedule_free(
        lambda p: schedulefree.SGDScheduleFree(p, lr=0.2, momentum=beta, weight_decay=weight_decay),
        sgd(weight_decay=weight_decay),
        beta,
        0.2,
        case,
        GIVEN[given],
    )


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("case", SCHEDULE_FREE)
@pytest.mark.parametrize(("beta", "weight_decay"), [(0.9, 0.05), (0.6, 0.0)])
def test_schedule_free_around_adamw_is_the_packages(beta: float, weight_decay: float, case: str, given: str) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedule_free is compared with the authors' package")
    compare_schedule_free(
        lambda p: schedulefree.AdamWScheduleFree(p, lr=0.02, betas=(beta, 0.99), weight_decay=weight_decay),
        adamw(betas=(0.0, 0.99), weight_decay=weight_decay),
        beta,
        0.02,
        case,
        GIVEN[given],
    )

"""Teachers, targets and samplers by `belay.module()`, against loops that update a second network by hand.

The other programs are written here as their authors publish them, and are compared with the packages themselves if
these are installed.
"""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchbelay as tb
from helpers.small import same

SMALL = 1e-12  # of float64 numbers around 1


def close(mine: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(dict(mine.state_dict()), dict(theirs.state_dict()), rtol=SMALL, atol=SMALL)


def second(model: nn.Module) -> nn.Module:
    """A copy to be updated by hand."""
    return copy.deepcopy(model).requires_grad_(False)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# DINO ----------------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A backbone and a head that normalises, as DINO's, in small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 4))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6, bias=False))
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.normalize(self.body(x), dim=-1))


def dino_momentum(base: float, final: float, steps: int) -> list[float]:
    """The published `cosine_scheduler` without warm-up: one number for each iteration of the run."""
    return [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]


def test_a_dino_teacher_with_momentum_from_996_to_1() -> None:
    """Student, teacher and centre of a whole run; the published update is of the teacher, after the student's step."""
    steps = 30
    runs: list[tuple[nn.Module, nn.Module]] = []
    for by_hand in (False, True):
        student = Head().double()
        optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=0.02)
        if by_hand:
            teacher = second(student)
        else:
            method = tb.methods.ema(tb.schedules.cosine(0.996, 1.0, steps + 1))
            teacher = tb.Belay(student, optimizer, method).module()
        centre = torch.zeros(6, dtype=torch.float64)
        for i, m in enumerate(dino_momentum(0.996, 1.0, steps)):
            views = [numbers(8, 3, seed=100 * i) + 0.1 * numbers(8, 3, seed=100 * i + view + 1) for view in range(2)]
            loss, seen = torch.zeros((), dtype=torch.float64), []
            with torch.no_grad():
                targets = [teacher(view) for view in views]
            for one, other in ((0, 1), (1, 0)):
                target = ((targets[one] - centre) / 0.04).softmax(-1)
                loss = loss - (target * (student(views[other]) / 0.1).log_softmax(-1)).sum(-1).mean() / 2
                seen.append(targets[one])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            centre = 0.9 * centre + 0.1 * torch.cat(seen).mean(0)
            if by_hand:
                with torch.no_grad():
                    for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
                        k.data.mul_(m).add_((1 - m) * q.detach().data)
        runs.append((student, teacher))
    (student, teacher), (other_student, other_teacher) = runs
    close(student, other_student)
    close(teacher, other_teacher)
    assert not same(dict(student.state_dict()), dict(teacher.state_dict()))


# Mean teacher --------------------------------------------------------------------------------------------------------


def test_a_mean_teacher_with_batchnorm_of_its_own() -> None:
    """The published `update_ema_variables`: parameters alone; the teacher's statistics are those of its own batches."""
    runs: list[tuple[nn.Module, nn.Module]] = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        student = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).double()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if by_hand:
            teacher = second(student)
        else:
            method = tb.methods.ema(0.9, warmup="inverse-power", power=1.0)
            teacher = tb.Belay(student, optimizer, method, buffers="ignore").module().train()
        for step in range(1, 31):
            x = numbers(16, 3, seed=step)
            found = student(x + 0.1 * numbers(16, 3, seed=1000 + step))
            with torch.no_grad():
                wanted = teacher(x + 0.1 * numbers(16, 3, seed=2000 + step))
            consistency = (found.softmax(-1) - wanted.softmax(-1)).square().mean()
            loss = functional.cross_entropy(found, x.sum(1).gt(0).long()) + consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if by_hand:
                alpha = min(1 - 1 / (step + 1), 0.9)
                for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                    q.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
        runs.append((student, teacher))
    close(runs[0][0], runs[1][0])
    close(runs[0][1], runs[1][1])
    assert (runs[0][1][1].running_mean - runs[0][0][1].running_mean).abs().max() > 1e-3


# Targets -------------------------------------------------------------------------------------------------------------


class Critics(nn.Module):
    """Two critics of states and actions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def learn(critics: nn.Module, optimizer: Any, targets: nn.Module) -> Iterator[int]:
    """Q-learning of both critics by the smaller of the targets' values; yields after every step of the optimizer."""
    for step in range(40):
        now, then, reward = (numbers(8, n, seed=3 * step + i) for i, n in enumerate((4, 4, 1)))
        with torch.no_grad():
            wanted = reward + 0.9 * torch.minimum(*targets(then))
        loss = torch.stack([(value - wanted).square().mean() for value in critics(now)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step + 1


Update = Callable[[int, Iterable[Tensor], Iterable[Tensor]], None]  # at a step, of parameters and those of the target


def polyak_update(tau: float) -> Update:
    """stable-baselines3's, as published: scale in place, then add."""

    def update(step: int, params: Iterable[Tensor], target_params: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for param, target_param in zip(params, target_params, strict=True):
                target_param.data.mul_(1 - tau)
                torch.add(target_param.data, param.data, alpha=tau, out=target_param.data)

    return update


def soft_update(eps: float) -> Update:
    """torchrl's SoftUpdate, as published: θ' ← θ'·ε + θ·(1 − ε)."""

    def update(step: int, params: Iterable[Tensor], target_params: Iterable[Tensor]) -> None:
        for source, target in zip(params, target_params, strict=True):
            target.data.lerp_(source.data, 1 - eps)

    return update


def hard_update(interval: int) -> Update:
    """torchrl's HardUpdate, as published: it copies when its counter has reached the interval, and counts from 0."""
    counter = 0

    def update(step: int, params: Iterable[Tensor], target_params: Iterable[Tensor]) -> None:
        nonlocal counter
        for source, target in zip(params, target_params, strict=True):
            if counter == interval:
                target.data.copy_(source.data)
        counter = 0 if counter == interval else counter + 1

    return update


def dqn_update(interval: int) -> Update:
    """Algorithm 1 of Mnih et al.: every C steps the target becomes a copy."""

    def update(step: int, params: Iterable[Tensor], target_params: Iterable[Tensor]) -> None:
        if step % interval == 0:
            for source, target in zip(params, target_params, strict=True):
                target.data.copy_(source.data)

    return update


TARGETS: dict[str, tuple[Any, Update]] = {
    "Polyak, stable-baselines3": (tb.methods.ema(1 - 0.05), polyak_update(0.05)),
    "soft, torchrl": (tb.methods.ema(0.95), soft_update(0.95)),
    "hard, torchrl": (tb.methods.hard_sync(every=7), hard_update(6)),
    "hard, DQN": (tb.methods.hard_sync(every=7), dqn_update(7)),
}


@pytest.mark.parametrize(("method", "update"), TARGETS.values(), ids=TARGETS)
def test_targets_of_a_pair_of_critics(method: Any, update: Update) -> None:
    critics, others = Critics().double(), Critics().double()
    optimizer, other_optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (critics, others))
    targets, by_hand = tb.Belay(critics, optimizer, method).module(), second(others)
    mine, theirs = learn(critics, optimizer, targets), learn(others, other_optimizer, by_hand)
    for step, _ in zip(mine, theirs, strict=True):
        update(step, others.parameters(), by_hand.parameters())
        close(targets, by_hand)
    close(critics, others)


def test_targets_that_update_moves_by_hand_and_then_become_copies() -> None:
    """`belay.update()`, for loops whose targets do not move with the optimizer, and a hard sync by `rate=1`."""
    critics, others = Critics().double(), Critics().double()
    belay = tb.Belay(critics, None, tb.methods.ema(0.95))
    targets, by_hand = belay.module(), second(others)
    optimizer, other_optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (critics, others))
    mine, theirs = learn(critics, optimizer, targets), learn(others, other_optimizer, by_hand)
    for step, _ in zip(mine, theirs, strict=True):
        if step % 3 == 0:
            belay.update(rate=1.0 if step % 12 == 0 else None)
            (dqn_update(1) if step % 12 == 0 else polyak_update(0.05))(step, others.parameters(), by_hand.parameters())
        close(targets, by_hand)
    close(critics, others)


@pytest.mark.skipif(importlib.util.find_spec("stable_baselines3") is None, reason="needs stable-baselines3")
def test_the_formula_of_polyak_update_is_that_of_the_package() -> None:
    from stable_baselines3.common.utils import polyak_update as theirs

    runs = [[numbers(3, 4, seed=i) for i in range(4)] for _ in range(2)]
    for step in range(5):
        polyak_update(0.05)(step, runs[0][:2], runs[0][2:])
        theirs(runs[1][:2], runs[1][2:], 0.05)
    assert same(runs[0], runs[1])


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="needs torchrl")
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_formulas_of_target_updates_are_those_of_torchrl(kind: str) -> None:
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, HardUpdate, SoftUpdate

    torch.manual_seed(0)
    actor = QValueActor(nn.Linear(3, 2).double(), in_keys=["observation"], action_space="one-hot")
    loss = DQNLoss(actor, delay_value=True, action_space="one-hot")
    updater = SoftUpdate(loss, eps=0.95) if kind == "soft" else HardUpdate(loss, value_network_update_interval=3)
    ours = soft_update(0.95) if kind == "soft" else hard_update(3)
    params = [p.detach() for p in loss.value_network_params.values(True, True)]
    targets = [p.detach() for p in loss.target_value_network_params.values(True, True)]
    by_hand = [t.clone() for t in targets]
    for step in range(12):
        with torch.no_grad():
            for i, p in enumerate(params):
                p.add_(numbers(*p.shape, seed=10 * step + i))
        updater.step()
        ours(step, params, by_hand)
        assert same(targets, by_hand), step


# A GAN ---------------------------------------------------------------------------------------------------------------


def test_the_generator_of_a_gan_is_sampled_at_any_time() -> None:
    """As in StyleGAN's loop: p_ema ← p.lerp(p_ema, β), buffers copied; samples in between disturb nothing."""
    runs: list[tuple[nn.Module, nn.Module, list[Tensor]]] = []
    beta = 0.5 ** (1 / 5)
    for by_hand in (False, True):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
        critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 6).double()), nn.ReLU(), nn.Linear(6, 1).double()
        )
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.0, 0.99)) for net in (generator, critic)]
        if by_hand:
            sampler = second(generator).eval()
        else:
            sampler = tb.Belay(generator, optimizers[0], tb.methods.ema(half_life=5)).module()
        samples = []
        for step in range(20):
            fake = generator(numbers(8, 2, seed=step))
            samples.append(sampler(numbers(4, 2)))
            loss = (critic(fake.detach()) - critic(numbers(8, 3, seed=step))).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            loss = -critic(fake).mean()
            samples.append(sampler(numbers(4, 2)))  # while the graph of `fake` waits
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            if by_hand:
                with torch.no_grad():
                    for p_ema, p in zip(sampler.parameters(), generator.parameters(), strict=True):
                        p_ema.copy_(p.lerp(p_ema, beta))
                    for b_ema, b in zip(sampler.buffers(), generator.buffers(), strict=True):
                        b_ema.copy_(b)
        runs.append((generator, sampler, samples))
    (generator, sampler, samples), (other, other_sampler, other_samples) = runs
    close(generator, other)
    close(sampler, other_sampler)
    torch.testing.assert_close(samples, other_samples, rtol=SMALL, atol=SMALL)

"""EDM: its frame and its loss by hand, its sampler on Gaussians, whose path is known, and a small network learning."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError
from torchbelay.lab.score.models import augment
from torchbelay.lab.score.models.edm import CIFAR10, EDM, SIGMA_MAX, SIGMA_MIN, Frame, heun
from torchbelay.lab.score.models.objective import Draws
from torchbelay.lab.score.models.unet import UNetShape

f64 = torch.float64
FRAME = Frame(0.5)
SMALL = EDM((1, 8, 8), UNetShape(channels=16, multipliers=(1, 2), blocks=1, attention=(4,), dropout=0.0))


class Parrot(nn.Module):
    """Says the same to everything, and remembers what it was asked."""

    def __init__(self, says: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.says, self.dtype = says, dtype
        self.asked: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None = None) -> Tensor:
        self.asked.append((x, c_noise, labels))
        return torch.full_like(x, self.says, dtype=self.dtype)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ignore(n: int) -> None:
    pass


# The frame ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "c_skip", "c_out", "c_in", "weight"),
    [
        (0.5, 0.5, 0.5 / math.sqrt(2), math.sqrt(2), 8.0),
        (0.375, 0.64, 0.3, 1.6, 100 / 9),  # σ² + σ_data² = 0.625²
        (1.2, 25 / 169, 6 / 13, 1 / 1.3, 169 / 36),  # 1.3²
    ],
)
def test_the_frame_is_table_1s(sigma: float, c_skip: float, c_out: float, c_in: float, weight: float) -> None:
    at = torch.tensor(sigma, dtype=f64)
    said = [FRAME.c_skip(at), FRAME.c_out(at), FRAME.c_in(at), FRAME.c_noise(at), FRAME.weight(at)]
    assert [float(value) for value in said] == pytest.approx([c_skip, c_out, c_in, math.log(sigma) / 4, weight])


@pytest.mark.parametrize("sigma_data", [0.5, 1.7])
def test_the_frame_keeps_everything_at_unit_variance(sigma_data: float) -> None:
    frame, n = Frame(sigma_data), 40_000
    sigma = torch.logspace(-2.5, 1.9, 12, dtype=f64)[:, None]
    torch.testing.assert_close(frame.weight(sigma) * frame.c_out(sigma) ** 2, torch.ones_like(sigma))
    clean = sigma_data * torch.randn(len(sigma), n, generator=generator(1), dtype=f64)
    noisy = clean + sigma * torch.randn(len(sigma), n, generator=generator(2), dtype=f64)
    target = (clean - frame.c_skip(sigma) * noisy) / frame.c_out(sigma)  # what F is trained towards, Eq. 8
    for variance in ((frame.c_in(sigma) * noisy).var(1), target.var(1)):
        assert (variance - 1).abs().max() < 5 * math.sqrt(2 / n)


def test_denoising_is_the_frame_around_the_network() -> None:
    x, sigma = torch.full((2, 1, 8, 8), 0.875), torch.tensor([0.375, 1.2])
    network = Parrot(0.5)
    said = SMALL.denoise(network, x, sigma)
    expected = torch.tensor([0.64 * 0.875 + 0.3 * 0.5, 25 / 169 * 0.875 + 6 / 13 * 0.5])
    torch.testing.assert_close(said, expected.view(2, 1, 1, 1).expand_as(x))
    [(seen, c_noise, labels)] = network.asked
    torch.testing.assert_close(seen[:, 0, 0, 0], torch.tensor([1.6 * 0.875, 0.875 / 1.3]))
    torch.testing.assert_close(c_noise, sigma.log() / 4)
    assert labels is None


def test_a_fresh_network_denoises_as_the_best_linear_denoiser() -> None:
    x, sigma = torch.randn(3, 1, 8, 8, generator=generator()), torch.tensor([0.1, 0.5, 3.0])
    said = SMALL.denoise(SMALL.network(), x, sigma)
    torch.testing.assert_close(said, FRAME.c_skip(sigma).view(3, 1, 1, 1) * x, rtol=0, atol=0)


# The loss -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_what_it_is_by_hand() -> None:
    # y = 0.5, x = 0.875, D = 0.71, λ = 100/9: 0.21²·100/9. And y = −1, x = 0.2, D = 5/169 + 3/13 = 44/169, λ = 169/36.
    pixels = torch.tensor([0.75, 0.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    losses = SMALL.loss(Parrot(0.5), pixels, Draws(torch.tensor([0.375, 1.2]), torch.ones(2, 1, 8, 8)))
    torch.testing.assert_close(losses, torch.tensor([0.49, (213 / 169) ** 2 * 169 / 36]))


def test_the_loss_of_an_image_is_the_mean_over_its_pixels() -> None:
    pixels, draws = torch.rand(3, 1, 8, 8, generator=generator()), SMALL.draws(3, generator(1), augment=False)
    losses = SMALL.loss(Parrot(0.3), pixels, draws)
    assert losses.shape == (3,)
    assert losses.dtype == torch.float32
    for i, loss in enumerate(losses.tolist()):
        sigma, total = float(draws.sigma[i]), 0.0
        for pixel, noise in zip(pixels[i].flatten().tolist(), draws.noise[i].flatten().tolist(), strict=True):
            y = 2 * pixel - 1
            scale = math.sqrt(sigma**2 + 0.25)
            said = 0.25 / scale**2 * (y + sigma * noise) + 0.5 * sigma / scale * 0.3
            total += (scale / (0.5 * sigma)) ** 2 * (said - y) ** 2
        assert loss == pytest.approx(total / 64, rel=1e-3)


def test_silence_costs_about_1_on_data_of_the_expected_spread() -> None:
    pixels = (0.5 * torch.randn(4000, 1, 8, 8, generator=generator()) + 1) / 2
    losses = SMALL.loss(Parrot(0.0), pixels, SMALL.draws(4000, generator(1), augment=False))
    assert losses.mean() == pytest.approx(1, abs=0.02)


def test_autocast_is_for_the_network_alone() -> None:
    objective = replace(SMALL, augment=0.5)
    pixels, draws = torch.rand(6, 1, 8, 8, generator=generator()), objective.draws(6, generator(1), augment=True)
    expected = objective.loss(Parrot(0.25), pixels, draws)
    with torch.autocast("cpu", torch.bfloat16):
        losses = objective.loss(Parrot(0.25, torch.bfloat16), pixels, draws)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, expected)


def test_in_training_the_network_sees_the_augmented_image_and_is_told() -> None:
    objective, network = replace(SMALL, augment=1.0), Parrot(0.0)
    pixels, draws = torch.rand(5, 1, 8, 8, generator=generator()), objective.draws(5, generator(1), augment=True)
    losses = objective.loss(network, pixels, draws)
    assert draws.augment is not None
    moved = augment.warp(2 * pixels - 1, draws.augment)
    [(seen, _, told)] = network.asked
    assert told is not None
    assert torch.equal(told, augment.labels(draws.augment))
    column = draws.sigma.view(5, 1, 1, 1)
    torch.testing.assert_close(seen, FRAME.c_in(column) * (moved + column * draws.noise))
    plain = objective.loss(Parrot(0.0), (moved + 1) / 2, Draws(draws.sigma, draws.noise))
    torch.testing.assert_close(losses, plain)  # the target moves with the image


# What is drawn --------------------------------------------------------------------------------------------------------


def test_noise_levels_are_log_normal_and_noise_is_normal() -> None:
    n = 20_000
    draws = replace(SMALL, shape=(1, 2, 2)).draws(n, generator(), augment=False)
    log = draws.sigma.log()
    assert log.mean() == pytest.approx(-1.2, abs=4.5 * 1.2 / math.sqrt(n))
    assert log.std() == pytest.approx(1.2, rel=4.5 / math.sqrt(2 * n))
    assert draws.noise.shape == (n, 1, 2, 2)
    assert draws.noise.mean() == pytest.approx(0, abs=4.5 / math.sqrt(4 * n))
    assert draws.noise.std() == pytest.approx(1, rel=4.5 / math.sqrt(8 * n))


def test_augmentation_is_drawn_in_training_alone_and_leaves_the_noise_as_it_is() -> None:
    objective = replace(SMALL, augment=0.12)
    training, evaluation = (objective.draws(7, generator(), augment=training) for training in (True, False))
    assert training.augment is not None
    assert training.augment.shape == (7, augment.PARAMETERS)
    assert evaluation.augment is None
    assert SMALL.draws(7, generator(), augment=True).augment is None
    assert torch.equal(training.sigma, evaluation.sigma)
    assert torch.equal(training.noise, evaluation.noise)


def test_only_the_given_generator_is_drawn_from() -> None:
    before = torch.get_rng_state()
    draws = replace(SMALL, augment=0.12).draws(7, generator(3), augment=True)
    SMALL.sample(Parrot(0.0), 2, generator(), ignore)
    assert torch.equal(torch.get_rng_state(), before)
    again = replace(SMALL, augment=0.12).draws(7, generator(3), augment=True)
    assert torch.equal(draws.noise, again.noise)
    assert not torch.equal(draws.noise, SMALL.draws(7, generator(4), augment=False).noise)


# The sampler ----------------------------------------------------------------------------------------------------------


def test_the_sampler_asks_35_times_from_80_down_to_two_thousandths() -> None:
    asked: list[float] = []
    ticks: list[int] = []

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        assert x.dtype == f64
        assert sigma.shape == (3,)
        asked.append(float(sigma[0]))
        return torch.zeros_like(x)

    heun(denoise, torch.ones(3, 2), tick=ticks.append)
    expected = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]  # Eq. 5
    twice = [sigma for sigma in expected for _ in (0, 1)]
    assert asked == pytest.approx(twice[1:])  # once at the first level; elsewhere at the end of a step and at the next
    assert ticks == [3] * 35


def test_samples_of_a_gaussian_have_its_mean_and_covariance() -> None:
    n = 20_000
    mean = torch.tensor([0.3, -0.2], dtype=f64)
    covariance = torch.tensor([[0.30, 0.12], [0.12, 0.10]], dtype=f64)
    eye = torch.eye(2, dtype=f64)

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        return mean + (x - mean) @ torch.linalg.solve(covariance + sigma[0] ** 2 * eye, covariance)

    made = heun(denoise, torch.randn(n, 2, generator=generator(), dtype=f64), steps=80)
    spread = covariance.diagonal()
    # The start has mean 0 where the noised data has the data's: that moves the result by less than a part in 80.
    assert ((made.mean(0) - mean).abs() < 4.5 * (spread / n).sqrt() + mean.abs() / 80).all()
    error = ((spread[:, None] * spread + covariance**2) / n).sqrt()
    assert ((made.T.cov() - covariance).abs() < 4.5 * error).all()


def gaussian_error(steps: int, spread: float = 0.5) -> float:
    """Relative error against the exact path, x(σ) ∝ √(spread² + σ²), and then the denoiser at the lowest σ."""
    made = heun(lambda x, sigma: x * spread**2 / (spread**2 + sigma[:, None] ** 2), torch.ones(1, 1), steps)
    lowest = spread**2 + SIGMA_MIN**2
    exact = SIGMA_MAX * math.sqrt(lowest / (spread**2 + SIGMA_MAX**2)) * spread**2 / lowest
    return abs(float(made) / exact - 1)


def test_the_sampler_is_of_second_order() -> None:
    errors = [gaussian_error(steps) for steps in (33, 65, 129, 257)]
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert errors[0] < 0.02
    assert orders[-2:] == pytest.approx([2, 2], abs=0.1)


def test_a_fresh_network_makes_gray_noise_of_half_the_range() -> None:
    """Its denoiser is that of a Gaussian of deviation ½, so that the whole way to the pixels is known."""
    made = replace(SMALL, steps=120).sample(SMALL.network().eval(), 2, generator(5), ignore)
    latents = torch.randn(2, 1, 8, 8, generator=generator(5))
    torch.testing.assert_close(made, ((latents / 2 + 1) / 2).clamp(0, 1), rtol=0, atol=2e-3)
    assert made.dtype == torch.float32
    assert made.min() == 0
    assert made.max() == 1
    assert not made.requires_grad


# Whole ----------------------------------------------------------------------------------------------------------------


def test_the_papers_preset_is_the_papers() -> None:
    with torch.device("meta"):
        network = CIFAR10.network()
    assert sum(weight.numel() for weight in network.parameters()) == 55_733_891
    assert (CIFAR10.augment, CIFAR10.unet.dropout, CIFAR10.steps, CIFAR10.sigma_data) == (0.12, 0.13, 18, 0.5)
    assert (CIFAR10.p_mean, CIFAR10.p_std) == (-1.2, 1.2)


def test_the_loss_compiles_into_one_graph() -> None:
    objective = replace(SMALL, augment=0.5)
    network = objective.network()
    nn.init.normal_(network.last.weight, std=0.1)
    pixels, draws = torch.rand(4, 1, 8, 8, generator=generator()), objective.draws(4, generator(1), augment=True)
    compiled = torch.compile(objective.loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(network, pixels, draws), objective.loss(network, pixels, draws))


def test_a_small_network_learns_two_images() -> None:
    torch.manual_seed(0)
    objective = replace(SMALL, augment=0.12)
    network = objective.network()
    ramp = torch.linspace(0, 1, 8)
    pixels = torch.stack([ramp.expand(8, 8), ramp.expand(8, 8).T])[:, None].repeat(16, 1, 1, 1)
    fixed = objective.draws(len(pixels), generator(100), augment=False)

    def held_out() -> float:
        with torch.no_grad():
            return float(objective.loss(network.eval(), pixels, fixed).mean())

    start = held_out()
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    for step in range(60):
        optimizer.zero_grad()
        draws = objective.draws(len(pixels), generator(step), augment=True)
        objective.loss(network.train(), pixels, draws).mean().backward()
        optimizer.step()
    assert held_out() < 0.3 * start  # between 0.17 and 0.20 of it with the seeds 0 to 4


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": 1.2}, r"augment=1\.2: give a probability, from 0 to 1"),
        ({"sigma_data": 0.0}, r"sigma_data=0\.0: give a standard deviation, above 0"),
        ({"p_std": -1.0}, r"p_std=-1\.0: give a standard deviation, 0 or more"),
        ({"steps": 1}, r"steps=1: the sampler needs at least 2"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(LabError, match=message):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_a_sampler_of_one_step_is_refused() -> None:
    with pytest.raises(LabError, match="steps=1: the noise levels need at least 2"):
        heun(lambda x, sigma: x, torch.ones(1, 1), steps=1)

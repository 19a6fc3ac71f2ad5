"""The ring of Gaussians: its exact denoiser against integration and calculus, EDM's preconditioning, the sampler."""

import math

import pytest
import torch
from torch import Tensor

from torchbelay.lab.ring.mixture import FEATURES, LOG_SIGMA, NEAR, Ring, draw_samples, noise_levels

f64 = torch.float64
RING = Ring()
SIGMAS = (0.03, 0.1, 0.3, 1.0, 5.0)


def points(count: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=f64) * 0.7


def column(sigma: float, like: Tensor) -> Tensor:
    return torch.full_like(like[..., :1], sigma)


# The exact denoiser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_denoiser_is_the_posterior_mean_by_direct_integration(sigma: float) -> None:
    line = torch.arange(-2, 2, 0.0125, dtype=f64)
    grid = torch.cartesian_prod(line, line)
    prior = (-torch.cdist(grid, RING.centres).square() / (2 * RING.spread**2)).exp().sum(-1)
    y = points()
    posterior = prior * (-torch.cdist(y, grid).square() / (2 * sigma**2)).exp()
    expected = posterior @ grid / posterior.sum(-1, keepdim=True)
    # the sum over a grid finer than half of the narrowest width is exact but for rounding and the grid's ends
    torch.testing.assert_close(RING.denoise(y, column(sigma, y)), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_denoiser_is_y_plus_the_score_times_the_variance(sigma: float) -> None:
    y = points().requires_grad_()
    distance = torch.cdist(y, RING.centres).square()
    log_density = torch.logsumexp(-distance / (2 * (RING.spread**2 + sigma**2)), dim=-1)
    (score,) = torch.autograd.grad(log_density.sum(), y)
    found = RING.denoise(y.detach(), column(sigma, y))
    torch.testing.assert_close(found, y.detach() + sigma**2 * score, rtol=1e-12, atol=1e-12)


def test_without_noise_the_denoiser_returns_its_input() -> None:
    y = points()
    # the pull is σ²·score, and no score here is above 1e3
    torch.testing.assert_close(RING.denoise(y, column(1e-6, y)), y, rtol=0, atol=1e-9)


def test_in_pure_noise_the_denoiser_returns_the_middle_of_the_ring() -> None:
    y = points()
    found = RING.denoise(y, column(1e6, y))
    assert found.abs().max() < 1e-11  # of the order of y·variance/σ²


def test_a_point_on_a_centre_stays_near_it_at_small_noise() -> None:
    centres = RING.centres
    found = RING.denoise(centres, column(0.05, centres))
    assert (found - centres).norm(dim=-1).max() < 1e-3  # the other Gaussians are more than four deviations away


def test_the_denoiser_turns_with_the_ring() -> None:
    angle = 2 * math.pi / RING.modes
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=f64)
    y = points()
    sigma = column(0.2, y)
    torch.testing.assert_close(RING.denoise(y @ turn, sigma), RING.denoise(y, sigma) @ turn, rtol=1e-12, atol=1e-13)


def test_the_denoiser_is_finite_at_every_noise_level() -> None:
    y = torch.cat([points(), torch.full((1, 2), 1e3, dtype=f64)])
    for sigma in (1e-9, 1e-3, 1e9):
        assert RING.denoise(y, column(sigma, y)).isfinite().all()


# Samples of the mixture ---------------------------------------------------------------------------------------------


def test_samples_have_the_variance_that_edm_expects() -> None:
    exact = RING.centres.square().mean(0) + RING.spread**2
    torch.testing.assert_close(exact, torch.full((2,), RING.sigma_data**2, dtype=f64), rtol=1e-14, atol=0)
    count = 20_000
    x = RING.sample((count,), torch.Generator().manual_seed(1))
    assert x.shape == (count, 2)
    # the squares of a coordinate deviate by less than their largest value, about 1; five standard errors
    torch.testing.assert_close(x.square().mean(0), exact, rtol=0, atol=5 * 0.25 / math.sqrt(count))


def test_every_gaussian_is_as_likely_and_as_wide_as_the_others() -> None:
    count = 16_000
    x = RING.sample((count,), torch.Generator().manual_seed(2))
    nearest = torch.cdist(x, RING.centres).argmin(-1)
    shares = torch.bincount(nearest, minlength=RING.modes).double() / count
    # five standard errors of a share of 1/8
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 8), rtol=0, atol=5 * math.sqrt(7) / 8 / count**0.5)
    expected = 1 - math.exp(-(NEAR**2) / 2)
    assert (
        abs(RING.share_near(x) - expected) < 5 * math.sqrt(expected * (1 - expected) / count) + 1e-3
    )  # of another's tail


# Inputs and outputs of a network -------------------------------------------------------------------------------------


def test_encoding_and_decoding_are_inverse() -> None:
    triples = RING.triples((50,), torch.Generator().manual_seed(3))
    output = RING.encode_output(triples.noisy, triples.sigma, triples.clean)
    back = RING.decode_output(triples.noisy, triples.sigma, output)
    torch.testing.assert_close(back, triples.clean, rtol=1e-12, atol=1e-13)


def test_the_error_of_an_output_is_the_weighted_error_of_its_denoiser() -> None:
    triples = RING.triples((50,), torch.Generator().manual_seed(4))
    weight = (triples.sigma**2 + 0.25) / (triples.sigma * 0.5) ** 2  # of the EDM paper
    output = torch.randn(50, 2, generator=torch.Generator().manual_seed(5), dtype=f64)
    weighted = weight * (RING.decode_output(triples.noisy, triples.sigma, output) - triples.clean).square()
    torch.testing.assert_close((output - triples.targets).square(), weighted, rtol=1e-11, atol=1e-11)


def test_an_output_of_zero_is_the_best_linear_denoiser() -> None:
    y = points()
    for sigma in SIGMAS:
        slope = RING.sigma_data**2 / (RING.sigma_data**2 + sigma**2)  # E[x·y] / E[y²]
        output = RING.decode_output(y, column(sigma, y), torch.zeros_like(y))
        torch.testing.assert_close(output, slope * y, rtol=1e-14, atol=0)


def test_features_are_of_the_order_of_one_and_as_many_as_promised() -> None:
    seen = RING.triples((4000,), torch.Generator().manual_seed(6)).features
    assert seen.shape == (4000, FEATURES)
    assert (seen.std(0) < 1.2).all()
    assert (seen.std(0) > 0.2).all()
    torch.testing.assert_close(seen[:, :2].std(0), torch.ones(2, dtype=f64), rtol=0, atol=0.1)  # 5 standard errors


def test_triples_are_clean_points_with_noise_of_their_level() -> None:
    triples = RING.triples((100, 200), torch.Generator().manual_seed(7))
    assert triples.clean.shape == triples.noisy.shape == (100, 200, 2)
    logs, noise = triples.sigma.log(), (triples.noisy - triples.clean) / triples.sigma
    for values, mean, deviation in ((logs, *LOG_SIGMA), (noise, 0.0, 1.0)):
        error = 5 * deviation / math.sqrt(values.numel())  # five standard errors, of a deviation √2 fewer
        assert abs(float(values.mean()) - mean) < error
        assert abs(float(values.std()) - deviation) < error / math.sqrt(2)


def test_the_truth_is_what_the_targets_are_on_average() -> None:
    triples = RING.triples((40_000,), torch.Generator().manual_seed(8))
    left = triples.targets - triples.truth
    for known in (torch.ones_like(left), triples.truth, triples.features[:, 3:5], triples.features[:, 2:3]):
        each = left * known  # nothing known from the noisy point predicts what is left
        assert (each.mean(0).abs() < 5 * each.std(0) / math.sqrt(len(each))).all()


# The sampler ----------------------------------------------------------------------------------------------------------


def test_noise_falls_from_high_to_low_and_then_to_zero() -> None:
    levels = noise_levels(18, high=80.0, low=0.002, rho=7.0)
    assert len(levels) == 19
    assert (levels.diff() < 0).all()
    assert levels[0] == pytest.approx(80, rel=1e-12)
    assert levels[-2] == pytest.approx(0.002, rel=1e-12)
    assert levels[-1] == 0
    middle = (80 ** (1 / 7) + 9 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert levels[9] == pytest.approx(middle, rel=1e-12)


def test_one_gaussian_is_drawn_along_its_known_path_to_second_order() -> None:
    one = Ring(modes=1)
    latents = points(20)
    start = noise_levels(18)[0]
    reached = one.centres + (latents * start - one.centres) * one.spread / (one.spread**2 + start**2).sqrt()
    errors = [float((draw_samples(one.denoise, latents, steps) - reached).abs().max()) for steps in (32, 64)]
    assert errors[1] < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)  # Heun: half the step, a quarter of the error


def test_the_exact_denoiser_draws_the_mixture() -> None:
    count = 2000
    latents = torch.randn(count, 2, generator=torch.Generator().manual_seed(9), dtype=f64)
    drawn = draw_samples(RING.denoise, latents)
    expected = 1 - math.exp(-(NEAR**2) / 2)
    assert abs(RING.share_near(drawn) - expected) < 0.03  # 5 standard errors are 0.023, the rest are its 18 steps
    shares = torch.bincount(torch.cdist(drawn, RING.centres).argmin(-1), minlength=8).double() / count
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 8), rtol=0, atol=5 * math.sqrt(7) / 8 / count**0.5)

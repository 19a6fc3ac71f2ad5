"""The network of NCSNv2: its size, its norm and its parts against their formulas."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from torchbelay.lab.score.models.ncsnv2 import ChainedPooling, InstanceNormPlus, NCSNv2, Residual, ResidualUnits, Widen

SHAPE = (1, 28, 28)


def test_7_43_million_weights_at_64_features() -> None:
    with torch.device("meta"):
        network = NCSNv2(SHAPE, features=64)
    assert sum(p.numel() for p in network.parameters()) == 7_426_881


def test_the_norm_is_its_formula() -> None:
    """InstanceNorm++, channel by channel and picture by picture, in float64."""
    torch.manual_seed(0)
    norm, x = InstanceNormPlus(5), torch.randn(3, 5, 4, 6) * 2 + torch.randn(3, 5, 1, 1)
    found = norm(x)
    for n in range(3):
        means = torch.stack([x[n, k].double().mean() for k in range(5)])
        m, v = means.mean(), means.var(unbiased=True)
        for k in range(5):
            mu, s = means[k], (x[n, k].double().var(unbiased=False) + 1e-5).sqrt()
            gamma, alpha, beta = (p[k].double() for p in (norm.gamma, norm.alpha, norm.beta))
            z = gamma * (x[n, k].double() - mu) / s + gamma * alpha * (means[k] - m) / (v + 1e-5).sqrt() + beta
            torch.testing.assert_close(found[n, k].double(), z, rtol=1e-5, atol=1e-5)


def test_the_norm_keeps_what_an_instance_norm_forgets() -> None:
    """Pictures that differ only in their channels' means come out different."""
    torch.manual_seed(0)
    norm, x = InstanceNormPlus(4), torch.randn(1, 4, 5, 5)
    moved = x + torch.tensor([1.0, 0.0, -2.0, 0.0]).view(1, 4, 1, 1)
    torch.testing.assert_close(F.instance_norm(x), F.instance_norm(moved), rtol=1e-4, atol=1e-4)
    assert (norm(x) - norm(moved)).abs().max() > 0.5


def test_the_norm_answers_in_the_dtype_it_was_asked_in() -> None:
    norm, x = InstanceNormPlus(4), torch.randn(2, 4, 5, 5)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x.bfloat16()).float(), norm(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("small", "large"), [(14, 28), (3, 7), (5, 5)])
def test_widening_is_bilinear_interpolation_between_aligned_corners(small: int, large: int) -> None:
    x = torch.randn(2, 3, small, small)
    expected = F.interpolate(x, size=(large, large), mode="bilinear", align_corners=True)
    torch.testing.assert_close(Widen(small, large)(x), expected, rtol=1e-5, atol=1e-5)


def test_residual_units_add_two_convolutions_a_round() -> None:
    torch.manual_seed(0)
    units, x = ResidualUnits(3, rounds=2), torch.randn(1, 3, 6, 6)
    expected = x
    for one, two in units.rounds:  # type: ignore[misc]
        expected = expected + two(F.elu(one(F.elu(expected))))
    torch.testing.assert_close(units(x), expected)


def test_pooling_adds_each_view_of_the_view_before() -> None:
    torch.manual_seed(0)
    pool, x = ChainedPooling(3), torch.randn(1, 3, 8, 8)
    first = pool.convs[0](F.avg_pool2d(F.elu(x), 5, 1, 2))
    second = pool.convs[1](F.avg_pool2d(first, 5, 1, 2))
    torch.testing.assert_close(pool(x), F.elu(x) + first + second)


def test_a_block_that_halves_averages_four_pixels() -> None:
    block = Residual(4, 6, halve=True)
    assert block(torch.randn(2, 4, 8, 8)).shape == (2, 6, 4, 4)
    with torch.no_grad():
        for name, p in block.named_parameters():
            if "conv2" in name:
                p.zero_()
    x = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(block(x), F.avg_pool2d(block.shortcut(x), 2))


def _dilations(network: nn.Module) -> list[int]:
    return [m.dilation[0] for m in network.modules() if isinstance(m, nn.Conv2d)]


def test_the_stages_look_further_and_further() -> None:
    network = NCSNv2(SHAPE, features=4)
    stages = [network.stage1, network.stage2, network.stage3, network.stage4]
    assert [set(_dilations(stage)) for stage in stages] == [{1}, {1}, {2}, {4}]


def test_the_score_is_the_networks_answer_over_sigma() -> None:
    torch.manual_seed(0)
    network, x = NCSNv2(SHAPE, features=4), torch.rand(1, *SHAPE)
    one, ten = (network(x, torch.tensor([s])) for s in (1.0, 10.0))
    torch.testing.assert_close(one, 10 * ten)


def test_every_weight_matters() -> None:
    torch.manual_seed(0)
    network = NCSNv2(SHAPE, features=4)
    network(torch.rand(2, *SHAPE), torch.ones(2)).square().mean().backward()
    silent = [name for name, p in network.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert silent == []


def test_a_picture_does_not_see_its_neighbours_in_the_batch() -> None:
    torch.manual_seed(0)
    network, x = NCSNv2(SHAPE, features=4), torch.rand(3, *SHAPE)
    together: Tensor = network(x, torch.ones(3))
    torch.testing.assert_close(network(x[1:2], torch.ones(1)), together[1:2], rtol=1e-4, atol=1e-5)

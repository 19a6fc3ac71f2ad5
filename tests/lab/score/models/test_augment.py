"""Augmentation: every change against a direct computation, no change for zeros, and labels that match."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchbelay.lab.score.models.augment import LABELS, PARAMETERS, labels, parameters, warp

f64 = torch.float64


def images(n: int = 4, height: int = 32, width: int = 32) -> Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def changed(n: int = 4, **values: float) -> Tensor:
    """The same for n images, by name: a0 … a7."""
    a = torch.zeros(n, PARAMETERS)
    for name, value in values.items():
        a[:, int(name[1])] = value
    return a


def rotation(angle: float) -> Tensor:
    cosine, sine = math.cos(angle), math.sin(angle)
    return torch.tensor([[cosine, -sine], [sine, cosine]], dtype=f64)


# Nothing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (28, 28), (7, 12)])
def test_images_that_nothing_happens_to_keep_every_bit(size: tuple[int, int]) -> None:
    before = images(4, *size)
    a = changed()
    assert torch.equal(warp(before, a), before)
    a[1, 3] = 1.0
    after = warp(before, a)
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.allclose(after[1], before[1], atol=0.1)


def test_what_is_given_is_not_changed() -> None:
    before, a = images(), parameters(4, 1.0, torch.Generator().manual_seed(0))
    copies = before.clone(), a.clone()
    warp(before, a)
    labels(a)
    assert torch.equal(before, copies[0])
    assert torch.equal(a, copies[1])


# One change at a time -------------------------------------------------------------------------------------------------


def test_mirrored_images_are_flipped_exactly() -> None:
    before = images()
    assert torch.equal(warp(before, changed(a0=1)), before.flip(3))
    assert torch.equal(warp(before, changed(a1=1)), before.flip(2))
    assert torch.equal(warp(before, changed(a0=1, a1=1)), before.flip(2, 3))


@pytest.mark.parametrize(("right", "down"), [(3, 0), (-5, 0), (0, 2), (4, -7)])
def test_images_moved_by_whole_pixels_are_the_same_ones_with_reflected_edges(right: int, down: int) -> None:
    before = images(4, 28, 32)
    after = warp(before, changed(a6=8 * right / 32, a7=8 * down / 28))
    around = pad(before, (8, 8, 8, 8), mode="reflect")
    torch.testing.assert_close(after, around[:, :, 8 - down : 36 - down, 8 - right : 40 - right], rtol=0, atol=2e-5)
    rolled = before.roll((down, right), (2, 3))
    torch.testing.assert_close(after[:, :, 8:-8, 8:-8], rolled[:, :, 8:-8, 8:-8], rtol=0, atol=2e-5)


@pytest.mark.parametrize("quarters", [1, 2, -1])
def test_images_rotated_by_right_angles_are_the_same_ones_turned(quarters: int) -> None:
    before = images()
    after = warp(before, changed(a3=quarters * math.pi / 2))
    torch.testing.assert_close(after, before.rot90(-quarters, (2, 3)), rtol=0, atol=2e-5)


def test_an_enlarged_image_shows_its_middle() -> None:
    before = images(2, 33, 33)
    after = warp(before, changed(2, a2=5.0))  # 2^(5/5): twice as large
    torch.testing.assert_close(after[:, :, ::2, ::2], before[:, :, 8:25, 8:25], rtol=0, atol=2e-5)


def test_a_stretched_image_is_wider_and_lower() -> None:
    before = images(2, 33, 33)
    after = warp(before, changed(2, a5=5.0))  # to the right: twice as wide, half as high
    torch.testing.assert_close(after[:, :, 8:25, ::2], before[:, :, ::2, 8:25], rtol=0, atol=2e-5)
    upwards = warp(before, changed(2, a4=math.pi / 2, a5=5.0))
    torch.testing.assert_close(upwards[:, :, ::2, 8:25], before[:, :, 8:25, ::2], rtol=0, atol=2e-5)


CHANGES = [
    {"a2": 0.7},
    {"a2": -1.3},
    {"a3": 0.4},
    {"a4": 0.9, "a5": 1.1},
    {"a4": -2.2, "a5": -0.8},
    {"a6": 0.3, "a7": -0.45},
    {"a2": 0.5, "a3": -2.6, "a4": 1.2, "a5": 0.7, "a6": -0.2, "a7": 0.4},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_pixel_comes_from_where_the_matrices_say(change: dict[str, float]) -> None:
    """Read off two ramps, which bilinear interpolation keeps: scale first, then rotate, stretch and move."""
    height, width = 20, 32
    a2, a3, a4, a5, a6, a7 = (change.get(f"a{i}", 0.0) for i in range(2, 8))
    stretch = rotation(a4) @ torch.diag(torch.tensor([2 ** (a5 / 5), 2 ** (-a5 / 5)], dtype=f64)) @ rotation(-a4)
    forward = stretch @ rotation(a3) * 2 ** (a2 / 5)
    moved = torch.tensor([width * a6 / 8, height * a7 / 8], dtype=f64)

    x = torch.arange(width, dtype=f64) - (width - 1) / 2
    y = torch.arange(height, dtype=f64) - (height - 1) / 2
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"))  # (2, height, width)
    sources = torch.einsum("ij,jhw->ihw", forward.inverse(), places - moved[:, None, None])
    inside = (sources[0].abs() < x[-1]) & (sources[1].abs() < y[-1])
    assert inside.sum() > 150

    after = warp(places[None].float(), changed(1, **change))[0]
    torch.testing.assert_close(after[:, inside], sources[:, inside].float(), rtol=0, atol=1e-4)


def test_an_image_is_mirrored_before_anything_else() -> None:
    before, rest = images(), {"a2": 0.3, "a3": 0.8, "a6": 0.5}
    torch.testing.assert_close(warp(before, changed(a0=1, **rest)), warp(before.flip(3), changed(**rest)))


def test_autocast_does_not_blur_where_pixels_come_from() -> None:
    before, a = images(), parameters(4, 1.0, torch.Generator().manual_seed(0))
    expected = warp(before, a)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(warp(before, a), expected)


# What is drawn --------------------------------------------------------------------------------------------------------


def test_each_change_happens_as_often_as_it_should() -> None:
    n, probability = 20_000, 0.12
    a = parameters(n, probability, torch.Generator().manual_seed(3))
    assert a.shape == (n, PARAMETERS)
    often = (a != 0).double().mean(0)
    expected = torch.tensor([0.5, probability / 2, *[probability] * 6], dtype=f64)
    assert ((often - expected).abs() < 4.5 * (expected * (1 - expected) / n).sqrt()).all()
    assert set(a[:, :2].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(a[:, 4] != 0, a[:, 5] != 0)
    assert torch.equal(a[:, 6] != 0, a[:, 7] != 0)
    together = ((a[:, 2] != 0) & (a[:, 3] != 0)).double().mean()  # independent of each other
    assert abs(together - probability**2) < 4.5 * probability / math.sqrt(n)


def test_amounts_are_normal_and_angles_go_all_around() -> None:
    n = 20_000
    a = parameters(n, 1.0, torch.Generator().manual_seed(4)).double()
    for column in (2, 5, 6, 7):
        assert abs(a[:, column].mean()) < 4.5 / math.sqrt(n)
        assert abs(a[:, column].var() - 1) < 4.5 * math.sqrt(2 / n)
    for column in (3, 4):
        assert a[:, column].abs().max() <= math.pi + 1e-6
        assert abs(a[:, column].mean()) < 4.5 * math.pi / math.sqrt(3 * n)
        assert abs(a[:, column].var() / (math.pi**2 / 3) - 1) < 4.5 * math.sqrt(0.8 / n)
    correlation = torch.corrcoef(a.T) - torch.eye(PARAMETERS, dtype=f64)
    assert correlation.abs().max() < 4.5 / math.sqrt(n)


def test_without_probability_images_are_only_mirrored() -> None:
    a = parameters(100, 0.0, torch.Generator().manual_seed(0))
    assert not a[:, 1:].any()


def test_the_same_generator_draws_the_same() -> None:
    first, second, other = (parameters(9, 0.5, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# Labels ---------------------------------------------------------------------------------------------------------------


def test_labels_say_what_was_done() -> None:
    a = torch.tensor(
        [[1, 0, 0.5, math.pi / 2, math.pi / 6, 2, -0.25, 0.75], [0, 1, -2, -math.pi / 2, math.pi, 1, 1, -1]]
    )
    expected = [[1, 0, 0.5, -1, 1, math.sqrt(3), 1, -0.25, 0.75], [0, 1, -2, -1, -1, -1, 0, 1, -1]]
    torch.testing.assert_close(labels(a), torch.tensor(expected), rtol=0, atol=1e-6)


def test_images_that_were_left_alone_have_labels_of_0() -> None:
    assert torch.equal(labels(changed(3)), torch.zeros(3, LABELS))

"""EDM's augmentation (Karras et al., 2022, appendix F.2), and the labels that describe it to the network.

Eight numbers describe the change of an image, in this order; zeros leave the image unchanged, to the last bit:

    a0, a1    mirrored left to right, upside down: 0 or 1
    a2        scaled by 2^(a2/5)
    a3        rotated by a3
    a4, a5    stretched by 2^(a5/5) in the direction a4, and compressed by as much across it
    a6, a7    moved to the right and down by an eighth of the image's width and height, times a6 and a7

Every image is mirrored left to right with probability 1/2; each of the other five changes has the given probability.
The network gets the labels as an input, so that with zero labels it makes images without augmentation.

Difference from the paper: images are warped in one step by bilinear interpolation. The paper works at twice the
resolution with wavelet filters, which keep more of the finest detail. Beyond its edge an image is reflected.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

PARAMETERS = 8
LABELS = 9

LOG_SCALE = 0.2 * math.log(2)  # A_scale and A_aniso are 2^0.2
TRANSLATION = 1 / 8  # A_trans, in images


def parameters(n: int, probability: float, generator: torch.Generator) -> Tensor:
    """Draw the parameters of n images, (n, 8), on the generator's device.

    >>> a = parameters(1000, 0.12, torch.Generator().manual_seed(0))
    >>> bool(0.1 < (a[:, 3] != 0).float().mean() < 0.14)
    True
    """
    device = generator.device
    flip = torch.rand(n, 2, generator=generator, device=device).round()
    angle = math.pi * (2 * torch.rand(n, 2, generator=generator, device=device) - 1)
    normal = torch.randn(n, 4, generator=generator, device=device)
    happens = (torch.rand(n, 5, generator=generator, device=device) < probability).float()
    upside_down, scaled, rotated, stretched, moved = happens[:, :, None].unbind(1)
    parts = [
        flip[:, :1],
        flip[:, 1:] * upside_down,
        normal[:, :1] * scaled,
        angle[:, :1] * rotated,
        angle[:, 1:] * stretched,
        normal[:, 1:2] * stretched,
        normal[:, 2:] * moved,
    ]
    return torch.cat(parts, dim=1)


def labels(a: Tensor) -> Tensor:
    """Return the labels for the network, (n, 9): smooth in every angle, and 0 for an unchanged image.

    >>> labels(torch.tensor([[1.0, 0, 0, math.pi, 0, 0, 0.5, 0]])).round(decimals=3)
    tensor([[ 1.0000, 0.0000, 0.0000, -2.0000, -0.0000, 0.0000, 0.0000, 0.5000, 0.0000]])
    """
    a0, a1, a2, a3, a4, a5, a6, a7 = a.unbind(1)
    return torch.stack([a0, a1, a2, a3.cos() - 1, a3.sin(), a5 * a4.cos(), a5 * a4.sin(), a6, a7], dim=1)


def warp(images: Tensor, a: Tensor) -> Tensor:
    """Apply the changes that `a` (n, 8) describes to images (n, channels, height, width).

    >>> image = torch.arange(4.0).view(1, 1, 2, 2)
    >>> warp(image, torch.eye(1, 8))[0, 0]
    tensor([[1., 0.],
            [3., 2.]])
    """
    columns = a.view(-1, PARAMETERS, 1, 1, 1)
    images = torch.where(columns[:, 0] > 0, images.flip(3), images)
    images = torch.where(columns[:, 1] > 0, images.flip(2), images)
    warped = grid_sample(images, _grid(images, a), "bilinear", "reflection", align_corners=True)
    return torch.where((columns[:, 2:] == 0).all(1), images, warped)


def _grid(images: Tensor, a: Tensor) -> Tensor:
    """Return the position in the image of each pixel of the result, (n, height, width, 2), for grid_sample.

    The changes are undone in reverse order. The products are written out: a matrix product would lose bits under
    autocast.
    """
    height, width = images.shape[2:]
    _, _, a2, a3, a4, a5, a6, a7 = a.view(-1, PARAMETERS, 1, 1).unbind(1)
    x = torch.arange(width, device=a.device) - (width - 1) / 2 - TRANSLATION * width * a6
    y = torch.arange(height, device=a.device)[:, None] - (height - 1) / 2 - TRANSLATION * height * a7

    # The inverse of a stretch is symmetric, with eigenvalues 2^(−a5/5) along a4 and 2^(a5/5) across it.
    level, tilt = (LOG_SCALE * a5).cosh(), -(LOG_SCALE * a5).sinh()
    along, across = tilt * (2 * a4).cos(), tilt * (2 * a4).sin()
    x, y = (level + along) * x + across * y, across * x + (level - along) * y

    cosine, sine, shrink = a3.cos(), a3.sin(), (-LOG_SCALE * a2).exp()
    x, y = shrink * (cosine * x + sine * y), shrink * (cosine * y - sine * x)
    return torch.stack([x * (2 / (width - 1)), y * (2 / (height - 1))], dim=-1)

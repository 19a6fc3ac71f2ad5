"""NCSNv2, the network of Song and Ermon (2020), "Improved Techniques for Training Score-Based Generative Models".

A RefineNet (Lin et al. 2017) of four cascades: residual blocks with growing receptive fields (dilations 1, 1, 2, 4; the
second block halves the image), and refinements that join coarse features with fine ones. All activations are ELU.
InstanceNorm++ precedes every residual convolution and average pooling (Song and Ermon 2019, appendix A). The noise
level is not an input: the output is divided by σ (technique 3). 7.43 million weights at 64 features and 28 × 28.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from .objective import Shape


class InstanceNormPlus(nn.Module):
    """InstanceNorm++: normalised channels, plus the difference of a channel's mean from those of the other channels.

    With μ_k and s_k the mean and deviation of channel k over an image, and m and v those of the μ_k over the channels,
    z_k = γ_k (x_k − μ_k)/s_k + γ_k α_k (μ_k − m)/v + β_k.
    """

    EPS = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels).normal_(1, 0.02))
        self.gamma = nn.Parameter(torch.empty(channels).normal_(1, 0.02))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return z in the dtype of x; means and deviations are computed in float32."""
        full = x.float()
        spread, mean = torch.var_mean(full, (2, 3), correction=0)  # (n, channels)
        v, m = torch.var_mean(mean, 1, keepdim=True)
        scale = self.gamma * (spread + self.EPS).rsqrt()
        shift = self.gamma * self.alpha * (mean - m) * (v + self.EPS).rsqrt() + self.beta - scale * mean
        return (full * scale[:, :, None, None] + shift[:, :, None, None]).to(x.dtype)


def conv(inputs: int, outputs: int, *, size: int = 3, dilation: int = 1, bias: bool = True) -> nn.Conv2d:
    """Return a convolution that keeps the size of the image."""
    return nn.Conv2d(inputs, outputs, size, padding=dilation * (size // 2), dilation=dilation, bias=bias)


class Residual(nn.Module):
    """Two normalised convolutions beside a shortcut; `halve` averages 2 × 2 pixels after them."""

    def __init__(
        self, inputs: int, outputs: int, *, dilation: int = 1, halve: bool = False, first: bool = False
    ) -> None:
        super().__init__()
        inner = inputs if halve or first else outputs
        self.norm1, self.conv1 = InstanceNormPlus(inputs), conv(inputs, inner, dilation=dilation)
        self.norm2, self.conv2 = InstanceNormPlus(inner), conv(inner, outputs, dilation=dilation)
        size = 1 if dilation == 1 else 3
        changes = first or halve or inputs != outputs
        self.shortcut = conv(inputs, outputs, size=size, dilation=dilation) if changes else nn.Identity()
        self.pool = nn.AvgPool2d(2) if halve else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the shortcut plus the output of the two convolutions."""
        h = self.conv1(F.elu(self.norm1(x)))
        h = self.conv2(F.elu(self.norm2(h)))
        return self.pool(self.shortcut(x) + h)  # type: ignore[no-any-return]


def stage(inputs: int, outputs: int, *, dilation: int = 1, halve: bool = False) -> nn.Sequential:
    """Return two residual blocks; with a dilation above 1 the first has a convolution as its shortcut."""
    first = Residual(inputs, outputs, dilation=dilation, halve=halve, first=dilation > 1)
    return nn.Sequential(first, Residual(outputs, outputs, dilation=dilation))


class ResidualUnits(nn.Module):
    """RefineNet's RCU: rounds of two convolutions without normalisation; each round is added to its input."""

    def __init__(self, channels: int, rounds: int) -> None:
        super().__init__()
        pairs = ([conv(channels, channels, bias=False) for _ in range(2)] for _ in range(rounds))
        self.rounds = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all rounds, one after the other."""
        for pair in self.rounds:
            h = x
            for convolve in pair:  # type: ignore[attr-defined]
                h = convolve(F.elu(h))
            x = x + h
        return x


def average_nearby(x: Tensor) -> Tensor:
    """Return the mean over the 5 × 5 pixels around every pixel; pixels outside of the image are 0.

    First columns, then rows. torch.compile writes a window of 5 as plain sums, but one of 25 as a reduction, which took
    more than half of the sampler's time.
    """
    return F.avg_pool2d(F.avg_pool2d(x, (5, 1), stride=1, padding=(2, 0)), (1, 5), stride=1, padding=(0, 2))


class ChainedPooling(nn.Module):
    """RefineNet's CRP: a sum of features pooled over growing regions."""

    def __init__(self, channels: int, stages: int = 2) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(channels, channels, bias=False) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of x and its pooled features."""
        x = F.elu(x)
        path = x
        for convolve in self.convs:
            path = convolve(average_nearby(path))
            x = x + path
        return x


class Widen(nn.Module):
    """Bilinear interpolation with aligned corners, as two matrix products.

    On a GPU the gradient of torch's own operator sums in no fixed order, so that runs could not be repeated exactly.
    """

    matrix: Tensor

    def __init__(self, small: int, large: int) -> None:
        super().__init__()
        at = torch.linspace(0, small - 1, large).unsqueeze(1)
        self.register_buffer("matrix", (1 - (at - torch.arange(small)).abs()).clamp_min(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the larger image."""
        by = self.matrix.to(x.dtype)
        return torch.matmul(torch.matmul(by, x), by.T)


class Refine(nn.Module):
    """RefineNet's block: adapt each input, fuse them at the size of the finest one, pool, refine."""

    def __init__(self, inputs: Sequence[int], outputs: int, *, sizes: Sequence[int], rounds: int = 1) -> None:
        super().__init__()
        self.adapt = nn.ModuleList(ResidualUnits(channels, 2) for channels in inputs)
        fused = len(inputs) > 1  # the coarsest block has nothing to fuse
        self.fuse = nn.ModuleList(conv(channels, outputs) for channels in inputs if fused)
        self.widen = nn.ModuleList(nn.Identity() if size == sizes[0] else Widen(size, sizes[0]) for size in sizes)
        self.pool = ChainedPooling(outputs)
        self.refine = ResidualUnits(outputs, rounds)

    def forward(self, *views: Tensor) -> Tensor:
        """Return the refined features, at the size of the first input."""
        adapted = [adapt(view) for adapt, view in zip(self.adapt, views, strict=True)]
        if self.fuse:
            fused = [widen(fuse(x)) for fuse, widen, x in zip(self.fuse, self.widen, adapted, strict=True)]
            adapted = [fused[0] + fused[1]]
        return self.refine(self.pool(adapted[0]))  # type: ignore[no-any-return]


class NCSNv2(nn.Module):
    """The score of noisy pixels in [0, 1].

    >>> network = NCSNv2((1, 28, 28), features=8)
    >>> network(torch.rand(2, 1, 28, 28), torch.tensor([0.1, 1.0])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: Shape, features: int = 64) -> None:
        super().__init__()
        channels, size, half = shape[0], shape[1], shape[1] // 2
        one, two = features, 2 * features
        self.begin = conv(channels, one)
        self.stage1 = stage(one, one)
        self.stage2 = stage(one, two, halve=True)
        self.stage3 = stage(two, two, dilation=2)
        self.stage4 = stage(two, two, dilation=4)
        self.refine1 = Refine([two], two, sizes=[half])
        self.refine2 = Refine([two, two], two, sizes=[half, half])
        self.refine3 = Refine([two, two], one, sizes=[half, half])
        self.refine4 = Refine([one, one], one, sizes=[size, half], rounds=3)
        self.norm = InstanceNormPlus(one)
        self.end = conv(one, channels)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the score of each image at its noise level σ, in float32."""
        view1 = self.stage1(self.begin(2 * x - 1))
        view2 = self.stage2(view1)
        view3 = self.stage3(view2)
        view4 = self.stage4(view3)
        h = self.refine2(view3, self.refine1(view4))
        h = self.refine4(view1, self.refine3(view2, h))
        score: Tensor = self.end(F.elu(self.norm(h))).float()
        return score / sigma.view(-1, 1, 1, 1)

"""Fréchet Inception distance, with torch-fidelity's own network and preprocessing; the rest is float64 throughout.

The distance (Heusel et al. 2017, Eq. 6) between Gaussians that have the means and covariances of two sets' features:

    d² = |μ₁ − μ₂|² + tr Σ₁ + tr Σ₂ − 2 tr (Σ₁Σ₂)^½
"""

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError
from torchbelay.lab.records import write_bytes

from .data import DAMAGE, Images, digest, open_npz

LAYER = "2048"  # torch-fidelity's name for the features that FID is defined by: Inception's last average pooling
CIFAR10_RECORDED = 10.32333  # what torch-fidelity 0.4.0's own tests expect of `cifar10_check`
_DOWNLOADED = "weights-inception-2015-12-05-6726825d.pth"


# The distance ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Statistics:
    """What FID knows of a set of images."""

    mean: Tensor  # (d,), float64
    covariance: Tensor  # (d, d), float64
    count: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise LabError(f"a covariance needs at least 2 images, not {self.count}; make more")
        if self.mean.dim() != 1 or self.covariance.shape != (len(self.mean), len(self.mean)):
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.covariance.shape)}"
            raise LabError(f"a mean and a covariance of shapes {shapes} do not fit; give (d,) and (d, d)")
        if not (self.mean.isfinite().all() and self.covariance.isfinite().all()):
            raise LabError("the features of some image are not finite; look at the weights of the network")

    @cached_property
    def root(self) -> Tensor:
        """R, (d, rank), with R·Rᵀ the covariance; kept, as one reference serves many sets."""
        values, vectors = torch.linalg.eigh(self.covariance)
        # Below this an eigenvalue is rounding error of the largest one, and its square root would be no small error.
        noise = values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
        kept = values > noise
        root: Tensor = vectors[:, kept] * values[kept].sqrt()
        return root


def frechet(a: Statistics, b: Statistics) -> float:
    """d² of Heusel et al. 2017, Eq. 6.

    tr (Σ₁Σ₂)^½ is the sum of the singular values of R₁ᵀR₂, where RᵢRᵢᵀ = Σᵢ: unlike eigenvalues of a product, these
    need no square root, which would leave half of the digits.

    >>> one, two = (torch.eye(2, dtype=torch.float64) * scale for scale in (1, 4))
    >>> zero = torch.zeros(2, dtype=torch.float64)
    >>> round(frechet(Statistics(zero, one, 9), Statistics(zero + 3, two, 9)), 12)  # 3² + 3² + 2 (1 − 2)²
    20.0
    """
    if a.mean.shape != b.mean.shape:
        raise LabError(f"features of {len(a.mean)} and of {len(b.mean)} numbers; compare those of one network")
    shift = (a.mean - b.mean).square().sum()
    overlap = torch.linalg.svdvals(a.root.T @ b.root).sum()
    return max(0.0, float(shift + a.root.square().sum() + b.root.square().sum() - 2 * overlap))


class Gatherer:
    """Mean and covariance of features that come in batches, none of which is kept.

    >>> gatherer = Gatherer()
    >>> gatherer.add(torch.tensor([[0.0], [1.0]]))
    >>> gatherer.add(torch.tensor([[5.0]]))
    >>> gatherer.statistics()
    Statistics(mean=tensor([2.], dtype=torch.float64), covariance=tensor([[7.]], dtype=torch.float64), count=3)
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = torch.zeros(())
        self._scatter = torch.zeros(())  # Σ (x − mean)(x − mean)ᵀ

    def add(self, features: Tensor) -> None:
        """Take in (n, d) features, by the update of Chan, Golub and LeVeque (1979): nothing large cancels."""
        if not len(features):
            return
        features = features.double()
        mean = features.mean(0)
        scatter = (features - mean).T @ (features - mean)
        if self._count == 0:
            self._count, self._mean, self._scatter = len(features), mean, scatter
            return
        total, shift = self._count + len(features), mean - self._mean
        self._scatter = self._scatter + scatter + torch.outer(shift, shift) * (self._count * len(features) / total)
        self._mean = self._mean + shift * (len(features) / total)
        self._count = total

    def statistics(self) -> Statistics:
        """Of all that came; the covariance divides by n − 1, as torch-fidelity's does. On the CPU."""
        return Statistics(self._mean.cpu(), (self._scatter / max(1, self._count - 1)).cpu(), self._count)


def statistics(features: Tensor) -> Statistics:
    """Of (n, d) features at once."""
    gatherer = Gatherer()
    gatherer.add(features)
    return gatherer.statistics()


# The features ---------------------------------------------------------------------------------------------------------


class Extractor(Protocol):
    """A network that turns images into features."""

    identity: str  # two networks that give different features have different ones

    def features(self, images: Tensor) -> Tensor:
        """(n, d) features of (n, channels, height, width) uint8 images."""


class Inception:
    """Inception-v3 as torch-fidelity has it: uint8 in, TensorFlow 1's way of resizing to 299, the 2048 features out.

    `weights` is a .pth file; without one, torch-fidelity downloads its own.
    """

    def __init__(self, device: torch.device | str, weights: Path | None = None, *, batch: int = 256) -> None:
        network, version = _torch_fidelity(weights)
        self.batch = batch
        self.identity = f"torch-fidelity {version}, layer {LAYER}, weights {_digest_of(network)}"
        self._device = torch.device(device)
        self._network = network.eval().to(self._device)

    def features(self, images: Tensor) -> Tensor:
        """(n, 2048) float32 features, on the network's device."""
        batches = torch.split(rgb(images), self.batch)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False), _full_precision():
            return torch.cat([self._network(batch.to(self._device))[0] for batch in batches])


def rgb(images: Tensor) -> Tensor:
    """Images of three channels; a single one is taken three times.

    >>> rgb(torch.zeros(5, 1, 28, 28, dtype=torch.uint8)).shape
    torch.Size([5, 3, 28, 28])
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise LabError(f"images must be uint8 of shape (n, 1 or 3, height, width), not {given}; convert them")
    return images.expand(-1, 3, -1, -1)


def _torch_fidelity(weights: Path | None) -> tuple[nn.Module, str]:
    """torch-fidelity's network, and its version."""
    try:
        from torch_fidelity import __version__ as version
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise LabError(f"FID needs torch-fidelity and torchvision ({error}); pip install 'torchbelay[fid]'") from error
    if weights is not None:
        _check_weights(weights)
    try:
        path = None if weights is None else str(weights)
        return FeatureExtractorInceptionV3("inception-v3-compat", [LAYER], feature_extractor_weights_path=path), version
    except (OSError, RuntimeError) as error:
        what = f"cannot use {weights}" if weights is not None else f"cannot download {_DOWNLOADED}"
        why = " ".join(str(error).split())[:200]
        raise LabError(f"{what} ({why}); fetch that file where it can be had, and give its path") from error


def _check_weights(weights: Path) -> None:
    """torch-fidelity would unpickle anything; nothing but tensors may be in the file."""
    cure = f"give torch-fidelity's {_DOWNLOADED}"
    if not weights.is_file():
        raise LabError(f"the weights {weights} do not exist; {cure}")
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken pickle makes of itself
        raise LabError(f"cannot read the weights {weights} ({type(error).__name__}); {cure}") from error
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise LabError(f"the weights {weights} are no dictionary of tensors; {cure}")


def _digest_of(network: nn.Module) -> str:
    """Of all that the features depend on: neither the classifier nor the counters of batch normalisation."""
    state = sorted(network.state_dict().items())
    told = [(name, value) for name, value in state if not name.startswith("fc.") and not name.endswith("_tracked")]
    names = " ".join(f"{name}{tuple(value.shape)}" for name, value in told)
    return hashlib.sha256(f"{names} {digest(*(value for _, value in told))}".encode()).hexdigest()[:16]


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 that is float32: tensor cores' 10 bits would move the distance, and the default allows them."""
    backends: Any = torch.backends
    kinds = (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


# Sets of images -------------------------------------------------------------------------------------------------------


def fid(samples: Tensor, reference: Statistics, inception: Extractor) -> float:
    """The distance of uint8 samples, (n, channels, height, width), from a reference; n and the reference belong to it.

    The fewer the samples, the larger the distance: compare only what has the same n.
    """
    return frechet(_gathered(samples, inception), reference)


def reference(images: Images, inception: Extractor, cache: Path) -> Statistics:
    """Of a training set; kept in the folder `cache` under a name that says of what, and by which network."""
    train = images.train
    told = f"{images.name} {tuple(train.shape)} {digest(train)} {inception.identity}"
    key = hashlib.sha256(told.encode()).hexdigest()
    path = cache / f"fid-{images.name}-{len(train)}-{key[:16]}.npz"
    if (kept := _kept(path, key)) is not None:
        return kept
    found = _gathered(train, inception)
    content = io.BytesIO()
    np.savez(content, key=key, mean=found.mean.numpy(), covariance=found.covariance.numpy(), count=found.count)
    write_bytes(path, content.getvalue())
    return found


def cifar10_check(images: Images, inception: Extractor) -> float:
    """The distance whose value torch-fidelity's tests record, CIFAR10_RECORDED: that the whole chain is right.

    It is taken between 5,000 images of the training set and 5,000 of the test set, drawn without replacement by
    NumPy's old generator with the seed 2020, anew for each.
    """
    first, second = (_gathered(part[_drawn(len(part))], inception) for part in (images.train, images.test))
    return frechet(first, second)


def _drawn(count: int) -> Tensor:
    generator = np.random.RandomState(2020)  # what torch-fidelity draws with; its numbers are frozen for good
    return torch.from_numpy(generator.choice(count, 5000, replace=False))


def _gathered(images: Tensor, inception: Extractor) -> Statistics:
    gatherer = Gatherer()
    for some in torch.split(images, 1000):
        gatherer.add(inception.features(some))
    return gatherer.statistics()


def _kept(path: Path, key: str) -> Statistics | None:
    """What an earlier run left, if it is whole (a zip has checksums) and of the same things."""
    try:
        with open_npz(path) as file:
            if str(file["key"]) != key:
                return None
            mean, covariance = (torch.from_numpy(file[name]) for name in ("mean", "covariance"))
            return Statistics(mean, covariance, int(file["count"]))
    except (*DAMAGE, LabError):
        return None

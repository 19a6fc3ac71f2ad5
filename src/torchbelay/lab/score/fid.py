"""Fréchet Inception distance, with torch-fidelity's own network and preprocessing; all later arithmetic is float64.

The distance (Heusel et al. 2017, Eq. 6) between two Gaussians with the means and covariances of two sets of features:

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

from .data import Images, digest
from .formats import DAMAGE, open_npz

LAYER = "2048"  # torch-fidelity's name for the features that FID is defined by: Inception's last average pooling
CIFAR10_RECORDED = 10.32333  # the value of `cifar10_check` in torch-fidelity 0.4.0's own tests
_DOWNLOADED = "weights-inception-2015-12-05-6726825d.pth"


# The distance ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Statistics:
    """The mean and covariance of the features of a set of images."""

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
        """R, (d, rank), with R·Rᵀ the covariance; computed once, because one reference serves many sets."""
        values, vectors = torch.linalg.eigh(self.covariance)
        # An eigenvalue below this is a rounding error of the largest one, and its square root would be a large error.
        noise = values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
        kept = values > noise
        root: Tensor = vectors[:, kept] * values[kept].sqrt()
        return root


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Return d² of Heusel et al. 2017, Eq. 6.

    tr (Σ₁Σ₂)^½ is the sum of the singular values of R₁ᵀR₂, with RᵢRᵢᵀ = Σᵢ. The eigenvalues of the product would need a
    square root, which loses half of the digits.

    >>> one, two = (torch.eye(2, dtype=torch.float64) * scale for scale in (1, 4))
    >>> zero = torch.zeros(2, dtype=torch.float64)
    >>> round(frechet_distance(Statistics(zero, one, 9), Statistics(zero + 3, two, 9)), 12)  # 3² + 3² + 2 (1 − 2)²
    20.0
    """
    if a.mean.shape != b.mean.shape:
        raise LabError(f"features of {len(a.mean)} and of {len(b.mean)} numbers; compare those of one network")
    shift = (a.mean - b.mean).square().sum()
    overlap = torch.linalg.svdvals(a.root.T @ b.root).sum()
    return max(0.0, float(shift + a.root.square().sum() + b.root.square().sum() - 2 * overlap))


class Gatherer:
    """Computes the mean and covariance of features that arrive in batches; no batch is stored.

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
        """Add (n, d) features by the update of Chan, Golub and LeVeque (1979), which subtracts no large numbers."""
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
        """Return the statistics so far, on the CPU; the covariance divides by n − 1, as torch-fidelity's does."""
        return Statistics(self._mean.cpu(), (self._scatter / max(1, self._count - 1)).cpu(), self._count)


def statistics(features: Tensor) -> Statistics:
    """Return the statistics of (n, d) features."""
    gatherer = Gatherer()
    gatherer.add(features)
    return gatherer.statistics()


# The features ---------------------------------------------------------------------------------------------------------


class Extractor(Protocol):
    """A network that turns images into features."""

    identity: str  # differs between networks whose features differ

    def features(self, images: Tensor) -> Tensor:
        """Return the (n, d) features of (n, channels, height, width) uint8 images."""


class Inception:
    """torch-fidelity's Inception-v3: uint8 images in, resized to 299 as in TensorFlow 1, 2048 features out.

    `weights` is a .pth file; without one, torch-fidelity downloads its own.
    """

    def __init__(self, device: torch.device | str, weights: Path | None = None, *, batch: int = 256) -> None:
        network, version = _torch_fidelity(weights)
        self.batch = batch
        self.identity = f"torch-fidelity {version}, layer {LAYER}, weights {_weights_digest(network)}"
        self._device = torch.device(device)
        self._network = network.eval().to(self._device)

    def features(self, images: Tensor) -> Tensor:
        """Return (n, 2048) float32 features, on the network's device."""
        batches = torch.split(rgb(images), self.batch)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False), _full_precision():
            return torch.cat([self._network(batch.to(self._device))[0] for batch in batches])


def rgb(images: Tensor) -> Tensor:
    """Return images with three channels; a single channel is repeated.

    >>> rgb(torch.zeros(5, 1, 28, 28, dtype=torch.uint8)).shape
    torch.Size([5, 3, 28, 28])
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
        given = f"{images.dtype} of shape {tuple(images.shape)}"
        raise LabError(f"images must be uint8 of shape (n, 1 or 3, height, width), not {given}; convert them")
    return images.expand(-1, 3, -1, -1)


def _torch_fidelity(weights: Path | None) -> tuple[nn.Module, str]:
    """Return torch-fidelity's network and version."""
    try:
        from torch_fidelity import __version__ as version
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        cure = "pip install '.[fid]' in a clone of torchbelay"
        raise LabError(f"FID needs torch-fidelity and torchvision ({error}); {cure}") from error
    if weights is not None:
        _check_weights(weights)
    try:
        path = None if weights is None else str(weights)
        return FeatureExtractorInceptionV3("inception-v3-compat", [LAYER], feature_extractor_weights_path=path), version
    except (OSError, RuntimeError) as error:
        what = f"cannot use {weights}" if weights is not None else f"cannot download {_DOWNLOADED}"
        why = " ".join(str(error).split())[:200]
        raise LabError(
            f"{what} ({why}); download that file on another machine, and give its path with --inception"
        ) from error


def _check_weights(weights: Path) -> None:
    """Refuse a file with anything but tensors: torch-fidelity itself would unpickle any object."""
    cure = f"give torch-fidelity's {_DOWNLOADED}"
    if not weights.is_file():
        raise LabError(f"the weights {weights} do not exist; {cure}")
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise LabError(f"cannot read the weights {weights} ({type(error).__name__}); {cure}") from error
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise LabError(f"the weights {weights} are not a dictionary of tensors; {cure}")


def _weights_digest(network: nn.Module) -> str:
    """Return a digest of the weights that features depend on: no classifier, no counters of batch normalisation."""
    state = sorted(network.state_dict().items())
    used = [(name, value) for name, value in state if not name.startswith("fc.") and not name.endswith("_tracked")]
    names = " ".join(f"{name}{tuple(value.shape)}" for name, value in used)
    return hashlib.sha256(f"{names} {digest(*(value for _, value in used))}".encode()).hexdigest()[:16]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Compute in full float32: by default tensor cores round to 10 bits, which changes the distance."""
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


def distance(samples: Tensor, reference: Statistics, inception: Extractor) -> float:
    """Return the FID of uint8 samples, (n, channels, height, width), against a reference.

    The fewer the samples, the larger the distance: compare only distances with the same n and the same reference.
    """
    return frechet_distance(image_statistics(samples, inception), reference)


def reference_statistics(images: Images, inception: Extractor, cache: Path) -> Statistics:
    """Return the statistics of a training set, cached in the folder `cache` by images and network."""
    train = images.train
    text = f"{images.name} {tuple(train.shape)} {digest(train)} {inception.identity}"
    key = hashlib.sha256(text.encode()).hexdigest()
    path = cache / f"fid-{images.name}-{len(train)}-{key[:16]}.npz"
    if (cached := _read_statistics(path, key)) is not None:
        return cached
    found = image_statistics(train, inception)
    content = io.BytesIO()
    np.savez(content, key=key, mean=found.mean.numpy(), covariance=found.covariance.numpy(), count=found.count)
    write_bytes(path, content.getvalue())
    return found


def cifar10_check(images: Images, inception: Extractor) -> float:
    """Return a distance that torch-fidelity's tests record (CIFAR10_RECORDED), to check every step of the computation.

    It compares 5,000 training images with 5,000 test images. Each set is drawn without replacement by NumPy's old
    generator with the seed 2020.
    """
    first, second = (
        image_statistics(part[_draw_indices(len(part))], inception) for part in (images.train, images.test)
    )
    return frechet_distance(first, second)


def _draw_indices(count: int) -> Tensor:
    generator = np.random.RandomState(2020)  # torch-fidelity's generator; its numbers never change
    return torch.from_numpy(generator.choice(count, 5000, replace=False))


def image_statistics(images: Tensor, inception: Extractor) -> Statistics:
    """Return the statistics of the features of images."""
    gatherer = Gatherer()
    for some in torch.split(images, 1000):
        gatherer.add(inception.features(some))
    return gatherer.statistics()


def _read_statistics(path: Path, key: str) -> Statistics | None:
    """Return cached statistics; None if the file is missing, damaged (a zip has checksums) or has another key."""
    try:
        with open_npz(path) as file:
            if str(file["key"]) != key:
                return None
            mean, covariance = (torch.from_numpy(file[name]) for name in ("mean", "covariance"))
            return Statistics(mean, covariance, int(file["count"]))
    except (*DAMAGE, LabError):
        return None

"""Fréchet Inception distance: closed forms, statistics in a stream, torch-fidelity's own network, and the cache."""

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbelay.lab.part import LabError
from torchbelay.lab.score import data as data_module
from torchbelay.lab.score.data import Images
from torchbelay.lab.score.fid import (
    CIFAR10_RECORDED,
    Gatherer,
    Inception,
    Statistics,
    cifar10_check,
    distance,
    frechet_distance,
    reference_statistics,
    rgb,
    statistics,
)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gaussian(mean: Tensor, covariance: Tensor) -> Statistics:
    return Statistics(mean, covariance, 100)


def positive(generator: torch.Generator, d: int) -> Tensor:
    mix = normal(generator, d, d)
    return mix @ mix.T + 0.1 * torch.eye(d, dtype=torch.float64)


def by_the_formula(a: Statistics, b: Statistics) -> float:
    """Eq. 6 of Heusel et al. as it stands: tr (Σ₁Σ₂)^½ from the eigenvalues of the product, which is not symmetric."""
    roots = np.sqrt(np.linalg.eigvals((a.covariance @ b.covariance).numpy()).astype(complex)).real.sum()
    shift = (a.mean - b.mean).square().sum()
    return float(shift + a.covariance.trace() + b.covariance.trace() - 2 * roots)


# The distance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 7])
def test_shifted_means_are_as_far_as_they_are_shifted(d: int, generator: torch.Generator) -> None:
    covariance, mean, shift = positive(generator, d), normal(generator, d), normal(generator, d)
    found = frechet_distance(gaussian(mean, covariance), gaussian(mean + shift, covariance))
    assert found == pytest.approx(float(shift @ shift), rel=1e-12)


def test_covariances_along_the_axes_differ_by_their_standard_deviations(generator: torch.Generator) -> None:
    a, b = normal(generator, 6).square(), normal(generator, 6).square()
    mean = normal(generator, 6)
    found = frechet_distance(gaussian(mean, a.diag()), gaussian(mean, b.diag()))
    assert found == pytest.approx(float((a.sqrt() - b.sqrt()).square().sum()), rel=1e-12)


def test_covariances_that_commute(generator: torch.Generator) -> None:
    turn = torch.linalg.qr(normal(generator, 5, 5)).Q
    a, b, mean = normal(generator, 5).square(), normal(generator, 5).square(), normal(generator, 5)
    one, two = (gaussian(mean, turn @ values.diag() @ turn.T) for values in (a, b))
    assert frechet_distance(one, two) == pytest.approx(float((a.sqrt() - b.sqrt()).square().sum()), rel=1e-10)


def test_two_dimensions_have_a_closed_form(generator: torch.Generator) -> None:
    """tr (Σ₁Σ₂)^½ = (tr Σ₁Σ₂ + 2 √det Σ₁Σ₂)^½ for 2 × 2."""
    a, b = positive(generator, 2), positive(generator, 2)
    assert not torch.allclose(a @ b, b @ a)
    trace = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    mean = torch.zeros(2, dtype=torch.float64)
    expected = float(a.trace() + b.trace() - 2 * trace)
    assert frechet_distance(gaussian(mean, a), gaussian(mean, b)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("d", [2, 5, 40])
def test_covariances_that_do_not_commute(d: int, generator: torch.Generator) -> None:
    a, b = (gaussian(normal(generator, d), positive(generator, d)) for _ in range(2))
    assert not torch.allclose(a.covariance @ b.covariance, b.covariance @ a.covariance)
    assert frechet_distance(a, b) == pytest.approx(by_the_formula(a, b), rel=1e-10)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


@pytest.mark.parametrize("n", [2, 30, 100, 1000])
def test_a_set_is_not_far_from_itself(n: int, generator: torch.Generator) -> None:
    """Also with more features than images, when most eigenvalues are rounding errors."""
    features = normal(generator, n, 100) * torch.logspace(0, -4, 100, dtype=torch.float64) + 1
    there = statistics(features)
    again = statistics(features[torch.randperm(n, generator=generator)])
    assert frechet_distance(there, there) <= 1e-12 * float(there.covariance.trace())
    assert frechet_distance(there, again) <= 1e-6 * float(there.covariance.trace())


def test_fewer_images_than_dimensions(generator: torch.Generator) -> None:
    """The distance within a plane does not change when the plane is one of many dimensions, turned at will."""
    a, b = normal(generator, 10, 3), normal(generator, 10, 3) * 1.5 + 0.3
    turn = torch.linalg.qr(normal(generator, 200, 200)).Q[:3]
    flat, in_space = (
        frechet_distance(statistics(a @ m), statistics(b @ m)) for m in (torch.eye(3, dtype=a.dtype), turn)
    )
    assert flat > 0.1
    assert in_space == pytest.approx(flat, rel=1e-9)


def test_covariances_in_planes_that_share_nothing(generator: torch.Generator) -> None:
    """The rounding errors of one covariance lie in the large directions of the other."""
    turn = torch.linalg.qr(normal(generator, 60, 60)).Q
    one, two = (statistics(normal(generator, 90, 30) @ plane) for plane in (turn[:30], turn[30:]))
    shift = (one.mean - two.mean).square().sum()
    expected = float(shift + one.covariance.trace() + two.covariance.trace())
    assert frechet_distance(one, two) == pytest.approx(expected, rel=1e-12)


def test_directions_of_little_variance_count() -> None:
    mean, spread = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1e-10, 0.0], dtype=torch.float64)
    found = frechet_distance(gaussian(mean, spread.diag()), gaussian(mean, spread.mul(4).diag()))
    assert found - 1 == pytest.approx(1e-10, rel=1e-4)


def test_a_set_of_one_image_again_and_again(generator: torch.Generator) -> None:
    point = statistics(torch.ones(5, 4))
    assert frechet_distance(point, point) == 0
    cloud = gaussian(torch.ones(4, dtype=torch.float64), positive(generator, 4))
    assert frechet_distance(point, cloud) == pytest.approx(float(cloud.covariance.trace()), rel=1e-12)


def test_statistics_that_make_no_sense_are_refused() -> None:
    d3, d2 = torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    with pytest.raises(LabError, match=r"\(3,\) and \(2, 2\)"):
        Statistics(d3[0], d2, 5)
    with pytest.raises(LabError, match="not finite"):
        Statistics(d3[0], d3 * torch.nan, 5)
    with pytest.raises(LabError, match="not finite"):
        statistics(torch.tensor([[0.0], [torch.inf]]))
    with pytest.raises(LabError, match="features of 3 and of 2 numbers"):
        frechet_distance(Statistics(d3[0], d3, 5), Statistics(d2[0], d2, 5))
    for n in (0, 1):
        with pytest.raises(LabError, match=f"at least 2 images, not {n}"):
            statistics(torch.ones(n, 3))


# Statistics in a stream -----------------------------------------------------------------------------------------------


def test_statistics_are_those_of_numpy(generator: torch.Generator) -> None:
    features = torch.randn(50, 7, generator=generator) + 100
    found = statistics(features)
    assert found.mean.dtype == found.covariance.dtype == torch.float64
    assert found.count == 50
    np.testing.assert_allclose(found.mean, features.double().numpy().mean(0), rtol=1e-14)
    np.testing.assert_allclose(found.covariance, np.cov(features.double().numpy(), rowvar=False), rtol=1e-10)


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 1000])
def test_batches_do_not_matter(batch: int, generator: torch.Generator) -> None:
    features = torch.randn(300, 5, generator=generator) * 0.01 + 1000  # naive sums would lose every digit here
    gatherer = Gatherer()
    for some in torch.split(features[torch.randperm(300, generator=generator)], batch):
        gatherer.add(some)
        gatherer.add(some[:0])
    found, at_once = gatherer.statistics(), statistics(features)
    assert found.count == 300
    torch.testing.assert_close(found.mean, at_once.mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.covariance, at_once.covariance, rtol=1e-9, atol=1e-16)


def test_what_was_given_is_not_changed_by_what_comes_later(generator: torch.Generator) -> None:
    features = normal(generator, 20, 3)
    gatherer = Gatherer()
    gatherer.add(features)
    early = gatherer.statistics()
    mean, covariance = early.mean.clone(), early.covariance.clone()
    gatherer.add(features + 5)
    assert torch.equal(early.mean, mean)
    assert torch.equal(early.covariance, covariance)


# Sets of images -------------------------------------------------------------------------------------------------------


class Projection:
    """A network for tests: seven fixed linear features of an image's pixels."""

    def __init__(self, identity: str = "projection") -> None:
        self.identity, self.seen = identity, 0

    def features(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        pixels = rgb(images).flatten(1).float() / 255
        mix = torch.randn(pixels.shape[1], 7, generator=torch.Generator().manual_seed(0))
        return pixels @ mix


def some_images(generator: torch.Generator, n: int, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (n, channels, 8, 8), generator=generator, dtype=torch.uint8)


def some_set(generator: torch.Generator, n: int = 40, name: str = "cifar10") -> Images:
    return Images(name, some_images(generator, n), some_images(generator, n))


def test_fid_is_the_distance_of_the_features(generator: torch.Generator) -> None:
    network = Projection()
    a, b = some_images(generator, 2300), some_images(generator, 50) // 2  # more than are held at a time
    expected = frechet_distance(statistics(network.features(a)), statistics(network.features(b)))
    assert distance(a, statistics(network.features(b)), network) == pytest.approx(expected, rel=1e-9)
    assert distance(b, statistics(network.features(b)), network) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4, 3, 8, 8), torch.zeros(4, 2, 8, 8).byte(), torch.zeros(3, 8, 8).byte()]
)
def test_only_uint8_images_have_features(wrong: Tensor) -> None:
    with pytest.raises(LabError, match="images must be uint8 of shape"):
        rgb(wrong)


def test_one_channel_is_taken_three_times(generator: torch.Generator) -> None:
    grey, colour = some_images(generator, 5, channels=1), some_images(generator, 5)
    assert torch.equal(rgb(grey), torch.cat([grey, grey, grey], dim=1))
    assert rgb(colour) is colour or torch.equal(rgb(colour), colour)


def same(a: Statistics, b: Statistics) -> bool:
    return torch.equal(a.mean, b.mean) and torch.equal(a.covariance, b.covariance) and a.count == b.count


def test_a_reference_is_of_the_training_set_and_kept(tmp_path: Path, generator: torch.Generator) -> None:
    images, network, cache = some_set(generator), Projection(), tmp_path / "made" / "for it"
    first = reference_statistics(images, network, cache)
    assert network.seen == 40
    assert same(first, statistics(network.features(images.train)))
    network.seen = 0
    assert same(reference_statistics(images, network, cache), first)
    assert network.seen == 0
    (file,) = cache.iterdir()
    assert file.name.startswith("fid-cifar10-40-")


def test_a_reference_of_anything_else_is_another(tmp_path: Path, generator: torch.Generator) -> None:
    images = some_set(generator)
    changed = images.train.clone()
    changed[3, 1, 2, 2] ^= 1
    others = [
        (images, Projection()),
        (Images("mnist", images.train, images.test), Projection()),
        (Images("cifar10", images.train[:39], images.test), Projection()),
        (Images("cifar10", changed, images.test), Projection()),
        (Images("cifar10", images.train.reshape(40, 3, 4, 16), images.test), Projection()),
        (images, Projection("another network")),
    ]
    for number, (some, network) in enumerate(others, 1):
        reference_statistics(some, network, tmp_path)
        assert network.seen == len(some.train)
        assert len(list(tmp_path.iterdir())) == number


def test_a_damaged_reference_is_made_again(tmp_path: Path, generator: torch.Generator) -> None:
    images, network = some_set(generator), Projection()
    expected = reference_statistics(images, network, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        network.seen = 0
        assert same(reference_statistics(images, network, tmp_path), expected)
        assert network.seen == 40
        assert len(file.read_bytes()) == len(whole)
    again = 0
    for place in range(0, len(whole), 7):  # a flipped bit is noticed, or does no harm
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        network.seen = 0
        assert same(reference_statistics(images, network, tmp_path), expected)
        again += network.seen == 40
    assert again > len(whole) / 7 / 2


@pytest.mark.parametrize("what", ["another key", "no numbers", "a wrong shape", "an array", "objects"])
def test_a_reference_that_was_put_there_is_not_trusted(what: str, tmp_path: Path, generator: torch.Generator) -> None:
    images, network = some_set(generator), Projection()
    expected = reference_statistics(images, network, tmp_path)
    (file,) = tmp_path.iterdir()
    with np.load(file) as kept:
        content: dict[str, Any] = dict(kept)
    content["mean"] = content["mean"] + 1
    if what == "another key":
        content["key"] = "0" * 64
    elif what == "no numbers":
        content["mean"] = content["mean"] * np.nan
    elif what == "a wrong shape":
        content["covariance"] = content["covariance"][:2]
    elif what == "objects":
        content["mean"] = np.array([{}, None], dtype=object)
    if what == "an array":
        with file.open("wb") as stream:
            np.save(stream, content["mean"])
    else:
        np.savez(file, **content)
    assert same(reference_statistics(images, network, tmp_path), expected)


# torch-fidelity's network ---------------------------------------------------------------------------------------------


class Stand(nn.Module):
    """Stands for torch-fidelity's network: it takes what that takes, and notes how it is run."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path: str | None = None) -> None:
        super().__init__()
        assert features_list == ["2048"]
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        if feature_extractor_weights_path is None:
            raise OSError("no route to host")
        self.load_state_dict(torch.load(feature_extractor_weights_path, weights_only=False))
        self.seen: list[tuple[int, Any]] = []

    def forward(self, x: Tensor) -> tuple[Tensor]:
        assert x.dtype == torch.uint8
        assert x.shape[1] == 3
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert not self.training
        self.seen.append((len(x), precisions()))
        return (self.bn(self.conv(x.float())).mean((2, 3)),)


def precisions() -> list[str]:
    backends: Any = torch.backends
    kinds = (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul)
    return [kind.fp32_precision for kind in kinds]


@pytest.fixture
def torch_fidelity(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    package = types.ModuleType("torch_fidelity")
    package.__version__ = "0.4.0"  # type: ignore[attr-defined]
    inner = types.ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    inner.FeatureExtractorInceptionV3 = Stand  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", inner)
    before = precisions()
    yield package
    assert precisions() == before


def weights_at(path: Path, **changed: Tensor) -> Path:
    torch.manual_seed(5)
    conv, bn, fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
    state = nn.ModuleDict({"conv": conv, "bn": bn, "fc": fc}).state_dict()
    torch.save(state | changed, path)
    return path


def stand_in(network: Inception) -> Stand:
    inner = network._network
    assert isinstance(inner, Stand)
    return inner


@pytest.mark.usefixtures("torch_fidelity")
@pytest.mark.parametrize("channels", [1, 3])
def test_images_go_in_as_they_are_in_batches(channels: int, tmp_path: Path, generator: torch.Generator) -> None:
    network = Inception("cpu", weights_at(tmp_path / "w.pth"), batch=4)
    images = some_images(generator, 10, channels)
    with torch.autocast("cpu"):
        found = network.features(images)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert [n for n, _ in stand_in(network).seen] == [4, 4, 2]
    with torch.no_grad():
        torch.testing.assert_close(found, stand_in(network)(rgb(images))[0])


@pytest.mark.usefixtures("torch_fidelity")
def test_float32_is_not_rounded_and_all_is_as_before_even_after_an_error(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: Any = torch.backends
    network = Inception("cpu", weights_at(tmp_path / "w.pth"))
    before = precisions()
    try:
        backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32"
        backends.mkldnn.conv.fp32_precision = backends.mkldnn.matmul.fp32_precision = "bf16"
        loose = precisions()
        network.features(some_images(generator, 2))
        assert stand_in(network).seen == [(2, ["ieee"] * 4)]
        assert precisions() == loose == ["tf32", "tf32", "bf16", "bf16"]
        monkeypatch.setattr(network, "_network", lambda images: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            network.features(some_images(generator, 2))
        assert precisions() == loose
    finally:
        backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision = before[:2]
        backends.mkldnn.conv.fp32_precision, backends.mkldnn.matmul.fp32_precision = before[2:]


@pytest.mark.usefixtures("torch_fidelity")
def test_a_network_is_known_by_what_its_features_depend_on(tmp_path: Path, torch_fidelity: types.ModuleType) -> None:
    def identity(**changed: Tensor) -> str:
        return Inception("cpu", weights_at(tmp_path / "w.pth", **changed)).identity

    usual = identity()
    assert usual.startswith("torch-fidelity 0.4.0, layer 2048, weights ")
    assert identity() == usual
    assert identity(**{"fc.weight": torch.ones(2, 4)}) == usual  # the classifier is not asked
    assert identity(**{"conv.bias": torch.ones(4)}) != usual
    assert identity(**{"bn.running_var": torch.full((4,), 2.0)}) != usual
    torch_fidelity.__version__ = "0.5.0"  # type: ignore[attr-defined]
    assert identity() != usual


@pytest.mark.usefixtures("torch_fidelity")
def test_weights_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"

    def refused(weights: Path | None) -> str:
        with pytest.raises(LabError) as error:
            Inception("cpu", weights)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert refused(path).startswith(f"the weights {path} do not exist; give torch-fidelity's weights-inception")
    path.write_bytes(b"no weights")
    assert refused(path).startswith(f"cannot read the weights {path} (")
    whole = weights_at(tmp_path / "whole.pth").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refused(path).startswith(f"cannot read the weights {path} (")
    torch.save([torch.ones(3)], path)
    assert refused(path).startswith(f"the weights {path} are not a dictionary of tensors")
    torch.save({"conv.weight": torch.ones(3)}, path)
    assert refused(path).startswith(f"cannot use {path} (")
    assert refused(None).startswith("cannot download weights-inception-2015-12-05-6726825d.pth (no route to host); ")


class Mine:
    """What a pickle may do on loading, and must not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.usefixtures("torch_fidelity")
def test_weights_run_no_code(tmp_path: Path) -> None:
    torch.save({"conv.weight": Mine(tmp_path / "made")}, tmp_path / "w.pth")
    with pytest.raises(LabError, match="cannot read the weights"):
        Inception("cpu", tmp_path / "w.pth")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("missing", ["torch_fidelity", "torchvision"])
def test_without_the_packages_one_line_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_fidelity"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch_fidelity.py").write_text("import torchvision")  # as the real one does
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)  # what makes an import fail
    with pytest.raises(LabError) as error:
        Inception("cpu")
    said = str(error.value)
    assert said.startswith("FID needs torch-fidelity and torchvision (")
    assert missing in said.partition("(")[2]
    assert said.endswith("pip install '.[fid]' in a clone of torchbelay")
    assert "\n" not in said


# torch-fidelity's number ----------------------------------------------------------------------------------------------


class Reader:
    """A network that notes the numbers that are written into images."""

    identity = "number"

    def __init__(self) -> None:
        self.numbers: list[list[int]] = []

    def features(self, images: Tensor) -> Tensor:
        self.numbers.append((images[:, 0, 0, 0].int() + 256 * images[:, 1, 0, 0].int()).tolist())
        return images.flatten(1).float()


def numbered(n: int) -> Tensor:
    number = torch.arange(n)
    return torch.stack([number % 256, number // 256, number * 0], dim=1).byte()[:, :, None, None]


def test_the_check_draws_the_images_that_torch_fidelity_draws() -> None:
    """The first few of `RandomState(2020).choice(n, 5000, replace=False)`, which NumPy has promised never to change."""
    network = Reader()
    cifar10_check(Images("cifar10", numbered(50_000), numbered(10_000)), network)
    drawn = [number for some in network.numbers for number in some]
    train, test = drawn[:5000], drawn[5000:]
    assert len(set(train)) == len(set(test)) == 5000
    assert train[:4] == [24397, 39273, 6546, 13504]
    assert test[:4] == [4436, 3829, 2434, 4449]


def test_cifar10_subset_gives_torch_fidelitys_number() -> None:
    data, weights = os.environ.get("TORCHBELAY_DATA"), os.environ.get("TORCHBELAY_INCEPTION")
    if not data or not data_module.is_available("cifar10", Path(data)):
        pytest.skip("TORCHBELAY_DATA names no folder with CIFAR-10")
    if not weights:
        pytest.skip("TORCHBELAY_INCEPTION names no file with the weights of torch-fidelity's network")
    if any(importlib.util.find_spec(name) is None for name in ("torch_fidelity", "torchvision")):
        pytest.skip("torch-fidelity or torchvision is not installed")
    if not torch.cuda.is_available():
        pytest.skip("10,000 images take a GPU")
    found = cifar10_check(data_module.load("cifar10", Path(data)), Inception("cuda", Path(weights)))
    assert found == pytest.approx(CIFAR10_RECORDED, abs=1e-3)

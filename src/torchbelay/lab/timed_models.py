"""The networks and averages whose costs are measured: a model in training, alone or with an average."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchbelay.belay import Belay
from torchbelay.physics.spring import Spring

from .arms import BELAY, EMA, PLAIN
from .ledger import tensors

SPRING = Spring(k=1.0, m1=2000.0, m2=500.0)  # the paper's setting for MNIST
DAMPED = Spring.critical(k=1.0, m1=2000.0, m2=500.0)  # the same masses with non-trivial damping: both keep a velocity
DECAY = 0.999
TORCH, VELOCITIES = "EMA (torch)", "BELAY (velocities)"
ARMS = (PLAIN, TORCH, EMA, BELAY, VELOCITIES)
SPRINGS = {EMA: Spring.ema(decay=DECAY), BELAY: SPRING, VELOCITIES: DAMPED}


@dataclass(frozen=True)
class Network:
    """A network for images of 28 × 28 and ten classes."""

    name: str
    layers: Callable[[], nn.Module]
    batch: int


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


# A step of the first does little work per weight, a step of the second a lot: two extremes.
NETWORKS = (Network("MLP", _mlp, batch=128), Network("convolutional", _convolutional, batch=16))


@dataclass
class TimedModel:
    """A model in training: `step()` is forward, backward and update, `update()` the last of them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    images: Tensor
    classes: Tensor
    update: Callable[[], object]
    averages: Callable[[], Iterable[Tensor]]
    start: tuple[Tensor, ...]  # the weights at which every turn begins

    def restore(self) -> None:
        """Set the weights back to those of the start."""
        with torch.no_grad():
            for weight, value in zip(self.model.parameters(), self.start, strict=True):
                weight.copy_(value)

    def backward(self) -> None:
        """Compute gradients of one batch, always the same one."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.classes).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take one training step."""
        self.backward()
        self.update()


def build_model(network: Network, arm: str, seed: int) -> TimedModel:
    """Return a network with AdamW and the average of an arm; weights and batch are the same for all arms."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network.layers()
        images, classes = torch.randn(network.batch, 1, 28, 28), torch.randint(10, (network.batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update: Callable[[], object] = optimizer.step
    averages: Callable[[], Iterable[Tensor]] = tuple
    if arm == TORCH:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
        averaged.update_parameters(model)

        def update() -> None:
            optimizer.step()
            averaged.update_parameters(model)

        averages = averaged.state_dict().values
    elif arm != PLAIN:
        belay = Belay(model, optimizer, SPRINGS[arm])
        averages = lambda: tensors(belay.state_dict())  # noqa: E731
    start = tuple(weight.detach().clone() for weight in model.parameters())
    return TimedModel(model, optimizer, images, classes, update, averages, start)

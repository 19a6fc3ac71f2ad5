"""Advice from a run, on networks: the ring's score models under Adam, and a classifier of MNIST if there is a copy.

The advice knows only the losses of weights and average of one run with an EMA.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import torchbelay as tb
from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.ring.mixture import Ring
from torchbelay.lab.ring.networks import Networks
from torchbelay.lab.ring.study import Protocol, batches, excess_loss
from torchbelay.lab.threads import one_thread
from torchbelay.physics.recommend import Advice, recommend
from torchbelay.physics.run_fit import fit_run

pytestmark = pytest.mark.thorough

DECAY, BETA1 = 0.99, 0.9
Reports = list[dict[str, float]]


def marks(steps: int) -> set[int]:
    """When losses are reported."""
    return {int(t) for t in np.geomspace(3, steps, 18)}


def advise(reports: Reports, steps: int) -> Advice:
    """The advice from one run."""
    found = fit_run(reports, decay=DECAY, beta1=BETA1)
    assert found.error < 0.15  # a quadratic explains most of the losses
    return recommend(steps, curvatures=found.problem, beta1=BETA1, near=found.lr, caveats=found.caveats)


def ring_runs(settings: list[tuple[tb.Method, float]], steps: int, seeds: int = 2) -> list[Reports]:
    """Train the ring's networks at each setting; losses are means over seeds, against the exact denoiser."""
    how, ring = Protocol(seeds=seeds, steps=steps, hidden=(24, 24)), Ring()
    held_out = ring.triples((512,), torch.Generator().manual_seed(99))
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    starts = torch.stack([how.shape.initial(generator) for generator in generators])
    lanes = [Lane(Arm("any", "Adam", method), lr) for method, lr in settings]
    networks = Networks(how.shape, lanes, starts)
    found: list[Reports] = [[] for _ in settings]
    reported = marks(steps)
    for t, (x, y) in zip(range(1, steps + 1), batches(ring, generators, how.batch), strict=False):
        networks.step(x, y)
        if t in reported:
            losses = [excess_loss(how.shape, w, held_out).mean(1) for w in (networks.w, networks.average())]
            for i, (_, lr) in enumerate(settings):
                found[i].append({"step": t, "lr": lr, "w1": float(losses[0][i]), "w2": float(losses[1][i])})
    return found


def test_on_the_ring_the_advice_improves_runs_whose_rate_was_low() -> None:
    rates, steps = (0.001, 0.005), 300
    with one_thread():
        runs = ring_runs([(tb.methods.ema(DECAY), lr) for lr in rates], steps)
        advices = [advise(reports, steps) for reports in runs]
        again = ring_runs([(advice.method, advice.lr) for advice in advices], steps)
    for lr, before, advice, after in zip(rates, runs, advices, again, strict=True):
        assert lr < advice.lr <= 2 * lr
        assert after[-1]["w2"] < 0.95 * before[-1]["w2"]


def find_mnist() -> Path | None:
    """A copy of MNIST in the layout of Keras, if there is one."""
    path = Path(os.environ.get("TORCHBELAY_DATA", "")) / "mnist.npz"
    return path if path.is_file() else None


@pytest.fixture(scope="module")
def mnist_run() -> Callable[[tb.Method, float, int], Reports]:
    """A function that trains a small classifier of MNIST with Adam and reports its losses."""
    path = find_mnist()
    if path is None:
        pytest.skip("there is no mnist.npz in the folder that TORCHBELAY_DATA names")
    with np.load(path) as data:
        x, x_test = (torch.tensor(data[f"x_{part}"][:8000]).float().flatten(1) / 255 for part in ("train", "test"))
        y, y_test = (torch.tensor(data[f"y_{part}"][:8000]).long() for part in ("train", "test"))

    def run(method: tb.Method, lr: float, steps: int) -> Reports:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        belay = tb.Belay(model, optimizer, method)
        loss, found, reported = torch.nn.functional.cross_entropy, [], marks(steps)
        for t in range(1, steps + 1):
            chosen = torch.randint(len(x), (64,), generator=generator)
            optimizer.zero_grad()
            loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
            if t in reported:
                with torch.no_grad():
                    w1 = float(loss(model(x_test), y_test))
                    with belay.averaged():
                        found.append({"step": t, "lr": lr, "w1": w1, "w2": float(loss(model(x_test), y_test))})
        return found

    return run


def test_on_mnist_the_advice_improves_runs_whose_rate_was_low(mnist_run: Callable[..., Reports]) -> None:
    with one_thread():
        for lr in (0.001, 0.003):
            before = mnist_run(tb.methods.ema(DECAY), lr, 300)
            advice = advise(before, 300)
            assert lr < advice.lr <= 2 * lr
            after = mnist_run(advice.method, advice.lr, 300)
            assert after[-1]["w2"] < 0.95 * before[-1]["w2"]

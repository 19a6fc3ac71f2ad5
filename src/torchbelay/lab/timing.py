"""How long training steps with and without an average take, as ratios, over processes of their own.

Times are processor time on one thread, so other programs on the machine hardly matter. Steps of all arms take turns in
random order, so a slow moment hits all alike and no arm always follows the same one. Every turn begins at the same
weights, because a pass through a network takes another time at other weights: ReLU and max pooling are faster if most
units are off. A process places its tensors in memory once, and that matters as much as a small overhead: so there are
several processes, and an interval is that over processes.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from . import statistics
from .part import Record, Tick
from .threads import one_thread
from .timed_models import ARMS, NETWORKS, Network, build_model

RESAMPLES = 2000  # bootstrap samples of the rounds, if there is one process


def measure_times(network: Network, seed: int, rounds: int) -> Tensor:
    """Return the processor time of a step of every arm in this process: (arms, rounds).

    Arms are built and take turns in random order. Every turn begins at the same weights. Its first step is not timed:
    it brings the arm's own tensors back into the cache, as the step before does in training.
    """
    found = torch.zeros(len(ARMS), rounds, dtype=torch.float64)
    orders = random.Random(seed)
    models = {arm: build_model(network, arm, seed) for arm in orders.sample(ARMS, len(ARMS))}
    for one in models.values():  # the first steps allocate what stays
        one.step()
        one.step()
    for turn in range(rounds):
        for which in orders.sample(range(len(ARMS)), len(ARMS)):
            one = models[ARMS[which]]
            one.restore()
            one.step()
            start = time.process_time()
            one.step()
            found[which, turn] = time.process_time() - start
    return found


def measure_in_processes(network: Network, seed: int, processes: int, rounds: int, tick: Tick) -> list[Tensor]:
    """Return the times of every process, as `measure_times` does; a single one is this process."""
    if processes == 1:
        found = [measure_times(network, seed, rounds)]
        tick(rounds)
        return found
    return list(_from_processes(network, seed, processes, rounds, tick))


def _from_processes(network: Network, seed: int, processes: int, rounds: int, tick: Tick) -> Iterator[Tensor]:
    for process in range(processes):
        command = [sys.executable, "-m", __name__, network.name, str(seed + process), str(rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        tick(rounds)
        yield torch.tensor(json.loads(done.stdout), dtype=torch.float64)


def ratio(times: list[Tensor], baselines: list[Tensor], seed: int) -> Record:
    """Return the ratio of medians and its 95% interval: over processes, or over the rounds of a single one.

    >>> one, two = torch.full((3,), 2.0), torch.full((3,), 2.2)
    >>> {key: round(x, 3) for key, x in ratio([one, two, one], [one / 2] * 3, seed=0).items()}
    {'ratio': 2.065, 'low': 1.801, 'high': 2.367}
    """
    if len(times) == 1:
        return dict(zip(("ratio", "low", "high"), median_ratio(times[0], baselines[0], seed), strict=True))
    medians, base = ([float(each.median()) for each in some] for some in (times, baselines))
    found = statistics.ratio(medians, base)
    assert found is not None
    return {"ratio": found.mean, "low": found.low, "high": found.high}


def median_ratio(times: Tensor, baseline: Tensor, seed: int) -> tuple[float, float, float]:
    """Return the ratio of the medians over the rounds, and its 95% interval by resampling the rounds."""
    generator = torch.Generator().manual_seed(seed)
    rounds = torch.randint(len(times), (RESAMPLES, len(times)), generator=generator)
    drawn = times[rounds].median(dim=1).values / baseline[rounds].median(dim=1).values
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=times.dtype)).tolist()
    return float(times.median() / baseline.median()), low, high


def main(name: str, seed: str, rounds: str) -> None:
    """Write the times of a network to the standard output, as JSON."""
    (network,) = (each for each in NETWORKS if each.name == name)
    with one_thread():
        sys.stdout.write(json.dumps(measure_times(network, int(seed), int(rounds)).tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])

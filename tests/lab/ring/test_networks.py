"""Many networks at once: each is the same as one trained alone, in plain torch, with a Belay of its own."""

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from torchbelay import Belay, Spring
from torchbelay.lab.arms import Arm, Lane, belay_arm, matched_arm
from torchbelay.lab.ring.networks import Networks, Shape, TrainedNetworks, compute_outputs, train
from torchbelay.physics.methods import centred

f64 = torch.float64
SHAPE = Shape((3, 5, 4, 2))
SPRING = Spring(k=1.0, m1=10.0, m2=20.0)
WATCHED = Arm("EMA", "Adam", Spring.ema(0.9))
ARMS = (
    WATCHED,
    belay_arm("Adam", SPRING),
    matched_arm("Adam", SPRING),
    Arm("centred", "Adam", centred(theta=-0.5, rate=0.1)),
)
LANES = [Lane(arm, lr) for arm in ARMS for lr in (1e-3, 3e-2)]
SPECTATOR = Spring.ema(0.5)
STEPS, SEEDS = 25, 2


def spectator(lane: Lane) -> Spring | None:
    return SPECTATOR if lane.arm == WATCHED else None


def starts(seeds: int = SEEDS) -> Tensor:
    return torch.stack([SHAPE.initial(torch.Generator().manual_seed(seed)) for seed in range(seeds)]).to(f64)


def batches(seeds: int = SEEDS) -> Iterator[tuple[Tensor, Tensor]]:
    for step in count():
        generator = torch.Generator().manual_seed(100 + step)
        both = torch.randn(seeds, 6, 5, generator=generator, dtype=f64)
        yield both[..., :3], both[..., 3:]


def trained(lanes: list[Lane] = LANES, first: Tensor | None = None, steps: int = STEPS) -> TrainedNetworks:
    networks = Networks(SHAPE, lanes, starts() if first is None else first, {"other": spectator})
    return train(networks, batches(), steps=steps, tick=lambda n: None)


def alone(row: Tensor) -> nn.Sequential:
    """Return the same network as torch builds it."""
    layers: list[nn.Module] = []
    numbers = SHAPE.layers(row[None])
    for weight, bias in zip(numbers[::2], numbers[1::2], strict=True):
        layer = nn.Linear(*weight.shape[1:], dtype=f64)
        layer.load_state_dict({"weight": weight[0].T, "bias": bias[0, 0]})
        layers += [layer, nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def flat(state: dict[str, Tensor]) -> Tensor:
    """Return a network's weights as a row."""
    return torch.cat([(t.T if t.ndim == 2 else t).flatten() for t in state.values()])


@pytest.fixture(scope="module")
def together() -> TrainedNetworks:
    return trained()


# Alone and together ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("index", range(len(LANES)), ids=lambda i: f"{LANES[i].arm.name}-{LANES[i].lr:g}")
def test_a_network_among_many_is_the_same_as_one_trained_alone(
    together: TrainedNetworks, index: int, seed: int
) -> None:
    lane = LANES[index]
    model = alone(starts()[seed])
    optimizer = torch.optim.Adam(model.parameters(), lr=lane.actual_lr)
    watching = {"other": SPECTATOR} if lane.arm == WATCHED else {}
    assert lane.arm.method is not None
    own = Belay(model, optimizer, lane.arm.method, spectators=watching)
    losses = []
    for _, (x, y) in zip(range(STEPS), batches(), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[seed]), y[seed])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = {"w1": flat(model.state_dict()), "average": flat(own.average_state_dict())}
    # sums in another order differ in the last digit, and 25 steps of Adam enlarge the difference
    torch.testing.assert_close(together.w1[index, seed], expected["w1"], rtol=0, atol=1e-12)
    torch.testing.assert_close(together.averages["average"][index, seed], expected["average"], rtol=0, atol=1e-12)
    if watching:
        other = flat(own.average_state_dict("other"))
        torch.testing.assert_close(together.averages["other"][index, seed], other, rtol=0, atol=1e-12)
    last_tenth = torch.tensor(losses[-3:], dtype=f64).mean()
    torch.testing.assert_close(together.loss[index, seed], last_tenth, rtol=1e-12, atol=0)


def test_the_outputs_are_those_of_torch() -> None:
    rows, x = starts(), torch.randn(7, 3, dtype=f64, generator=torch.Generator().manual_seed(1))
    found = compute_outputs(SHAPE, rows, x)
    for row, output in zip(rows, found, strict=True):
        torch.testing.assert_close(output, alone(row)(x).detach(), rtol=1e-13, atol=1e-14)
    own = torch.stack([x, 2 * x])
    torch.testing.assert_close(
        compute_outputs(SHAPE, rows, own)[1], alone(rows[1])(2 * x).detach(), rtol=1e-13, atol=1e-14
    )


def test_lanes_that_a_spectator_does_not_watch_keep_w1(together: TrainedNetworks) -> None:
    unwatched = [i for i, lane in enumerate(LANES) if lane.arm != WATCHED]
    assert torch.equal(together.averages["other"][unwatched], together.w1[unwatched])


# What lanes share -----------------------------------------------------------------------------------------------------


def test_lanes_that_only_watch_are_one_run() -> None:
    lanes = [Lane(Arm(f"EMA {decay}", "Adam", Spring.ema(decay)), 1e-2) for decay in (0.5, 0.9, 0.99)]
    found = train(Networks(SHAPE, lanes, starts()), batches(), steps=10, tick=lambda n: None)
    # except for the last digits: the place in memory decides which numbers are rounded together
    torch.testing.assert_close(found.w1, found.w1[:1].expand_as(found.w1), rtol=0, atol=1e-13)
    averages = found.averages["average"]
    assert (averages[0] - averages[1]).abs().max() > 1e-3


def test_belay_and_its_matched_ema_see_the_same_first_batch() -> None:
    lanes = [Lane(make("Adam", SPRING), 1e-2) for make in (belay_arm, matched_arm)]
    networks = Networks(SHAPE, lanes, starts())
    losses = networks.step(*next(batches()))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-14, atol=0)  # before the step: same start, same batch
    assert (networks.w[0] - networks.w[1]).abs().max() > 1e-4


def test_a_seed_does_not_depend_on_the_other_seeds(together: TrainedNetworks) -> None:
    lanes = LANES[2:3]
    found = train(Networks(SHAPE, lanes, starts()[1:]), ((x[1:], y[1:]) for x, y in batches()), steps=STEPS, tick=abs)
    torch.testing.assert_close(found.w1[0, 0], together.w1[2, 1], rtol=0, atol=1e-13)


def test_a_lost_network_leaves_the_others_alone(together: TrainedNetworks) -> None:
    first = starts()
    first[0, 7] = torch.inf
    found = trained(first=first)
    assert not found.w1[:, 0].isfinite().any(-1).all()  # the lost one, in every lane
    assert not found.loss[:, 0].isfinite().any()
    assert torch.equal(found.w1[:, 1], together.w1[:, 1])
    assert torch.equal(found.averages["average"][:, 1], together.averages["average"][:, 1])


# Beginnings and ends --------------------------------------------------------------------------------------------------


def test_networks_start_as_in_torch() -> None:
    shape = Shape((9, 400, 4))
    row = shape.initial(torch.Generator().manual_seed(0))
    assert len(row) == shape.numbers == 10 * 400 + 401 * 4
    for layer, inputs in zip(shape.layers(row[None]), (9, 9, 400, 400), strict=True):
        bound = inputs**-0.5
        assert layer.abs().max() <= bound
        if layer.numel() > 100:
            assert layer.abs().max() > 0.95 * bound
            assert abs(float(layer.mean())) < 5 * bound / (3 * layer.numel()) ** 0.5


def test_training_stops_after_its_steps_and_ticks_each() -> None:
    ticks: list[int] = []
    networks = Networks(SHAPE, LANES[:1], starts())
    train(networks, batches(), steps=7, tick=ticks.append)
    assert ticks == [1] * 7
    assert networks.belay.step == 7


def test_parts_of_the_seeds_are_joined_in_their_order(together: TrainedNetworks) -> None:
    halves = [
        TrainedNetworks(
            together.w1[:, [i]],
            {name: average[:, [i]] for name, average in together.averages.items()},
            together.loss[:, [i]],
        )
        for i in range(SEEDS)
    ]
    joined = TrainedNetworks.join(halves)
    assert torch.equal(joined.w1, together.w1)
    assert torch.equal(joined.loss, together.loss)
    assert joined.averages.keys() == together.averages.keys()
    assert torch.equal(joined.averages["other"], together.averages["other"])

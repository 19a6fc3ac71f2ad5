"""What an average costs: exact bytes, ratios with intervals, and the figure. No time is asserted."""

import copy
import json
from itertools import pairwise

import pytest
import torch

from helpers import kept_records
from helpers.captions import check_brevity, full_text
from torchbelay.lab import overhead, statistics, timed_models, timing
from torchbelay.lab.arms import BELAY, EMA, PLAIN
from torchbelay.lab.overhead import cost
from torchbelay.lab.part import Record, Settings
from torchbelay.lab.records import without_times
from torchbelay.lab.report import style
from torchbelay.lab.report.words import excess
from torchbelay.lab.threads import one_thread
from torchbelay.lab.timed_models import ARMS, NETWORKS, TORCH, VELOCITIES

QUICK = Settings(seed=0, quick=True)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return overhead.run(QUICK, lambda n: None)


@pytest.mark.parametrize("network", [network.name for network in NETWORKS])
def test_bytes_per_weight(records: list[Record], network: str) -> None:
    stay = {arm: overhead.bytes_per_weight(cost(records, network, arm)) for arm in ARMS}
    # weights 4, gradients 4, two moments 8; the rest is a step count per tensor, and torch's own counter
    assert stay[PLAIN] == pytest.approx(16, abs=1e-3)
    assert stay[EMA] - stay[PLAIN] == pytest.approx(4, abs=1e-9)
    assert stay[BELAY] - stay[EMA] == pytest.approx(4, abs=1e-3)  # the copy that the next step writes into
    assert stay[TORCH] - stay[EMA] == pytest.approx(0, abs=1e-3)
    assert stay[VELOCITIES] - stay[BELAY] == pytest.approx(8, abs=1e-9)  # a velocity for each of the two masses


@pytest.mark.parametrize("network", [network.name for network in NETWORKS])
def test_belay_keeps_a_copy_of_the_weights_and_an_ema_does_not(records: list[Record], network: str) -> None:
    copies = {arm: cost(records, network, arm)["bytes"]["copy"] for arm in ARMS}
    assert copies[PLAIN] == copies[TORCH] == 0
    assert copies[EMA] <= 8  # a number or two
    for arm in (BELAY, VELOCITIES):
        assert copies[arm] - copies[EMA] == 4 * cost(records, network, arm)["weights"]
    during = {arm: cost(records, network, arm)["bytes_during_update"] for arm in ARMS}
    assert during[PLAIN] == during[TORCH] == 0
    assert max(during[EMA], during[BELAY]) <= 8
    assert during[VELOCITIES] > 0  # scratch buffers


def test_arms_train_the_same_network_on_the_same_batch() -> None:
    models = [timed_models.build_model(NETWORKS[0], arm, seed=3) for arm in ARMS]
    for one in models[1:]:
        assert torch.equal(one.images, models[0].images)
        for p, q in zip(one.model.parameters(), models[0].model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("arm", [TORCH, EMA, BELAY])
def test_the_average_of_an_arm_moves(arm: str) -> None:
    one = timed_models.build_model(NETWORKS[0], arm, seed=0)
    weights = [p.detach().clone() for p in one.model.parameters()]
    one.step()
    one.step()  # the lagged average moves from the second step on
    averages = [t for t in one.averages() if t.is_floating_point()]
    assert [t.shape for t in averages] == [w.shape for w in weights]
    assert not torch.equal(averages[0], weights[0])
    assert not torch.equal(averages[0], next(one.model.parameters()))


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[torch.Tensor], bool]]:
    """Return a list that every step appends its weights to, and whether it has an average."""
    seen: list[tuple[list[torch.Tensor], bool]] = []
    step = timed_models.TimedModel.step

    def watched(self: timed_models.TimedModel) -> None:
        seen.append(([w.detach().clone() for w in self.model.parameters()], bool(list(self.averages()))))
        step(self)

    monkeypatch.setattr(timed_models.TimedModel, "step", watched)
    return seen


def test_every_turn_begins_at_the_same_weights_and_with_a_step_that_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an arm whose training goes another way is timed at weights of its own, where passes may be faster."""
    start = list(timed_models.build_model(NETWORKS[1], PLAIN, seed=0).model.parameters())
    seen = watch_steps(monkeypatch)
    timing.measure_times(NETWORKS[1], seed=0, rounds=3)
    turns = seen[2 * len(ARMS) :]  # after two steps of each arm that allocate what stays
    assert len(turns) == 3 * len(ARMS) * 2
    assert all(torch.equal(w, v) for weights, _ in turns[::2] for w, v in zip(weights, start, strict=True))
    assert not any(torch.equal(w, v) for weights, _ in turns[1::2] for w, v in zip(weights, start, strict=True))


def test_arms_take_turns_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_steps(monkeypatch)
    timing.measure_times(NETWORKS[1], seed=0, rounds=12)
    timed = [averages for _, averages in seen[2 * len(ARMS) :: 2]]
    places = [timed[i : i + len(ARMS)].index(False) for i in range(0, len(timed), len(ARMS))]  # of no averaging
    steps = {(b - a) % len(ARMS) for a, b in pairwise(places)}
    assert {*places} == {*range(len(ARMS))}
    assert len(steps) > 2  # turns that go round would have one


def test_no_bar_is_cut(records: list[Record]) -> None:
    made = copy.deepcopy(records)
    cost(made, NETWORKS[0].name, VELOCITIES)["bytes_during_update"] = 90 * made[0]["weights"]
    (plate,) = overhead.draw(made)
    assert plate.figure.axes[1].get_xlim()[1] > 28 + 90  # type: ignore[union-attr]


def test_a_ratio_below_one_is_said_to_be_an_error(records: list[Record]) -> None:
    made = copy.deepcopy(records)
    for r in made:
        for against in ("to_plain", "to_ema"):
            r["timing_s"][against]["ratio"] = 1.0 if r["arm"] == PLAIN else 1.1
    (plate,) = overhead.draw(made)
    assert "below 1" not in full_text(plate)
    cost(made, "convolutional", VELOCITIES)["timing_s"]["to_ema"]["ratio"] = 0.965
    (plate,) = overhead.draw(made)
    assert plate.notes[-1] == (
        "An arm that does more work cannot save time: a ratio below 1 shows the size of the error. Here: BELAY "
        "(velocities) ÷ EMA 0.965 (convolutional network)."
    )


def test_records_of_arms_with_weights_of_their_own_say_so() -> None:
    kept = kept_records.lines("overhead")
    assert all(r["same_weights"] for r in kept)
    for same in (True, False):
        made = [r | {"same_weights": same} for r in copy.deepcopy(kept)]
        cost(made, "convolutional", VELOCITIES)["timing_s"]["to_ema"]["ratio"] = 0.965
        notes = " ".join(overhead.draw(made)[0].notes)
        assert "BELAY (velocities) ÷ EMA 0.965 (convolutional network)" in notes
        assert ("every arm trained to weights of its own" in notes) is not same


def test_it_is_told_why_the_copy_is_kept() -> None:
    (plate,) = overhead.draw(kept_records.lines("overhead"))
    assert "new memory at every step would take more time" in full_text(plate)


def test_a_ratio_of_medians_and_its_interval() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 1 + 0.1 * torch.rand(101, generator=generator, dtype=torch.float64)
    assert timing.median_ratio(2 * noise, noise, seed=0) == pytest.approx(
        (2, 2, 2), rel=1e-15
    )  # rounds are kept together
    other = 1 + 0.1 * torch.rand(101, generator=generator, dtype=torch.float64)
    middle, low, high = timing.median_ratio(2 * noise, other, seed=0)
    assert 1.95 < low < middle < high < 2.05
    assert middle == float(2 * noise.median() / other.median())


def test_several_processes_each_have_times_and_the_interval_is_over_them() -> None:
    done: list[int] = []
    found = timing.measure_in_processes(NETWORKS[1], 0, processes=2, rounds=3, tick=done.append)
    assert done == [3, 3]
    assert [each.shape for each in found] == [(len(ARMS), 3)] * 2
    assert all(bool((each > 0).all()) for each in found)
    times = [torch.tensor([2.0, 2.0, 9.0]), torch.tensor([4.0, 4.0, 1.0]), torch.tensor([4.0])]
    ones = [torch.ones(3), torch.ones(3), torch.ones(1)]
    expected = statistics.ratio([2.0, 4.0, 4.0], [1.0] * 3)
    assert expected is not None
    assert timing.ratio(times, ones, seed=0) == {"ratio": expected.mean, "low": expected.low, "high": expected.high}


def test_there_is_one_thread_inside_the_block_and_the_old_number_after_it() -> None:
    def fail() -> None:
        with one_thread():
            inside.append(torch.get_num_threads())
            raise RuntimeError("anything")

    inside, before = [], torch.get_num_threads()
    with pytest.raises(RuntimeError, match="anything"):
        fail()
    assert (inside, torch.get_num_threads()) == ([1], before)


def test_the_same_settings_give_the_same_records_but_for_times(records: list[Record]) -> None:
    done = []
    again = overhead.run(QUICK, done.append)
    assert [without_times(r) for r in again] == [without_times(r) for r in records]
    assert sum(done) == overhead.plan(QUICK)[0]
    assert "timing_s" not in without_times(records[0])
    for r in records:
        for against in ("to_plain", "to_ema"):
            t = r["timing_s"][against]
            assert 0 < t["low"] <= t["high"]


def test_the_random_state_of_others_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    timed_models.build_model(NETWORKS[1], BELAY, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_the_figure_is_drawn_from_records_that_have_been_on_disk(records: list[Record]) -> None:
    (plate,) = overhead.draw(json.loads(json.dumps(records, allow_nan=False)))
    assert plate.name == "overhead"
    assert len(style.as_bytes(plate.figure, "png")) > 10_000
    check_brevity(plate)
    assert "669,706 weights" in full_text(plate)
    for network in NETWORKS:
        assert excess(cost(records, network.name, BELAY)["timing_s"]["to_plain"]["ratio"]) in plate.caption

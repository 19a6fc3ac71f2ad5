"""What is trained for the report: every arm at every rate from every seed, and the paper's numbers."""

import math
from itertools import product

import pytest

from torchbelay.lab.score import studies
from torchbelay.lab.score.studies import Group
from torchbelay.physics.spring import Spring

ARMS = ("equal-memory EMA", "matched EMA", "BELAY")


def arms(group: Group, lr: float) -> dict[str, Spring]:
    return {lane.arm.name: lane.arm.method for lane in group.lanes if lane.lr == lr}  # type: ignore[misc]


def test_mnist_has_every_arm_at_every_rate() -> None:
    groups = list(studies.rates())
    assert [group.seed for group in groups] == [0, 1, 2]
    for group, lr in product(groups, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 5e-2)):
        found = arms(group, lr)
        assert {"equal-memory EMA", "matched EMA", "BELAY"} <= set(found)
        assert found["BELAY"] == Spring(k=1.0, m1=2000.0, m2=500.0)
        assert found["equal-memory EMA"].decay == pytest.approx(0.99875)
        assert found["matched EMA"].decay == pytest.approx(0.99875)


def test_the_appendixs_masses_are_there() -> None:
    group = next(studies.rates())
    for lr in (1e-3, 5e-2):
        masses = [arms(group, lr)[name].m1 for name in ("BELAY", "BELAY m1 2e4", "BELAY m1 2e5")]
        assert masses == [2e3, 2e4, 2e5]


def test_table_1_has_the_best_rate_and_the_papers() -> None:
    groups = list(studies.table1({"equal-memory EMA": 1e-3, "matched EMA": 1e-3, "BELAY": 3e-4}))
    group = groups[0]
    assert [(lane.arm.name, lane.lr) for lane in group.lanes] == [
        (arm, lr) for lr in (3e-4, 1e-3, 5e-2) for arm in ("equal-memory EMA", "matched EMA", "BELAY")
    ]
    assert group.objective.features == 64  # type: ignore[attr-defined]
    made = [(group.lanes[i].arm.name, group.lanes[i].lr) for i in group.fids]
    everywhere = [(arm, lr) for lr in (3e-4, 5e-2) for arm in ARMS]
    assert made == [*everywhere[:3], ("equal-memory EMA", 1e-3), ("matched EMA", 1e-3), *everywhere[3:]]
    assert group.samples == 10_000
    assert len(groups) == 3
    assert not {each.seed for each in groups} & {each.seed for each in studies.rates()}  # those chose the rates


def test_table_1_has_a_tuned_belay_at_its_own_rate() -> None:
    rates = {"equal-memory EMA": 1e-3, "matched EMA": 1e-3, "BELAY": 3e-4}
    group = next(studies.table1(rates | {"BELAY m1 2e4": 3e-3}))
    (tuned,) = (lane for lane in group.lanes if lane.arm.name not in rates)
    assert tuned.arm.method == Spring(k=1.0, m1=20_000.0, m2=500.0)
    assert tuned.lr == 3e-3
    assert group.lanes.index(tuned) in group.fids


def test_the_sign_has_every_theta_at_every_rate() -> None:
    groups = list(studies.sign())
    assert len(groups) == 5
    found = {(lane.arm.method.theta, lane.lr) for lane in groups[0].lanes}  # type: ignore[union-attr]
    assert found == set(product((-0.9, -0.5, -0.25, 0.0, 0.25, 1.0), (1e-3, 4e-3, 1.2e-2)))
    assert {lane.arm.method.rate for lane in groups[0].lanes} == {1 / 200}  # type: ignore[union-attr]


def test_cifar_10s_masses_are_the_papers_for_the_length_of_the_run() -> None:
    group = next(studies.cifar10())
    spring = arms(group, 1e-3)["BELAY"]
    assert spring.m1 / group.steps == pytest.approx(20_000 / 390_625)
    assert spring.m2 / spring.m1 == pytest.approx(0.1)
    other = arms(group, 1e-3)["θ −0.5"]
    assert other.rate == pytest.approx(spring.coupling().rate)  # type: ignore[attr-defined]


def test_the_matched_ema_has_belays_effective_rate() -> None:
    lanes = {lane.arm.name: lane for lane in next(studies.rates()).lanes if lane.lr == 1e-3}
    assert lanes["matched EMA"].actual_lr == pytest.approx(0.7998e-3)
    assert lanes["matched EMA"].effective_lr == lanes["BELAY"].effective_lr


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_budget_scales_steps_and_masses_together(share: float) -> None:
    whole, part = next(studies.rates()), next(studies.rates(share=share))
    assert part.steps == share * whole.steps
    assert arms(part, 1e-3)["BELAY"].m1 == share * 2000
    for name, spring in arms(whole, 1e-3).items():
        left = spring.decay**whole.steps
        assert arms(part, 1e-3)[name].decay ** part.steps == pytest.approx(left, rel=0.02)
    theta = next(studies.sign(share=share)).lanes[0].arm.method
    assert theta.rate == pytest.approx(1 / 200 / share)  # type: ignore[union-attr]


def test_what_differs_from_the_paper_is_said_in_numbers() -> None:
    said = " ".join(next(studies.rates()).differs)
    assert "32 features, 3,000 steps and batches of 32" in said
    assert f"{(1 - 0.00125) ** 3000:.1%}" in said
    said = " ".join(next(studies.cifar10()).differs)
    assert "153,600 images" in said
    assert "m1 = 61.44" in said


def test_an_ema_is_stretched_by_its_rate() -> None:
    assert studies.stretch(Spring.ema(decay=0.9), 0.5).decay == pytest.approx(0.8)
    assert studies.stretch(Spring.ema(decay=0.9), 0.5).m1 == math.inf


# Figure 4 and the readings --------------------------------------------------------------------------------------------


def test_figure_4_has_table_1s_ema_its_controls_and_the_appendixs_masses() -> None:
    groups = list(studies.figure4())
    seen = {each.seed for study in (studies.rates(), studies.table1(dict.fromkeys(ARMS, 1e-3))) for each in study}
    assert len(groups) == 3
    assert not {each.seed for each in groups} & seen
    group = groups[0]
    found = arms(group, 3e-4)
    assert list(found) == ["EMA", *ARMS, "BELAY m1 2e4", "BELAY m1 2e5"]
    assert found["EMA"] == Spring.ema(decay=0.999)
    assert found["EMA"].decay == pytest.approx(Spring(k=1.0, m1=math.inf, m2=500.0).decay)  # BELAY as m1 → ∞
    assert [group.lanes[i].arm.name for i in group.fids] == ["EMA", "BELAY"]
    assert (group.points, group.fid_points, group.samples) == (40, 8, 5000)
    assert "not the paper's 0.05" in " ".join(group.differs)


def test_the_readings_are_every_warm_up_eps_and_network_with_five_seeds() -> None:
    groups = list(studies.readings())
    networks = [group.objective.features for group in groups]  # type: ignore[attr-defined]
    assert networks == [32] * 5 + [64] * 5
    for group in groups:
        found = {(lane.arm.name, lane.warm_up, lane.eps) for lane in group.lanes}
        assert found == set(product(("EMA", "BELAY"), (0, 500), (1e-8, 1e-3, 1e-2)))
        assert {lane.lr for lane in group.lanes} == {5e-2}
        assert {lane.arm.method for lane in group.lanes} == {Spring.ema(decay=0.999), Spring(k=1.0, m1=2e3, m2=500.0)}
    assert {lane.warm_up for lane in next(studies.readings(share=0.1)).lanes} == {0, 50}


# The sign with its controls -------------------------------------------------------------------------------------------


def test_warmup_has_both_signs_cold_and_warmed_up_at_four_rates() -> None:
    groups = list(studies.warmup())
    seen = {each.seed for each in studies.sign()}
    assert not {each.seed for each in groups} & seen  # those suggested the hypothesis
    for group in groups[:4]:
        found = [(lane.arm.method.theta, lane.warm_up, lane.lr) for lane in group.lanes]  # type: ignore[union-attr]
        assert sorted(found) == sorted(product((0.0, -0.5), (0, 200), (1e-3, 4e-3, 1.2e-2, 3.6e-2)))
    for group in groups[4:]:
        assert [(lane.lr, lane.warm_up) for lane in group.lanes] == [(1.2e-2, 0)] * 2 + [(1.2e-2, 200)] * 2
    before = next(studies.sign())
    assert (groups[0].objective, groups[0].batch) == (before.objective, before.batch)
    assert {lane.warm_up for lane in next(studies.warmup(share=0.1)).lanes} == {0, 20}


def test_penalty_has_every_momentum_and_rate_and_emas_share_a_run() -> None:
    group = next(studies.penalty())
    found = [(lane.beta1, lane.arm.method.theta, lane.arm.method.rate) for lane in group.lanes]  # type: ignore[union-attr]
    pulling = [(-0.5, 0.0895), (-0.5, 0.005)]
    assert found == [(beta1, *each) for beta1 in (0.9, 0.0) for each in ((0.0, 0.0895), *pulling)]
    for lane in group.lanes[::3]:
        ((name, watcher),) = lane.arm.spectators
        assert name == "c 0.005"
        assert (watcher.theta, watcher.rate) == (0.0, 0.005)  # type: ignore[attr-defined]
    assert not any(lane.arm.spectators for i, lane in enumerate(group.lanes) if i % 3)
    assert not {each.seed for each in studies.penalty()} & {each.seed for each in studies.cifar10()}
    before = next(studies.cifar10())
    assert (group.objective, group.batch, group.ramp) == (before.objective, before.batch, before.ramp)

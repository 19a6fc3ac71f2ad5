"""Networks side by side: each learns as if it were alone, and all see the same batches."""

import pytest
import torch
from torch import Tensor

import torchbelay as tb
from helpers.score_models import STUDY_MODEL, STUDY_SPRING, study_images
from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.part import LabError
from torchbelay.lab.score.models.objective import Draws
from torchbelay.lab.score.studies import belay, ema
from torchbelay.lab.score.training.batches import Batches, as_pixels
from torchbelay.lab.score.training.speed import build_learners
from torchbelay.physics.spring import Spring

CPU = torch.device("cpu")


def weights(learner: object) -> list[Tensor]:
    return [p.detach().clone() for p in learner.network.parameters()]  # type: ignore[attr-defined]


def batches(seed: int = 1, **options: int) -> Batches:
    return Batches(study_images().train, STUDY_MODEL, 4, seed, **options)


def test_a_trainee_is_adam_with_a_belay_as_a_user_would_write_it() -> None:
    learners = build_learners(STUDY_MODEL, [Lane(belay(STUDY_SPRING), 1e-3)], 0, CPU, "eager")
    torch.manual_seed(0)
    network = STUDY_MODEL.network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    average = tb.Belay(network, optimizer, STUDY_SPRING)
    source = batches()
    for pixels, draws in (source.next() for _ in range(4)):
        learners.step(pixels, draws)
        optimizer.zero_grad()
        STUDY_MODEL.loss(network, pixels, draws).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(weights(learners.members[0]), [p.detach() for p in network.parameters()])
    found = learners.members[0].belay.average_state_dict()
    torch.testing.assert_close(found, average.average_state_dict())


def test_side_by_side_or_alone_is_the_same() -> None:
    lanes = [Lane(belay(STUDY_SPRING), 1e-3), Lane(ema(Spring.ema(decay=0.9)), 3e-3)]
    learners = build_learners(STUDY_MODEL, lanes, 0, CPU, "eager")
    alone = [build_learners(STUDY_MODEL, [lane], 0, CPU, "eager") for lane in lanes]
    for which in (learners, *alone):
        source = batches()
        for _ in range(3):
            which.step(*source.next())
    for one, other in zip(learners.members, (each.members[0] for each in alone), strict=True):
        assert all(map(torch.equal, weights(one), weights(other)))
        assert one.total_loss() == other.total_loss()


def test_the_loss_is_summed_until_it_is_asked_for() -> None:
    learners = build_learners(STUDY_MODEL, [Lane(ema(Spring.ema(decay=0.9)), 0.0)], 0, CPU, "eager")
    pixels, draws = batches().next()
    for _ in range(3):
        learners.step(pixels, draws)
    with torch.no_grad():
        once = float(STUDY_MODEL.loss(learners.members[0].network, pixels, draws).mean())
    assert learners.members[0].total_loss() == pytest.approx(3 * once, rel=1e-5)
    assert learners.members[0].total_loss() == 0


def test_the_schedule_scales_the_lanes_own_rate() -> None:
    lane = Lane(Arm("half", "Adam", STUDY_SPRING, lr_scale=0.5), 1e-2)
    learner = build_learners(STUDY_MODEL, [lane], 0, CPU, "eager").members[0]
    learner.set_lr_scale(0.1)
    assert float(learner.optimizer.param_groups[0]["lr"]) == pytest.approx(5e-4)


def test_an_arm_without_an_average_is_refused() -> None:
    with pytest.raises(LabError, match="'plain' has no average; take w1 of an EMA's run instead"):
        build_learners(STUDY_MODEL, [Lane(Arm("plain", "Adam"), 1e-3)], 0, CPU, "eager")


def test_what_was_saved_goes_on_bit_for_bit() -> None:
    whole, first, second = (
        build_learners(STUDY_MODEL, [Lane(belay(STUDY_SPRING), 1e-3)], 0, CPU, "eager") for _ in range(3)
    )
    source = batches()
    given = [source.next() for _ in range(6)]
    for pair in given:
        whole.step(*pair)
    for pair in given[:3]:
        first.step(*pair)
    second.members[0].load_state_dict(first.members[0].state_dict())
    for pair in given[3:]:
        second.step(*pair)
    assert all(map(torch.equal, weights(whole.members[0]), weights(second.members[0])))
    ours, theirs = (each.members[0].belay.average_state_dict() for each in (whole, second))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert whole.members[0].total_loss() == second.members[0].total_loss()


def test_a_seed_says_which_batches_there_are() -> None:
    one, two, other = batches(1), batches(1), batches(2)
    for _ in range(2):
        (pixels, draws), (same, drawn), (different, _) = one.next(), two.next(), other.next()
        assert torch.equal(pixels, same)
        assert torch.equal(draws.noise, drawn.noise)
        assert torch.equal(draws.sigma, drawn.sigma)
    assert not torch.equal(pixels, different)


def test_ranks_share_a_batch() -> None:
    pixels, draws = batches(1).next()
    parts = [batches(1, rank=rank, ranks=2).next() for rank in range(2)]
    assert torch.equal(torch.cat([part for part, _ in parts]), pixels)
    assert torch.equal(torch.cat([part.noise for _, part in parts]), draws.noise)
    assert torch.equal(torch.cat([part.sigma for _, part in parts]), draws.sigma)


def test_pixels_come_from_the_images() -> None:
    pixels, _ = batches().next()
    known = {tuple(picture.flatten().tolist()) for picture in as_pixels(study_images().train)}
    assert all(tuple(picture.flatten().tolist()) in known for picture in pixels)


def test_draws_are_cut_with_all_they_have() -> None:
    draws = Draws(torch.arange(3.0), torch.rand(3, 1, 2, 2), torch.rand(3, 8))
    part = draws[1:]
    assert torch.equal(part.sigma, torch.tensor([1.0, 2.0]))
    assert torch.equal(part.noise, draws.noise[1:])
    assert draws.augment is not None
    assert part.augment is not None
    assert torch.equal(part.augment, draws.augment[1:])

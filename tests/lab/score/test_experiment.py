"""A group becomes records: losses on fixed triples, images, their distance; and how fast it was."""

import base64
import io
import json
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.score_models import STUDY_ARMS, STUDY_MODEL, Brightness, study_group, study_images
from torchbelay.lab.arms import Arm, Lane
from torchbelay.lab.part import Record
from torchbelay.lab.score import experiment as module
from torchbelay.lab.score import fid
from torchbelay.lab.score.experiment import FidReference, ImageSampler, encode_png, run_group
from torchbelay.lab.score.training import speed
from torchbelay.lab.score.training.speed import build_learners
from torchbelay.lab.score.training.validation import Validation
from torchbelay.physics.methods import centred

CPU = torch.device("cpu")
TRIPLES = 6  # on which losses are measured here


def run(**changes: object) -> list[Record]:
    statistics = fid.statistics(Brightness().features(study_images().train))
    reference = FidReference(Brightness(), statistics, "twelve squares")
    return list(run_group(study_group(**changes), study_images(), CPU, "eager", lambda n: None, reference, TRIPLES))


def test_every_lane_is_a_record_of_plain_json() -> None:
    found = run()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    runs = [line for line in found if line["kind"] == "run"]
    assert [(line["arm"], line["lr"]) for line in runs] == [(arm.name, lr) for lr in (1e-3, 3e-3) for arm in STUDY_ARMS]
    assert found[0]["kind"] == "protocol"
    assert {line["how"] for line in runs} == {"eager"}
    belay, matched = runs[2], runs[1]
    assert belay["m1"] == 20.0
    assert matched["m1"] is None  # infinite
    assert belay["theta"] == 0.25
    assert matched["rate"] == belay["rate"] == 0.125
    assert matched["optimizer_lr"] == pytest.approx(belay["effective_lr"], rel=1e-5) != belay["optimizer_lr"]


def test_losses_are_taken_along_the_way_and_at_the_end() -> None:
    line = next(line for line in run() if line["kind"] == "run")
    assert [point["step"] for point in line["curve"]] == [3, 6]
    assert line["final"] == {weights: line["curve"][-1][weights] for weights in ("w1", "w2")}
    assert line["finite"]


def test_the_losses_are_those_of_the_weights_and_of_the_average() -> None:
    """Trained again by hand, and measured on the same triples."""
    line = next(line for line in run() if line["kind"] == "run" and line["arm"] == "BELAY")
    each = study_group()
    learners = build_learners(STUDY_MODEL, each.lanes, each.seed, CPU, "eager")
    source = module.Batches(study_images().train, STUDY_MODEL, each.batch, seed=1000)
    for _ in range(each.steps):
        learners.step(*source.next())
    learner = learners.members[2]
    validation = Validation.make(study_images(), STUDY_MODEL, CPU, count=TRIPLES)
    assert line["final"]["w1"] == validation.measure(STUDY_MODEL.loss, learner.network)
    network = STUDY_MODEL.network()
    network.load_state_dict(learner.belay.average_state_dict())
    assert line["final"]["w2"] == validation.measure(STUDY_MODEL.loss, network)
    assert line["final"]["w1"] != line["final"]["w2"]


def test_the_same_group_gives_the_same_records() -> None:
    one, two = ([{k: v for k, v in line.items() if k != "wall_s"} for line in run()] for _ in range(2))
    assert one == two


def test_a_lost_run_is_a_record_too() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return x * self.w / 0

    class Broken(type(STUDY_MODEL)):  # type: ignore[misc]
        def network(self) -> nn.Module:
            return Breaks()

    lines = run(objective=Broken(levels=STUDY_MODEL.levels), fids=(0,))
    assert [(line["fid"], line["samples"]) for line in lines if line["kind"] == "fid"] == [(None, 6)]
    assert not [line for line in lines if line["kind"] == "grid"]  # nothing can be made with it
    found = [line for line in lines if line["kind"] == "run"]
    assert all(line["final"] == {w: {"train": None, "test": None} for w in ("w1", "w2")} for line in found)
    assert all(not line["finite"] and line["curve"][0]["batch_loss"] is None for line in found)
    json.dumps(found, allow_nan=False)


def test_a_lost_run_is_not_trained_on() -> None:
    """A weight that is not finite stays so; the other learners are not affected."""
    lanes = (Lane(STUDY_ARMS[0], 1e30), *study_group().lanes)
    lines = [line for line in run(lanes=lanes, steps=8, points=4) if line["kind"] == "run"]
    assert [line["steps_taken"] for line in lines] == [2, *[8] * 6]
    assert [line["images"] for line in lines] == [2 * 4, *[8 * 4] * 6]
    assert lines[0]["wall_s"] == pytest.approx(lines[1]["wall_s"] / 4, abs=0.02)
    assert [point["batch_loss"] for point in lines[0]["curve"]][1:] == [None] * 3
    assert not lines[0]["finite"]
    assert [line["curve"] for line in lines[1:]] == [
        line["curve"] for line in run(steps=8, points=4) if line["kind"] == "run"
    ]


def test_images_are_made_from_the_average_and_compared() -> None:
    found = run(fids=(2,))
    distance = next(line for line in found if line["kind"] == "fid")
    grid = next(line for line in found if line["kind"] == "grid")
    assert (distance["arm"], distance["weights"], distance["samples"]) == ("BELAY", "w2", 6)
    assert (distance["sample_seed"], distance["reference"]) == (0, "twelve squares")
    assert "3 levels × 1" in distance["sampler"]
    each = study_group()
    learners = build_learners(STUDY_MODEL, each.lanes, each.seed, CPU, "eager")
    source = module.Batches(study_images().train, STUDY_MODEL, each.batch, seed=1000)
    for _ in range(each.steps):
        learners.step(*source.next())
    sampler = ImageSampler(STUDY_MODEL, CPU, "eager")
    sampler.network.load_state_dict(learners.members[2].belay.average_state_dict())
    made = sampler.make(6)
    expected = fid.frechet_distance(
        fid.statistics(Brightness().features(made)), fid.statistics(Brightness().features(study_images().train))
    )
    assert distance["fid"] == pytest.approx(expected, rel=1e-5)
    shown = matplotlib.image.imread(io.BytesIO(base64.b64decode(grid["png"])))
    tile = (shown[:28, 28:56, 0] * 255).round().astype(np.uint8)
    np.testing.assert_array_equal(tile, made[1, 0].numpy())


def test_without_a_fid_reference_images_are_shown_all_the_same() -> None:
    kinds = [line["kind"] for line in run_group(study_group(fids=(0,)), study_images(), CPU, "eager", lambda n: None)]
    assert kinds.count("grid") == 1
    assert "fid" not in kinds


def test_a_seed_of_samples_does_not_depend_on_how_many_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_BATCH", 4)
    sampler = ImageSampler(STUDY_MODEL, CPU, "eager")
    assert torch.equal(sampler.make(8)[:4], sampler.make(4))
    assert not torch.equal(sampler.make(4), sampler.make(4, seed=1))


def test_a_sheet_of_colour_pictures() -> None:
    pictures = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sheet = (matplotlib.image.imread(io.BytesIO(encode_png(pictures, 2))) * 255).round().astype(np.uint8)
    assert sheet.shape[:2] == (12, 12)
    np.testing.assert_array_equal(sheet[4:8, 6:12, :3], pictures[3].permute(1, 2, 0).numpy())
    assert not sheet[8:, 6:, :3].any()  # the empty places


def test_triples_are_the_same_for_every_run_and_apart_for_train_and_test() -> None:
    one, two = (Validation.make(study_images(), STUDY_MODEL, CPU, count=5) for _ in range(2))
    for name in ("train", "test"):
        assert torch.equal(one.triples[name][0], two.triples[name][0])
        assert torch.equal(one.triples[name][1].noise, two.triples[name][1].noise)
    assert not torch.equal(one.triples["train"][1].noise, one.triples["test"][1].noise)


def test_measuring_leaves_the_network_in_its_mode_and_uses_no_dropout() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, self.training)

    validation, network = Validation.make(study_images(), STUDY_MODEL, CPU, count=5), Drops()
    first, second = (validation.measure(STUDY_MODEL.loss, network) for _ in range(2))
    assert first == second
    assert network.training


def test_arithmetic_is_counted() -> None:
    """A convolution of 3 × 3 costs 2·9·inputs·outputs a pixel forward, as much again for each of the two gradients."""
    network = STUDY_MODEL.network()
    counted = speed.flops_per_image(STUDY_MODEL)
    pixels = {28: 784, 14: 196}
    by_hand = 0
    sizes: dict[str, int] = {}
    for name, module_ in network.named_modules():
        if isinstance(module_, nn.Conv2d):
            module_.register_forward_hook(lambda m, i, o, name=name: sizes.__setitem__(name, o.shape[-1]))
    network(torch.zeros(1, 1, 28, 28), torch.ones(1))
    for name, module_ in network.named_modules():
        if isinstance(module_, nn.Conv2d):
            passes = 2 if name == "begin" else 3  # the gradient of the image is not needed
            by_hand += passes * 2 * module_.weight.numel() * pixels[sizes[name]]
    assert counted == pytest.approx(by_hand, rel=0.02)  # the widening is two small products besides


def test_a_record_of_speed() -> None:
    line = speed.throughput(
        STUDY_MODEL, study_images().train, study_group().lanes[2], 2, side_by_side=2, mode="eager", steps=1
    )
    assert line["side_by_side"] == 2
    assert line["images_per_s"] == pytest.approx(4 / line["step_s"], rel=0.5)
    assert line["arithmetic_limit_images_per_s"] is None  # unknown for this machine
    json.dumps(line, allow_nan=False)


# Spectators and Adam's momentum ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_a_spectator_is_the_average_of_a_run_of_its_own(beta1: float) -> None:
    """EMAs of two rates in one run have the losses that each has alone; the steps are those of torch's Adam."""
    fast, slow = (Arm(f"c {rate}", "Adam", centred(0.0, rate)) for rate in (0.5, 0.1))
    both = replace(fast, spectators=(("slow", centred(0.0, 0.1)),))
    lanes = tuple(Lane(arm, 3e-3, beta1=beta1) for arm in (both, fast, slow))
    together, one, other = (line for line in run(lanes=lanes, fids=()) if line["kind"] == "run")
    assert together["beta1"] == beta1
    assert together["final"]["w1"] == one["final"]["w1"] == other["final"]["w1"]
    assert together["final"]["w2"] == one["final"]["w2"]
    assert together["final"]["slow"] == other["final"]["w2"] != one["final"]["w2"]
    assert "slow" in together["curve"][0]

    each = study_group()
    torch.manual_seed(each.seed)
    network = STUDY_MODEL.network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, betas=(beta1, 0.999))
    source = module.Batches(study_images().train, STUDY_MODEL, each.batch, seed=1000)
    average = [p.detach().clone() for p in network.parameters()]
    for _ in range(each.steps):
        optimizer.zero_grad()
        STUDY_MODEL.loss(network, *source.next()).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for mean, p in zip(average, network.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
    with torch.no_grad():
        for mean, p in zip(average, network.parameters(), strict=True):
            p.copy_(mean)
    validation = Validation.make(study_images(), STUDY_MODEL, CPU, count=TRIPLES)
    expected = validation.measure(STUDY_MODEL.loss, network)
    assert together["final"]["slow"] == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_a_model_is_compiled_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(speed.torch, "compile", lambda loss, **_: made.append(loss) or loss)
    speed.build_loss.cache_clear()
    first, again = (speed.build_loss(STUDY_MODEL, "compiled and captured") for _ in range(2))
    assert first is again
    assert len(made) == 1
    speed.build_loss(replace(STUDY_MODEL, features=8), "compiled and captured")
    assert len(made) == 2
    speed.build_loss.cache_clear()

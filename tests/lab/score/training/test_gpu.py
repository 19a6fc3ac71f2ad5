"""Tests of training that need a GPU: a captured step equals an eager one, whatever happens between steps."""

import io
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from helpers.problems import different, everything
from helpers.score_models import (
    EDM_PRESET,
    NCSN_PRESET,
    STUDY_MODEL,
    STUDY_SPRING,
    preset_images,
    squares,
    study_images,
)
from torchbelay.lab.arms import Lane
from torchbelay.lab.score import data
from torchbelay.lab.score.models.objective import Objective
from torchbelay.lab.score.studies import belay, coupled, ema
from torchbelay.lab.score.training import train
from torchbelay.lab.score.training.batches import Batches
from torchbelay.lab.score.training.folder import Folder
from torchbelay.lab.score.training.learner import LearnerGroup, deterministic
from torchbelay.lab.score.training.presets import Preset
from torchbelay.lab.score.training.request import TrainingRequest
from torchbelay.lab.score.training.speed import StepMode, build_learners
from torchbelay.lab.score.training.training_run import TrainingRun
from torchbelay.lab.score.training.validation import Validation
from torchbelay.physics.spring import Spring

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU captures")

STUDY_EMA = Spring.ema(decay=0.9)
LANES = [Lane(belay(STUDY_SPRING), 1e-3), Lane(ema(STUDY_EMA), 3e-3), Lane(coupled(-0.5, 0.1), 1e-3)]
STEPS, LOOK = 12, 7  # steps, and the one after which the weights are looked at
CUDA = torch.device("cuda")


def trained(objective: Objective, mode: StepMode) -> tuple[LearnerGroup, list[list[float]]]:
    """Learners after all steps of a ramp, validated once in between; and the losses of every step."""
    given = study_images() if objective is STUDY_MODEL else squares(objective.shape)
    learners = build_learners(objective, LANES, 0, CUDA, mode)
    torch.manual_seed(5)  # of dropout
    source = Batches(given.train.to(CUDA), objective, 4, 1)
    validation = Validation.make(given, objective, CUDA, count=8)
    losses = []
    for step in range(1, STEPS + 1):
        for learner in learners.members:
            learner.set_lr_scale(min(1.0, step / 9))
        learners.step(*source.next())
        learners.wait()
        losses.append([learner.total_loss() for learner in learners.members])
        if step == LOOK:
            for learner in learners.members:
                validation.losses(objective.loss, learner)
    return learners, losses


def values(learners: LearnerGroup) -> list[Tensor]:
    states = (state for each in learners.members for state in (each.network.state_dict(), _average(each)))
    return [value for state in states for value in state.values()]


def _average(learner: object) -> dict[str, Tensor]:
    return learner.belay.average_state_dict()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("objective", [STUDY_MODEL, EDM_PRESET.objective], ids=["NCSN", "EDM"])
def test_a_captured_step_is_an_eager_one_bit_for_bit(objective: Objective) -> None:
    if objective is not STUDY_MODEL:  # replays draw other dropout than eager steps do
        objective = replace(objective, unet=replace(objective.unet, dropout=0.0))  # type: ignore[attr-defined,type-var]
    with deterministic():
        (eager, one), (captured, other) = (trained(objective, mode) for mode in ("eager", "captured"))  # type: ignore[arg-type]
    assert one == other
    assert all(map(torch.equal, values(eager), values(captured)))


def test_those_that_go_on_when_one_is_lost_do_not_notice() -> None:
    """Each learner has its own captured graph and its own stream."""
    given, lost = study_images(), Lane(ema(STUDY_EMA), 1e30)
    with deterministic():
        alone, beside = (build_learners(STUDY_MODEL, lanes, 0, CUDA, "captured") for lanes in (LANES, [lost, *LANES]))
        for learners in (alone, beside):
            source = Batches(given.train.to(CUDA), STUDY_MODEL, 4, 1)
            for step in range(1, STEPS + 1):
                learners.step(*source.next())
                if step == LOOK:
                    learners.drop_lost()
            learners.wait()
    assert [learner.taken for learner in beside.members] == [LOOK, *[STEPS] * len(LANES)]
    assert all(map(torch.equal, values(alone), values(LearnerGroup(beside.members[1:]))))


def test_a_compiled_step_has_an_eager_ones_losses() -> None:
    """Batches differ in their losses by more than rounding does: a graph that saw an old one would be found out."""
    (_, one), (_, other) = (trained(STUDY_MODEL, mode) for mode in ("eager", "compiled and captured"))  # type: ignore[arg-type]
    spread = torch.tensor(one).std(0).min()
    assert (torch.tensor(one) - torch.tensor(other)).abs().max() < 0.2 * spread


@pytest.mark.parametrize("preset", [NCSN_PRESET, EDM_PRESET], ids=["NCSN", "EDM with dropout"])
def test_a_stopped_run_goes_on_bit_for_bit(preset: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda name, path: preset_images(preset))
    take = TrainingRun.advance

    def run(out: Path) -> int:
        return train.train(TrainingRequest(preset, out, device="cuda"), Console(file=io.StringIO()))

    assert run(tmp_path / "whole") == 0

    def advance(each: TrainingRun) -> None:
        take(each)
        if each.step == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingRun, "advance", advance)
    assert run(tmp_path / "parts") == 128 + signal.SIGTERM
    monkeypatch.setattr(TrainingRun, "advance", take)
    assert run(tmp_path / "parts") == 0
    whole, parts = (Folder(tmp_path / name).load(torch.device("cpu")) for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    held = (SimpleNamespace(state_dict=lambda state=state: state["trainee"]) for state in (whole, parts))
    assert different(*(everything(learner=each) for each in held)) == []

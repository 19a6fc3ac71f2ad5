"""What only a GPU can show of a training: a captured step is an eager one, whatever happens between steps."""

import io
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from helpers import tiny_score
from helpers.problems import different, everything
from helpers.small_score import MODEL, SPRING, images
from torchbelay.lab.arms import Lane
from torchbelay.lab.score import data
from torchbelay.lab.score.models.objective import Objective
from torchbelay.lab.score.studies import belay, coupled, ema
from torchbelay.lab.score.training import train
from torchbelay.lab.score.training.batches import Batches
from torchbelay.lab.score.training.folder import Folder
from torchbelay.lab.score.training.learner import Together, deterministic
from torchbelay.lab.score.training.speed import How, group
from torchbelay.lab.score.training.validation import Yardstick

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU captures")

LANES = [Lane(belay(SPRING), 1e-3), Lane(ema(0.9), 3e-3), Lane(coupled(-0.5, 0.1), 1e-3)]
STEPS, LOOK = 12, 7  # steps, and the one after which the weights are looked at
CUDA = torch.device("cuda")


def trained(objective: Objective, how: How) -> tuple[Together, list[list[float]]]:
    """Trainees after all steps, over a ramp, measured on the way; and the losses of every step."""
    given = images() if objective is MODEL else tiny_score.made_up(objective.shape)
    together = group(objective, LANES, 0, CUDA, how)
    torch.manual_seed(5)  # of dropout
    source = Batches(given.train.to(CUDA), objective, 4, 1)
    yardstick = Yardstick.make(given, objective, CUDA, count=8)
    losses = []
    for step in range(1, STEPS + 1):
        for trainee in together.trainees:
            trainee.set_lr_scale(min(1.0, step / 9))
        together.step(*source.next())
        together.wait()
        losses.append([trainee.total_loss() for trainee in together.trainees])
        if step == LOOK:
            for trainee in together.trainees:
                yardstick.of(objective.loss, trainee)
    return together, losses


def values(together: Together) -> list[Tensor]:
    states = (state for each in together.trainees for state in (each.network.state_dict(), _average(each)))
    return [value for state in states for value in state.values()]


def _average(trainee: object) -> dict[str, Tensor]:
    return trainee.belay.average_state_dict()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("objective", [MODEL, tiny_score.EDM_PRESET.objective], ids=["NCSN", "EDM"])
def test_a_captured_step_is_an_eager_one_bit_for_bit(objective: Objective) -> None:
    if objective is not MODEL:  # replays draw other dropout than eager steps do
        objective = replace(objective, unet=replace(objective.unet, dropout=0.0))  # type: ignore[attr-defined,type-var]
    with deterministic():
        (eager, one), (captured, other) = (trained(objective, how) for how in ("eager", "captured"))  # type: ignore[arg-type]
    assert one == other
    assert all(map(torch.equal, values(eager), values(captured)))


def test_those_that_go_on_when_one_is_lost_do_not_notice() -> None:
    """It has a captured graph and a stream of its own, which wait for nobody."""
    given, lost = images(), Lane(ema(0.9), 1e30)
    with deterministic():
        alone, beside = (group(MODEL, lanes, 0, CUDA, "captured") for lanes in (LANES, [lost, *LANES]))
        for together in (alone, beside):
            source = Batches(given.train.to(CUDA), MODEL, 4, 1)
            for step in range(1, STEPS + 1):
                together.step(*source.next())
                if step == LOOK:
                    together.leave_the_lost()
            together.wait()
    assert [trainee.taken for trainee in beside.trainees] == [LOOK, *[STEPS] * len(LANES)]
    assert all(map(torch.equal, values(alone), values(Together(beside.trainees[1:]))))


def test_a_compiled_step_has_an_eager_ones_losses() -> None:
    """Batches differ in their losses by more than rounding does: a graph that saw an old one would be found out."""
    (_, one), (_, other) = (trained(MODEL, how) for how in ("eager", "compiled and captured"))  # type: ignore[arg-type]
    spread = torch.tensor(one).std(0).min()
    assert (torch.tensor(one) - torch.tensor(other)).abs().max() < 0.2 * spread


@pytest.mark.parametrize("preset", [tiny_score.NCSN_PRESET, tiny_score.EDM_PRESET], ids=["NCSN", "EDM with dropout"])
def test_a_stopped_run_goes_on_bit_for_bit(
    preset: tiny_score.Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "load", lambda name, path: tiny_score.of(preset))
    take = train.Run.advance

    def run(out: Path) -> int:
        return train.train(train.Asked(preset, out, device="cuda"), Console(file=io.StringIO()))

    assert run(tmp_path / "whole") == 0

    def advance(each: train.Run) -> None:
        take(each)
        if each.step == 6:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train.Run, "advance", advance)
    assert run(tmp_path / "parts") == 128 + signal.SIGTERM
    monkeypatch.setattr(train.Run, "advance", take)
    assert run(tmp_path / "parts") == 0
    whole, parts = (Folder(tmp_path / name).load(torch.device("cpu")) for name in ("whole", "parts"))
    assert whole is not None
    assert parts is not None
    held = (SimpleNamespace(state_dict=lambda state=state: state["trainee"]) for state in (whole, parts))
    assert different(*(everything(trainee=each) for each in held)) == []

"""A run of the language model is an ordinary training, and its curvature is an eigenvalue."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchbelay.lab.gpt import training
from torchbelay.lab.gpt.arms import ARMS, CONSTANT, COSINE, HALF
from torchbelay.lab.gpt.corpus import Corpus, windows
from torchbelay.lab.gpt.network import Shape, decayed, loss_of, seeded
from torchbelay.lab.gpt.study import QUICK
from torchbelay.lab.gpt.training import BETA2, CLIP, PRODUCTS, Trainer

TINY = replace(
    QUICK, shape=Shape(layers=1, width=8, heads=2, context=8), batch=4, steps=12, warmup=3, windows=6, corpus=0
)


def make_corpus(size: int = 600) -> Corpus:
    source = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, 5, (3, size), generator=source, dtype=torch.uint8)
    return Corpus(*pattern, packages=3)


def test_a_run_is_the_loop_that_one_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "unigram_loss", lambda *_: 10.0)  # a run of twelve steps counts, too
    corpus, lr, seed = make_corpus(), 1e-2, 7
    found = Trainer(TINY, corpus, torch.device("cpu")).run(CONSTANT, lr, seed, "judge")
    assert found["fresh"] == found["losses"]["w2"]
    network = seeded(TINY.shape, seed)
    optimizer = torch.optim.AdamW(decayed(network), lr=lr, betas=(0.9, BETA2))
    average = [p.detach().clone() for p in network.parameters()]
    offsets = torch.Generator().manual_seed(10_000 + seed)
    for step in range(1, TINY.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / TINY.warmup)
        starts = torch.randint(len(corpus.train) - 8, (4,), generator=offsets)
        text, following = windows(corpus.train, starts, 8)
        optimizer.zero_grad()
        loss_of(network(text), following).backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        for old, new in zip(average, network.parameters(), strict=True):
            old.lerp_(new.detach(), TINY.rate)
    starts = torch.linspace(0, len(corpus.judge) - 9, TINY.windows).long()
    text, following = windows(corpus.judge, starts, 8)
    assert found["losses"]["w1"] == pytest.approx(loss_of(network(text), following).item(), rel=1e-4)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(average), network.parameters())
    assert found["losses"]["w2"] == pytest.approx(loss_of(network(text), following).item(), rel=1e-4)
    assert set(found["losses"]) == {"w1", "w2", *CONSTANT.spectators}


def test_a_run_for_tuning_has_its_loss_on_the_text_for_judging_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "unigram_loss", lambda *_: 10.0)
    corpus = make_corpus()
    trainer = Trainer(TINY, corpus, torch.device("cpu"))
    tuned, judged = (trainer.run(HALF, 1e-2, 7, split) for split in ("tune", "judge"))  # type: ignore[arg-type]
    assert tuned["fresh"] == judged["losses"]["w2"] != tuned["losses"]["w2"]


def test_runs_do_not_depend_on_those_before_them() -> None:
    corpus = make_corpus()
    fresh = Trainer(TINY, corpus, torch.device("cpu")).run(HALF, 3e-3, 1, "tune")
    used = Trainer(TINY, corpus, torch.device("cpu"))
    used.trace(COSINE, 1e-2, 2, {5, TINY.steps})
    assert used.run(HALF, 3e-3, 1, "tune") == fresh


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_every_arm_learns(arm: object) -> None:
    corpus = make_corpus()
    how = replace(TINY, steps=40)
    found = Trainer(how, corpus, torch.device("cpu")).run(arm, 1e-2, 0, "tune")  # type: ignore[arg-type]
    assert found["train"] < 3.5  # it starts at log 256 = 5.5


def test_a_run_that_knows_no_more_than_the_frequencies_is_lost() -> None:
    found = Trainer(TINY, make_corpus(), torch.device("cpu")).run(CONSTANT, 1e-7, 0, "tune")
    assert set(found["losses"].values()) == {None}


def stepped(lr: float, size: float = 1.0) -> tuple[Trainer, torch.optim.Optimizer]:
    """Return a trainer after some steps of an AdamW, from first weights that are so many times as large."""
    trainer = Trainer(replace(TINY, batch=16), make_corpus(), torch.device("cpu"))
    trainer.network.load_state_dict({name: size * p for name, p in seeded(TINY.shape, 0).state_dict().items()})
    optimizer = torch.optim.AdamW(decayed(trainer.network), lr=lr, betas=(0.9, BETA2))
    for starts in trainer._starts(0):
        trainer._load_batch(starts)
        trainer._gradient()
        optimizer.step()
    return trainer, optimizer


def largest_in_size(network: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, following: Tensor) -> float:
    """Return the eigenvalue of largest size of the scaled Hessian, by ARPACK in float64."""
    states = [optimizer.state[p] for p in network.parameters()]
    v = torch.cat([each["exp_avg_sq"].double().flatten() / (1 - BETA2 ** float(each["step"])) for each in states])
    scale = (v.sqrt() + 1e-8).rsqrt()
    exact = copy.deepcopy(network).double()
    parameters = list(exact.parameters())
    sizes = [p.numel() for p in parameters]

    def product(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        along = (scale * torch.from_numpy(vector).flatten()).split(sizes)
        parts = [part.view(p.shape) for part, p in zip(along, parameters, strict=True)]
        found = torch.autograd.grad(gradients, parameters, parts, retain_graph=True)
        return (scale * torch.cat([part.flatten() for part in found])).numpy()

    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss_of(exact(text), following), parameters, create_graph=True)
        hessian = LinearOperator((sum(sizes), sum(sizes)), matvec=product, dtype=np.float64)
        return float(eigsh(hessian, k=1, which="LM", return_eigenvectors=False)[0])


@pytest.mark.parametrize(("lr", "size", "sign"), [(1e-3, 1, 1), (1e-2, 1, 1), (1e-1, 5, -1)])
def test_sharpness_is_the_eigenvalue_of_largest_size_of_the_scaled_hessian(lr: float, size: float, sign: int) -> None:
    trainer, optimizer = stepped(lr, size)
    expected = largest_in_size(trainer.network, optimizer, trainer._text[:4], trainer._following[:4])
    assert sign * expected > 0
    assert trainer._sharpness(optimizer) == pytest.approx(expected, rel=0.01)


def test_a_run_without_a_finite_loss_has_no_sharpness() -> None:
    trainer, optimizer = stepped(1e-2)
    with torch.no_grad():
        trainer.network.positions.weight[0, 0] = torch.nan
    assert trainer._sharpness(optimizer) is None


def test_training_does_not_notice_that_its_curvature_is_measured() -> None:
    trainer = Trainer(TINY, make_corpus(), torch.device("cpu"))
    trainer.run(HALF, 1e-2, 3, "tune")
    expected = copy.deepcopy(trainer.network.state_dict())
    state = torch.get_rng_state()
    found = trainer.trace(HALF, 1e-2, 3, TINY.looks)
    assert [step for step, _ in found["curvatures"]] == [1, 4, 8, 12]
    assert all(torch.equal(p, expected[name]) for name, p in trainer.network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_curvature_after_a_step_is_that_at_the_end_of_a_run_of_so_many_steps() -> None:
    corpus, device = make_corpus(), torch.device("cpu")
    ends = [
        Trainer(replace(TINY, steps=steps), corpus, device).trace(HALF, 1e-2, 3, {steps})["curvatures"]
        for steps in (4, TINY.steps)
    ]
    assert ends[0] != ends[1]
    found = Trainer(TINY, corpus, device).trace(HALF, 1e-2, 3, {4, TINY.steps})
    assert found["curvatures"] == ends[0] + ends[1]
    assert found["products"] == PRODUCTS

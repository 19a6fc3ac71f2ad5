"""A run of the language model is an ordinary training, and its curvature is an eigenvalue."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchbelay.lab.gpt import training
from torchbelay.lab.gpt.arms import ARMS, CONSTANT, COSINE, HALF
from torchbelay.lab.gpt.corpus import Corpus, windows
from torchbelay.lab.gpt.curvature import preconditioned_sharpness
from torchbelay.lab.gpt.network import Shape, decayed, loss_of, seeded
from torchbelay.lab.gpt.study import QUICK
from torchbelay.lab.gpt.training import BETA2, CLIP, Trainer

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
    used.run(COSINE, 1e-2, 2, "tune", curvature=True)
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


def test_sharpness_is_the_largest_eigenvalue_of_the_scaled_hessian() -> None:
    shape = Shape(layers=1, width=4, heads=1, context=4)
    network = seeded(shape, 0)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(10)  # away from the flat beginning
    text, following = torch.randint(0, 256, (2, 4)), torch.randint(0, 4, (2, 4))
    for p in network.parameters():
        p.requires_grad_(p.numel() < 300)
    few = nn.Module()  # only the small parameters, so that the whole matrix is small
    few.p = nn.ParameterList([p for p in network.parameters() if p.requires_grad])  # type: ignore[assignment]
    few.forward = network.forward  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(few.parameters(), lr=0.0)
    loss_of(network(text), following).backward()
    optimizer.step()
    parameters = list(few.parameters())
    scales = torch.cat(
        [(optimizer.state[p]["exp_avg_sq"] / (1 - 0.999) + 0.0).sqrt().add(1e-8).rsqrt().flatten() for p in parameters]
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss_of(network(text), following), parameters, create_graph=True)]
        )
        rows = [
            torch.cat([h.flatten() for h in torch.autograd.grad(each, parameters, retain_graph=True)])
            for each in gradient
        ]
    values = torch.linalg.eigvalsh((torch.stack(rows) * scales[:, None] * scales).double())
    largest = float(values[values.abs().argmax()])
    found = preconditioned_sharpness(few, optimizer, text, following, 0.999, iterations=300)
    assert found == pytest.approx(largest, rel=2e-2)

"""What was measured about the methods, as sentences made from records: README and docs/which-method.md quote them."""

import importlib.util
import json
from statistics import fmean
from types import ModuleType

import torch

import torchbelay as tb
from helpers import kept_records
from helpers.root import ROOT
from torchbelay.lab.arms import EQUAL
from torchbelay.lab.records import select
from torchbelay.lab.score.analysis import StudyResults, compare_fids
from torchbelay.lab.score.comparison import format_ratio
from torchbelay.lab.score.effects import effects
from torchbelay.lab.score.penalty import losses_by_cell
from torchbelay.lab.score.warm_up import NEGATIVE, ZERO, by_warm_up
from torchbelay.lab.statistics import ratio


def load_report() -> ModuleType:
    """Return benchmarks/report.py as a module."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    return report


def _fids(part: str, arm: str, study: str, lr: float) -> list[float]:
    """Return the FID of every seed of an arm, whose average is meant."""
    return [
        line["fid"]
        for line in kept_records.lines(part)
        if line["kind"] == "fid" and (line["study"], line["arm"], line["lr"], line["weights"]) == (study, arm, lr, "w2")
    ]


def ema_beside_belay() -> str:
    """Return the FIDs of EMA and BELAY on MNIST."""
    ema, belay = (fmean(_fids("mnist", arm, "table1", 3e-4)) for arm in (EQUAL, "BELAY"))
    (decay,) = {
        f"{1 - line['rate']:g}".lstrip("0")
        for line in kept_records.lines("mnist")
        if line["kind"] == "run" and line["arm"] == EQUAL
    }
    return f"MNIST, FID at learning rate 3e-4 (lower is better): EMA of decay {decay} {ema:.1f}, BELAY {belay:.1f}."


def ema_beside_weights() -> str:
    """Return how much lower the loss of an EMA is than that of the weights of the same run."""
    found = []
    for part, study, lr in (("mnist", "table1", 3e-4), ("cifar10", "cifar10", 1e-3)):
        runs = [
            line["final"]
            for line in kept_records.lines(part)
            if line["kind"] == "run" and (line["study"], line["arm"], line["lr"]) == (study, EQUAL, lr)
        ]
        ratios = [run["w2"]["test"] / run["w1"]["test"] for run in runs]
        assert len(ratios) == 3
        assert max(ratios) < 1
        found.append(f"{fmean(ratios):.3f}")
    return f"Test loss of the average ÷ that of the weights, mean of 3 seeds: MNIST {found[0]}, CIFAR-10 {found[1]}."


def several_averages() -> str:
    """Return the time of four averages in one pass beside that of four passes."""
    result = json.loads(load_report().RESULT.read_text())["scaling"]["averages"]["4"]
    one, four = (result[name]["wall"]["median"] for name in ("4 in one pass", "4 one after the other"))
    return f"Four averages in one pass take {one / four:.2f} of the time of four passes."


def afterwards() -> str:
    """Return how well averages that are made after training agree with those that were trained along."""
    kept = kept_records.lines("posthoc")
    runs = [run for run in select(kept, "mnist network") if run["predicted"] <= 0.01]
    best = min(runs, key=lambda run: run["made"])
    (weights,) = select(kept, "mnist weights")
    return (
        f"MNIST: the best of {len(runs)} lengths, a half-life of {best['half_life']:g} steps, has a test loss of "
        f"{best['made']:.4f} made afterwards and {best['along']:.4f} trained along; the weights have "
        f"{weights['loss']:.4f}."
    )


def swa() -> str:
    """Return how exactly SWA is the mean of the weights that were visited; it is measured here and now."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.swa(), start=20)
    visited = []
    for x in torch.randn(50, 4, 3, dtype=torch.float64):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        visited.append(model.weight.detach().clone())
    error = (belay.average_state_dict()["weight"] - torch.stack(visited[20:]).mean(0)).abs().max()
    assert float(error) < 1e-14
    return "Equal to the mean of the visited weights to 1e-14, in float64."


def repelling() -> str:
    """Return what a spring that repels wins and costs, with and without the controls."""
    cold, warm = by_warm_up(kept_records.lines("warmup")).values()
    assert {run["rate"] for run in cold.runs} == {1 / 200}
    counts = {(study, arm): study.lost_count(arm, 0.012) for study in (cold, warm) for arm in (NEGATIVE, ZERO)}
    (seeds,) = {len(study.losses(arm, 0.012)) for study, arm in counts}
    p = cold.compare(NEGATIVE, ZERO, 0.012).p_loses_fewer
    warmed = warm.compare(NEGATIVE, ZERO, 0.012)
    assert warmed.below
    without = penalty_ratio(0.0, 0.0895)
    lines = kept_records.lines("cifar10")
    study = StudyResults(lines, "cifar10")
    price, fid = study.compare("θ −0.5", EQUAL, 1e-3), compare_fids(lines, study, "θ −0.5", EQUAL, 1e-3)
    assert price.above
    assert fid.above
    return (
        f"MNIST at learning rate 0.012, from a cold start: {counts[cold, NEGATIVE]} of {seeds} runs lost, EMA "
        f"{counts[cold, ZERO]} (p = {p:.1g}); with warm-up: {counts[warm, NEGATIVE]}, EMA {counts[warm, ZERO]}. Loss ÷ "
        f"EMA's: MNIST with warm-up {warmed.point:.3f}; CIFAR-10 with Adam's momentum {price.point:.3f} (FID "
        f"{fid.point:.3g}), without {without:.3f}."
    )


def penalty_ratio(beta1: float, rate: float) -> float:
    """Return the loss of θ = −0.5 over EMA's on CIFAR-10, in a cell of the study."""
    pairs = losses_by_cell(kept_records.lines("penalty"))[beta1, rate].values()
    found = ratio(*zip(*pairs, strict=True))
    assert found is not None
    return found.mean


def belay() -> str:
    """Return BELAY beside EMA in the three ways, in their order."""
    ratios = []
    for part, study in (("mnist", "table1"), ("cifar10", "cifar10")):
        (found,) = [each for each in effects(kept_records.lines(part), (study,)) if each.quantity == "FID"]
        ratios.append(", ".join(format_ratio(way[0].point or 0.0) for way in found.ways))
    return (
        f"FID ÷ EMA's at equal nominal rate, at equal effective rate, at each one's best: MNIST {ratios[0]}; "
        f"CIFAR-10 {ratios[1]}."
    )

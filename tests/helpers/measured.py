"""What was measured about the methods, as sentences made from records: README and docs/which-method.md quote them."""

import importlib.util
import json
import math
import re
import textwrap
from statistics import median
from types import ModuleType

import torch

import torchbelay as tb
from helpers import kept_records
from helpers.documents import table
from helpers.root import ROOT
from torchbelay.lab.advice.analysis import Outcome, Outcomes, count_worse, problems, spread
from torchbelay.lab.advice.figures import GOAL
from torchbelay.lab.arms import BELAY, EMA, EQUAL, MATCHED
from torchbelay.lab.claims import CLAIMS
from torchbelay.lab.claims.score import contests_on_mnist
from torchbelay.lab.claims.trained import BARS
from torchbelay.lab.claims.verdict import judge_claim
from torchbelay.lab.gpt import arms as language
from torchbelay.lab.gpt import effects as gpt_effects
from torchbelay.lab.gpt.analysis import Runs, ratio_of
from torchbelay.lab.part import MISSING
from torchbelay.lab.records import select
from torchbelay.lab.ring import effects as ring_effects
from torchbelay.lab.score.analysis import StudyResults, compare_fids
from torchbelay.lab.score.comparison import Comparison, compare, format_ratio
from torchbelay.lab.score.effects import WAYS, Effect, effects, mean_fid, span, steps_of
from torchbelay.lab.score.penalty import compare_losses, compare_with_best, losses_by_cell
from torchbelay.lab.score.warm_up import NEGATIVE, ZERO, by_warm_up
from torchbelay.lab.statistics import MARGIN

MARKED = re.compile(r"<!-- measured: (\w+) -->.*?<!-- /measured -->", re.S)


def filled(page: str) -> str:
    """Return a page with every marked measurement as the function of that name has it; a block has its own lines."""

    def fill(found: re.Match[str]) -> str:
        text = globals()[found[1]]()
        end = "\n" if "\n" in text else ""
        return f"<!-- measured: {found[1]} -->{end}{text}{end}<!-- /measured -->"

    return MARKED.sub(fill, page)


def load_report() -> ModuleType:
    """Return benchmarks/report.py as a module."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    return report


def ema_beside_weights() -> str:
    """Return how much lower the loss of an EMA is than that of the weights of the same run."""
    said = [f"{name} {found.size}{'' if found.below else ', undecided'}" for name, found, *_ in _beside_weights()]
    return f"Test loss of the average ÷ test loss of the weights: {'; '.join(said)}."


def ema_settings() -> str:
    """Return of which EMAs, how long runs and how many seeds that was measured."""
    said = [f"decay {decay:g} in {steps:,} steps on {name}" for name, _, decay, steps in _beside_weights()]
    (seeds,) = {found.seeds for _, found, *_ in _beside_weights()}
    return f"the EMAs had {' and '.join(said)}, with {seeds} seeds each"


def _beside_weights() -> list[tuple[str, Comparison, float, int]]:
    """Return the data, the loss of an EMA over that of the weights of the same run, its decay and the steps."""
    said = []
    for name, part, study, lr in (("MNIST", "mnist", "table1", 3e-4), ("CIFAR-10", "cifar10", "cifar10", 1e-3)):
        results = StudyResults(kept_records.lines(part), study)
        found = compare(results.valid_losses(EQUAL, lr, "w2"), results.valid_losses(EQUAL, lr, "w1"))
        ((rate, steps),) = {(run["rate"], run["steps"]) for run in results.runs_at(EQUAL, lr).values()}
        said.append((name, found, 1 - float(f"{rate:.3g}"), steps))
    return said


def several_averages() -> str:
    """Return the time of four averages in one pass beside that of four passes."""
    kept = json.loads(load_report().RESULT.read_text())
    result = kept["scaling"]["averages"]["4"]
    one, four = (result[name]["wall"]["median"] for name in ("4 in one pass", "4 one after the other"))
    return (
        f"Four averages in one pass take {one / four:.2f} of the time of four passes (medians on an {kept['device']})."
    )


def afterwards() -> str:
    """Return how well averages that are made after training agree with those that were trained along."""
    kept = kept_records.lines("posthoc")
    runs = [run for run in select(kept, "mnist network") if run["predicted"] <= 0.01]
    best = min(runs, key=lambda run: run["made"])
    (weights,) = select(kept, "mnist weights")
    return (
        f"MNIST, one network, the best of {len(runs)} lengths (half-life {best['half_life']:g} steps): test loss "
        f"{best['made']:.4f} made afterwards, {best['along']:.4f} trained along, {weights['loss']:.4f} of the weights."
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
    """Return how many runs a spring that repels and EMA lose at a high learning rate, cold and warmed up."""
    lr, seeds, cold, warm = _lost_by_sign(0.012)
    return (
        f"Failed runs on MNIST at learning rate {lr:g}: {cold[0]} of {seeds}, EMA {cold[1]} of {seeds}. "
        f"With learning-rate warm-up: {warm[0]} and {warm[1]}."
    )


def repelling_is_lost_too() -> str:
    """Return how many runs a spring that repels and EMA lose at the highest learning rate, cold and warmed up."""
    lr, seeds, cold, warm = _lost_by_sign(0.036)
    assert cold == [seeds, seeds]
    return (
        f"at learning rate {lr:g}, {cold[0]} of {seeds} runs fail, as with EMA. With learning-rate warm-up, "
        f"{warm[0]} of {seeds} fail, and {warm[1]} of {seeds} with EMA"
    )


def _lost_by_sign(lr: float) -> tuple[float, int, list[int], list[int]]:
    """Return a rate, the seeds there, and how many of them θ = −0.5 and EMA lose, cold and warmed up."""
    studies = [*by_warm_up(kept_records.lines("warmup")).values()]
    assert {run["rate"] for study in studies for run in study.runs} == {1 / 200}
    (seeds,) = {len(study.losses(arm, lr)) for study in studies for arm in (NEGATIVE, ZERO)}
    cold, warm = ([study.lost_count(arm, lr) for arm in (NEGATIVE, ZERO)] for study in studies)
    return lr, seeds, cold, warm


def repelling_with_a_short_average() -> str:
    """Return what a spring that repels costs with Adam's momentum, if the average is short."""
    loss, lines = _penalty(0.0895), kept_records.lines("cifar10")
    study = StudyResults(lines, "cifar10")
    fid = compare_fids(lines, study, "θ −0.5", EQUAL, 1e-3)
    assert {f"{run['rate']:.3g}" for run in study.runs_at("θ −0.5", 1e-3).values()} == {"0.0895"}
    assert not fid.unpaired
    assert loss.above
    assert fid.above
    return (
        f"its loss was {loss.size} times EMA's ({loss.seeds} seeds) and its FID {fid.size} times ({fid.seeds} others)"
    )


def repelling_with_a_long_average() -> str:
    """Return the loss of a spring that repels with Adam's momentum, if the average is as long as the page's."""
    loss, best = _penalty(1 / 200), compare_with_best(losses_by_cell(kept_records.lines("penalty")), (0.9, 1 / 200))
    assert loss.equal
    assert best is not None
    assert best.above
    return (
        f"its loss was {loss.size} times that of an EMA as long, and {best.size} times that of the short EMA "
        f"({loss.seeds} seeds, without FID)"
    )


def _penalty(rate: float) -> Comparison:
    """Return the loss of a spring that repels beside EMA's, with Adam's momentum, at an averaging rate."""
    found = compare_losses(losses_by_cell(kept_records.lines("penalty"))[0.9, rate])
    assert not found.unpaired
    return found


def schedule_free() -> str:
    """Return the loss of schedule-free averaging beside EMA's, on the language model."""
    arm = language.SCHEDULE_FREE
    return _beside_ema(arm, f"AdamW with β1 = {arm.beta1:g}")


def schedule_free_compared() -> str:
    """Return with what schedule-free averaging was compared on the language model, and how often EMA was better."""
    runs = Runs(kept_records.lines("gpt"))
    own, ema = (runs.losses(arm.name, runs.best_lr(arm.name)) for arm in (language.SCHEDULE_FREE, language.CONSTANT))
    assert own.keys() == ema.keys()
    assert all((ema[seed] or math.inf) < (own[seed] or math.inf) for seed in own)
    return (
        f"a byte-level GPT, schedule-free with β1 = {language.SCHEDULE_FREE.beta1:g} and EMA with β1 = "
        f"{language.CONSTANT.beta1:g}, both at a constant rate. EMA had the lower loss at all {len(own)} seeds"
    )


def lookahead() -> str:
    """Return the loss of Lookahead beside EMA's, on the language model."""
    return _beside_ema(language.LOOKAHEAD, f"`{language.LOOKAHEAD.method(0.0)}`")


def _beside_ema(arm: language.Arm, setting: str) -> str:
    """Return the loss of an arm of the language model over EMA's, each at its best rate."""
    runs = Runs(kept_records.lines("gpt"))
    found = ratio_of(runs, *((each.name, runs.best_lr(each.name)) for each in (arm, language.CONSTANT)))
    assert found is not None
    assert found.pairs == len(runs.whole_seeds())
    mean, low, high = map(format_ratio, (found.mean, found.low, found.high))
    return (
        f"Byte-level GPT, {found.pairs} seeds, {setting}: loss ÷ EMA's {mean} ({low} to {high}), each at its best rate."
    )


def belay() -> str:
    """Return that BELAY is nowhere shown to be better than EMA on images: in no way of comparing, under no reading."""
    found = [each for effect in image_effects() for way in effect.ways for each in way]
    found += [each.comparison for each in contests_on_mnist({name: kept_records.lines(name) for name in IMAGES})]
    assert len(found) > 24
    assert not any(each.below or each.lower for each in found)
    return "In none of our runs of images is BELAY's loss or FID shown to be lower than EMA's."


def advice_cell() -> str:
    """Return what searches by advice ended with on each kind of network, as the cell of a table."""
    found = _advices()
    regrets = (f"{name} {spread([each.regret for each in one.ends])}" for name, one in found.items())
    return f"loss of searches ÷ best of {_grid(found)} settings: {', '.join(regrets)}"


def advice_from_one_run() -> str:
    """Return what advice from one run of a network did to its loss."""
    every = [each for one in _advices().values() for each in one.all]
    lower, higher = (sum(each.ratio < 0.98 for each in every), sum(each.ratio > 1.02 for each in every))
    worse = sum(each.ratio > 1 for each in every)
    return (
        f"From one run, it lowered the loss by more than 2% in {lower} of {len(every)} cases and raised it in {worse}, "
        f"by more than 2% in {higher}: to {spread([each.ratio for each in every])} times the run's. {_within(every)} "
        f"advices are within 10% of the best of {_grid(_advices())} settings."
    )


def advice_from_several_runs() -> str:
    """Return where searches by advice ended, and after how many runs."""
    found = _advices()
    every = [each for one in found.values() for each in one.ends]
    each_of = ", ".join(f"{name} {_within(one.ends)}" for name, one in found.items())
    took = sorted(count for one in found.values() for count in one.took)
    return (
        f"Asked again with every run that followed it, it led to within 10% of the best of {_grid(found)} settings in "
        f"{_within(every)} cases ({each_of}), after {took[0]} to {took[-1]} runs more; the median is "
        f"{median(each.regret for each in every):.2f} times that best"
    )


def advice_in_short() -> str:
    """Return what advice from one run and from several did, without the numbers of each kind of network."""
    found = _advices()
    every = [each for one in found.values() for each in one.all]
    lower, higher = (sum(each.ratio < 0.98 for each in every), sum(each.ratio > 1.02 for each in every))
    ends = [each for one in found.values() for each in one.ends]
    return (
        f"from one run, its advice lowered the loss by more than 2% in {lower} of {len(every)} cases, and raised it by "
        f"more than 2% in {higher}. Asked again after every run, it ended within 10% of the best of {_grid(found)} "
        f"settings in {_within(ends)} cases"
    )


def tuned_ema() -> str:
    """Return what an EMA of one decay reaches if its learning rate alone is tuned."""
    found = _advices()
    ratios = ", ".join(f"{one.tuned:.2f} ({name})" for name, one in found.items())
    (decay,) = {one.about["decay"] for one in found.values()}
    return (
        f"An EMA of decay {decay:g} at the best of its seven learning rates has {ratios} times the loss of the grid's "
        "best"
    )


def _within(outcomes: list[Outcome]) -> str:
    return f"{sum(each.regret <= GOAL for each in outcomes)} of {len(outcomes)}"


def advice_from_curvatures() -> str:
    """Return what advice from measured curvatures was worth on MNIST."""
    found = Outcomes.of(kept_records.lines("advice"), "classifier", probed=True)
    within = sum(each.regret <= GOAL for each in found.all)
    return (
        f"its loss was {spread([each.regret for each in found.all])} times that of the best of "
        f"{_grid({'classifier': found})} settings, {within} of {len(found.all)} advices were within 10% of it, and "
        f"{count_worse(found.all)} made the run worse, {sum(each.warned and each.worse for each in found.all)} of them "
        "with a warning"
    )


def curvatures_cell() -> str:
    """Return the regret of that advice, as the cell of a table."""
    found = Outcomes.of(kept_records.lines("advice"), "classifier", probed=True)
    regrets = spread([each.regret for each in found.all])
    return f"loss ÷ that of the best of {_grid({'classifier': found})} settings: {regrets}"


def _advices() -> dict[str, Outcomes]:
    """Return the outcomes of advice from runs, by problem."""
    kept = kept_records.lines("advice")
    return {name: Outcomes.of(kept, name) for name in problems(kept)}


def _grid(found: dict[str, Outcomes]) -> int:
    """Return how many settings the grid has."""
    (size,) = {len(one.settings) // one.about["seeds"] for one in found.values()}
    return size


def belays_range() -> str:
    """Return in how many cases BELAY's range of learning rates is wider or narrower than EMA's."""
    wider, narrower, cases = _ranges("the better best loss of the two")
    assert not wider
    return (
        "The paper says that the average steadies the weights. In our runs BELAY's range of learning rates was "
        f"narrower than EMA's in {narrower} of {cases} cases, and wider in none."
    )


def belays_range_by_own_losses() -> str:
    """Return the same if a learning rate is judged by the best loss of its own method alone."""
    wider, narrower, cases = _ranges("each method's own best loss")
    return f"narrower in {narrower} of {cases} cases and wider in {wider}"


def _ranges(bar: str) -> tuple[int, int, int]:
    """Return in how many cases BELAY's range is wider than EMA's, narrower, and how many there are: C11's numbers."""
    (claim,) = [each for each in CLAIMS if each.id == "C11"]
    finding = judge_claim(claim, {name: kept_records.lines(name) for name in claim.needs}).finding
    assert {*BARS} >= {bar}
    (said,) = [text for label, text in finding.numbers if label == f"all, by {bar}: BELAY's range against EMA's"]
    wider, narrower, cases = map(int, re.findall(r"\d+", said))
    return wider, narrower, cases


IMAGES = ("mnist", "figure4", "readings", "cifar10")  # the parts in which BELAY and EMA are trained on images


def image_effects() -> list[Effect]:
    """Return BELAY's effects in every study of images that compares it with EMA over rates."""
    studies = {"mnist": ("rates", "table1"), "figure4": ("figure4",), "cifar10": ("cifar10",)}
    return [each for part, names in studies.items() for each in effects(kept_records.lines(part), names)]


def belay_in_three_ways() -> str:
    """Return BELAY's losses and FIDs beside EMA's in the three ways, as a table with the sentences that it needs."""
    names = {"table1": "MNIST", "figure4": "MNIST", "cifar10": "CIFAR-10"}
    chosen = [each for each in image_effects() if each.study in names]
    rivals = {EQUAL: "equal memory", EMA: f"decay {_decay_of_the_papers_ema():g}"}
    rows = [(f"{names[each.study]}, {each.quantity}", rivals[each.rival], each.seeds, *_cells(each)) for each in chosen]
    ring, gpt = ring_effects.effects(kept_records.lines("ring"))[0], _gpt_effect()
    rows.append((f"ring of Gaussians, {ring.quantity}", rivals[ring.rival], ring.seeds, *_cells(ring)))
    rows.append((f"byte-level GPT, {gpt.quantity}", rivals[gpt.rival], gpt.seeds, *_cells(gpt)))
    cifar10 = kept_records.lines("cifar10")
    about = mean_fid(cifar10, StudyResults(cifar10, "cifar10"))
    assert about is not None
    lengths = {each.study: steps_of(kept_records.lines(part), each.study) for part, each in _parts(chosen)}
    assert lengths["table1"] == lengths["figure4"]
    before = (
        "**Equal nominal rate**: both have the same learning rate. BELAY then makes less progress per step.",
        "**Equal effective rate**: EMA gets BELAY's slower rate. That is the matched EMA, `spring.matched_ema()`.",
        "**Each one's best**: each has the rate that suits it best.",
    )
    words = (
        "An EMA of equal memory reaches back as far as BELAY's average. The EMA of decay "
        f"{_decay_of_the_papers_ema():g} is the paper's. The ring is a small network that learns eight Gaussians. Its "
        "excess loss is what its loss has above the least possible. A seed is lost if its run fails. Two ratios in a "
        "cell are the least and the largest of several rates. Undecided: neither a difference nor equality within "
        f"{MARGIN - 1:.0%} is shown."
    )
    after = (
        f"MNIST means runs of {lengths['table1']}, CIFAR-10 runs of {lengths['cifar10']}, at a FID of about "
        f"{float(f'{about:.1g}'):g}.",
        gpt_effects.explain_largest(_gpt()),
        *_on_the_ring(),
    )
    return "\n\n".join(
        (
            _filled(
                "The table has BELAY ÷ EMA, with 95% intervals in brackets. Below 1, BELAY is better. BELAY lowers the "
                "learning rate, so there are [three ways](docs/paper.md#belay-against-ema-in-three-ways) to compare:"
            ),
            "\n".join(map(_wrapped, before)),
            _filled(words),
            table(("", "EMA", "seeds", *WAYS), rows),
            "\n".join(map(_wrapped, after)),
        )
    )


def _filled(text: str) -> str:
    """Return a text as the lines of a paragraph."""
    return textwrap.fill(text, 118, break_on_hyphens=False)


def _wrapped(text: str) -> str:
    """Return a text as an item of a list."""
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _cells(effect: Effect) -> list[str]:
    """Return the three cells of an effect: the ratio, or the least and the largest if there are several rates."""
    rivals = (effect.rival, MATCHED, effect.rival)
    return [
        MISSING if not way else span(way) if len(way) > 1 else way[0].describe(BELAY, rival)
        for way, rival in zip(effect.ways, rivals, strict=True)
    ]


def _decay_of_the_papers_ema() -> float:
    """Return the decay of Table 1's EMA, which is that of the ring's first EMA too."""
    lines = kept_records.lines("figure4"), kept_records.lines("ring")
    ((rate,), (setting, *_)) = (
        {run["rate"]: None for run in select(lines[0], "run") if run["arm"] == EMA},
        dict.fromkeys(run["setting"] for run in select(lines[1], "run") if run["arm"] == EMA),
    )
    assert setting == f"decay {1 - rate:g}"
    return 1 - float(rate)


def _gpt() -> Runs:
    return Runs(kept_records.lines("gpt"))


def _gpt_effect() -> Effect:
    found = gpt_effects.effect(_gpt())
    assert found is not None
    return found


def _on_the_ring() -> tuple[str, str]:
    """Return what the row of the ring does not show: its rates at which seeds are lost, and where BELAY is better."""
    lines = kept_records.lines("ring")
    assert ring_effects.explain_high_rate(lines)
    (about,) = select(lines, "protocol")
    found = ring_effects.effects(lines)
    ((spring, lr, better),) = [
        (each.study, lr, one) for each in found for lr, one in each.effective.items() if one.reading == "lower"
    ]
    assert spring != found[0].study
    rates = len(found[0].nominal) + len(found[0].left_out[0])
    assert rates == len(about["lrs"])
    every = [one for each in (*image_effects(), *found, _gpt_effect()) for way in each.ways for one in way]
    assert [one for one in every if one.reading == "lower"] == [better]
    return (
        f"The ring's row has the {len(found[0].nominal)} of {rates} rates at which no seed is lost. "
        f"[At {about['high_lr']:g}](docs/paper.md#belay-against-ema-in-three-ways), BELAY looks better than EMA only "
        "because its rate is lower.",
        f"BELAY is shown to be better once: on the ring with {spring}, at equal effective rate {lr:g}. Its loss is "
        f"{better.size} times that of the EMA.",
    )


def _parts(chosen: list[Effect]) -> list[tuple[str, Effect]]:
    """Return the effects with the parts that have their records."""
    return [({"table1": "mnist"}.get(each.study, each.study), each) for each in chosen]

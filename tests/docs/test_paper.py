"""docs/paper.md says what the rules find in the records that are kept beside it.

`PYTHONPATH=src:tests python tests/docs/test_paper.py` rewrites the page's generated blocks from the records.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from statistics import fmean, median

import pytest

from helpers import kept_records
from helpers.documents import table
from helpers.root import ROOT
from torchbelay.lab.arms import EQUAL, PAPER_SPRING
from torchbelay.lab.claims import judge
from torchbelay.lab.claims.errata import ERRATA
from torchbelay.lab.claims.planar import WORKS
from torchbelay.lab.claims.rates import highest_rate
from torchbelay.lab.claims.study import judge_study, study_plate
from torchbelay.lab.claims.verdict import Answer, Verdict
from torchbelay.lab.gpt import effects as gpt_effects
from torchbelay.lab.gpt import figures as language
from torchbelay.lab.gpt.analysis import CURVES, Runs, judged
from torchbelay.lab.gpt.analysis import MARGIN as LANGUAGE_MARGIN
from torchbelay.lab.gpt.arms import BELAY, CONSTANT, COSINE, HALF, LOOKAHEAD, SCHEDULE_FREE
from torchbelay.lab.gpt.study import AT_LAST
from torchbelay.lab.part import Plate, Record, Table
from torchbelay.lab.plane import fig1
from torchbelay.lab.plane.robustness import measure_limit
from torchbelay.lab.registry import PARTS
from torchbelay.lab.ring import effects as ring_effects
from torchbelay.lab.score import figure4, penalty, studies, warm_up
from torchbelay.lab.score.analysis import ARMS, FAILED, StudyResults, compare_fids, is_lost, rate_of_fids
from torchbelay.lab.score.comparison import compare
from torchbelay.lab.score.effects import (
    WAYS,
    Effect,
    describe_better,
    describe_choice,
    describe_left_out,
    effects,
    mean_fid,
    steps_of,
    with_lengths,
)
from torchbelay.lab.score.readings import readings
from torchbelay.lab.score.sign import ratios_to_zero
from torchbelay.lab.statistics import MARGIN
from torchbelay.physics.spring import Spring

PAGE = ROOT / "docs" / "paper.md"
REWRITE = "rewrite it with: PYTHONPATH=src:tests python tests/docs/test_paper.py"
LATE = [arm.name for arm in AT_LAST]  # judged away from their best rates by runs that were added
STUDIES = {
    "rates": "MNIST, short runs",
    "table1": "MNIST, long runs",
    "figure4": "MNIST, Figure 4 (EMA of decay .999), runs",
    "cifar10": "CIFAR-10, short runs",
}


@cache
def verdicts() -> tuple[Verdict, ...]:
    """Return all verdicts on the records that are kept."""
    return tuple(judge({name: kept_records.lines(name) for name in kept_records.paths()}))


# The generated blocks -------------------------------------------------------------------------------------------------


def claims_table() -> str:
    """Return the table of claims, computed from the records."""
    rows = []
    for verdict in verdicts():
        claim, finding = verdict.claim, verdict.finding
        passed = f"{len(finding.passed)} of {len(finding.tests)}" if finding.tests else "–"
        rows.append((claim.id, claim.text, f"**{finding.answer}**", passed, finding.summary))
    return table(("", "the paper says", "verdict", "tests passed", "what we found"), rows)


def passed_tests() -> str:
    """Return the tests that were passed in claims that hold in part, as a list."""
    found = [v for v in verdicts() if v.finding.answer is Answer.IN_PART]
    return "\n".join(f"- {v.claim.id}: {'; '.join(v.finding.passed)}" for v in found)


def effects_table() -> str:
    """Return BELAY's effects in the three ways, in their order, and the rates that are left out."""
    found, whole, names = [], {}, dict(STUDIES)
    for part, studies_of_part in (("mnist", ("rates", "table1")), ("figure4", ("figure4",)), ("cifar10", ("cifar10",))):
        lines = kept_records.lines(part)
        found += effects(lines, studies_of_part)
        whole |= with_lengths(lines, {study: STUDIES[study] for study in studies_of_part})
    toy = ring_effects.effects(kept_records.lines("ring"))
    names |= ring_effects.names(toy)
    whole |= {each.study: names[each.study] for each in toy}
    found += [*toy, gpt_effect()]
    names |= {gpt_effects.STUDY: (name := gpt_effects.name(protocol("gpt")))}
    whole |= {gpt_effects.STUDY: name}
    rows = [(f"{whole[each.study]}, {each.quantity}", each.seeds, *each.cells) for each in found]
    largest = gpt_effects.explain_largest(Runs(kept_records.lines("gpt")))
    notes = describe_left_out(found, names), describe_choice(found, names), largest, describe_better(found, names)
    return "\n\n".join((table(("BELAY ÷ EMA", "seeds", *WAYS), rows), *notes))


def gpt_effect() -> Effect:
    """Return BELAY's effect on the language model."""
    found = gpt_effects.effect(Runs(kept_records.lines("gpt")))
    assert found is not None
    return found


def protocol(part: str) -> Record:
    """Return the record of how a part was run."""
    (about,) = (line for line in kept_records.lines(part) if line["kind"] == "protocol")
    return about


def high_rate_table() -> str:
    """Return what happens on the ring at a rate that the first two ways leave out, and why."""
    lines = kept_records.lines("ring")
    about = protocol("ring")
    lr, seeds, bar = about["high_lr"], about["seeds"], about["failed_above"] / about["linear"]
    why = ring_effects.explain_high_rate(lines)
    assert why
    columns = (
        f"ring at {lr:g}, {seeds} seeds",
        "seeds lost by BELAY, EMA and matched EMA",
        "BELAY ÷ EMA",
        "BELAY ÷ matched EMA",
    )
    rows = [(spring, lost, *ratios) for spring, lost, *ratios in ring_effects.high_rate_rows(lines)]
    lost = f"Lost: an excess loss above {bar:.2g} of the best linear denoiser's. A pair with a lost run has no ratio."
    return f"{table(columns, rows)}\n\n{why} {lost}"


def parameters_table() -> str:
    """Return the paper's parameters with their units and the values of its experiments and ours."""
    springs = (PAPER_SPRING, studies.MNIST_BELAY, studies.CIFAR10_BELAY)
    (ours,) = {
        line["method"] for line in kept_records.lines("cifar10") if line["kind"] == "run" and line["arm"] == "BELAY"
    }
    scaled = eval(ours, {"Spring": Spring})
    assert isinstance(scaled, Spring)
    assert {s.k for s in springs} == {1.0}
    drawn = f"{fig1.SPRING.k:g} in Figure 1"
    rows = [
        ("`k`", "spring constant: scales the pull on both masses", "N/m", "N/m", *(f"{s.k:g}" for s in springs), drawn),
        ("`m1`", "mass of the weights", "g", "kg", *(f"{s.m1:g}" for s in springs), f"{scaled.m1:.4g} on CIFAR-10"),
        ("`m2`", "mass of the average", "g", "kg", *(f"{s.m2:g}" for s in springs), f"{scaled.m2:.4g} on CIFAR-10"),
        ("`c1`, `c2`", "damping", "N·s/m", "N·s/m", *["2·m"] * 3, "2·m, and critical in C16"),
        ("`g`", "force: minus the gradient, or the optimizer's direction", "N", "N", *["–"] * 3, "–"),
        ("`η`", "learning rate", "s²/m", "s²/kg", "0.001 to 0.15", "0.05", "not printed", _rates_of_images()),
        ("`Δt`", "time step", "s", "s", "1", "1", "1", "1"),
    ]
    columns = ("", "meaning", "printed unit", "right unit", "plane", "MNIST", "CIFAR-10", "ours, if different")
    return table(columns, rows)


def _rates_of_images() -> str:
    """Return the learning rates of our runs of images."""
    rates = {
        name: sorted({line["lr"] for part in parts for line in kept_records.lines(part) if line["kind"] == "run"})
        for name, parts in {"MNIST": ("mnist", "figure4", "readings"), "CIFAR-10": ("cifar10",)}.items()
    }
    ends = {name: " to ".join(f"{lr:g}" for lr in dict.fromkeys((some[0], some[-1]))) for name, some in rates.items()}
    return ", ".join(f"{text} on {name}" for name, text in ends.items())


def scaling_text() -> str:
    """Return what the constant that §3.3 prints would make of both settings."""
    (steps,) = {
        line["steps"] for line in kept_records.lines("mnist") if line.get("study") == "table1" and "steps" in line
    }
    (short,) = {line["steps"] for line in kept_records.lines("cifar10") if line["kind"] == "run"}
    mnist = Spring.for_steps(steps, m1=studies.MNIST_BELAY.m1, m2=studies.MNIST_BELAY.m2)
    masses = studies.stretch(studies.CIFAR10_BELAY, short / studies.RULE_STEPS)
    ours = studies.stretch(studies.CIFAR10_BELAY, short / studies.CIFAR10_STEPS)
    return (
        f"With k = 10⁶/T, MNIST's {steps:,} steps would have k = {mnist.k:g}, and the average would reach back over "
        f"{1 / mnist.coupling().rate:.2g} steps. CIFAR-10's {short:,} steps would have m1 = {masses.m1:g} in place of "
        f"{ours.m1:.4g}."
    )


def figure4_table() -> str:
    """Return the losses and FIDs at the end of Figure 4's runs, beside Table 1's."""
    (plate,) = (plate for plate in figure4.draw(kept_records.lines("figure4")) if plate.name == "figure4-table")
    return plate_table(plate)


def limits_text() -> str:
    """Return how near the measured limits of SGD are to the predicted ones, by each definition of a limit."""
    swept = [line for line in kept_records.lines("robustness") if line["kind"] == "theta"]
    lrs = sorted({line["lr"] for line in swept})
    step = math.log(lrs[-1] / lrs[0]) / (len(lrs) - 1)
    halves: dict[tuple[str, float], float] = {}
    highest: dict[str, list[float]] = {}
    for name, theta in dict.fromkeys((line["function"], line["theta"]) for line in swept):
        curve = [line for line in swept if (line["function"], line["theta"]) == (name, theta)]
        ends = measure_limit(curve), highest_rate(curve)
        half, most = (math.log(end / curve[0]["limit"]) / step for end in ends if end is not None)
        halves[name, theta] = half
        highest.setdefault(name, []).append(most)
    *others, (far, theta) = sorted(halves, key=lambda place: abs(halves[place]))
    assert halves[far, theta] < 0
    bowl, rosenbrock = (highest[name] for name in ("bowl", far))
    assert max(bowl + rosenbrock) < 0
    minus = f"{theta:g}".replace("-", "−")
    return (
        f"- The rate at which half of the starts are lost, as drawn, is within "
        f"{max(abs(halves[place]) for place in others):.1f} steps of the grid of the predicted one (a step is a factor "
        f"of {math.exp(step):.2f}), but for {far}'s function at θ = {minus}: there it is {-halves[far, theta]:.1f} "
        f"steps below.\n- The highest rate at which {WORKS:.0%} of the starts converge, as the claims count, is "
        f"at most {-min(bowl):.1f} steps below it on the bowl, and {-max(rosenbrock):.1f} to "
        f"{-min(rosenbrock):.1f} on {far}'s function, which is no quadratic: its curvature differs from place to place."
    )


def sign_table() -> str:
    """Return what the sign of the spring does on MNIST: the median over seeds, or how many seeds are lost."""
    runs = [line for line in kept_records.lines("sign") if line["kind"] == "run"]
    thetas, lrs = (sorted({line[key] for line in runs}) for key in ("theta", "lr"))
    names = [f"θ = {theta:+g}".replace("-", "−") if theta else "θ = 0 (EMA)" for theta in thetas]
    rows = []
    for lr in lrs:
        cells = []
        for theta in thetas:
            losses = [line["final"]["w2"]["test"] for line in runs if (line["theta"], line["lr"]) == (theta, lr)]
            lost = sum(loss is None or loss > FAILED for loss in losses)
            cells.append(f"{lost} of {len(losses)} lost" if lost else f"{median(losses):.4f}")
        rows.append((f"{lr:g}", *cells))
    return table(("learning rate", *names), rows)


def lost_seeds() -> str:
    """Return how sure it is that θ = −0.5 loses fewer seeds than θ = 0, as a sentence."""
    study = StudyResults(kept_records.lines("sign"), "sign")
    lr = study.lrs[-1]
    found = ratios_to_zero(study, lr)[-0.5]
    return (
        f"At {lr:g} the seeds of θ = −0.5 and of EMA differ in {found.only_other_lost} of {found.seeds} pairs, always "
        f"in the same direction: McNemar's exact one-sided p is {found.p_loses_fewer:.2g}. All runs started cold."
    )


def price_text() -> str:
    """Return what θ = −0.5 costs on CIFAR-10, in loss and in FID."""
    lines = kept_records.lines("cifar10")
    study = StudyResults(lines, "cifar10")
    (lr,) = study.lrs
    loss, fid = study.compare("θ −0.5", EQUAL, lr), compare_fids(lines, study, "θ −0.5", EQUAL, lr)
    assert loss.above
    assert fid.above
    assert loss.seeds == fid.seeds
    assert not loss.unpaired + fid.unpaired
    losses, fids = (
        loss.size.replace(" (", " times the loss of an EMA with the same averaging rate ("),
        fid.size.replace(" (", " times its FID ("),
    )
    return (
        f"In a run of {steps_of(lines, 'cifar10')} on CIFAR-10 ({loss.seeds} seeds), at a learning rate that every "
        f"method bears, θ = −0.5 (Generalized Primal Averaging) had {losses} and {fids}."
    )


def study_table() -> str:
    """Return the hypotheses of the study on the sign with its controls, their p, Holm's bars and answers, and notes."""
    plate = study_plate({name: kept_records.lines(name) for name in kept_records.paths()})
    assert isinstance(plate.figure, Table)
    rows = [(*row, f"**{answer}**") for *row, answer in plate.figure.rows]
    notes = "\n".join(f"- {note}" for note in plate.notes)
    return f"{table(plate.figure.columns, rows)}\n\n{notes}"


def plate_table(plate: Plate) -> str:
    """Return the table of a plate in Markdown."""
    assert isinstance(plate.figure, Table)
    return table(plate.figure.columns, [*plate.figure.rows])


def warmup_table() -> str:
    """Return the losses on MNIST, cold and warmed up."""
    return plate_table(warm_up.draw(kept_records.lines("warmup"))[0])


def penalty_table() -> str:
    """Return what θ = −0.5 costs on CIFAR-10, with and without Adam's momentum, and how to read the shares."""
    return f"{plate_table(penalty.draw(kept_records.lines('penalty'))[0])}\n\n{penalty.HOW_TO_READ}"


def language_table() -> str:
    """Return every arm of the language model at the rate that tuning chose, and where another rate is better."""
    lines = kept_records.lines("gpt")
    (plate,) = (plate for plate in language.draw(lines) if plate.name == "gpt-arms")
    return "\n\n".join((plate_table(plate), *language.lower_elsewhere(Runs(lines))))


def language_notes() -> str:
    """Return what the figure of the language model does not show."""
    notes = language.draw(kept_records.lines("gpt"))[0].notes
    told = ("At ", "The study is", "A GPT", "Python code")
    more = ("lie above", "no point, because", "was measured once per point")
    return "\n".join(f"- {note}" for note in notes if note.startswith(told) or any(words in note for words in more))


def readings_table() -> str:
    """Return what trains at the paper's rate, for the readings in which anything does."""
    rows = []
    for text, study in readings(kept_records.lines("readings")).items():
        found = study.compare("BELAY", study.ema, 0.05)
        kept = [f"{found.seeds - study.lost_count(arm, 0.05)} of {found.seeds}" for arm in (study.ema, "BELAY")]
        if kept != [f"0 of {found.seeds}"] * 2:
            rows.append((text, *kept, "–" if found.point is None else found.size))
    return table(("reading", "EMA keeps", "BELAY keeps", "BELAY ÷ EMA in test loss"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "claims": claims_table,
    "passed": passed_tests,
    "effects": effects_table,
    "high-rate": high_rate_table,
    "figure4": figure4_table,
    "parameters": parameters_table,
    "scaling": scaling_text,
    "readings": readings_table,
    "limits": limits_text,
    "sign": sign_table,
    "lost": lost_seeds,
    "price": price_text,
    "study": study_table,
    "warmup": warmup_table,
    "penalty": penalty_table,
    "language": language_table,
    "notes": language_notes,
}


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of a generated block between its two comments."""
    return re.compile(rf"(<!-- {name}:.*?-->\n)(.*?)(\n?<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_follow_from_the_kept_records(name: str) -> None:
    said, right = block(name).search(PAGE.read_text(encoding="utf-8")), BLOCKS[name]()
    assert said is not None
    assert said[2] == right, f"{REWRITE}\nright is\n{right}"


# The sentences --------------------------------------------------------------------------------------------------------


def page() -> str:
    """Return the page as one line."""
    return " ".join(PAGE.read_text(encoding="utf-8").split())


def test_what_is_said_of_the_three_ways_follows_too() -> None:
    lines = kept_records.lines("mnist")
    short, long = StudyResults(lines, "rates"), StudyResults(lines, "table1")
    assert short.ema == long.ema == EQUAL
    assert {f"{1 - run['rate']:.5f}" for run in long.runs if run["arm"] == EQUAL} == {"0.99875"}
    arms = [arm for arm in ARMS if arm in long.arms]
    assert all(long.lost_count(arm, 5e-2) == 3 for arm in arms)
    assert all(short.lost_count(arm, 5e-2) == 3 for arm in arms)
    assert all(long.lost_count(arm, 1e-3) for arm in long.arms)
    assert {short.best_rate(arm) for arm in arms} == {1e-3}
    assert not any(map(is_lost, (loss for arm in arms for loss in long.losses(arm, 3e-4).values())))
    assert {rate_of_fids(lines, long, arm) for arm in arms} == {3e-4}
    cifar10 = kept_records.lines("cifar10")
    about = mean_fid(cifar10, StudyResults(cifar10, "cifar10"))
    assert about is not None
    assert f"its FIDs are about {float(f'{about:.1g}'):g}, the paper's about 2." in page()


def test_what_is_said_of_the_language_models_added_runs_follows_too() -> None:
    """No answer uses them: without them all hypotheses have the same numbers."""
    lines, best = kept_records.lines("gpt"), Runs(kept_records.lines("gpt")).best_lr(BELAY.name)
    assert f"BELAY's runs at other rates than {best:g} were [planned]" in page()
    assert f"neither a difference nor equality within {MARGIN - 1:.0%} is shown" in page()
    tuned = {
        arm: {Runs(lines).best_lr(arm, w) for w in ("w1", "w2") if w == "w2" or arm == COSINE.name} for arm in LATE
    }
    added = [r for r in lines if r.get("split") == "judge" and r["arm"] in LATE and r["lr"] not in tuned[r["arm"]]]
    before = [r for r in lines if r not in added]
    assert len(added) == 100
    assert judged(Runs(before)) == judged(Runs(lines)) != []


def test_what_is_said_of_the_ring_follows_too() -> None:
    assert f"a score model of eight Gaussians with {protocol('ring')['weights']:,} weights" in page()
    spring, springs = studies.MNIST_BELAY, [each.study for each in ring_effects.effects(kept_records.lines("ring"))]
    assert springs[0] == f"k {spring.k:g}, m1 {spring.m1:g}, m2 {spring.m2:g}"
    emas = {
        run["setting"]
        for study in ring_effects.studies(kept_records.lines("ring"))
        for run in study.runs_at("EMA", 0.01).values()
    }
    assert "decay 0.999" in emas
    assert "decay .999 beside the paper's masses" in page()
    (robust,) = (v.finding for v in verdicts() if v.claim.id == "C11")
    assert [name for name in robust.passed if "on the ring" in name] == [*robust.passed]
    assert "C11's one passed test was open" in page()
    assert len(robust.passed) == 1
    assert "losses on the ring at 0.022 and above are others there" in page()
    assert 0.022 in protocol("ring")["lrs"]


def test_it_says_how_long_runs_of_images_are() -> None:
    cifar10, short = (
        steps_of(kept_records.lines(part), study) for part, study in (("cifar10",) * 2, ("mnist", "rates"))
    )
    assert f"CIFAR-10 has runs of {cifar10} of a small network" in page()
    assert f"C10 (holds), in runs of {cifar10} |" in page()
    assert f"from Figure 4's runs and from runs of {short} at 1e-3 |" in page()


def test_what_is_said_of_the_papers_ema_follows_too() -> None:
    own = {
        name: [line for line in kept_records.lines(name) if line["kind"] == "run" and line["arm"] == "EMA"]
        for name in ("mnist", "figure4", "readings")
    }
    assert {name: {line["lr"] for line in lines} for name, lines in own.items()} == {
        "mnist": set(),
        "figure4": {3e-4},
        "readings": {0.05},
    }
    assert {round(1 - line["rate"], 6) for lines in own.values() for line in lines} == {0.999}
    assert Spring.ema(decay=0.999) == studies.MNIST_EMA
    assert studies.MNIST_EMA.decay == pytest.approx(Spring(k=1.0, m1=float("inf"), m2=500.0).decay)
    assert "It was run at the paper's learning rate by the part `readings`, and at 3e-4 by the part `figure4`" in page()
    sampled = {line["seed"] for line in kept_records.lines("figure4") if line["kind"] == "fid"}
    words = {1: "one", 2: "two", 3: "three"}
    losses, fids = (words[len(seeds)] for seeds in ({line["seed"] for line in own["figure4"]}, sampled))
    said = f"{losses} seeds" if losses == fids else f"losses of {losses} seeds, FIDs of {fids} so far"
    assert f"drawn, {said}: [the table above]" in page()


def test_what_is_said_of_the_readings_follows_too() -> None:
    found = readings(kept_records.lines("readings"))
    assert len(found) == 12
    cold = [study for text, study in found.items() if text.startswith("cold start")]
    assert all(study.lost_count(arm, 0.05) == 5 for study in cold for arm in ("EMA", "BELAY"))
    large = found["500 steps of warm-up, Adam's eps 0.01, 64 features"]
    assert (large.lost_count("EMA", 0.05), large.lost_count("BELAY", 0.05)) == (2, 5)
    small = found["500 steps of warm-up, Adam's eps 0.01, 32 features"]
    assert (small.lost_count("EMA", 0.05), small.lost_count("BELAY", 0.05)) == (0, 0)
    assert "with a cold start nothing trains, whatever eps" in page()
    assert "EMA keeps 3 of 5 of the larger networks, and BELAY none" in page()


def test_the_numbers_in_its_words_are_those_of_the_plans_and_records() -> None:
    drawn = {line["samples"] for line in kept_records.lines("figure4") if line["kind"] == "fid"}
    assert f"loss and FID ({drawn.pop():,} images) over iterations" in page()
    warm = max(line["warm_up"] for line in kept_records.lines("readings") if line["kind"] == "run")
    assert warm == max(studies.WARM_UPS)
    assert f"With {warm} steps of warm-up and a large eps some networks train" in page()
    assert (
        f"At the paper's learning rate of {studies.PAPER_RATE * 100:g}e-2, with a cold start nothing trains" in page()
    )
    lines = kept_records.lines("mnist")
    short, long = StudyResults(lines, "rates"), StudyResults(lines, "table1")
    assert min(long.lost_count(arm, 1e-3) for arm in long.arms) == 1
    words = {2: "two", 3: "three"}
    said = f"every method loses at least one seed of {words[len(long.seeds)]} in the long runs"
    assert f"At 1e-3, the best rate in the short runs, which have a smaller network, {said}" in page()
    assert max(run["parameters"] for run in short.runs) < min(run["parameters"] for run in long.runs)
    assert not any(long.lost_count(arm, 3e-4) for arm in long.arms)
    assert "At 3e-4 no run is lost." in page()
    (equal,) = {1 - run["rate"] for run in long.runs if run["arm"] == EQUAL}
    assert f"decay {equal:.5f} on MNIST, BELAY's own averaging rate".replace("0.", ".") in page()
    rates = {rate for _, rate in penalty.losses_by_cell(kept_records.lines("penalty"))}
    assert f"Beside an EMA with c = {min(rates):g} too, it is gone" in page()
    assert f"θ = −0.5 is not worse than EMA by {LANGUAGE_MARGIN - 1:.0%}," in page()
    assert f"**At {studies.LOSING_RATE:g} warm-up does most" in page()
    assert "It saves all of EMA's seeds but one." in page()
    assert f"At {studies.CONTROLLED_RATES[-1]:g} both lose all from a cold start" in page()


def test_what_is_said_of_the_controls_follows_too() -> None:
    found = judge_study({name: kept_records.lines(name) for name in kept_records.paths()})
    answers = {h.id: str(h.answer) for h in found}
    assert answers == {
        "H1": "undecided",
        "H2 θ = −0.25": "undecided",
        "H2 θ = −0.5": "undecided",
        "H3": "holds",
        "H4 β1": "holds",
        "H4 c": "holds",
        "H5": "holds",
    }, "rewrite what the page says of the study"
    cold, warm = warm_up.by_warm_up(kept_records.lines("warmup")).values()
    assert cold.lost_count(warm_up.ZERO, 0.012) > warm.lost_count(warm_up.ZERO, 0.012) == 1
    assert cold.lost_count(warm_up.NEGATIVE, 0.036) == len(cold.losses(warm_up.NEGATIVE, 0.036))
    assert not any(each.lost_count(warm_up.NEGATIVE, 0.012) for each in (cold, warm))
    assert cold.lost_count(warm_up.ZERO, 0.036) == len(cold.losses(warm_up.ZERO, 0.036)) == 4
    late = [warm.lost_count(sign, 0.036) for sign in (warm_up.ZERO, warm_up.NEGATIVE)]
    assert f"warmed up, EMA loses {late[0]} of 4 and θ = −0.5 {late[1]} of 4" in page()
    assert all(warm.compare(warm_up.NEGATIVE, warm_up.ZERO, lr).below for lr in (0.004, 0.012))
    cells = penalty.losses_by_cell(kept_records.lines("penalty"))
    beside = [penalty.compare_with_best(cells, cell) for cell in cells]
    assert all(each is not None and each.above for each in beside)
    assert "beside that one, θ = −0.5 has the higher loss in every row" in page()
    lower = {
        cell: all(one < other for one, other in losses.values() if one and other) for cell, losses in cells.items()
    }
    assert [cell for cell, is_lower in lower.items() if is_lower] == [(0.0, 0.0895), (0.0, 0.005)]
    runs = Runs(kept_records.lines("gpt"))
    ends = {arm.name: [*runs.losses(arm.name, runs.lrs[-1]).values()] for arm in CURVES}
    middle = {name: median(loss or math.inf for loss in losses) for name, losses in ends.items()}
    best = {
        name: min(median(loss or math.inf for loss in runs.losses(name, lr).values()) for lr in runs.lrs)
        for name in middle
    }
    assert middle[CONSTANT.name] > 2 * best[CONSTANT.name]
    assert middle[HALF.name] < 1.05 * best[HALF.name]
    assert "EMA's loss is more than twice its best, and that of θ = −0.5 is within 5% of its own" in page()
    steady = [runs.losses(arm, runs.best_lr(arm)) for arm in (*(each.name for each in CURVES), BELAY.name)]
    for weights in ("w1", "w2"):
        cosine = runs.losses(COSINE.name, runs.best_lr(COSINE.name, weights), weights)
        assert all(compare(losses, cosine).below for losses in steady)
    last = {arm: fmean(loss or math.inf for loss in runs.losses(arm, runs.best_lr(arm)).values()) for arm in runs.arms}
    assert {*sorted(last, key=lambda arm: last[arm])[-2:]} == {SCHEDULE_FREE.name, LOOKAHEAD.name}
    assert SCHEDULE_FREE.beta1 == 0.0
    assert f"in these {protocol('gpt')['steps']:,} steps. Schedule-free and Lookahead came last." in page()
    means = {
        (cell, i): fmean(pair[i] or math.inf for pair in losses.values())
        for cell, losses in cells.items()
        for i in (0, 1)
    }
    assert min(means, key=lambda place: means[place]) == ((0.9, 0.0895), 1)  # EMA's


# Item by item ---------------------------------------------------------------------------------------------------------


def items() -> list[list[str]]:
    """Return the rows of the tables that go through the paper, as cells."""
    section = PAGE.read_text(encoding="utf-8").split("## The paper, item by item")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if "verdict" not in row[-1] and "state" not in row[-1]]


def test_every_item_of_the_paper_has_its_code_and_its_test() -> None:
    assert len(items()) > 35
    for name, code, test, state in items():
        assert "](../src/torchbelay/" in code, name
        assert "](../tests/" in test, name
        assert state, name
        for named in re.findall(r"\(`(test_\w+)`\)", test):
            files = [ROOT / "docs" / path for path in re.findall(r"\((\.\./tests/\S+\.py)\)", test)]
            assert any(f"def {named}(" in file.read_text(encoding="utf-8") for file in files), named


def test_every_verdict_that_an_item_names_is_that_of_the_records() -> None:
    answers = {v.claim.id: str(v.finding.answer) for v in verdicts()}
    named = [found for *_, state in items() for found in re.findall(r"(C\d+) \(([a-z ]+)\)", state)]
    assert named
    assert [(claim, said) for claim, said in named if answers[claim] != said] == []
    sentences = [*re.findall(r"\| (C\d+) \(", PAGE.read_text(encoding="utf-8").split("### Sentences")[1])]
    assert sorted(sentences, key=lambda claim: int(claim[1:])) == list(answers)


def test_every_erratum_belongs_to_an_item() -> None:
    text = " ".join(cell for row in items() for cell in row)
    assert [erratum.id for erratum in ERRATA if not re.search(rf"\b{erratum.id}\b", text)] == []


def test_every_part_has_its_records_kept_and_they_are_those_of_a_full_run() -> None:
    heads = {name: kept_records.head(name) for name in kept_records.paths()}
    assert set(heads) == set(PARTS)
    assert all(head["quick"] is False and head["seed"] == 0 for head in heads.values())


def rewrite() -> None:
    """Renew the generated blocks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in BLOCKS.items():
        right = made()
        text, renewed = block(name).subn(
            lambda found, right=right: f"{found[1]}{right}\n{found[3].lstrip()}",  # type: ignore[misc]
            text,
        )
        assert renewed == 1, f"{PAGE} must have one block {name!r}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()

"""`torchbelay explain`, through `main(argv)`: output, errors and exit status."""

import math
import re
import warnings

import pytest
import torch

import torchbelay as tb
from torchbelay.physics import methods, theta_floor
from torchbelay.physics.spring import Spring

BELAY = "--k 1 --m1 10 --m2 20"


# The paragraph and the table -----------------------------------------------------------------------------------------


def test_the_papers_setting_in_two_dimensions(run) -> None:
    printed = run(f"explain {BELAY} --curvature 202")
    assert (printed.status, printed.err) == (0, "")
    assert printed.table == {
        "regime": "velocity-free",
        "α, β": "0.95, 0.975",
        "κ1 + κ2": "0.075",
        "decay per step": "0.925",
        "half-life": "8.89089 steps",
        "θ = m2/m1": "2",
        "effective learning rate": "0.3167 of the optimizer's",
        "matched EMA": "decay 0.925 at 0.3167 of the learning rate",
        "stable at curvature 202": "lr < 0.01016",
        "plain SGD, or EMA": "lr < 0.009901",
    }


@pytest.mark.parametrize(("lr", "verdict"), [("0.01", "below it"), ("0.0102", "not below it: SGD diverges")])
def test_a_learning_rate_is_judged_and_scaled(run, lr: str, verdict: str) -> None:
    table = run(f"explain {BELAY} --curvature 202 --lr {lr}").table
    scaled = f"{float(lr) * 0.95 / 3:.4g} at lr {lr}"
    assert table["stable at curvature 202"] == f"lr < 0.01016; lr {lr} is {verdict}"
    assert table["effective learning rate"] == f"0.3167 of the optimizer's, {scaled}"
    assert table["matched EMA"] == f"decay 0.925 at 0.3167 of the learning rate, {scaled}"


@pytest.mark.parametrize("arguments", ["--decay 0.999", "--half-life 692.80072"])
def test_an_ema_is_given_by_its_decay_or_its_half_life(run, arguments: str) -> None:
    printed = run(f"explain {arguments}")
    assert printed.out.startswith("An ordinary average (EMA with decay 0.999)")
    assert " ".join(printed.out.split("\n\n")[0].split()).endswith(" For a longer memory raise the decay.")
    assert printed.table["half-life"] == "692.801 steps"
    assert printed.table["effective learning rate"] == "1 of the optimizer's"


@pytest.mark.parametrize("arguments", ["--decay 0.999", "--half-life 700", "--decay 0", "--decay 1"])
def test_an_ema_has_no_rows_about_springs_and_no_ema_to_match(run, arguments: str) -> None:
    printed = run(f"explain {arguments} --steps 1000")
    assert "left after 1,000 steps" in printed.table
    assert not [label for label in printed.table if label.startswith("k ")]
    assert not printed.table.keys() & {"matched EMA", "regime", "α, β", "κ1 + κ2", "θ = m2/m1"}
    assert not run(f"explain {arguments} --steps 1000 --json").json.keys() & {"tuned_for", "k_for_steps"}


@pytest.mark.parametrize(
    ("decay", "first", "half_life", "left"),
    [
        ("0", "A copy of the weights (EMA with decay 0)", "0 steps", "0 of the start"),
        ("1", "An average that stands still (EMA with decay 1)", "inf steps", "1 of the start"),
    ],
)
def test_the_ends_of_ema_are_explained_too(run, decay, first, half_life, left) -> None:
    printed = run(f"explain --decay {decay} --steps 100 --curvature 4 --lr 0.1")
    assert (printed.status, printed.err) == (0, "")
    assert " ".join(printed.out.split()).startswith(first)
    table = printed.table
    assert (table["half-life"], table["decay per step"]) == (half_life, decay)
    assert table["left after 100 steps"] == left
    assert table["effective learning rate"] == "1 of the optimizer's, 0.1 at lr 0.1"
    assert table["stable at curvature 4"] == "lr < 0.5; lr 0.1 is below it"
    assert run(f"explain --decay {decay} --json").status == 0


def test_decays_near_1_keep_their_digits(run) -> None:
    assert run("explain --decay 0.99999999").table["decay per step"] == "0.99999999"


def test_a_run_of_T_steps_says_what_is_left_and_what_k_to_take(run) -> None:
    table = run("explain --k 1 --m1 2000 --m2 500 --steps 1e4 --tuned-for 1e6").table
    tuned = ", as k = 1 was tuned for 1,000,000 steps"
    exact = 1 - 0.99875**100
    assert table["left after 10,000 steps"] == f"{0.99875**10_000:.4g} of the start"
    assert table["k by the printed rule"] == f"100, decay 0.875{tuned}"
    assert table["k by the exact rule"] == f"{exact * 2 / (1 / 2000 + 1 / 500):.6g}, decay {1 - exact:.6g}{tuned}"


def test_the_rule_for_k_is_applied_only_from_the_length_that_is_given(run) -> None:
    assert "k by the" not in run("explain --k 1 --m1 2000 --m2 500 --steps 1e4").out
    table = run("explain --k 1 --m1 2000 --m2 500 --steps 1e4 --tuned-for 2e4").table
    assert table["k by the printed rule"] == "2, decay 0.9975, as k = 1 was tuned for 20,000 steps"
    assert "the run that k was chosen for" in " ".join(run("explain --help").out.split())


def test_if_the_printed_rule_makes_no_average_it_is_refused_and_the_exact_one_is_not(run) -> None:
    table = run("explain --k 1 --m1 2000 --m2 500 --steps 500 --tuned-for 1e6").table
    assert re.match(
        r"refused: T=500 makes .* is no average; use rule='exact', or T > 1000,", table["k by the printed rule"]
    )
    assert table["k by the exact rule"].startswith("734.435, decay 0.0819567")


def test_with_velocities_the_k_of_T_rule_is_refused_and_the_share_left_is_approximate(run) -> None:
    table = run(f"explain {BELAY} --c1 5 --c2 10 --steps 30 --tuned-for 60 --curvature 1").table
    assert table["regime"] == "underdamped"
    assert table["left after 30 steps"] == "about 0.0002483 of the start"
    assert table["stable at curvature 1"] == "lr < 0.4709"
    for rule in ("printed", "exact"):
        assert table[f"k by the {rule} rule"].startswith("refused: the rule is about velocity-free springs")


def test_a_spring_that_no_ema_matches_says_none(run) -> None:
    assert run("explain --k 1 --m1 10 --m2 inf").table["matched EMA"] == "none"


@pytest.mark.parametrize("columns", [40, 61, 200])
def test_everything_fits_the_terminal_and_no_word_is_lost(run, monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(f"explain {BELAY} --steps 100 --tuned-for 200").out
    assert max(map(len, out.splitlines())) <= columns
    assert " ".join(out.split("\n\n")[0].split()) == Spring(k=1, m1=10, m2=20).explain()


# The centre-of-mass family, and the optimizer's momentum -------------------------------------------------------------


@pytest.mark.parametrize("theta", ["-1e-1", "-.1", "-0.1"])
def test_a_number_below_0_may_be_written_in_any_way(run, theta: str) -> None:
    printed = run(f"explain --theta {theta} --rate 0.01 --json")
    assert (printed.status, printed.err) == (0, "")
    assert printed.out == run(f"explain --theta={theta} --rate 0.01 --json").out


def test_a_spring_that_repels_is_given_by_theta_and_rate(run) -> None:
    printed = run("explain --theta -0.5 --rate 0.1 --curvature 4 --lr 0.1 --steps 10")
    assert (printed.status, printed.err) == (0, "")
    assert printed.out.startswith("A spring that repels (Generalized Primal Averaging, of which")
    assert "schedule-free is the case c = 1/t): gradients are taken between" in " ".join(printed.out.split())
    limit = methods.centred(-0.5, 0.1).coupling(1, 0.1).max_stable_lr(4.0)
    assert printed.table == {
        "regime": "velocity-free",
        "decay per step": "0.9",
        "half-life": "6.57881 steps",
        "θ": "-0.5",
        "effective learning rate": "1 of the optimizer's, 0.1 at lr 0.1",
        "matched EMA": "decay 0.9 at 1 of the learning rate, 0.1 at lr 0.1",
        "stable at curvature 4": f"lr < {limit:.4g}; lr 0.1 is below it",
        "plain SGD, or EMA": "lr < 0.5",
        "left after 10 steps": f"{0.9**10:.4g} of the start",
    }
    got = run("explain --theta -0.5 --rate 0.1 --json").json
    assert got["centred"] == {"theta": -0.5, "rate": 0.1}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--theta -0.9 --rate 0.05", "below it: two momenta feed each other, and the stable range collapses"),
        ("--theta -0.5 --rate 0.0895", "above it, but within a quarter of it: the pair is poorly damped"),
        ("--theta -0.2 --rate 0.05", "keeps clear of it"),
        ("--k 1 --m1 10 --m2 20", "stable below ηh = 12.35 in the effective rate, against 38 with an EMA"),
        ("--decay 0.95", "stable below ηh = 38, as without an average"),
        ("--decay 0.95", "below it, a spring that repels and this momentum feed each other. This one does not repel"),
        ("--decay 1", "stable below ηh = 38, as without an average"),
        (
            "--k 1 --m1 10 --m2 20 --c1 5 --c2 10",
            "stable below ηh = 0.6675 in the effective rate, against 38 with an EMA",
        ),
        ("--k 1 --m1 10 --m2 inf", "β1 = 0.9 it is stable below ηh = 39, against 38 with an EMA."),  # a tether
    ],
)
def test_what_momentum_changes_is_said_in_words(run, setting: str, words: str) -> None:
    printed = run(f"explain {setting} --beta1 0.9 --curvature 5")
    assert (printed.status, printed.err) == (0, "")
    assert words in " ".join(printed.out.split("\n\n")[0].split())
    assert "β1" not in run(f"explain {setting} --curvature 5").out


def test_a_learning_rate_is_judged_with_the_momentum_that_is_given(run) -> None:
    """Without momentum 1 is stable by far; with β1 = 0.9 the limit is 0.25."""
    setting = "explain --theta -0.9 --rate 0.05 --curvature 1 --lr 1"
    assert run(setting).table["stable at curvature 1"] == "lr < 16.25; lr 1 is below it"
    printed = run(f"{setting} --beta1 0.9").table
    assert printed["stable at curvature 1"] == "lr < 16.25"
    assert printed["at curvature 1"] == "lr < 0.2502; lr 1 is not below it: SGD diverges"
    got = run(f"{setting} --beta1 0.9 --json").json
    assert (got["lr_is_stable"], got["lr_is_stable_with_beta1"]) == (True, False)


def test_a_tether_has_no_floor_and_an_unstable_spring_no_learning_rate(run) -> None:
    assert "floor" not in run("explain --k 1 --m1 10 --m2 inf --beta1 0.9").out
    printed = run("explain --k 1 --m1 10 --m2 20 --c1 0 --c2 0 --beta1 0.9").out
    assert "with momentum β1 = 0.9 no learning rate is stable with it." in " ".join(printed.split())


def test_the_numbers_of_cifar10s_setting(run) -> None:
    printed = run("explain --theta -0.5 --rate 0.0895 --beta1 0.9 --curvature 10")
    paragraph = " ".join(printed.out.split("\n\n")[0].split())
    assert "errors shrink by 0.016 of themselves per step (EMA of the same rate: 0.051)" in paragraph
    assert "4.3 times the variance of that EMA" in paragraph
    assert printed.table["stable with β1 = 0.9"] == "lr·curvature < 72.6"
    assert printed.table["at curvature 10"] == "lr < 7.26"
    assert printed.table["floor of θ"] == "-0.5539"
    got = run("explain --theta -0.5 --rate 0.0895 --beta1 0.9 --curvature 10 --json").json
    coupling = methods.centred(-0.5, 0.0895).coupling(1, 0.1)
    assert got["stable_range_with_beta1"] == coupling.max_stable_lr(1.0, momentum=0.9)
    assert got["max_stable_lr_with_beta1"] == pytest.approx(coupling.max_stable_lr(10.0, momentum=0.9))
    assert (got["theta_floor"], got["beta1"]) == (theta_floor(0.9, 0.0895), 0.9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--theta -0.5", "--rate missing; give --theta and --rate"),
        ("--rate 0.5", "--theta missing; give --theta and --rate"),
        ("--theta -0.5 --rate 0.1 --half-life 3", "leave out --half-life"),
        ("--theta -1 --rate 0.1", "theta=-1.0 is out of range"),
        ("--theta 0 --rate 1", "rate=1.0 is out of range"),
        ("--decay 0.9 --beta1 1", "beta1=1.0 is out of range"),
    ],
)
def test_wrong_settings_of_the_family_are_one_line(run, arguments: str, message: str) -> None:
    printed = run(f"explain {arguments}")
    assert (printed.status, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


# --json --------------------------------------------------------------------------------------------------------------

SPRINGS = {
    "--k 1 --m1 2000 --m2 500": Spring(k=1, m1=2000, m2=500),
    "--k 1 --m1 inf --m2 30": Spring(k=1, m1=math.inf, m2=30),
    "--k 1 --m1 10 --m2 inf": Spring(k=1, m1=10, m2=math.inf),
    "--k .3 --m1 7 --m2 3 --dt 1.5 --follow after": Spring(k=0.3, m1=7, m2=3, dt=1.5, follow="after"),
    "--k 1 --m1 10 --m2 20 --c1 5 --c2 10 --force printed": Spring(k=1, m1=10, m2=20, c1=5, c2=10, force="printed"),
    "--decay 0.3": Spring.ema(0.3),
    "--half-life 17": Spring.ema(half_life=17),
}


@pytest.mark.parametrize("arguments", SPRINGS)
def test_json_has_every_digit_of_the_spring(run, arguments: str) -> None:
    spring = SPRINGS[arguments]
    got = run(f"explain {arguments} --json --lr 0.1 --curvature 3").json
    made = {name: math.inf if value == "inf" else value for name, value in got["spring"].items()}
    assert Spring(**made) == spring
    names = ["alpha", "beta", "kappa1", "kappa2", "decay", "half_life", "theta", "effective_lr_scale"]
    assert [float(got[name]) for name in names] == [getattr(spring, name) for name in names]
    assert (got["regime"], got["explanation"]) == (spring.regime, spring.explain())
    assert (got["lr"], got["effective_lr"]) == (0.1, 0.1 * spring.effective_lr_scale)
    assert (got["curvature"], got["max_stable_lr"]) == (3.0, spring.max_stable_lr(3))
    assert got["max_stable_lr_of_sgd"] == 2 / 3
    assert got["lr_is_stable"] is (spring.max_stable_lr(3) > 0.1)
    if spring.m2 == math.inf:
        assert got["matched_ema"] is None
    else:
        assert got["matched_ema"] == {"decay": spring.matched_ema().decay, "lr_scale": spring.effective_lr_scale}


def test_json_leaves_out_facts_whose_argument_was_not_given(run) -> None:
    asked = {"lr", "effective_lr", "curvature", "max_stable_lr", "max_stable_lr_of_sgd", "lr_is_stable", "steps"}
    assert not run(f"explain {BELAY} --json").json.keys() & (asked | {"left_after_steps", "tuned_for", "k_for_steps"})


def test_json_writes_infinity_as_text(run) -> None:
    got = run("explain --k 1 --m1 10 --m2 inf --json").json
    assert (got["theta"], got["spring"]["m2"]) == ("inf", "inf")


@pytest.mark.parametrize("count", [500, 20_000])
def test_json_has_both_rules(run, count: int) -> None:
    got = run(f"explain --k 1 --m1 2000 --m2 500 --steps {count} --tuned-for 1e6 --json").json
    spring = Spring.for_steps(count, m1=2000, m2=500, rule="exact")
    assert got["tuned_for"] == 1_000_000
    assert (got["steps"], got["left_after_steps"]) == (count, Spring(k=1, m1=2000, m2=500).decay ** count)
    assert got["k_for_steps"]["exact"] == {"k": spring.k, "decay": spring.decay, "refused": None}
    printed = got["k_for_steps"]["printed"]
    if count == 500:
        assert (printed["k"], printed["decay"]) == (None, None)
        assert "no average" in printed["refused"]
    else:
        assert printed == {"k": 50.0, "decay": 1 - 50 / 4000 - 50 / 1000, "refused": None}


def test_the_rule_for_k_knows_dt(run) -> None:
    slow, unit = (
        run(f"explain {arguments} --steps 100000 --tuned-for 1e6 --json").json["k_for_steps"]
        for arguments in ("--k .01 --dt 2 --m1 8 --m2 4", "--k .01 --m1 2 --m2 1")  # k·dt²/m is the same
    )
    assert slow == unit
    assert unit["exact"]["k"] < unit["printed"]["k"] == pytest.approx(0.1, rel=1e-15)


# Errors ---------------------------------------------------------------------------------------------------------------

WRONG = {
    "": "--k, --m1, --m2 missing; give --k, --m1 and --m2, or --decay, or --half-life, or --theta and --rate",
    "--m2 500": "--k, --m1 missing; give",
    "--k 1 --m1 10": "--m2 missing; give --k, --m1 and --m2, or --decay, or --half-life",
    "--decay 0.9 --k 1": "whole setting by itself; leave out --k",
    "--decay 0.9 --m2 1 --follow before": "leave out --m2, --follow",
    "--half-life 9 --dt 1": "leave out --dt",
    "--decay 0.9 --half-life 9": "give exactly one of decay, half_life; got decay=0.9, half_life=9.0",
    "--decay 99.9": "decay=99.9 is out of range; it needs decay ≥ 0 and decay ≤ 1",
    "--decay 1.5": "decay=1.5 is out of range; it needs decay ≥ 0 and decay ≤ 1",
    "--decay nan": "decay=nan is out of range",
    "--half-life 0": "half_life=0.0 is out of range",
    "--half-life inf": "half_life=inf is out of range",
    "--k nan --m1 1 --m2 1": "k=nan is out of range",
    "--k inf --m1 1 --m2 1": "k=inf is out of range",
    "--k 0 --m1 1 --m2 1": "k=0.0 is out of range",
    "--k 1 --m1 nan --m2 1": "m1=nan is out of range; it needs m1 > 0, or inf",
    "--k 1 --m1 2 --m2 -5": "m2=-5.0 is out of range; it needs m2 > 0, or inf",
    "--k 1 --m1 2 --m2 2 --dt nan": "dt=nan is out of range",
    "--k 1 --m1 2 --m2 2 --c1 nan": "c1=nan is out of range",
    "--k 1 --m1 inf --m2 2 --c1 3": "c1=3.0 with m1=inf",
    "--k 1 --m1 2 --m2 2 --c1 3 --follow after": "follow='after' with damping",
    "--k 3 --m1 9 --m2 1": "κ2 = k·dt²/(2·m2) = 1.5",
    "--k 1 --m1 9 --m2 9 --dt 1e-200 --steps 9 --tuned-for 99": "too large or too small",
    "--k one --m1 1 --m2 1": "argument --k: invalid number value: 'one'",
    "--k --m1 1 --m2 1": "argument --k: expected one argument",
    f"{BELAY} --follow behind": "argument --follow: invalid choice: 'behind'",
    f"{BELAY} --force none": "argument --force: invalid choice: 'none'",
    f"{BELAY} --steps 0": "argument --steps: '0' is not a whole number",
    f"{BELAY} --steps 2.5": "argument --steps: '2.5' is not a whole number",
    f"{BELAY} --steps inf": "argument --steps: 'inf' is not a whole number",
    f"{BELAY} --steps many": "argument --steps: 'many' is not a whole number of at least 1",
    f"{BELAY} --tuned-for 1e6": "--tuned-for needs --steps",
    "--decay 0.9 --steps 9 --tuned-for 1e6": "--tuned-for is the run that k was chosen for; leave it out, or give --k",
    "--theta -0.5 --rate 0.1 --steps 9 --tuned-for 1e6": "--tuned-for is the run that k was chosen for; leave it out",
    f"{BELAY} --lr nan": "lr=nan is out of range",
    f"{BELAY} --lr -1": "lr=-1.0 is out of range",
    f"{BELAY} --curvature 0": "curvature=0.0 is out of range",
    f"{BELAY} --curvature nan": "curvature=nan is out of range",
    f"{BELAY} --mass 3": "unknown argument: --mass 3",
    f"{BELAY} surplus": "unknown argument: surplus",
    "--half 9": "unknown argument: --half 9",  # no abbreviations: a later option must not change what one means
}


@pytest.mark.parametrize("arguments", WRONG)
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_wrong_value_ends_in_one_line_and_status_2(run, arguments: str, form: str) -> None:
    assert WRONG[arguments] in run(f"explain {form} {arguments}").mistake("explain")


def test_a_line_break_in_an_argument_makes_no_second_line(run) -> None:
    printed = run(["explain", "two\nlines"])
    assert (printed.status, printed.err) == (2, "torchbelay explain: unknown argument: two lines\n")


@pytest.mark.parametrize("form", ["", "--json"])
def test_an_unstable_spring_is_explained_with_one_line_of_warning(run, form: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the line is printed under every warning filter
        printed = run(f"explain --k 1 --m1 10 --m2 10 --c1 .1 --c2 .1 --steps 1000000 {form}")
    assert printed.status == 0
    assert re.fullmatch(r"torchbelay explain: warning: Spring\([^\n]+\) is unstable: [^\n]+\n", printed.err)
    assert (printed.json["left_after_steps"] if form else printed.table["regime"]) == ("inf" if form else "unstable")


def test_springs_derived_from_the_given_one_do_not_warn(run) -> None:
    printed = run("explain --k 1 --m1 inf --m2 inf --steps 50 --tuned-for 99")
    assert printed.err.count("\n") == printed.err.count("is unstable") == 1


def test_the_help_names_what_a_repelling_spring_is(run) -> None:
    said = "below 0 it repels (Generalized Primal Averaging; schedule-free is its case c = 1/t), 0 is an EMA"
    assert said in " ".join(run("explain --help").out.split())


def test_every_example_of_the_help_runs(run) -> None:
    printed = run("explain --help")
    assert (printed.status, printed.err) == (0, "")
    examples = re.findall(r"^  torchbelay (explain .+)$", printed.out, flags=re.M)
    assert len(examples) == 6
    for example in examples:
        assert run(example)[::2] == (0, "")


@pytest.mark.parametrize("setting", ["--decay 0.99", "--theta -0.5 --rate 0.05", "--k 1 --m1 10 --m2 20"])
def test_limits_of_sgd_without_dampening_are_1_minus_beta_times_those_that_are_printed(run, setting: str) -> None:
    printed = run(f"explain {setting} --beta1 0.9")
    assert printed.table["SGD(momentum=0.9)"] == "0.1 of that: torch's has no dampening"
    limit = run(f"explain {setting} --beta1 0.9 --json").json["stable_range_with_beta1"]
    given = dict(zip(*[iter(setting.replace("--", "").split())] * 2, strict=True))
    numbers = {name: float(value) for name, value in given.items()}
    make = {"decay": tb.methods.ema, "theta": tb.methods.centred, "k": tb.Spring}[next(iter(given))]
    for dampening, share in ((0.0, 0.1), (0.9, 1.0)):
        for lr, grows in ((0.97 * share * limit, False), (1.03 * share * limit, True)):
            assert (_distance_after(2000, make(**numbers), lr, dampening) > 1) is grows, (dampening, lr)
    assert "SGD(momentum" not in run(f"explain {setting} --beta1 0").out


def _distance_after(steps: int, method: tb.Method, lr: float, dampening: float) -> float:
    """Return how far a weight is from the minimum of w²/2, if it began at 1e-3."""
    weight = torch.nn.Parameter(torch.tensor([1e-3], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=lr, momentum=0.9, dampening=dampening)
    tb.Belay.from_parameters([weight], optimizer, method)
    for _ in range(steps):
        weight.grad = weight.detach().clone()
        optimizer.step()
        if not abs(weight.item()) < 1e6:
            break
    return abs(weight.item())


@pytest.mark.parametrize("verb", ["explain", "recommend"])
def test_help_says_for_which_dampening_the_momentum_is(run, verb: str) -> None:
    said = " ".join(run(f"{verb} --help").out.split())
    assert "SGD with dampening = momentum" in said
    assert "torch's SGD has no dampening by default" in said

"""`torchbelay recommend`, through `main(argv)`: output, errors and exit status."""

import json
import math
import re
from pathlib import Path

import pytest

from torchbelay.physics.recommend import recommend

SMALL = "recommend --steps 300 --curvatures 2 0.2 0.02"


def test_it_prints_the_advice_of_the_library(run) -> None:
    printed = run(f"{SMALL} --beta1 0.9 --noise 0.5 --batch 4 --start 2")
    advice = recommend(300, curvatures=[2.0, 0.2, 0.02], beta1=0.9, noise=0.5, batch=4, start=2.0)
    assert (printed.status, printed.err) == (0, "")
    assert " ".join(printed.out.split()) == " ".join(advice.explain().split())
    assert max(map(len, printed.out.splitlines())) <= 80


def test_json_has_every_digit(run) -> None:
    got = run(f"{SMALL} --json").json
    advice = recommend(300, curvatures=[2.0, 0.2, 0.02])
    assert (got["steps"], got["beta1"], got["theta_floor"]) == (300, 0.0, advice.floor)
    assert (got["theta"], got["rate"], got["lr"]) == (advice.method.theta, advice.method.rate, advice.lr)
    assert got["loss"] == {"bias": advice.loss.bias, "noise": advice.loss.noise, "total": advice.loss.total}
    assert got["lrs_within_10_percent"] == list(advice.best.lrs)
    assert got["max_stable_lr"] == advice.best.limit
    assert got["alternatives"].keys() == {"EMA", "schedule-free"}
    assert got["alternatives"]["EMA"]["lr"] == advice.alternatives["EMA"].lr
    assert (got["warnings"], got["explanation"]) == (list(advice.warnings), advice.explain())


def test_the_rate_of_the_best_ema_scales_the_advice(run) -> None:
    got = run("recommend --steps 300 --beta1 0.9 --lr 3e-4 --json").json
    assert got["alternatives"]["EMA"]["lr"] == pytest.approx(3e-4)


def test_without_curvatures_and_lr_every_rate_has_its_unit_and_the_warning_comes_second(run) -> None:
    printed = run("recommend --steps 300")
    first, second, *_ = (" ".join(part.split()) for part in printed.out.split("\n\n"))
    assert re.fullmatch(r"Use tb.* at a learning rate of [\d.]+/\(largest curvature\), for 300 steps\.", first)
    assert second.startswith("Warning: No curvatures were given")
    assert printed.out.count("typical spectrum") == 1
    assert " ".join(printed.out.split()).count("/(largest curvature)") >= 1 + 1 + 3 + 1  # the warning names it too
    assert run("recommend --steps 300 --json").json["lr_unit"] == "1/largest curvature"


@pytest.mark.parametrize("known", ["--lr 3e-4", "--curvatures 2 0.2", "--curvatures 2 0.2 --lr 3e-4"])
def test_rates_of_the_optimizer_have_no_unit(run, known: str) -> None:
    assert "/(largest curvature)" not in " ".join(run(f"recommend --steps 300 {known}").out.split())
    assert run(f"recommend --steps 300 {known} --json").json["lr_unit"] is None


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A file as torchbelay train writes it."""
    path = tmp_path / "stats.jsonl"
    lines = [
        {"step": t, "lr": 0.1, "loss": 1.0, "w1": {"test": 0.5 + 0.9**t + 0.1}, "w2": {"test": 0.5 + 0.95**t}}
        for t in (1, 5, 20, 60, 200)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_a_run_is_learnt_from(run, reports: Path) -> None:
    printed = run(["recommend", "--steps", "500", "--from-run", str(reports), "--decay", "0.9"])
    assert (printed.status, printed.err) == (0, "")
    assert printed.out.startswith("Use tb.methods.")
    assert "typical spectrum" not in printed.out
    alone = run(["recommend", "--steps", "500", "--from-run", str(reports)])
    assert "noise cannot be told" in " ".join(alone.out.split())


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Files of runs at three learning rates, of which the middle one ends best."""
    found = []
    for lr, end in ((0.1, 0.6), (0.2, 0.5), (0.4, 0.7)):
        path = tmp_path / f"{lr:g}" / "stats.jsonl"
        path.parent.mkdir()
        lines = [{"step": t, "lr": lr, "w1": end + 0.02 + 0.9**t, "w2": end + 0.95**t} for t in (1, 5, 20, 60, 200)]
        path.write_text("\n".join(map(json.dumps, lines)))
        found.append(str(path))
    return found


def test_several_runs_are_a_line_search(run, three: list[str]) -> None:
    asked = ["recommend", "--steps", "200", "--beta1", "0", "--json"]
    one, two, all_three = (
        run([*asked, "--from-run", *chosen, "--decay", "0.9"]).json for chosen in (three[1:2], three[:2], three)
    )
    assert 0.05 <= one["lr"] <= 0.4
    assert two["lr"] > 0.2 * 2**0.5 / 1.01
    assert 0.1 < all_three["lr"] < 0.3
    assert "Of 3 runs, the one at a learning rate of 0.2 ended best." in all_three["explanation"]
    lost = run([*asked, "--from-run", *three[:2], "--decay", "0.9", "--lost", "0.4"]).json
    assert 0.1 < lost["lr"] < 0.2
    assert "Of 3 runs" in lost["explanation"]


def test_each_run_may_have_a_decay_of_its_own(run, three: list[str]) -> None:
    asked = ["recommend", "--steps", "200", "--beta1", "0", "--json", "--from-run", *three]
    same = run([*asked, "--decay", "0.9"]).json
    assert run([*asked, "--decay", "0.9", "0.9", "0.9"]).json == same
    assert run([*asked, "--decay", "0.99", "0.9", "0.99"]).json["rate"] == same["rate"]  # the best one has 0.9
    assert run([*asked, "--decay", "0.9", "0.99", "0.9"]).json["rate"] < same["rate"]


def test_several_runs_have_options_beside_each(run, three: list[str]) -> None:
    asked = ["recommend", "--steps", "200", "--from-run", *three, "--json"]
    expected = run([*asked, "--decay", "0.9", "0.95", "0.9", "--beta1", "0.8"]).json
    for path, decay in zip(three, (0.9, 0.95, 0.9), strict=True):
        write_options(Path(path), f"Spring.ema(decay={decay})", beta1=0.8)
    got = run(asked).json
    assert got["read"].count("β1 = 0.8.") == 3
    assert f"From {Path(three[1]).parent / 'options.json'}: decay = 0.95, β1 = 0.8." in got["read"]
    assert got["lr"] == pytest.approx(expected["lr"])
    (Path(three[2]).parent / "options.json").unlink()
    some = run([*asked, "--decay", "0.9"]).json["warnings"]
    assert "β1 = 0.8 is taken for all runs, and some have no options.json beside them." in some
    write_options(Path(three[1]), "Spring.ema(decay=0.9)", beta1=0.9)
    assert "the runs have β1 of 0.8 to 0.9; give runs with one β1" in run(asked).err


def test_a_mistake_in_one_of_several_runs_names_its_file(run, three: list[str]) -> None:
    asked = ["recommend", "--steps", "200", "--beta1", "0", "--from-run", *three]
    assert "--decay has 2 values for 3 runs; give one, or one per run" in run([*asked, "--decay", "0.9", "0.8"]).err
    lines = Path(three[2]).read_text().split("\n")
    Path(three[2]).write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"w1": math.nan})]))
    err = run([*asked, "--decay", "0.9"]).err
    assert f"{three[2]}: line 5 of the run has the loss nan" in err
    assert err.count("\n") == 1
    assert "If this is one of several runs and it was lost, give its learning rate alone, as lost (--lost)" in err
    dead = [json.dumps(json.loads(line) | {"w1": 2.3, "w2": 2.3}) for line in lines]
    Path(three[2]).write_text("\n".join(dead))
    assert f"{three[2]}: the losses of the run do not fall" in run([*asked, "--decay", "0.9"]).err
    Path(three[2]).write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"w1": 1e200})]))
    assert f"{three[2]}: losses or learning rates of the run are below" in run([*asked, "--decay", "0.9"]).err
    Path(three[2]).write_text("{")
    assert run([*asked, "--decay", "0.9"]).err.count(three[2]) == 1


def test_json_says_what_the_runs_say(run, three: list[str]) -> None:
    got = run(["recommend", "--steps", "200", "--beta1", "0", "--json", "--from-run", *three, "--decay", "0.9"]).json
    assert (got["near"], got["runs"], got["case"]) == (0.2, 3, "between")
    assert 0 <= got["noise_share"] < 1
    assert not {"near", "runs", "case"} & {*run(f"{SMALL} --json").json}


def write_options(reports: Path, method: str, **more: object) -> None:
    """Write options.json beside the reports, as torchbelay train does."""
    resolved = {"method": method, "inner": "Adam", **more}
    (reports.parent / "options.json").write_text(json.dumps({"format": 1, "resolved": resolved}))


@pytest.mark.parametrize(
    ("method", "decay"),
    [
        ("Spring.ema(decay=0.9)", 0.9),
        ("Spring(k=0.2, m1=inf, m2=1.0)", 0.9),
        ("Spring(k=0.2, m1=inf, m2=1.0, follow='after')", 0.9),
        ("Spring(k=1.0, m1=20.0, m2=5.0)", 0.875),
    ],
)
def test_decay_and_beta1_are_read_from_the_options_of_the_run(run, reports: Path, method: str, decay: float) -> None:
    asked = ["recommend", "--steps", "500", "--from-run", str(reports), "--json"]
    expected = run([*asked, "--decay", f"{decay}", "--beta1", "0.8"]).json
    write_options(reports, method, beta1=0.8)
    got = run(asked).json
    assert got["beta1"] == 0.8
    assert (got["method"], got["lr"]) == (expected["method"], pytest.approx(expected["lr"]))
    assert got["read"] == f"From {reports.parent / 'options.json'}: decay = {decay:g}, β1 = 0.8."
    pulls = [each for each in got["warnings"] if "which pulls the weights; the fit takes it for an EMA" in each]
    assert len(pulls) == (decay == 0.875)
    said = " ".join(run(asked[:-1]).out.split())
    assert f"decay = {decay:g}, β1 = 0.8. Use tb.methods." in said


def test_options_without_beta1_are_those_of_an_adam_with_09(run, reports: Path) -> None:
    write_options(reports, "Spring.ema(decay=0.9)")
    got = run(["recommend", "--steps", "500", "--from-run", str(reports), "--json"]).json
    assert got["beta1"] == 0.9


def test_what_is_given_wins_over_the_options(run, reports: Path) -> None:
    asked = ["recommend", "--steps", "500", "--from-run", str(reports), "--decay", "0.95", "--beta1", "0", "--json"]
    expected = run(asked).json
    write_options(reports, "Spring.ema(decay=0.9)")
    assert run(asked).json == expected
    assert "read" not in expected
    half = run([*asked[:-3], "--json"]).json
    assert half["read"].endswith("options.json: β1 = 0.9.")


def test_without_options_and_beta1_the_advice_says_that_beta1_is_0(run, reports: Path) -> None:
    asked = ["recommend", "--steps", "500", "--from-run", str(reports), "--decay", "0.9"]
    assert "β1 is taken as 0, because there is no options.json" in " ".join(run(asked).out.split())
    assert "β1 is taken as 0" not in " ".join(run([*asked, "--beta1", "0"]).out.split())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"resolved": {"method": "swa(every=1)"}}', '{"resolved": {"method": null}}',
             '{"resolved": {"method": "Spring.ema(decay=2)"}}', '{"resolved": {"method": "Spring.ema(decay=f())"}}']
)  # fmt: skip
def test_options_that_cannot_be_read_are_one_line_with_the_cure(run, reports: Path, text: str) -> None:
    (reports.parent / "options.json").write_text(text)
    asked = ["recommend", "--steps", "500", "--from-run", str(reports)]
    printed = run(asked)
    assert (printed.status, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert f"cannot read the decay and β1 of the run from {reports.parent / 'options.json'}" in printed.err
    assert printed.err.endswith("; give --decay and --beta1\n")
    assert run([*asked, "--decay", "0.9", "--beta1", "0"]).status == 0  # then nothing of the file is needed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--curvatures 1 --from-run x", "--from-run finds these by itself; leave out --curvatures"),
        ("--noise 2 --lr 1 --from-run x", "leave out --noise, --lr"),
        ("--decay 0.9", "--decay is about the runs of --from-run; leave it out"),
        ("--lost 0.9", "--lost is about the runs of --from-run; leave it out"),
        ("--from-run nowhere.jsonl", "cannot read nowhere.jsonl: No such file"),
        ("--curvatures 0", r"curvatures=0\.0 is out of range"),
        ("--beta1 1", r"beta1=1\.0 is out of range"),
        ("--curvatures", "expected at least one argument"),
        ("--batch 0", r"batch=0\.0 is out of range"),
        ("--curvatures 1e308 1e308", "not finite; use moderate curvatures"),
        ("--curvatures 1e-300", "too small to compute with; use moderate numbers"),
        ("--noise 1e30", "noise is so strong .*; use less noise, a larger batch or more steps"),
        ("--lr 1e308 --json", "no float holds; use a moderate one"),
        ("--curvatures 1 --start 0", "start=0 begins at the minimum"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run, more: str, message: str) -> None:
    printed = run(f"recommend --steps 100 {more}")
    assert (printed.status, printed.out) == (2, "")
    assert re.fullmatch(rf"torchbelay recommend: .*({message}).*\n", printed.err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json}\n", "is not JSON in line 1"),
        ("[1]\n", "has no object in line 1; give one object per line"),
        ('{"step": 1, "lr": 1, "loss": 1}\n', "has reports at 1 steps; the fit needs"),
        ("", "has reports at 0 steps"),
        ("[" * 100_000, "is not JSON in line 1"),
        (
            "".join(f'{{"step": {t}, "lr": 1, "loss": 1e{t}}}\n' for t in (0, 50, 100, 150)),
            "it was lost, give its learning rate alone, as lost (--lost)",
        ),
        ("\ufeff", "has reports at 0 steps"),
    ],
)
def test_a_damaged_file_is_one_line_and_status_2(run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    printed = run(["recommend", "--steps", "100", "--from-run", str(tmp_path / "a.jsonl")])
    assert (printed.status, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_line_ends_at_a_newline_alone_and_a_mark_of_byte_order_is_no_part_of_it(run, reports: Path) -> None:
    """Tools that write other scripts as they are leave U+2028 in texts, and some begin files with U+FEFF."""
    printed = run(["recommend", "--steps", "100", "--from-run", str(reports)])
    old = [json.loads(line) for line in reports.read_text().split("\n") if line]
    lines = [json.dumps(line | {"note": "a\u2028b"}, ensure_ascii=False) for line in old]
    reports.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert run(["recommend", "--steps", "100", "--from-run", str(reports)]).out == printed.out != ""


def test_a_file_that_is_not_text_is_one_line_and_status_2(run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}")
    printed = run(["recommend", "--steps", "100", "--from-run", str(tmp_path / "a.jsonl")])
    assert (printed.status, printed.err.count("\n")) == (2, 1)
    assert "is not text in UTF-8" in printed.err
    assert "give one JSON object per line" in printed.err


def test_steps_are_needed(run) -> None:
    assert "--steps" in run("recommend").err
    assert run("recommend --steps 0").status == 2


def test_the_help_has_examples(run) -> None:
    out = run("recommend --help").out
    assert "examples:\n  torchbelay recommend --steps 1e5 --beta1 0.9 --lr 3e-4" in out

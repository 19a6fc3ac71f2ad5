"""`torchbelay plan`, through `main(argv)`: output, errors and exit status."""

import re

import pytest

from torchbelay.belay.cost import MODES, cost_of
from torchbelay.cli import plan
from torchbelay.cli.plan import model_of


def test_it_knows_all_modes(run) -> None:
    assert plan._MODES == MODES
    printed = run("plan --params 1e6 --ranks 4")
    assert (printed.status, printed.err) == (0, "")
    assert re.findall(r"^\S+$", printed.out, re.M) == list(MODES)


@pytest.mark.parametrize(
    ("mode", "bits"), [*((mode, 32) for mode in MODES), *((mode, 24) for mode in ("ddp", "ddp-sharded", "fsdp2"))]
)
def test_json_has_the_numbers_of_the_formulas(run, mode: str, bits: int) -> None:
    got = run(f"plan --params 123457 --ranks 3 --mode {mode} --bits {bits} --tensors 7 --json").json[mode]
    right = cost_of(mode, list(model_of(123_457, 7)), 3, bits=bits)  # type: ignore[arg-type]
    assert got["stored"] == right.stored
    for occasion in ("watching", "pulling", "evaluating"):
        assert got[occasion] == {"bytes": getattr(right, occasion).bytes, "messages": getattr(right, occasion).messages}


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("1.5e9", 1_500_000_000), ("350M", 350_000_000), ("1.1b", 1_100_000_000), ("2T", 2 * 10**12)],
)
def test_numbers_of_weights_and_tensors_may_end_in_a_letter(run, text: str, count: int) -> None:
    short, long = (run(f"plan --params {each} --ranks 2 --tensors {t}") for each, t in ((text, "2K"), (count, 2000)))
    assert (short.status, short.err) == (0, "")
    assert short.out == long.out
    assert f"{count:,} weights" in short.out


def test_the_shapes_have_all_weights() -> None:
    for weights in (1, 5, 1000, 123_457, 70_000_000_000):
        for tensors in (1, 3, 500):
            total = 0
            for shape in model_of(weights, tensors):
                size = 1
                for each in shape:
                    size *= each
                total += size
            assert total == weights, (weights, tensors)


def test_a_sharded_average_takes_a_share_and_a_watching_one_sends_nothing() -> None:
    shapes = list(model_of(10**9, 100))
    whole = cost_of("ddp", shapes, 8).stored
    assert whole == 4 * 10**9
    for mode in ("ddp-sharded", "fsdp2", "zero3"):
        found = cost_of(mode, shapes, 8)  # type: ignore[arg-type]
        assert whole / 8 <= found.stored < 1.01 * whole / 8
        assert found.watching.messages == found.watching.bytes == 0
    assert cost_of("ddp", shapes, 8, bits=24).stored == 3 * 10**9


def test_syncs_that_are_seldom_cost_less_per_step(run) -> None:
    printed = run("plan --params 1e9 --ranks 8 --mode workers --every 500").out
    assert "sent by a rank at a sync        7 GB in 1 message" in printed
    assert re.search(r"per step, with one in 500 +14 MB", printed)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("plan --params 1e9", "the following arguments are required: --ranks"),
        ("plan --params 0 --ranks 2", "argument --params: '0' is not a whole number from 1 to 1e+18; write 7B, 7e9 or"),
        ("plan --params 7X --ranks 2", "argument --params: '7X' is not a whole number from 1 to 1e+18; write 7B"),
        ("plan --params B --ranks 2", "argument --params: 'B' is not a whole number"),
        ("plan --params nan --ranks 2", "argument --params: 'nan' is not a whole number"),
        ("plan --params 1e999999999 --ranks 2", "argument --params: '1e999999999' is not a whole number"),
        ("plan --params 0.5K --ranks 2 --tensors 1.5", "argument --tensors: '1.5' is not a whole number"),
        ("plan --params 1e9 --ranks 8B", "argument --ranks: '8B' is not a whole number of at least 1"),
        ("plan --params 1e9 --ranks 2 --bits 16", "argument --bits: invalid choice: 16"),
        ("plan --params 1e9 --ranks 2 --mode nonsense", "argument --mode: invalid choice: 'nonsense'"),
        ("plan --params 1e9 --ranks 2 --mode zero3 --bits 24", "--bits 24 is not for zero3"),
        ("plan --params 1e9 --ranks 2 --mode ddp --every 5", "--every 5 is for workers"),
        ("plan --params 1e12 --ranks 2 --tensors 1e10", "--tensors 10000000000 is too large; give at most 100000"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(run, line: str, why: str) -> None:
    printed = run(line)
    assert printed.status == 2
    assert why in printed.err
    assert printed.err.count("\n") == 1

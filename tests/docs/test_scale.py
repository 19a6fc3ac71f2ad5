"""The page about several machines: its programs run under torchrun, and its numbers are those of the formulas."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.root import ROOT
from helpers.torchrun import torchrun
from torchbelay.belay import traffic
from torchbelay.belay.cost import MODES, Sent, cost_of
from torchbelay.cli.plan import model_of, size

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    return found


def run(text: str, folder: Path) -> tuple[str, list[str]]:
    """Run the program of a section as the section says; return what it printed, and the number that each rank did."""
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    ((ranks, name),) = re.findall(r"torchrun --nproc-per-node (\d) (\S+)", text)
    (folder / name).write_text(program)
    printed = torchrun(["--nproc-per-node", ranks, name], folder)
    # A rank may print between the text and the end of the line of another.
    outputs = dict(re.findall(r"rank (\d): (-?\d+\.\d{4})", printed))
    assert len(outputs) == int(ranks)
    assert len(set(outputs.values())) == 1  # one average for all
    return printed, list(outputs.values())


@pytest.mark.slow
def test_replicas_share_an_average_under_torchrun(tmp_path: Path) -> None:
    printed, values = run(section("One average for all replicas"), tmp_path)
    ranks = len(values)
    assert {f"slice {i + 1} of {ranks}" for i in range(ranks)} == set(re.findall(r"slice \d of \d", printed))
    state = torch.load(tmp_path / "belay.pt", weights_only=True)
    assert state["step"] == 100
    assert state["averages"]["average"]["weights"]["0.weight"].shape == (64, 16)


@pytest.mark.slow
def test_a_sharded_model_has_a_sharded_average_under_torchrun(tmp_path: Path) -> None:
    _, values = run(section("A model that FSDP2 has sharded"), tmp_path)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    model.load_state_dict(torch.load(tmp_path / "average.pt", weights_only=True))
    assert f"{model(torch.ones(1, 16)).item():.4f}" == values[0]
    assert any((tmp_path / "saved").iterdir())


def test_the_share_of_a_rank_is_what_the_page_says() -> None:
    block = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), *[(768,)] * 5]
    shapes = [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]
    assert sum(map(prod, shapes)) == 124_439_808  # GPT-2 small
    (said,) = re.findall(r"largest share of GPT-2 small is ([\d.]+)% above 1/8", PAGE)
    assert f"{traffic.stored(shapes, 8, 1) / (sum(map(prod, shapes)) / 8) - 1:.3%}" == f"{said}%"
    assert f"{traffic.BUCKET >> 20} MiB" in section("One average for all replicas")


# Where this ends ------------------------------------------------------------------------------------------------------

WEIGHTS = {"1B": 10**9, "70B": 70 * 10**9, "1T": 10**12}
RANKS = (1, 8, 64, 1024)
TABLE = re.compile(r"(<!-- plan:.*?-->\n)(.*?)(\n?<!-- /plan -->)", re.DOTALL)


def table() -> str:
    """Return the table of the page: what each mode stores on a rank and sends in a step."""
    head = ["weights", "GPUs", *(f"`{mode}`" for mode in MODES), "`ddp-sharded`, a pull", "`workers`, a sync"]
    rows = [head, ["---"] * len(head)]
    for name, weights in WEIGHTS.items():
        shapes = list(model_of(weights, 500))
        for ranks in RANKS:
            found = {mode: cost_of(mode, shapes, ranks) for mode in MODES}
            sent = (found[mode].pulling for mode in ("ddp-sharded", "workers"))
            rows.append(
                [name, f"{ranks:,}", *(size(found[mode].stored) for mode in MODES), *(_told(each) for each in sent)]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _told(sent: Sent) -> str:
    return f"{size(sent.bytes)} in {sent.messages:,}" if sent.messages else "nothing"


def test_the_table_is_that_of_the_formulas() -> None:
    said = TABLE.search(PAGE)
    assert said is not None
    assert said[2] == table(), f"run python {Path(__file__).relative_to(ROOT)}"


def test_the_page_has_the_commands_that_it_speaks_of() -> None:
    for page in re.findall(r"\[[^]]*\]\((\w+\.md)\)", section("Other ways to train on several machines")):
        assert "torchrun" in (ROOT / "docs" / page).read_text(encoding="utf-8"), page


if __name__ == "__main__":
    (ROOT / "docs" / "scale.md").write_text(
        TABLE.sub(lambda found: found[1] + table() + found[3], PAGE), encoding="utf-8"
    )

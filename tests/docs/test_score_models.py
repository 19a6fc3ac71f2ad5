"""docs/score-models.md names parts that have been run."""

import re

from helpers import kept_records
from helpers.root import ROOT


def test_every_part_that_it_names_has_runs() -> None:
    text = (ROOT / "docs" / "score-models.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `torchbelay reproduce (\w+)`:", text, re.M)
    assert {"figure4", "readings", "warmup", "penalty"} <= {*named}
    assert [part for part in named if all(line["kind"] != "run" for line in kept_records.lines(part))] == []


def test_it_says_how_long_a_seed_of_figure_4_takes() -> None:
    text = " ".join((ROOT / "docs" / "score-models.md").read_text(encoding="utf-8").split())
    lines = kept_records.lines("figure4")
    sampled = {line["seed"] for line in lines if line["kind"] == "fid"}
    took = [sum(line["wall_s"] for line in lines if "wall_s" in line and line["seed"] == seed) for seed in sampled]
    assert f"about {min(took) / 60:.0f} minutes per seed on an H200" in text


def test_it_names_generalized_primal_averaging_beside_every_negative_theta() -> None:
    text = " ".join((ROOT / "docs" / "score-models.md").read_text(encoding="utf-8").split())
    bullets = re.findall(r"- `torchbelay reproduce \w+`: θ = .*?\.(?= )", text)
    assert len(bullets) == 2
    assert all("−0.5 (Generalized Primal Averaging)" in bullet for bullet in bullets)

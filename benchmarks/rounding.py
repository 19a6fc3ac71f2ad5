"""What an average of 24 bits loses: `python benchmarks/rounding.py` renews the table in docs/memory.md.

Weights wander around a point, as they do at the end of a training. `Belay` follows them in 24 bits, torch's lerp in
float32, and beside them averages of bfloat16 that are rounded at random too. The error is the distance from the float32
average, as a share of its distance from the weights, ‖w2 − w1‖. The result is written to `RESULT`; `--no-run` only
renews the table from it.
"""

import argparse
import json
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchbelay as tb

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "rounding.json"
DOCUMENT = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- from rounding -->", "<!-- end -->"

DECAYS = (0.999, 0.9999)
SPREADS = (0.001, 0.01, 0.1)  # of the weights around their point, relative to them: τ is about as large


def bound(tau: float) -> float:
    """Return the error that 24 bits may have: √(2⁻¹⁵/(2τ)), with τ = ‖w2 − w1‖/‖w1‖."""
    return sqrt(2.0**-15 / (2 * tau))


def in_bfloat16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return finite float32 numbers rounded at random to bfloat16."""
    random = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + random) & -0x10000).view(torch.float32)


@torch.no_grad()
def measured(spread: float, *, weights: int, steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Return the errors after some steps, one row per decay."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(weights, generator=generator)
    away = spread * torch.randn(weights, generator=generator) * centre
    model = nn.ParameterDict({"weight": nn.Parameter(centre + away)})
    first, *others = (tb.Spring.ema(decay=decay) for decay in DECAYS)
    spectators = {str(decay): method for decay, method in zip(DECAYS[1:], others, strict=True)}
    belay = tb.Belay(model, None, first, spectators=spectators, bits=24)
    exact = [model["weight"].clone() for _ in DECAYS]
    plain = [in_bfloat16(w2, generator) for w2 in exact]
    memory = 0.99  # of the wandering: it forgets where it was in about 100 steps
    for _ in range(steps):
        away.mul_(memory).add_(torch.randn(weights, generator=generator) * centre, alpha=spread * sqrt(1 - memory**2))
        model["weight"].copy_(centre + away)
        belay.update()
        for i, decay in enumerate(DECAYS):
            exact[i].lerp_(model["weight"], 1 - decay)
            plain[i] = in_bfloat16(plain[i].lerp_(model["weight"], 1 - decay), generator)
    rows = []
    w1 = model["weight"].double()
    for i, (decay, name) in enumerate(zip(DECAYS, ("average", *spectators), strict=True)):
        right, found = exact[i].double(), belay.average_state_dict(name)["weight"]
        tension = float((right - w1).norm())
        tau = tension / float(w1.norm())
        errors = [float((each.double() - right).norm()) / tension for each in (found, plain[i])]
        rows.append({"decay": decay, "tau": tau, "24 bits": errors[0], "bfloat16": errors[1], "bound": bound(tau)})
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the table of the document."""
    lines = [
        "| decay | τ | 24 bits | at most √(2⁻¹⁵/(2τ)) | bfloat16 | bfloat16 ÷ 24 bits |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio = row["bfloat16"] / row["24 bits"]
        lines.append(
            f"| {row['decay']} | {row['tau']:.2%} | **{row['24 bits']:.2%}** | {row['bound']:.2%} | "
            f"{row['bfloat16']:.1%} | {ratio:.1f} |"
        )
    return "\n".join(lines)


def filled(text: str, result: dict[str, Any]) -> str:
    """Return the document with its table renewed."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(result)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=8_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--no-run", action="store_true", help="renew the table from the result that is there")
    args = parser.parse_args()
    if not args.no_run:
        rows = [row for s in SPREADS for row in measured(s, weights=args.weights, steps=args.steps)]
        about = {"torch": torch.__version__, "weights": args.weights, "steps": args.steps}
        RESULT.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), result), encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()

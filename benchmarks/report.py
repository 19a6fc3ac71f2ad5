"""Write the measured tables and the figure: `python benchmarks/report.py` renews them in README.md and docs/.

The numbers come from `RESULT` and the other files beside it. A document marks each generated part with
`<!-- from NAME -->` and `<!-- end -->`; `tables` has the parts by name. A test compares the documents with `tables`.
"""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "h200.json"
BEGIN, END = "<!-- from {} -->", "<!-- end -->"

BITS24, ONE_PASS = "torchbelay AdamW with EMA of 24 bits, one pass", "torchbelay AdamW with EMA, one pass"
HOOKS, TIMM = "torch AdamW, torchbelay EMA", "torch AdamW, then timm ModelEmaV3"
ALONE, BELAY = "torch AdamW(fused=True), no average", "torchbelay AdamW with BELAY, one pass"
EMA, COUPLING = "torchbelay EMA", "torchbelay BELAY, follow after"
MODELS = {
    "gpt": "1.1B in 121",
    "medium": "355M in 292 (GPT-2 medium)",
    "unet": "61M in 510",
    "small": "16.5M in 2,000",
    "vit": "ViT-B/16, 87M in 152",
    "few": "10M in 10",
    "laptop": "10M in 200",
    "many": "1M in 2,000",
}
COST_MODELS = ("gpt", "unet", "small")  # the columns of README's small table; docs/performance.md has all of them
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")


def ms(result: dict[str, Any], model: str, part: str, name: str, kind: str = "wall") -> float:
    """Return the median time of one candidate, in milliseconds."""
    return float(result["models"][model][part][name][kind]["median"])


def share(result: dict[str, Any], model: str, part: str, name: str) -> float:
    """Return the bandwidth of a candidate as a share of that of a plain copy.

    The bytes are the fewest that the operation can move; the time is the device's own.
    """
    row, weights = result["models"][model][part][name], result["models"][model]["weights"]
    return float(row["bytes"] * weights / (row["device"]["median"] / 1e3) / result["copy_bandwidth"])


def is_peer(name: str) -> bool:
    """Whether a candidate is another library."""
    return "torchbelay" not in name and "tensor by tensor" not in name


def fastest_peer(result: dict[str, Any], model: str, kind: str) -> float:
    """Return the time of the fastest other library."""
    return min(ms(result, model, "average", name, kind) for name in result["models"][model]["average"] if is_peer(name))


def times(result: dict[str, Any], part: str, kind: str, models: Collection[str] = ()) -> str:
    """Return a table of one kind of time: one row per candidate, one column per model; without `models`, of all."""
    models = models or [model for model in MODELS if model in result["models"]]
    names = dict.fromkeys(name for model in models for name in result["models"][model][part])
    lines = [f"| ms | {' | '.join(MODELS[model] for model in models)} |", "|---|" + "---|" * len(models)]
    for name in names:
        cells = []
        for model in models:
            row = result["models"][model][part].get(name)
            cells.append("–" if row is None else f"{row[kind]['median']:.3g}")
        lines.append(f"| {emphasised(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def emphasised(name: str) -> str:
    """Return the name of a candidate; in bold if it is ours and not only its slower way."""
    return f"**{name}**" if name.startswith("torchbelay") and "foreach" not in name else name


def recorded(name: str) -> dict[str, Any] | None:
    """Return a result file beside `RESULT`; None if there is none yet."""
    path = RESULT.parent / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None  # type: ignore[no-any-return]


def place(result: dict[str, Any], *packages: str) -> str:
    """Return where and when a result was measured."""
    found = [f"{package} {result['versions'][package]}" for package in packages]
    return ", ".join([result["device"], result["date"], *found])


def choices(result: dict[str, Any]) -> str:
    """Return the table of whole steps: from idle and, after a slash, the device alone."""
    models = [model for model in MODELS if model in result["models"]]
    lines = [f"| ms | {' | '.join(MODELS[model] for model in models)} |", "|---|" + "---|" * len(models)]
    for name in dict.fromkeys(name for model in models for name in result["models"][model]["step"]):
        cells = []
        for model in models:
            row = result["models"][model]["step"].get(name)
            cells.append("–" if row is None else f"{row['wall']['median']:.3g} / {row['device']['median']:.3g}")
        lines.append(f"| {emphasised(name)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{place(result, 'torch', 'triton', 'timm')}; medians of {result['repeats']}."])


def choice_bars(steps: dict[str, Any], whole: dict[str, Any]) -> str:
    """Return the targets of whole steps, and what was measured."""
    ratio = ms(steps, "gpt", "step", BITS24, "device") / ms(steps, "gpt", "step", ALONE, "device")
    first = f"EMA of 24 bits in one pass ÷ torch's fused AdamW, no average, device alone, {MODELS['gpt']}"
    rows = [(first, "≤ 1.02", f"{ratio:.3f}")]
    for model, target in (("unet", "≤ 0.52 ms"), ("medium", "≤ 1.10 ms")):
        hooks, timm = (ms(steps, model, "step", name) - ms(steps, model, "step", ALONE) for name in (HOOKS, TIMM))
        added = f"{hooks:.2f} ms (timm ModelEmaV3: {timm:.2f})"
        rows.append((f"what an EMA by hooks adds to torch's step, from idle, {MODELS[model]}", target, added))
    ours, theirs = (ms(steps, "small", "step", name, "host") for name in (ONE_PASS, ALONE))
    host = f"{ours:.1f} ms (torch's own, no average: {theirs:.1f})"
    rows.append((f"host time of EMA in one pass, {MODELS['small']}", "≤ 1.3 ms", host))
    both = " and ".join(f"{mode[ONE_PASS]['ratio']:.3f} {how}" for how, mode in
                        zip(("by calls", "as a graph"), whole["modes"].values(), strict=True))  # fmt: skip
    rows.append(("a whole training step with an EMA in one pass ÷ without an average, GPT-2 small", "≤ 1.01", both))
    return "\n".join(["| | target | measured |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def whole_step(result: dict[str, Any]) -> str:
    """Return the table of training steps of GPT-2 small, as ratios to the step without an average."""
    modes, memory = result["modes"], result["memory"]
    lines = ["| ratio to the step without an average | by calls | as a CUDA graph | memory |", "|---|---|---|---|"]
    base = next(iter(memory.values()))
    for name in modes["calls"]:
        cells = [
            f"{row['ratio']:.3f} ({row['low']:.3f} – {row['high']:.3f})" for row in (m[name] for m in modes.values())
        ]
        lines.append(f"| {emphasised(name)} | {' | '.join(cells)} | {memory[name] / base:.3f} |")
    ms = " and ".join(f"{next(iter(mode.values()))['ms']:.2f} ms {how}" for how, mode in
                      zip(("by calls", "as a graph"), modes.values(), strict=True))  # fmt: skip
    return "\n".join([
        *lines, "",
        f"{place(result, 'torch', 'triton', 'timm')}; medians and quartiles. Without an average a step takes {ms}, and "
        f"{base / 2**30:.2f} GiB at its peak.",
    ])  # fmt: skip


def ratios(result: dict[str, Any], part: str) -> str:
    """Return the table of processor time on a CPU, each candidate divided by the first one."""
    models = [model for model in MODELS if model in result["models"]]
    lines = [f"| ratio | {' | '.join(MODELS[model] for model in models)} |", "|---|" + "---|" * len(models)]
    for name in result["models"][models[0]][part]:
        rows = [result["models"][model][part][name] for model in models]
        cells = [f"{row['ratio']:.2f} ({row['low']:.2f} – {row['high']:.2f})" for row in rows]
        lines.append(f"| {emphasised(name.removesuffix(', one pass'))} | {' | '.join(cells)} |")  # kernels have that
    return "\n".join(lines)


def drop_ins(result: dict[str, Any]) -> str:
    """Return the table of drop-ins on a GPU: milliseconds of one update, theirs and ours, and the ratio."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        cells = found.setdefault((row["class"], MODELS[row["model"]]), [])
        ratio = drop_in_ratio(row)
        cells += [
            f"{row['theirs']['done']:.2f}",
            f"{row['ours']['done']:.2f}",
            f"{ratio:.{2 if ratio >= 0.01 else 3}f}",
        ]
    types = dict.fromkeys(row["dtype"] for row in result["rows"])
    heads = " | ".join(f"theirs, {dtype} | ours | ratio" for dtype in types)
    lines = [f"| class, model | {heads} |", "|---|" + "---|---|---|" * len(types)]
    lines += [f"| {', '.join(key)} | {' | '.join(cells)} |" for key, cells in found.items()]
    return "\n".join([*lines, "", drop_in_run(result)])


def drop_in_ratios(result: dict[str, Any]) -> str:
    """Return the table of drop-ins on a CPU: the time of one update, ours divided by theirs."""
    rows = result["rows"]
    columns = [(dtype, model) for dtype in dict.fromkeys(row["dtype"] for row in rows)
               for model in dict.fromkeys(row["model"] for row in rows)]  # fmt: skip
    found = {(row["class"], row["dtype"], row["model"]): f"{drop_in_ratio(row):.2f}" for row in rows}
    lines = [f"| ours ÷ theirs | {' | '.join(f'{dtype}, {MODELS[model]}' for dtype, model in columns)} |"]
    lines.append("|---|" + "---|" * len(columns))
    names = dict.fromkeys(row["class"] for row in rows)
    lines += [f"| {name} | {' | '.join(found[name, *column] for column in columns)} |" for name in names]
    return "\n".join([*lines, "", drop_in_run(result)])


def drop_in_ratio(row: dict[str, Any]) -> float:
    """Return the time of our update divided by that of theirs."""
    return float(row["ours"]["done"] / row["theirs"]["done"])


def drop_in_run(result: dict[str, Any]) -> str:
    """Return where, when and with what the drop-ins were measured."""
    runs = f" updates, and of {result['runs']} runs" if result.get("runs", 1) > 1 else ""
    return f"{place(result, 'torch', 'diffusers', 'torch-ema')}; medians of {result['repeats']}{runs}."


def bars(result: dict[str, Any]) -> str:
    """Return the table of targets and results."""
    averages = dict.fromkeys(("wall", "device"), result["scaling"]["averages"]["4"])
    ratio = {
        kind: rows["4 in one pass"][kind]["median"] / rows["4 one after the other"][kind]["median"]
        for kind, rows in averages.items()
    }
    held = result["models"]["unet"]["memory"]
    average = held[BELAY]["held"] - held[ALONE]["held"]
    theirs = held["torch AdamW, then AveragedModel (EMA)"]["held"] - held[ALONE]["held"]

    def step(model: str, kind: str, name: str = BELAY) -> float:
        return ms(result, model, "step", name, kind) / ms(result, model, "step", ALONE, kind)

    def shares(model: str) -> str:
        found = (("step", BELAY), ("average", COUPLING), ("average", EMA))
        return " / ".join(f"{share(result, model, part, name):.2f}" for part, name in found)

    def faster(model: str, kind: str) -> float:
        return fastest_peer(result, model, kind) / ms(result, model, "average", EMA, kind)

    rows = [
        (f"BELAY in one pass ÷ torch AdamW(fused=True) with no average, {MODELS['gpt']}", "≤ 1.05", "gpt", step),
        (f"the same, {MODELS['unet']}", "≤ 0.40", "unet", step),
        (f"the same, {MODELS['small']}", "≤ 0.15", "small", step),
    ]
    lines = ["| | target | from idle | device alone |", "|---|---|---|---|"]
    lines += [f"| {what} | {bar} | {of(m, 'wall'):.2f} | {of(m, 'device'):.2f} |" for what, bar, m, of in rows]
    if BITS24 in result["models"]["gpt"]["step"]:
        found = " | ".join(f"{step('gpt', kind, BITS24):.2f}" for kind in ("wall", "device"))
        lines.append(f"| the same with an EMA of 24 bits, {MODELS['gpt']} | ≤ 1.02 | {found} |")
    lines += [
        f"| share of a copy's bandwidth, {MODELS['gpt']}: BELAY in one pass / coupling / EMA | ≥ 0.95 | "
        f"| {shares('gpt')} |",
        f"| the same, {MODELS['unet']} | ≥ 0.80 | | {shares('unet')} |",
    ]
    for model, bar in (("unet", "≥ 1.8×"), ("small", "≥ 10×")):
        found = f"{faster(model, 'wall'):.1f}× | {faster(model, 'device'):.1f}×"
        lines.append(f"| EMA alone, faster than the fastest peer, {MODELS[model]} | {bar} | {found} |")
    host = ms(result, "small", "step", BELAY, "host")
    lines += [
        f"| four averages in one pass ÷ four passes, 268M | ≤ 0.75 | {ratio['wall']:.2f} | {ratio['device']:.2f} |",
        f"| bytes per weight that BELAY adds in one pass, {MODELS['unet']} (a plain copy of the weights: {theirs:.2f}) "
        f"| 4 | | {average:.2f}, transient {held[BELAY]['transient']:.0f} |",
        f"| host time of a step with BELAY in one pass, {MODELS['small']} tensors (torch's own: "
        f"{ms(result, 'small', 'step', ALONE, 'host'):.1f} ms) | ≤ 1 ms | {host:.1f} ms | |",
    ]
    return "\n".join(lines)


def tables(result: dict[str, Any]) -> dict[str, str]:
    """Return the generated parts of the documents, by name."""
    versions = result["versions"]
    run = (
        f"{result['device']}, {result['date']}, torch {versions['torch']}, triton {versions['triton']}; a copy moves "
        f"{result['copy_bandwidth'] / 1e12:.2f} TB/s."
    )
    return {
        "steps": times(result, "step", "wall"),
        "steps-device": times(result, "step", "device"),
        "averages": times(result, "average", "wall"),
        "averages-device": times(result, "average", "device"),
        "bars": bars(result),
        "run": run,
    } | more_tables()


def more_tables() -> dict[str, str]:
    """Return the parts that have result files of their own, by name."""
    steps, whole, cpu, compat, compat_cpu = map(recorded, ("steps", "whole_step", "cpu", "compat", "compat_cpu"))
    found = {
        "choices": "No run is recorded yet." if steps is None else choices(steps),
        "whole-step": "No run is recorded yet." if whole is None else whole_step(whole),
    }
    if steps is not None:
        run = f"{place(steps, 'torch', 'triton', 'timm')}; medians of {steps['repeats']}."
        found |= {"cost": times(steps, "step", "wall", COST_MODELS), "cost-run": run}
    if steps is not None and whole is not None:
        found["choice-bars"] = choice_bars(steps, whole)
    if compat is not None:
        found["drop-ins"] = drop_ins(compat)
    if compat_cpu is not None:
        found["drop-ins-cpu"] = drop_in_ratios(compat_cpu)
    if cpu is not None:
        packages = ("torch", "timm", "ema-pytorch", "torch-ema", "diffusers")
        run = f"{place(cpu, *packages)}; medians and quartiles of {cpu['rounds']} rounds."
        found |= {"cpu-averages": ratios(cpu, "average"), "cpu-steps": ratios(cpu, "step"), "cpu-run": run}
    return found


def filled(text: str, parts: dict[str, str]) -> str:
    """Return a document with its generated parts renewed."""
    for name, part in parts.items():
        begin = BEGIN.format(name)
        if begin in text:
            head, _, rest = text.partition(begin)
            _, _, tail = rest.partition(END)
            text = f"{head}{begin}\n{part}\n{END}{tail}"
    return text


def figure(result: dict[str, Any], folder: Path) -> None:
    """Draw the cost against the numbers of weights, tensors and averages."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "torchbelay"  # the same file for the same numbers
    from matplotlib import pyplot as plt

    # One below the other: beside each other, their words would be too small on a page.
    fig, axes = plt.subplots(3, 1, figsize=(7.2, 9.6), constrained_layout=True)
    titles = {
        "weights": "weights, in 100 tensors",
        "tensors": "tensors, of 16M weights",
        "averages": "averages, of 268M weights",
    }
    for ax, (part, title) in zip(axes, titles.items(), strict=True):
        rows = result["scaling"][part]
        xs = [int(n) for n in rows]
        names = [name.partition(" ")[2] if part == "averages" else name for name in next(iter(rows.values()))]
        for i, name in enumerate(names):
            for kind, style in (("wall", "-"), ("device", ":")):
                ys = [list(row.values())[i][kind]["median"] for row in rows.values()]
                label = f"{name}, {'from idle' if kind == 'wall' else 'device alone'}"
                ax.plot(xs, ys, style, marker="o", ms=3, color=f"C{i}", label=label)
        scale = "linear" if part == "averages" else "log"
        ax.set(xlabel=title, ylabel="ms", xscale=scale, yscale=scale)
        ax.grid(alpha=0.3, which="both")
        ax.legend(fontsize=9)
    fig.suptitle(f"EMA alone, {result['device']}, float32")
    fig.savefig(folder / "performance.svg", metadata={"Date": None})


def main() -> None:
    """Renew the documents, and the figure unless `--no-figure` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-figure", action="store_true", help="leave the figure as it is")
    args = parser.parse_args()
    result = json.loads(RESULT.read_text())
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(), tables(result)))
    if not args.no_figure:
        figure(result, ROOT / "docs")


if __name__ == "__main__":
    main()

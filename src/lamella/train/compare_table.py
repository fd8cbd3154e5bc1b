"""The tables and the plot of a comparison."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from lamella.train.folder import write_atomic

MIN_SEEDS = 3  # with fewer there is no spread worth the name


def write_tables(out: Path, document: dict[str, Any], runs: list[tuple[str, Path]]) -> None:
    """Write compare.csv, compare.md, compare.json and compare.png. runs: (variant, run folder) of finished runs."""
    rows = document["variants"]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(out / "compare.csv", buffer.getvalue().encode())
    write_atomic(out / "compare.json", json.dumps(document, indent=1, default=str).encode())
    write_atomic(out / "compare.md", markdown(document).encode())
    write_atomic(out / "compare.png", plot(runs))


def markdown(document: dict[str, Any]) -> str:
    """The table of a comparison, with what it was run with."""
    config, rows = document["config"], document["variants"]
    lines = [f"# {config['model']} on {config['data']}, equal training {config['equal']}", ""]
    if len(config["seeds"]) < MIN_SEEDS:
        lines += [
            f"A demonstration, not evidence: {len(config['seeds'])} seed(s), one learning rate for all variants.",
            "",
        ]
    lines += [
        "| variant | FFN params (nominal) | FFN params (all blocks) | params | training FLOPs | steps | tokens "
        "| val bpb | test bpb | training tokens/s | decode tokens/s, batch 1 | batch 32 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["variant"],
            f"{row['ffn_params_nominal_frac']:.1%}",
            f"{row['ffn_params_frac']:.1%}",
            f"{row['params']:,}",
            f"{row['training_flops']:.3e}",
            f"{row['steps']:,}",
            f"{row['tokens']:,}",
            _with_spread(row, "validation_bpb"),
            _with_spread(row, "test_bpb"),
            f"{row['training_tokens_per_s']:,.0f}",
            f"{row['decode_tokens_per_s_batch_1']:,.0f}",
            f"{row['decode_tokens_per_s_batch_32']:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for label, why in document["failed"].items():
        lines += ["", f"FAILED {label}: {why}"]
    lines += [
        "",
        f"{config['steps']} dense steps of {config['batch_size']} sequences, seeds {config['seeds']}, "
        f"lr {config['lr']:g}, tokenizer {config['tokenizer'] or 'of the data'}. "
        "Mean +- standard deviation over seeds.",
    ]
    return "\n".join(lines) + "\n"


def plot(runs: list[tuple[str, Path]]) -> bytes:
    """Validation bits per byte against training FLOPs, as a PNG; dotted: the structured layers alone while guided."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = {variant: f"C{k % 10}" for k, variant in enumerate(dict.fromkeys(v for v, _ in runs))}
    named: set[str] = set()
    for variant, folder in runs:
        with open(folder / "metrics.jsonl", encoding="utf-8") as file:
            lines = [line for line in map(json.loads, file) if "val_bpb" in line]
        label = None if variant in named else variant
        named.add(variant)
        flops = [line["flops"] for line in lines]
        axes.plot(flops, [line["val_bpb"] for line in lines], color=colours[variant], label=label, marker=".")
        guided = [line for line in lines if "val_bpb_structured" in line]
        axes.plot(
            [line["flops"] for line in guided],
            [line["val_bpb_structured"] for line in guided],
            color=colours[variant],
            linestyle=":",
        )
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("validation bits per byte")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _with_spread(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    spread = row[f"{name}_std"]
    return f"{row[name]:.4f}" + ("" if spread is None else f" +- {spread:.4f}")

"""Compare variants of a model under equal training FLOPs: the main job.

Every variant gets the training FLOPs of the dense model at its `steps` (or its tokens), the same data in one order,
and the same start for the weights it shares with the dense model. Each (variant, seed) is an ordinary run folder.
"""

import json
import os
import statistics
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella.train.compare_plan import VARIED, CompareConfig, PlannedRun, plan_runs, variant_name
from lamella.train.compare_table import write_tables
from lamella.train.evaluate import model_context, open_model
from lamella.train.folder import TMP, RunError, RunFolder, discard, read_config, write_atomic
from lamella.train.generate import decode_speed, generate
from lamella.train.interrupts import Interrupted
from lamella.train.loop import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECODE_BATCHES = (1, 32)
DECODE_TOKENS = 32
DECODE_ROUNDS = 3


def compare(config: CompareConfig, *, progress: bool = True) -> dict[str, Any]:
    """Run all variants x seeds that are not finished yet, then write the tables and the plot.

    A variant that fails is reported and the others go on. Running it again, with more variants or seeds if wanted,
    repeats no finished run. Writes compare.csv, compare.md, compare.png and, when asked, export/ and sample.txt.

    Returns: {"variants": rows, "failed": {run: reason}, ...}.
    Raises: ValueError for what can't be run, before anything is; Interrupted after SIGINT or SIGTERM.
    """
    runs = plan_runs(config)
    out = Path(config.out)
    with RunFolder.claimed(out, "compare.yaml"):
        _check_same_comparison(out, config)
        results, failed = _train_all(runs, progress)
        rows = _rows(config, results, _decode_speeds(results))
        document = {"config": _stored(config), "variants": rows, "failed": failed}
        write_tables(out, document, [(run.variant, Path(run.config.out)) for run, _ in results])
        if progress:
            print((out / "compare.md").read_text(encoding="utf-8"), flush=True)
        if config.export is not None:
            document |= _ship(config, results, progress)
    return document


def _train_all(
    runs: list[PlannedRun], progress: bool
) -> tuple[list[tuple[PlannedRun, dict[str, Any]]], dict[str, str]]:
    """The results of the runs that end well, and {run: reason} of the others."""
    failed: dict[str, str] = {}
    results = []
    for number, run in enumerate(runs, 1):
        label = f"{run.variant} seed {run.config.seed}"
        if progress:
            print(
                f"[{number}/{len(runs)}] {label}: {run.config.steps} steps, {run.flops:.3g} FLOPs", flush=True
            )
        try:
            result = train(run.config, resume=True, progress=progress)
            open_model(run.config.out)  # a finished run may have been damaged since
            results.append((run, result))
        except Interrupted as stop:
            message = f"{stop}\nOr run the same lamella compare again: it goes on there."
            raise Interrupted(message, stop.signum) from None
        except Exception as error:
            failed[label] = f"{type(error).__name__}: {error}"
            print(f"FAILED {label}: {error}", flush=True)
            if not isinstance(error, ValueError):
                traceback.print_exc()
    if not results:
        raise RunError("every run failed: " + "; ".join(f"{label}: {why}" for label, why in failed.items()))
    return results, failed


def _check_same_comparison(out: Path, config: CompareConfig) -> None:
    """See that the folder holds this comparison, or begin it there; variants and seeds may grow."""
    import yaml

    stored, file = _stored(config), out / "compare.yaml"
    if file.exists():
        before = read_config(out, "compare.yaml")
        differs = [
            f"{name}: given {stored.get(name)!r}, stored {before.get(name)!r}"
            for name in stored | before
            if name not in ("variants", "seeds", "export", "prompt") and stored.get(name) != before.get(name)
        ]
        if differs:
            raise RunError(
                f"{out} holds another comparison ({'; '.join(differs)}): give another folder, or the same settings"
            )
    write_atomic(file, yaml.safe_dump(stored, sort_keys=False, allow_unicode=True).encode())


def _stored(config: CompareConfig) -> dict[str, Any]:
    own = {k: v for k, v in asdict(config).items() if k not in ("train", "out")}
    kept = {k: v for k, v in config.train.to_dict().items() if k not in VARIED}
    return own | kept


def _rows(
    config: CompareConfig,
    results: list[tuple[PlannedRun, dict[str, Any]]],
    speeds: dict[str, dict[str, float]],
) -> list[dict[str, Any]]:
    rows = []
    for variant in config.variants:
        own = [(run, result) for run, result in results if run.variant == variant]
        if not own:
            continue
        run, first = own[0]
        values = {name: [result[name] for _, result in own] for name in first}
        rows.append(
            {
                "variant": variant,
                "seeds": len(own),
                "ffn_params_nominal_frac": run.nominal_frac,
                "ffn_params_frac": run.ffn_params_frac,
                "params": run.params,
                "training_flops": first["flops"],
                "steps": run.config.steps,
                "tokens": first["tokens"],
                **_spread("validation_bpb", values["validation_bpb"]),
                **_spread("test_bpb", values["test_bpb"]),
                "training_tokens_per_s": statistics.median(values["tokens_per_s"]),
                **{f"decode_tokens_per_s_batch_{b}": speeds[variant][str(b)] for b in DECODE_BATCHES},
            }
        )
    return rows


def _spread(name: str, values: list[float | None]) -> dict[str, float | None]:
    """Mean, and standard deviation over seeds (None for one)."""
    known = [v for v in values if v is not None]
    if not known:
        return {name: None, f"{name}_std": None}
    return {name: statistics.fmean(known), f"{name}_std": statistics.stdev(known) if len(known) > 1 else None}


def _decode_speeds(results: list[tuple[PlannedRun, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Tokens per second of each variant's first seed, in rounds that take the variants in turn."""
    models: dict[str, PreTrainedModel] = {}
    for run, _ in results:
        if run.variant not in models:
            models[run.variant] = open_model(run.config.out)[0]
    speeds: dict[str, dict[str, float]] = {variant: {} for variant in models}
    for batch in DECODE_BATCHES:
        measured: dict[str, list[float]] = {variant: [] for variant in models}
        for _ in range(DECODE_ROUNDS):
            for variant, model in models.items():
                count = min(DECODE_TOKENS, model_context(model) - 1)
                measured[variant].append(decode_speed(model, batch, count, repeats=1))
        for variant, values in measured.items():
            speeds[variant][str(batch)] = statistics.median(values)
    return speeds


def _ship(
    config: CompareConfig, results: list[tuple[PlannedRun, dict[str, Any]]], progress: bool
) -> dict[str, Any]:
    """Export the chosen variant's best seed by validation, and let it write a sample."""
    from lamella.hub import export

    assert config.export is not None
    chosen = [(run, result) for run, result in results if run.variant == variant_name(config.export)]
    if not chosen:
        raise RunError(f"{config.export} failed, so there is nothing to export")
    run, _ = min(chosen, key=lambda pair: pair[1]["validation_bpb"])
    out = Path(config.out)
    folder, record = out / "export", out / "export.json"
    of = {"variant": run.variant, "seed": run.config.seed}
    model, tokenizer, _ = open_model(run.config.out)
    report = json.loads(record.read_text(encoding="utf-8")) if record.exists() and folder.exists() else {}
    if report.get("of") != of:
        record.unlink(missing_ok=True)
        aside = out / f"{TMP}export"
        discard(aside)
        report = export(model, tokenizer, aside) | {"path": str(folder), "of": of}
        discard(folder)
        os.rename(aside, folder)
        write_atomic(record, json.dumps(report, indent=1).encode())
    sample = generate(model, config.prompt, tokenizer=tokenizer, max_new_tokens=120)
    write_atomic(out / "sample.txt", (config.prompt + sample).encode())
    if progress:
        difference = report.get("max_logit_difference")
        checked = (
            ""
            if difference is None
            else f", checked in a fresh process (largest logit difference {difference:.2g})"
        )
        print(
            f"exported {run.variant}, merged, to {folder}{checked}\nsample:\n{config.prompt}{sample}",
            flush=True,
        )
    return {"export": report, "sample": config.prompt + sample}

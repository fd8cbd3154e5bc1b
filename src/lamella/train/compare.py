"""Compare variants of a model under equal training FLOPs: the main job.

Every variant gets the training FLOPs of the dense model at its `steps` (or its tokens), the same data in one order,
and the same start for the weights it shares with the dense model. Each (variant, seed) is an ordinary run folder.
"""

import json
import os
import re
import statistics
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella.nn import structured_layers
from lamella.nn.guide import Schedule
from lamella.structures import parse_structure, suggest
from lamella.train.compare_table import write_tables
from lamella.train.config import TrainConfig
from lamella.train.evaluate import model_context, open_model
from lamella.train.folder import TMP, RunError, RunFolder, discard, read_config, write_atomic
from lamella.train.generate import decode_speed, generate
from lamella.train.interrupts import Interrupted
from lamella.train.loop import train
from lamella.train.setup import resolve, structure_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DECODE_BATCHES = (1, 32)
DECODE_TOKENS = 32
DECODE_ROUNDS = 3

# Fields of TrainConfig that a variant decides.
VARIED = (
    "out",
    "structure",
    "all_blocks",
    "rules",
    "zero_last",
    "ffn_width",
    "guide",
    "guide_frac",
    "guide_schedule",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What to compare.

    Args:
        train: The dense run that sets the budget; variants change its structure, guide, width, seed and steps.
        out: The folder for the runs, the tables and the plot.
        variants: dense, narrow (a dense FFN d -> d -> d), or a structure such as "LowRank(rank_frac=0.25)",
            self-guided when "+guide" follows.
        seeds: One run per variant and seed.
        equal: What all variants have as much of as the dense model: training flops, or tokens.
        all_blocks: Give the first block's FFN the structure too.
        guide_frac: The part of the steps that is guided, in guided variants.
        guide_schedule: How their guide fades: cosine or linear.
        export: The variant to export, merged, to OUT/export when all is done.
        prompt: What that model continues as a sample.
    """

    train: TrainConfig
    out: str
    variants: list[str] = field(default_factory=lambda: ["dense", "narrow", "LowRank(rank_frac=0.25)"])
    seeds: list[int] = field(default_factory=lambda: [0])
    equal: Literal["flops", "tokens"] = "flops"
    all_blocks: bool = False
    guide_frac: float = 0.5
    guide_schedule: Schedule = "cosine"
    export: str | None = None
    prompt: str = "\n"

    def __post_init__(self) -> None:
        for name in ("variants", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be one or more, all different, got {values}")
        names = [variant_name(v) for v in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"two of the variants are the same: {', '.join(names)}")
        if self.export is not None and variant_name(self.export) not in names:
            raise ValueError(f"export={self.export!r} is none of the variants {', '.join(names)}")
        if self.all_blocks and all(n in ("dense", "narrow") for n in names):
            raise ValueError("all_blocks has no effect without a structured variant")
        if not any(name.endswith("+guide") for name in names):
            for name, default in (("guide_frac", 0.5), ("guide_schedule", "cosine")):
                if getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect without a +guide variant")
        object.__setattr__(self, "variants", names)


@dataclass(frozen=True)
class PlannedRun:
    """One run: its variant's name, its configuration, and its cost by the accounting."""

    variant: str
    config: TrainConfig
    flops: int
    params: int
    ffn_params_frac: float
    nominal_frac: float


def variant_name(text: str) -> str:
    """The canonical text of a variant.

    Raises: ValueError for an unknown variant or structure, with the nearest known one.
    """
    base, plus, extra = text.strip().partition("+")
    if plus and extra.strip() != "guide":
        raise ValueError(f"variant {text!r}: only +guide may follow a structure, got +{extra}")
    if base in ("dense", "narrow"):
        if plus:
            raise ValueError(f"variant {text!r}: {base} has no structured layer to guide")
        return base
    try:
        structure = parse_structure(base)
    except ValueError as error:
        near = suggest(base, ("dense", "narrow"))
        raise ValueError(f"variant {text!r}{near}: {error}") from None
    return repr(structure) + ("+guide" if plus else "")


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


def plan_runs(config: CompareConfig) -> list[PlannedRun]:
    """Every run with its number of steps, which is the largest within the budget.

    Raises: ValueError if a variant does not fit the model, or gets no step.
    """
    base = config.train.replace(structure=None, rules=None, guide=False, ffn_width=None)
    tokens_per_step, dense = 0, None
    runs = []
    for variant in ["dense", *config.variants]:
        changes = _changes(variant, config)
        resolved, _, hf_config = resolve(base.replace(**changes))
        cost = _cost(resolved, hf_config)
        tokens_per_step = base.batch_size * (resolved.context or 0)
        if dense is None:
            dense = cost
            budget = base.steps * tokens_per_step * dense.training_flops
            continue
        steps = base.steps
        if config.equal == "flops":
            steps = _affordable(budget // tokens_per_step, cost, resolved)
        if steps < 1:
            raise ValueError(f"{variant}: the budget of {base.steps} dense steps pays for no step of it")
        every = max(1, round(base.eval_every * steps / base.steps))
        for seed in config.seeds:
            folder = Path(config.out) / "runs" / f"{_slug(variant)}-seed{seed}"
            made = base.replace(**changes, steps=steps, eval_every=every, seed=seed, out=str(folder))
            per_token = steps * cost.training_flops + made.guided_steps * cost.guide_flops
            runs.append(
                PlannedRun(
                    variant,
                    made,
                    per_token * tokens_per_step,
                    cost.params,
                    cost.ffn_weights / dense.ffn_weights,
                    cost.nominal_frac or cost.ffn_weights / dense.ffn_weights,
                )
            )
    return runs


@dataclass(frozen=True)
class _Cost:
    """Per token: training FLOPs without the guide, and what the guide adds. Weights without biases."""

    training_flops: int
    guide_flops: int
    params: int
    ffn_weights: int
    nominal_frac: float | None  # parameters of structured layers, of the dense ones they replace


def _cost(config: TrainConfig, hf_config: Any) -> _Cost:
    from lamella.hub import account, build_model, is_ffn
    from lamella.nn import linear_layers

    model = build_model(hf_config, device="meta")
    structure_(model, config)
    counted = account(model, config.context, activations=False)
    layers = structured_layers(model).values()
    replaced = sum(layer.in_features * layer.out_features for layer in layers)
    weights = 0
    for name, layer in linear_layers(model).items():
        if is_ffn(name):
            weights += sum(p.numel() for n, p in layer.named_parameters() if n != "bias")
    return _Cost(
        counted.training_flops,
        counted.guided_training_flops - counted.training_flops,
        counted.parameters,
        weights,
        sum(layer.plan.num_params for layer in layers) / replaced if replaced else None,
    )


def _affordable(flops_per_step_token: int, cost: _Cost, config: TrainConfig) -> int:
    """The most steps whose FLOPs, guided ones included, stay within the budget (FLOPs / tokens per step)."""
    steps = flops_per_step_token // cost.training_flops

    def spent(steps: int) -> int:
        return steps * cost.training_flops + config.replace(steps=steps).guided_steps * cost.guide_flops

    while steps > 0 and spent(steps) > flops_per_step_token:
        steps -= max(1, (spent(steps) - flops_per_step_token) // (cost.training_flops + cost.guide_flops))
    return steps


def _changes(variant: str, config: CompareConfig) -> dict[str, Any]:
    from lamella.hub import load_config

    if variant == "dense":
        return {}
    if variant == "narrow":
        return {"ffn_width": load_config(config.train.model).hidden_size}
    structure, _, guide = variant.partition("+")
    changes: dict[str, Any] = {"structure": structure, "all_blocks": config.all_blocks}
    if guide:
        changes |= {
            "guide": True,
            "guide_frac": config.guide_frac,
            "guide_schedule": config.guide_schedule,
        }
    return changes


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


def _slug(variant: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", variant).strip("-")

"""What a comparison runs: its variants, and how many steps each one's budget pays for."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lamella.nn import structured_layers
from lamella.nn.guide import Schedule
from lamella.structures import parse_structure, suggest
from lamella.train.config import TrainConfig
from lamella.train.setup import resolve, structure_

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


def _slug(variant: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", variant).strip("-")

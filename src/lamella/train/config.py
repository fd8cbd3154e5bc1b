"""TrainConfig: everything a training run depends on."""

import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from lamella.nn.guide import SCHEDULES, Schedule
from lamella.structures import Structure, parse_structure, suggest

Precision = Literal["auto", "bf16", "fp32"]
PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train, on what, how, and where to.

    Args:
        out: The run folder; made where there is none.
        model: A preset (tiny, small, s, m, l, xl), a Hugging Face model directory, or a config.json file.
        structure: The structure of the feed-forward layers of all blocks but the first, e.g. "LowRank(rank=64)".
        all_blocks: Let `structure` cover the first block too.
        rules: Layer name pattern -> structure ("None" leaves a layer dense), first match wins; instead of `structure`.
        zero_last: Name patterns of structured layers whose last factor starts at zero.
        ffn_width: The width of the feed-forward layers of all blocks, instead of the model's own.
        guide: Train self-guided: a dense weight helps each structured layer at first and fades.
        guide_frac: The part of the steps that is guided.
        guide_schedule: How the guide fades: cosine or linear.
        data: "austen" (in the package) or a dataset folder made by `lamella prepare`.
        tokenizer: For austen: "char", "byte" or "bpe-N"; a dataset folder has its own.
        context: Tokens per sequence; by default as many as the model has positions.
        steps: Optimiser steps.
        batch_size: Sequences per step.
        accumulate: Micro-batches per step; divides batch_size.
        lr: The peak learning rate (of embeddings and norms; other parameters have multiples of it).
        min_lr_frac: The learning rate at the end, as a part of the peak.
        warmup_frac: The part of the steps with a rising learning rate.
        weight_decay: AdamW's weight decay of matrices.
        betas: AdamW's betas.
        clip: The largest gradient norm; larger gradients are scaled down.
        base_width: The hidden size that `lr` was tuned at; layers of a wider model get a lower learning rate.
        eval_every: Steps between evaluations on the validation split.
        eval_tokens: Validation tokens in each of these.
        final_eval_tokens: Tokens of each split in the evaluation at the end; by default all.
        checkpoint_every: Steps between checkpoints.
        keep_checkpoints: How many checkpoints stay.
        log_every: Steps between lines in metrics.jsonl.
        seed: Decides the initial weights and the order of the data.
        precision: bf16 (autocast), fp32, or auto: bf16 where the machine is fast at it.
        threads: CPU threads; by default as many as torch takes.
        device: cpu, cuda, cuda:N, or auto.

    Raises: ValueError for values out of range, and for settings that would have no effect.
    """

    out: str
    model: str = "tiny"
    structure: str | None = None
    all_blocks: bool = False
    rules: dict[str, str] | None = None
    zero_last: list[str] = field(default_factory=list)
    ffn_width: int | None = None
    guide: bool = False
    guide_frac: float = 0.5
    guide_schedule: Schedule = "cosine"
    data: str = "austen"
    tokenizer: str | None = None
    context: int | None = None
    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 3e-3
    min_lr_frac: float = 0.1
    warmup_frac: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    base_width: int | None = None
    eval_every: int = 100
    eval_tokens: int = 16384
    final_eval_tokens: int | None = None
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    log_every: int = 10
    seed: int = 0
    precision: Precision = "auto"
    threads: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check(
                name, value := getattr(self, name), _is_int(value) and value > 0, "a positive whole number"
            )
        for name in _OPTIONAL_COUNTS:
            value = getattr(self, name)
            _check(name, value, value is None or (_is_int(value) and value > 0), "a positive whole number")
        for name, (right, holds) in _NUMBERS.items():
            value = getattr(self, name)
            _check(name, value, _is_number(value) and holds(value), right)
        _check("seed", self.seed, _is_int(self.seed) and 0 <= self.seed < 2**63, "a whole number from 0 on")
        betas = tuple(self.betas)
        _check(
            "betas",
            betas,
            len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas),
            "two in [0, 1)",
        )
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "zero_last", list(self.zero_last))
        for name in ("out", "model", "data", "device"):
            _check(name, value := getattr(self, name), isinstance(value, str) and value != "", "a text")
        for name, known in (("precision", PRECISIONS), ("guide_schedule", SCHEDULES)):
            value = getattr(self, name)
            right = f"one of {', '.join(known)}{suggest(str(value), known)}"
            _check(name, value, value in known, right)
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} must divide batch_size={self.batch_size}: "
                "every micro-batch has the same number of sequences"
            )
        self._check_structures()

    def _check_structures(self) -> None:
        if self.structure is not None and self.rules is not None:
            raise ValueError("structure and rules both say which structures to use: give one of them")
        if self.structure is not None:
            object.__setattr__(self, "structure", repr(parse_structure(self.structure)))
        if self.rules is not None:
            rules = {pattern: _parse_rule(pattern, text) for pattern, text in self.rules.items()}
            if not any(rules.values()):
                raise ValueError(f"rules={self.rules!r} name no structure, so they would have no effect")
            object.__setattr__(self, "rules", {pattern: repr(s) for pattern, s in rules.items()})
        needs: list[tuple[str, bool, str, bool]] = [
            ("all_blocks", self.all_blocks, "structure", self.structure is not None),
            ("zero_last", bool(self.zero_last), "structure or rules", self.has_structures),
            ("guide", self.guide, "structure or rules", self.has_structures),
            ("guide_frac", self.guide_frac != _default("guide_frac"), "guide", self.guide),
            ("guide_schedule", self.guide_schedule != _default("guide_schedule"), "guide", self.guide),
        ]
        for name, given, needed, there in needs:
            if given and not there:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect without {needed}")

    @property
    def has_structures(self) -> bool:
        """Whether any layer is to be structured."""
        return self.structure is not None or self.rules is not None

    @property
    def guided_steps(self) -> int:
        """How many steps are guided; 0 without a guide."""
        return max(1, round(self.guide_frac * self.steps)) if self.guide else 0

    def structure_rules(self) -> dict[str, Structure | None]:
        """`rules` as structures; empty without rules."""
        return {pattern: _parse_rule(pattern, text) for pattern, text in (self.rules or {}).items()}

    def lr_fraction(self, step: int) -> float:
        """The learning rate of a step, counted from 1, as a part of the peak.

        Rises linearly to 1 at the last warm-up step, then falls along a half cosine to min_lr_frac at the last one.
        """
        warmup = round(self.warmup_frac * self.steps)
        if step <= warmup:
            return step / warmup
        progress = (step - warmup) / (self.steps - warmup)
        return self.min_lr_frac + (1 - self.min_lr_frac) * (1 + math.cos(math.pi * progress)) / 2

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """What config.yaml holds: every field but `out`, which is the folder that it lies in."""
        content = asdict(self) | {"betas": list(self.betas)}
        del content["out"]
        return content

    @classmethod
    def from_dict(cls, content: dict[str, Any], out: str) -> Self:
        """Raises: ValueError for unknown fields, with the nearest known one, or values out of range."""
        known = [f.name for f in fields(cls)]
        for name in content:
            if name not in known or name == "out":
                raise ValueError(f"unknown setting {name!r}{suggest(str(name), known)}")
        return cls(out=out, **content)

    def differences(self, stored: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """{field: (given, stored)} where this configuration differs from the content of a config.yaml.

        A field left to be chosen ("auto", or None for threads, context and tokenizer) agrees with any stored value;
        the number of threads is no part of a run's identity.
        """
        found = {}
        for name, given in self.to_dict().items():
            left_open = given in ("auto", None) and name in _CHOSEN
            if name != "threads" and not left_open and given != stored.get(name):
                found[name] = (given, stored.get(name))
        for name in stored.keys() - self.to_dict().keys():
            found[name] = (None, stored[name])
        return found

    def with_choices(self, stored: dict[str, Any]) -> Self:
        """A copy whose fields left to be chosen have the stored values."""
        chosen = {n: stored[n] for n in _CHOSEN if n in stored and getattr(self, n) in ("auto", None)}
        return self.replace(**chosen)


_CHOSEN = ("precision", "device", "threads", "context", "tokenizer")
_COUNTS = (
    "steps",
    "batch_size",
    "accumulate",
    "eval_every",
    "eval_tokens",
    "checkpoint_every",
    "keep_checkpoints",
    "log_every",
)
_OPTIONAL_COUNTS = ("final_eval_tokens", "ffn_width", "context", "base_width", "threads")
_NUMBERS = {
    "lr": ("a positive number", lambda v: v > 0),
    "clip": ("a positive number", lambda v: v > 0),
    "weight_decay": ("zero or a positive number", lambda v: v >= 0),
    "min_lr_frac": ("from 0 to 1", lambda v: 0 <= v <= 1),
    "warmup_frac": ("from 0 to below 1", lambda v: 0 <= v < 1),
    "guide_frac": ("above 0 and at most 1", lambda v: 0 < v <= 1),
}


def _check(name: str, value: Any, holds: bool, right: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: it must be {right}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_rule(pattern: str, text: str | None) -> Structure | None:
    if text is None or text.strip() == "None":
        return None
    try:
        return parse_structure(text)
    except ValueError as error:
        raise ValueError(f"rule {pattern!r}: {error}") from None


def _default(name: str) -> Any:
    default = next(f.default for f in fields(TrainConfig) if f.name == name)
    assert default is not MISSING
    return default

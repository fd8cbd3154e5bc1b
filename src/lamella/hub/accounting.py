"""What a model costs: parameters, multiply-adds, FLOPs and bytes, from its modules alone.

Conventions. One multiply-add is one multiply and one add; FLOPs = 2 x multiply-adds. Biases, norms, activation
functions and look-ups count 0. The output head counts even where its weight is tied to the embedding. Attention
counts full T^2: 2 T heads head_dim multiply-adds per token and layer for context T, causal or not. Training is
3 x forward. These are the conventions of arXiv 2407.09835, and of FlopCounterMode with eager attention.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lamella.hub.activations import activation_bytes
from lamella.hub.presets import is_ffn
from lamella.nn import StructuredLinear, linear_layers

KINDS = ("ffn", "attention", "embedding", "head", "norm", "other")
SCORES = "attention scores"


@dataclass(frozen=True)
class LayerAccount:
    """One type of layer, all its occurrences together.

    name: the module's name with layer numbers as `*`. parameters exclude guides and count a tied weight once,
    where it first occurs. multiply_adds and guide_multiply_adds are per token. activation_bytes is what autograd
    keeps of a batch of one sequence, or None where it wasn't measured.
    """

    name: str
    kind: str
    structure: str
    count: int
    parameters: int
    guide_parameters: int
    multiply_adds: int
    guide_multiply_adds: int
    weight_bytes: int
    activation_bytes: int | None


@dataclass(frozen=True)
class Account:
    """The cost of a model at one context length; the properties are totals. See `account`."""

    model: str
    context: int
    layers: tuple[LayerAccount, ...]
    dense_multiply_adds: (
        int  # of the matrices that structured layers stand for: what guides on all of them add
    )

    def _total(self, field: str, *kinds: str) -> int:
        return sum(getattr(layer, field) or 0 for layer in self.layers if not kinds or layer.kind in kinds)

    def parameters_of(self, kind: str) -> int:
        """Parameters (guides excluded) of one of the kinds ffn, attention, embedding, head, norm, other."""
        return self._total("parameters", kind)

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once, guides excluded."""
        return self._total("parameters")

    @property
    def ffn_parameters(self) -> int:
        return self.parameters_of("ffn")

    @property
    def embedding_parameters(self) -> int:
        return self.parameters_of("embedding")

    @property
    def guide_parameters(self) -> int:
        return self._total("guide_parameters")

    @property
    def multiply_adds(self) -> int:
        """Per token of a forward pass over `context` tokens, head and full T^2 attention included, guides not."""
        return self._total("multiply_adds")

    @property
    def guide_multiply_adds(self) -> int:
        """What the guides there are now add per token of a forward pass."""
        return self._total("guide_multiply_adds")

    @property
    def forward_flops(self) -> int:
        """Per token, guides included while there are any."""
        return 2 * (self.multiply_adds + self.guide_multiply_adds)

    @property
    def training_flops(self) -> int:
        """Per token: 3 x forward, guides included while there are any."""
        return 3 * self.forward_flops

    @property
    def guided_training_flops(self) -> int:
        """Per token of a step with all structured layers guided, whether or not they are now."""
        return 6 * (self.multiply_adds + self.dense_multiply_adds)

    @property
    def prefill_flops(self) -> int:
        """Per token of reading a prompt of `context` tokens: the head runs for its last token only."""
        head = self._total("multiply_adds", "head")
        return self.forward_flops - 2 * head + 2 * head // self.context

    @property
    def decode_flops(self) -> int:
        """For one new token that attends to `context` tokens with a cache."""
        return self.forward_flops

    @property
    def weight_bytes(self) -> int:
        return self._total("weight_bytes")

    @property
    def activation_bytes(self) -> int | None:
        """Kept for the backward pass of one sequence; None if it wasn't measured."""
        measured = [layer.activation_bytes for layer in self.layers if layer.activation_bytes is not None]
        return sum(measured) if measured else None

    def to_json(self) -> dict[str, Any]:
        """Totals and layers as plain data."""
        totals = {
            name: getattr(self, name)
            for name, member in vars(Account).items()
            if isinstance(member, property)
        }
        return {
            "model": self.model,
            "context": self.context,
            **totals,
            "dense_multiply_adds": self.dense_multiply_adds,
            "parameters_by_kind": {kind: self.parameters_of(kind) for kind in KINDS},
            "layers": [asdict(layer) for layer in self.layers],
        }


def account(model: nn.Module, context: int | None = None, activations: bool = True) -> Account:
    """Count a model, on any device, meta included; nothing is computed and the model is not changed.

    context: tokens in a sequence, by default the longest the model's config allows (at least 1).
    activations: also run a forward pass of fake tensors, to measure what autograd keeps.

    Counted are nn.Linear, GPT-2's Conv1D, StructuredLinear and attention scores; convolutions and mixtures'
    stacked experts have their parameters counted but no multiply-adds.
    """
    config = getattr(model, "config", None)
    if context is None:
        context = getattr(config, "max_position_embeddings", None) or 1
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ValueError(f"context must be a positive number of tokens, got {context!r}")
    linears = linear_layers(model)
    head = _head_name(model)
    kept = activation_bytes(model, context) if activations and isinstance(model, PreTrainedModel) else None
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    seen: set[int] = set()
    dense = 0
    for name, module in model.named_modules():
        layer = linears.get(name)
        structured = isinstance(layer, StructuredLinear)
        own = _own_parameters(module, structured)
        if not own and layer is None and not (kept and kept.get(name)):
            continue
        key = (_typed(name), repr(module.structure) if isinstance(module, StructuredLinear) else "")
        row = rows.setdefault(key, {"kind": _kind(name, module, name == head), **defaultdict(int)})
        new = {n: p for n, p in own.items() if id(p) not in seen}
        seen |= {id(p) for p in new.values()}
        _add(row, count=1)
        _add(row, parameters=sum(p.numel() for n, p in new.items() if n != "guide"))
        _add(row, guide_parameters=sum(p.numel() for n, p in new.items() if n == "guide"))
        _add(row, weight_bytes=sum(p.numel() * p.element_size() for p in new.values()))
        if isinstance(layer, StructuredLinear):
            full = layer.in_features * layer.out_features if layer.plan.num_factors > 1 else 0
            dense += full
            _add(row, multiply_adds=layer.plan.multiply_adds)
            _add(row, guide_multiply_adds=full if layer.guide is not None else 0)
        elif layer is not None:
            _add(row, multiply_adds=layer.get_parameter("weight").numel())
        if kept is not None:
            _add(row, activation_bytes=kept.get(name, 0))
    scores = _score_multiply_adds(config, context)
    if scores:
        rows[SCORES, ""] = {"kind": "attention", "count": _layers(config), "multiply_adds": scores}
    return Account(type(model).__name__, context, tuple(_layer(*item) for item in rows.items()), dense)


def fixed_flop_ratio(dense: Account, structured: Account) -> float:
    """The fraction of training steps to guide so that training costs the dense model's FLOPs (arXiv 2407.09835).

    The first `ratio` of the tokens is guided, on average half of the time, and trained on once more at the end:
    ratio = (F_dense - F_structured) / (F_structured + F_guide / 2), F per token.
    """
    unguided = 6 * structured.multiply_adds
    return (6 * dense.multiply_adds - unguided) / (unguided + 6 * structured.dense_multiply_adds / 2)


def format_account(account: Account) -> str:
    """A plain-text table of the layer types, and the totals below."""
    header = ("layer", "structure", "count", "parameters", "multiply-adds", "weight MB", "activation MB")
    lines: list[tuple[str, ...]] = [header]
    for row in account.layers:
        kept = "-" if row.activation_bytes is None else f"{row.activation_bytes / 1e6:,.1f}"
        counts = (
            f"{row.count}",
            f"{row.parameters:,}",
            f"{row.multiply_adds:,}",
            f"{row.weight_bytes / 1e6:,.1f}",
        )
        lines.append((row.name, row.structure, *counts, kept))
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    table = [
        "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    kinds = ", ".join(
        f"{kind} {account.parameters_of(kind) / 1e6:,.1f}M" for kind in KINDS if account.parameters_of(kind)
    )
    totals = [
        f"parameters             {account.parameters:,} ({kinds})",
        f"training FLOPs/token   {account.training_flops:.4g} at context {account.context}",
        f"prefill FLOPs/token    {account.prefill_flops:.4g}",
        f"decode FLOPs/token     {account.decode_flops:.4g}",
        f"weights                {account.weight_bytes / 1e6:,.1f} MB",
    ]
    if account.guide_parameters:
        totals.insert(1, f"guides (while guided)  {account.guide_parameters:,}")
    if account.activation_bytes is not None:
        totals.append(
            f"activations            {account.activation_bytes / 1e6:,.1f} MB for one sequence in training"
        )
    return "\n".join([*(line.rstrip() for line in table), "", *totals])


def _add(row: dict[str, Any], **amounts: int) -> None:
    for name, amount in amounts.items():
        row[name] = row.get(name, 0) + amount


def _layer(key: tuple[str, str], row: Mapping[str, Any]) -> LayerAccount:
    name, structure = key
    zero = dict.fromkeys(
        ("parameters", "guide_parameters", "multiply_adds", "guide_multiply_adds", "weight_bytes"), 0
    )
    return LayerAccount(**{"name": name, "structure": structure, "activation_bytes": None, **zero, **row})


def _own_parameters(module: nn.Module, structured: bool) -> dict[str, nn.Parameter]:
    if isinstance(module, nn.ParameterList) and structured is False:
        return {}  # counted with the layer that holds it
    return dict(module.named_parameters(recurse=structured))


def _typed(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) or "(model)"


def _head_name(model: nn.Module) -> str | None:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return next((name for name, module in model.named_modules() if module is head), None) if head else None


def _kind(name: str, module: nn.Module, is_head: bool) -> str:
    if is_head:
        return "head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if "norm" in type(module).__name__.lower():
        return "norm"
    parts = name.lower().split(".")
    if any("attn" in part or "attention" in part for part in parts):
        return "attention"
    if is_ffn(name) or parts[-1] in ("mlp", "ffn", "intermediate", "output"):
        return "ffn"
    return "head" if parts[-1] in ("classifier", "score", "lm_head") else "other"


def _layers(config: Any) -> int:
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def _score_multiply_adds(config: Any, context: int) -> int:
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return 0
    head_dim = getattr(config, "head_dim", None) or width // heads
    return 2 * context * heads * head_dim * _layers(config)

"""Structured linear layers for PyTorch."""

from lamella._version import __version__
from lamella.nn import Guide, StructuredLinear, guide_, linear_layers, merge_, replace_, structured_layers
from lamella.optim import format_groups, param_groups
from lamella.structures import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Kronecker,
    LowRank,
    Monarch,
    Plan,
    Structure,
    TensorTrain,
    parse_structure,
)

__all__ = [
    "BTT",
    "BlockDense",
    "BlockShuffle",
    "Dense",
    "Einsum",
    "Guide",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Plan",
    "Structure",
    "StructuredLinear",
    "TensorTrain",
    "__version__",
    "format_groups",
    "guide_",
    "linear_layers",
    "merge_",
    "param_groups",
    "parse_structure",
    "replace_",
    "structured_layers",
]

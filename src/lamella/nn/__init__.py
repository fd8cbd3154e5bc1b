"""Modules and in-place verbs on models."""

from lamella.nn.guide import Guide, guide_
from lamella.nn.linear import StructuredLinear
from lamella.nn.listeners import add_listener
from lamella.nn.replace import merge_, replace_, weight_of
from lamella.nn.rules import is_conv1d, linear_layers, match_rules, structured_layers

__all__ = [
    "Guide",
    "StructuredLinear",
    "add_listener",
    "guide_",
    "is_conv1d",
    "linear_layers",
    "match_rules",
    "merge_",
    "replace_",
    "structured_layers",
    "weight_of",
]

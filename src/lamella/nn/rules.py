"""Which layers a rule names: fnmatch patterns on full module names, first match wins."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from lamella.nn.linear import StructuredLinear

T = TypeVar("T")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's transposed linear layer, weight (in, out), without importing transformers."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that a rule can name: nn.Linear, GPT-2's Conv1D and StructuredLinear, by full name.

    Subclasses of nn.Linear are left out: their forward may be another function.
    """
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and (type(module) is nn.Linear or is_conv1d(module) or isinstance(module, StructuredLinear))
    }


def structured_layers(model: nn.Module) -> dict[str, StructuredLinear]:
    """The structured layers of a model by full name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)}


def match_rules(names: Iterable[str], rules: Mapping[str, T], what: str) -> dict[str, T]:
    """{name: value of the first pattern that matches it}.

    Raises: ValueError if a pattern decides for no name; the message lists the names there are.
    """
    names = list(names)
    if not rules:
        raise ValueError(f"no rules are given, so no {what} is named. There are: {_listed(names)}")
    chosen: dict[str, str] = {}
    for name in names:
        pattern = next((p for p in rules if fnmatchcase(name, p)), None)
        if pattern is not None:
            chosen[name] = pattern
    for pattern in rules:
        if pattern in chosen.values():
            continue
        if any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"rule {pattern!r} has no effect: earlier rules decide for every {what} it matches"
            )
        raise ValueError(f"rule {pattern!r} matches no {what}. There are: {_listed(names)}")
    return {name: rules[pattern] for name, pattern in chosen.items()}


def match_patterns(names: Iterable[str], patterns: Iterable[str] | str, what: str) -> list[str]:
    """The names that any of the patterns matches; a string is one pattern. Raises: as match_rules."""
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    return list(match_rules(names, dict.fromkeys(patterns, True), what))


def _listed(names: list[str], most: int = 24) -> str:
    if not names:
        return "none"
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

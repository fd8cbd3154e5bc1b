"""Optimiser groups: learning rates from factor fans (structure-aware muP for Adam-type optimisers)."""

import math
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from lamella.nn import StructuredLinear, is_conv1d


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    base_width: int | None = None,
    width: int | None = None,
) -> list[dict[str, Any]]:
    """Groups for any torch optimiser, one for each distinct (learning rate, weight decay).

    A factor: lr * (base_width / width) * (in_features / fan_in) / number of factors. Dense linear layers and guides:
    lr * (base_width / width). Embeddings (and a head tied to one), norms, biases, scalars: lr. Norms, biases and
    scalars do not decay. Frozen parameters are left out; a shared parameter is listed once.

    width: the model's hidden size, read from `model.config.hidden_size` when not given; only used with base_width,
    and without base_width there is no width rule.

    Raises: ValueError if lr or weight_decay is out of range, width is needed and unknown, or nothing trains.
    """
    if not _is_number(lr) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if not _is_number(weight_decay) or not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be zero or a positive number, got {weight_decay!r}")
    ratio = _width_ratio(model, base_width, width)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    seen: set[int] = set()
    for parameter, role, multiplier, decays in _roles(model, ratio):
        if id(parameter) in seen or not parameter.requires_grad:
            continue
        seen.add(id(parameter))
        group = groups.setdefault(
            (multiplier, decays),
            {
                "params": [],
                "lr": lr * multiplier,
                "weight_decay": weight_decay if decays else 0.0,
                "roles": [],
            },
        )
        group["params"].append(parameter)
        if role not in group["roles"]:
            group["roles"].append(role)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    return list(groups.values())


def format_groups(groups: list[dict[str, Any]]) -> str:
    """The groups as a text table: learning rate, weight decay, tensors, parameters, roles."""
    rows = [("lr", "decay", "tensors", "parameters", "what")]
    for group in groups:
        count = sum(p.numel() for p in group["params"])
        rows.append(
            (
                f"{group['lr']:.3g}",
                f"{group['weight_decay']:g}",
                str(len(group["params"])),
                f"{count:,}",
                "; ".join(group.get("roles", [])),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    return "\n".join(
        "  ".join([*(cell.rjust(w) for cell, w in zip(row[:4], widths, strict=True)), row[4]]) for row in rows
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _roles(model: nn.Module, ratio: float) -> Iterator[tuple[nn.Parameter, str, float, bool]]:
    """(parameter, what it is, learning-rate multiplier, whether it decays); embeddings first, so ties follow them."""
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, nn.Embedding):
            yield cast(nn.Parameter, module.weight), "embeddings", 1.0, True
    for module in modules:
        if isinstance(module, StructuredLinear):
            plan = module.plan
            for factor, (fan_in, _) in zip(module.factors, plan.fans, strict=True):
                multiplier = ratio * plan.in_features / fan_in / plan.num_factors
                yield (
                    cast(nn.Parameter, factor),
                    f"factors of fan-in {fan_in} in {plan.in_features} -> *",
                    multiplier,
                    True,
                )
        elif isinstance(module, nn.Linear) or is_conv1d(module):
            yield module.get_parameter("weight"), "dense layers", ratio, True
    for module in modules:
        if isinstance(module, StructuredLinear) and module.guide is not None:
            yield (
                module.guide,
                "guides",
                ratio,
                True,
            )  # last, so that groups without guides are made in the same order
    for module in modules:
        is_norm = "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False):
            decays = parameter.ndim >= 2 and not is_norm
            yield parameter, "other matrices" if decays else "norms, biases, scalars", 1.0, decays


def _width_ratio(model: nn.Module, base_width: int | None, width: int | None) -> float:
    if base_width is None:
        if width is not None:
            raise ValueError("width has no effect without base_width")
        return 1.0
    if width is None:
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", None) or config
        width = getattr(config, "hidden_size", None)
    if width is None:
        raise ValueError(f"{type(model).__name__} has no config.hidden_size: give width= with base_width=")
    for name, value in (("base_width", base_width), ("width", width)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return base_width / width

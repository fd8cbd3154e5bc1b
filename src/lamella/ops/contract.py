"""y = W x through a plan, in plain torch, never forming W.

Each step is one (batched) matrix product of the running activation with a stored factor. The activation is kept
as a tensor whose axes are (tokens, plan indices) in some order; permuting is free, and a copy happens only where
no strided view can be handed to the product.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lamella.structures.plan import Plan, Step

TOKENS = ""  # the axis of tokens; no index has this name


def apply(plan: Plan, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """W x for x of shape (..., in_features); returns (..., out_features).

    factors: one (batch, contracted, new) tensor for each factor of the plan, as `plan.factor_shapes` gives.
    """
    lead = x.shape[:-1]
    tokens = math.prod(lead)
    z = _resized(x.reshape(tokens, plan.in_features), plan.padded_in)
    axes = (TOKENS, *plan.x_layout)
    z = z.view([tokens, *(plan.sizes[n] for n in plan.x_layout)]) if len(axes) > 2 else z
    for step in plan.steps:
        z, axes = _contract(plan, step, z, axes, tokens, factors[step.factor])
    y = z.permute([axes.index(n) for n in (TOKENS, *plan.y_layout)]).reshape(tokens, plan.padded_out)
    return _resized(y, plan.out_features).reshape(*lead, plan.out_features)


def dense(plan: Plan, factors: Sequence[Tensor]) -> Tensor:
    """The matrix W (out_features, in_features) that the factors stand for, contiguous and differentiable."""
    eye = torch.eye(plan.in_features, dtype=factors[0].dtype, device=factors[0].device)
    return apply(plan, eye, factors).T.contiguous()


def _contract(
    plan: Plan, step: Step, z: Tensor, axes: tuple[str, ...], tokens: int, factor: Tensor
) -> tuple[Tensor, tuple[str, ...]]:
    rows = tuple(n for n in axes if n == TOKENS or n in step.spectators)
    batch, contracted, _ = factor.shape
    z = z.permute([axes.index(n) for n in step.batch + rows + step.contracted])
    count = tokens * plan.volume(step.spectators)
    # squeezed, a lone block runs as mm on one matrix; else bmm, which takes strided views
    rhs, shape = (
        (factor.squeeze(0), (count, contracted)) if batch == 1 else (factor, (batch, count, contracted))
    )
    z = z.reshape(shape) @ rhs  # (batch, rows, new)
    axes = step.batch + rows + step.new
    return z.view([tokens if n == TOKENS else plan.sizes[n] for n in axes]), axes


def _resized(x: Tensor, width: int) -> Tensor:
    """x (tokens, n) zero-extended or cut at its edge to `width` columns."""
    have = x.shape[-1]
    if width > have:
        return F.pad(x, (0, width - have))
    return x[:, :width] if width < have else x

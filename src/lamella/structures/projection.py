"""The nearest member of a structure to a dense matrix (Frobenius norm).

For an unpadded two-factor plan the entries of W split into disjoint blocks, one for each value of the indices that
both factors hold. Rearranged as (indices of factor 0 alone) x (indices of factor 1 alone), the truncated SVD
of each block is optimal: truncated SVD for LowRank, Van Loan-Pitsianis for Kronecker, block-wise for Monarch and BTT.
"""

import torch
from torch import Tensor

from lamella.structures.plan import Plan

FILL_SWEEPS = 200
FILL_TOLERANCE = 1e-7


def project(plan: Plan, weight: Tensor) -> tuple[Tensor, ...]:
    """Factors of the member of `plan` nearest to `weight` (out, in), one (batch, contracted, new) tensor each.

    Computed and returned in float32, or float64 for a float64 weight. A padded plan has unseen entries: they
    are filled with the current product, projected, and filled again; the error never rises, but a member is
    recovered only to a tolerance.

    Raises: ValueError for a wrong shape, a weight that is not finite, or more than two factors.
    """
    if tuple(weight.shape) != (plan.out_features, plan.in_features):
        raise ValueError(
            f"expected a weight of shape {(plan.out_features, plan.in_features)}, got {tuple(weight.shape)}"
        )
    if plan.num_factors > 2:
        raise ValueError(f"no closed-form projection onto a plan of {plan.num_factors} factors")
    weight = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not torch.isfinite(weight).all():
        raise ValueError("the weight to project holds NaN or infinite values")
    if not plan.is_padded:
        return project_padded(plan, weight)
    return _project_with_unseen(plan, weight)


def project_padded(plan: Plan, weight: Tensor) -> tuple[Tensor, ...]:
    """As `project`, for a weight of the plan's own padded sizes (padded_out, padded_in)."""
    if plan.num_factors == 1:
        return (_stored(plan, 0, weight, plan.y_layout + plan.x_layout),)
    holders = {index.name: index.holders for index in plan.indices}
    entries = plan.y_layout + plan.x_layout
    shared = tuple(n for n in entries if holders[n] >= {0, 1})
    first = tuple(n for n in entries if 1 not in holders[n])
    second = tuple(n for n in entries if 0 not in holders[n])
    inner = tuple(n for n in plan.sizes if not holders[n] & {"x", "y"})
    rho = plan.volume(inner)

    blocks = _arrange(plan, weight, entries, shared + first + second)
    blocks = blocks.reshape(plan.volume(shared), plan.volume(first), plan.volume(second))
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)  # s: (blocks, min(first, second))
    root = s[:, None, :rho].sqrt()
    left = _widened(u[:, :, :rho] * root, rho)  # (blocks, first, rho)
    right = _widened(vh[:, :rho].mT * root, rho)  # (blocks, second, rho)
    return (
        _stored(plan, 0, left, shared + first + inner),
        _stored(plan, 1, right, shared + second + inner),
    )


def _project_with_unseen(plan: Plan, weight: Tensor) -> tuple[Tensor, ...]:
    seen_out = min(plan.out_features, plan.padded_out)
    seen_in = min(plan.in_features, plan.padded_in)
    full = weight.new_zeros(plan.padded_out, plan.padded_in)
    last = float("inf")
    for _ in range(FILL_SWEEPS):
        full[:seen_out, :seen_in] = weight[:seen_out, :seen_in]
        factors = project_padded(plan, full)
        product = _product(plan, factors)
        error = (product - full)[:seen_out, :seen_in].norm().item()
        full = product
        if last - error <= FILL_TOLERANCE * weight.norm().item():
            break
        last = error
    return factors


def _product(plan: Plan, factors: tuple[Tensor, ...]) -> Tensor:
    """The (padded_out, padded_in) matrix of one- or two-factor plans, by one einsum over the index names."""
    letters = {name: chr(ord("a") + k) for k, name in enumerate(plan.sizes)}
    terms, shaped = [], []
    for factor, tensor in enumerate(factors):
        names = _storage(plan, factor)
        terms.append("".join(letters[n] for n in names))
        shaped.append(tensor.reshape([plan.sizes[n] for n in names]))
    result = "".join(letters[n] for n in plan.y_layout + plan.x_layout)
    product = torch.einsum(f"{','.join(terms)}->{result}", *shaped)
    return product.reshape(plan.padded_out, plan.padded_in)


def _storage(plan: Plan, factor: int) -> tuple[str, ...]:
    step = next(s for s in plan.steps if s.factor == factor)
    return step.batch + step.contracted + step.new


def _stored(plan: Plan, factor: int, tensor: Tensor, names: tuple[str, ...]) -> Tensor:
    arranged = _arrange(plan, tensor, names, _storage(plan, factor))
    return arranged.reshape(plan.factor_shapes[factor]).contiguous()


def _arrange(plan: Plan, tensor: Tensor, names: tuple[str, ...], wanted: tuple[str, ...]) -> Tensor:
    shaped = tensor.reshape([plan.sizes[n] for n in names])
    return shaped.permute([names.index(n) for n in wanted])


def _widened(tensor: Tensor, rho: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, rho - tensor.shape[-1]))

"""y = W x through a plan equals the matrix written the slow way, costs what is declared, and never holds W."""

import math
from typing import Any

import pytest
import torch
from cases import CASES, PADDED, Case, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lamella import ops
from lamella.structures import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Kronecker,
    LowRank,
    Structure,
    TensorTrain,
)

SHAPES = [(), (1,), (2,), (2, 3), (0,), (2, 0, 3)]


def test_forward_is_the_independent_dense_matrix(case: Case) -> None:
    factors = case.factors()
    x = torch.randn(5, case.in_features, dtype=torch.float64)
    torch.testing.assert_close(ops.apply(case.plan, x, factors), x @ case.dense(factors).T)


def test_dense_is_the_independent_matrix_contiguous_and_differentiable(case: Case) -> None:
    factors = [f.requires_grad_() for f in case.factors()]
    ours, theirs = ops.dense(case.plan, factors), case.dense(factors)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous()
    direction = torch.randn_like(ours)
    gradients = torch.autograd.grad((ours * direction).sum(), factors)
    expected = torch.autograd.grad((theirs * direction).sum(), factors)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_batch_shape_works(case: Case, shape: tuple[int, ...]) -> None:
    factors = [f.requires_grad_() for f in case.factors()]
    x = torch.randn(*shape, case.in_features, dtype=torch.float64, requires_grad=True)
    y = ops.apply(case.plan, x, factors)
    assert y.shape == (*shape, case.out_features)
    torch.testing.assert_close(y, x @ case.dense(factors).T)
    y.sum().backward()
    assert x.grad is not None
    assert all(f.grad is not None and torch.isfinite(f.grad).all() for f in factors)


def test_non_contiguous_and_expanded_inputs_work(case: Case) -> None:
    factors, n = case.factors(), case.in_features
    weight = case.dense(factors)
    inputs = {
        "transposed": torch.randn(n, 4, dtype=torch.float64).T,
        "strided": torch.randn(4, 2 * n, dtype=torch.float64)[:, ::2],
        "sliced": torch.randn(4, n + 3, dtype=torch.float64)[:, 1 : n + 1],
        "batch swapped": torch.randn(3, 4, n, dtype=torch.float64).transpose(0, 1),
        "batch last": torch.randn(3, n, 4, dtype=torch.float64).transpose(1, 2),
        "tokens expanded": torch.randn(n, dtype=torch.float64).expand(4, n),
        "features expanded": torch.randn(4, 1, dtype=torch.float64).expand(4, n),
        "all expanded": torch.randn((), dtype=torch.float64).expand(4, n),
    }
    for name, x in inputs.items():
        kept = x.clone()
        torch.testing.assert_close(
            ops.apply(case.plan, x, factors), x @ weight.T, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(x, kept), f"{name}: the input was written to"


def test_gradients_and_second_gradients_are_exact(case: Case) -> None:
    x = torch.randn(2, case.in_features, dtype=torch.float64, requires_grad=True)
    factors = [f.requires_grad_() for f in case.factors()]

    def run(x: Tensor, *factors: Tensor) -> Tensor:
        return ops.apply(case.plan, x, factors)

    assert torch.autograd.gradcheck(run, (x, *factors), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *factors), fast_mode=True)


@pytest.mark.parametrize("shape", [(7,), (2, 3), ()], ids=str)
def test_declared_multiply_adds_are_half_the_counted_flops(case: Case, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, case.in_features, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        ops.apply(case.plan, x, case.factors())
    assert counter.get_total_flops() == 2 * case.plan.multiply_adds * math.prod(shape)


def test_a_backward_counts_twice_the_forward(case: Case) -> None:
    x = torch.randn(4, case.in_features, dtype=torch.float64, requires_grad=True)
    factors = [f.requires_grad_() for f in case.factors()]
    with FlopCounterMode(display=False) as counter:
        ops.apply(case.plan, x, factors).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * case.plan.multiply_adds * 4


@pytest.mark.parametrize("case", PADDED, ids=lambda c: c.id)
def test_what_is_cut_has_no_effect_and_what_is_padded_is_zero(case: Case) -> None:
    plan, factors = case.plan, case.factors()
    x = torch.randn(3, case.in_features, dtype=torch.float64)
    y = ops.apply(plan, x, factors)
    changed = x.clone()
    changed[:, plan.padded_in :] = torch.nan
    assert torch.equal(ops.apply(plan, changed, factors), y)
    assert not y[:, plan.padded_out :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_errs_at_most_twice_as_much_as_nn_linear(case: Case, dtype: torch.dtype) -> None:
    factors = [
        (f / math.sqrt(shape[1])).to(dtype)
        for f, shape in zip(case.factors(), case.plan.factor_shapes, strict=True)
    ]
    linear = torch.nn.Linear(case.in_features, case.out_features, bias=False, dtype=dtype)
    x = torch.randn(512, case.in_features).to(dtype)
    ours, plain = ops.apply(case.plan, x, factors), linear(x)
    assert ours.dtype == plain.dtype == dtype
    exact = x.double() @ case.dense([f.double() for f in factors]).T
    assert relative_error(ours, exact) <= 2 * relative_error(plain, x.double() @ linear.weight.double().T)


class Allocations(TorchDispatchMode):
    """The largest tensor any operation returns as new memory, and the copies made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.copies: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.numel())
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.copies.append(max(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
        return out


LARGE: list[Structure] = [
    LowRank(rank=8),
    BlockDense(num_blocks=4, rank=16),
    BlockShuffle(num_blocks=8),
    BTT(),
    BTT(gamma=8, phi=32),
    Kronecker(),
    TensorTrain(),
    TensorTrain(rho=2),
    Einsum(sizes={"alpha": 8, "beta": 4, "gamma": 8, "delta": 4, "epsilon": 8, "phi": 16}),
    Einsum(sizes={"alpha": 16, "gamma": 15, "epsilon": 31, "phi": 16}),
]


def test_the_large_cases_cover_every_structured_family() -> None:
    assert {type(s) for s in LARGE} | {Dense} == {
        type(c.structure) for c in CASES if type(c.structure).__module__.startswith("lamella")
    }


@pytest.mark.parametrize("structure", LARGE, ids=repr)
@pytest.mark.parametrize(("n_in", "n_out"), [(256, 512), (512, 256)])
def test_no_tensor_near_the_size_of_the_matrix_is_made_forward_or_backward(
    structure: Structure, n_in: int, n_out: int
) -> None:
    if isinstance(structure, Einsum) and n_in == 512:  # the same sizes with the roles of x and y exchanged
        swap = {
            "alpha": "epsilon",
            "epsilon": "alpha",
            "beta": "delta",
            "delta": "beta",
            "gamma": "phi",
            "phi": "gamma",
        }
        structure = Einsum(sizes={swap.get(name, name): size for name, size in structure.sizes})
    plan = structure.plan(n_in, n_out)
    factors = [torch.randn(shape, requires_grad=True) for shape in plan.factor_shapes]
    x = torch.randn(2, n_in, requires_grad=True)
    with Allocations() as seen:
        ops.apply(plan, x, factors).square().sum().backward()
    assert 0 < seen.largest <= max(plan.num_params, 2 * x.numel(), 4 * n_out)
    assert seen.largest < n_in * n_out / 3


@pytest.mark.parametrize(
    ("structure", "copies"),
    [
        (Dense(), 0),
        (LowRank(rank=16), 0),
        (BlockDense(num_blocks=4, rank=16), 1),  # (gamma tokens rho) to (tokens, gamma rho)
        (BTT(gamma=16, phi=16), 1),  # only y
        (BTT(gamma=16, phi=16, rho=2), 2),  # (phi, tokens, gamma rho), and y
        (BlockShuffle(num_blocks=4), 2),
        (BlockShuffle(num_blocks=16), 1),
    ],
    ids=repr,
)
def test_a_copy_is_made_only_where_no_strided_view_will_do(structure: Structure, copies: int) -> None:
    plan = structure.plan(256, 256)
    factors = [torch.randn(shape) for shape in plan.factor_shapes]
    for x in (torch.randn(8, 256), torch.randn(8, 300)[:, :256], torch.randn(4, 2, 256)):
        with Allocations() as seen:
            ops.apply(plan, x, factors)
        assert len(seen.copies) == copies


def test_the_first_step_of_a_block_structure_reads_x_where_it_lies() -> None:
    """A copy of x would have 64 * 256 entries; everything else here is smaller."""
    for structure in (BTT(gamma=16, phi=2), BlockDense(num_blocks=4, rank=16)):
        plan = structure.plan(256, 32)
        factors = [torch.randn(shape) for shape in plan.factor_shapes]
        with Allocations() as seen:
            ops.apply(plan, torch.randn(64, 256), factors)
        assert 64 * 256 not in seen.copies

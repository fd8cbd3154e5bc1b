"""Projection: members come back, and nothing nearer exists."""

import itertools

import pytest
import torch
from cases import PADDED, PROJECTABLE, UNPADDED, Case, ThreeCores
from torch import Tensor

from lamella.structures import BTT, BlockShuffle, Einsum, Kronecker, LowRank, TensorTrain, project

CLOSED_FORM = pytest.mark.parametrize("case", UNPADDED, ids=lambda c: c.id)


@CLOSED_FORM
def test_a_member_is_returned_unchanged(case: Case) -> None:
    weight = case.dense(case.factors())
    torch.testing.assert_close(case.dense(project(case.plan, weight)), weight)


@CLOSED_FORM
def test_projecting_twice_is_projecting_once(case: Case) -> None:
    once = case.dense(
        project(case.plan, torch.randn(case.out_features, case.in_features, dtype=torch.float64))
    )
    torch.testing.assert_close(case.dense(project(case.plan, once)), once)


@CLOSED_FORM
def test_projected_factors_are_stored_as_the_plan_says(case: Case) -> None:
    for dtype, kept in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        factors = project(case.plan, torch.randn(case.out_features, case.in_features).to(dtype))
        assert [tuple(f.shape) for f in factors] == list(case.plan.factor_shapes)
        assert all(f.dtype == kept and f.is_contiguous() and not f.requires_grad for f in factors)


@CLOSED_FORM
def test_both_factors_of_a_projection_share_its_scale(case: Case) -> None:
    """U sqrt(S) and sqrt(S) V: equal norms, so that neither factor trains faster by accident."""
    factors = project(case.plan, torch.randn(case.out_features, case.in_features, dtype=torch.float64))
    if len(factors) == 2:
        assert factors[0].norm().item() == pytest.approx(factors[1].norm().item())


def distance(case: Case, factors: list[Tensor], weight: Tensor) -> Tensor:
    return (case.dense(factors) - weight).square().sum()


@CLOSED_FORM
def test_no_factors_found_by_lbfgs_are_nearer(case: Case) -> None:
    weight = torch.randn(case.out_features, case.in_features, dtype=torch.float64)
    best = distance(case, list(project(case.plan, weight)), weight).item()
    factors = [f.requires_grad_() for f in case.factors(scale=0.5)]
    optimizer = torch.optim.LBFGS(factors, max_iter=25, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = distance(case, factors, weight)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = distance(case, factors, weight).item()
    assert best <= found * (1 + 1e-9) + 1e-12


@CLOSED_FORM
def test_small_moves_from_a_projection_never_come_nearer(case: Case) -> None:
    weight = torch.randn(case.out_features, case.in_features, dtype=torch.float64)
    factors = project(case.plan, weight)
    best = distance(case, list(factors), weight).item()
    for size, _ in itertools.product((1e-4, 1e-2), range(5)):
        moved = [f + size * torch.randn_like(f) for f in factors]
        assert distance(case, moved, weight).item() >= best - 1e-12


def truncated(matrix: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]


def case_of(structure: object, n_in: int, n_out: int) -> Case:
    return next(
        c
        for c in PROJECTABLE
        if c.structure == structure and (c.in_features, c.out_features) == (n_in, n_out)
    )


def test_low_rank_projection_is_the_truncated_svd() -> None:
    case = case_of(LowRank(rank=5), 7, 12)
    weight = torch.randn(12, 7, dtype=torch.float64)
    torch.testing.assert_close(case.dense(project(case.plan, weight)), truncated(weight, 5))


@pytest.mark.parametrize(
    ("structure", "n_in", "n_out", "rho"),
    [(Kronecker(in1=2, out1=3), 8, 9, 1), (TensorTrain(in1=2, out1=4, rho=3), 10, 12, 3)],
    ids=repr,
)
def test_kronecker_projection_is_van_loan_and_pitsianis(
    structure: object, n_in: int, n_out: int, rho: int
) -> None:
    case = case_of(structure, n_in, n_out)
    in1, out1 = structure.in1, structure.out1  # type: ignore[attr-defined]
    weight = torch.randn(n_out, n_in, dtype=torch.float64)
    # each row of the rearrangement is one out1 x in1 block of W, flattened
    places = list(itertools.product(range(n_out // out1), range(n_in // in1)))
    rows = [weight[i * out1 : (i + 1) * out1, j * in1 : (j + 1) * in1].reshape(-1) for i, j in places]
    nearest = truncated(torch.stack(rows), rho)
    expected = torch.zeros_like(weight)
    for row, (i, j) in zip(nearest, places, strict=True):
        expected[i * out1 : (i + 1) * out1, j * in1 : (j + 1) * in1] = row.reshape(out1, in1)
    torch.testing.assert_close(case.dense(project(case.plan, weight)), expected)


def test_btt_projection_truncates_each_block() -> None:
    case = case_of(BTT(gamma=4, phi=2, rho=2), 16, 6)
    weight = torch.randn(6, 16, dtype=torch.float64)
    expected = torch.zeros_like(weight)
    for p, g in itertools.product(range(2), range(4)):
        at = (slice(p * 3, (p + 1) * 3), slice(g * 4, (g + 1) * 4))
        expected[at] = truncated(weight[at], 2)
    torch.testing.assert_close(case.dense(project(case.plan, weight)), expected)


def test_block_shuffle_projection_truncates_the_interleaved_blocks() -> None:
    case = case_of(BlockShuffle(num_blocks=3), 36, 18)
    weight = torch.randn(18, 36, dtype=torch.float64)
    expected = torch.zeros_like(weight)
    for p, g in itertools.product(range(3), range(3)):
        at = (slice(p, 18, 3), slice(g * 12, (g + 1) * 12))
        expected[at] = truncated(weight[at], 2)
    torch.testing.assert_close(case.dense(project(case.plan, weight)), expected)


PADDED_TWO = [c for c in PADDED if c.plan.num_factors == 2]


def seen_error(case: Case, weight: Tensor, sweeps: int, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr("lamella.structures.projection.FILL_SWEEPS", sweeps)
    return distance(case, list(project(case.plan, weight)), weight).sqrt().item()


@pytest.mark.parametrize("case", PADDED_TWO, ids=lambda c: c.id)
def test_the_error_of_a_padded_projection_never_rises(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(case.out_features, case.in_features, dtype=torch.float64)
    errors = [seen_error(case, weight, sweeps, monkeypatch) for sweeps in (1, 2, 3, 5, 8, 13, 30, 100)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("case", PADDED_TWO, ids=lambda c: c.id)
def test_a_padded_member_is_recovered_to_a_tolerance(case: Case) -> None:
    weight = case.dense(case.factors())
    error = distance(case, list(project(case.plan, weight)), weight).sqrt()
    assert error < 2e-3 * weight.norm()


@pytest.mark.parametrize("case", PADDED_TWO, ids=lambda c: c.id)
def test_small_moves_from_a_padded_projection_hardly_come_nearer(case: Case) -> None:
    weight = torch.randn(case.out_features, case.in_features, dtype=torch.float64)
    factors = project(case.plan, weight)
    best = distance(case, list(factors), weight).item()
    for _ in range(10):
        moved = [f + 1e-3 * torch.randn_like(f) for f in factors]
        assert distance(case, moved, weight).item() >= best * (1 - 1e-5)


@pytest.mark.parametrize("case", PROJECTABLE, ids=lambda c: c.id)
def test_the_zero_matrix_projects_to_zero(case: Case) -> None:
    factors = project(case.plan, torch.zeros(case.out_features, case.in_features))
    assert all(torch.isfinite(f).all() for f in factors)
    assert not case.dense([f.double() for f in factors]).any()


def test_what_cannot_be_projected_is_refused() -> None:
    plan = LowRank(rank=2).plan(4, 6)
    with pytest.raises(ValueError, match=r"expected a weight of shape \(6, 4\), got \(4, 6\)"):
        project(plan, torch.zeros(4, 6))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinite"):
            project(plan, torch.full((6, 4), bad))
    with pytest.raises(ValueError, match="plan of 3 factors"):
        project(ThreeCores().plan(24, 30), torch.zeros(30, 24))


def test_a_weight_that_requires_grad_projects_without_a_graph() -> None:
    weight = torch.randn(6, 4, requires_grad=True)
    assert not any(
        f.requires_grad for f in project(Einsum(sizes={"alpha": 4, "epsilon": 6}).plan(4, 6), weight)
    )

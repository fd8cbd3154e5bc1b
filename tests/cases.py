"""The one list of cases that every property test runs over.

A case is a structure, a shape, and the dense weight written the slow obvious way from the stored factors:
block-diagonal matrices, permutations, Kronecker products and loops over blocks. Nothing here uses `dense()` or
a plan's steps.

Storage is (batch, contracted, new), each group in the order gamma alpha beta phi delta rho epsilon. With A first
that is A (gamma, alpha, phi delta rho) and B (phi, gamma beta rho, epsilon); with B first it is
B (gamma, beta, phi rho epsilon) and A (phi, gamma alpha rho, delta).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lamella.structures import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Index,
    Kronecker,
    LowRank,
    Plan,
    Structure,
    TensorTrain,
)

Factors = Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    structure: Structure
    in_features: int
    out_features: int
    dense: Callable[[Factors], Tensor]
    rank: int  # of generic factors, worked out by hand

    @property
    def plan(self) -> Plan:
        return self.structure.plan(self.in_features, self.out_features)

    @property
    def id(self) -> str:
        return f"{self.structure!r}:{self.in_features}->{self.out_features}"

    def factors(self, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
        return [torch.randn(shape, dtype=dtype) * scale for shape in self.plan.factor_shapes]


def low_rank(factors: Factors) -> Tensor:
    a, b = factors
    return b[0].T @ a[0].T


def one_dense(factors: Factors) -> Tensor:
    return factors[0][0].T


def block_dense(factors: Factors) -> Tensor:
    a, b = factors
    return b[0].T @ torch.block_diag(*(block.T for block in a))


def block_shuffle(b: int) -> Callable[[Factors], Tensor]:
    """Block-diagonal, shuffle (r l) -> (l r), block-diagonal, un-shuffle (l s) -> (s l)."""

    def weight(factors: Factors) -> Tensor:
        first, second = factors
        q = first.shape[2]
        rho = q // b
        # the shuffle reads position j of a block as (rho phi); storage keeps (phi rho)
        kept = [phi * rho + r for r in range(rho) for phi in range(b)]
        blocks_1 = torch.block_diag(*(block[:, kept].T for block in first))
        shuffle = torch.zeros(b * q, b * q, dtype=first.dtype)
        for i in range(b * q):
            block, position = i % b, i // b
            shuffle[block * q + position, i] = 1
        blocks_2 = torch.block_diag(*(block.T for block in second))
        per_block = second.shape[2]
        unshuffle = torch.zeros(b * per_block, b * per_block, dtype=first.dtype)
        for block in range(b):
            for s in range(per_block):
                unshuffle[s * b + block, block * per_block + s] = 1
        return unshuffle @ blocks_2 @ shuffle @ blocks_1

    return weight


def btt(gamma: int, phi: int, rho: int) -> Callable[[Factors], Tensor]:
    """Block (phi, gamma) of W is the product of an epsilon x rho and a rho x alpha matrix. A first."""

    def weight(factors: Factors) -> Tensor:
        a, b = factors
        rows = []
        for p in range(phi):
            row = []
            for g in range(gamma):
                right = a[g][:, p * rho : (p + 1) * rho]  # (alpha, rho)
                left = b[p][g * rho : (g + 1) * rho]  # (rho, epsilon)
                row.append(left.T @ right.T)
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows, dim=0)

    return weight


def kronecker(in1: int, out1: int, rho: int, a_first: bool) -> Callable[[Factors], Tensor]:
    """The sum over rho of (out/out1 x in/in1) kron (out1 x in1)."""

    def weight(factors: Factors) -> Tensor:
        a, b = factors
        total: Tensor | None = None
        for r in range(rho):
            if a_first:
                small = a[0].reshape(in1, out1, rho)[:, :, r]
                large = b[0].reshape(-1, rho, b.shape[2])[:, r]
            else:
                small = a[0].reshape(in1, rho, out1)[:, r]
                large = b[0].reshape(b.shape[1], rho, -1)[:, r]
            term = torch.kron(large.T.contiguous(), small.T.contiguous())
            total = term if total is None else total + term
        assert total is not None
        return total

    return weight


def einsum(in_features: int, out_features: int, a_first: bool, **sizes: int) -> Callable[[Factors], Tensor]:
    """Block (phi, gamma) of the padded W is the sum over rho of (epsilon x beta) kron (delta x alpha)."""
    al, be, ga, de, ep, ph, rh = (
        sizes.get(name, 1) for name in ("alpha", "beta", "gamma", "delta", "epsilon", "phi", "rho")
    )

    def weight(factors: Factors) -> Tensor:
        if a_first:
            a = factors[0].reshape(ga, al, ph, de, rh).permute(0, 2, 4, 3, 1)  # (gamma phi rho delta alpha)
            b = factors[1].reshape(ph, ga, be, rh, ep).permute(1, 0, 3, 4, 2)  # (gamma phi rho epsilon beta)
        else:
            b = factors[1].reshape(ga, be, ph, rh, ep).permute(0, 2, 3, 4, 1)
            a = factors[0].reshape(ph, ga, al, rh, de).permute(1, 0, 3, 4, 2)
        padded = torch.zeros(ph * ep * de, ga * be * al, dtype=factors[0].dtype)
        for g in range(ga):
            for p in range(ph):
                rows = slice(p * ep * de, (p + 1) * ep * de)
                columns = slice(g * be * al, (g + 1) * be * al)
                for r in range(rh):
                    padded[rows, columns] += torch.kron(b[g, p, r].contiguous(), a[g, p, r].contiguous())
        return fitted(padded, in_features, out_features)

    return weight


def fitted(padded: Tensor, in_features: int, out_features: int) -> Tensor:
    """Rows and columns beyond the edge are cut; missing ones are zero."""
    out = torch.zeros(out_features, in_features, dtype=padded.dtype)
    rows, columns = min(out_features, padded.shape[0]), min(in_features, padded.shape[1])
    out[:rows, :columns] = padded[:rows, :columns]
    return out


def plan_of(in_features: int, out_features: int, x: str, y: str, indices: dict[str, tuple[int, str]]) -> Plan:
    """A plan from {name: (size, holders)}, holders spelt like "x01"."""
    made = tuple(
        Index(name, size, frozenset(int(h) if h.isdigit() else h for h in holders))
        for name, (size, holders) in indices.items()
    )
    return Plan(in_features, out_features, made, tuple(x.split()), tuple(y.split()))


@dataclass(frozen=True, kw_only=True, repr=False)
class ThreeCores(Structure):
    """A tensor-train matrix of three cores, 4*3*2 = 24 -> 2*3*5 = 30, in three factors."""

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        return plan_of(
            in_features,
            out_features,
            "i1 i2 i3",
            "o1 o2 o3",
            {
                "i1": (4, "x0"),
                "i2": (3, "x1"),
                "i3": (2, "x2"),
                "r1": (2, "01"),
                "r2": (3, "12"),
                "o1": (2, "y0"),
                "o2": (3, "y1"),
                "o3": (5, "y2"),
            },
        )


def three_cores(factors: Factors) -> Tensor:
    g1, g2, g3 = factors  # stored (1, i1, r1 o1) (1, i2 r1, r2 o2) (1, i3 r2, o3)
    w = torch.zeros(30, 24, dtype=g1.dtype)
    for o1 in range(2):
        for o2 in range(3):
            for o3 in range(5):
                for i1 in range(4):
                    for i2 in range(3):
                        for i3 in range(2):
                            left = torch.stack([g1[0, i1, r1 * 2 + o1] for r1 in range(2)])
                            middle = torch.stack(
                                [
                                    torch.stack([g2[0, i2 * 2 + r1, r2 * 3 + o2] for r2 in range(3)])
                                    for r1 in range(2)
                                ]
                            )
                            right = torch.stack([g3[0, i3 * 3 + r2, o3] for r2 in range(3)])
                            w[(o1 * 3 + o2) * 5 + o3, (i1 * 3 + i2) * 2 + i3] = left @ middle @ right
    return w


@dataclass(frozen=True, kw_only=True, repr=False)
class ThreeBlocks(Structure):
    """Three block-diagonal factors, two blocks each, with shuffles between: 15 -> 16, zero-extended to 16 -> 16.

    x is (g h a), each of the three factors holds two of the shared indices.
    """

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        return plan_of(
            in_features,
            out_features,
            "g h a",
            "q p e",
            {
                "g": (2, "x02"),
                "h": (2, "x01"),
                "a": (4, "x0"),
                "p": (2, "y12"),
                "u": (3, "01"),
                "v": (3, "12"),
                "q": (2, "y2"),
                "e": (4, "y2"),
            },
        )


def three_blocks(factors: Factors) -> Tensor:
    # stored (g h, a, u) (1, h u, p v) with g a spectator, (p, g v, q e)
    first, second, third = factors
    w = torch.zeros(16, 16, dtype=first.dtype)
    for g in range(2):
        for h in range(2):
            for p in range(2):
                a_to_u = first[g * 2 + h]  # (a, u)
                u_to_v = second[0][h * 3 : (h + 1) * 3, p * 3 : (p + 1) * 3]
                v_to_qe = third[p][g * 3 : (g + 1) * 3]
                block = (a_to_u @ u_to_v @ v_to_qe).T.reshape(2, 4, 4)  # (q, e, a)
                columns = slice((g * 2 + h) * 4, (g * 2 + h + 1) * 4)
                for q in range(2):
                    w[(q * 2 + p) * 4 : (q * 2 + p + 1) * 4, columns] += block[q]
    return fitted(w, 15, 16)


def _einsum_case(n_in: int, n_out: int, rank: int, a_first: bool = True, **sizes: int) -> Case:
    return Case(Einsum(sizes=sizes), n_in, n_out, einsum(n_in, n_out, a_first, **sizes), rank)


CASES = [
    Case(Dense(), 6, 9, one_dense, 6),
    Case(Dense(), 9, 4, one_dense, 4),
    Case(LowRank(rank=3), 8, 8, low_rank, 3),
    Case(LowRank(rank=5), 7, 12, low_rank, 5),
    Case(LowRank(rank_frac=0.25), 12, 9, low_rank, 2),
    Case(LowRank(rank=1), 1, 5, low_rank, 1),
    Case(BlockDense(num_blocks=2, rank=4), 8, 8, block_dense, 4),
    Case(BlockDense(num_blocks=3, rank_frac=0.5), 12, 18, block_dense, 6),
    Case(BlockDense(num_blocks=4, rank=8), 16, 6, block_dense, 6),
    Case(BlockShuffle(num_blocks=2), 8, 8, block_shuffle(2), 8),
    Case(BlockShuffle(num_blocks=2), 8, 12, block_shuffle(2), 8),
    Case(BlockShuffle(num_blocks=3), 36, 18, block_shuffle(3), 18),
    Case(BlockShuffle(num_blocks=1), 4, 6, block_shuffle(1), 4),
    Case(BTT(), 9, 9, btt(3, 3, 1), 9),
    Case(BTT(gamma=2, phi=3), 8, 12, btt(2, 3, 1), 6),
    Case(BTT(gamma=4, phi=2, rho=2), 16, 6, btt(4, 2, 2), 6),
    Case(BTT(gamma=2, phi=5, rho=2), 12, 15, btt(2, 5, 2), 12),
    Case(Kronecker(), 9, 16, kronecker(3, 4, 1, True), 9),
    Case(Kronecker(in1=2, out1=3), 8, 9, kronecker(2, 3, 1, False), 6),
    Case(Kronecker(in1=4, out1=2), 8, 6, kronecker(4, 2, 1, True), 4),
    Case(TensorTrain(in1=3, out1=2, rho=2), 12, 10, kronecker(3, 2, 2, True), 10),
    Case(TensorTrain(in1=2, out1=4, rho=3), 10, 12, kronecker(2, 4, 3, False), 10),
    _einsum_case(16, 16, 16, alpha=4, beta=2, gamma=2, delta=2, epsilon=4, phi=2),
    _einsum_case(24, 16, 16, alpha=3, beta=2, gamma=4, delta=2, epsilon=4, phi=2, rho=2),
    _einsum_case(12, 18, 12, a_first=False, alpha=2, beta=3, gamma=2, delta=3, epsilon=2, phi=3, rho=2),
    _einsum_case(
        11, 17, 11, alpha=3, beta=2, gamma=2, delta=1, epsilon=6, phi=3, rho=2
    ),  # x, y zero-extended
    _einsum_case(13, 19, 12, alpha=3, beta=2, gamma=2, delta=1, epsilon=6, phi=3, rho=2),  # x, y cut
    _einsum_case(13, 17, 9, alpha=4, gamma=3, epsilon=6, phi=3),  # x cut, y zero-extended
    _einsum_case(20, 11, 11, alpha=10, gamma=2, epsilon=6, phi=2, rho=6),  # y cut, below the rank of the rest
    _einsum_case(8, 6, 1, alpha=8, epsilon=6),
    _einsum_case(5, 7, 5, a_first=False, beta=5, delta=7, rho=5),  # low rank with the roles exchanged
    Case(ThreeCores(), 24, 30, three_cores, 24),
    Case(ThreeBlocks(), 15, 16, three_blocks, 12),
]
TWO_FACTOR_CASES = [case for case in CASES if case.plan.num_factors == 2]
PROJECTABLE = [case for case in CASES if case.plan.num_factors <= 2]
UNPADDED = [case for case in PROJECTABLE if not case.plan.is_padded]
PADDED = [case for case in CASES if case.plan.is_padded]


def rank_of(matrix: Tensor) -> int:
    singular = torch.linalg.svdvals(matrix.double())
    return int((singular > singular[0] * 1e-10).sum()) if singular.numel() else 0


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def rms(tensor: Tensor) -> float:
    return math.sqrt(tensor.double().square().mean().item())


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()

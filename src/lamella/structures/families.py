"""The families of structures. Each only chooses sizes; below this file they are one code path."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from lamella.structures.plan import Plan, dense_plan, two_factor_plan
from lamella.structures.structure import Structure, _positive_int


@dataclass(frozen=True, kw_only=True, repr=False)
class Dense(Structure):
    """An unstructured matrix: one factor."""

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        return dense_plan(in_features, out_features)

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        yield self


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(Structure):
    """in -> rank -> out. Give `rank`, or `rank_frac` of min(in, out), rounded to the nearest integer."""

    rank: int | None = None
    rank_frac: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of_rank(self, self.rank, self.rank_frac)

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        smaller = min(in_features, out_features)
        rank = self.rank or max(1, round((self.rank_frac or 0) * smaller))
        if rank > smaller:
            raise self.misfit(in_features, out_features, f"rank must be at most min(in, out) = {smaller}")
        return two_factor_plan(
            in_features, out_features, {"alpha": in_features, "epsilon": out_features, "rho": rank}
        )

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        for rank in range(multiple_of, min(in_features, out_features) + 1, multiple_of):
            yield replace(self, rank=rank, rank_frac=None)


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockDense(Structure):
    """A block-diagonal in -> rank, then a dense rank -> out (arXiv 2406.16450).

    num_blocks divides in and rank. `rank_frac` is of min(in, out), rounded to the nearest multiple of num_blocks.
    """

    num_blocks: int
    rank: int | None = None
    rank_frac: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of_rank(self, self.rank, self.rank_frac)

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        b = self.num_blocks
        if in_features % b:
            valid = _listed(_divisors(in_features))
            raise self.misfit(
                in_features, out_features, f"num_blocks must divide {in_features}. Valid: {valid}."
            )
        most = b * min(in_features // b, out_features)
        rank = self.rank or min(
            most, max(b, b * round((self.rank_frac or 0) * min(in_features, out_features) / b))
        )
        if rank % b or rank > most:
            below, above = max(b, min(most, rank // b * b)), min(most, (rank // b + 1) * b)
            raise self.misfit(
                in_features,
                out_features,
                f"rank must be a multiple of num_blocks={b}, at most {most}. Nearest: {_listed({below, above})}.",
            )
        sizes = {"gamma": b, "alpha": in_features // b, "epsilon": out_features, "rho": rank // b}
        return two_factor_plan(in_features, out_features, sizes)

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        step = math.lcm(multiple_of, self.num_blocks)
        for rank in range(
            step, self.num_blocks * min(in_features // self.num_blocks, out_features) + 1, step
        ):
            yield replace(self, rank=rank, rank_frac=None)


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockShuffle(Structure):
    """Two block-diagonal factors with a shuffle between and after: a two-factor Monarch matrix.

    num_blocks divides in and out, and its square divides min(in, out).
    """

    num_blocks: int

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        b, smaller = self.num_blocks, min(in_features, out_features)
        if not _shuffles(b, in_features, out_features):
            valid = _listed(d for d in _divisors(smaller) if _shuffles(d, in_features, out_features))
            raise self.misfit(
                in_features,
                out_features,
                f"num_blocks must divide both and its square must divide {smaller}. Valid: {valid}.",
            )
        sizes = {
            "gamma": b,
            "alpha": in_features // b,
            "phi": b,
            "epsilon": out_features // b,
            "rho": smaller // b**2,
        }
        return two_factor_plan(in_features, out_features, sizes, y_layout=("epsilon", "phi", "delta"))

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        for b in _divisors(min(in_features, out_features)):
            if _shuffles(b, in_features, out_features):
                yield replace(self, num_blocks=b)


Monarch = BlockShuffle


@dataclass(frozen=True, kw_only=True, repr=False)
class BTT(Structure):
    """Block tensor-train: gamma blocks of the input, phi blocks of the output, rho paths between each pair.

    gamma divides in, phi divides out; by default the divisor nearest the square root.
    """

    gamma: int | None = None
    phi: int | None = None
    rho: int = 1

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        gamma = _divisor(self, "gamma", self.gamma, in_features, in_features, out_features)
        phi = _divisor(self, "phi", self.phi, out_features, in_features, out_features)
        sizes = {
            "gamma": gamma,
            "alpha": in_features // gamma,
            "phi": phi,
            "epsilon": out_features // phi,
            "rho": self.rho,
        }
        return _checked_rho(self, in_features, out_features, sizes)

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        yield from _rho_members(self, in_features, out_features)


@dataclass(frozen=True, kw_only=True, repr=False)
class Kronecker(Structure):
    """The Kronecker product of an (out/out1) x (in/in1) and an out1 x in1 matrix.

    in1 divides in, out1 divides out; by default the divisor nearest the square root.
    """

    in1: int | None = None
    out1: int | None = None

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        return two_factor_plan(in_features, out_features, _kronecker_sizes(self, in_features, out_features))

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        raise ValueError(
            "Kronecker has no knob to meet a budget with; TensorTrain(rho=...) is the sum of rho Kronecker products"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorTrain(Structure):
    """A two-core tensor-train matrix: the sum of rho Kronecker products."""

    in1: int | None = None
    out1: int | None = None
    rho: int = 1

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        sizes = _kronecker_sizes(self, in_features, out_features) | {"rho": self.rho}
        return _checked_rho(self, in_features, out_features, sizes)

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        yield from _rho_members(self, in_features, out_features)


PADDING_TOLERANCE = 0.15  # as in the einsum paper's public code


@dataclass(frozen=True, kw_only=True, repr=False)
class Einsum(Structure):
    """Any two-factor einsum by its index sizes; sizes not named are 1.

    x has gamma * beta * alpha entries and y has phi * epsilon * delta; each may differ from the layer's sizes
    by up to 15 %, and the vector is then zero-extended or cut at its edge.
    """

    sizes: Any  # a mapping {index name: size}; kept as a sorted tuple of pairs so that it hashes

    def __post_init__(self) -> None:
        try:
            given = dict(self.sizes)
        except (TypeError, ValueError):
            raise ValueError(f"Einsum: sizes must map index names to sizes, got {self.sizes!r}") from None
        checked = {name: _positive_int("Einsum", f"sizes[{name!r}]", size) for name, size in given.items()}
        two_factor_plan(1, 1, checked | {"rho": 1})  # checks the names
        kept = tuple(sorted((name, size) for name, size in checked.items() if size != 1))
        object.__setattr__(self, "sizes", kept)

    def _shown(self, name: str) -> Mapping[str, int]:
        return dict(self.sizes)

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        plan = _checked_rho(self, in_features, out_features, dict(self.sizes))
        for side, padded, real in (("x", plan.padded_in, in_features), ("y", plan.padded_out, out_features)):
            if abs(padded - real) > PADDING_TOLERANCE * real:
                names = "gamma*beta*alpha" if side == "x" else "phi*epsilon*delta"
                raise self.misfit(
                    in_features,
                    out_features,
                    f"{names} = {padded} differs from {real} by more than {PADDING_TOLERANCE:.0%}",
                )
        return plan

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        sizes = dict.fromkeys(("alpha", "beta", "delta", "epsilon"), 1) | dict(self.sizes)
        for rho in range(1, min(sizes["alpha"] * sizes["delta"], sizes["beta"] * sizes["epsilon"]) + 1):
            yield replace(self, sizes={**dict(self.sizes), "rho": rho})


def _one_of_rank(structure: Structure, rank: int | None, rank_frac: float | None) -> None:
    if (rank is None) == (rank_frac is None):
        raise ValueError(f"{type(structure).__name__} takes exactly one of rank and rank_frac")


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _divisor(
    structure: Structure, name: str, given: int | None, n: int, in_features: int, out_features: int
) -> int:
    """The given divisor of n, or the one nearest its square root (the smaller on a tie)."""
    divisors = _divisors(n)
    if given is None:
        given = min(divisors, key=lambda d: (abs(d - math.sqrt(n)), d))
        if given == 1:
            raise structure.misfit(
                in_features,
                out_features,
                f"no divisor of {n} is near its square root, so {name} has no default. Valid: {_listed(divisors)}.",
            )
    if n % given:
        raise structure.misfit(
            in_features, out_features, f"{name} must divide {n}. Valid: {_listed(divisors)}."
        )
    return given


def _shuffles(b: int, in_features: int, out_features: int) -> bool:
    return in_features % b == 0 and out_features % b == 0 and min(in_features, out_features) % b**2 == 0


def _kronecker_sizes(
    structure: "Kronecker | TensorTrain", in_features: int, out_features: int
) -> dict[str, int]:
    in1 = _divisor(structure, "in1", structure.in1, in_features, in_features, out_features)
    out1 = _divisor(structure, "out1", structure.out1, out_features, in_features, out_features)
    return {
        "alpha": in1,
        "beta": in_features // in1,
        "delta": out1,
        "epsilon": out_features // out1,
    }


def _checked_rho(structure: Structure, in_features: int, out_features: int, sizes: Mapping[str, int]) -> Plan:
    try:
        return two_factor_plan(in_features, out_features, sizes)
    except ValueError as error:
        raise structure.misfit(in_features, out_features, str(error)) from None


def _rho_members(structure: Any, in_features: int, out_features: int) -> Iterator[Any]:
    sizes = replace(structure, rho=1).plan(in_features, out_features).sizes
    for rho in range(1, min(sizes["alpha"] * sizes["delta"], sizes["beta"] * sizes["epsilon"]) + 1):
        yield replace(structure, rho=rho)


def _listed(values: Any) -> str:
    return ", ".join(str(v) for v in sorted(values))

"""Einsum plans: the one description of a structured matrix that everything else reads.

Legend: x is the input, y the output, factors are numbered 0..N-1. An index is a hyperedge over them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lamella.structures.names import suggest

Holder = Literal["x", "y"] | int

MAX_FACTORS = 7  # all permutations are tried once per plan: 7! = 5040


@dataclass(frozen=True)
class Index:
    """One index of a plan: its size and who holds it, among "x", "y" and the factor numbers."""

    name: str
    size: int
    holders: frozenset[Holder]


@dataclass(frozen=True)
class Step:
    """The contraction of the running activation with one factor.

    batch: in the activation and needed later. contracted: in it and not needed later. new: not in it.
    spectators: in the activation and not held by the factor.
    """

    factor: int
    batch: tuple[str, ...]
    contracted: tuple[str, ...]
    new: tuple[str, ...]
    spectators: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """How y = W x is computed for one structure at one size.

    x_layout and y_layout are the orders in which the flat vectors are read. Where their sizes do not multiply
    to in_features or out_features the vector is zero-extended or cut at its edge.
    """

    in_features: int
    out_features: int
    indices: tuple[Index, ...]
    x_layout: tuple[str, ...]
    y_layout: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_hypergraph(self)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {index.name: index.size for index in self.indices}

    @cached_property
    def num_factors(self) -> int:
        return 1 + max(h for index in self.indices for h in index.holders if isinstance(h, int))

    def volume(self, names: Sequence[str]) -> int:
        """Product of the sizes of the named indices."""
        return math.prod([self.sizes[name] for name in names])  # a list: dynamo has no generators here

    @property
    def padded_in(self) -> int:
        return self.volume(self.x_layout)

    @property
    def padded_out(self) -> int:
        return self.volume(self.y_layout)

    @property
    def is_padded(self) -> bool:
        """Whether x or y is zero-extended or cut."""
        return (self.padded_in, self.padded_out) != (self.in_features, self.out_features)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The permutation of the factors with the fewest multiply-adds, lowest numbers first on a tie."""
        return min(
            itertools.permutations(range(self.num_factors)),
            key=lambda order: (self._multiply_adds(_steps(self, order)), order),
        )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The contractions, in the order in which they run."""
        return _steps(self, self.order)

    def _multiply_adds(self, steps: Sequence[Step]) -> int:
        return sum(self.volume(s.batch + s.contracted + s.new + s.spectators) for s in steps)

    @cached_property
    def factor_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(batch, contracted, new) of each factor, by factor number."""
        by_factor = sorted(self.steps, key=lambda s: s.factor)
        return tuple((self.volume(s.batch), self.volume(s.contracted), self.volume(s.new)) for s in by_factor)

    @property
    def fans(self) -> tuple[tuple[int, int], ...]:
        """(fan_in, fan_out) of each factor as it is used in its step."""
        return tuple((contracted, new) for _, contracted, new in self.factor_shapes)

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.factor_shapes)

    @cached_property
    def multiply_adds(self) -> int:
        """Multiply-adds per token; equal to half of what FlopCounterMode counts on the reference path."""
        return self._multiply_adds(self.steps)

    @cached_property
    def rank(self) -> int:
        """The bound min(in, out, every cut between x and y); generic factors reach it but for corner cases."""
        factors = range(self.num_factors)
        cuts = []
        for k in range(self.num_factors + 1):
            for side in itertools.combinations(factors, k):
                x_side = {"x", *side}
                crossing = [i.size for i in self.indices if i.holders & x_side and i.holders - x_side]
                cuts.append(math.prod(crossing))
        return min(self.in_features, self.out_features, *cuts)

    @property
    def mup_std(self) -> tuple[float, ...]:
        """Standard deviation of each factor at maximal-update init, sqrt(min(f, g)) / f (arXiv 2410.02117)."""
        return tuple(math.sqrt(min(f, g)) / f for f, g in self.fans)

    @property
    def mup_gain(self) -> float:
        """Mean-square output for unit-variance independent inputs at maximal-update init."""
        gain = min(1.0, self.in_features / self.padded_in)
        for f, g in self.fans:
            gain *= min(f, g) / f
        return gain

    @property
    def psi(self) -> float:
        """log rank / log min(in, out); 1 is full rank."""
        smaller = min(self.in_features, self.out_features)
        return math.log(self.rank) / math.log(smaller) if smaller > 1 else 1.0

    @property
    def nu(self) -> float:
        """log multiply-adds / log d - 1 with d = sqrt(in * out); 1 for a dense matrix."""
        return math.log(self.multiply_adds) / self._log_width - 1 if self._log_width else 1.0

    @property
    def omega(self) -> float:
        """log(multiply-adds / parameters) / log d; 0 means that no parameter is used twice per token."""
        return math.log(self.multiply_adds / self.num_params) / self._log_width if self._log_width else 0.0

    @property
    def _log_width(self) -> float:
        return math.log(self.in_features * self.out_features) / 2


# The seven indices of a two-factor plan, in storage order; factor 0 is A, factor 1 is B (arXiv 2410.02117).
TWO_FACTOR_HOLDERS: dict[str, frozenset[Holder]] = {
    "gamma": frozenset({"x", 0, 1}),
    "alpha": frozenset({"x", 0}),
    "beta": frozenset({"x", 1}),
    "phi": frozenset({"y", 0, 1}),
    "delta": frozenset({"y", 0}),
    "rho": frozenset({0, 1}),
    "epsilon": frozenset({"y", 1}),
}


def two_factor_plan(
    in_features: int,
    out_features: int,
    sizes: Mapping[str, int],
    y_layout: tuple[str, ...] = ("phi", "epsilon", "delta"),
) -> Plan:
    """The plan of a two-factor einsum; sizes not named are 1.

    Raises: ValueError if a name is unknown or rho exceeds min(alpha * delta, beta * epsilon).
    """
    for name in sizes:
        if name not in TWO_FACTOR_HOLDERS:
            raise ValueError(
                f"unknown index {name!r}{suggest(str(name), TWO_FACTOR_HOLDERS)}: "
                f"a two-factor plan has {', '.join(TWO_FACTOR_HOLDERS)}"
            )
    full = {name: sizes.get(name, 1) for name in TWO_FACTOR_HOLDERS}
    most = min(full["alpha"] * full["delta"], full["beta"] * full["epsilon"])
    if full["rho"] > most:
        raise ValueError(
            f"rho={full['rho']} is more than min(alpha*delta, beta*epsilon) = {most}, beyond which it adds nothing"
        )
    return Plan(
        in_features,
        out_features,
        tuple(Index(name, full[name], holders) for name, holders in TWO_FACTOR_HOLDERS.items()),
        ("gamma", "beta", "alpha"),
        y_layout,
    )


def dense_plan(in_features: int, out_features: int) -> Plan:
    """The plan of an unstructured matrix: one factor."""
    indices = (
        Index("alpha", in_features, frozenset({"x", 0})),
        Index("epsilon", out_features, frozenset({"y", 0})),
    )
    return Plan(in_features, out_features, indices, ("alpha",), ("epsilon",))


def _steps(plan: Plan, order: Sequence[int]) -> tuple[Step, ...]:
    active = set(plan.x_layout)
    steps = []
    for position, factor in enumerate(order):
        later: set[Holder] = {"y", *order[position + 1 :]}
        held = [i for i in plan.indices if factor in i.holders]
        batch = tuple(i.name for i in held if i.name in active and i.holders & later)
        contracted = tuple(i.name for i in held if i.name in active and not i.holders & later)
        new = tuple(i.name for i in held if i.name not in active)
        spectators = tuple(i.name for i in plan.indices if i.name in active and factor not in i.holders)
        steps.append(Step(factor, batch, contracted, new, spectators))
        active = active - set(contracted) | set(new)
    return tuple(steps)


def _check_hypergraph(plan: Plan) -> None:
    names = [index.name for index in plan.indices]
    if len(set(names)) != len(names):
        raise ValueError(f"index names must differ, got {names}")
    numbers: set[int] = set()
    for index in plan.indices:
        if not isinstance(index.name, str) or not index.name:
            raise ValueError(f"an index needs a name, got {index.name!r}")
        if not isinstance(index.size, int) or isinstance(index.size, bool) or index.size < 1:
            raise ValueError(f"index {index.name!r} has size {index.size!r}: sizes are positive integers")
        factors = {h for h in index.holders if isinstance(h, int)}
        if index.holders - factors - {"x", "y"}:
            raise ValueError(
                f"index {index.name!r} is held by {set(index.holders)}: holders are x, y, 0, 1, ..."
            )
        if index.holders >= {"x", "y"}:
            raise ValueError(f"index {index.name!r} joins x and y: an index may be held by one of them only")
        outside = index.holders & {"x", "y"}
        if not factors or (not outside and len(factors) < 2):
            raise ValueError(
                f"index {index.name!r} is held by {set(index.holders)} alone: "
                "it needs a factor, and two factors when neither x nor y holds it"
            )
        numbers |= factors
    if numbers != set(range(len(numbers))) or not 1 <= len(numbers) <= MAX_FACTORS:
        raise ValueError(f"factors must be numbered 0..N-1 with N <= {MAX_FACTORS}, got {sorted(numbers)}")
    for side, layout in (("x", plan.x_layout), ("y", plan.y_layout)):
        held = {index.name for index in plan.indices if side in index.holders}
        if not held or set(layout) != held or len(layout) != len(held):
            raise ValueError(
                f"{side}_layout must order the indices {side} holds, {sorted(held)}, got {layout}"
            )

"""What a structure is: a frozen dataclass that chooses plan sizes for a given matrix shape."""

import math
import operator
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, Self

from lamella.structures.plan import Plan


@dataclass(frozen=True, kw_only=True, repr=False)
class Structure:
    """A recipe for structured matrices. A family overrides `make_plan`, and `members` if it has a knob.

    Fields ending in `_frac` are fractions in (0, 1]; others are positive integers. The repr omits defaults
    and is the structure's text form: `parse_structure(repr(s)) == s`.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            check = _fraction if field.name.endswith("_frac") else _positive_int
            object.__setattr__(self, field.name, check(type(self).__name__, field.name, value))

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={self._shown(f.name)!r}"
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str) -> Any:
        return getattr(self, name)

    def plan(self, in_features: int, out_features: int) -> Plan:
        """The einsum plan for a matrix of shape (out_features, in_features).

        Raises: ValueError if the structure does not fit; the message lists what would.
        """
        return _cached_plan(self, *_shape("plan", in_features, out_features))

    def make_plan(self, in_features: int, out_features: int) -> Plan:
        """Choose the sizes; called once per shape."""
        raise NotImplementedError

    def members(self, in_features: int, out_features: int, multiple_of: int) -> Iterator[Self]:
        """The members of the family along its one knob, at this shape."""
        raise ValueError(f"{type(self).__name__} has no knob to meet a budget with")

    def at_budget(
        self,
        in_features: int,
        out_features: int,
        *,
        params_frac: float | None = None,
        multiply_adds_frac: float | None = None,
        at_most: bool = True,
        multiple_of: int = 16,
    ) -> Self:
        """The member nearest a budget, as a fraction of the dense matrix's parameters or multiply-adds.

        The family's one knob moves: the rank, by multiples of `multiple_of`; or num_blocks or rho, by ones. All other
        fields stay. With at_most (the default) the member does not exceed the budget.

        Raises: ValueError if no member meets it; the message names the closest.
        """
        if (params_frac is None) == (multiply_adds_frac is None):
            raise ValueError("at_budget takes exactly one of params_frac and multiply_adds_frac")
        budget = params_frac if multiply_adds_frac is None else multiply_adds_frac
        assert budget is not None
        if isinstance(budget, bool) or not (isinstance(budget, int | float) and 0 < budget < math.inf):
            raise ValueError(f"a budget is a positive fraction of the dense matrix, got {budget!r}")
        multiple_of = _positive_int("at_budget", "multiple_of", multiple_of)
        in_features, out_features = _shape("at_budget", in_features, out_features)
        dense = in_features * out_features

        def cost(member: "Structure") -> float:
            plan = member.plan(in_features, out_features)
            return (plan.num_params if params_frac is not None else plan.multiply_adds) / dense

        priced = [(cost(member), member) for member in self.members(in_features, out_features, multiple_of)]
        if not priced:
            raise ValueError(
                f"{type(self).__name__} has no member at {in_features} -> {out_features} with a rank that is a "
                f"multiple of {multiple_of}: lower multiple_of"
            )
        if not at_most:
            return min(priced, key=lambda pair: abs(pair[0] - budget))[1]
        fitting = [pair for pair in priced if pair[0] <= budget * (1 + 1e-12)]
        if not fitting:
            smallest = min(priced, key=lambda pair: pair[0])
            raise ValueError(
                f"no {type(self).__name__} at {in_features} -> {out_features} within {budget:g} of dense: the "
                f"smallest is {smallest[1]!r} at {smallest[0]:.4g}"
                + (f"; multiple_of={multiple_of} can be lowered" if multiple_of > 1 else "")
            )
        return max(fitting, key=lambda pair: pair[0])[1]

    def misfit(self, in_features: int, out_features: int, why: str) -> ValueError:
        """The error for a shape that does not fit: what was given and what would be right."""
        return ValueError(f"{self!r} does not fit {in_features} -> {out_features}: {why}")


@lru_cache(maxsize=8192)
def _cached_plan(structure: Structure, in_features: int, out_features: int) -> Plan:
    return structure.make_plan(in_features, out_features)


def _shape(owner: str, in_features: Any, out_features: Any) -> tuple[int, int]:
    return (
        _positive_int(owner, "in_features", in_features),
        _positive_int(owner, "out_features", out_features),
    )


def _positive_int(owner: str, name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{owner}: {name} must be a positive integer, got {value!r}")
    return number


def _fraction(owner: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{owner}: {name} must be a fraction in (0, 1], got {value!r}")
    return float(value)

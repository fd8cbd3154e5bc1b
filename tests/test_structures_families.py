"""Families: the sizes they choose, their text form, their errors and their members at a budget."""

import math
import re
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, divisors
from hypothesis import given
from hypothesis import strategies as st

import lamella
from lamella.structures import (
    BTT,
    BlockDense,
    BlockShuffle,
    Dense,
    Einsum,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    TensorTrain,
    parse_structure,
)
from lamella.structures.text import FAMILIES


def test_every_family_has_a_case() -> None:
    exported = {
        value
        for value in (getattr(lamella.structures, name) for name in lamella.structures.__all__)
        if isinstance(value, type) and issubclass(value, Structure) and value is not Structure
    }
    assert exported == set(FAMILIES.values())
    assert exported <= {type(case.structure) for case in CASES}
    for family in exported - {Dense}:
        shapes = {np.sign(c.out_features - c.in_features) for c in CASES if type(c.structure) is family}
        assert {-1, 1} <= shapes or family in (Kronecker, TensorTrain), f"{family} needs wide and tall cases"


def test_every_family_is_exported_at_the_top_and_parsed_by_its_name() -> None:
    for name, family in FAMILIES.items():
        assert getattr(lamella, name) is family
        assert name in lamella.__all__
    assert Monarch is BlockShuffle


def sizes(structure: Structure, n_in: int, n_out: int) -> dict[str, int]:
    return {name: size for name, size in structure.plan(n_in, n_out).sizes.items() if size > 1}


def test_sizes_are_those_of_the_table() -> None:
    assert sizes(LowRank(rank=192), 768, 3072) == {"alpha": 768, "epsilon": 3072, "rho": 192}
    assert sizes(LowRank(rank_frac=0.25), 768, 3072) == {"alpha": 768, "epsilon": 3072, "rho": 192}
    assert sizes(BlockDense(num_blocks=2, rank=256), 768, 3072) == {
        "gamma": 2,
        "alpha": 384,
        "epsilon": 3072,
        "rho": 128,
    }
    assert sizes(BlockShuffle(num_blocks=4), 768, 3072) == {
        "gamma": 4,
        "alpha": 192,
        "phi": 4,
        "epsilon": 768,
        "rho": 48,
    }
    assert sizes(BTT(gamma=16, phi=32, rho=4), 768, 3072) == {
        "gamma": 16,
        "alpha": 48,
        "phi": 32,
        "epsilon": 96,
        "rho": 4,
    }
    assert sizes(Kronecker(in1=24, out1=48), 768, 3072) == {
        "beta": 32,
        "alpha": 24,
        "epsilon": 64,
        "delta": 48,
    }
    assert sizes(TensorTrain(in1=24, out1=48, rho=3), 768, 3072) == {
        "beta": 32,
        "alpha": 24,
        "epsilon": 64,
        "delta": 48,
        "rho": 3,
    }


def test_parameter_counts_are_those_of_the_papers() -> None:
    ffn = 2 * 768 * 3072

    def both(structure: Structure) -> float:
        return (structure.plan(768, 3072).num_params + structure.plan(3072, 768).num_params) / ffn

    assert both(LowRank(rank=192)) == 0.3125
    assert both(LowRank(rank=384)) == 0.625
    assert both(BlockDense(num_blocks=2, rank=256)) == pytest.approx(0.3125)
    assert BlockDense(num_blocks=2, rank=256).plan(768, 3072).num_params / (ffn / 2) == 0.375
    assert BlockDense(num_blocks=2, rank=256).plan(3072, 768).num_params / (ffn / 2) == 0.25
    assert both(BlockShuffle(num_blocks=4)) == 0.3125
    assert both(BlockShuffle(num_blocks=2)) == 0.625


@given(st.integers(4, 400), st.integers(4, 400))
def test_default_divisors_are_nearest_the_square_root(n_in: int, n_out: int) -> None:
    def nearest(n: int) -> int:
        return min(divisors(n), key=lambda d: (abs(d - math.sqrt(n)), d))

    wanted = (nearest(n_in), nearest(n_out))
    if 1 in wanted:
        for structure in (BTT(), Kronecker(), TensorTrain()):
            with pytest.raises(ValueError, match="has no default"):
                structure.plan(n_in, n_out)
    else:
        plan = BTT().plan(n_in, n_out)
        assert (plan.sizes["gamma"], plan.sizes["phi"]) == wanted
        for structure in (Kronecker(), TensorTrain()):
            plan = structure.plan(n_in, n_out)
            assert (plan.sizes["alpha"], plan.sizes["delta"]) == wanted


def test_a_prime_size_with_an_explicit_divisor_of_one_is_allowed() -> None:
    assert BTT(gamma=1, phi=1).plan(7, 11).rank == 1


# --- text form


def positive() -> st.SearchStrategy[int]:
    return st.integers(1, 10**6)


def fractions() -> st.SearchStrategy[float]:
    return st.floats(0, 1, exclude_min=True)


def structures() -> st.SearchStrategy[Structure]:
    maybe = st.none() | positive()
    rank = positive().map(lambda r: {"rank": r}) | fractions().map(lambda f: {"rank_frac": f})
    names = st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "phi", "rho"])
    return st.one_of(
        st.just(Dense()),
        rank.map(lambda r: LowRank(**r)),  # type: ignore[arg-type]
        st.builds(lambda b, r: BlockDense(num_blocks=b, **r), positive(), rank),
        st.builds(BlockShuffle, num_blocks=positive()),
        st.builds(BTT, gamma=maybe, phi=maybe, rho=positive()),
        st.builds(Kronecker, in1=maybe, out1=maybe),
        st.builds(TensorTrain, in1=maybe, out1=maybe, rho=positive()),
        st.dictionaries(names, st.integers(1, 64)).map(lambda d: Einsum(sizes=d)),
    )


@given(structures())
def test_the_repr_of_a_structure_parses_back_to_it(structure: Structure) -> None:
    back = parse_structure(repr(structure))
    assert back == structure
    assert hash(back) == hash(structure)
    assert repr(back) == repr(structure)


def test_the_repr_of_every_case_parses_back(case: Case) -> None:
    if type(case.structure) in FAMILIES.values():
        assert parse_structure(f"  {case.structure!r}\n") == case.structure


def test_repr_omits_defaults() -> None:
    assert repr(BTT(rho=1)) == "BTT()"
    assert repr(BTT(gamma=4, rho=2)) == "BTT(gamma=4, rho=2)"
    assert repr(LowRank(rank_frac=0.25)) == "LowRank(rank_frac=0.25)"
    assert repr(Dense()) == "Dense()"
    assert repr(Einsum(sizes={"rho": 2, "alpha": 4, "beta": 1})) == "Einsum(sizes={'alpha': 4, 'rho': 2})"


def test_a_bare_name_means_the_defaults_and_monarch_is_block_shuffle() -> None:
    assert parse_structure("BTT") == BTT()
    assert parse_structure("Dense") == Dense()
    assert parse_structure("Monarch(num_blocks=4)") == BlockShuffle(num_blocks=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("LowRnk(rank=4)", "unknown structure 'LowRnk'.*did you mean 'LowRank'"),
        ("lowrank(rank=4)", "did you mean 'LowRank'"),
        ("Zzzzzz()", "Known: Dense, LowRank"),
        ("LowRank(rnk=4)", "unknown option 'rnk'.*did you mean 'rank'"),
        ("LowRank(4)", "options are given by name"),
        ("LowRank()", "exactly one of rank and rank_frac"),
        ("LowRank(rank=4, rank_frac=0.5)", "exactly one of rank and rank_frac"),
        ("BlockShuffle()", "num_blocks"),
        ("BlockDense(rank=4)", "num_blocks"),
        ("LowRank(rank=0)", "rank must be a positive integer, got 0"),
        ("LowRank(rank=-1)", "rank must be a positive integer, got -1"),
        ("LowRank(rank=1.5)", "rank must be a positive integer, got 1.5"),
        ("LowRank(rank=True)", "rank must be a positive integer, got True"),
        ("LowRank(rank='4')", "rank must be a positive integer, got '4'"),
        ("LowRank(rank=nan)", "rank must be a literal"),
        ("LowRank(rank_frac=1e999)", "rank_frac must be a fraction"),
        ("LowRank(rank_frac=0)", "rank_frac must be a fraction"),
        ("LowRank(rank_frac=1.01)", "rank_frac must be a fraction"),
        ("LowRank(rank_frac=True)", "rank_frac must be a fraction"),
        ("Einsum(sizes={'zeta': 2})", "unknown index 'zeta'"),
        ("Einsum(sizes={'alpha': 0})", "must be a positive integer, got 0"),
        ("Einsum(sizes=3)", "must map index names to sizes"),
        ("Einsum()", "sizes"),
        ("", "can't read the structure"),
        ("LowRank(rank=", "can't read the structure"),
        ("LowRank(rank=4); BTT()", "can't read the structure"),
        ("LowRank(rank=4) + BTT()", "can't read the structure"),
        ("lamella.LowRank(rank=4)", "can't read the structure"),
        ("LowRank(**{'rank': 4})", "unknown option"),
        ("LowRank(*[4])", "options are given by name"),
    ],
)
def test_unreadable_structures_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_structure(text)


@pytest.mark.parametrize(
    "text",
    [
        "LowRank(rank=__import__('os').system('touch {flag}'))",
        "__import__('os').system('touch {flag}')",
        "LowRank(rank=open('{flag}', 'w'))",
        "(lambda: open('{flag}', 'w'))()",
        "LowRank(rank=[x for x in [open('{flag}', 'w')]])",
    ],
)
def test_a_structure_text_is_never_evaluated(text: str, tmp_path: Any) -> None:
    flag = tmp_path / "flag"
    with pytest.raises(ValueError, match=r"."):
        parse_structure(text.format(flag=flag))
    assert not flag.exists()


@pytest.mark.parametrize("text", [None, 5, LowRank(rank=4)])
def test_something_that_is_no_text_is_a_value_error(text: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_structure(text)


# --- fields


BUILDERS: list[tuple[str, Any]] = [
    ("rank", lambda v: LowRank(rank=v)),
    ("num_blocks", lambda v: BlockDense(num_blocks=v, rank=4)),
    ("rank", lambda v: BlockDense(num_blocks=2, rank=v)),
    ("num_blocks", lambda v: BlockShuffle(num_blocks=v)),
    ("gamma", lambda v: BTT(gamma=v)),
    ("phi", lambda v: BTT(phi=v)),
    ("rho", lambda v: BTT(rho=v)),
    ("in1", lambda v: Kronecker(in1=v)),
    ("out1", lambda v: TensorTrain(out1=v)),
    ("rho", lambda v: TensorTrain(rho=v)),
    (r"sizes\['alpha'\]", lambda v: Einsum(sizes={"alpha": v})),
]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, False, float("nan"), float("inf"), "3", [2]], ids=repr)
@pytest.mark.parametrize(("name", "build"), BUILDERS)
def test_sizes_must_be_positive_integers(name: str, build: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {re.escape(repr(value))}"):
        build(value)


@pytest.mark.parametrize("value", [0, -0.5, 1.5, True, float("nan"), float("inf"), "0.5"], ids=repr)
def test_fractions_lie_above_zero_and_up_to_one(value: Any) -> None:
    for build in (lambda v: LowRank(rank_frac=v), lambda v: BlockDense(num_blocks=2, rank_frac=v)):
        with pytest.raises(ValueError, match="rank_frac must be a fraction"):
            build(value)


def test_numpy_integers_are_integers() -> None:
    assert LowRank(rank=np.int64(4)) == LowRank(rank=4)  # type: ignore[arg-type]
    assert repr(LowRank(rank=np.int64(4))) == "LowRank(rank=4)"  # type: ignore[arg-type]


def test_fields_are_by_name_frozen_and_known() -> None:
    with pytest.raises(TypeError):
        LowRank(4)  # type: ignore[misc]
    with pytest.raises(TypeError, match="rnk"):
        LowRank(rnk=4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        LowRank(rank=4).rank = 5  # type: ignore[misc]


# --- sizes that do not fit


def test_a_misfit_says_what_was_given_and_what_would_be_right() -> None:
    with pytest.raises(ValueError, match=r"^") as error:
        BlockShuffle(num_blocks=5).plan(768, 3072)
    assert str(error.value) == (
        "BlockShuffle(num_blocks=5) does not fit 768 -> 3072: num_blocks must divide both and its square must "
        "divide 768. Valid: 1, 2, 4, 8, 16."
    )


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12))
def test_block_shuffle_lists_exactly_the_valid_block_counts(n_in: int, n_out: int, b: int) -> None:
    def fits(d: int) -> bool:
        return n_in % d == 0 and n_out % d == 0 and min(n_in, n_out) % d**2 == 0

    if fits(b):
        assert BlockShuffle(num_blocks=b).plan(n_in, n_out).sizes["rho"] == min(n_in, n_out) // b**2
    else:
        valid = ", ".join(str(d) for d in range(1, 61) if fits(d))
        with pytest.raises(ValueError, match=f"Valid: {valid}\\.$"):
            BlockShuffle(num_blocks=b).plan(n_in, n_out)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (LowRank(rank=9), "rank must be at most min(in, out) = 8"),
        (BlockDense(num_blocks=5, rank=5), "num_blocks must divide 12. Valid: 1, 2, 3, 4, 6, 12."),
        (
            BlockDense(num_blocks=4, rank=6),
            "rank must be a multiple of num_blocks=4, at most 12. Nearest: 4, 8.",
        ),
        (BlockDense(num_blocks=4, rank=16), "at most 12. Nearest: 12."),
        (BTT(gamma=5), "gamma must divide 12. Valid: 1, 2, 3, 4, 6, 12."),
        (BTT(phi=3), "phi must divide 8. Valid: 1, 2, 4, 8."),
        (BTT(rho=99), "rho=99 is more than"),
        (Kronecker(in1=5), "in1 must divide 12. Valid: 1, 2, 3, 4, 6, 12."),
        (TensorTrain(out1=3), "out1 must divide 8. Valid: 1, 2, 4, 8."),
        (TensorTrain(rho=99), "rho=99 is more than"),
        (Einsum(sizes={"alpha": 6, "epsilon": 8}), "gamma*beta*alpha = 6 differs from 12 by more than 15%"),
        (Einsum(sizes={"alpha": 12, "epsilon": 16}), "phi*epsilon*delta = 16 differs from 8"),
        (Einsum(sizes={"alpha": 12, "epsilon": 8, "rho": 9}), "rho=9 is more than"),
    ],
    ids=repr,
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_would(structure: Structure, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{structure!r} does not fit 12 -> 8: ") + ".*") as error:
        structure.plan(12, 8)
    assert message in str(error.value)


@pytest.mark.parametrize(("padded", "fits"), [(85, True), (84, False), (115, True), (116, False)])
def test_einsum_tolerates_fifteen_percent_of_padding(padded: int, fits: bool) -> None:
    structure = Einsum(sizes={"alpha": padded, "epsilon": 100})
    if fits:
        assert structure.plan(100, 100).padded_in == padded
    else:
        with pytest.raises(ValueError, match="15%"):
            structure.plan(100, 100)


# --- budgets


def knob_members(structure: Structure, n_in: int, n_out: int, multiple_of: int) -> list[Structure]:
    """Every member along the knob, found by trying all values."""
    made: list[Structure] = []
    for value in range(1, max(n_in, n_out) + 1):
        candidates: list[Any] = []
        if isinstance(structure, LowRank) and value % multiple_of == 0:
            candidates = [LowRank(rank=value)]
        elif isinstance(structure, BlockDense) and value % multiple_of == 0:
            candidates = [BlockDense(num_blocks=structure.num_blocks, rank=value)]
        elif isinstance(structure, BlockShuffle):
            candidates = [BlockShuffle(num_blocks=value)]
        elif isinstance(structure, BTT):
            candidates = [BTT(gamma=structure.gamma, phi=structure.phi, rho=value)]
        elif isinstance(structure, TensorTrain):
            candidates = [TensorTrain(in1=structure.in1, out1=structure.out1, rho=value)]
        elif isinstance(structure, Einsum):
            candidates = [Einsum(sizes={**dict(structure.sizes), "rho": value})]
        for candidate in candidates:
            try:
                candidate.plan(n_in, n_out)
            except ValueError:
                continue
            made.append(candidate)
    return made


BUDGETED: list[Structure] = [
    LowRank(rank=1),
    LowRank(rank_frac=0.5),
    BlockDense(num_blocks=3, rank=3),
    BlockShuffle(num_blocks=1),
    BTT(gamma=4, phi=6),
    BTT(),
    TensorTrain(),
    Einsum(sizes={"alpha": 6, "beta": 2, "gamma": 4, "delta": 2, "epsilon": 6, "phi": 6}),
]


@pytest.mark.parametrize("measure", ["params_frac", "multiply_adds_frac"])
@pytest.mark.parametrize("multiple_of", [1, 4])
@pytest.mark.parametrize("structure", BUDGETED, ids=repr)
def test_the_member_at_a_budget_is_the_nearest_that_brute_force_finds(
    structure: Structure, multiple_of: int, measure: str
) -> None:
    n_in, n_out = 48, 72
    everyone = knob_members(structure, n_in, n_out, multiple_of)

    def cost(member: Structure) -> float:
        plan = member.plan(n_in, n_out)
        return (plan.num_params if measure == "params_frac" else plan.multiply_adds) / (n_in * n_out)

    for budget in (0.05, 0.13, 0.25, 0.5, 0.77, 1.0, 3.0):
        options = {measure: budget, "multiple_of": multiple_of}
        nearest = structure.at_budget(n_in, n_out, at_most=False, **options)
        assert abs(cost(nearest) - budget) == pytest.approx(min(abs(cost(m) - budget) for m in everyone))
        below = [cost(m) for m in everyone if cost(m) <= budget]
        if below:
            found = structure.at_budget(n_in, n_out, **options)
            assert cost(found) == max(below)
            assert found in everyone
        else:
            with pytest.raises(ValueError, match=f"within {budget:g} of dense: the smallest is"):
                structure.at_budget(n_in, n_out, **options)


def test_a_budget_met_exactly_is_met() -> None:
    assert LowRank(rank=1).at_budget(768, 3072, params_frac=0.3125) == LowRank(rank=192)
    assert BlockShuffle(num_blocks=2).at_budget(768, 3072, params_frac=0.3125) == BlockShuffle(num_blocks=4)
    assert Dense().at_budget(8, 8, params_frac=1.0) == Dense()


def test_the_knob_moves_by_sixteen_unless_told_otherwise() -> None:
    found = LowRank(rank=1).at_budget(768, 3072, params_frac=0.3)
    assert found.rank == 176
    assert LowRank(rank=1).at_budget(768, 3072, params_frac=0.3, multiple_of=1).rank == 184


def test_an_impossible_budget_names_the_closest_member() -> None:
    with pytest.raises(
        ValueError, match=r"the smallest is LowRank\(rank=16\) at 0.02604; multiple_of=16 can be"
    ):
        LowRank(rank=4).at_budget(768, 3072, params_frac=0.001)
    with pytest.raises(ValueError, match="lower multiple_of"):
        LowRank(rank=4).at_budget(8, 8, params_frac=0.5)
    with pytest.raises(ValueError, match="no knob"):
        Kronecker().at_budget(16, 16, params_frac=0.5)
    with pytest.raises(ValueError, match="smallest is Dense"):
        Dense().at_budget(16, 16, params_frac=0.5)


@pytest.mark.parametrize("budget", [0, -1, True, float("nan"), float("inf"), "0.5"], ids=repr)
def test_a_budget_is_a_positive_number(budget: Any) -> None:
    with pytest.raises(ValueError, match="positive fraction of the dense matrix"):
        LowRank(rank=4).at_budget(768, 768, params_frac=budget)


def test_a_budget_is_of_parameters_or_of_multiply_adds() -> None:
    for options in ({}, {"params_frac": 0.5, "multiply_adds_frac": 0.5}):
        with pytest.raises(ValueError, match="exactly one of params_frac and multiply_adds_frac"):
            LowRank(rank=4).at_budget(768, 768, **options)
    for multiple_of in (0, -16, 1.5, True):
        with pytest.raises(ValueError, match="multiple_of must be a positive integer"):
            LowRank(rank=4).at_budget(768, 768, params_frac=0.5, multiple_of=multiple_of)  # type: ignore[arg-type]

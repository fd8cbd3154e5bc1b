"""Plans: order, storage, costs, rank, taxonomy, and hypergraphs that are none."""

import itertools
import math
import pickle

import pytest
from cases import CASES, TWO_FACTOR_CASES, Case, ThreeCores, plan_of, rank_of
from hypothesis import given
from hypothesis import strategies as st

from lamella.structures import (
    BTT,
    BlockShuffle,
    Einsum,
    Kronecker,
    LowRank,
    Plan,
    dense_plan,
    two_factor_plan,
)


def simulated_cost(plan: Plan, order: tuple[int, ...]) -> int:
    """Multiply-adds of contracting the factors in this order: each step loops over all indices in play."""
    holders = {i.name: i.holders for i in plan.indices}
    alive = {n for n in holders if "x" in holders[n]}
    total, remaining = 0, list(order)
    while remaining:
        factor = remaining.pop(0)
        alive |= {n for n in holders if factor in holders[n]}
        total += math.prod(plan.sizes[n] for n in alive)
        alive = {n for n in alive if "y" in holders[n] or holders[n] & set(remaining)}
    return total


def cheapest(plan: Plan) -> tuple[int, ...]:
    orders = sorted(itertools.permutations(range(plan.num_factors)))
    return min(orders, key=lambda order: simulated_cost(plan, order))


@st.composite
def hypergraphs(draw: st.DrawFn) -> Plan:
    """Plans of one to four factors with a random set of indices."""
    n = draw(st.integers(1, 4))
    factors = "".join(map(str, range(n)))
    holder_sets = [
        side + "".join(some)
        for side in ("x", "y", "")
        for k in range(1, n + 1)
        for some in itertools.combinations(factors, k)
        if side or k > 1
    ]
    inner = draw(st.lists(st.sampled_from(holder_sets), max_size=5, unique=True))
    chosen = list(dict.fromkeys(["x" + factors[0], "y" + factors[-1], *inner]))
    for k in range(n):  # every factor holds something
        if not any(str(k) in c for c in chosen):
            chosen.append("x" + str(k))
    named = {f"i{k}": (draw(st.integers(1, 4)), holders) for k, holders in enumerate(chosen)}
    x = [name for name, (_, h) in named.items() if "x" in h]
    y = [name for name, (_, h) in named.items() if "y" in h]
    x, y = draw(st.permutations(x)), draw(st.permutations(y))
    n_in = math.prod(named[name][0] for name in x)
    n_out = math.prod(named[name][0] for name in y)
    return plan_of(n_in, n_out, " ".join(x), " ".join(y), named)


@given(hypergraphs())
def test_the_order_is_the_cheapest_of_all_permutations_lowest_numbers_first(plan: Plan) -> None:
    assert plan.order == cheapest(plan)
    assert plan.multiply_adds == simulated_cost(plan, plan.order)


def test_the_order_of_every_case_is_the_cheapest(case: Case) -> None:
    assert case.plan.order == cheapest(case.plan)


@given(hypergraphs())
def test_each_stored_factor_holds_each_of_its_indices_once(plan: Plan) -> None:
    for factor, step in zip(plan.order, plan.steps, strict=True):
        held = [i.name for i in plan.indices if factor in i.holders]
        stored = step.batch + step.contracted + step.new
        assert sorted(stored) == sorted(held)
        for group in (step.batch, step.contracted, step.new):
            assert list(group) == [n for n in held if n in group], "a group keeps the order of the indices"
        assert plan.factor_shapes[factor] == tuple(
            math.prod(plan.sizes[n] for n in group) for group in (step.batch, step.contracted, step.new)
        )
    assert plan.num_params == sum(
        math.prod(i.size for i in plan.indices if factor in i.holders) for factor in range(plan.num_factors)
    )


@given(hypergraphs())
def test_the_rank_bound_is_the_smallest_cut_between_x_and_y(plan: Plan) -> None:
    cuts = []
    for sides in itertools.product((True, False), repeat=plan.num_factors):
        with_x = {"x": True, "y": False} | dict(enumerate(sides))
        cuts.append(math.prod(i.size for i in plan.indices if len({with_x[h] for h in i.holders}) == 2))
    assert plan.rank == min(plan.in_features, plan.out_features, *cuts)


def test_random_factors_reach_the_rank_of_the_plan(case: Case) -> None:
    assert rank_of(case.dense(case.factors())) == case.plan.rank == case.rank


@pytest.mark.parametrize("case", TWO_FACTOR_CASES, ids=lambda c: c.id)
def test_fans_are_those_of_the_paper(case: Case) -> None:
    s, plan = case.plan.sizes, case.plan
    a_first = (
        plan.padded_in * s["delta"] * s["phi"] * s["rho"]
        + plan.padded_out * s["beta"] * s["gamma"] * s["rho"]
    )
    b_first = (
        plan.padded_in * s["phi"] * s["epsilon"] * s["rho"]
        + plan.padded_out * s["alpha"] * s["gamma"] * s["rho"]
    )
    assert plan.multiply_adds == min(a_first, b_first)
    if a_first <= b_first:
        expected = (
            (s["alpha"], s["delta"] * s["phi"] * s["rho"]),
            (s["beta"] * s["gamma"] * s["rho"], s["epsilon"]),
        )
    else:
        expected = (
            (s["alpha"] * s["gamma"] * s["rho"], s["delta"]),
            (s["beta"], s["epsilon"] * s["phi"] * s["rho"]),
        )
    assert plan.fans == expected
    assert plan.num_params == (
        s["gamma"] * s["alpha"] * s["phi"] * s["delta"] * s["rho"]
        + s["gamma"] * s["beta"] * s["phi"] * s["rho"] * s["epsilon"]
    )


def test_psi_nu_and_omega_are_measured_on_the_plan_with_d_the_root_of_in_times_out(case: Case) -> None:
    plan = case.plan
    d = math.sqrt(case.in_features * case.out_features)
    smaller = min(case.in_features, case.out_features)
    assert plan.psi == pytest.approx(
        math.log(plan.rank) / math.log(smaller) if smaller > 1 else 1.0, abs=1e-12
    )
    assert plan.nu == pytest.approx(math.log(plan.multiply_adds) / math.log(d) - 1, abs=1e-12)
    assert plan.omega == pytest.approx(
        math.log(plan.multiply_adds / plan.num_params) / math.log(d), abs=1e-12
    )


def power_plan(d: int, **theta: float) -> Plan:
    return two_factor_plan(d, d, {name: round(d**exponent) for name, exponent in theta.items()})


@pytest.mark.parametrize(
    "theta",
    [
        {"alpha": 0.5, "gamma": 0.5, "epsilon": 0.5, "phi": 0.5},
        {"alpha": 0.5, "gamma": 0.5, "epsilon": 0.5, "phi": 0.5, "rho": 0.25},
        {"alpha": 0.75, "gamma": 0.25, "epsilon": 0.75, "phi": 0.25},
        {"alpha": 0.25, "gamma": 0.75, "epsilon": 0.75, "phi": 0.25},
        {"alpha": 0.5, "beta": 0.5, "delta": 0.5, "epsilon": 0.5},
        {"alpha": 0.5, "beta": 0.5, "delta": 0.5, "epsilon": 0.5, "rho": 0.25},
        {"alpha": 0.25, "beta": 0.75, "delta": 0.25, "epsilon": 0.75},
        {"alpha": 1.0, "epsilon": 1.0, "rho": 0.75},
        {"alpha": 0.5, "beta": 0.25, "gamma": 0.25, "delta": 0.25, "epsilon": 0.5, "phi": 0.25},
    ],
    ids=str,
)
def test_rank_nu_and_omega_follow_the_exponent_formulas_of_the_paper(theta: dict[str, float]) -> None:
    d = 2**16  # every exponent above is a whole power of two
    plan = power_plan(d, **theta)
    al, be, de, ep, rh = (theta.get(n, 0.0) for n in ("alpha", "beta", "delta", "epsilon", "rho"))
    inner = max(min(al, ep), min(be, de))
    assert plan.psi == pytest.approx(min(1, 2 + rh - al - ep, 2 + rh - be - de))
    # sums of two equal powers leave a factor of at most two
    assert plan.nu == pytest.approx(1 + rh - inner, abs=math.log(2, d) + 1e-9)
    assert plan.omega == pytest.approx(min(be + ep, al + de) - inner, abs=math.log(2, d) + 1e-9)


def test_omega_is_zero_where_no_parameter_is_used_twice_and_positive_for_kronecker() -> None:
    for structure in (LowRank(rank=32), BTT(rho=2), BlockShuffle(num_blocks=4)):
        assert structure.plan(256, 256).omega == 0
    assert Kronecker().plan(256, 256).omega > 0


@pytest.mark.parametrize("case", [c for c in TWO_FACTOR_CASES if not c.plan.is_padded], ids=lambda c: c.id)
def test_every_gamma_phi_block_has_rank_rho_after_rearrangement(case: Case) -> None:
    s, plan = case.plan.sizes, case.plan
    layout = [s[n] for n in plan.y_layout] + [s[n] for n in ("gamma", "beta", "alpha")]
    axes = [*plan.y_layout, "gamma", "beta", "alpha"]
    wanted = ["gamma", "phi", "alpha", "delta", "beta", "epsilon"]
    blocks = case.dense(case.factors()).reshape(layout).permute([axes.index(n) for n in wanted])
    blocks = blocks.reshape(s["gamma"] * s["phi"], s["alpha"] * s["delta"], s["beta"] * s["epsilon"])
    assert {rank_of(block) for block in blocks} == {s["rho"]}


def test_a_dense_plan_costs_and_stores_in_times_out() -> None:
    plan = dense_plan(6, 10)
    assert (plan.num_params, plan.multiply_adds, plan.rank, plan.fans) == (60, 60, 6, ((6, 10),))
    assert (plan.psi, plan.nu, plan.omega) == (1, pytest.approx(1), 0)


def test_padded_sizes_are_told_apart_from_real_ones() -> None:
    plan = Einsum(sizes={"alpha": 4, "gamma": 3, "epsilon": 6, "phi": 3}).plan(13, 17)
    assert plan.is_padded
    assert (plan.in_features, plan.padded_in, plan.out_features, plan.padded_out) == (13, 12, 17, 18)
    assert not BTT().plan(16, 16).is_padded


def test_plans_compare_by_value_hash_and_pickle() -> None:
    for case in CASES:
        plan = case.plan
        assert plan.order  # fills the caches, which must not travel into equality
        copy = pickle.loads(pickle.dumps(plan))
        assert copy == plan
        assert hash(copy) == hash(plan)
        assert copy.factor_shapes == plan.factor_shapes


GOOD = {"a": (2, "x0"), "r": (3, "01"), "e": (5, "y1")}


@pytest.mark.parametrize(
    ("indices", "x", "y", "message"),
    [
        ({**GOOD, "t": (2, "xy0")}, "a t", "e t", "'t' joins x and y"),
        ({**GOOD, "t": (2, "0")}, "a", "e", "'t' is held by .* alone: it needs a factor, and two factors"),
        ({**GOOD, "t": (2, "x")}, "a t", "e", "'t' is held by .* alone"),
        ({**GOOD, "t": (0, "x0")}, "a t", "e", "'t' has size 0"),
        ({**GOOD, "t": (-1, "x0")}, "a t", "e", "'t' has size -1"),
        ({**GOOD, "t": (1.5, "x0")}, "a t", "e", "'t' has size 1.5"),
        ({**GOOD, "t": (2, "xz0")}, "a t", "e", "holders are x, y, 0, 1"),
        ({**GOOD, "t": (2, "x3")}, "a t", "e", "numbered 0..N-1"),
        (GOOD, "a", "e a", "y_layout must order the indices y holds"),
        (GOOD, "", "e", "x_layout must order the indices x holds"),
        (GOOD, "a a", "e", "x_layout must order"),
        (GOOD, "a", "", "y_layout must order"),
        ({"r": (2, "01"), "e": (3, "y1")}, "", "e", "x_layout must order"),
        ({"a": (2, "x01234567"), "e": (2, "y01234567")}, "a", "e", "N <= 7"),
    ],
)
def test_a_hypergraph_that_is_no_plan_is_refused(
    indices: dict[str, tuple[int, str]], x: str, y: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(2, 5, x, y, indices)


def test_index_names_must_differ() -> None:
    plan = ThreeCores().plan(24, 30)
    with pytest.raises(ValueError, match="names must differ"):
        Plan(24, 30, (*plan.indices, plan.indices[0]), plan.x_layout, plan.y_layout)


@pytest.mark.parametrize("size", [0, -3, 1.5, True, None, "8", float("nan")])
def test_in_and_out_features_must_be_positive_integers(size: object) -> None:
    with pytest.raises(ValueError, match="in_features must be a positive integer"):
        LowRank(rank=1).plan(size, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out_features must be a positive integer"):
        LowRank(rank=1).plan(8, size)  # type: ignore[arg-type]


def test_rho_beyond_what_a_block_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rho=5 is more than min\(alpha\*delta, beta\*epsilon\) = 4"):
        two_factor_plan(16, 16, {"gamma": 4, "alpha": 4, "phi": 4, "epsilon": 4, "rho": 5})
    with pytest.raises(ValueError, match="unknown index 'zeta'"):
        two_factor_plan(16, 16, {"zeta": 4})

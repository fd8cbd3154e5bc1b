"""Corners of layers, in-place verbs, text forms and groups."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lamella.nn import StructuredLinear, guide_, merge_, replace_
from lamella.optim import param_groups
from lamella.structures import Einsum, Index, LowRank, Plan, parse_structure


def structured() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8))
    replace_(model, {"0": LowRank(rank=2)})
    return model


def test_a_guide_may_be_looked_past_between_forward_and_backward() -> None:
    model = structured()
    guide = guide_(model, 5)
    guide.step()
    loss = model(torch.randn(2, 8)).sum()
    with guide.structured_only():
        model(torch.randn(2, 8))
    loss.backward()


def test_leaving_an_inner_structured_only_keeps_the_outer_one() -> None:
    model = structured()
    guide = guide_(model, 5)
    guide.step()
    with guide.structured_only():
        with guide.structured_only():
            pass
        assert model[0].guide_alpha.item() == 0


def test_a_module_under_two_names_is_not_split_by_a_rule_for_one() -> None:
    for rules in ({"a": LowRank(rank=2)}, {"a": LowRank(rank=2), "b": None}):
        shared = nn.Linear(8, 8)
        model = nn.ModuleDict({"a": shared, "b": shared})
        with pytest.raises(ValueError, match="same module"):
            replace_(model, rules)
        assert model["a"] is model["b"]


def test_merging_one_name_of_a_shared_layer_does_not_split_it() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared})
    replace_(model, {"*": LowRank(rank=2)})
    with pytest.raises(ValueError, match="same module"):
        merge_(model, ["a"])
    assert model["a"] is model["b"]


def test_merging_a_layer_with_hooks_is_refused_as_replacing_is() -> None:
    model = structured()
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks"):
        merge_(model)


def test_shared_factors_stay_shared_or_are_refused_when_merged() -> None:
    first, second = (StructuredLinear(8, 8, LowRank(rank=2), bias=False) for _ in range(2))
    second.factors = first.factors
    model = nn.Sequential(first, second)
    try:
        merge_(model)
    except ValueError as error:
        assert "shared" in str(error)  # noqa: PT017
    else:
        assert model[0].weight is model[1].weight


def test_a_frozen_bias_does_not_freeze_the_factors_of_a_layer_replaced_again() -> None:
    model = structured()
    model[0].bias.requires_grad_(False)
    replace_(model, {"0": LowRank(rank=3)})
    assert all(f.requires_grad for f in model[0].factors)


def test_from_linear_keeps_what_is_frozen_and_what_is_not() -> None:
    linear = nn.Linear(8, 8)
    linear.bias.requires_grad_(False)
    layer = StructuredLinear.from_linear(linear, LowRank(rank=2))
    assert layer.factors[0].requires_grad
    assert not layer.bias.requires_grad


def test_to_linear_in_float64_forms_the_product_in_float64() -> None:
    layer = StructuredLinear(256, 256, LowRank(rank=64))
    a, b = (f[0].double() for f in layer.factors)
    # float64 rounding of sums of 64 terms; a float32 product would be off by 1e-8
    torch.testing.assert_close(layer.to_linear(torch.float64).weight, (a @ b).T, rtol=1e-12, atol=1e-12)


def test_optimiser_state_saved_after_removal_loads_into_an_optimiser_of_the_unguided_model() -> None:
    def model_of() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        replace_(model, {"0": LowRank(rank=2), "1": LowRank(rank=3)})
        return model

    model = model_of()
    guide = guide_(model, 1)
    optimizer = torch.optim.AdamW(param_groups(model, 1e-3))
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    guide.step()
    guide.remove(optimizer)
    fresh = model_of()
    again = torch.optim.AdamW(param_groups(fresh, 1e-3))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(again.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])


@pytest.mark.parametrize(
    "text",
    [
        "LowRank(rank={[1]: 2})",
        "LowRank(rank={[1]})",
        "LowRank(rank=2, rank=5)",
        "LowRank(rank=" + "-" * 100_000 + "1)",
    ],
    ids=["unhashable key", "unhashable item", "option given twice", "deep nesting"],
)
def test_every_unreadable_structure_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_structure(text)


def test_index_names_of_mixed_kinds_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown index"):
        Einsum(sizes={1: 2, "a": 3})


def test_an_unknown_index_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        Einsum(sizes={"gama": 2})


def test_numpy_sizes_are_sizes() -> None:
    assert LowRank(rank=2).plan(np.int64(33), np.int64(44)).num_params == 2 * (33 + 44)  # type: ignore[arg-type]


def test_an_index_may_be_named_tokens() -> None:
    from lamella.ops import apply

    indices = (Index("tokens", 4, frozenset({"x", 0})), Index("e", 6, frozenset({"y", 0})))
    plan = Plan(4, 6, indices, ("tokens",), ("e",))
    assert apply(plan, torch.randn(3, 4), [torch.randn(1, 4, 6)]).shape == (3, 6)


def test_empty_rules_have_no_effect_and_are_refused() -> None:
    for call in (
        lambda: replace_(nn.Sequential(nn.Linear(8, 8)), {}),
        lambda: merge_(structured(), []),
        lambda: guide_(structured(), 5, rules=[]),
    ):
        with pytest.raises(ValueError, match="rule"):
            call()


def test_one_pattern_may_be_given_as_a_string_or_is_refused_by_name() -> None:
    assert replace_(nn.Sequential(nn.Linear(8, 8)), {"*": LowRank(rank=2)}, zero_last="0*")
    assert guide_(structured(), 5, rules="0*").layers
    assert merge_(nn.ModuleDict({"fc": structured()}), "fc.*")


def test_a_bare_structured_layer_is_pointed_to_to_linear() -> None:
    with pytest.raises(ValueError, match="to_linear"):
        merge_(StructuredLinear(8, 8, LowRank(rank=2)))


@pytest.mark.parametrize("size", [0, -768])
def test_a_budget_for_an_impossible_shape_names_the_shape(size: int) -> None:
    with pytest.raises(ValueError, match="in_features must be a positive integer"):
        LowRank(rank=1).at_budget(size, 768, params_frac=0.5)


def test_keeping_the_weights_of_a_meta_model_is_refused_or_remembered() -> None:
    """The new factors hold no projection and reset_parameters would draw random ones, silently."""
    with pytest.raises(ValueError, match="meta"):
        replace_(nn.Sequential(nn.Linear(8, 8, device="meta")), {"0": LowRank(rank=2)}, keep_weights=True)
    with pytest.raises(ValueError, match="meta"):
        StructuredLinear.from_linear(nn.Linear(8, 8, device="meta"), LowRank(rank=2))


@pytest.mark.parametrize("lr", [True, "1e-3", None])
def test_a_learning_rate_that_is_no_number_is_refused(lr: object) -> None:
    with pytest.raises(ValueError, match="lr must be a positive number"):
        param_groups(structured(), lr)  # type: ignore[arg-type]

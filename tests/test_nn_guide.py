"""Self-guided training: nothing changes at step 0, the share follows its schedule, and nothing stays behind."""

import copy
import math
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn

from lamella.nn import Guide, StructuredLinear, guide_, replace_
from lamella.optim import param_groups
from lamella.structures import BTT, BlockShuffle, LowRank

GUIDED = [case for case in CASES if case.plan.num_factors > 1]
EVERY = pytest.mark.parametrize("case", GUIDED, ids=lambda c: c.id)


def layer_of(case: Case, **options: Any) -> StructuredLinear:
    layer = StructuredLinear(case.in_features, case.out_features, case.structure, **options)
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.normal_()
    return layer


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    replace_(model, {"0": LowRank(rank=3), "2": BTT(gamma=4, phi=2)})
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, guide: Guide | None, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(16, 8)
        (model(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if guide is not None:
            guide.step()


@EVERY
def test_the_output_is_unchanged_at_step_zero(case: Case) -> None:
    layer = layer_of(case, dtype=torch.float64)
    x = torch.randn(5, case.in_features, dtype=torch.float64)
    before = layer(x)
    guide_(layer, 10)
    torch.testing.assert_close(layer(x), before)


@EVERY
def test_the_guide_starts_as_the_independent_dense_matrix(case: Case) -> None:
    layer = layer_of(case, dtype=torch.float64)
    guide_(layer, 10)
    assert layer.guide is not None
    torch.testing.assert_close(layer.guide.detach(), case.dense([f.detach() for f in layer.factors]))


@EVERY
def test_a_guided_layer_mixes_guide_and_structure_by_the_share(case: Case) -> None:
    layer = layer_of(case, dtype=torch.float64)
    guide = guide_(layer, 4)
    assert layer.guide is not None
    with torch.no_grad():
        layer.guide.normal_()
    x = torch.randn(5, case.in_features, dtype=torch.float64)
    structured = x @ case.dense([f.detach() for f in layer.factors]).T
    for t in range(6):
        share = (1 + math.cos(math.pi * t / 4)) / 2 if t < 4 else 0.0
        expected = share * (x @ layer.guide.T) + (1 - share) * structured + layer.bias
        # the share is a float32 number
        torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
        guide.step()


@EVERY
def test_both_parts_get_gradients_while_the_share_is_between_zero_and_one(case: Case) -> None:
    layer = layer_of(case)
    guide = guide_(layer, 4)
    guide.step()
    layer(torch.randn(8, case.in_features)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("steps", [1, 2, 7, 500])
def test_the_cosine_share_is_half_of_one_plus_cos(steps: int) -> None:
    guide = guide_(model_of(), steps)
    for t in range(steps + 3):
        expected = (1 + math.cos(math.pi * t / steps)) / 2 if t < steps else 0.0
        assert guide.alpha == pytest.approx(expected, abs=1e-15)
        assert guide.finished == (t >= steps)
        guide.step()


def test_the_linear_share_falls_evenly() -> None:
    guide = guide_(model_of(), 4, schedule="linear")
    seen = []
    for _ in range(6):
        seen.append(guide.alpha)
        guide.step()
    assert seen == [1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_share_is_exactly_one_first_and_exactly_zero_last(schedule: Any) -> None:
    model = model_of()
    guide = guide_(model, 3, schedule=schedule)
    assert model[0].guide_alpha.item() == 1
    for _ in range(3):
        guide.step()
    assert model[0].guide_alpha.item() == 0
    assert guide.alpha == 0


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "10", None], ids=repr)
def test_steps_must_be_a_positive_integer_and_the_model_is_left_untouched(steps: Any) -> None:
    model = model_of()
    with pytest.raises(ValueError, match="steps must be a positive integer"):
        guide_(model, steps)
    assert not any("guide" in name for name in model.state_dict())


def test_an_unknown_schedule_is_refused_with_a_suggestion() -> None:
    model = model_of()
    with pytest.raises(ValueError, match=r"unknown guide schedule 'cosin'.*did you mean 'cosine'"):
        guide_(model, 10, schedule="cosin")  # type: ignore[arg-type]
    assert model[0].guide is None


def test_what_cannot_be_guided_is_refused() -> None:
    with pytest.raises(ValueError, match="no structured layers to guide"):
        guide_(nn.Sequential(nn.Linear(4, 4)), 10)
    model = model_of()
    guide_(model, 10)
    with pytest.raises(ValueError, match="guided already"):
        guide_(model, 10)
    with pytest.raises(ValueError, match=r"matches no structured layer. There are: 0, 2"):
        guide_(model_of(), 10, rules=["4"])


def test_rules_choose_the_layers_to_guide() -> None:
    model = model_of()
    guide_(model, 10, rules=["2"])
    assert model[0].guide is None
    assert model[2].guide is not None


def test_the_guide_is_a_parameter_named_guide_and_other_names_stay() -> None:
    model = model_of()
    before = list(dict(model.named_parameters()))
    guide = guide_(model, 10)
    assert sorted(set(dict(model.named_parameters())) - set(before)) == ["0.guide", "2.guide"]
    assert "guided" in repr(model[0])
    guide.remove()
    assert list(dict(model.named_parameters())) == before
    assert sorted(model.state_dict()) == sorted(before)
    assert "guided" not in repr(model[0])


@EVERY
def test_removing_a_finished_guide_changes_no_output(case: Case) -> None:
    layer = layer_of(case)
    guide = guide_(layer, 3)
    assert layer.guide is not None
    with torch.no_grad():
        layer.guide.normal_()
    for _ in range(3):
        guide.step()
    x = torch.randn(5, case.in_features)
    before = layer(x)
    guide.remove()
    assert torch.equal(layer(x), before)
    assert layer.guide is None


OPTIMIZERS = pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw", "sgd-momentum"],
)


@OPTIMIZERS
@pytest.mark.parametrize("grouped", [False, True])
def test_removal_drops_the_guides_from_the_optimiser_and_training_goes_on(make: Any, grouped: bool) -> None:
    model = model_of()
    guide = guide_(model, 4)
    optimizer = make(param_groups(model, 1e-2) if grouped else model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rates = [group["lr"] for group in optimizer.param_groups]
    guides = [model[0].guide, model[2].guide]
    train(model, optimizer, guide, 4)
    schedule.step()
    assert all(g in optimizer.state for g in guides)
    others = {
        p: copy.deepcopy(optimizer.state[p]) for p in optimizer.state if not any(p is g for g in guides)
    }
    guide.remove(optimizer)
    assert not any(g in optimizer.state for g in guides)
    left = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, left)) == sorted(map(id, model.parameters()))
    for parameter, state in others.items():
        for key, value in state.items():
            kept = optimizer.state[parameter][key]
            assert torch.equal(kept, value) if isinstance(value, Tensor) else kept == value
    guide.remove(optimizer)  # a second call does nothing
    before = [p.clone() for p in model.parameters()]
    train(model, optimizer, None, 2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 3 for rate in rates])
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())


def test_evaluation_can_look_at_the_structured_part_alone() -> None:
    model = model_of()
    guide = guide_(model, 10)
    with torch.no_grad():
        model[0].guide.normal_()
    guide.step()
    x = torch.randn(4, 8)
    guided = model(x)
    with guide.structured_only():
        alone = model(x)
    assert torch.equal(model(x), guided)
    assert not torch.allclose(alone, guided)
    with pytest.raises(KeyError), guide.structured_only():
        raise KeyError
    assert torch.equal(model(x), guided), "the share comes back after an error too"
    guide.remove()
    torch.testing.assert_close(model(x), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casting_a_guided_model_keeps_the_share_exact(dtype: torch.dtype) -> None:
    model = model_of()
    guide = guide_(model, 500)
    guide.step()
    exact = model[0].guide_alpha.clone()
    assert exact.item() == pytest.approx(guide.alpha, rel=1e-7)
    model.to(dtype)
    assert model[0].guide.dtype == dtype
    assert torch.equal(model[0].guide_alpha, exact)
    assert model(torch.randn(3, 8, dtype=dtype)).dtype == dtype


def test_autocast_of_a_guided_layer_gives_bfloat16() -> None:
    model = model_of()
    guide = guide_(model, 5)
    guide.step()
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](torch.randn(3, 8))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert model[0].guide.grad.dtype == torch.float32


def test_a_guided_layer_compiles_once_for_all_shares() -> None:
    torch._dynamo.reset()
    layer = StructuredLinear(8, 8, BlockShuffle(num_blocks=2))
    guide = guide_(layer, 6)
    compiled = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    fast = torch.compile(layer, fullgraph=True, backend=counting)
    with torch.no_grad():
        layer.guide.normal_()  # type: ignore[union-attr]
    x = torch.randn(3, 8)
    for _ in range(8):
        torch.testing.assert_close(fast(x), layer(x))
        guide.step()
    assert compiled == 1
    guide.remove()
    torch.testing.assert_close(fast(x), layer(x))
    assert compiled == 2


def test_a_saved_schedule_goes_on_where_it_stopped() -> None:
    model = model_of()
    guide = guide_(model, 10)
    for _ in range(4):
        guide.step()
    state, weights = copy.deepcopy(guide.state_dict()), copy.deepcopy(model.state_dict())
    other = model_of()
    resumed = guide_(other, 10)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert resumed.alpha == guide.alpha
    x = torch.randn(3, 8)
    assert torch.equal(other(x), model(x))
    guide.step()
    resumed.step()
    assert torch.equal(other(x), model(x))
    for different in (guide_(model_of(), 11), guide_(model_of(), 10, schedule="linear")):
        with pytest.raises(ValueError, match="saved guide ran 10 cosine steps"):
            different.load_state_dict(state)


def test_training_resumes_exactly_before_during_and_after_the_guided_phase() -> None:
    def run(stop: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = model_of()
        guide: Guide | None = guide_(model, 4)
        optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
        for step in range(8):
            if step == stop:
                gone = guide is None
                weights, moments = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                schedule = guide and guide.state_dict()
                model = model_of()
                guide = guide_(model, 4)
                optimizer = torch.optim.AdamW(param_groups(model, 1e-2))
                if gone:  # the groups are made as they were before the removal
                    guide.remove(optimizer)
                    guide = None
                model.load_state_dict(weights)
                optimizer.load_state_dict(moments)
                if guide is not None and schedule is not None:
                    guide.load_state_dict(schedule)
            torch.manual_seed(100 + step)
            train(model, optimizer, guide, 1)
            if guide is not None and guide.finished and step == 5:
                guide.remove(optimizer)
                guide = None
        return list(model.parameters())

    whole = run(None)
    for stop in (0, 2, 5, 7):
        for expected, got in zip(whole, run(stop), strict=True):
            assert torch.equal(expected, got), f"resumed at step {stop}"


def test_a_frozen_layer_has_a_frozen_guide() -> None:
    layer = StructuredLinear(8, 8, LowRank(rank=2)).requires_grad_(False)
    guide_(layer, 5)
    assert layer.guide is not None
    assert not layer.guide.requires_grad


def test_a_guided_layer_is_copied_with_its_share() -> None:
    model = model_of()
    guide = guide_(model, 5)
    guide.step()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 8)
    assert torch.equal(twin(x), model(x))
    guide.step()
    assert twin[0].guide_alpha.item() != model[0].guide_alpha.item()


def test_resetting_a_guided_layer_makes_the_guide_its_matrix_again() -> None:
    layer = StructuredLinear(8, 8, BTT(gamma=2, phi=2), dtype=torch.float64)
    guide_(layer, 5)
    layer.reset_parameters()
    assert layer.guide is not None
    torch.testing.assert_close(layer.guide.detach(), layer.dense().detach())


def test_a_meta_model_can_be_guided_made_real_and_reset() -> None:
    layer = StructuredLinear(8, 8, BTT(gamma=2, phi=2), device="meta")
    guide = guide_(layer, 5)
    assert layer.guide is not None
    assert layer.guide.is_meta
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    x = torch.randn(3, 8)
    before = layer(x)
    for _ in range(5):
        guide.step()
    torch.testing.assert_close(layer(x), before)
    guide.remove()
    torch.testing.assert_close(layer(x), before)

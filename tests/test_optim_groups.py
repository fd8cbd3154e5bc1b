"""Groups: learning rates from factor fans, every trainable parameter once, no decay where there should be none."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import nn

from lamella.nn import StructuredLinear, guide_
from lamella.optim import format_groups, param_groups
from lamella.structures import BTT, BlockDense, BlockShuffle, LowRank


class Model(nn.Module):
    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=hidden_size)
        self.embedding = nn.Embedding(10, 64)
        self.norm = nn.LayerNorm(64)
        self.up = StructuredLinear(64, 128, LowRank(rank=8))
        self.down = StructuredLinear(128, 64, BTT(gamma=8, phi=4, rho=2))
        self.dense = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.zeros(4, 5))
        self.head = nn.Linear(64, 10, bias=False)


def settings(groups: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def test_a_factors_rate_is_the_rule_of_the_paper(case: Case) -> None:
    layer = StructuredLinear(case.in_features, case.out_features, case.structure)
    got = settings(param_groups(layer, lr=1e-3, weight_decay=0.1, base_width=32, width=128))
    for k, factor in enumerate(layer.factors):
        fan_in = factor.shape[1]
        expected = 1e-3 * (32 / 128) * (case.in_features / fan_in) / len(layer.factors)
        assert got[id(factor)] == (pytest.approx(expected), 0.1), f"factor {k}"
    assert layer.bias is not None
    assert got[id(layer.bias)] == (1e-3, 0)


def test_factors_of_the_papers_structures_have_the_rates_written_out() -> None:
    lr = 1e-3
    low_rank = StructuredLinear(64, 128, LowRank(rank=8))  # A: alpha = 64; B: rho = 8
    block_dense = StructuredLinear(64, 128, BlockDense(num_blocks=4, rank=16))  # A: 16; B: gamma rho = 16
    shuffle = StructuredLinear(64, 128, BlockShuffle(num_blocks=2))  # A: 32; B: gamma rho = 32
    btt = StructuredLinear(64, 128, BTT(gamma=8, phi=8))  # A: 8; B: 8
    for layer, expected in (
        (low_rank, (lr * 1 / 2, lr * 8 / 2)),
        (block_dense, (lr * 4 / 2, lr * 4 / 2)),
        (shuffle, (lr * 2 / 2, lr * 2 / 2)),
        (btt, (lr * 8 / 2, lr * 8 / 2)),
    ):
        got = settings(param_groups(layer, lr))
        assert tuple(got[id(f)][0] for f in layer.factors) == pytest.approx(expected)


def test_embeddings_norms_and_biases_keep_the_rate_and_dense_layers_and_guides_follow_the_width() -> None:
    model = Model()
    guide_(model, 5)
    got = settings(param_groups(model, lr=1e-2, weight_decay=0.3, base_width=16))
    assert got[id(model.embedding.weight)] == (1e-2, 0.3)
    assert got[id(model.norm.weight)] == (1e-2, 0)
    assert got[id(model.norm.bias)] == (1e-2, 0)
    assert got[id(model.dense.weight)] == (pytest.approx(1e-2 / 4), 0.3)
    assert got[id(model.dense.bias)] == (1e-2, 0)
    assert got[id(model.head.weight)] == (pytest.approx(1e-2 / 4), 0.3)
    assert got[id(model.up.guide)] == (pytest.approx(1e-2 / 4), 0.3)
    assert got[id(model.scale)] == (1e-2, 0)
    assert got[id(model.table)][1] == 0.3


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = Model()
    model.head.weight = nn.Parameter(model.head.weight.detach())
    model.again = model.dense
    listed = [id(p) for g in param_groups(model, 1e-3) for p in g["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters()}


def test_a_head_tied_to_an_embedding_follows_the_embedding() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    groups = param_groups(model, 1e-3, base_width=16)
    assert settings(groups)[id(model.head.weight)][0] == 1e-3
    assert sum(p is model.head.weight for g in groups for p in g["params"]) == 1


def test_a_factor_shared_by_two_layers_is_listed_once() -> None:
    first, second = (StructuredLinear(8, 8, LowRank(rank=2)) for _ in range(2))
    second.factors[0] = first.factors[0]
    listed = [id(p) for g in param_groups(nn.Sequential(first, second), 1e-3) for p in g["params"]]
    assert len(listed) == len(set(listed)) == 5


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.up.requires_grad_(False)
    model.embedding.requires_grad_(False)
    listed = {id(p) for g in param_groups(model, 1e-3) for p in g["params"]}
    assert listed == {id(p) for p in model.parameters() if p.requires_grad}
    with pytest.raises(ValueError, match="no parameter to train"):
        param_groups(model.requires_grad_(False), 1e-3)


def test_groups_differ_in_rate_or_decay_and_an_optimiser_takes_them() -> None:
    model = Model()
    groups = param_groups(model, 1e-3, base_width=16)
    assert len({(g["lr"], g["weight_decay"]) for g in groups}) == len(groups)
    for optimizer in (torch.optim.AdamW(groups), torch.optim.SGD(param_groups(model, 1e-3))):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert torch.isfinite(model.up.factors[0]).all()
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(
            [
                g["lr"]
                for g in (groups if isinstance(optimizer, torch.optim.AdamW) else param_groups(model, 1e-3))
            ]
        )


def test_the_width_comes_from_the_config_or_by_hand() -> None:
    by_config = settings(param_groups(Model(64), 1e-3, base_width=16))
    assert sorted(v[0] for v in by_config.values()) == sorted(
        v[0] for v in settings(param_groups(Model(999), 1e-3, base_width=16, width=64)).values()
    )
    model = Model()
    del model.config
    assert param_groups(model, 1e-3)
    with pytest.raises(ValueError, match=r"no config.hidden_size: give width="):
        param_groups(model, 1e-3, base_width=16)
    with pytest.raises(ValueError, match="width has no effect without base_width"):
        param_groups(model, 1e-3, width=16)


def test_a_layer_at_base_width_has_its_rate_from_fans_alone() -> None:
    model = Model()
    with_rule = settings(param_groups(model, 1e-3, base_width=64))
    without = settings(param_groups(model, 1e-3))
    assert with_rule == without


@pytest.mark.parametrize("lr", [0, -1e-3, math.nan, math.inf])
def test_a_learning_rate_is_positive(lr: float) -> None:
    with pytest.raises(ValueError, match="lr must be a positive number"):
        param_groups(Model(), lr)


@pytest.mark.parametrize("decay", [-0.1, math.nan, math.inf])
def test_a_weight_decay_is_not_negative(decay: float) -> None:
    with pytest.raises(ValueError, match="weight_decay must be zero or a positive"):
        param_groups(Model(), 1e-3, weight_decay=decay)


@pytest.mark.parametrize("width", [0, -64, 1.5, "64"])
def test_widths_are_positive_integers(width: Any) -> None:
    with pytest.raises(ValueError, match="base_width must be a positive integer"):
        param_groups(Model(), 1e-3, base_width=width)
    with pytest.raises(ValueError, match="width must be a positive integer"):
        param_groups(Model(), 1e-3, base_width=16, width=width)


def test_the_table_names_each_group_and_counts_every_parameter() -> None:
    model = Model()
    groups = param_groups(model, 1e-3)
    text = format_groups(groups).splitlines()
    assert text[0].split() == ["lr", "decay", "tensors", "parameters", "what"]
    assert len(text) == 1 + len(groups)
    counted = sum(int(line.split()[3].replace(",", "")) for line in text[1:])
    assert counted == sum(p.numel() for p in model.parameters())
    for what in ("embeddings", "factors", "dense layers", "norms, biases, scalars"):
        assert any(what in line for line in text)


def test_three_factor_layers_divide_the_rate_by_three() -> None:
    case = next(c for c in CASES if c.plan.num_factors == 3)
    layer = StructuredLinear(case.in_features, case.out_features, case.structure, bias=False)
    rates = settings(param_groups(layer, 3.0))
    for factor in layer.factors:
        assert rates[id(factor)][0] == pytest.approx(case.in_features / factor.shape[1])

"""replace_ and merge_: by name rule, in place, all or nothing."""

import copy
import math
from typing import Any

import pytest
import torch
from cases import PROJECTABLE, UNPADDED, Case, relative_error, rms
from torch import Tensor, nn

from lamella.nn import StructuredLinear, guide_, linear_layers, merge_, replace_, structured_layers
from lamella.structures import BTT, BlockShuffle, Dense, Kronecker, LowRank, Structure


class Block(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 16, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width, bias=False, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x + self.attention(x))))


def model_of(dtype: torch.dtype | None = None) -> nn.Sequential:
    return nn.Sequential(Block(dtype=dtype), Block(dtype=dtype), nn.LayerNorm(8, dtype=dtype))


def snapshot(model: nn.Module) -> tuple[dict[str, type], dict[str, Tensor], dict[str, int]]:
    return (
        {name: type(module) for name, module in model.named_modules()},
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: id(module) for name, module in model.named_modules()},
    )


def same(before: Any, after: Any) -> bool:
    return (
        before[0] == after[0]
        and before[2] == after[2]
        and before[1].keys() == after[1].keys()
        and all(torch.equal(before[1][k], after[1][k]) or before[1][k].isnan().any() for k in before[1])
    )


FFN = {"*.up": LowRank(rank=3), "*.down": BTT(gamma=4, phi=2)}


def test_the_layers_a_rule_names_are_replaced_and_no_others() -> None:
    model = model_of()
    chosen = replace_(model, FFN)
    assert chosen == {
        "0.up": LowRank(rank=3),
        "0.down": BTT(gamma=4, phi=2),
        "1.up": LowRank(rank=3),
        "1.down": BTT(gamma=4, phi=2),
    }
    assert {name: layer.structure for name, layer in structured_layers(model).items()} == chosen
    assert type(model[0].attention) is nn.Linear
    assert model(torch.randn(2, 3, 8)).shape == (2, 3, 8)


def test_the_first_rule_that_matches_wins_and_none_leaves_a_layer() -> None:
    model = model_of()
    chosen = replace_(model, {"0.*": None, "*.up": LowRank(rank=2), "*": BlockShuffle(num_blocks=2)})
    assert chosen == {
        "1.up": LowRank(rank=2),
        "1.attention": BlockShuffle(num_blocks=2),
        "1.down": BlockShuffle(num_blocks=2),
    }
    assert type(model[0].up) is nn.Linear


def test_patterns_are_case_sensitive_and_stars_cross_dots() -> None:
    model = nn.ModuleDict({"A": model_of()})
    with pytest.raises(ValueError, match="matches no linear layer"):
        replace_(model, {"a.*": LowRank(rank=2)})
    assert list(replace_(model, {"A.*.[ud]*": LowRank(rank=2)})) == [
        "A.0.up",
        "A.0.down",
        "A.1.up",
        "A.1.down",
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"mlp.*": LowRank(rank=2)},
            "'mlp.*' matches no linear layer. There are: 0.attention, 0.up, 0.down, 1.att",
        ),
        ({"*": LowRank(rank=2), "*.up": BTT()}, "'*.up' has no effect: earlier rules decide"),
        ({"*": None, "0.up": BTT()}, "'0.up' has no effect"),
        ({"*.up": LowRank(rank=2), "nothing": None}, "'nothing' matches no linear layer"),
        ({"*.up": "LowRank(rank=2)"}, "rule '*.up': expected a structure"),
        ({"*.up": LowRank}, "rule '*.up': expected a structure"),
        ({"*.down": LowRank(rank=2), "*.up": LowRank(rank=9)}, "0.up: LowRank(rank=9) does not fit 8 -> 16"),
    ],
)
def test_a_rule_without_effect_or_fit_is_an_error_that_leaves_the_model_untouched(
    rules: Any, message: str
) -> None:
    model = model_of()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"^") as error:
        replace_(model, rules)
    assert message in str(error.value)
    assert same(before, snapshot(model))


def test_new_factors_have_the_replaced_layers_standard_deviation_and_a_zero_bias() -> None:
    """A full-rank LowRank of a Gaussian keeps all of its energy, so that W's deviation is the old one."""
    model = nn.ModuleDict({"a": nn.Linear(64, 96), "b": nn.Linear(96, 64)})
    nn.init.normal_(model["a"].weight, std=0.02)
    nn.init.normal_(model["b"].weight, std=0.3)
    replace_(model, {"a": LowRank(rank=64), "b": LowRank(rank=64)})
    for name, std in (("a", 0.02), ("b", 0.3)):
        layer = model[name]
        assert isinstance(layer, StructuredLinear)
        assert rms(layer.dense().detach()) / std == pytest.approx(1, abs=5 / math.sqrt(2 * 64 * 96))
        assert layer.bias is not None
        assert not layer.bias.any()


def test_mup_init_by_request() -> None:
    model = nn.ModuleDict({"a": nn.Linear(256, 256)})
    replace_(model, {"a": LowRank(rank=64)}, init="mup")
    a, b = model["a"].factors
    assert rms(a.detach()) == pytest.approx(math.sqrt(64) / 256, rel=0.05)
    assert rms(b.detach()) == pytest.approx(1 / math.sqrt(64), rel=0.05)


@pytest.mark.parametrize("case", UNPADDED, ids=lambda c: c.id)
@pytest.mark.parametrize("bias", [True, False])
def test_keeping_the_weights_of_a_member_changes_no_output(case: Case, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(case.in_features, case.out_features, bias, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.copy_(case.dense(case.factors()))
    x = torch.randn(4, case.in_features, dtype=torch.float64)
    before = model(x)
    replace_(model, {"0": case.structure}, keep_weights=True)
    assert isinstance(model[0], StructuredLinear)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("case", PROJECTABLE, ids=lambda c: c.id)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_replacing_then_merging_restores_the_class_and_keeps_the_output(
    case: Case, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(case.in_features, case.out_features, dtype=dtype)).eval()
    replace_(model, {"0": case.structure})
    with torch.no_grad():
        model[0].bias.normal_()  # type: ignore[union-attr]
    x = torch.randn(4, case.in_features, dtype=dtype)
    exact = (
        x.double() @ case.dense([f.detach().double() for f in model[0].factors]).T + model[0].bias.double()
    )
    assert merge_(model) == {"0": case.structure}
    assert type(model[0]) is nn.Linear
    assert model[0].weight.dtype == dtype
    assert not model[0].training
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    epsilon = torch.finfo(dtype).eps
    assert relative_error(model(x).detach(), exact) < 8 * epsilon


def test_merge_takes_rules_and_says_what_it_merged() -> None:
    model = model_of()
    replace_(model, FFN)
    assert merge_(model, ["1.*"]) == {"1.up": FFN["*.up"], "1.down": FFN["*.down"]}
    assert sorted(structured_layers(model)) == ["0.down", "0.up"]
    with pytest.raises(ValueError, match=r"'1.up' matches no structured layer. There are: 0.up, 0.down"):
        merge_(model, ["1.up"])
    merge_(model)
    with pytest.raises(ValueError, match="no structured layers to merge"):
        merge_(model)


def test_a_model_without_linear_layers_says_so() -> None:
    with pytest.raises(ValueError, match="no linear layers"):
        replace_(nn.Sequential(nn.ReLU()), {"*": LowRank(rank=2)})


def test_a_bare_linear_layer_is_pointed_to_from_linear() -> None:
    with pytest.raises(ValueError, match="from_linear"):
        replace_(nn.Linear(8, 8), {"*": LowRank(rank=2)})


def test_structured_layers_can_be_replaced_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))
    replace_(model, {"0": LowRank(rank=2)})
    weight = model[0].dense().detach()
    replace_(model, {"0": LowRank(rank=4)}, keep_weights=True)
    assert model[0].structure == LowRank(rank=4)
    torch.testing.assert_close(model[0].dense(), weight)
    merge_(model)
    assert type(model[0]) is nn.Linear


# --- GPT-2's transposed layer


@pytest.fixture(scope="module")
def conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


@pytest.mark.parametrize(("n_in", "n_out"), [(8, 8), (8, 24), (24, 8)])
@pytest.mark.parametrize(
    "structure", [LowRank(rank=8), BlockShuffle(num_blocks=2), Kronecker(in1=2, out1=4)], ids=repr
)
def test_conv1d_is_a_linear_layer_and_comes_back_as_conv1d(
    conv1d: type[nn.Module], structure: Structure, n_in: int, n_out: int
) -> None:
    model = nn.Sequential(conv1d(n_out, n_in)).double()
    x = torch.randn(3, n_in, dtype=torch.float64)
    assert replace_(model, {"0": structure}) == {"0": structure}
    layer = model[0]
    assert isinstance(layer, StructuredLinear)
    assert (layer.in_features, layer.out_features) == (n_in, n_out)
    with torch.no_grad():
        layer.bias.normal_()  # type: ignore[union-attr]
    before = model(x)
    merge_(model)
    assert type(model[0]) is conv1d
    assert model[0].weight.shape == (n_in, n_out)
    assert model[0].weight.is_contiguous()
    assert (model[0].nx, model[0].nf) == (n_in, n_out)
    torch.testing.assert_close(model(x), before)
    replace_(model, {"0": structure}, keep_weights=True)
    torch.testing.assert_close(model(x), before)
    copied = copy.deepcopy(model)
    merge_(copied)
    assert type(copied[0]) is conv1d


# --- sharing


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


def test_a_tied_weight_is_refused_and_the_model_left_untouched() -> None:
    model = Tied()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"head: its weight is shared with embedding.*untie it first"):
        replace_(model, {"*": LowRank(rank=2)})
    assert same(before, snapshot(model))
    assert model.head.weight is model.embedding.weight
    replace_(model, {"head": None, "*": LowRank(rank=2)})
    assert model.head.weight is model.embedding.weight


def test_two_linear_layers_with_one_weight_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="shared with"):
            replace_(model, {name: LowRank(rank=2)})
    assert type(model["a"]) is type(model["b"]) is nn.Linear


def test_a_module_used_under_two_names_stays_one_module() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert replace_(model, {"*": LowRank(rank=2)}) == {"a": LowRank(rank=2), "b": LowRank(rank=2)}
    assert model["a"] is model["b"]
    assert isinstance(model["a"], StructuredLinear)
    assert set(merge_(model)) == {"a", "b"}
    assert model["a"] is model["b"]


def test_a_module_under_two_names_takes_one_structure() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared})
    with pytest.raises(ValueError, match="same module"):
        replace_(model, {"a": LowRank(rank=2), "b": LowRank(rank=3)})
    assert model["a"] is model["b"] is shared


# --- weights that are special


def test_a_zero_weight_stays_zero_and_still_trains() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    nn.init.zeros_(model[0].weight)
    replace_(model, {"0": LowRank(rank=2)})
    assert not model[0].dense().any()
    model(torch.randn(4, 8)).sum().backward()
    assert any(f.grad.any() for f in model[0].factors)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keep_weights", [True, False])
def test_weights_that_are_not_finite_are_refused(bad: float, keep_weights: bool) -> None:
    model = model_of()
    with torch.no_grad():
        model[1].up.weight[2, 1] = bad
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"1.up: .*NaN or infinite"):
        replace_(model, {"*.up": LowRank(rank=2)}, keep_weights=keep_weights)
    assert same(before, snapshot(model))


def test_frozen_parameters_stay_frozen() -> None:
    for keep_weights in (True, False):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        model[1].bias.requires_grad_(False)
        replace_(model, {"*": LowRank(rank=2)}, keep_weights=keep_weights)
        wanted = [(False, False), (True, False), (True, True)]
        for layer, (factors, bias) in zip(model, wanted, strict=True):
            assert {f.requires_grad for f in layer.factors} == {factors}
            assert layer.bias.requires_grad == bias
        merge_(model)
        for layer, (factors, bias) in zip(model, wanted, strict=True):
            assert (layer.weight.requires_grad, layer.bias.requires_grad) == (factors, bias)


def test_training_mode_is_kept() -> None:
    model = model_of().eval()
    model[0].up.train()
    replace_(model, {"*.up": LowRank(rank=2)})
    assert (model[0].up.training, model[1].up.training) == (True, False)
    merge_(model)
    assert (model[0].up.training, model[1].up.training) == (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_any_dtype_keeps_it(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    replace_(model, FFN)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(torch.randn(2, 8, dtype=dtype)).dtype == dtype
    merge_(model)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_model_on_the_meta_device_is_replaced_there_and_drawn_later() -> None:
    with torch.device("meta"):
        model = model_of()
    replace_(model, FFN)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(f.any() for layer in structured_layers(model).values() for f in layer.factors)


def test_layers_with_hooks_are_refused() -> None:
    def nothing(*_: Any) -> None:
        return None

    for register in (
        lambda m: m.register_forward_hook(nothing),
        lambda m: m.register_forward_pre_hook(nothing),
        lambda m: m.register_full_backward_hook(nothing),
        lambda m: m.register_full_backward_pre_hook(nothing),
    ):
        model = model_of()
        handle = register(model[0].up)
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"0.up: the layer carries hooks"):
            replace_(model, {"*.up": LowRank(rank=2)})
        assert same(before, snapshot(model))
        handle.remove()
        replace_(model, {"*.up": LowRank(rank=2)})


def test_subclasses_of_nn_linear_are_left_alone() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8)})
    assert list(linear_layers(model)) == ["up"]
    with pytest.raises(ValueError, match=r"matches no linear layer. There are: up"):
        replace_(model, {"attention.out_proj": LowRank(rank=2)})
    assert list(replace_(model, {"*": LowRank(rank=2)})) == ["up"]
    x = torch.randn(3, 2, 8)
    assert torch.isfinite(model["attention"].eval()(x, x, x)[0]).all()


def test_code_that_reads_the_weight_directly_gets_nan_and_not_another_function() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    replace_(encoder, {"linear*": LowRank(rank=2)})
    x = torch.randn(2, 3, 8)
    trained = encoder.train()(x)
    assert torch.isfinite(trained).all()
    with torch.no_grad():
        fast = encoder.eval()(x)  # torch's fused path reads linear1.weight
    assert torch.isnan(fast).all() or torch.allclose(fast, trained, atol=1e-5)


def test_zero_last_starts_the_named_layers_at_zero() -> None:
    model = model_of()
    replace_(model, FFN, zero_last=["*.down"])
    assert not model[0].down.dense().any()
    assert model[0].up.dense().any()
    with pytest.raises(ValueError, match="matches no replaced layer"):
        replace_(model_of(), {"*.up": LowRank(rank=2)}, zero_last=["*.down"])


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="no effect"):
        replace_(model_of(), FFN, keep_weights=True, init="mup")
    with pytest.raises(ValueError, match="no effect"):
        replace_(model_of(), FFN, keep_weights=True, zero_last=["*.down"])
    with pytest.raises(ValueError, match="unknown init"):
        replace_(model_of(), FFN, init="svd")  # type: ignore[arg-type]


def test_a_guided_layer_is_neither_replaced_nor_merged() -> None:
    model = model_of()
    replace_(model, {"*.up": LowRank(rank=2), "*.down": LowRank(rank=2)})
    guide = guide_(model, 10, rules=["0.up"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"0.up: the layer is guided: call remove"):
        merge_(model)
    with pytest.raises(ValueError, match=r"0.up: the layer is guided: call remove"):
        replace_(model, {"0.up": LowRank(rank=3)})
    with pytest.raises(ValueError, match="guided"):
        model[0].up.to_linear()
    assert same(before, snapshot(model))
    merge_(model, ["1.*"])
    guide.remove()
    merge_(model)


def test_dense_as_a_structure_keeps_the_matrix() -> None:
    model = nn.Sequential(nn.Linear(8, 12))
    x = torch.randn(3, 8)
    before = model(x)
    replace_(model, {"0": Dense()}, keep_weights=True)
    torch.testing.assert_close(model(x), before)

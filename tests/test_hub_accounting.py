"""Costs: the papers' numbers, FlopCounterMode, and what autograd really keeps."""

import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from lamella import BTT, BlockDense, LowRank, Structure, guide_, replace_
from lamella.hub import (
    Account,
    account,
    build_model,
    ffn_rules,
    fixed_flop_ratio,
    format_account,
    load_config,
)


def counted(name: str, structure: Structure | None = None) -> Account:
    model = build_model(load_config(name), "meta")
    if structure is not None:
        replace_(model, ffn_rules(model, structure))
    return account(model, activations=False)


@pytest.mark.parametrize(("name", "millions"), [("s", 109.6), ("m", 335.1), ("l", 729.1), ("xl", 1274.1)])
def test_totals_are_the_papers(name: str, millions: float) -> None:
    assert round(counted(name).parameters / 1e6, 1) == millions


def test_ffn_parameters_of_s_are_the_papers() -> None:
    def weights(result: Account) -> float:  # the papers count no biases
        return sum(layer.multiply_adds for layer in result.layers if layer.kind == "ffn") / 1e6

    assert round(weights(counted("s")), 1) == 56.6
    assert round(weights(counted("s", LowRank(rank=192))), 1) == 20.9


@pytest.mark.parametrize(("tied", "millions"), [(True, 219.4), (False, 252.2)])
def test_totals_of_the_wide_and_structured_m_are_the_papers(tied: bool, millions: float) -> None:
    wide = {"intermediate_size": 4864, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = build_model(load_config("m", **wide, tie_word_embeddings=tied), "meta")
    replace_(model, ffn_rules(model, LowRank(rank=512)))
    assert round(account(model, activations=False).parameters / 1e6, 1) == millions


RATIOS = [
    ("s", LowRank(rank=192), 0.301),
    ("m", LowRank(rank=256), 0.380),
    ("l", LowRank(rank=384), 0.413),
    ("xl", LowRank(rank=512), 0.432),
    ("s", BlockDense(num_blocks=2, rank=256), 0.301),
    ("m", BlockDense(num_blocks=4, rank=384), 0.395),
    ("l", BlockDense(num_blocks=2, rank=512), 0.413),
    ("xl", BlockDense(num_blocks=4, rank=768), 0.449),
]


@pytest.mark.parametrize(("name", "structure", "ratio"), RATIOS, ids=repr)
def test_fixed_flop_ratios_are_the_papers(name: str, structure: Structure, ratio: float) -> None:
    assert round(fixed_flop_ratio(counted(name), counted(name, structure)), 3) == ratio


SMALL: list[tuple[PreTrainedConfig, Structure | None]] = [
    (load_config("tiny", num_hidden_layers=2), None),
    (load_config("tiny", num_hidden_layers=2), BTT()),
    (
        load_config("tiny", num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=False),
        LowRank(rank=8),
    ),
    (GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=64), LowRank(rank=8)),
    (
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=64,
            max_position_embeddings=64,
        ),
        BlockDense(num_blocks=2, rank=8),
    ),
]


def small(config: PreTrainedConfig, structure: Structure | None, device: str = "cpu") -> nn.Module:
    model = build_model(config, device)
    if structure is not None:
        replace_(model, ffn_rules(model, structure))
    return model


@pytest.mark.parametrize(("config", "structure"), SMALL)
def test_forward_flops_are_those_of_flop_counter_mode(
    config: PreTrainedConfig, structure: Structure | None
) -> None:
    model = small(config, structure)
    model.set_attn_implementation("eager")  # whose two matrix products FlopCounterMode sees
    ids = torch.zeros(2, 48, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    rope = 0 if config.model_type == "gpt2" else _rope_flops(model)
    assert (
        counter.get_total_flops() == account(model, 48, activations=False).forward_flops * ids.numel() + rope
    )


def _rope_flops(model: nn.Module) -> int:
    """Llama forms its angles by a matrix product; Starcoder2 multiplies element by element."""
    if model.config.model_type != "llama":
        return 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.model.rotary_emb(torch.zeros(1), torch.arange(48)[None])
    return counter.get_total_flops()


@pytest.mark.parametrize(("config", "structure"), SMALL)
def test_activation_bytes_are_what_autograd_keeps(
    config: PreTrainedConfig, structure: Structure | None
) -> None:
    model = small(config, structure).eval()
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, 48, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    real = sum(storage.nbytes() for storage in kept.values())
    assert account(model, 48).activation_bytes == pytest.approx(real, rel=0.01)
    assert account(small(config, structure, "meta").eval(), 48).activation_bytes == pytest.approx(
        real, rel=0.01
    )


def test_totals_are_sums_over_distinct_parameters() -> None:
    model = small(load_config("tiny"), BTT())
    result = account(model)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.weight_bytes == 4 * result.parameters
    assert result.parameters == sum(result.to_json()["parameters_by_kind"].values())
    assert result.parameters_of("head") == 0  # tied, counted as the embedding
    assert next(layer for layer in result.layers if layer.kind == "head").multiply_adds == 256 * 128


def test_a_guide_adds_its_dense_multiply_adds_to_training() -> None:
    model = small(load_config("tiny"), LowRank(rank=8))
    before = account(model)
    guide_(model, steps=10)
    guided = account(model)
    dense = 6 * 128 * 512
    assert guided.guide_multiply_adds == dense == guided.guide_parameters
    assert guided.parameters == before.parameters
    assert guided.training_flops == before.training_flops + 6 * dense == before.guided_training_flops


def test_structured_and_dense_layers_of_one_name_are_separate_rows() -> None:
    rows = [layer for layer in counted("tiny", LowRank(rank=8)).layers if layer.name.endswith("mlp.c_fc")]
    assert [(row.structure, row.count) for row in rows] == [("", 1), ("LowRank(rank=8)", 3)]


def test_xl_is_counted_in_seconds_and_the_model_is_left_alone() -> None:
    start = time.process_time()
    model = build_model(load_config("xl"), "meta")
    text = format_account(account(model))
    assert time.process_time() - start < 10
    assert "1,274,138,624" in text
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_plain_modules_are_counted_without_attention() -> None:
    result = account(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert (result.parameters, result.multiply_adds, result.activation_bytes) == (46, 40, None)


@pytest.mark.parametrize("context", [0, -1, True, 1.5])
def test_a_context_that_is_no_positive_integer_is_an_error(context: object) -> None:
    with pytest.raises(ValueError, match="context must be"):
        account(nn.Sequential(nn.Linear(2, 2)), context)  # type: ignore[arg-type]

"""Presets, config files, and which layers are feed-forward."""

import json
from pathlib import Path

import pytest
from transformers import (
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    ViTConfig,
)

from lamella import LowRank, replace_
from lamella.hub import PRESETS, build_model, ffn_rules, is_ffn, load_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 12,
}
FAMILIES: list[tuple[PreTrainedConfig, int]] = [  # with the feed-forward layers per block
    (LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64), 3),
    (Qwen2Config(**SIZES, num_key_value_heads=2, vocab_size=64), 3),
    (PhiConfig(**SIZES, num_key_value_heads=2, vocab_size=64), 2),
    (GPTNeoXConfig(**SIZES, vocab_size=64), 2),
    (OPTConfig(hidden_size=32, ffn_dim=64, num_attention_heads=2, num_hidden_layers=12, vocab_size=64), 2),
    (GPT2Config(n_embd=32, n_head=2, n_layer=12, vocab_size=64), 2),
    (BertConfig(**SIZES, vocab_size=64, architectures=["BertForMaskedLM"]), 2),
    (ViTConfig(**SIZES, image_size=8, patch_size=4), 2),
]


@pytest.mark.parametrize(("config", "per_block"), FAMILIES, ids=lambda v: getattr(v, "model_type", None))
def test_ffn_rules_cover_every_block_but_the_first(config: PreTrainedConfig, per_block: int) -> None:
    model = build_model(config, "meta")
    rules = ffn_rules(model, LowRank(rank=4))
    assert len(rules) == 11 * per_block
    assert not any(".0." in name for name in rules)
    assert sum(".10." in name for name in rules) == per_block
    assert not any("attention" in name or "attn" in name for name in rules)
    assert len(replace_(model, rules)) == 11 * per_block
    assert len(ffn_rules(model, LowRank(rank=4), all_blocks=True)) == 12 * per_block


def test_the_first_block_is_the_one_with_the_lowest_number() -> None:
    rules = ffn_rules(build_model(load_config("tiny"), "meta"), LowRank(rank=4))
    assert list(rules) == [f"model.layers.{k}.mlp.{part}" for k in (1, 2, 3) for part in ("c_fc", "c_proj")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.gate_proj", True),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.3.block_sparse_moe.gate", False),
        ("bert.encoder.layer.3.output.dense", True),
        ("bert.encoder.layer.3.attention.output.dense", False),
        ("bert.encoder.layer.3.intermediate.dense", True),
        ("bert.pooler.dense", False),
        ("lm_head", False),
        ("encoder.block.0.layer.1.DenseReluDense.wi", True),
    ],
)
def test_is_ffn_knows_the_usual_names(name: str, expected: bool) -> None:
    assert is_ffn(name) is expected


def test_a_model_without_feed_forward_layers_is_an_error_that_lists_its_layers() -> None:
    from torch import nn

    with pytest.raises(ValueError, match=r"no layers known as feed-forward.*0\.weird"):
        ffn_rules(nn.Sequential(nn.ModuleDict({"weird": nn.Linear(4, 4)})), LowRank(rank=2))


def test_a_model_of_one_block_says_that_the_first_block_stays_dense() -> None:
    model = build_model(load_config("tiny", num_hidden_layers=1), "meta")
    with pytest.raises(ValueError, match="cover all blocks"):
        ffn_rules(model, LowRank(rank=2))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_papers_transformer(name: str) -> None:
    config = load_config(name)
    assert (config.hidden_act, config.tie_word_embeddings, config.use_bias) == ("gelu", True, True)
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.intermediate_size == 4 * config.hidden_size
    assert config._attn_implementation == "sdpa"
    assert config.eos_token_id is None


def test_a_config_loads_from_a_file_or_a_directory_with_overrides(tmp_path: Path) -> None:
    load_config("tiny").save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert load_config(path).hidden_size == 128
        assert load_config(path, vocab_size=96).vocab_size == 96
    with pytest.raises(ValueError, match=r"no config field 'vocab_sise'.*did you mean 'vocab_size'"):
        load_config(tmp_path, vocab_sise=96)


def test_the_head_width_is_free(tmp_path: Path) -> None:
    config = load_config("m", head_dim=32)
    attention = build_model(config, "meta").model.layers[0].self_attn
    width = 16 * 32  # heads x head_dim, half the hidden size
    assert attention.q_proj.weight.shape == (width, 1024)
    assert sum(p.numel() for p in attention.parameters()) == 4 * 1024 * width + 3 * width + 1024
    load_config("tiny", head_dim=16).save_pretrained(tmp_path)
    for saved, head_dim in ((load_config(tmp_path), 16), (load_config(tmp_path, head_dim=8), 8)):
        assert build_model(saved, "meta").model.layers[0].self_attn.q_proj.out_features == 4 * head_dim


def test_building_a_model_does_not_change_the_config() -> None:
    config = load_config("tiny", vocab_size=32)
    before = config.to_json_string()
    build_model(config, "meta")
    assert config.to_json_string() == before


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tinny", {}, "did you mean 'tiny'"),
        ("tiny", {"hidden_sice": 8}, "did you mean 'hidden_size'"),
        ("tiny", {"hidden_size": 0}, "hidden_size must be positive"),
        ("tiny", {"num_hidden_layers": -1}, "num_hidden_layers must be positive"),
        ("tiny", {"head_dim": 0}, "head_dim must be positive"),
        ("tiny", {"head_dim": 5}, r"can't be a model[\s\S]*even"),
        ("tiny", {"num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
    ],
)
def test_wrong_models_are_errors_that_help(name: str, overrides: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(name, **overrides)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"model_type": "no-such-model"}), "{}"])
def test_a_file_that_is_no_config_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config"):
        load_config(tmp_path)


def test_a_directory_without_a_config_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_config(tmp_path)


def test_families_are_built_by_their_own_class() -> None:
    kinds = {type(build_model(config, "meta")).__name__ for config, _ in FAMILIES}
    assert kinds >= {"BertForMaskedLM", "ViTModel", "LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"}

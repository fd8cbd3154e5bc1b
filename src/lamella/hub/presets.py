"""Model presets, configs from files, and which linear layers are feed-forward."""

import copy
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Starcoder2Config

from lamella.hub.saving import build_structures_, take_structures
from lamella.nn import linear_layers
from lamella.structures import Structure, suggest


def _sizes(vocab: int, context: int, width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }


PRESETS: dict[str, dict[str, int]] = {
    "tiny": _sizes(vocab=256, context=128, width=128, layers=4, heads=4),
    "small": _sizes(vocab=4096, context=256, width=256, layers=6, heads=8),
    "s": _sizes(vocab=32000, context=1024, width=768, layers=12, heads=12),
    "m": _sizes(vocab=32000, context=1024, width=1024, layers=24, heads=16),
    "l": _sizes(vocab=32000, context=1024, width=1536, layers=24, heads=12),
    "xl": _sizes(vocab=32000, context=1024, width=2048, layers=24, heads=16),
}
"""Sizes of the presets. tiny and small train on a CPU; s, m, l and xl are those of arXiv 2407.09835."""

# The papers' Transformer: LayerNorm, exact GELU, RoPE, biases, tied embeddings, no dropout.
_PAPER: dict[str, Any] = {
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "sliding_window": None,
    "use_cache": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}


def load_config(name_or_path: str | os.PathLike[str], **overrides: Any) -> PreTrainedConfig:
    """The config of a preset, of a Hugging Face directory, or in a config.json file. Never uses the network.

    overrides: config fields to set, e.g. vocab_size=96.

    Raises: ValueError for an unknown name or field (with the nearest known one), a file that is no model config,
    or sizes that can't be a model.
    """
    path = Path(name_or_path)
    if str(name_or_path) in PRESETS:
        fields: dict[str, Any] = _PAPER | PRESETS[str(name_or_path)]
        known = _known(overrides, Starcoder2Config(**fields))
        try:
            config = Starcoder2Config(**fields | known)
        except StrictDataclassError as error:
            raise ValueError(f"these sizes can't be a model: {error}") from error
    elif path.exists():
        config = _from_file(path, {})
        if overrides:
            config = _from_file(path, _known(overrides, config))
    else:
        raise ValueError(
            f"unknown model {str(name_or_path)!r}{suggest(str(name_or_path), PRESETS)}. Give a preset "
            f"({', '.join(PRESETS)}), a Hugging Face model directory or a config.json file."
        )
    _check_sizes(config)
    return config


def build_model(
    config: PreTrainedConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A freshly initialised model, with the structures that the config names, if any.

    The class is the one in `config.architectures`, else the causal language model of the config's family, else
    its bare model. The config is not modified. On the meta device the model can be counted but not run.
    """
    config, ours = take_structures(copy.deepcopy(config))
    with torch.device(device or "cpu"):
        model = model_class(config)._from_config(config, dtype=dtype or config.dtype or torch.float32)
        build_structures_(model, ours)
    return model


_FFN_PARTS = {
    "mlp",
    "ffn",
    "ff",
    "feed_forward",
    "feedforward",
    "DenseReluDense",
    "block_sparse_moe",
    "experts",
}
_FFN_ENDS = {"fc1", "fc2"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def is_ffn(name: str) -> bool:
    """Whether a linear layer's full name is that of a feed-forward layer, in the naming of the usual families.

    Covers `.mlp.` (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, Starcoder2, GPT-2), `intermediate.dense` and
    `output.dense` outside attention (BERT, ViT), `fc1` and `fc2` (OPT, BART), T5 and DistilBERT. Routers of
    mixtures are not feed-forward layers.
    """
    parts = name.split(".")
    if parts[-1] in _ROUTERS:
        return False
    if _FFN_PARTS.intersection(parts) or parts[-1] in _FFN_ENDS:
        return True
    if len(parts) < 2 or parts[-1] != "dense":
        return False
    return parts[-2] == "intermediate" or (
        parts[-2] == "output" and parts[-3:-2] not in (["attention"], ["crossattention"])
    )


def ffn_rules(
    model: nn.Module, structure: Structure | None, all_blocks: bool = False
) -> dict[str, Structure | None]:
    """Rules for `replace_` that cover the feed-forward layers of every block but the first (the papers' rule).

    The first block is the one with the lowest number; a model with several stacks (encoder and decoder) keeps the
    first of each dense. all_blocks covers every block. The rules are full layer names.

    Raises: ValueError if the model has no feed-forward layers, or none outside the first block.
    """
    blocks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in linear_layers(model):
        numbered = re.match(r"(.*?)\.?(\d+)\.", name)
        if numbered and is_ffn(name):
            blocks[numbered[1]][int(numbered[2])].append(name)
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no layers known as feed-forward: give rules by name. Its linear layers: "
            f"{', '.join(list(linear_layers(model))[:12]) or 'none'}"
        )
    rules: dict[str, Structure | None] = {}
    for numbers in blocks.values():
        for number in sorted(numbers)[0 if all_blocks else 1 :]:
            rules |= dict.fromkeys(numbers[number], structure)
    if not rules:
        raise ValueError(
            f"{type(model).__name__} has one block, and the first block's feed-forward layers stay dense by default: "
            "cover all blocks, or use more layers"
        )
    return rules


# Fields that a family's model reads, and its config keeps, but that its config class doesn't declare.
_UNDECLARED: dict[str, set[str]] = {"starcoder2": {"head_dim"}}


def _known(overrides: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    known = {*config.to_dict(), *config.attribute_map, *_UNDECLARED.get(config.model_type, ())}
    for name in overrides:
        if name not in known:
            raise ValueError(f"{config.model_type} has no config field {name!r}{suggest(name, known)}")
    return dict(overrides)


def _from_file(path: Path, overrides: dict[str, Any]) -> PreTrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is not a model directory: it has no config.json")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False, **overrides)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(
            f"{file} is not a config that transformers {transformers.__version__} can read: {error}"
        ) from error


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
)


def _check_sizes(config: PreTrainedConfig) -> None:
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    for name, value in sizes.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    width, heads, groups = (sizes[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if (
        isinstance(heads, int)
        and isinstance(width, int)
        and not getattr(config, "head_dim", None)
        and width % heads
    ):
        raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class in `config.architectures`, else the family's causal language model, else its bare model."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if (
            isinstance(named, type)
            and issubclass(named, PreTrainedModel)
            and named.config_class is type(config)
        ):
            return named
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return cast(type[PreTrainedModel], auto._model_mapping[type(config)])
    raise ValueError(f"transformers has no model for a config of type {config.model_type!r}")

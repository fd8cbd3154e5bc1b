"""From a TrainConfig to the things a training loop works on: data, model, guide, optimiser."""

import hashlib
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamella._version import __version__
from lamella.data import Batches, Dataset, open_dataset, tokenizer_digest
from lamella.nn import Guide, guide_, replace_, structured_layers
from lamella.optim import param_groups
from lamella.structures import parse_structure
from lamella.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


# Up to this context eager attention trains faster on a CPU: 1.2-1.8x at 128 tokens, where torch's fused attention
# spends half of the step in its bf16 backward; at 256 the fused one is ahead.
EAGER_CONTEXT = 128


@dataclass(kw_only=True)
class Run:
    """What the loop works on. training_flops, guided_training_flops: per token, without and with the guide."""

    config: TrainConfig
    dataset: Dataset
    model: "PreTrainedModel"
    optimizer: torch.optim.Optimizer
    guide: Guide | None
    batches: Batches
    training_flops: int
    guided_training_flops: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)

    @property
    def flops_per_step(self) -> int:
        """Of the next step, in whole FLOPs."""
        per_token = self.training_flops if self.guide is None else self.guided_training_flops
        return per_token * self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.batches.batch_size * self.batches.context


def resolve(config: TrainConfig) -> "tuple[TrainConfig, Dataset, PreTrainedConfig]":
    """Fill in what the configuration leaves to be chosen, open the data and read the model's config.

    Raises: ValueError if the data, the model or the machine can't be used, or they don't fit each other.
    """
    from lamella.hub import PRESETS, build_model, load_config

    device = _device(config.device)
    dataset = (
        _austen(config.tokenizer) if config.data == "austen" else open_dataset(config.data, config.tokenizer)
    )
    own = load_config(config.model)
    changes: dict[str, Any] = {} if config.ffn_width is None else {"intermediate_size": config.ffn_width}
    positions = getattr(own, "max_position_embeddings", None)
    context = config.context or positions
    if context is None:
        raise ValueError(f"the config of {config.model} has no max_position_embeddings: give context")
    if config.model in PRESETS:
        changes |= {"vocab_size": dataset.vocab_size, "max_position_embeddings": context}
    elif positions is not None and context > positions:
        raise ValueError(f"context={context} is more than the {positions} positions of {config.model}")
    elif own.vocab_size < dataset.vocab_size:
        raise ValueError(
            f"{config.model} has a vocabulary of {own.vocab_size} tokens, but the tokenizer {dataset.tokenizer_spec!r} "
            f"of the data one of {dataset.vocab_size}: give data with a smaller tokenizer"
        )
    hf_config = load_config(config.model, **changes) if changes else own
    resolved = config.replace(
        device=str(device),
        precision=_precision(config.precision, device),
        threads=config.threads or torch.get_num_threads(),
        context=context,
        tokenizer=dataset.tokenizer_spec,
    )
    for split in (dataset.train, dataset.validation, dataset.test):
        if split is not None and split.num_tokens < 2:
            raise ValueError(f"{split.name or 'a split'} has {split.num_tokens} tokens; it needs at least 2")
    _batches(resolved, dataset)
    structure_(build_model(hf_config, device="meta"), resolved)  # does each structure fit, each rule match?
    return resolved, dataset, hf_config


def build(config: TrainConfig, dataset: Dataset, hf_config: "PreTrainedConfig", guided: bool) -> Run:
    """Build the run of a resolved configuration. guided: with the guide, as at the start."""
    from lamella.hub import account

    model = initial_model(config, hf_config)
    model.to(torch.device(config.device))  # pyright: ignore
    if model.device.type == "cpu" and (config.context or 0) <= EAGER_CONTEXT:
        model.set_attn_implementation("eager")
    plain_flops = _training_flops(account, model, config)
    guide, guided_flops = None, plain_flops
    if guided:
        guide = guide_(model, config.guided_steps, config.guide_schedule)
        guided_flops = _training_flops(account, model, config)
    groups = param_groups(model, config.lr, config.weight_decay, config.base_width)
    for group in groups:
        group["initial_lr"] = group["lr"]
    seed_everything(_derived_seed(config.seed, "training"))
    return Run(
        config=config,
        dataset=dataset,
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True),
        guide=guide,
        batches=_batches(config, dataset),
        training_flops=plain_flops,
        guided_training_flops=guided_flops,
    )


def initial_model(config: TrainConfig, hf_config: "PreTrainedConfig") -> "PreTrainedModel":
    """The model at its initial weights, on the CPU.

    Layers that are not replaced, and have the same shape, start equal in all variants of a model and seed: the dense
    model is drawn first, at its own width, and the structures by a seed of their own.
    """
    from lamella.hub import build_model, load_config

    torch.manual_seed(config.seed)
    if config.ffn_width is None:
        model = build_model(hf_config, dtype=torch.float32)
    else:
        sizes = {n: getattr(hf_config, n) for n in ("vocab_size", "max_position_embeddings")}
        own = build_model(load_config(config.model, **sizes), dtype=torch.float32).state_dict()
        model = build_model(hf_config, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if own[name].shape == tensor.shape:
                    tensor.copy_(own[name])
    torch.manual_seed(_derived_seed(config.seed, "structures"))
    structure_(model, config)
    return model


def structure_(model: torch.nn.Module, config: TrainConfig) -> None:
    """Replace the layers that the configuration wants structured, in place."""
    from lamella.hub import ffn_rules

    if config.structure is not None:
        rules = ffn_rules(model, parse_structure(config.structure), config.all_blocks)
        replace_(model, rules, zero_last=config.zero_last)
    elif config.rules is not None:
        replace_(model, config.structure_rules(), zero_last=config.zero_last)


def environment(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """What a rerun depends on besides the configuration."""
    return {
        "versions": versions(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": config.threads,
        "data_digest": dataset.digest,
        "tokenizer_digest": tokenizer_digest(dataset.tokenizer),
    }


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"lamella": __version__, "python": platform.python_version(), **{p: version(p) for p in packages}}


@contextmanager
def pinned(config: TrainConfig) -> Iterator[None]:
    """Within it torch has the run's number of threads and, on the CPU, deterministic algorithms only."""
    threads = torch.get_num_threads()
    deterministic: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    torch.set_num_threads(config.threads or threads)
    if torch.device(config.device).type == "cpu":
        torch.use_deterministic_algorithms(True)
        deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0])
        deterministic.fill_uninitialized_memory = before[1]


def factor_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained factors of all structured layers by full name."""
    return {
        f"{name}.factors.{k}": factor
        for name, layer in structured_layers(model).items()
        for k, factor in enumerate(layer.factors)
        if factor.requires_grad
    }


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@lru_cache(maxsize=2)
def _austen(tokenizer: str | None) -> Dataset:
    """The embedded text, tokenised once for all the runs of a comparison."""
    return open_dataset("austen", tokenizer)


def _batches(config: TrainConfig, dataset: Dataset) -> Batches:
    assert config.context is not None
    return Batches(dataset.train, batch_size=config.batch_size, context=config.context, seed=config.seed)


def _training_flops(account: Any, model: torch.nn.Module, config: TrainConfig) -> int:
    return account(model, config.context, activations=False).training_flops


def _derived_seed(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:7])


def _device(given: str) -> torch.device:
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={given!r}: it must be cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={given!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _precision(given: str, device: torch.device) -> str:
    if given != "auto":
        return given
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = bool({"amx_bf16", "avx512_bf16"} & set(_cpuinfo("flags").split()))
    return "bf16" if fast else "fp32"


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _cpuinfo(key: str) -> str:
    """A line of Linux's /proc/cpuinfo; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")

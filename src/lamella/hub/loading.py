"""Loading a model directory strictly: safetensors only, and every key accounted for."""

import os
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lamella.hub.checkpoint import listed, stored_shapes, weight_files
from lamella.hub.presets import load_config, model_class
from lamella.hub.quiet import no_progress_bars


def load_model(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model in a directory that `export`, a training run or `save_pretrained` wrote, structured or plain.

    A run directory stands for its finished model. dtype: the saved one by default. Never uses the network.

    Raises: ValueError if the directory holds no model, only pickles, damaged files, or other keys than the model.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory")
    config = load_config(folder)
    stored_shapes(str(file) for file in weight_files(folder))
    quantization = getattr(config, "quantization_config", None)
    _check_method(folder, quantization)
    try:
        with no_progress_bars():
            model, info = cast(Any, model_class(config)).from_pretrained(
                folder,
                dtype=dtype or "auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (RuntimeError, OSError, SafetensorError) as error:
        raise ValueError(f"{folder} can't be loaded: {error}") from error
    faults = [
        f"{what.replace('_', ' ')}: {listed(sorted(map(str, info[what])))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[what]
    ]
    if faults:
        raise ValueError(
            f"the weights in {folder} are not those of {type(model).__name__}. {'; '.join(faults)}"
        )
    return model


def _check_method(folder: Path, quantization: object) -> None:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ValueError(f"{folder} is quantised by {method!r}, which this transformers doesn't know")

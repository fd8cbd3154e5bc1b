"""What is in a checkpoint's files, read from their headers."""

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lamella.nn import structured_layers

_FACTOR = re.compile(r"(^|\.)factors\.\d+$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def stored_shapes(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """{key: shape} of safetensors files, from their headers.

    Raises: ValueError for a pickle, or a file that is truncated or no safetensors file.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file} is not a safetensors file. Pickles can run code and are refused.")
        try:
            with safe_open(file, framework="pt") as stored:
                shapes |= {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    return shapes


def check_factors(model: PreTrainedModel, files: Iterable[str], shared: Collection[str] = ()) -> None:
    """Check that the files hold exactly the factors and biases of the model's structured layers.

    shared: names that stand for a parameter stored by another name; the files must not hold them.

    Raises: ValueError naming the missing, extra and misshapen keys.
    """
    expected = {
        f"{name}.{key}": tuple(value.shape)
        for name, layer in structured_layers(model).items()
        for key, value in layer.state_dict().items()
        if f"{name}.{key}" not in shared
    }
    layers = tuple(f"{name}." for name in structured_layers(model))
    prefix = f"{model.base_model_prefix}."
    stored = _renamed(stored_shapes(files), model)
    missing = [key for key in expected if key not in stored]
    misshapen = [
        f"{key} is {stored[key]}, not {shape}"
        for key, shape in expected.items()
        if stored.get(key, shape) != shape
    ]
    has_head = type(model).__name__ in (model.config.architectures or (type(model).__name__,))
    extra = [
        key
        for key in stored
        if key not in expected
        and (
            key.startswith(layers)
            or key.removeprefix(prefix).startswith(layers)
            or (_FACTOR.search(key) and (has_head or key.startswith(prefix)))
        )
    ]
    faults = [
        f"{what}: {listed(keys)}"
        for what, keys in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if keys
    ]
    if faults:
        raise ValueError(f"the checkpoint does not fit the structures in its config. {'; '.join(faults)}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model directory, by its index where it is sharded.

    Raises: ValueError if there are none, or one that the index names is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} can't be read: {error}") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ValueError(f"{index} names files that are missing: {listed(absent)}")
        return [folder / name for name in names]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code, and is refused. "
            "Save the model as safetensors."
        )
    raise ValueError(f"{folder} holds no model.safetensors")


def _renamed(shapes: dict[str, tuple[int, ...]], model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shapes by the names the keys have in this model, as transformers itself will rename them."""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state = model.state_dict()
    return {
        rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0]: shape
        for key, shape in shapes.items()
    }


def listed(names: list[str], most: int = 10) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
